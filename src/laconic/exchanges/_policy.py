"""Which parameters are worth compressing, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import nn

from laconic._settings import whole
from laconic.codecs import Codec
from laconic.errors import ConfigError

Choice = bool | str | Codec  # no, yes, or with a codec of its own
Chooser = Callable[[str, nn.Parameter], Choice]


_LARGE = 10_000  # values: worth encoding in any model
_SMALL = 512  # .. where small matrices are more than a little of what trains
_SHARE = 0.01  # .. of all values that train


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which parameters are encoded: matrices (and larger arrays) of `min_numel` values or more.

    Biases and norms are few values and sensitive ones. By default `min_numel` follows the model.
    Matrices of one dtype are encoded together, and one of d values, with its own step, saves about

        2·(4·d - d·b/8 - s) bytes per rank and step

    at b bits per value and s = 40 bytes for its step and tables, for about 15 us of time. That pays
    off from some hundred values on, if there are enough of them to matter:

    1. Matrices of 10,000 values or more are encoded: over 99% of most models.
    2. So are those of 512 to 9,999 where together they have 10,000 values or more, and 1% of all
       that trains: adapters (LoRA) and small networks.

    `rules` come first: patterns of names, in order, each with True, False, or the spec string
    of a codec for these parameters alone (a finer budget for a head, say).

    >>> policy = Policy(rules={"head.*": "ecdq:error=0.02", "embed.*": False})
    >>> policy("head.weight", nn.Parameter(nn.Linear(100, 10).weight))
    'ecdq:error=0.02'
    >>> adapters = nn.ModuleList(nn.Linear(768, 8, bias=False) for _ in range(4))
    >>> Policy().for_parameters(adapters.named_parameters()).min_numel
    512
    """

    min_numel: int | None = None
    min_dims: int = 2
    rules: Mapping[str, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("min_numel", "min_dims"):
            if name != "min_numel" or self.min_numel is not None:
                whole(f"Policy.{name}", getattr(self, name), 0)
        for pattern, choice in self.rules.items():
            if not isinstance(pattern, str) or not isinstance(choice, Choice):
                raise ConfigError(
                    "Policy.rules maps patterns of names to True, False or a codec, not "
                    f"{pattern!r} to {choice!r}"
                )

    def __call__(self, name: str, parameter: nn.Parameter) -> Choice:
        """Whether this parameter's gradient is to be compressed, or the codec to do it with."""
        rule = self._rule(name)
        if rule is not None:
            return rule
        least = _LARGE if self.min_numel is None else self.min_numel
        return parameter.numel() >= least and parameter.dim() >= self.min_dims

    def for_parameters(self, named: Iterable[tuple[str, nn.Parameter]]) -> Policy:
        """This policy with `min_numel` settled for a model's parameters, by the rules above."""
        if self.min_numel is not None:
            return self
        trained = [(name, one) for name, one in named if one.requires_grad]
        small = sum(
            one.numel()
            for name, one in trained
            if _SMALL <= one.numel() < _LARGE
            and one.dim() >= self.min_dims
            and self._rule(name) is None
        )
        enough = max(_LARGE, _SHARE * sum(one.numel() for _, one in trained))
        return replace(self, min_numel=_SMALL if small >= enough else _LARGE)

    def _rule(self, name: str) -> Choice | None:
        return next(
            (choice for pattern, choice in self.rules.items() if fnmatchcase(name, pattern)), None
        )


def policy_for(policy: Chooser | None, named: Iterable[tuple[str, nn.Parameter]]) -> Chooser:
    """The policy to ask about these parameters: the default one, or settled for them."""
    policy = policy or Policy()
    return policy.for_parameters(named) if isinstance(policy, Policy) else policy
