"""Gradient accumulation under FSDP2: several backwards add up, and one exchange carries the sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from laconic.errors import ConfigError
from laconic.integrations._fsdp_units import Unit


@contextmanager
def without_exchange(units: Sequence[Unit], between: str) -> Iterator[None]:
    """Backwards inside add gradients up where nothing encoded travels.

    FSDP has two places for a sum: a rank's shard, after a reduce-scatter that is not encoded (then
    it leaves out its all-reduce); elsewhere the whole gradient, before any collective.
    """
    before = [(unit.group.reduce_grads, unit.group.all_reduce_grads) for unit in units]
    for unit in units:
        _set(unit, between == "replicas" and unit.replicas > 1 and unit.group.reduce_grads, False)
    try:
        yield
    finally:
        for unit, flags in zip(units, before, strict=True):
            _set(unit, *flags)


def _set(unit: Unit, reduces: bool, all_reduces: bool) -> None:
    module = unit.group.modules[0]
    module.set_requires_gradient_sync(reduces, recurse=False)
    module.set_requires_all_reduce(all_reduces, recurse=False)


def check_exchanged(units: Iterable[Unit], stepped: Iterable[Tensor]) -> None:
    """ConfigError if an optimizer stepped parameters whose gradients are still being added up.

    FSDP has not given them to the parameters, so the optimizer has silently passed over them.
    """
    waiting = [unit for unit in units if _adds_up(unit.group)]
    if not waiting:
        return
    own = {id(one) for one in stepped}
    for unit in waiting:
        if any(id(param.sharded_param) in own for param in unit.group.fsdp_params):
            raise ConfigError(
                "the optimizer has made a step, and gradients of "
                f"{unit.name or 'the root module'} were added up on each rank, but not exchanged: "
                "run the last backward() before step() in handle.accumulate(last=True), or after "
                "set_requires_gradient_sync(True) and set_requires_all_reduce(True), if you turned "
                "one of them off"
            )


def _adds_up(group: Any) -> bool:
    """Whether a module has sums of gradients that no optimizer can see yet."""
    if group._partial_reduce_output is not None:
        return True
    for param in group.fsdp_params:
        if param.unsharded_accumulated_grad is not None:
            return True
        whole = getattr(param, "_unsharded_param", None)
        if whole is not None and whole.grad is not None:
            return True
    return False
