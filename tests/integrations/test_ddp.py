"""The DDP hook on real processes: replicas equal to the bit, settings compared, nothing hangs."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import PATIENCE_S, equal_everywhere, refusal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

SPECS = ("none", "dqsg:bits=4", "global:bits=8", "ecdq:error=0.05", "feedback(qsgd-topk)")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 10)
    )


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 64, generator=generator)
    return x, x[:, :10].argmax(1)


def train(model: nn.Module, steps: int, first: int = 0, rank: int | None = None) -> list[float]:
    rank = dist.get_rank() if rank is None else rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(first, first + steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Run:
    """A model, its optimizer and a handle, made anew as after a restart."""

    def __init__(
        self,
        spec: str = "dqsg:bits=4",
        make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        *,
        units: bool = False,
        dtype: torch.dtype = torch.float32,
        ddp: str = "",
        **options: Any,
    ) -> None:
        kind: Any = {ddp: True} if ddp else {}
        self.model = DistributedDataParallel(network().to(dtype), bucket_cap_mb=0.05, **kind)
        self.optimizer = make(self.model)
        given = self.optimizer if units else None
        self.handle: Any = lc.compress(self.model, spec, seed=5, optimizer=given, **options)

    def backward(self, step: int) -> None:
        x, y = batch(dist.get_rank(), step)
        self.optimizer.zero_grad()
        out = self.model(x.to(next(self.model.parameters()).dtype))
        nn.functional.cross_entropy(out.float(), y).backward()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.backward(step)
            self.optimizer.step()

    def save(self) -> dict[str, Any]:
        parts = (self.model.module, self.optimizer, self.handle)
        return copy.deepcopy({str(i): part.state_dict() for i, part in enumerate(parts)})

    def load(self, state: dict[str, Any]) -> None:
        # a copy, because optimizers take over a state's tensors and write to them
        state = copy.deepcopy(state)
        for i, part in enumerate((self.model.module, self.optimizer, self.handle)):
            part.load_state_dict(state[str(i)])


def replicas_stay_equal(rank: int) -> dict[str, Any]:
    plain = DistributedDataParallel(network())
    reference = train(plain, 25)
    found: dict[str, Any] = {"plain": reference[-1]}
    for spec in SPECS:
        model = DistributedDataParallel(
            network(), bucket_cap_mb=0.05
        )  # several buckets, rebuilt after a step
        handle = lc.compress(model, spec)
        losses = train(model, 25)
        stats = handle.stats()
        found[spec] = {
            "equal": equal_everywhere(model),
            "last": losses[-1],
            "ratio": stats.ratio,
            "steps": stats.steps,
            "close": torch.allclose(flat(model), flat(plain), atol=1e-5),
        }
    return found


KINDS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def variants_train(rank: int) -> dict[str, bool]:
    found = {}
    for name, options in KINDS.items():
        model = DistributedDataParallel(network(), bucket_cap_mb=0.05, **options)
        lc.compress(model, "ecdq:error=0.05")
        train(model, 5)
        found[name] = equal_everywhere(model)

    model = DistributedDataParallel(network())
    lc.compress(model, "dqsg:bits=4")
    with model.no_sync():
        x, y = batch(rank, 0)
        nn.functional.cross_entropy(model(x), y).backward()
    train(model, 3, first=1)
    found["no_sync"] = equal_everywhere(model)

    warm, plain = DistributedDataParallel(network()), DistributedDataParallel(network())
    handle = lc.compress(warm, "qsgd:bits=2", warmup_steps=4)
    for model in (warm, plain):
        train(model, 4)
    found["warm-up is plain DDP"] = torch.allclose(flat(warm), flat(plain), atol=1e-6)
    for model in (warm, plain):
        train(model, 1, first=4)
    found["then it compresses"] = not torch.allclose(flat(warm), flat(plain), atol=1e-6)
    found["steps"] = handle.stats().steps == 5

    mixed = network()
    mixed[0].weight.requires_grad_(False)
    model = DistributedDataParallel(mixed)
    lc.compress(model, "dqsg:bits=4", policy=lc.Policy(min_numel=0, min_dims=1))
    train(model, 3)
    found["frozen, all compressed"] = equal_everywhere(model)
    return found


def non_finite_everywhere(rank: int) -> dict[str, bool]:
    found = {}
    for spec in ("dqsg:bits=4", "ecdq:error=0.05", "global:bits=8", "fp16"):
        model = DistributedDataParallel(network())
        lc.compress(model, spec)
        x, y = batch(rank, 0)
        if rank == 1:
            x[0, 0] = torch.inf
        nn.functional.cross_entropy(model(x), y).backward()
        weight = model.module[0].weight.grad
        found[spec] = not bool(weight.isfinite().all())
    return found


def resume_is_exact(rank: int) -> dict[str, bool]:
    """Once DDP has rebuilt its buckets, after the first step, equal states go on alike."""
    gradients = []
    first, second = (DistributedDataParallel(network()) for _ in range(2))
    handles = [lc.compress(model, "feedback(qsgd:bits=2)", seed=5) for model in (first, second)]
    train(first, 3)
    weights, state = copy.deepcopy(first.module.state_dict()), handles[0].state_dict()
    train(second, 2)
    for model, handle in zip((first, second), handles, strict=True):
        model.module.load_state_dict(weights)
        handle.load_state_dict(state)
        model.zero_grad()
        x, y = batch(rank, 7)
        nn.functional.cross_entropy(model(x), y).backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    return {"equal": torch.equal(*gradients)}


def pickled_and_copied(rank: int) -> dict[str, bool]:
    """torch saves states of hooks like that; a copy of the model has one without a model."""
    first = DistributedDataParallel(network())
    handle = lc.compress(first, "feedback(qsgd:bits=2)", seed=5)
    train(first, 3)
    copied = copy.deepcopy(first)
    found = {"a copy of the model works": torch.equal(flat(copied), flat(first))}
    state = pickle.loads(pickle.dumps(handle))
    try:
        state.stats()
        found["without a model it says so"] = False
    except lc.ConfigError as error:
        found["without a model it says so"] = "state.attach(model.module)" in str(error)
    third = DistributedDataParallel(network())
    third.module.load_state_dict(first.module.state_dict())
    state.attach(third.module)
    third.register_comm_hook(state, lc.comm_hook)
    found["steps"] = state.step == 3 and hasattr(state, "lanes")
    gradients = []
    for model in (first, third):
        model.zero_grad()
        x, y = batch(rank, 7)
        nn.functional.cross_entropy(model(x), y).backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    found["same gradients"] = torch.equal(*gradients)
    return found


def disagreement_is_named(rank: int) -> str:
    model, spec = DistributedDataParallel(network()), f"dqsg:bits={3 if rank == 1 else 4}"
    return refusal(lambda: lc.compress(model, spec, timeout_s=PATIENCE_S))


class WithNothing(nn.Module):
    """An empty parameter between two that are encoded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(0.1 * torch.randn(64, 192))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.last = nn.Parameter(0.1 * torch.randn(192, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first @ self.last + self.nothing.sum()


def empty_parameter(rank: int) -> bool:
    model = DistributedDataParallel(WithNothing())
    lc.compress(model, "ecdq:error=0.08")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step)[0]).square().mean().backward()
        optimizer.step()
    return equal_everywhere(model)


