"""laconic codecs: what there is, said by the classes themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from laconic._wire import HEADER_BYTES
from laconic.cli._common import print_json
from laconic.codecs import Codec, codec, codecs, wrappers
from laconic.coders import coders
from laconic.errors import ConfigError
from laconic.exchanges import default_exchange, exchange, exchanges
from laconic.planner._names import short
from laconic.schedules import QSVRG, SSD, AsyncSGD, LocalSGD

_VALUES = 1 << 20  # bits are told of so many
_WIDTH = 110  # narrower terminals wrap lines
_CODERS = {
    "fixed": "packed codes of `bits` each; under ecdq, bit planes as wide as each chunk needs",
    "elias": "QSGD's Elias omega code, sparse or dense, whichever is shorter; CPUs only",
    "elias-sparse": "QSGD's Elias omega code, always the sparse form; CPUs only",
    "elias-dense": "QSGD's Elias omega code, always the dense form; CPUs only",
    "bitmap": "which values are not zero, signs, unary levels; ecdq's usual one",
    "rans": "an entropy coder, given the spread of every 128 values and the dither; CPUs only",
}
_SCHEDULES: dict[str, tuple[type, str]] = {
    "ssd": (SSD, 'opt = lc.SSD(optimizer, model, period=4, codec="dqsg:bits=4")'),
    "local": (LocalSGD, 'opt = lc.LocalSGD(optimizer, model, period=8, codec="dqsg:bits=4")'),
    "async": (AsyncSGD, 'opt = lc.AsyncSGD(optimizer, model, servers=1, codec="dqsg:bits=4")'),
    "qsvrg": (QSVRG, "docs/schedules.md has an example of finite sums"),
}
_UNLIKELY = -1  # a value that no setting takes: refusing it, a class says what it takes
_ALLOWED = re.compile(r"(?:must (?:be|lie)|there are) (.*?)(?:[,;] not .*|; one bit .*)?$")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One of a codec or an exchange."""

    name: str
    value: str
    allowed: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the list. `bits` is None where it depends on the values."""

    name: str
    does: str
    unbiased: str
    summable: str
    bits: float | None


def run(name: str | None, as_json: bool) -> None:
    """List all, or explain one."""
    console = Console()
    console.width = max(_WIDTH, console.width)
    if name is None:
        found = everything()
        if as_json:
            print_json(found)
        else:
            _show_all(found, console)
        return
    one = explained(name)
    if as_json:
        print_json(one)
    else:
        _show_one(one, console)


def everything() -> dict[str, list[dict[str, Any]]]:
    """All that a text of lc.compress may name."""
    return {
        "codecs": [vars(_entry(codec(name))) for name in codecs()],
        "wrappers": [vars(_wrapper_entry(name)) for name in wrappers()],
        "coders": [{"name": name, "does": _CODERS.get(name, "")} for name in coders()],
        "exchanges": [{"name": name, "does": _first(exchange(name))} for name in exchanges()],
        "schedules": [
            {"name": name, "does": _first_line(kind)} for name, (kind, _) in _SCHEDULES.items()
        ],
    }


def explained(text: str) -> dict[str, Any]:
    """One, with its settings; ConfigError names the nearest if there is none."""
    word = re.split("[:(]", text)[0].strip()
    if word in (*codecs(), *wrappers()):
        bare = word in wrappers() and "(" not in text
        own = codec(f"{text}(dqsg:bits=4)" if bare else text)
        entry = _wrapper_entry(word) if bare else _entry(own)
        example = short(str(own))
        return {
            "kind": "wrapper" if word in wrappers() else "codec",
            **vars(entry),
            "about": _about(own),
            "settings": [vars(one) for one in _settings(own)],
            "exchange": str(default_exchange(own)),
            "example": f'lc.compress(model, "{example}")',
        }
    if text in exchanges():
        own = exchange(text)
        settings = [vars(one) for one in _settings(own)]
        carried = _carried(text)
        return {
            "kind": "exchange",
            "name": text,
            "does": _first(own),
            "about": _about(own),
            "settings": settings,
            "example": f'lc.compress(model, "{carried}@{text}")',
        }
    if text in coders():
        return {
            "kind": "coder",
            "name": text,
            "does": _CODERS.get(text, ""),
            "about": "",
            "settings": [],
            "example": f'lc.compress(model, "ecdq:error=0.08,coder={text}")',
        }
    if text.lower() in _SCHEDULES:
        kind, example = _SCHEDULES[text.lower()]
        return {
            "kind": "schedule",
            "name": text.lower(),
            "does": _first_line(kind),
            "about": "",
            "settings": [],
            "example": example,
        }
    known = [*codecs(), *wrappers(), *coders(), *exchanges(), *_SCHEDULES]
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"nothing is called {word!r}; {hint}laconic codecs lists what there is")


def _entry(own: Codec) -> Entry:
    body = own.nbytes(_VALUES) - HEADER_BYTES
    return Entry(
        name=own.name,
        does=_first(own),
        unbiased=_yes(own.unbiased),
        summable="in pairs" if hasattr(own, "reduce") else _yes(own.summable),
        bits=None if own.varies else 8 * body / _VALUES,
    )


def _wrapper_entry(name: str) -> Entry:
    """As it is around an unbiased codec and a biased one."""
    good, bad = codec(f"{name}(dqsg:bits=4)"), codec(f"{name}(qsgd-topk)")
    alike = good.unbiased == bad.unbiased
    return Entry(
        name=f"{name}(...)",
        does=_first(good),
        unbiased=_yes(good.unbiased) if alike else "as inside",
        summable=_yes(good.summable),
        bits=None,
    )


def _carried(name: str) -> str:
    """A codec that this exchange carries."""
    way = exchange(name)
    for text in ("dqsg:bits=4", "global:bits=8", "global-exp:bits=8", "ndqsg"):
        try:
            way.check(codec(text))
        except ConfigError:
            continue
        return text
    return "global:levels=127,norm=l2,coder=elias"  # sparse takes nothing else


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _first(own: object) -> str:
    return _first_line(type(own))


def _first_line(kind: type) -> str:
    """Of a class's docstring, without the name in front."""
    line = (inspect.getdoc(kind) or "").split("\n")[0]
    return re.sub(r"^`[^`]*`: ", "", line)


