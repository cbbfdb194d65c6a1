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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import laconic as lc

STEPS = 300
BATCH = 128
BATCHES = 8  # mini-batches whose gradients are measured, and trials of each codec
WORKERS = 4
LARGE = 10_000  # elements; smaller tensors are not worth compressing
SPEED_NUMEL = 1 << 22
SPEED_RUNS = 9


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
class Row:
    """One line of the table; None where a column has no meaning."""

    codec: str
    bits: float | None = None
    nmse: float | None = None
    bound: float | None = None
    failed_checks: float | None = None
    encode_gb_s: float
    decode_gb_s: float


# The network and its gradients


@dataclass(frozen=True)
class Digits:
    """Handwritten digits as vectors of 64 pixels in 0..1, and their labels."""

    pixels: Tensor
    labels: Tensor

    def batch(self, generator: torch.Generator) -> Digits:
        """A random mini-batch."""
        index = torch.randint(len(self.labels), (BATCH,), generator=generator)
        return Digits(self.pixels[index], self.labels[index])


def load() -> Digits:
    """The 1797 digits that scikit-learn ships."""
    bunch: Any = load_digits()
    pixels = torch.from_numpy(bunch.data).float() / 16
    return Digits(pixels, torch.from_numpy(bunch.target))


def network() -> nn.Module:
    """64-256-256-10: the first two matrices are large enough to be compressed."""
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def backward(model: nn.Module, batch: Digits) -> float:
    """Leave the gradients of a mini-batch in the model; return its loss."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(batch.pixels), batch.labels)
    loss.backward()
    return loss.item()


def train(model: nn.Module, digits: Digits, generator: torch.Generator) -> float:
    """Plain SGD with momentum; returns the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = math.nan
    for _ in range(STEPS):
        loss = backward(model, digits.batch(generator))
        optimizer.step()
    return loss


def large_gradients(model: nn.Module) -> Tensor:
    """The gradients of all large matrices, end to end."""
    gradients = (parameter.grad for parameter in model.parameters())
    return torch.cat(
        [
            gradient.flatten()
            for gradient in gradients
            if gradient is not None and gradient.dim() > 1 and gradient.numel() >= LARGE
        ]
    )


def measured_gradients(
    model: nn.Module, digits: Digits, generator: torch.Generator
) -> list[Tensor]:
    """The gradients of several mini-batches at the same weights."""
    gradients = []
    for _ in range(BATCHES):
        backward(model, digits.batch(generator))
        gradients.append(large_gradients(model))
    return gradients


# What each kind of codec does with them; the first gradient is this worker's


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
}


# Measuring


def gb_per_second(work: Callable[[], object]) -> float:
    """Median speed of `work`, in GB of fp32 values; a first run compiles and is not counted."""
    work()
    seconds = []
    for _ in range(SPEED_RUNS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return 4 * SPEED_NUMEL / statistics.median(seconds) / 1e9


def tiled(gradient: Tensor) -> Tensor:
    """The gradient, repeated until speed can be measured."""
    return gradient.repeat(-(-SPEED_NUMEL // gradient.numel()))[:SPEED_NUMEL].clone()


def copy_row(gradient: Tensor) -> Row:
    """What codecs are compared with: reading and writing every fp32 value once."""
    x = tiled(gradient)
    out = torch.empty_like(x)
    speed = gb_per_second(lambda: out.copy_(x))
    return Row(codec="memory copy", encode_gb_s=speed, decode_gb_s=speed)


def measure(spec: str, gradients: Sequence[Tensor]) -> Row:
    """All columns of one codec. Trial i begins at mini-batch i."""
    codec, exchange = lc.codec(spec), CASES[spec]
    trials = [exchange(codec, [*gradients[i:], *gradients[:i]], i) for i in range(BATCHES)]
    x, side = tiled(gradients[0]), tiled(gradients[1])
    data, out = torch.empty(codec.nbytes(SPEED_NUMEL), dtype=torch.uint8), torch.empty_like(x)
    wire = codec.encode(x, lc.Key(), out=data)
    return Row(
        codec=spec,
        bits=8 * trials[0].wire_bytes / gradients[0].numel(),
        nmse=statistics.fmean(trial.nmse for trial in trials),
        bound=mean_or_none([trial.bound for trial in trials]),
        failed_checks=mean_or_none([trial.failed for trial in trials]),
        encode_gb_s=gb_per_second(lambda: codec.encode(x, lc.Key(), out=data)),
        decode_gb_s=gb_per_second(lambda: codec.decode(wire, side=side, out=out)),
    )


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """The mean of what is there, or None if nothing is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# Saying it


def summary(rows: Sequence[Row]) -> str:
    """One sentence, from the numbers alone."""
    row = {row.codec: row for row in rows}
    dithered, plain = row["dqsg:bits=4"], row["qsgd:bits=4"]
    copy = row["memory copy"].encode_gb_s
    shares = [row[spec].encode_gb_s / copy for spec in ("qsgd:bits=4", "dqsg:bits=4")]
    return (
        f"On these gradients dqsg:bits=4 sends {32 / (dithered.bits or math.nan):.1f} times fewer "
        f"bits than fp32 at an NMSE of {dithered.nmse:.2g}, {compared(dithered, plain)} "
        f"qsgd:bits=4 at the same size; ndqsg sends {row['ndqsg'].bits:.1f} bits, but "
        f"{row['ndqsg'].failed_checks:.0%} of its checks failed with another mini-batch as side "
        f"information (NMSE {row['ndqsg'].nmse:.2g}); and the two 4-bit codecs encode at "
        f"{min(shares):.0%} to {max(shares):.0%} of the speed of a memory copy."
    )


def compared(one: Row, other: Row) -> str:
    """ "3.0 times less than" or "3.0 times more than", by NMSE."""
    ratio = (other.nmse or math.nan) / (one.nmse or math.nan)
    return f"{ratio:.1f} times less than" if ratio >= 1 else f"{1 / ratio:.1f} times more than"


COLUMNS = (  # heading, field of Row, format
    ("bits", "bits", ".2f"),
    ("NMSE", "nmse", ".2g"),
    ("bound", "bound", ".2g"),
    ("failed\nchecks", "failed_checks", ".1%"),
    ("encode\nGB/s", "encode_gb_s", ".2f"),
    ("decode\nGB/s", "decode_gb_s", ".2f"),
)


def table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal; a dash where there is no number."""
    view = Table(box=box.SIMPLE)
    view.add_column("codec", no_wrap=True)
    for heading, _, _ in COLUMNS:
        view.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        values = [(getattr(row, field), form) for _, field, form in COLUMNS]
        texts = ["–" if value is None else format(value, form) for value, form in values]
        view.add_row(row.codec, *texts)
    return view


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
    loss = train(model, digits, generator)
    gradients = measured_gradients(model, digits, generator)
    rows = [copy_row(gradients[0]), *(measure(spec, gradients) for spec in CASES)]
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
        f"handwritten digits, after {result.steps} steps (loss {result.loss:.3f}). Speeds in GB of "
        f"fp32 values a second, on {result.values_for_speed} values and {result.threads} threads, "
        f"torch {result.torch_version}."
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
