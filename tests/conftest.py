"""Backends as fixtures. Triton kernels run in its interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, below

from helpers import kernels
from programs import Programs, started
from ranks import member

from laconic.codecs import _register
from laconic.exchanges import _pair
from laconic.kernels import using
from laconic.schedules import _costs

BACKENDS = ("reference", "numba", "triton", "staged")


@pytest.fixture(scope="session", autouse=True)
def signals_arrive() -> None:
    """Tests, and all they start, ignore Ctrl-C behind a shell's `&`, and SIGHUP under nohup."""
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests use small tensors: torch's threads would cost more than the work they share."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Starts programs that need no more than torch and laconic."""
    with started() as found:
        yield found


@pytest.fixture(scope="session")
def frameworks() -> Iterator[Programs]:
    """Starts programs that use frameworks, which take seconds to import."""
    names = ("sklearn.datasets", "lightning", "accelerate", "transformers.trainer")
    there = [name for name in names if importlib.util.find_spec(name.partition(".")[0])]
    with started(*there) as found:
        yield found


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A world of one."""
    with member(0, 1, str(tmp_path / "store")):
        yield


@pytest.fixture(autouse=True)
def only_our_names() -> Iterator[None]:
    """Codecs, exchanges and schedules that a test registers are unknown to the next one."""
    tables: list[Any] = [_register._KINDS, _pair._BY_NAME, _costs._BY_NAME]
    known = [dict(table) for table in tables]
    yield
    for table, before in zip(tables, known, strict=True):
        table.clear()
        table.update(before)


@pytest.fixture(autouse=True)
def default_kernels() -> Iterator[None]:
    """Numba, the default on a CPU; the reference where Numba's kernels cannot be loaded."""
    if kernels("numba"):
        yield
    else:
        with using("reference"):
            yield


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, default_kernels: None) -> Iterator[str]:
    """Each backend in turn, chosen for the whole test."""
    del default_kernels  # so that this choice is the inner one
    name = request.param
    if kernels(name) is None:
        pytest.skip(f"the {name} kernels cannot be loaded here (is {name} installed?)")
    # Triton's interpreter computes with NumPy, which warns where a GPU is silent
    with using(name), np.errstate(all="ignore"):
        yield name
