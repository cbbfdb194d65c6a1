"""Blocks of code in documents, and what must be true of each kind; `Wrong` says what is not."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import textwrap
import tomllib
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from helpers import PATIENCE_S

import laconic as lc

ROOT = Path(__file__).parent.parent
SHELLS = ("sh", "bash", "console")
# languages without a rule: why that is all right
EXEMPT = {
    "text": "output, as it looked once",
    "vectors": "tests/codecs/test_vectors.py compares them byte for byte",
}
OWN_SCRIPTS = ("train.py",)  # names that stand for the reader's own program
# programs that start others: what they are given is looked at, their own options are not
LAUNCHERS = ("torchrun", "accelerate", "srun", "horovodrun", "torchx")
OTHERS = (
    "cd",
    "export",
    "git",
    "tensorboard",
    "ssh",
    "open",
    "echo",
    "head",
)  # nothing of ours to check

DOCKER = ("FROM", "WORKDIR", "COPY", "RUN", "CMD", "ENV", "USER")

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
_EXAMPLE = re.compile(r"^#\s*(examples/\S+\.py)\s*$")


class Wrong(Exception):  # noqa: N818 (it reads as a sentence: raise Wrong(...))
    """A block that would not work for its reader."""


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        """Where it is."""
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> Iterator[Block]:
    """All fenced blocks of a document, those in lists too."""
    opened: re.Match[str] | None = None
    start, kept = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if opened is None:
            if found:
                opened, start, kept = found, number, []
        elif found and not found["info"].strip() and found["fence"].startswith(opened["fence"]):
            language = (opened["info"].split() or [""])[0]
            yield Block(page, start, language, textwrap.dedent("\n".join(kept)) + "\n")
            opened = None
        else:
            kept.append(line)
    if opened is not None:
        raise Wrong(f"{page}:{start}: a fence is never closed")


# -- Python


def example_of(text: str) -> tuple[Path, str] | None:
    """The file that a block's first line names, and the rest of the block."""
    first, _, rest = text.partition("\n")
    found = _EXAMPLE.match(first.lstrip(" +-"))
    return (ROOT / found[1], rest) if found else None


def check_example(path: Path, rest: str) -> None:
    """A block that shows a file shows it as it is."""
    if not path.is_file():
        raise Wrong(f"there is no {path.relative_to(ROOT)}")
    text = path.read_text()
    if rest.strip("\n") not in (text.strip("\n"), text.partition("\n")[2].strip("\n")):
        raise Wrong(f"the block is not {path.relative_to(ROOT)} as it is now: copy it again")


def check_diff(text: str) -> None:
    """Both sides are Python; what is added calls what laconic has, as it must be called.

    Where the first line names an example, its lines after the change are lines of that file, in
    that order.
    """
    example = example_of(text)
    lines = (example[1] if example else text).splitlines()
    for line in lines:
        if line and line[0] not in " +-":
            raise Wrong(f"a line of a diff begins with a space, + or -, not as {line!r} does")
    before = textwrap.dedent("\n".join(line[1:] for line in lines if line[:1] != "+"))
    after = textwrap.dedent("\n".join(line[1:] for line in lines if line[:1] != "-"))
    if before == after:
        raise Wrong("nothing is changed")
    for side in (before, after):
        try:
            tree = ast.parse(side)
        except SyntaxError as error:
            raise Wrong(f"one side is no Python: {error}") from error
    check_calls(tree)
    if example:
        _check_lines(example[0], after)


def _check_lines(path: Path, text: str) -> None:
    if not path.is_file():
        raise Wrong(f"there is no {path.relative_to(ROOT)}")
    there = iter([line.strip() for line in path.read_text().splitlines()])
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line not in there:  # an iterator: the search goes on behind what was found
            raise Wrong(f"{path.relative_to(ROOT)} has no line {line!r}, or not there")


