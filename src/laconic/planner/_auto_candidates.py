"""Which strategies auto has to choose from."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges._pair import pair
from laconic.planner._auto_decide import PLAIN

ERROR = 0.08  # of the mean: what training does not notice
_WIDTHS = (2, 3, 4, 8)
_MOST_SUMMED = 127  # ranks: more do not fit into int8


def families_of(
    model: DistributedDataParallel, error: float | None, candidates: Sequence[str] | None
) -> list[list[str]]:
    """Texts of candidates beside plain; of each list, the first that fits the error is tried."""
    if candidates is not None:
        if isinstance(candidates, str) or not all(isinstance(one, str) for one in candidates):
            raise ConfigError('candidates= are texts of codecs, such as ("none", "fp16")')
        return [[spec] for spec in dict.fromkeys(candidates) if str(pair(spec)[0]) != PLAIN]
    budget = ERROR if error is None else error
    found = [[f"ecdq:error={float(budget)!r}"], [f"dqsg:bits={bits}" for bits in _WIDTHS]]
    if any(p.requires_grad and p.element_size() > 2 for p in model.module.parameters()):
        found.insert(0, ["fp16"])
    if group_of(model).size() <= _MOST_SUMMED:
        found.append(["global:bits=8"])
    return found


def group_of(model: DistributedDataParallel) -> dist.ProcessGroup:
    """The process group that DDP adds gradients up in."""
    assert isinstance(model.process_group, dist.ProcessGroup)
    return model.process_group


def measurable(codec: Codec) -> bool:
    """Whether an encoding of its own tells its error: not with a memory or side information."""
    return not codec.remembers and codec.name != "ndqsg"