def backward_twice(rank: int) -> dict[str, str]:
    """Rank 1 makes a pass of its own: its next one would meet those of others that come later."""
    found = {}
    for spec in ("ecdq:error=0.05", "dqsg:bits=4@allgather", "none@scatter-reduce"):
        model = DistributedDataParallel(network(), bucket_cap_mb=0.05)
        handle = lc.compress(model, spec, timeout_s=PATIENCE_S)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found[spec] = "nothing"
        try:
            for step in range(5):
                for _ in range(1 + (rank == 1 and step == 3)):
                    x, y = batch(rank, step)
                    nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        except (lc.WireError, lc.LostError) as error:
            found[spec] = f"{type(error).__name__}: {error}"
        handle.close()
    return found


def passes_that_are_alike(rank: int) -> dict[str, bool]:
    """Gradients that add up over passes, each exchanged; an optimizer that rank 0 alone has."""
    found = {}
    for name in ("accumulated", "one optimizer", "by hand"):
        model = DistributedDataParallel(network())
        lc.compress(model, "dqsg:bits=4", timeout_s=PATIENCE_S)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(18 if name == "accumulated" and step == 1 else 2):
                x, y = batch(rank, 10 * step + part)
                nn.functional.cross_entropy(model(x), y).backward()
            if name == "accumulated" or (name == "one optimizer" and rank == 0):
                optimizer.step()
            for p in model.parameters():
                dist.broadcast(p.data, 0)
        found[name] = equal_everywhere(model)
    model = DistributedDataParallel(network())
    handle = lc.compress(model, "dqsg:bits=4", timeout_s=PATIENCE_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = handle.state_dict(), copy.deepcopy(model.state_dict())
    for step in range(4):
        x, y = batch(rank, step)
        nn.functional.cross_entropy(model(x), y).backward()
        if step != 1 or rank:
            optimizer.step()
        if step == 1:  # rank 0 could not step: all go back
            handle.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
        optimizer.zero_grad()
    found["back after a failed step"] = equal_everywhere(model)

    # each rank steps a share of one layer or the other, in turns, and sends it to all
    model = DistributedDataParallel(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)))
    lc.compress(model, "dqsg:bits=4", timeout_s=PATIENCE_S)
    parts = [list(layer.parameters()) for layer in model.module]
    shares = [torch.optim.SGD([parts[i][(rank + i) % 2]], lr=0.01) for i in (0, 1)]
    for step in range(6):
        model.zero_grad()
        model(torch.randn(4, 128)).square().mean().backward()
        shares[step % 2].step()
        for j, p in enumerate(parts[step % 2]):
            dist.broadcast(p.data, (j - step % 2) % 2)
    found["shares by hand"] = equal_everywhere(model)

    for spec in ("dqsg:bits=4", "auto"):  # ranks that have joined step no optimizer
        model = DistributedDataParallel(network())
        given: dict[str, Any] = {} if spec != "auto" else {"candidates": ["fp16"]}
        handle: Any = lc.compress(model, spec, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if spec != "auto":
            handle.check_replicas(3)  # of those that are left
        for _ in range(2):
            with model.join():
                for step in range(2 + 6 * rank):
                    optimizer.zero_grad()
                    x, y = batch(rank, step)
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
        found[f"{spec}, uneven inputs"] = equal_everywhere(model)
        handle.close()
    return found


def sub_group(rank: int) -> dict[str, bool]:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return {"equal": True}
    model = DistributedDataParallel(network(), process_group=pair)
    handle = lc.compress(model, "ecdq:error=0.05")
    train(model, 3)
    mine = flat(model)
    every = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(every, mine, group=pair)
    return {"equal": torch.equal(*every) and handle.stats().ratio > 2}


JOBS = [
    replicas_stay_equal,
    variants_train,
    non_finite_everywhere,
    resume_is_exact,
    pickled_and_copied,
    disagreement_is_named,
    empty_parameter,
    backward_twice,
    passes_that_are_alike,
    sub_group,
]


found = ranks.shared(JOBS, 3)


def test_empty_parameters_travel_in_no_load(found: ranks.Answers) -> None:
    assert all(found[rank, "empty_parameter"] for rank in range(3))


@pytest.mark.parametrize("spec", SPECS)
def test_replicas_stay_equal_and_learn(found: ranks.Answers, spec: str) -> None:
    for rank in range(3):
        answer = found[rank, "replicas_stay_equal"]
        assert answer[spec]["equal"] and answer[spec]["steps"] == 25
        if spec == "none":
            assert answer[spec]["close"]
        else:
            assert answer[spec]["ratio"] > 2
        if not spec.startswith("feedback"):
            assert answer[spec]["last"] < answer["plain"] + 0.5


@pytest.mark.parametrize(
    "job",
    [
        "variants_train",
        "non_finite_everywhere",
        "resume_is_exact",
        "pickled_and_copied",
        "passes_that_are_alike",
        "sub_group",
    ],
)
def test_what_ddp_can_do_still_works(found: ranks.Answers, job: str) -> None:
    for rank in range(3):
        wrong = [name for name, good in found[rank, job].items() if not good]
        assert not wrong


def test_a_rank_that_ran_backward_twice_is_named(found: ranks.Answers) -> None:
    """By those that exchange with it; whoever hears of it through them has lost them."""
    for spec in found[0, "backward_twice"]:
        said = [found[rank, "backward_twice"][spec] for rank in range(3)]
        assert all(one.startswith(("WireError", "LostError")) for one in said), said
        assert any("rank 1 has run backward 2 times" in one for one in (said[0], said[2])), said
        assert not any("rank 0 has run backward 2" in one for one in said), said


def test_ranks_that_disagree_all_say_so(found: ranks.Answers) -> None:
    for rank in range(3):
        said = found[rank, "disagreement_is_named"]
        assert "codec" in said and "rank 1" in said and "ranks 0, 2" in said


def test_compress_wants_a_ddp_model() -> None:
    with pytest.raises(lc.ConfigError, match="DistributedDataParallel"):
        lc.compress(nn.Linear(2, 2), "dqsg")  # pyright: ignore[reportArgumentType]


def dying_worker(rank: int, store: str, results: Any) -> None:
    """Rank 1 ends without a word after two steps."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=ranks.PATIENCE,
    )
    torch.set_num_threads(1)
    model = DistributedDataParallel(network())
    lc.compress(model, "ecdq:error=0.05", timeout_s=PATIENCE_S)
    train(model, 2)
    if rank == 1:
        os._exit(0)
    try:
        train(model, 1, first=2)
        results.put("no error")
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")
    results.close()
    results.join_thread()
    os._exit(0)  # the group cannot be taken down properly without its peer


def test_a_peer_that_dies_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    context = ranks.processes()
    results = context.Queue()
    store = str(tmp_path / "store")
    started = [context.Process(target=dying_worker, args=(r, store, results)) for r in range(2)]
    for process in started:
        process.start()
    said = results.get(timeout=PATIENCE_S)
    for process in started:
        process.join(PATIENCE_S)
    assert "Error" in said and said != "no error", said
