"""Every codec on real gradients: bits on the wire, error, and speed beside a memory copy.

1. Train a small network on scikit-learn's handwritten digits for a few hundred steps.
2. Take the gradients of eight mini-batches (the matrices of 10,000 elements and more).
3. Encode and decode them with every codec, and print what it cost and what it lost.

    NMSE = mean over trials of ‖ĝ - g‖² / ‖g‖²

g is one mini-batch's gradient, or for global codecs the mean over four workers, each with a
mini-batch of its own. Run it with `make demo`; `--json` prints the same rows for a program.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from digits import load, measured_gradients, network, train
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import laconic as lc

STEPS = 300
BATCHES = 8  # mini-batches whose gradients are measured, and trials of each codec
WORKERS = 4
SPEED_NUMEL = 1 << 22
SPEED_ROUNDS = 15
STEADY = 1.5  # a median this many times slower than the fastest run is not a measurement
COPY = "memory copy"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One exchange: what was wanted, what arrived, and what it took."""

    wanted: Tensor
    arrived: Tensor
    wire_bytes: int
    bound: float | None = None
    failed: float | None = None

    @property
    def nmse(self) -> float:
        """‖ĝ - g‖² / ‖g‖²."""
        wanted = self.wanted.double()
        return ((self.arrived - wanted).square().sum() / wanted.square().sum()).item()


@dataclass(frozen=True, kw_only=True)
class Speed:
    """GB of fp32 values a second: quartiles over all runs, and the fastest."""

    gb_s: float
    low_gb_s: float
    high_gb_s: float
    best_gb_s: float

    @property
    def steady(self) -> bool:
        """Whether the median is near the fastest run.

        Quartiles do not tell: where most runs stall, their middle half is narrow, and wrong.
        """
        return self.best_gb_s <= STEADY * self.gb_s

    def __str__(self) -> str:
        """The median, with a ~ where it should not be relied on."""
        return f"{'' if self.steady else '~'}{self.gb_s:.1f}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; None where a column has no meaning."""

    codec: str
    bits: float | None = None
    nmse: float | None = None
    bound: float | None = None
    failed_checks: float | None = None
    encode: Speed
    decode: Speed


# What each kind of codec does with gradients; the first is this worker's


def alone(codec: lc.Codec, gradients: Sequence[Tensor], step: int) -> Trial:
    """One worker sends, one receiver decodes."""
    wanted = gradients[0]
    wire = codec.encode(wanted, lc.Key(step=step))
    return Trial(
        wanted=wanted,
        arrived=codec.decode(wire),
        wire_bytes=wire.nbytes,
        bound=codec.variance_bound(wanted.numel()),
    )


def with_side(codec: lc.NDQSG, gradients: Sequence[Tensor], step: int) -> Trial:
    """The receiver already knows the gradient of another mini-batch."""
    wanted, side = gradients[:2]
    wire = codec.encode(wanted, lc.Key(step=step))
    failed = torch.empty(codec.checks(wanted.numel()), dtype=torch.uint8)
    arrived = codec.decode(wire, side=side, failed=failed)
    share = failed.float().mean().item()
    return Trial(wanted=wanted, arrived=arrived, wire_bytes=wire.nbytes, failed=share)


def shared_norm(codec: lc.Global | lc.GlobalExp, workers: Sequence[Tensor]) -> Tensor:
    """The scale that all workers agree on before they encode."""
    return codec.global_norm(torch.cat([codec.local_norm(x) for x in workers]))


def summed(codec: lc.Global, gradients: Sequence[Tensor], step: int) -> Trial:
    """The workers' integers are added while encoded, as an all-reduce would."""
    workers = torch.stack(list(gradients[:WORKERS]))
    norm = shared_norm(codec, gradients[:WORKERS])
    keys = [lc.Key(step=step, rank=rank) for rank in range(WORKERS)]
    wires = [codec.encode(workers[key.rank], key, norm=norm, workers=WORKERS) for key in keys]
    payloads = torch.stack([wire.payload for wire in wires])
    return Trial(
        wanted=workers.mean(0),
        arrived=codec.decode_sum(payloads.sum(0, dtype=payloads.dtype), keys, norm=norm),
        wire_bytes=wires[0].nbytes,
        bound=bound_of_mean(codec, workers),
    )


def bound_of_mean(codec: lc.Global, workers: Tensor) -> float | None:
    """The theorem's (θ/n)·Σ‖x_i‖², relative to ‖mean‖² as NMSE is."""
    n, d = workers.shape
    theta = codec.variance_bound(d, workers=n)
    if theta is None:
        return None
    return theta / n * (workers.square().sum() / workers.mean(0).square().sum()).item()