def _about(own: object) -> str:
    """Its class's docstring behind the first line, without the example that tests run."""
    text = inspect.getdoc(type(own)) or ""
    return text.partition("\n")[2].partition(">>>")[0].strip()


def _settings(own: object) -> list[Setting]:
    found = []
    for field in fields(own):  # pyright: ignore[reportArgumentType] (they are dataclasses)
        if field.init and field.name != "inner":
            value = getattr(own, field.name)
            told = "tensor" if value is None and field.name == "block" else str(value)
            told = {"True": "true", "False": "false", "None": "not set"}.get(told, told)
            allowed = _allowed(own, field.name)
            found.append(Setting(name=field.name, value=told, allowed=allowed))
    return found


def _allowed(own: Any, name: str) -> str:
    """What a setting may be, from the sentence that refuses what it may not be."""
    others: Mapping[str, Any] = {"inner": own.inner} if hasattr(own, "inner") else {}
    try:
        type(own)(**others, **{name: _UNLIKELY})
    except ConfigError as error:
        match = _ALLOWED.search(str(error))
        return match[1] if match else ""
    except Exception:
        pass
    return ""


def _show_all(found: dict[str, list[dict[str, Any]]], console: Console) -> None:
    table = _table("codecs, and wrappers of any codec")
    for name in ("name", "what it does", "unbiased", "summable", "bits a value"):
        table.add_column(name, no_wrap=name != "what it does")
    for one in found["codecs"] + found["wrappers"]:
        table.add_row(one["name"], one["does"], one["unbiased"], one["summable"], _bits(one))
    console.print(table)
    for kind in ("coders", "exchanges", "schedules"):
        table = _table(kind)
        table.add_column("name", no_wrap=True)
        table.add_column("what it does")
        for one in found[kind]:
            table.add_row(one["name"], one["does"])
        console.print(table)
    console.print(
        f"Bits: of {_VALUES:,} values, at the usual settings. One of them: laconic codecs ecdq"
    )


def _show_one(one: dict[str, Any], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    say(f"{one['name']} ({one['kind']}): {one['does']}\n")
    say(f"    {one['example']}\n")
    if "bits" in one:
        say(
            f"unbiased: {one['unbiased']}. Wires can be summed: {one['summable']}. Bits a value: "
            f"{_bits(one)}. Travels by {one['exchange']} unless an exchange is named."
        )
    if one["settings"]:
        table = _table("settings")
        for name in ("setting", "value", "allowed"):
            table.add_column(name)
        for setting in one["settings"]:
            table.add_row(setting["name"], setting["value"], setting["allowed"])
        console.print(table)
    if one["about"]:
        say(one["about"])


def _bits(one: dict[str, Any]) -> str:
    if one["bits"] is not None:
        return f"{one['bits']:.2f}"
    return "as inside" if one["name"].endswith("(...)") else "what values need"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
