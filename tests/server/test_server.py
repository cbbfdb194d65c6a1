"""The parameter server on real processes: rounds, arrivals, delays, joining, leaving, losing."""

from __future__ import annotations

import multiprocessing.connection
import os
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import PATIENCE_S, refusal
from test_ssd import GOLDEN, TARGETS, Number, flat, loss_of, network, train
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import laconic as lc

CODECS = (("none", None), ("qsgd:bits=4", "dqsg:bits=4"), ("ecdq:error=0.08", "ecdq:error=0.08"))


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def own_store(name: str) -> Any:
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(name, c10d._get_default_store())


def served(opt: Any, work: Callable[[], Any]) -> Any:
    """A server serves, a worker works and leaves."""
    if opt.serves:
        opt.serve()
        return None
    found = work()
    opt.leave()
    return found


# Synchronous, one server and two workers


def golden_rows(rank: int) -> dict[str, Any]:
    """The trajectories of SSD on collectives, which were worked out by hand."""
    found = {}
    for name, (settings, of_optimizer, rows) in GOLDEN.items():
        model = Number()
        optimizer = torch.optim.SGD(model.parameters(), **of_optimizer)
        common: dict[str, Any] = {"warmup_steps": 0, "codec": "none", "servers": 1}
        opt = lc.SSD(optimizer, model, **{**common, **settings})

        def work(opt: Any = opt, model: Any = model, rows: Any = rows) -> list[tuple[float, float]]:
            seen = []
            for _ in rows:
                opt.zero_grad()
                (0.5 * (model.w - TARGETS[rank - 1]).square()).backward()
                opt.step()
                own = model.w.item()
                with opt.global_weights():
                    seen.append((own, model.w.item()))
            return seen

        found[name] = served(opt, work)
    return found


def equals_collectives(rank: int) -> dict[str, Any]:
    """Two workers and a server, and the same two workers as owners: the same bits."""
    workers: Any = dist.new_group([1, 2])
    found = {}
    for local in (lc.GLU(), lc.MomentumRule(), None):
        settings: dict[str, Any] = {"period": 3, "warmup_steps": 2, "local": local, "codec": "none"}
        model = network(seed=0)
        opt = lc.SSD(sgd(model), model, servers=1, **settings)

        def work(opt: Any = opt, model: Any = model, settings: Any = settings) -> Any:
            train(opt, model, 0, 11, rank)
            with opt.global_weights():
                whole = flat(model)
            twin = network(seed=0)
            other = lc.SSD(sgd(twin), twin, group=workers, **settings)
            train(other, twin, 0, 11, rank)
            with other.global_weights():
                same = torch.equal(whole, flat(twin))
            return same, torch.equal(flat(model), flat(twin)), float(whole.norm())

        found[str(local)] = served(opt, work)
    return found


def found_inf(rank: int) -> Any:
    """A NaN on worker 1 at step 2 is thrown away by all, and seen in the counts."""
    model = network()
    opt = lc.SSD(sgd(model), model, period=2, warmup_steps=1, codec="qsgd:bits=4", servers=1)

    def work() -> Any:
        for step in range(6):
            opt.zero_grad()
            loss_of(model, rank, step).backward()
            if step == 2 and rank == 2:
                next(model.parameters()).grad.fill_(torch.nan)  # pyright: ignore
            opt.step()
        opt.wait()
        with opt.global_weights():
            return opt.stats().skipped_steps, bool(flat(model).isfinite().all())

    return served(opt, work)


