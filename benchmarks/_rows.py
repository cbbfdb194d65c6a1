"""Benchmark rows: what was measured, on what, as JSON lines that can be compared later."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import laconic as lc
from laconic._files import write_whole
from laconic._host import processor

RESULTS = Path(__file__).parent / "results"
Work = dict[str, Callable[[], object]]


def machine() -> dict[str, Any]:
    """Hardware and versions that the numbers belong to."""
    info = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
    for package in ("torch", "triton", "numba", "numpy", "pypiquant"):
        with contextlib.suppress(PackageNotFoundError):
            info[package] = version(package)
    return info


def interleaved(work: Mapping[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Seconds of every run of every function, taken in turns so that drift hits all alike.

    In its turn a function runs twice and the second is timed: the threads of whoever ran before
    (OpenMP's, pi-quant's) spin for a while, and would take a core from it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(runs):
        for name, function in work.items():
            function()
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def milliseconds(work: Callable[[], object], rep: int = 60) -> float:
    """Median time on the device, of a captured graph: any wait for the host would fail here."""
    import triton.testing

    with torch.cuda.stream(torch.cuda.Stream()):
        return triton.testing.do_bench_cudagraph(work, rep=rep, return_mode="median")


def codec_work(spec: str, x: Tensor, target: Tensor) -> tuple[lc.Wire, Work]:
    """A wire, encoding into it, and decoding it onto an existing tensor."""
    codec, key = lc.codec(spec), lc.Key(seed=1)
    norm = x.abs().max().float() if spec.startswith("global") else None
    side = x if spec.startswith("ndqsg") else None
    wire = codec.encode(x, key, norm=norm)
    return wire, {
        "encode": lambda: codec.encode(x, key, norm=norm, out=wire),
        "decode-add": lambda: codec.decode(wire, side=side, out=target, add=True),
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"ms": middle * 1e3, "ms_q1": low * 1e3, "ms_q3": high * 1e3}


def save(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows with the machine's description to benchmarks/results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_whole(path, json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return path


def load(name: str) -> dict[str, Any]:
    """What was saved under a name: "machine" and "rows"."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def command_line(words: str | None) -> argparse.ArgumentParser:
    """What every benchmark has: its docstring as help, and --save."""
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--save", action="store_true", help="keep under benchmarks/results")
    return parser


def keep(name: str, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Save rows if that was asked for."""
    if options.save:
        print(f"saved {save(name, rows)}")


def markdown(head: str, rows: Iterable[Sequence[object]]) -> str:
    """A table of a document; a cell may be several, with " | " between them."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in rows]
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines])


def view(title: str, columns: Sequence[str]) -> Table:
    """A table of a terminal: names on the left, numbers on the right."""
    table = Table(title=title)
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table