def tree(codec: lc.GlobalExp, gradients: Sequence[Tensor], step: int) -> Trial:
    """The workers' wires are added in pairs, and the pairs in pairs."""
    workers = torch.stack(list(gradients[:WORKERS]))
    norm = shared_norm(codec, gradients[:WORKERS])
    keys = [lc.Key(step=step, rank=rank) for rank in range(WORKERS)]
    wires = [codec.encode(workers[key.rank], key, norm=norm, workers=WORKERS) for key in keys]
    return Trial(
        wanted=workers.mean(0),
        arrived=codec.decode(added_in_pairs(codec, wires, step), weight=1 / WORKERS),
        wire_bytes=wires[0].nbytes,
    )


def added_in_pairs(codec: lc.GlobalExp, wires: Sequence[lc.Wire], step: int) -> lc.Wire:
    """One wire from many; every addition draws with a key of its own."""
    phase = 0
    while len(wires) > 1:
        phase += 1
        pairs = zip(wires[::2], wires[1::2], strict=True)
        wires = [
            codec.reduce(a, b, lc.Key(step=step, rank=rank, phase=phase))
            for rank, (a, b) in enumerate(pairs)
        ]
    return wires[0]


CASES: dict[str, Callable[[Any, Sequence[Tensor], int], Trial]] = {
    "none": alone,
    "fp16": alone,
    "bf16": alone,
    "qsgd:bits=8": alone,
    "qsgd:bits=4": alone,
    "qsgd:bits=2,block=128": alone,
    "qsgd:bits=4,norm=l2": alone,
    "dqsg:bits=8": alone,
    "dqsg:bits=4": alone,
    "dqsg:levels=1,block=128": alone,
    "ndqsg": with_side,
    "global:bits=8": summed,
    "global-exp": tree,
    "qsgd-topk": alone,
    "rotate(dqsg:bits=4)": alone,
    "ecdq:error=0.08": alone,
    "ecdq:error=0.08,coder=elias": alone,
    "ecdq:error=0.08,coder=rans": alone,
    "ecdq:error=0.02,coder=rans": alone,
}


# Measuring


def speeds(works: Mapping[str, Callable[[], object]]) -> dict[str, Speed]:
    """Time each work. They take turns, so that other load on the machine meets all of them.

    Each turn begins with a run that is not counted: it compiles, and it absorbs what the work
    before left behind in caches and threads.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(SPEED_ROUNDS):
        for name, work in works.items():
            work()
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return {name: speed_of(runs) for name, runs in seconds.items()}


def speed_of(seconds: Sequence[float]) -> Speed:
    """Quartiles and best of runs over SPEED_NUMEL values."""
    rates = [4 * SPEED_NUMEL / run / 1e9 for run in seconds]
    low, median, high = statistics.quantiles(rates, n=4, method="inclusive")
    return Speed(gb_s=median, low_gb_s=low, high_gb_s=high, best_gb_s=max(rates))


def tiled(gradient: Tensor) -> Tensor:
    """The gradient, repeated until speed can be measured."""
    return gradient.repeat(-(-SPEED_NUMEL // gradient.numel()))[:SPEED_NUMEL].clone()


def works(gradients: Sequence[Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed: a copy, and every codec's encode and decode, in buffers made before."""
    x, side = tiled(gradients[0]), tiled(gradients[1])
    out, key = torch.empty_like(x), lc.Key()
    timed: dict[str, Callable[[], object]] = {COPY: lambda: out.copy_(x)}
    for codec in map(lc.codec, CASES):
        wire = codec.encode(x, key)
        timed[f"encode {codec}"] = partial(codec.encode, x, key, out=wire)
        timed[f"decode {codec}"] = partial(codec.decode, wire, side=side, out=out)
    return timed


def measure(spec: str, gradients: Sequence[Tensor], speed: Mapping[str, Speed]) -> Row:
    """All columns of one codec. Trial i begins at mini-batch i."""
    codec, exchange = lc.codec(spec), CASES[spec]
    trials = [exchange(codec, [*gradients[i:], *gradients[:i]], i) for i in range(BATCHES)]
    return Row(
        codec=spec,
        bits=8 * trials[0].wire_bytes / gradients[0].numel(),
        nmse=statistics.fmean(trial.nmse for trial in trials),
        bound=mean_or_none([trial.bound for trial in trials]),
        failed_checks=mean_or_none([trial.failed for trial in trials]),
        encode=speed[f"encode {codec}"],
        decode=speed[f"decode {codec}"],
    )


