"""Which parameters are worth compressing, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from laconic.codecs import Codec
from laconic.errors import ConfigError

Choice = bool | str | Codec  # no, yes, or with a codec of its own
Chooser = Callable[[str, nn.Parameter], Choice]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """By default matrices (and larger arrays) of 10,000 values or more; the rest travels as it is.

    Biases and norms are few values and sensitive ones; over 99% of most models is compressed.
    `rules` come first: patterns of names, in order, each with True, False, or the text of a codec
    for these parameters alone (a finer budget for a head, say).

    >>> policy = Policy(rules={"head.*": "ecdq:error=0.02", "embed.*": False})
    >>> policy("head.weight", nn.Parameter(nn.Linear(100, 10).weight))
    'ecdq:error=0.02'
    """

    min_numel: int = 10_000
    min_dims: int = 2
    rules: Mapping[str, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("min_numel", "min_dims"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"Policy.{name} must be an integer from 0, not {value!r}")
        for pattern, choice in self.rules.items():
            if not isinstance(pattern, str) or not isinstance(choice, Choice):
                raise ConfigError(
                    "Policy.rules maps patterns of names to True, False or a codec, not "
                    f"{pattern!r} to {choice!r}"
                )

    def __call__(self, name: str, parameter: nn.Parameter) -> Choice:
        """Whether this parameter's gradient is to be compressed, or the codec to do it with."""
        for pattern, choice in self.rules.items():
            if fnmatchcase(name, pattern):
                return choice
        return parameter.numel() >= self.min_numel and parameter.dim() >= self.min_dims
