"""Our own threads for the CPU kernels, which release the GIL.

Numba's thread layer aborts the process when two Python threads launch at once (the hook's
thread and the main one), so kernels are compiled serial and split here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

Result = TypeVar("Result")
GRAIN = 1 << 15  # elements below which a second thread costs more than it saves


def split(work: Callable[[int, int], Result], total: int, unit: int) -> list[Result]:
    """Call work(first, last) on parts of range(total), in parallel; `unit` elements each."""
    threads = min(torch.get_num_threads(), total * unit // GRAIN)
    if threads <= 1:
        return [work(0, total)]
    edges = [total * i // threads for i in range(threads + 1)]
    pool = _pool(threads - 1, os.getpid())
    try:
        rest = [pool.submit(work, *edges[i : i + 2]) for i in range(1, threads)]
    except RuntimeError:  # the program ends, and somebody encodes what is sent last
        return [work(0, total)]
    try:
        first = work(0, edges[1])
    finally:  # the parts write into the caller's buffers: never return before they end
        done = [future.exception() for future in rest]
    for error in done:
        if error is not None:
            raise error
    return [first, *(future.result() for future in rest)]


@lru_cache(maxsize=4)
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """Kept by process: threads do not survive a fork."""
    return ThreadPoolExecutor(workers, thread_name_prefix="laconic")