def bytes_of(rank: int) -> Any:
    """Every push is a frame and a wire; settings travel when they change."""
    model = nn.Linear(4096, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    opt = lc.SSD(optimizer, model, period=4, warmup_steps=0, codec="qsgd:bits=4", servers=1)

    def work() -> Any:
        counts = []
        for step in range(9):
            if step == 6:
                optimizer.param_groups[0]["lr"] = 0.25
            opt.zero_grad()
            model(torch.ones(1, 4096)).sum().backward()
            opt.step()
            opt.wait()
            counts.append(opt.stats().sent_bytes)
        return counts, lc.codec("qsgd:bits=4").nbytes(4096)

    return served(opt, work)


NESTED = "ndqsg:levels=3,block=tensor"


def nested(rank: int) -> dict[str, Any]:
    """Two workers whose gradients are nearly the same, then nothing alike; the server adapts."""
    model = nn.Linear(6000, 1, bias=False)
    nn.init.zeros_(model.weight)
    settings: dict[str, Any] = {"period": 1, "warmup_steps": 1, "local": None, "servers": 1}
    opt = lc.SSD(torch.optim.SGD(model.parameters(), lr=1.0), model, codec=NESTED, **settings)
    if opt.serves:
        stats = []
        opt.serve(lambda step: stats.append(opt.server_stats().nesting))
        return {"stats": stats}

    def gradient(step: int, alike: bool) -> Tensor:
        common = torch.randn(6000, generator=torch.Generator().manual_seed(step))
        own = torch.randn(6000, generator=torch.Generator().manual_seed(1000 * rank + step))
        return common + 0.01 * own if alike else own

    sent, errors, before = [], [], 0
    total = torch.zeros(6000)
    for step in range(120):
        g = gradient(step, step < 100)
        model.weight.grad = g.view(1, -1)
        opt.step()
        opt.wait()
        with opt.global_weights():
            change = total - model.weight.detach().flatten()  # lr = 1: the mean that was applied
            total = model.weight.detach().flatten().clone()
        # the other worker's gradient can be made here, too
        other = torch.randn(6000, generator=torch.Generator().manual_seed(1000 * (3 - rank) + step))
        common = torch.randn(6000, generator=torch.Generator().manual_seed(step))
        exact = (g + (common + 0.01 * other if step < 100 else other)) / 2
        errors.append(float((change - exact).square().sum() / exact.square().sum()))
        now = opt.stats().sent_bytes
        sent.append(now - before)
        before = now
    opt.leave()
    return {"sent": sent, "errors": errors}


def refusals(rank: int) -> dict[str, str]:
    model = network()
    opt = lc.SSD(sgd(model), model, codec="none", servers=1)
    found = {}

    def heard(name: str, work: Callable[[], object]) -> None:
        found[name] = refusal(work)

    if opt.serves:
        heard("step", opt.step)
        heard("stats", opt.stats)
        heard("leave", opt.leave)
        opt.serve()
    else:
        heard("serve", opt.serve)
        heard("join", opt.join)
        opt.leave()
        heard("step", opt.step)
        heard("again", opt.leave)
    heard("all serve", lambda: lc.SSD(sgd(model), network(), codec="none", servers=3))
    heard("disagree", lambda: lc.SSD(sgd(model), model, codec="none", period=rank + 1, servers=1))
    plain = lc.SSD(sgd(model), model, codec="none")
    heard("collectives", plain.leave)
    heard("no server", lambda: lc.AsyncSGD(sgd(model), model, servers=0))
    heard("ndqsg", lambda: lc.SSD(sgd(model), model, codec="ndqsg"))
    heard("ndqsg async", lambda: lc.AsyncSGD(sgd(model), model, codec="ndqsg"))
    heard("delay", lambda: lc.AsyncSGD(sgd(model), model, max_delay=-1))
    return found


# Asynchronous


def one_worker_is_sgd(rank: int) -> Any:
    """Alone, nothing is late: plain SGD, with a GradScaler that overflows and a falling rate."""
    model = network()
    optimizer = sgd(model)
    opt = lc.AsyncSGD(optimizer, model, codec="none")

    def scaled(net: nn.Module, one: Any, rate: Any) -> float:
        """Nine steps; that of step 3 is skipped."""
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(9):
            one.zero_grad()
            scaler.scale(loss_of(net, rank, step)).backward()
            if step == 3:
                next(net.parameters()).grad[0, 0] = torch.inf  # pyright: ignore
            if step == 5:
                scaler.unscale_(one)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(one)
            scaler.update()
            rate.step()
        return scaler.get_scale()

    def work() -> Any:
        twin = network()
        twin.load_state_dict(model.state_dict())
        other = sgd(twin)
        scales = (
            scaled(model, opt, ExponentialLR(optimizer, 0.8)),
            scaled(twin, other, ExponentialLR(other, 0.8)),
        )
        stats = opt.stats()
        return (
            float((flat(model) - flat(twin)).abs().max()),
            scales,
            (stats.delays.most, stats.delays.count, stats.skipped_steps),
        )

    return served(opt, work)


def a_slow_worker(rank: int) -> Any:
    """Worker 1 has read version 0 and computes until there were τ = 2 updates; the third waits."""
    store = own_store("slow")
    model = network()
    opt = lc.AsyncSGD(sgd(model), model, codec="none", max_delay=2)
    if opt.serves:
        seen: list[int] = []

        def each(updates: int) -> None:
            seen.append(updates)
            if updates == 2:
                store.set("two", "updates")

        opt.serve(each)
        stats = opt.server_stats()
        return seen, {rank: one.most for rank, one in stats.delays.items()}, stats.updates
    if rank == 2:
        store.wait(["two"])
    train(opt, model, 0, 4 if rank == 1 else 1, rank)
    own = opt.stats().delays.most
    opt.leave()
    return own


def steps_when_not_finite(rank: int) -> Any:
    model = network()
    opt = lc.AsyncSGD(sgd(model), model, codec="qsgd:bits=4", pull_codec="qsgd:bits=4")

    def work() -> Any:
        for step in range(5):
            opt.zero_grad()
            loss_of(model, rank, step).backward()
            if step == 2:
                next(model.parameters()).grad.fill_(torch.inf)  # pyright: ignore
            opt.step()
        return opt.stats().skipped_steps, bool(flat(model).isfinite().all())

    return served(opt, work)


def async_resumed(rank: int) -> Any:
    """One worker, so that the order is fixed: a server's state goes on to the bit."""

    def run(first: int, last: int, state: Any = None) -> tuple[Any, Tensor]:
        model = network()
        opt = lc.AsyncSGD(sgd(model), model, codec="feedback(dqsg:bits=4)")
        if state is not None:
            opt.load_state_dict(state)
        if opt.serves:
            opt.serve()
            return opt.state_dict(), opt._serving._shard.shard.weights
        # a worker reads when it is made: before the state of the server was loaded, or after
        train(opt, model, first, last, rank)
        opt.leave()
        return opt.state_dict(), flat(model)

    _, at_once = run(0, 8)
    state, _ = run(0, 5)
    _, later = run(5, 8, state)
    return torch.equal(at_once, later)


def async_state_of_another(rank: int) -> str:
    """A state goes with its settings, on servers and workers alike."""
    model = network()
    opt = lc.AsyncSGD(sgd(model), model, codec="none", max_delay=4)
    state = opt.state_dict()
    served(opt, lambda: None)
    other = lc.AsyncSGD(sgd(model), model, codec="none", max_delay=5)
    said = refusal(lambda: other.load_state_dict(state))
    served(other, lambda: None)
    return said


two = ranks.shared((one_worker_is_sgd, async_resumed, async_state_of_another), 2)


three = ranks.shared(
    (
        golden_rows,
        equals_collectives,
        found_inf,
        bytes_of,
        refusals,
        nested,
        a_slow_worker,
        steps_when_not_finite,
    ),
    3,
)


@pytest.mark.parametrize("name", GOLDEN)
def test_trajectories_are_those_worked_out_by_hand(three: ranks.Answers, name: str) -> None:
    rows = GOLDEN[name][2]
    for rank in (1, 2):
        wanted = [(row[rank - 1], row[2]) for row in rows]
        assert three[rank, "golden_rows"][name] == wanted


def test_servers_and_collectives_agree_to_the_bit(three: ranks.Answers) -> None:
    for rank in (1, 2):
        for same, own, size in three[rank, "equals_collectives"].values():
            assert same and own and size > 0


def test_a_gradient_that_is_not_finite_is_skipped(three: ranks.Answers) -> None:
    for rank in (1, 2):
        assert three[rank, "found_inf"] == (1, True)
        assert three[rank, "steps_when_not_finite"] == (1, True)


def test_bytes_are_counted_exactly(three: ranks.Answers) -> None:
    for rank in (1, 2):
        counts, wire = three[rank, "bytes_of"]
        each = [after - before for before, after in pairwise(counts)]
        push = 44 + wire
        assert each[:5] == [push] * 5 and each[6:] == [push] * 2
        assert counts[0] - each[5] == 1  # settings as JSON: "0.125" is longer than "0.25"
        assert 44 < counts[0] - push < 400


def test_ndqsg_follows_how_alike_gradients_are(three: ranks.Answers) -> None:
    """dqsg first; after four looks (steps 16, 32, 48, 64) ρ = 3; dqsg again when it fails."""
    codec = lc.codec(NESTED)
    wide, narrow = lc.codec("dqsg:levels=3,block=tensor").nbytes(6000), codec.nbytes(6000)
    first, second = three[1, "nested"], three[2, "nested"]
    frames = 2 * 44  # of the push, and of looking at the weights
    assert first["sent"][2:] == [frames + wide] * 118  # worker 0 is P1
    for step, sent in enumerate(second["sent"][2:], 2):
        nests = 64 < step <= 100 and step % 16 != 0
        assert sent == frames + (narrow if nests else wide), step
    stats = three[0, "nested"]["stats"]
    assert [one.ratio for one in stats[64:66]] == [3, 3] and stats[-1].ratio == 7
    assert stats[98].failures < 1e-4 and stats[-1].failures > 1e-5
    assert stats[98].correlation > 0.8 > stats[-1].correlation
    # the mean's error: that of dqsg throughout, but for the step at which gradients changed
    plain = max(first["errors"][2:64])
    assert max(first["errors"][64:100]) < 1.1 * plain
    assert max(first["errors"][101:]) < 2 * plain
    assert plain < first["errors"][100] < 3  # one step with half of the values resolved wrongly


def test_refusals_say_what_works(three: ranks.Answers) -> None:
    server, worker = three[0, "refusals"], three[1, "refusals"]
    assert "call serve() on it" in server["step"] and "server_stats()" in server["stats"]
    assert "for the workers of servers" in server["leave"]
    assert "this rank works" in worker["serve"] and "has not left" in worker["join"]
    assert "call join() first" in worker["step"] and "has left" in worker["again"]
    for rank in range(3):
        found = three[rank, "refusals"]
        assert "leave no worker" in found["all serve"]
        assert "disagree on period" in found["disagree"]
        assert "servers=1" in found["collectives"]
        assert "servers must be an integer from 1" in found["no server"]
        assert "servers=1" in found["ndqsg"] and "use dqsg" in found["ndqsg async"]
        assert "max_delay must be an integer from 0" in found["delay"]


def test_one_asynchronous_worker_is_plain_sgd(two: ranks.Answers) -> None:
    difference, scales, counts = two[1, "one_worker_is_sgd"]
    assert difference < 1e-6 and scales == (512.0, 512.0)
    assert counts == (0, 8, 1)


def test_resuming_asynchronous_training_is_exact(two: ranks.Answers) -> None:
    assert two[0, "async_resumed"] and two[1, "async_resumed"]


def test_an_asynchronous_state_of_another_run_is_refused(two: ranks.Answers) -> None:
    for rank in range(2):
        assert "max_delay 4, not 5" in two[rank, "async_state_of_another"]


def test_nobody_overtakes_by_more_than_the_delay(three: ranks.Answers) -> None:
    seen, most, updates = three[0, "a_slow_worker"]
    assert seen == [1, 2, 3, 4, 5] and updates == 5
    assert most == {1: 1, 2: 2}  # worker 1's third gradient had to let worker 2's pass
    assert three[1, "a_slow_worker"] == 1 and three[2, "a_slow_worker"] == 2


# Two servers, three workers


def every_codec(rank: int) -> dict[str, Any]:
    found = {}
    for codec, pull_codec in CODECS:
        for kind in ("ssd", "async"):
            model = network()
            if kind == "ssd":
                opt: Any = lc.SSD(
                    sgd(model),
                    model,
                    period=3,
                    warmup_steps=3,
                    codec=codec,
                    pull_codec=pull_codec,
                    servers=2,
                )
            else:
                opt = lc.AsyncSGD(
                    sgd(model, 0.02),
                    model,
                    codec=codec,
                    pull_codec=pull_codec,
                    servers=2,
                    max_delay=3,
                )

            def work(opt: Any = opt, model: Any = model) -> Any:
                losses = train(opt, model, 0, 40, rank)
                opt_stats = opt.stats()
                with opt.global_weights():
                    whole = flat(model)
                return losses[0], sum(losses[-5:]) / 5, whole, opt_stats.ratio

            found[f"{kind} {codec}"] = served(opt, work)
    return found


def bounded_delays(rank: int) -> dict[int, Any]:
    found = {}
    for most in (0, 1, 4, 8):
        model = network()
        opt = lc.AsyncSGD(sgd(model, 0.02), model, codec="qsgd:bits=4", servers=2, max_delay=most)

        def work(opt: Any = opt, model: Any = model) -> Any:
            losses = train(opt, model, 0, 30, rank)
            return losses[0], sum(losses[-5:]) / 5, opt.stats().delays

        found[most] = served(opt, work)
        if opt.serves:
            found[most] = opt.server_stats()
    return found


def come_and_go(rank: int) -> dict[str, Any]:
    """Worker 2 leaves after 4 steps and comes back when the others have had three more."""
    store = own_store("come and go")
    found = {}
    for kind in ("ssd", "coded", "async"):
        model = network()
        opt: Any
        if kind == "async":
            opt = lc.AsyncSGD(sgd(model), model, codec="none", servers=2, max_delay=8)
        else:
            pull_codec = "qsgd:bits=4" if kind == "coded" else None
            opt = lc.SSD(
                sgd(model),
                model,
                period=2,
                warmup_steps=1,
                codec="none",
                pull_codec=pull_codec,
                servers=2,
            )
        if opt.serves:
            opt.serve()
            found[kind] = opt.server_stats()
            continue
        first = 0
        if rank == 4:
            train(opt, model, 0, 4, rank)
            opt.leave()
            store.wait([f"{kind} go on"])
            first = opt.join()
            train(opt, model, 4, 8, rank)
        else:
            train(opt, model, 0, 7, rank)
            if rank == 3:
                store.set(f"{kind} go on", "now")
            train(opt, model, 7, 20, rank)
        found[kind] = (first, bool(flat(model).isfinite().all()), opt.stats().steps)
        opt.leave()
    return found


five = ranks.shared((every_codec, bounded_delays, come_and_go), 5)


@pytest.mark.parametrize("kind", ["ssd", "async"])
@pytest.mark.parametrize("codec", [codec for codec, _ in CODECS])
def test_it_learns_with_every_codec(five: ranks.Answers, kind: str, codec: str) -> None:
    rows = [five[rank, "every_codec"][f"{kind} {codec}"] for rank in (2, 3, 4)]
    for first, last, whole, ratio in rows:
        assert last < 0.9 * first and bool(whole.isfinite().all())
        assert ratio > (1.2 if codec == "none" else 4)
        if kind == "ssd":
            assert torch.equal(whole, rows[0][2])  # all see the same masters


@pytest.mark.parametrize("most", [0, 1, 4, 8])
def test_asynchronous_training_converges_within_its_delay(five: ranks.Answers, most: int) -> None:
    for rank in (2, 3, 4):
        first, last, delays = five[rank, "bounded_delays"][most]
        assert last < 0.9 * first
        assert delays.most <= most and delays.count == 30
    for rank in (0, 1):
        stats = five[rank, "bounded_delays"][most]
        assert stats.updates == 90 and set(stats.delays) == {2, 3, 4} and not stats.lost
        assert max(one.most for one in stats.delays.values()) <= most


def test_workers_come_and_go(five: ranks.Answers) -> None:
    for kind in ("ssd", "coded"):
        first, finite, steps = five[4, "come_and_go"][kind]
        assert finite and 5 <= first <= 16 and steps == first + 4
        for rank in (2, 3):
            assert five[rank, "come_and_go"][kind] == (0, True, 20)
        for rank in (0, 1):
            assert five[rank, "come_and_go"][kind].updates == 20
    for rank in (0, 1):
        assert five[rank, "come_and_go"]["async"].updates == 48
        assert not five[rank, "come_and_go"]["async"].lost


# Losing a worker


def dying(rank: int, store: str, kind: str, results: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=ranks.PATIENCE
    )
    torch.set_num_threads(1)
    try:
        model = network()
        opt: Any
        if kind == "async":
            opt = lc.AsyncSGD(sgd(model), model, codec="qsgd:bits=4", timeout_s=PATIENCE_S)
        else:
            opt = lc.SSD(
                sgd(model), model, codec="none", warmup_steps=0, servers=1, timeout_s=PATIENCE_S
            )
        if opt.serves:
            try:
                opt.serve()
            finally:
                results.put((rank, opt.server_stats()))
        else:
            train(opt, model, 0, 5, rank)
            if kind == "sync":
                opt.wait()  # nothing is on its way: the step is known
            if rank == 2:
                results.close()
                results.join_thread()
                os._exit(9)
            losses = train(opt, model, 5, 40, rank)
            opt.leave()
            results.put((rank, losses[-1]))
    except lc.LostError as error:
        results.put((rank, str(error)))
    except Exception:
        results.put((rank, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # no barrier: a rank is missing


def survivors(kind: str, folder: Path) -> dict[int, list[Any]]:
    context = ranks.processes()
    results = context.Queue()
    started = [
        context.Process(target=dying, args=(rank, str(folder / "store"), kind, results))
        for rank in range(4)
    ]
    for process in started:
        process.start()
    try:
        multiprocessing.connection.wait([one.sentinel for one in started], timeout=PATIENCE_S)
        for process in started:
            process.join(PATIENCE_S)
        found: dict[int, list[Any]] = {}
        while not results.empty():
            rank, value = results.get(timeout=PATIENCE_S)
            found.setdefault(rank, []).append(value)
        assert [process.exitcode for process in started] == [0, 0, 9, 0]
    finally:
        for process in started:
            process.kill()
    return found


def test_a_lost_worker_does_not_stop_the_others(tmp_path: Path) -> None:
    found = survivors("async", tmp_path)
    (stats,) = found[0]
    assert set(stats.lost) == {2} and "rank 2 is gone" in stats.lost[2]
    assert stats.updates == 40 + 40 + 5
    assert all(isinstance(found[rank][0], float) for rank in (1, 3))


def test_a_lost_worker_ends_synchronous_training_with_a_sentence(tmp_path: Path) -> None:
    found = survivors("sync", tmp_path)
    for rank in (0, 1, 3):
        assert "worker 1 (rank 2) is lost at step 5" in found[rank][-1], found[rank]
