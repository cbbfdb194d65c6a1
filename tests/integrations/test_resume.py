"""Killed at any step and resumed in new objects: the same bits as if nothing had happened."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from helpers import refusal
from test_ddp import Run, flat, network
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

RANKS, STEPS = 3, 12
SPECS = (
    "none",
    "fp16",
    "qsgd:bits=3",
    "dqsg:bits=4",
    "dqsg:bits=4,block=tensor@allgather",
    "ndqsg@nested",
    "global:bits=8",
    "global:bits=8@ring",
    "global-exp",
    "ecdq:error=0.08",
    "rotate(ecdq:error=0.08)",
    "feedback(qsgd-topk)",
    "feedback(dqsg:bits=2)",
)


def resumed(*kills: tuple[int, ...], **options: Any) -> dict[str, bool]:
    """Whether runs that were killed at these steps end with the bits of one that was not."""
    whole, saved = Run(**options), Run(**options)
    whole.train(0, STEPS)
    states, found, at = {}, {}, 0
    for first in sorted({first for first, *_ in kills}):
        saved.train(at, first)
        states[first], at = saved.save(), first
    for first, *others in kills:
        run, at = Run(**options), first
        run.load(states[first])
        for kill in others:
            run.train(at, kill)
            state, at = run.save(), kill
            run = Run(**options)
            run.load(state)
        run.train(at, STEPS)
        found[f"{options} at {first, *others}"] = torch.equal(flat(whole.model), flat(run.model))
    return found


def every_codec(rank: int) -> dict[str, bool]:
    draw = random.Random(0)  # the same on all ranks
    found = {}
    for spec in SPECS:
        found |= resumed((draw.randrange(1, STEPS),), spec=spec)
    return found


def every_step(rank: int) -> dict[str, bool]:
    return resumed(*((kill,) for kill in range(STEPS)), (3, 4), (5, 6), (2, 9))


def kinds_of_ddp(rank: int) -> dict[str, bool]:
    found = {}
    for kind in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view"):
        found |= resumed((1,), (2,), (4,), (7,), ddp=kind)
    return found


def warm_up(rank: int) -> dict[str, bool]:
    """Plain sums of a step are added in an order that buckets decide, too."""
    return resumed((3,), (8,), warmup_steps=6)


def auto(rank: int) -> dict[str, bool | str]:
    """After its choice, which depends on the machine: both ends start from one state."""
    logging.getLogger("laconic").setLevel(logging.ERROR)
    first = Run("auto")
    chosen = 0
    while first.handle.report() is None and chosen < 100:
        first.train(chosen, chosen + 1)
        chosen += 1
    state = first.save()
    ends = []
    for kill in (None, chosen + 4):
        run, at = Run("auto"), chosen
        run.load(state)
        if kill is not None:
            run.train(at, kill)
            state, at = run.save(), kill
            run = Run("auto")
            run.load(state)
        run.train(at, chosen + 9)
        ends.append(flat(run.model))
    first.train(chosen, chosen + 9)
    return {
        "choice": first.handle.choice,
        "once": torch.equal(flat(first.model), ends[0]),
        "twice": torch.equal(flat(first.model), ends[1]),
    }


def other_ranks(rank: int) -> dict[str, str]:
    """A state of feedback on three ranks is not one of two."""
    found = {}
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2])]
    for spec in ("feedback(qsgd-topk)", "dqsg:bits=4"):
        run = Run(spec)
        run.train(0, 2)
        state = run.handle.state_dict()
        smaller = DistributedDataParallel(network(), process_group=groups[rank // 2])
        other: Any = lc.compress(smaller, spec, seed=5)
        found[spec] = refusal(lambda other=other, state=state: other.load_state_dict(state))
    return found


JOBS: list[Callable[[int], Any]] = [
    every_codec,
    every_step,
    kinds_of_ddp,
    warm_up,
    auto,
    other_ranks,
]


found = ranks.shared(JOBS, RANKS)


@pytest.mark.parametrize("job", [job.__name__ for job in JOBS if job is not other_ranks])
def test_resumed_runs_end_at_the_same_bits(found: ranks.Answers, job: str) -> None:
    for rank in range(RANKS):
        wrong = [name for name, good in found[rank, job].items() if not good]
        assert not wrong


def test_what_ranks_remember_is_not_for_fewer_ranks(found: ranks.Answers) -> None:
    for rank in range(RANKS):
        answer = found[rank, "other_ranks"]
        assert "saved by 3 ranks" in answer["feedback(qsgd-topk)"]
        assert not answer["dqsg:bits=4"]
