"""Parts of pages that have their source elsewhere: commands, modules, CONTRIBUTING.md.

A hook of MkDocs. `<!-- commands -->` becomes every command with its options, as the program itself
knows them; `<!-- modules -->` the public names of every public module that there is;
`<!-- contributing -->` the text of CONTRIBUTING.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_MODULES = {
    "codecs": "The classes behind the texts; [the page](codecs.md) has equations and bounds.",
    "exchanges": "[The page](exchanges.md) says which one when.",
    "schedules": "[The page](schedules.md) has rules and settings.",
    "planner": "[Probe and plan](planner.md), and [the model](performance-model.md).",
    "lab": "[The page](lab.md) has an example.",
    "doctor": "What `laconic doctor` does.",
    "testing": "What a codec of your own must pass.",
    "race": "What `laconic race` does.",
    "report": "What a race's report is made by.",
}
_QUIET = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with every page."""
    for made in (commands, modules, contributing):
        marker = f"<!-- {made.__name__} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, made())
    return markdown


def contributing() -> str:
    """Without its title, and with links as seen from this folder."""
    text = (_ROOT / "CONTRIBUTING.md").read_text().partition("\n")[2]
    return re.sub(r"\]\(docs/", "](", text)


def modules() -> str:
    """A section for each, its public names in the order of its file."""
    own = _ROOT / "src" / "laconic"
    found = []
    for name, words in _MODULES.items():
        if (own / name).is_dir() or (own / f"{name}.py").is_file():
            found.append(f"## laconic.{name}\n\n{words}\n\n::: laconic.{name}\n{_QUIET}")
    return "\n".join(found)


def commands() -> str:
    """All of them."""
    from typer.main import get_command

    from laconic.cli import app

    return "\n".join(_described("laconic", get_command(app)))


def _described(path: str, command: Any) -> Iterator[str]:
    """A heading, what it says of itself, its options and examples; then its sub-commands."""
    children = getattr(command, "commands", {})
    if path != "laconic":
        yield f"## {path}\n"
        yield _words(inspect.cleandoc(command.help or "")) + "\n"
        if not children:
            yield from _options(command)
    yield from _epilog(command.epilog or "")
    for name, child in children.items():
        if not child.hidden:
            yield from _described(f"{path} {name}", child)


def _words(text: str) -> str:
    """Without rich's markup, and with brackets that are no links."""
    plain = re.sub(r"(?<!\\)\[/?[a-z ]*\]", "", text).replace("\\[", "[")
    return plain.replace("[", "\\[")


def _epilog(text: str) -> Iterator[str]:
    """Examples, a line each, up to an empty line; words behind it."""
    lines, _, rest = text.partition("\n\n")
    typed = [line.replace("\\[", "[") for line in lines.splitlines()[1:]]
    if typed:
        yield "\n".join(["```sh", *typed, "```", ""])
    if rest:
        yield _words(rest) + "\n"


def _options(command: Any) -> Iterator[str]:
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    if not shown:
        return
    yield "| | | without it |\n|---|---|---|"
    for one in shown:
        names = ", ".join(one.opts) if one.param_type_name == "option" else str(one.name)
        words = _words(getattr(one, "help", None) or "").replace("|", "\\|").replace("\n", " ")
        yield f"| `{names}` | {words} | {_default(one)} |"
    yield ""


def _default(one: Any) -> str:
    if one.required:
        return "must be given"
    told = getattr(one, "show_default", None)
    if isinstance(told, str):
        return told
    value = one.default
    if value is None or value is False or callable(value) or value == ():
        return ""
    value = getattr(value, "value", value)
    return "yes" if value is True else f"`{value}`"
