"""Which parameters are worth compressing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from laconic.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Policy:
    """By default matrices (and larger arrays) of 10,000 values or more; the rest travels as it is.

    Biases and norms are few values and sensitive ones; over 99% of most models is compressed.
    """

    min_numel: int = 10_000
    min_dims: int = 2

    def __post_init__(self) -> None:
        for name in ("min_numel", "min_dims"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"Policy.{name} must be an integer from 0, not {value!r}")

    def __call__(self, name: str, parameter: nn.Parameter) -> bool:
        """True if this parameter's gradient is to be compressed."""
        return parameter.numel() >= self.min_numel and parameter.dim() >= self.min_dims
