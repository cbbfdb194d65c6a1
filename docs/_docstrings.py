"""Docstrings as Markdown: examples that begin with >>> become blocks of code.

An extension of Griffe, which reads the sources for mkdocstrings.
"""

from __future__ import annotations

import inspect
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Fences around every paragraph that is an example."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called with every module, class, function and attribute."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Paragraphs are separated by empty lines; an example is one."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        f"```pycon\n{part}\n```" if part.lstrip().startswith(">>>") else part for part in parts
    )
