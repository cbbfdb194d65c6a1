"""What check sums of messages cost: exchanges and training steps with verify="sum" and "none".

    python -m benchmarks.verify [--rounds 40] [--save]

4 ranks on Gloo over loopback, one thread each, a tensor of 2,000,000 values. Both forms have
frames (16 bytes per message); "sum" also makes and compares a check over all bytes. `ms` is wall
time with its quartiles, of the slowest rank; `cpu_ms` is processor time of a rank, which other work
on the machine disturbs less. Steps are those of an MLP (784-1024-1024-10, 64 examples per rank)
under DDP, two replicas of it taking turns. `check_us` is the time of one check of 1 MiB, without an
exchange.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from benchmarks._rows import command_line, keep, quantiles
from laconic._scratch import Scratch
from laconic.comm._context import ExchangeContext, Traffic
from laconic.comm._frame import FRAME_BYTES
from laconic.exchanges import pair
from laconic.kernels import backend

RANKS, VALUES = 4, 2_000_000
PAIRS = (
    "ecdq:error=0.08@scatter-reduce",
    "dqsg:bits=4@scatter-reduce",
    "global:bits=8@allreduce",
    "none@scatter-reduce",
    "none@allreduce",
)
STEPS = ("ecdq:error=0.08", "dqsg:bits=4", "global:bits=8")
FORMS: tuple[str, ...] = ("none", "sum")


def in_turns(
    work: Mapping[str, tuple[Callable[[], object], Callable[[], object]]], rounds: int, skip: int
) -> dict[str, dict[str, float]]:
    """Wall time of the slowest rank and processor time of this one, of both forms in turns.

    Each is what comes before, which is not timed, and the work itself.
    """
    wall: dict[str, list[float]] = {form: [] for form in FORMS}
    cpu: dict[str, list[float]] = {form: [] for form in FORMS}
    for step in range(rounds + skip):
        for form in FORMS if step % 2 else FORMS[::-1]:
            before, timed = work[form]
            before()
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            timed()
            took = time.perf_counter() - start[0], time.process_time() - start[1]
            slowest = torch.tensor([took[0]], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if step >= skip:
                wall[form].append(float(slowest))
                cpu[form].append(took[1])
    return {
        form: {**quantiles(wall[form]), "cpu_ms": 1e3 * statistics.median(cpu[form])}
        for form in FORMS
    }


def measured(text: str, rounds: int) -> list[dict[str, Any]]:
    """An exchange; kernels are compiled and buffers made in two rounds before."""
    codec, way = pair(text)
    group = dist.group.WORLD
    assert group is not None
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(group.rank()))
    scratch, x, sent = Scratch(), torch.empty(VALUES), dict.fromkeys(FORMS, 0)
    steps = count()

    def exchange(form: str) -> None:
        traffic = Traffic()
        context = ExchangeContext(
            group=group, step=next(steps), scratch=scratch, traffic=traffic, verify=form
        )
        way.mean(x, codec, context)
        sent[form] = traffic.sent_bytes

    work = {form: (lambda: x.copy_(values), partial(exchange, form)) for form in FORMS}
    found = in_turns(work, rounds, skip=2)
    kind = {"pair": text, "ranks": RANKS, "values": VALUES}
    return [{**kind, "verify": f, **found[f], "sent_bytes": sent[f]} for f in FORMS]


def stepped(spec: str, rounds: int) -> list[dict[str, Any]]:
    """A training step; DDP cuts its buckets anew after the first of four rounds before."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(64, 784, generator=generator)
    labels = torch.randint(10, (64,), generator=generator)
    models, handles = {}, {}
    for form in FORMS:
        torch.manual_seed(1)
        layers = nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()
        models[form] = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(1024, 10)))
        handles[form] = lc.compress(models[form], spec, verify=form)

    def step(model: nn.Module) -> None:
        cross_entropy(model(inputs), labels).backward()

    work = {form: (model.zero_grad, partial(step, model)) for form, model in models.items()}
    rows, kind = [], {"step": spec, "ranks": RANKS}
    for form, found in in_turns(work, rounds, skip=4).items():
        stats = handles[form].stats()
        rows.append(
            {**kind, "verify": form, **found, "sent_bytes": stats.sent_bytes // stats.steps}
        )
        handles[form].close()
    return rows


def check_row() -> dict[str, Any]:
    """A check of 1 MiB that was just written, on one thread."""
    data = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    check = backend(data.device).message_check
    check(data, 1)
    seconds = []
    for salt in range(200):
        start = time.perf_counter()
        check(data, salt)
        seconds.append(time.perf_counter() - start)
    return {"check_us": 1e6 * statistics.median(seconds), "frame_bytes": FRAME_BYTES}


def _rank(rank: int, store: str, rounds: int, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    rows = [row for text in PAIRS for row in measured(text, rounds)]
    rows += [row for spec in STEPS for row in stepped(spec, rounds)]
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        started = mp.spawn(_rank, (store, options.rounds, results), nprocs=RANKS, join=False)
        rows = results.get()
        started.join()
    torch.set_num_threads(1)
    for form, usual in zip(rows[1::2], rows[::2], strict=True):
        name = form.get("pair") or f"step, {form['step']}"
        print(
            f"{name:32} none {usual['ms']:7.2f} ms, sum {form['ms']:7.2f} ms; processor "
            f"{usual['cpu_ms']:6.2f} and {form['cpu_ms']:6.2f} ms; {form['sent_bytes']:,} bytes"
        )
    rows.append(check_row())
    print(f"a check of 1 MiB: {rows[-1]['check_us']:.0f} µs")
    keep("verify", rows, options)


if __name__ == "__main__":
    main()
