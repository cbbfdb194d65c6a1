"""laconic codecs: what a spec may name, as the classes themselves describe it."""

from __future__ import annotations

import inspect
import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic._settings import settings_of
from laconic.cli._common import Json, console, examples, print_json, table
from laconic.cli._names import complete
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from laconic.codecs import Codec

EPILOG = examples(
    "laconic codecs",
    "laconic codecs ecdq",
    "laconic codecs 'rotate(dqsg:bits=2)' --json",
)
_VALUES = 1 << 20  # bits per value are those of a tensor of this size
_WIDTH = 110
Entry = dict[str, Any]  # what is printed of one, as in JSON


def codecs_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One of them, or the spec string of a codec, such as dqsg:bits=4.",
            show_default="all, one line each",
            autocompletion=complete("codecs", "wrappers", "coders", "exchanges"),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List all codecs, wrappers, coders, exchanges and schedules, or explain one."""
    found = listed() if name is None else explained(name)
    if as_json:
        print_json(found)
    elif name is None:
        _show_all(found, console(_WIDTH))
    else:
        _show_one(found, console(_WIDTH))


def listed() -> dict[str, list[Entry]]:
    """Everything that a spec of lc.compress may name, and the schedules."""
    import laconic as lc
    from laconic.coders import coder, coders
    from laconic.exchanges import exchange

    return {
        "codecs": [_codec_entry(lc.codec(name)) for name in lc.codecs()],
        "wrappers": [_wrapper_entry(name) for name in lc.wrappers()],
        "coders": [{"name": name, "does": coder(name).does} for name in coders()],
        "exchanges": [
            {"name": name, "does": _summary(type(exchange(name)))} for name in lc.exchanges()
        ],
        "schedules": [
            {"name": name, "does": _summary(kind)} for name, (kind, _) in _schedules().items()
        ],
    }


def explained(text: str) -> Entry:
    """One of them, with its settings; ConfigError names the nearest if there is none."""
    import laconic as lc
    from laconic.coders import coder, coders

    word = re.split("[:(]", text)[0].strip()
    if word in (*lc.codecs(), *lc.wrappers()):
        return _explained_codec(text, word)
    name = text.lower()
    if text in lc.exchanges():
        return _explained_exchange(text)
    if text in coders():
        example = f'lc.compress(model, "ecdq:error=0.08,coder={text}")'
        return _explanation("coder", text, coder(text).does, example)
    schedules = _schedules()
    if name in schedules:
        kind, example = schedules[name]
        return _explanation("schedule", name, _summary(kind), example)
    known = [*lc.codecs(), *lc.wrappers(), *coders(), *lc.exchanges(), *schedules]
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"unknown name {word!r}; {hint}laconic codecs lists all names")


def _schedules() -> dict[str, tuple[type, str]]:
    """The classes of schedules by name, each with an example of its use."""
    from laconic.schedules import QSVRG
    from laconic.schedules._costs import registered

    found = {}
    for name, kind in registered().items():
        cost = next(iter(kind.cost.planned()), kind.cost())  # settings that are usual
        found[name] = kind, f"opt = {cost.code('dqsg:bits=4', 'dqsg:bits=4')}"
    return {**found, "qsvrg": (QSVRG, "docs/schedules.md has an example of finite sums")}


def _explanation(kind: str, name: str, does: str, example: str, **more: Any) -> Entry:
    entry = {"kind": kind, "name": name, "does": does, "about": "", "settings": []}
    return {**entry, **more, "example": example}


def _explained_codec(text: str, word: str) -> Entry:
    import laconic as lc
    from laconic.exchanges import default_exchange
    from laconic.planner._strategy import short

    wrapper = word in lc.wrappers()
    bare = wrapper and "(" not in text
    own = lc.codec(f"{text}(dqsg:bits=4)" if bare else text)
    return _explanation(
        "wrapper" if wrapper else "codec",
        **(_wrapper_entry(word) if bare else _codec_entry(own)),
        about=_about(type(own)),
        settings=_settings(own),
        exchange=str(default_exchange(own)),
        example=f'lc.compress(model, "{short(str(own))}")',
    )


def _explained_exchange(name: str) -> Entry:
    from laconic.exchanges import exchange

    own = exchange(name)
    return _explanation(
        "exchange",
        name,
        _summary(type(own)),
        f'lc.compress(model, "{_codec_for(name)}@{name}")',
        about=_about(type(own)),
        settings=_settings(own),
    )


def _codec_entry(own: Codec) -> Entry:
    """`bits` is None where they depend on the values."""
    from laconic._wire import HEADER_BYTES

    body = own.nbytes(_VALUES) - HEADER_BYTES
    return {
        "name": own.name,
        "does": _summary(type(own)),
        "unbiased": _yes(own.unbiased),
        "summable": "in pairs" if own.pairwise else _yes(own.summable),
        "bits": None if own.varies else 8 * body / _VALUES,
    }


def _wrapper_entry(name: str) -> Entry:
    """As it is around an unbiased codec and a biased one."""
    from laconic.codecs import codec

    good, bad = codec(f"{name}(dqsg:bits=4)"), codec(f"{name}(qsgd-topk)")
    return {
        "name": f"{name}(...)",
        "does": _summary(type(good)),
        "unbiased": _yes(good.unbiased) if good.unbiased == bad.unbiased else "as inside",
        "summable": _yes(good.summable),
        "bits": None,
    }


def _codec_for(name: str) -> str:
    """A codec that this exchange can carry."""
    from laconic.codecs import codec
    from laconic.exchanges import exchange

    way = exchange(name)
    for text in ("dqsg:bits=4", "global:bits=8", "global-exp:bits=8", "ndqsg"):
        try:
            way.check(codec(text))
        except ConfigError:
            continue
        return text
    return "global:levels=127,norm=l2,coder=elias"  # the only one that sparse takes


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _summary(kind: type) -> str:
    """First line of the docstring, without the name at its front."""
    line = (inspect.getdoc(kind) or "").split("\n")[0]
    return re.sub(r"^`[^`]*`: ", "", line)


def _about(kind: type) -> str:
    """The docstring after the first line, without the doctest."""
    text = inspect.getdoc(kind) or ""
    return text.partition("\n")[2].partition(">>>")[0].strip()


def _settings(own: object) -> list[dict[str, str]]:
    words = {"True": "true", "False": "false", "None": "not set"}
    return [
        {
            "name": name,
            "value": "tensor" if (name, value) == ("block", None) else words.get(text, text),
            "allowed": allowed,
        }
        for name, value, allowed in settings_of(own)
        for text in [str(value)]
    ]


def _show_all(found: dict[str, list[Entry]], out: Console) -> None:
    columns = "name", "what it does", "unbiased", "summable", "bits per value"
    rows = table("codecs, and wrappers of any codec", *columns, numbers=False)
    for one in found["codecs"] + found["wrappers"]:
        rows.add_row(one["name"], one["does"], one["unbiased"], one["summable"], _bits(one))
    out.print(rows)
    for kind in ("coders", "exchanges", "schedules"):
        rows = table(kind, *columns[:2], numbers=False)
        for one in found[kind]:
            rows.add_row(one["name"], one["does"])
        out.print(rows)
    out.print(
        f"Bits per value: for {_VALUES:,} values, default settings. For details: laconic codecs "
        "ecdq"
    )


def _show_one(one: Entry, out: Console) -> None:
    def say(text: str) -> None:
        out.print(text, markup=False, highlight=False)

    say(f"{one['name']} ({one['kind']}): {one['does']}\n")
    say(f"    {one['example']}\n")
    if "bits" in one:
        say(
            f"Unbiased: {one['unbiased']}. Wires can be summed: {one['summable']}. Bits per "
            f"value: {_bits(one)}. Default exchange: {one['exchange']}."
        )
    if one["settings"]:
        rows = table("settings", "setting", "value", "allowed", numbers=False)
        for setting in one["settings"]:
            rows.add_row(*setting.values())
        out.print(rows)
    if one["about"]:
        say(one["about"])


def _bits(one: Entry) -> str:
    if one["bits"] is not None:
        return f"{one['bits']:.2f}"
    return "as inside" if one["name"].endswith("(...)") else "depends on values"
