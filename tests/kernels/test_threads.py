"""Encoding from several threads at once, and in children of a fork: right bytes, no hang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest
import torch
from helpers import PATIENCE_S, assert_same_bits, decode, gaussian, kernel_threads
from programs import PATHS, Programs

import laconic as lc

SPECS = (
    *("qsgd", "dqsg:bits=8", "ndqsg", "global:bits=4", "global-exp", "qsgd-topk"),
    *("rotate(dqsg:bits=4)", "rotate(qsgd:block=100)", "rotate(ndqsg)"),  # scratch is not shared
)
LARGE = 3 * (1 << 15) + 77  # several parts for the kernels' own threads


@pytest.mark.parametrize(("numel", "rounds"), [(1000, 200), (LARGE, 12)])
@pytest.mark.parametrize("spec", SPECS)
def test_two_threads_encode_at_once(spec: str, numel: int, rounds: int) -> None:
    """A hook's thread and the main one, each with its own key; every wire is compared."""
    codec = lc.codec(spec)
    xs = [gaussian(numel, seed=rank) for rank in range(2)]
    keys = [lc.Key(rank=rank) for rank in range(2)]
    wires = [codec.encode(x, key) for x, key in zip(xs, keys, strict=True)]
    wanted = [(wire.data, decode(codec, wire, x)) for wire, x in zip(wires, xs, strict=True)]
    together = threading.Barrier(2, timeout=PATIENCE_S)

    def work(rank: int) -> None:
        buffer = torch.empty_like(wanted[rank][0])
        for _ in range(rounds):
            together.wait()
            wire = codec.encode(xs[rank], keys[rank], out=buffer)
            assert_same_bits(wire.data, wanted[rank][0])
            assert_same_bits(decode(codec, wire, xs[rank]), wanted[rank][1])

    with kernel_threads(2), ThreadPoolExecutor(2) as pool:
        # the choice of kernels is part of the context, which threads do not inherit
        done = [pool.submit(copy_context().run, work, rank) for rank in range(2)]
        for future in done:
            future.result(timeout=PATIENCE_S)


def test_the_first_use_may_come_from_several_threads_at_once(tmp_path: Path) -> None:
    """Loading and compiling kernels (nothing is cached here), whoever comes first.

    In a process of its own, so that a hang or an abort ends only that.
    """
    code = """
import threading
wires = [None] * 8
go = threading.Barrier(8)
def work(i):
    go.wait()
    wires[i] = codec.encode(x, lc.Key()).data
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert all(torch.equal(wires[0], wire) for wire in wires[1:])
"""
    done = subprocess.run(
        [sys.executable, "-c", HEAD.format(threads=2) + code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "NUMBA_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr


HEAD = f"""
import os, torch, laconic as lc
torch.set_num_threads({{threads}})
codec = lc.codec("dqsg:bits=4")
x = torch.randn({LARGE}, generator=torch.Generator().manual_seed(0))
"""
FORK = """
wire = codec.encode(x, lc.Key())
y = codec.decode(wire)
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        ok = torch.equal(codec.encode(x, lc.Key()).data, wire.data)
        ok = ok and torch.equal(codec.decode(wire), y)
        os._exit(0 if ok else 1)
    children.append(pid)
assert torch.equal(codec.encode(x, lc.Key()).data, wire.data)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_works_after_fork(programs: Programs, tmp_path: Path, threads: int) -> None:
    """The parent's kernels and threads have run; threads do not survive a fork."""
    programs.run(HEAD.format(threads=threads) + FORK, folder=tmp_path)


def test_works_in_a_forked_pool(programs: Programs, tmp_path: Path) -> None:
    """As a DataLoader's workers, or torch.multiprocessing, start."""
    code = """
import multiprocessing
def child(step):
    return codec.encode(x, lc.Key(step=step)).data.numpy().tobytes()
wanted = [child(step) for step in range(4)]
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(child, range(4)) == wanted
"""
    programs.run(HEAD.format(threads=2) + code, folder=tmp_path)