def measure_all(gradients: Sequence[Tensor]) -> list[Row]:
    """A row for a memory copy, which reads and writes every fp32 value once, and the codecs'."""
    speed = speeds(works(gradients))
    copy = Row(codec=COPY, encode=speed[COPY], decode=speed[COPY])
    return [copy, *(measure(spec, gradients, speed) for spec in CASES)]


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """The mean of what is there, or None if nothing is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# Saying it


def summary(rows: Sequence[Row]) -> str:
    """One sentence, from the numbers alone."""
    row = {row.codec: row for row in rows}
    dithered, nested = row["dqsg:bits=4"], row["ndqsg"]
    coded = row["ecdq:error=0.08,coder=rans"]
    return (
        f"On these gradients ecdq with rans sends {coded.bits:.2f} bits a value at an NMSE of "
        f"{coded.nmse:.2g}, {32 / (coded.bits or math.nan):.0f} times fewer than fp32. "
        f"dqsg:bits=4 sends {32 / (dithered.bits or math.nan):.1f} times fewer "
        f"bits than fp32 at an NMSE of {dithered.nmse:.2g}, "
        f"{compared(dithered, row['qsgd:bits=4'])} qsgd:bits=4 at the same size, and "
        f"{beside_copy(dithered.encode, row[COPY].encode)}; "
        f"ndqsg sends {nested.bits:.1f} bits, and "
        f"{nested.failed_checks:.0%} of its checks failed with another mini-batch as side "
        f"information (NMSE {nested.nmse:.2g})."
    )


def beside_copy(encode: Speed, copy: Speed) -> str:
    """The speed relative to a copy, or that this run cannot say."""
    if not (encode.steady and copy.steady):
        return "the machine was too busy in this run to compare its speed with a memory copy"
    return f"encodes at {encode.gb_s / copy.gb_s:.0%} of the speed of a memory copy"


def compared(one: Row, other: Row) -> str:
    """ "3.0 times less than" or "3.0 times more than", by NMSE."""
    ratio = (other.nmse or math.nan) / (one.nmse or math.nan)
    return f"{ratio:.1f} times less than" if ratio >= 1 else f"{1 / ratio:.1f} times more than"


def table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    view = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    view.add_column("codec", no_wrap=True)
    for heading in ("bits", "NMSE", "bound", "failed\nchecks", "encode\nGB/s", "decode\nGB/s"):
        view.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(row.codec, *cells(row))
    return view


def cells(row: Row) -> list[str]:
    """The numbers of a row as texts; a dash where there is none."""
    numbers = (
        (row.bits, ".2f"),
        (row.nmse, ".2g"),
        (row.bound, ".2g"),
        (row.failed_checks, ".1%"),
    )
    texts = ["–" if value is None else format(value, form) for value, form in numbers]
    return [*texts, str(row.encode), str(row.decode)]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is printed: what the numbers depend on, the numbers, and what they say."""

    torch_version: str
    threads: int
    steps: int
    loss: float
    values_per_gradient: int
    values_for_speed: int
    rows: list[Row]
    summary: str


def report() -> Report:
    """Train, take gradients, measure."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    digits, model = load(), network()
    loss = train(model, digits, STEPS, generator)
    gradients = measured_gradients(model, digits, BATCHES, generator)
    rows = measure_all(gradients)
    return Report(
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        steps=STEPS,
        loss=loss,
        values_per_gradient=gradients[0].numel(),
        values_for_speed=SPEED_NUMEL,
        rows=rows,
        summary=summary(rows),
    )


def show(result: Report) -> None:
    """The report for a terminal."""
    console = Console(highlight=False)
    console.print(
        f"Gradients of {result.values_per_gradient} values, from a network that reads "
        f"handwritten digits, after {result.steps} steps (loss {result.loss:.3f}). Speeds: GB of "
        f"fp32 values a second, medians of {SPEED_ROUNDS} runs on {result.values_for_speed} "
        f"values, {result.threads} threads, torch {result.torch_version}; ~ where the fastest "
        f"run was more than {STEADY} times the median."
    )
    console.print(table(result.rows))
    console.print(result.summary)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description="Every codec on real gradients.")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    as_json = parser.parse_args().json
    result = report()
    if as_json:
        print(json.dumps(asdict(result), indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
