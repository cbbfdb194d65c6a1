"""What SSD and AsyncSGD refuse, each with a sentence."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.optim import SGD, Adam, AdamW, Optimizer

from laconic.codecs import NDQSG, Codec, codec
from laconic.errors import ConfigError
from laconic.exchanges import ScatterReduce
from laconic.exchanges._nesting import check_nesting
from laconic.exchanges._preconditioner import BLOCKS, amplified, divides
from laconic.schedules._module import check_module, whole
from laconic.schedules._rules import AdamRule, LocalRule, MomentumRule
from laconic.server._shard import check_optimizer


def chosen_codec(spec: str | Codec, name: str, *, rounds: bool = False) -> Codec:
    """The codec of a text; ConfigError if owners of chunks cannot decode it.

    `rounds`: a server decodes, which knows other workers' gradients of the same step.
    """
    if isinstance(spec, str) and "@" in spec:
        raise ConfigError(
            f"{name}={spec!r}: the schedule is an exchange itself; leave out what is behind the @"
        )
    own = codec(spec)
    if not isinstance(own, NDQSG):
        ScatterReduce().check(own)
    elif rounds:
        check_nesting(own)
    else:
        raise ConfigError(
            f"{name}={own}: ndqsg needs a server that knows the other workers' gradients of the "
            'same step, lc.SSD(.., servers=1), or lc.compress(model, "ndqsg"); or use dqsg'
        )
    return own


def chosen_pull_codec(spec: str | Codec) -> Codec:
    """The same for weights."""
    own = chosen_codec(spec, "pull_codec")
    if own.remembers:
        raise ConfigError(
            "pull_codec sends differences to what all ranks have, which contain what was lost "
            "before: feedback would add it twice; use the codec inside, without feedback(...)"
        )
    return own


_log = logging.getLogger("laconic")
_RULES: dict[type[Optimizer], LocalRule] = {
    SGD: MomentumRule(),
    Adam: AdamRule(),
    AdamW: AdamRule(),
}


def chosen_rule(local: Any, optimizer: Optimizer) -> LocalRule | None:
    """The rule itself; "auto" is the one that follows this optimizer, if there is one."""
    kind = type(optimizer)
    rule = _RULES.get(kind) if isinstance(local, str) and local == "auto" else local
    if rule is None:
        return None
    if not isinstance(rule, LocalRule):
        raise ConfigError(
            'local must be "auto", MomentumRule(), AdamRule(), GLU(), DCASGD(), LocalSGDRule() or '
            f"None, not {rule!r}"
        )
    if rule.follows and kind not in rule.follows:
        names = " and ".join(one.__name__ for one in rule.follows)
        raise ConfigError(
            f"{type(rule).__name__} makes the steps of {names}, and the optimizer is "
            f'{kind.__name__}: local="auto" takes the rule that fits'
        )
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ConfigError("local rules go downhill: give -loss instead of maximize=True")
    return rule


def warn_of_amplifying(optimizer: Optimizer, pushed: Codec) -> None:
    """Say that Adam and a codec with one step per parameter do not go well together.

    Only owners of weights know second moments, so gradients cannot be encoded in their units.
    """
    if pushed.even_noise and divides(optimizer) and dist.get_rank() == 0:
        _log.warning(amplified(optimizer, pushed, BLOCKS))


def check_given(optimizer: object, model: object, seed: int, timeout_s: float) -> None:
    """ConfigError for what no schedule of master weights can work with."""
    check_optimizer(optimizer)
    check_module(model)
    if not dist.is_initialized():
        raise ConfigError("start torch.distributed first: torchrun, then init_process_group()")
    whole("seed", seed, 0)
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")


def check_identity(
    here: Mapping[str, str],
    state: Mapping[str, Any],
    weights: str = "weights that were saved inside global_weights()",
) -> None:
    """ConfigError if a saved state is of another run, of other ranks, or no schedule's at all."""
    there = state.get("identity")
    if not isinstance(there, Mapping):
        raise ConfigError(
            "this is not what state_dict() of a schedule returned: give the state that the "
            "schedule itself saved on this rank; the optimizer's own is inside it"
        )
    differing = [name for name in here if there.get(name) != here[name]]
    if differing:
        wrong = [_difference(name, str(there.get(name)), here[name]) for name in differing]
        raise ConfigError(
            f"this state has {'; '.join(wrong)}. Load each rank's own state (lc.PerRank in "
            "torch.distributed.checkpoint), on as many ranks and with the same settings. To go on "
            f"with other ones, load {weights} into the model before making the schedule"
        )


def _difference(name: str, there: str, here: str) -> str:
    """Two values, unless they are long."""
    return f"other {name}" if "\n" in there + here else f"{name} {there}, not {here}"
