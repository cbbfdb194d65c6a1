"""Codecs declare what they can do: no code outside `codecs/` asks for names or classes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import laconic
from laconic import QSGD, Key
from laconic.codecs import codec, codecs, wrappers

PACKAGE = Path(laconic.__file__).parent
SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if PACKAGE / "codecs" not in p.parents)

NAMES = {*codecs(), *wrappers()}
CODECS = [codec(name) for name in codecs()] + [codec(f"{name}(dqsg)") for name in wrappers()]
CLASSES = {type(own).__name__ for own in CODECS}
ATTRIBUTES = {name for own in CODECS for name in dir(own) if not name.startswith("__")}
# what codecs share with exchanges, dataclasses and the like tells nothing of codecs
ATTRIBUTES -= {"name", "id"}
# what a variable is called that holds a codec
VARIABLES = {"codec", "own", "inner", "wrapped", "pull_codec", "plain_codec"}


def switches(source: str) -> list[str]:
    """Questions about a codec's name, class or attributes, as text."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(source)) if _asks(node)]


def _asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("hasattr", "getattr") and len(node.args) > 1:
            return _text(node.args[1]) in ATTRIBUTES or (
                _is_codec(node.args[0]) and isinstance(node.args[1], ast.Constant)
            )
        if node.func.id in ("isinstance", "issubclass"):
            return any(_is_class(part) for part in ast.walk(node.args[1]))
    if isinstance(node, ast.MatchClass):
        return _is_class(node.cls)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        classes = any(_is_class(side) for side in sides)
        return classes or any(map(_is_named, sides)) or _compares_texts(sides)
    if isinstance(node, ast.Match):
        return _is_named(node.subject)
    # a table by names is a switch, too
    return isinstance(node, ast.Subscript) and _is_named(node.slice)


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and _last(node) in CLASSES


def _is_codec(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and _last(node) in VARIABLES


def _is_named(node: ast.AST) -> bool:
    """codec.name, codec.id, str(codec), type(codec)."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("name", "id", "__class__") and _is_codec(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        return node.func.id in ("str", "type") and _is_codec(node.args[0])
    return False


def _compares_texts(sides: list[ast.expr]) -> bool:
    """anything.name with the name of a codec."""
    names = any(isinstance(side, ast.Attribute) and side.attr == "name" for side in sides)
    texts = (part for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant))
    return names and any(part.value in NAMES for part in texts)


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _text(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


ALLOWED = {
    "state['codec'] != str(self.codec)",  # that a saved state is of the same settings
    "0 <= own.id <= 255",  # laconic.testing checks names and ids themselves
    "getattr(own, 'name', None)",
    "own.name not in (*codecs(), *wrappers())",
}


def test_no_code_asks_which_codec_it_has() -> None:
    found = {
        str(path.relative_to(PACKAGE)): set(switches(path.read_text())) - ALLOWED
        for path in SOURCES
    }
    assert not {path: texts for path, texts in found.items() if texts}, (
        "declare on laconic.Codec what the codec can do, and ask for that"
    )


@pytest.mark.parametrize(
    "source",
    [
        'if codec.name == "none": ...',
        'if own.pull_codec.name != "none": ...',
        'plain = one.name in ("fp16", "global")',
        "if codec.name == PLAIN: ...",
        "if self.codec.id == 3: ...",
        "_TABLE[codec.name]()",
        'match codec.name:\n    case "qsgd": ...',
        "match codec:\n    case NDQSG(): ...",
        'hasattr(codec, "local_norm")',
        'getattr(self.inner, "subtract", False)',
        'hasattr(anything, "reduce")',
        "isinstance(codec, NDQSG)",
        "isinstance(codec, (int, lc.Global))",
        "isinstance(x, Rotate | Feedback)",
        "type(codec) is DQSG",
        'str(state.codec) != "none"',
    ],
)
def test_a_question_about_a_codec_is_seen(source: str) -> None:
    assert switches(source)


@pytest.mark.parametrize(
    "source",
    [
        "if codec.lossless: ...",
        "if isinstance(spec, Codec): ...",
        'if exchange.name == "ring": ...',
        'hasattr(data, "__len__")',
        "getattr(own, field.name)",
        'text = f"{codec.name} is not summable"',
        "name = str(codec)",
    ],
)
def test_what_is_no_question_about_a_codec_is_allowed(source: str) -> None:
    assert not switches(source)


def test_what_a_codec_does_not_declare_it_refuses() -> None:
    x, own = torch.ones(3), codec("qsgd")
    wire = own.encode(x, Key())
    for call in (
        lambda: own.local_norm(x),
        lambda: own.global_norm(x),
        lambda: own.levels_for(2),
        lambda: own.reduce(wire, wire, Key()),
    ):
        with pytest.raises(TypeError, match=r"qsgd .* is False"):
            call()


def test_old_names_of_declarations_still_work() -> None:
    with pytest.warns(DeprecationWarning, match="residuals"):
        assert codec("feedback(qsgd)").remembers
    with pytest.warns(DeprecationWarning, match="side_information"):
        assert codec("ndqsg").needs_side
    with pytest.warns(DeprecationWarning, match="residuals"):

        class Old(QSGD):
            remembers: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride]

    assert Old().residuals