def check_calls(tree: ast.AST) -> None:
    """Names of laconic exist, take the arguments they are given, and understand the texts.

    What stands in `try` may be refused on purpose.
    """
    tried = {
        id(one) for node in ast.walk(tree) if isinstance(node, ast.Try) for one in _below(node)
    }
    for node in ast.walk(tree):
        if _is_ours(node):
            _ours(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_ours(node.func) and id(node) not in tried:
            _check_call(_ours(node.func), node)


def _ours(node: ast.AST) -> str:
    """The name behind `lc.`, which must exist."""
    assert isinstance(node, ast.Attribute)
    if not hasattr(lc, node.attr):
        raise Wrong(f"laconic has no {node.attr}")
    return node.attr


def _below(node: ast.Try) -> Iterator[ast.AST]:
    for statement in node.body:
        yield from ast.walk(statement)


def _is_ours(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("lc", "laconic")
    )


def _check_call(name: str, call: ast.Call) -> None:
    called = getattr(lc, name)
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    named = {one.arg: one.value for one in call.keywords if one.arg}
    if not starred and len(named) == len(call.keywords):
        overloads = typing.get_overloads(called) if inspect.isfunction(called) else []
        forms = [inspect.signature(one) for one in overloads or [called]]
        if not any(_binds(form, len(call.args), named) for form in forms):
            raise Wrong(f"lc.{name} does not take these arguments: {ast.unparse(call)}")
    for text in _texts(name, call.args, named):
        try:
            lc.pair(text)
        except lc.ConfigError as error:
            raise Wrong(f"lc.{name}: {error}") from error


def _binds(form: inspect.Signature, count: int, named: dict[str, Any]) -> bool:
    try:
        form.bind(*[None] * count, **named)
    except TypeError:
        return False
    return True


def _texts(name: str, args: Sequence[ast.expr], named: dict[str, ast.expr]) -> Iterator[str]:
    """What names a codec."""
    place = {"compress": 1, "HookState": 1, "codec": 0, "pair": 0}.get(name)
    asked = [named[one] for one in ("codec", "pull_codec", "weights", "spec") if one in named]
    if place is not None and len(args) > place:
        asked.append(args[place])
    for one in asked:
        text = one.value if isinstance(one, ast.Constant) else None
        if isinstance(text, str) and (name, text) != ("compress", "auto"):
            yield text


# -- Shell


def lines_typed(block: Block) -> list[str]:
    """Without prompts, and (behind prompts) without what the program said."""
    text = block.text.replace("\\\n", " ")
    lines = text.splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
        if not lines:
            raise Wrong("a console block has no line that begins with $")
    return lines


def check_shell(block: Block) -> list[list[str]]:
    """Every command is one that works; those of laconic are returned, as lists of words."""
    lines = lines_typed(block)
    done = subprocess.run(
        ["bash", "-n"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode or done.stderr:
        raise Wrong(f"bash does not understand it: {done.stderr.strip()}")
    return [own for line in lines for words in _commands(line) for own in check_command(words)]


def _commands(line: str) -> Iterator[list[str]]:
    """A line's commands, between && and the like, without variables in front."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.commenters, words.whitespace_split = "#", True
    found: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= set("();<>|&"):
            while found and re.match(r"^\w+=", found[0]):
                found = found[1:]
            if found:
                yield found
            found = []
        else:
            found.append(word)


def check_command(words: Sequence[str]) -> list[list[str]]:
    """One command; the arguments of `laconic` in it, if there are any."""
    program, rest = Path(words[0]).name, list(words[1:])
    if program == "laconic":
        parse(rest)
        behind = rest[rest.index("--") + 1 :] if "--" in rest else []
        return [rest, *(check_command(behind) if behind else [])]
    if program in LAUNCHERS:
        return _check_started(rest)
    if program in ("python", "python3"):
        return _check_started(rest)
    if program == "make":
        check_make(rest)
    elif program == "mkdocs" or program in OTHERS:
        pass
    elif program == "pip":
        check_pip(rest)
    else:
        raise Wrong(f"{program}: the test knows no rule for it, and somebody must think of one")
    return []


def _check_started(words: Sequence[str]) -> list[list[str]]:
    """What Python or a launcher starts: a module, or a script."""
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            return _check_module(words[place + 1], list(words[place + 2 :]))
        if Path(word).name in (*LAUNCHERS, "python", "python3") and place:
            return _check_started(words[place + 1 :])
        if word.endswith(".py"):
            if word not in OWN_SCRIPTS and not (ROOT / word).is_file():
                raise Wrong(f"there is no {word} here")
            return []
    return []


def _check_module(name: str, rest: list[str]) -> list[list[str]]:
    if name == "laconic":
        parse(rest)
        return [rest]
    if name.startswith("benchmarks."):
        if not (ROOT / f"{name.replace('.', '/')}.py").is_file():
            raise Wrong(f"there is no module {name}")
    elif name == "pytest":
        for word in rest:
            if "/" in word and not (ROOT / word.partition("::")[0]).exists():
                raise Wrong(f"there is no {word}")
    elif find_spec(name.partition(".")[0]) is None:
        raise Wrong(f"there is no module {name}")
    return []


def check_make(words: Sequence[str]) -> None:
    """Targets that the Makefile has."""
    there = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in words:
        if "=" not in word and not word.startswith("-") and word not in there:
            raise Wrong(f"the Makefile has no target {word}")


def check_dockerfile(text: str) -> None:
    """Instructions that Docker knows, FROM first; what RUN and CMD start works."""
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line]
    if not text.startswith("FROM "):
        raise Wrong("a Dockerfile begins with FROM")
    for number, (name, *rest) in enumerate(steps, 1):
        if name not in DOCKER or not rest:
            raise Wrong(f"no instruction of a Dockerfile: {' '.join([name, *rest])}")
        if name == "RUN":
            check_shell(Block("a Dockerfile", number, "sh", rest[0] + "\n"))
        elif name == "CMD":
            check_command(json.loads(rest[0]))


def check_pip(words: Sequence[str]) -> None:
    """Extras that pyproject.toml has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = set(project["optional-dependencies"])
    for word in words:
        found = re.match(r"^(?:laconic|\.|\./laconic)\[(.+)\]", word)
        for extra in found[1].split(",") if found else ():
            if extra.strip() not in there:
                raise Wrong(f"there is no extra {extra.strip()}")


# -- The command line


def parse(args: Sequence[str]) -> None:
    """As the program does, up to the point where it would run."""
    from typer.main import get_command

    from laconic.cli import app

    command: Any = get_command(app)
    try:
        context = command.make_context("laconic", list(args))
        while hasattr(command, "commands"):
            rest = [*context._protected_args, *context.args]
            if not rest:
                return
            name, command, rest = command.resolve_command(context, rest)
            context = command.make_context(name, rest, parent=context)
    except Exception as error:
        if getattr(error, "exit_code", None) == 0:  # --help, --version
            return
        told = getattr(error, "format_message", error.__str__)()
        raise Wrong(f"laconic {shlex.join(args)}: {told}") from error


def is_cheap(args: Sequence[str]) -> bool:
    """Worth running whole: needs no files, no ranks and no time."""
    if "--help" in args or "..." in args:
        return False
    on_paper = args[:1] == ["plan"] and not {"--probe", "--plot"} & set(args)
    return on_paper or args[:1] in (["codecs"], ["--version"])


def run(args: Sequence[str]) -> None:
    """Run it here; whatever goes wrong is Wrong."""
    from typer.main import get_command

    from laconic.cli import app

    try:
        status = get_command(app).main(list(args), standalone_mode=False)
    except Exception as error:
        raise Wrong(f"laconic {shlex.join(args)}: {error}") from error
    if status:
        raise Wrong(f"laconic {shlex.join(args)} ends with {status}")
