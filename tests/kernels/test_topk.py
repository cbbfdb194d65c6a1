"""The largest entries: the same on every backend, ties by index."""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, gaussian, kernels

import laconic as lc

MAKERS = {
    "gaussian": gaussian,
    "ties": lambda count: gaussian(count).mul(2).round(),
    "constant": torch.ones,
    "zeros": torch.zeros,
    "not finite": lambda count: gaussian(count).index_fill(
        0, torch.tensor([count // 2]), torch.inf
    ),
}


@pytest.mark.parametrize("count", [1, 2, 127, 4096, 4097, 100_003])
@pytest.mark.parametrize("maker", MAKERS)
def test_entries_are_those_of_a_stable_sort(maker: str, count: int, backend: str) -> None:
    module = kernels(backend)
    assert module is not None
    for dtype in DTYPES:
        x = MAKERS[maker](count).to(dtype)
        want = torch.sort(-x.float().abs(), stable=True).indices
        for wanted in (1, lc.codec("qsgd-topk").nbytes(count) // 4 - 17, count):
            got = module.topk(x, wanted)
            assert got.tolist() == want[:wanted].tolist(), (dtype, wanted)
