"""Imported before ranks are forked: what each of them would otherwise import and load again.

An optimizer imports torch's compiler, which takes a second of a core; a codec loads its kernels.
Only one thread may be left when this ends.
"""

from __future__ import annotations

import torch
from helpers import kernels

import laconic as lc
import laconic.integrations
import laconic.schedules

_SPECS = ("dqsg", "qsgd", "ecdq:error=0.08", "fp16", "global:bits=8")

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).zero_grad()
if kernels("numba"):
    for _spec in _SPECS:
        _codec = lc.codec(_spec)
        _norm = _codec.local_norm(torch.ones(3000)) if _codec.name == "global" else None
        _codec.decode(_codec.encode(torch.ones(3000), lc.Key(), norm=_norm))
