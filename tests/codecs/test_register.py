"""Specs of nested codecs: wrappers in parentheses, their settings behind, errors that help.

Specs of plain codecs are tested in test_codecs.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import laconic as lc
from laconic.codecs._register import build
from laconic.codecs._wrapper import Wrapper


@dataclass(frozen=True, kw_only=True)
class Turn(Wrapper):
    """A wrapper with a setting of its own, of which only the text matters here."""

    name: ClassVar[str] = "turn"

    block: int | None = 1024

    def variance_bound(self, d: int) -> float | None: ...
    def _header(self, *args: Any, **options: Any) -> Any: ...
    def _write(self, *args: Any, **options: Any) -> None: ...
    def _read(self, *args: Any, **options: Any) -> None: ...


KINDS: dict[str, type[lc.Codec]] = {
    kind.name: kind for kind in (lc.DQSG, lc.QSGD, lc.QSGDTopK, Turn, lc.Feedback)
}


def read(text: str) -> lc.Codec:
    return build(text, KINDS)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("turn(dqsg:bits=2)", Turn(inner=lc.DQSG(bits=2))),
        ("turn(dqsg:bits=2):block=2048", Turn(inner=lc.DQSG(bits=2), block=2048)),
        ("turn(dqsg):block=tensor", Turn(inner=lc.DQSG(), block=None)),
        ("turn(dqsg:block=64):block=2048", Turn(inner=lc.DQSG(block=64), block=2048)),
        ("turn(turn(qsgd):block=1):block=2", Turn(inner=Turn(inner=lc.QSGD(), block=1), block=2)),
        ("turn(qsgd):", Turn(inner=lc.QSGD())),
        (" turn ( qsgd : bits = 8 ) : block = 2 ", Turn(inner=lc.QSGD(bits=8), block=2)),
        ("feedback(qsgd-topk)", lc.Feedback(inner=lc.QSGDTopK())),
        (
            "feedback(turn(dqsg:bits=3):block=5)",
            lc.Feedback(inner=Turn(inner=lc.DQSG(bits=3), block=5)),
        ),
    ],
)
def test_nested_texts(text: str, wanted: lc.Codec) -> None:
    assert read(text) == wanted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("feedback(dqsg", "does not close its brackets: 1 ')' missing"),
        ("feedback(turn(dqsg)", "1 ')' missing"),
        ("feedback(turn(dqsg", "2 ')' missing"),
        ("feedback(", "1 ')' missing"),
        ("dqsg)", "closes a bracket that it did not open"),
        ("feedback(dqsg))", "closes a bracket that it did not open"),
        ("feedback)dqsg(", "closes a bracket that it did not open"),
        ("feedback()", "feedback() wraps nothing: write feedback(dqsg:bits=4)"),
        ("feedback( )", "wraps nothing"),
        ("feedback(turn())", "turn() wraps nothing"),
        ("feedbak(dqsg)", "did you mean feedback? (there are turn, feedback)"),
        ("twist(dqsg)", "no wrapper is called 'twist'"),
        ("(dqsg)", "there are turn, feedback"),
        ("dqsg(qsgd)", "dqsg is a codec and wraps no other"),
        ("dqsg()", "dqsg is a codec and wraps no other"),
        ("dqsg(bits=4)", "write dqsg alone, or a wrapper in its place (turn, feedback)"),
        ("feedback", "feedback wraps another codec: write feedback(dqsg:bits=4)"),
        ("feedback:block=4", "feedback wraps another codec"),
        ("feedback(turn)", "turn wraps another codec"),
        ("feedbck", "did you mean feedback(...)?"),
        ("feedback(dqgs)", "did you mean dqsg"),
        ("feedback(dqsg:bits=77)", "bits must be an integer from 2 to 8, not 77"),
        ("feedback(dqsg):bits=4", "settings of the codec inside go inside the parentheses"),
        ("turn(dqsg):blok=4", "turn has no setting 'blok'; did you mean block?"),
        ("turn(dqsg):inner=4", "turn has no setting 'inner'"),
        ("feedback(dqsg):memory=4", "feedback has no setting 'memory'; it has no settings"),
        ("turn(dqsg):block", "turn: settings look like"),
        ("turn(dqsg)block=4", "turn(...):setting=value, not 'block=4'"),
        ("turn(dqsg)(qsgd)", "turn(...):setting=value, not '(qsgd)'"),
        ("turn(dqsg) qsgd", "not 'qsgd'"),
        ("dqsg:bits=(4)", "brackets follow a wrapper's name directly"),
        ("feedback(dqsg,qsgd)", "no codec is called 'dqsg,qsgd'"),
        ("feedback(feedback(dqgs))", "did you mean dqsg"),
    ],
)
def test_bad_texts_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(lc.ConfigError) as error:
        read(text)
    assert says in str(error.value)


def test_wrappers_are_listed_apart_from_codecs() -> None:
    assert "feedback" in lc.wrappers()
    assert not set(lc.wrappers()) & set(lc.codecs())
    for name in lc.wrappers():
        assert lc.codec(f"{name}(dqsg)").name == name
        with pytest.raises(lc.ConfigError, match="wraps another codec"):
            lc.codec(name)


@pytest.mark.parametrize("inner", ["dqsg", None, lc.DQSG])
def test_only_codecs_are_wrapped(inner: object) -> None:
    with pytest.raises(lc.ConfigError, match="feedback wraps a codec, not"):
        lc.Feedback(inner=inner)  # pyright: ignore[reportArgumentType]


def test_the_old_name_of_decode_target_still_works() -> None:
    import laconic.codecs

    with pytest.warns(DeprecationWarning, match="DecodeTarget"):
        assert laconic.codecs.Into is laconic.codecs.DecodeTarget
