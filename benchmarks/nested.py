"""NDQSG against DQSG: what nesting saves, when it fails, and whether training notices.

    python -m benchmarks.nested [--device cuda] [--data FOLDER] [--save]
    python -m benchmarks.nested --quick

Fashion-MNIST, a LeNet-size network (1,663,370 parameters) and FC 784-300-100-10 (266,610), SGD
with momentum 0.9. 2 to 16 simulated workers of one receiver, total batch 200 as in the paper; then
8 workers with batches of 16 to 1024 each. Matrices from 10,000 values on are encoded, M = 3, with
one scale each or one for 512 values; the rest is exact, and so is the mean: errors are those of the
way out. The receiver is `SideInformation` and `RatioController`, as in the exchange. Forms:

    fp32      the exact mean
    dqsg      all plain
    nested    the first half of the workers plain, the others at the control's ratio
    loose     the same with tolerance 1: failures may double the quantizer's variance
    own       the receiver is worker 0, all others at the control's ratio
    previous  all at the control's ratio, the mean of the step before as side information
    fixed     as nested, at ratio 3 whatever happens: the paper's

Bits are those of codes, scales, checks and headers, per encoded value, the mean over workers that
send; every 16th step is a calibration, and plain. The failure share is of values that P2 sent; ρ is
the mean over steps, dqsg being 7. In the paper's form calibrations are plain, too, and tell its
failures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import laconic as lc
from benchmarks import _fashion, accuracy
from benchmarks._rows import command_line, keep, save
from laconic._scratch import Scratch
from laconic.exchanges._side_information import (
    TOLERANCE,
    RatioController,
    SideInformation,
    at_ratio,
    in_first_group,
    plain_codec,
)

TOTAL, RATE, LEVELS, EVERY = 200, 0.02, 3, 16
WORKERS, BATCHES = (2, 4, 8, 16), (16, 64, 256, 1024)
FORMS = ("fp32", "dqsg", "nested", "loose", "own", "previous", "fixed")
_LARGE = 10_000  # values of a matrix that is worth encoding
_LOADED: dict[str, Any] = {}  # the data, in each process


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    model: str
    workers: int
    batch: int  # of one worker
    form: str
    block: int | None
    seed: int
    steps: int


def network(name: str) -> nn.Sequential:
    if name == "lenet":
        return accuracy.network()
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 300),
        nn.ReLU(),
        nn.Linear(300, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    )


@dataclass
class Channel:
    """A matrix on its way from the workers to the mean."""

    case: Case
    number: int
    out: Tensor
    scratch: Scratch
    bits: int = 0  # sent by all workers so far
    ratios: float = 0.0
    previous: Tensor | None = None
    codec: lc.NDQSG = field(init=False)
    control: RatioController = field(init=False)

    def __post_init__(self) -> None:
        self.codec = lc.NDQSG(levels=LEVELS, block=self.case.block)
        form = self.case.form
        self.control = RatioController(
            self.codec, {"fixed": 1e9, "loose": 1.0}.get(form, TOLERANCE)
        )
        if form == "fixed":
            self.control.ratio = 3

    def start(self, step: int) -> None:
        self.calibrates = step % EVERY == 0
        calibrating = self.calibrates and (
            self.case.form != "previous" or self.previous is not None
        )
        self.side_information = SideInformation(
            self.codec,
            self.out,
            workers=self.case.workers,
            control=self.control,
            side=self.previous,
            calibrates=calibrating and self.case.form != "dqsg",
            scratch=self.scratch,
        )
        self.side_information.start(None)
        self.ratios += self.control.ratio

    def add(self, gradient: Tensor, step: int, worker: int) -> None:
        case = self.case
        if case.form == "own" and worker == 0:
            self.side_information.start(gradient)
            return
        first = case.form == "dqsg"
        if case.form in ("nested", "loose", "fixed"):
            first = in_first_group(worker, case.workers)
        plain = first or self.calibrates
        sent = plain_codec(self.codec) if plain else at_ratio(self.codec, self.control.ratio)
        key = lc.Key(seed=case.seed, step=step, tensor=self.number, rank=worker)
        wire = sent.encode(gradient, key)
        self.bits += 8 * wire.header.nbytes
        self.side_information.add(wire, first=first)

    def finish(self) -> None:
        self.side_information.finish()
        if self.calibrates or not self.out.is_cuda:
            self.control.decide()
        if self.case.form == "previous":
            self.previous = self.out.clone()


def train(case: Case, device: str) -> dict[str, Any]:
    """One run; a row."""
    torch.manual_seed(case.seed)
    learn, test = _LOADED["data"]
    model = network(case.model).to(device)
    parameters = list(model.parameters())
    means = [torch.zeros_like(p) for p in parameters]
    scratch = Scratch()
    channels = [
        Channel(case, i, means[i].view(-1), scratch)
        if case.form != "fp32" and p.dim() > 1 and p.numel() >= _LARGE
        else None
        for i, p in enumerate(parameters)
    ]
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * RATE, total_steps=case.steps)
    for step, batches in enumerate(_batches(case, len(learn.labels), device)):
        for channel, mean in zip(channels, means, strict=True):
            if channel is None:
                mean.zero_()
            else:
                channel.start(step)
        for worker, at in enumerate(batches):
            loss = nn.functional.cross_entropy(model(learn.pictures[at]), learn.labels[at])
            gradients = torch.autograd.grad(loss, parameters)
            for channel, mean, gradient in zip(channels, means, gradients, strict=True):
                if channel is None:
                    mean.add_(gradient, alpha=1 / case.workers)
                else:
                    channel.add(gradient.view(-1), step, worker)
        for channel, mean, parameter in zip(channels, means, parameters, strict=True):
            if channel is not None:
                channel.finish()
            parameter.grad = mean
        optimizer.step()
        rate.step()
    used = [channel for channel in channels if channel is not None]
    return asdict(case) | {"accuracy": _accuracy(model, test)} | _sent(case, parameters, used)


def _batches(case: Case, count: int, device: str) -> Iterator[Tensor]:
    """Rows of the data for every worker, step by step, anew when all have been seen."""
    size, given, epoch = case.workers * case.batch, 0, 0
    while given < case.steps:
        own = torch.Generator().manual_seed(100 * case.seed + epoch)
        order = torch.randperm(count, generator=own).to(device)
        for rows in order[: count // size * size].view(-1, case.workers, case.batch):
            if given < case.steps:
                yield rows
            given += 1
        epoch += 1


def _sent(case: Case, parameters: list[nn.Parameter], used: list[Channel]) -> dict[str, Any]:
    """What was sent, and how decoding went."""
    values = sum(p.numel() for p in parameters)
    if not used:
        return {"bits_out": 32.0, "kbit": 32e-3 * values}
    encoded = sum(channel.out.numel() for channel in used)
    senders = case.workers - (case.form == "own")
    bits = sum(channel.bits for channel in used) / (senders * case.steps)
    for channel in used:
        channel.control.decide()
    wrong, seen = (sum(part) for part in zip(*(c.control.seen for c in used), strict=True))
    alike = [c.control.correlation for c in used if c.control.correlation is not None]
    return {
        "bits_out": bits / encoded,
        "kbit": 1e-3 * (bits + 32 * (values - encoded)),
        "failures": wrong / seen if seen else 0.0,
        "correlation": statistics.mean(alike) if alike else None,
        "ratio": sum(c.ratios * c.out.numel() for c in used) / (encoded * case.steps),
        "last_ratio": sum(c.control.ratio * c.out.numel() for c in used) / encoded,
    }


@torch.no_grad()
def _accuracy(model: nn.Module, test: Any) -> float:
    parts = zip(test.pictures.split(2000), test.labels.split(2000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in parts) / len(test.labels)


def cases(steps: int, seeds: int) -> list[Case]:
    """All runs, so that a cut still leaves what matters: 4 and 8 workers first, seed by seed."""
    found = []
    for model in ("lenet", "fc"):
        for seed in range(seeds):
            for n in WORKERS:
                found += _forms(model, n, TOTAL // n, FORMS, (None, 512), seed, steps)
            for batch in BATCHES:
                some = ("fp32", "dqsg", "nested", "loose", "previous")
                found += _forms(model, 8, batch, some, (512,), seed, steps // 2)
    cost = {case: -case.workers * case.steps * (case.batch + 200) for case in found}
    return sorted(found, key=lambda case: (case.workers not in (4, 8), case.seed, cost[case]))


def quick() -> list[Case]:
    """A minute on two cores."""
    return list(_forms("fc", 4, TOTAL // 4, FORMS, (None, 512), 0, 64))


def _forms(
    model: str,
    workers: int,
    batch: int,
    forms: tuple[str, ...],
    blocks: tuple[int | None, ...],
    seed: int,
    steps: int,
) -> Iterator[Case]:
    for form in forms:
        for block in blocks if form != "fp32" else (None,):
            yield Case(
                model=model,
                workers=workers,
                batch=batch,
                form=form,
                block=block,
                seed=seed,
                steps=steps,
            )


def _prepare(data: Path, device: str) -> None:
    torch.set_num_threads(1 if device != "cpu" else torch.get_num_threads())
    parts = _fashion.load(data)
    _LOADED["data"] = [_fashion.Part(p.pictures.to(device), p.labels.to(device)) for p in parts]


def _row(job: tuple[Case, str]) -> dict[str, Any]:
    return train(*job)


def _show(rows: list[dict[str, Any]]) -> None:
    """Means over seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "workers", "batch", "form", "block"))
        groups.setdefault(key, []).append(row)
    formats = {
        "bits_out": "{:.2f}",
        "kbit": "{:.1f}",
        "accuracy": "{:.4f}",
        "failures": "{:.1e}",
        "correlation": "{:.2f}",
        "ratio": "{:.2f}",
    }
    columns = ("model", "workers", "batch", "form", "block", *formats)
    print("".join(f"{name:>12}" for name in columns))
    order = {form: i for i, form in enumerate(FORMS)}
    for key in sorted(groups, key=lambda k: (k[0], k[1], k[2], order[k[3]], k[4] or 0)):
        cells = [str(part or "tensor") for part in key]
        for name, form in formats.items():
            found = [row[name] for row in groups[key] if row.get(name) is not None]
            cells.append(form.format(math.fsum(found) / len(found)) if found else "-")
        print("".join(f"{cell:>12}" for cell in cells))


def main() -> None:
    """Run all cases, several at a time on a GPU; print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, default=_fashion.FOLDER)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="with a total batch of 200")
    parser.add_argument("--jobs", type=int, default=14, help="processes on a GPU")
    parser.add_argument("--quick", action="store_true", help="few and short runs")
    options = parser.parse_args()
    work = [
        (case, options.device)
        for case in (quick() if options.quick else cases(options.steps, options.seeds))
    ]
    rows: list[dict[str, Any]] = []
    _fashion.check(options.data)
    if options.device == "cpu" or options.jobs == 1:
        _prepare(options.data, options.device)
        rows += map(_row, work)
    else:
        given = (options.data, options.device)
        with mp.get_context("spawn").Pool(options.jobs, _prepare, given) as pool:
            for row in pool.imap_unordered(_row, work):
                rows.append(row)
                if len(rows) % 12 == 0:
                    print(f"{len(rows)} of {len(work)} runs", flush=True)
                    if options.save:  # a cut run keeps what it has
                        save("nested", rows)
    _show(rows)
    keep("nested", rows, options)


if __name__ == "__main__":
    main()
