"""Imported before ranks are forked: what each of them would otherwise import and load again.

An optimizer imports torch's compiler, which takes a second of a core; a codec loads its kernels.
Only one thread may be left when this ends. `python tests/warm.py` compiles all kernels, which
processes that start together would each do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import product

import ranks  # noqa: F401
import torch
from helpers import DTYPES, decode, kernels

import laconic as lc
import laconic.integrations
import laconic.schedules

OTHERS = (  # what codecs compile for other settings than their defaults
    "qsgd:coder=elias",
    "global:bits=32",
    "rotate(dqsg)",
    "feedback(qsgd)",
    "ecdq:coder=rans",
    "ecdq:coder=fixed",
    "ecdq:block=512",
)


def load(specs: Iterable[str], dtypes: Iterable[torch.dtype]) -> None:
    """Kernels of these codecs, compiled where no process has done so before."""
    for spec, dtype in product(specs, dtypes):
        codec, x = lc.codec(spec), torch.ones(3000, dtype=dtype)
        decode(codec, codec.encode(x, lc.Key()), x)


torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).zero_grad()
if kernels("numba"):
    load(("dqsg", "qsgd", "ecdq:error=0.08", "fp16"), (torch.float32,))
    if __name__ == "__main__":
        load((*lc.codecs(), *OTHERS), DTYPES)
gc.collect()
gc.freeze()  # or every rank looks through all of it, a second of a core when it ends
