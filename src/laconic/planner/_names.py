"""The shortest text that means the same codec."""

from __future__ import annotations

import re
from functools import cache

from laconic.codecs import codec

_OPTION = re.compile(r"[,:](?!bits=|error=|step=)[a-z_]+=[^,:()]+")


@cache
def short(spec: str) -> str:
    """Without the options that are as usual; how fine a codec is stays.

    >>> short("dqsg:bits=4,levels=7,block=512,coder=fixed")
    'dqsg:bits=4'
    """
    meant = str(codec(spec))
    text = spec
    for option in reversed(_OPTION.findall(spec)):  # the last is seldom the one that matters
        start = text.rfind(option)
        rest = text[start + len(option) :]
        if option[0] == ":" and rest[:1] == ",":
            rest = ":" + rest[1:]
        less = text[:start] + rest
        if _means(less) == meant:
            text = less
    return text


def _means(text: str) -> str | None:
    try:
        return str(codec(text))
    except ValueError:  # a ConfigError is one
        return None
