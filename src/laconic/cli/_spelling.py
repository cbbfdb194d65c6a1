"""Output on terminals and pipes that know fewer characters than we use."""

from __future__ import annotations

import codecs
import io
from typing import TextIO

_ERRORS = "laconic-spelling"
_SPELT = {
    "µ": "u",
    "×": "x",
    "±": "+-",
    "–": "-",
    "·": "*",
    "²": "^2",
    "Δ": "delta",
    "Σ": "sum",
    "√": "sqrt",
    "κ": "kappa",
    "λ": "lambda",
    "φ": "phi",
    "θ": "theta",
    "‖": "|",
    "│": "|",
    "─": "-",
    "≤": "<=",
    "≥": ">=",
    "←": "<-",
    "→": "->",
    "…": "...",
}


def respell(*streams: TextIO | None) -> None:
    """From now on what a stream cannot hold is spelt in ASCII, not a UnicodeEncodeError."""
    codecs.register_error(_ERRORS, _spelt)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def _spelt(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end]
    return "".join(_SPELT.get(one, "?") for one in part), error.end
