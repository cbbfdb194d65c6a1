"""Logistic regression on handwritten digits: QSVRG beside full-precision SVRG and plain QSGD.

    python examples/logistic_svrg.py [--workers 3] [--epochs 10]

Real processes and collectives (Gloo); every worker has its own digits. All methods take the same
constant step. "bits" are what a worker broadcasts in an epoch: norms and codes, and for SVRG the
full gradient in fp32; "with headers" adds what a wire has around its codes.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import laconic as lc
from laconic._scratch import Scratch
from laconic._wire import HEADER_BYTES
from laconic.codecs import Codec
from laconic.comm._context import ExchangeContext
from laconic.exchanges import Exchange

LAMBDA, LR, STEPS, BATCH = 0.05, 0.3, 40, 4
D = 650
METHODS = ("QSVRG", "SVRG, fp32", "QSGD")
CHUNK_BYTES = 12  # two entries of the table and the kind of the one chunk


@dataclass(frozen=True, kw_only=True)
class Metered(Exchange):
    """All-gather that counts the bits of this worker's wires: of codes and norms, and of all."""

    name: ClassVar[str] = "metered allgather"
    counts: list[int] = field(default_factory=lambda: [0, 0], compare=False)

    def check(self, codec: Codec) -> None:
        """Carries what all-gather carries."""
        lc.AllGather().check(codec)

    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        """Count, and let all-gather do it."""
        size = codec.encode(x, context.key(context.rank)).nbytes
        around = HEADER_BYTES + (CHUNK_BYTES if codec.varies else 0)
        self.counts[0] += 8 * (size - around)
        self.counts[1] += 8 * size
        lc.AllGather().mean(x, codec, context, uncompressed)


@lru_cache
def digits() -> tuple[Tensor, Tensor]:
    """Pixels, centred, and labels."""
    bunch: Any = load_digits()
    pixels = torch.from_numpy(bunch.data).float() / 16
    return pixels - pixels.mean(0), torch.from_numpy(bunch.target)


def zeros() -> nn.Linear:
    """The model, before it has learned anything."""
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean of a batch's terms; each has its share of the regularization."""
    squares = sum(p.square().sum() for p in model.parameters())
    return cross_entropy(model(batch[0]), batch[1]) + LAMBDA / 2 * squares


def objective(model: nn.Module) -> float:
    """f over all digits, in fp64."""
    pixels, labels = digits()
    exact = nn.Linear(64, 10).double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return loss(exact, (pixels.double(), labels)).item()


def minimum() -> float:
    """f*, by L-BFGS in fp64."""
    pixels, labels = digits()
    model = zeros().double()
    solver = torch.optim.LBFGS(
        model.parameters(),
        max_iter=300,
        history_size=50,
        tolerance_grad=1e-9,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        solver.zero_grad()
        value = loss(model, (pixels.double(), labels))
        value.backward()
        return value.item()

    solver.step(closure)
    return closure()


def svrg(data: Any, epochs: int, codec: str | None) -> list[tuple[float, int, int]]:
    """(f, bits, bits with headers) of each epoch."""
    model, meter, rows = zeros(), Metered(), []
    own = lc.QSVRG(
        model, loss, data, lr=LR, steps=STEPS, batch_size=BATCH, codec=codec, exchange=meter
    )
    for _ in range(epochs):
        meter.counts[:] = [32 * D, 32 * D]  # the full gradient
        own.epoch()
        rows.append((objective(model), *meter.counts))
    return rows


def qsgd(data: Any, epochs: int, rank: int, size: int) -> list[tuple[float, int, int]]:
    """The same for plain QSGD: codec, step size and batches as in QSVRG."""
    model, meter, rows, group = zeros(), Metered(), [], dist.group.WORLD
    assert group is not None
    codec = lc.QSGD(levels=26, norm="l2", block=None, coder="elias")
    generator, scratch = torch.Generator().manual_seed(rank), Scratch()
    counts = torch.tensor(float(len(data[1])))
    dist.all_reduce(counts)
    share = size * len(data[1]) / counts.item()  # of workers with more or fewer digits
    for epoch in range(epochs):
        meter.counts[:] = [0, 0]
        for step in range(STEPS):
            chosen = torch.randint(len(data[1]), (BATCH,), generator=generator)
            value = loss(model, (data[0][chosen], data[1][chosen]))
            found = torch.autograd.grad(share * value, list(model.parameters()))
            v = torch.cat([part.flatten() for part in found])
            context = ExchangeContext(group=group, step=epoch * STEPS + step, scratch=scratch)
            meter.mean(v, codec, context)
            with torch.no_grad():
                for p, part in zip(model.parameters(), v.split([640, 10]), strict=True):
                    p.sub_(LR * part.view(p.shape))
        rows.append((objective(model), *meter.counts))
    return rows


def worker(rank: int, size: int, epochs: int, store: str, results: Any) -> None:
    """All methods, one after another; the first worker tells."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    data = tuple(part[rank::size] for part in digits())
    rows = [svrg(data, epochs, None), svrg(data, epochs, "none"), qsgd(data, epochs, rank, size)]
    if rank == 0:
        results.put(rows)
    dist.destroy_process_group()


def main() -> None:
    """Start workers, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        common = (given.workers, given.epochs, f"{folder}/store", results)
        started = [context.Process(target=worker, args=(i, *common)) for i in range(given.workers)]
        for process in started:
            process.start()
        best = minimum()
        rows = results.get(timeout=300)
        for process in started:
            process.join()
    print("f - f* after each epoch of", STEPS, "steps")
    print("epoch " + "".join(f"{name:>14}" for name in METHODS))
    for epoch, values in enumerate(zip(*rows, strict=True), 1):
        print(f"{epoch:5} " + "".join(f"{value - best:14.2e}" for value, _, _ in values))
    mean = [[sum(row[k] for row in one) / given.epochs for one in rows] for k in (1, 2)]
    print("bits  " + "".join(f"{bits:14,.0f}" for bits in mean[0]) + "   an epoch, a worker")
    print("      " + "".join(f"{bits:14,.0f}" for bits in mean[1]) + "   with headers")
    print(f"bound {(32 + 2.8 * D) * (STEPS + 1) + 32 * D:14,.0f}   of the paper, without headers")


if __name__ == "__main__":
    main()
