"""The cost model: hand-worked timelines, bytes that exchanges really send, papers' formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import laconic as lc
from benchmarks._rows import load
from laconic._cost import (
    FREE,
    EncodingError,
    Mark,
    Move,
    Pause,
    Stage,
    Submit,
    Task,
    TensorLoad,
    Wait,
    Work,
)
from laconic.comm._context import ExchangeContext
from laconic.exchanges import exchange, pair
from laconic.planner import (
    Bucket,
    Cluster,
    CodecCost,
    Device,
    LinearCost,
    Links,
    Strategy,
    Workload,
    fit,
    predict,
    step_seconds,
)
from laconic.planner._predict import Timeline
from laconic.planner._probe_cluster import typical


def times(program: list[Stage], lanes: int = 2, **device: Any) -> float:
    timeline = Timeline(lanes=lanes, device=Device(**device))
    timeline.run(program)
    return timeline.now


def links(ranks: int, start_s: float = 0.0, per_s: float = 1e6) -> Links:
    line = LinearCost(start_s=start_s, per_s=per_s)
    return Links(ranks=ranks, allreduce=(line,), all_to_all=line, sendrecv=line)


def cost(spec: str, speed: LinearCost = FREE, bits: float = 4.0, error: float = 0.1) -> CodecCost:
    return CodecCost(
        spec=str(lc.codec(spec)),
        bits_out=bits,
        bits_back=bits,
        bits_once=bits,
        error=error,
        error_back=error,
        encode=speed,
        decode=speed,
    )


def cluster(workers: int, *codecs: CodecCost, **more) -> Cluster:
    given_links = more.pop("flat", links(workers))
    return Cluster(workers=workers, flat=given_links, codecs=codecs, **more)


WORK = Workload(
    forward_s=1.0,
    backward_s=2.0,
    rest_s=0.5,
    buckets=(
        Bucket(encoded=1000_000, plain=0, ready_s=0.5),
        Bucket(encoded=500_000, plain=0, ready_s=2.0),
    ),
)


class TestLine:
    def test_a_line_goes_through_its_points(self) -> None:
        line = fit([(x, 0.25 + x / 8e6) for x in (0, 1e3, 1e6, 1e8)])
        assert line.start_s == pytest.approx(0.25)
        assert line.per_s == pytest.approx(8e6)
        assert line.spread < 1e-9

    def test_large_and_small_amounts_count_alike(self) -> None:
        """Absolute squares would spend everything on the largest: start would be far off."""
        line = fit([(x, (0.001 + x / 1e6) * off) for x, off in ((1, 1.0), (1e3, 1.02), (1e7, 0.9))])
        assert line.start_s == pytest.approx(0.001, rel=0.1)

    @given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(1e-6, 1e3)), min_size=1, max_size=8))
    def test_neither_part_is_negative(self, points: list[tuple[float, float]]) -> None:
        line = fit(points)
        assert line.start_s >= 0
        assert line.per_s > 0

    @pytest.mark.parametrize("points", [[], [(1, 0.0)], [(1, -1.0)]])
    def test_what_is_no_measurement_is_refused(self, points: list[tuple[float, float]]) -> None:
        with pytest.raises(lc.ConfigError):
            fit(points)


class TestTimeline:
    def test_what_is_hidden_and_what_is_not(self) -> None:
        """A wire of 3 s behind 2 s of work, submitted after 1 s: 1 + 3."""
        job = Submit(0, 0, (Move(0.0, 3.0),))
        assert times([Work(1), job, Work(2), Wait(0)]) == pytest.approx(4)
        assert times([Work(1), job, Work(5), Wait(0)]) == pytest.approx(6)

    def test_codec_and_computation_share_the_device(self) -> None:
        """2 s and 2 s on a device for one: both end after 4. With room for two: 2."""
        program: list[Stage] = [Submit(0, 0, (Work(2.0),)), Work(2.0), Wait(0)]
        assert times(list(program)) == pytest.approx(4)
        assert times(list(program), slots=2.0) == pytest.approx(2)
        assert times(list(program), slots=1.5) == pytest.approx(4 / 1.5)

    def test_two_lanes_share_the_wire(self) -> None:
        """Starts of 1 s at once take 2, then 2 + 2 s of one wire; as long as one lane would."""
        jobs: list[Stage] = [Submit(i, i, (Move(1.0, 2.0),)) for i in (0, 1)]
        assert times([*jobs, Wait(0), Wait(1)]) == pytest.approx(6)
        one_lane: list[Stage] = [Submit(0, i, (Move(1.0, 2.0),)) for i in (0, 1)]
        assert times([*one_lane, Wait(0), Wait(1)], lanes=1) == pytest.approx(6)

    def test_one_lane_starts_while_the_other_moves(self) -> None:
        jobs: list[Stage] = [Submit(0, 0, (Move(0.0, 2.0),)), Submit(1, 1, (Move(1.0, 2.0),))]
        assert times([*jobs, Wait(0), Wait(1)]) == pytest.approx(4)  # 1 alone, then 1 + 2 shared

    def test_a_wire_that_takes_half_a_device(self) -> None:
        """2 s of it, which take half of the CPU, beside 4 s of work: after 2 s, 3 s are left."""
        program: list[Stage] = [Submit(0, 0, (Move(0.0, 2.0),)), Work(4.0), Wait(0)]
        assert times(list(program), wire_cpu_share=0.5) == pytest.approx(5)
        assert times(list(program), wire_cpu_share=0.5, slots=2.0) == pytest.approx(4)

    def test_a_wire_is_slower_beside_work(self) -> None:
        """3 s of bytes at half speed beside 4 s of work, then 1 s alone; a start likewise."""
        for move, slower in (
            (Move(0.0, 3.0), "overlap_bandwidth"),
            (Move(3.0, 0.0), "overlap_starts"),
        ):
            program: list[Stage] = [Submit(0, 0, (move,)), Work(4.0), Wait(0)]
            assert times(program, lanes=2, **{slower: 0.5}) == pytest.approx(5)

    def test_waiting_for_others_takes_its_time_whatever_happens(self) -> None:
        pauses: list[Stage] = [Submit(i, i, (Pause(2.0),)) for i in (0, 1)]
        assert times(
            [*pauses, Work(1.5), Wait(0), Wait(1)], overlap_bandwidth=0.1
        ) == pytest.approx(2)

    def test_jobs_of_a_lane_come_in_order(self) -> None:
        program = [Submit(0, i, (Work(1.0),)) for i in range(3)]
        timeline = Timeline(lanes=1)
        assert timeline.run([*program, Wait(0), Mark(), Wait(2), Mark()]) == pytest.approx([1, 3])

    def test_waiting_for_nobody_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="waits"):
            times([Wait(7)])


class TestSteps:
    def test_plain_ddp_by_hand(self) -> None:
        """2 ranks send all of a payload: 4 s from t = 1.5, 2 s behind it, to 7.5; then 0.5."""
        assert step_seconds(Strategy(), cluster(2, lanes=1), WORK) == pytest.approx(8.0)

    def test_a_wire_without_cost_leaves_the_computation(self) -> None:
        fast = cluster(4, flat=links(4, per_s=1e15))
        assert step_seconds(Strategy(), fast, WORK) == pytest.approx(WORK.compute_s)
        assert predict(Strategy(), fast, WORK).limit == "compute"

    def test_scatter_reduce_by_hand(self) -> None:
        """2 ranks, one bucket of 1e6 values at 8 bits, ready at once, codec of 1e6 values a second.

        encode 0.5 s, swap (5e5 + 64 bytes) 0.5 s, decode 0.5, encode 0.5, swap 0.5, decode 1.
        """
        load = Workload(
            forward_s=0,
            backward_s=0,
            rest_s=0,
            buckets=(Bucket(encoded=1_000_000, plain=0, ready_s=0),),
        )
        own = cost("dqsg:bits=8", LinearCost(start_s=0, per_s=1e6), bits=8)
        one = Strategy(codec="dqsg:bits=8")
        found = step_seconds(one, cluster(2, own), load)
        assert found == pytest.approx(3.5 + 2 * 80e-6)
        assert predict(one, cluster(2, own), load).sent_bytes == pytest.approx(1e6 + 160)

    @pytest.mark.parametrize("k", [1, 2, 4, 8])
    @pytest.mark.parametrize("per_s", [3e5, 8e5, 1e6, 2e6, 1e8])
    def test_ssd_is_the_papers_formula_where_nothing_is_shared(self, k: int, per_s: float) -> None:
        """T = [(k-1)·max(C, P) + max(C, P + L)]/k, for P and P + L that the next step can hide.

        Where the wire is the longer one, pushes queue up across pulls and the mean is the wire's:
        the formula, which lets every step start anew, is then an upper bound.
        """
        own = cost("dqsg:bits=8", FREE, bits=8)
        one = Strategy(codec="dqsg:bits=8", schedule="ssd", period=k)
        place = cluster(2, own, flat=links(2, per_s=per_s))
        half = 0.75e6 + 80
        push = pull = half / per_s
        work = replace(WORK, rest_s=0.0)  # the owners' step would share the device
        compute = work.compute_s
        formula = ((k - 1) * max(compute, push) + max(compute, push + pull)) / k
        found = step_seconds(one, place, work)
        assert found <= formula * (1 + 1e-9)
        assert found >= max(compute, push + pull / k) * (1 - 1e-9)
        if push + pull <= compute or push >= compute:
            assert found == pytest.approx(formula, rel=1e-6)

    def test_everyone_waits_for_the_slowest_rank(self) -> None:
        """Where the wire limits, every step by its skew; a push of SSD likewise."""
        late = replace(WORK, skew_s=0.25)
        slow = cluster(2, cost("dqsg:bits=4"), flat=links(2, per_s=1e5), lanes=1)
        for one in (Strategy(), Strategy(codec="dqsg:bits=4")):
            waited = step_seconds(one, slow, late) - step_seconds(one, slow, WORK)
            assert waited == pytest.approx(0.25)
        push = Strategy(codec="dqsg:bits=4", schedule="ssd", period=1)
        crawling = cluster(2, cost("dqsg:bits=4"), flat=links(2, per_s=1e5))
        waited = step_seconds(push, crawling, late) - step_seconds(push, crawling, WORK)
        assert waited == pytest.approx(0.25)

    def test_ssd_runs_no_further_ahead_than_two_pushes(self) -> None:
        """Between pulls, too: with a period of 100 the wire still sets the pace."""
        one = Strategy(codec="dqsg:bits=8", schedule="ssd", period=100)
        place = cluster(2, cost("dqsg:bits=8", bits=8), flat=links(2, per_s=1e5))
        program = list(one.timing.program(one.on(place, WORK)))
        waits = [stage.name for stage in program if isinstance(stage, Wait)]
        assert set(range(90)) <= set(waits)

    def test_owners_make_the_optimizers_step(self) -> None:
        """2 s of it, half on each of two ranks, behind a push that limits."""
        one = Strategy(codec="dqsg:bits=8", schedule="ssd", period=1)
        place = cluster(2, cost("dqsg:bits=8", bits=8), flat=links(2, per_s=1e5))
        quick, slow = (replace(WORK, forward_s=0, backward_s=0, rest_s=rest) for rest in (0.0, 2.0))
        more = step_seconds(one, place, slow) - step_seconds(one, place, quick)
        assert more == pytest.approx(1.0)

    def test_the_way_back_has_bits_of_its_own(self) -> None:
        """2 ranks: half of the values out at 4 bits, half back at 16."""
        own = replace(cost("dqsg:bits=4"), bits_back=16.0)
        found = predict(Strategy(codec="dqsg:bits=4"), cluster(2, own), WORK)
        values = WORK.values / 2
        assert found.sent_bytes == pytest.approx(values * (4 + 16) / 8 + 4 * 80)

    def test_a_backend_that_adds_slowly_takes_longer(self) -> None:
        quick = cost("fp16", bits=16)
        slow = replace(quick, reduce=LinearCost(start_s=0.0, per_s=1e6))
        one, load = Strategy(codec="fp16"), replace(WORK, buckets=WORK.buckets[1:])
        times = [step_seconds(one, cluster(2, own), load) for own in (quick, slow)]
        assert times[1] - times[0] == pytest.approx(0.5)  # 500,000 values behind the last bucket

    def test_memory_by_hand(self) -> None:
        """1.5 million values, 4 bits: 20 + 2·0.5 bytes a value and the owner's fp32 chunk."""
        place = cluster(2, cost("dqsg:bits=4"), lanes=1)
        ssd = Strategy(codec="dqsg:bits=4", schedule="ssd", period=4)
        assert predict(ssd, place, WORK).memory_bytes == 21 * 1.5e6 + 4 * 0.75e6
        hook = Strategy(codec="dqsg:bits=4")
        assert predict(hook, place, WORK).memory_bytes == (2 * 0.5 + 2) * 1e6
        assert predict(Strategy(), place, WORK).memory_bytes == 0

    def test_local_steps_pay_for_the_wire_once_a_period(self) -> None:
        one = Strategy(schedule="local", period=10)
        whole = 4 * WORK.values / 1e6
        expected = WORK.compute_s + whole / 10
        assert step_seconds(one, cluster(2), WORK) == pytest.approx(expected)

    def test_a_server_is_the_bottleneck_of_many_workers(self) -> None:
        """Weights go back in fp32: n·4·d/β, whatever a worker does."""
        one = Strategy(codec="dqsg:bits=4", schedule="async")
        found = step_seconds(one, cluster(65, cost("dqsg:bits=4")), WORK)
        assert found == pytest.approx(64 * 4 * WORK.values / 1e6)

    def test_what_limits(self) -> None:
        slow = cost("dqsg:bits=4", LinearCost(start_s=0.0, per_s=1e5))
        one = Strategy(codec="dqsg:bits=4")
        assert predict(Strategy(), cluster(2), WORK).limit == "wire"
        assert predict(one, cluster(2, slow), WORK).limit == "codec"
        far = cluster(2, cost("dqsg:bits=4"), flat=links(2, start_s=9.0, per_s=1e12))
        assert predict(one, far, WORK).limit == "latency"

    def test_a_codec_without_figures_is_named(self) -> None:
        with pytest.raises(lc.ConfigError, match="dqsg:bits=4.*not measured"):
            predict(Strategy(codec="dqsg:bits=4"), cluster(2, cost("qsgd:bits=4")), WORK)

    @given(st.floats(1e3, 1e12), st.floats(1.01, 100))
    def test_a_faster_link_never_makes_a_step_slower(self, per_s: float, times: float) -> None:
        own = cost("dqsg:bits=4", LinearCost(start_s=1e-3, per_s=1e6))
        place = cluster(
            3,
            own,
            flat=links(3, 1e-3, per_s),
            device=Device(wire_cpu_share=0.3, overlap_bandwidth=0.8),
            lanes=2,
        )
        for one in (Strategy(), Strategy(codec="dqsg:bits=4")):
            before = step_seconds(one, place, WORK)
            assert step_seconds(one, place.faster(times), WORK) <= before * (1 + 1e-6)

    @pytest.mark.parametrize("workers", [2, 3, 5, 64, 4096])
    def test_any_number_of_workers(self, workers: int) -> None:
        specs = ["fp16", "dqsg:bits=4", "global-exp:bits=8", "ecdq:error=0.08"]
        if workers <= 127:  # as many as int8 can add
            specs.append("global:bits=8")
        place = cluster(workers, *(cost(spec) for spec in specs))
        for spec in specs:
            assert predict(Strategy(codec=spec), place, WORK).step_s >= WORK.compute_s * 0.999

    @pytest.mark.parametrize(("workers", "per_node"), [(1, 1), (4097, 1), (6, 4), (4, 0)])
    def test_a_cluster_that_cannot_be_is_refused(self, workers: int, per_node: int) -> None:
        with pytest.raises(lc.ConfigError):
            Cluster(workers=workers, per_node=per_node, flat=links(2))


def paper_tree(
    nbytes: float, links: Links, ratio: float, reduce: LinearCost, slower: float
) -> list[Task]:
    """Global-QSGD's model of a tree all-reduce: whole buffers, up and down again, not cut.

        T = 2·log n·α + 2·log n·S/(ρ·β) + log n·ω·S/(ρ·γ)

    S bytes, ρ times fewer on the wire, γ the speed of plain reduction in bytes, ω times slower for
    encoded ones. Encoding is free. Against ρ = ω = 1 it pays where

        2·(1 - 1/ρ)/β > (ω/ρ - 1)/γ,   at ρ = 4:   β < 6γ/(ω - 4)

    Xin et al., Global-QSGD, 2025, arXiv 2305.18627. Our `tree` cuts the tensor into chunks with a
    tree each, so that a rank sends 2·(n-1)/n of it, not 2·log n times.
    """
    down = links.sendrecv.move(nbytes / ratio)
    up = [down, Work(slower * reduce.seconds(nbytes / ratio))]
    levels = round(math.log2(links.ranks))
    return [*up * levels, *[down] * levels]


class TestThePapersTree:
    """Global-QSGD's model, as works and moves of the same timeline."""

    @pytest.mark.parametrize("n", [2, 8, 64])
    def test_the_formula(self, n: int) -> None:
        size, alpha, beta, gamma = 1e6, 0.01, 2e6, 5e6
        own = links(n, alpha, beta)
        reduce = LinearCost(start_s=0.0, per_s=gamma)
        stages = tuple(paper_tree(size, own, 4.0, reduce, 3.0))
        log = math.log2(n)
        formula = 2 * log * alpha + 2 * log * size / 4 / beta + log * 3 * size / 4 / gamma
        assert times([Submit(0, 0, stages), Wait(0)]) == pytest.approx(formula)

    @pytest.mark.parametrize("slower", [5.0, 20.0, 79.0])
    def test_it_pays_below_6_gamma_over_omega_minus_4(self, slower: float) -> None:
        gamma = 5e6
        limit = 6 * gamma / (slower - 4)
        reduce = LinearCost(start_s=0.0, per_s=gamma)
        for beta, pays in ((0.99 * limit, True), (1.01 * limit, False)):
            own = links(8, 0.01, beta)
            plain, encoded = (
                times([Submit(0, 0, tuple(paper_tree(1e6, own, ratio, reduce, omega))), Wait(0)])
                for ratio, omega in ((1.0, 1.0), (4.0, slower))
            )
            assert (encoded < plain) == pays


PAIRS = (
    "none@allreduce",
    "fp16@allreduce",
    "global:bits=8@allreduce",
    "global:bits=4@ring",
    "dqsg:bits=4@scatter-reduce",
    "ecdq:error=0.08@scatter-reduce",
    "dqsg:bits=4@allgather",
    "global-exp:bits=8@tree",
    "global:levels=127,norm=l2,coder=elias@sparse",
)
VALUES, PLAIN_VALUES = 60_000, 300


def sent_and_predicted(text: str) -> tuple[int, float]:
    """Bytes that this rank sends, and what the model says."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    n = group.size()
    own, way = pair(text)
    x = torch.randn(VALUES, generator=torch.Generator().manual_seed(group.rank()))
    bits = 8 * own.nbytes(VALUES) / VALUES
    if own.varies:
        norm = {}
        if own.shared_norm:
            every = [own.local_norm(x)] * n
            norm = {"norm": own.global_norm(torch.stack(every)), "workers": 1}
        bits = 8 * own.at_share(0.5).encode(x, lc.Key(), **norm).nbytes / VALUES
    context = ExchangeContext(group=group)
    way.mean(x, own, context, torch.ones(PLAIN_VALUES))
    load = TensorLoad(
        encoded=VALUES,
        plain=PLAIN_VALUES,
        codec=own,
        cost=replace(cost("none"), spec=str(own), bits_out=bits, bits_back=bits),
    )
    return context.traffic.sent_bytes, way.sent_bytes(load, cluster(n))


def bytes_sent(rank: int) -> dict[str, tuple[int, float]]:
    return {text: sent_and_predicted(text) for text in PAIRS}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_predicted_bytes_are_those_that_exchanges_send(size: int, tmp_path: Path) -> None:
    """Within 1% (chunks and messages are padded), on average over ranks."""
    answers = ranks.run([bytes_sent], size, tmp_path)
    for text in PAIRS:
        found = [answers[rank, "bytes_sent"][text] for rank in range(size)]
        sent = sum(one[0] for one in found) / size
        assert found[0][1] == pytest.approx(sent, rel=0.015), text


def mean_error(
    name: str, error: float, back: float, n: int, kappa: float | None = None, per_node: int = 1
) -> float:
    one = EncodingError(error=error, error_back=back, workers=n, kappa=kappa, per_node=per_node)
    return exchange(name).mean_error(one)


class TestMeanError:
    """Against rows of `python -m benchmarks.mean_error`, measured with the exchanges themselves."""

    ROWS = load("mean_error")["rows"]

    @pytest.mark.parametrize("n", [2, 4, 16, 64])
    def test_scatter_reduce(self, n: int) -> None:
        row = self.row("dqsg:bits=4@scatter-reduce", n)
        one = self.row("dqsg:bits=4@scatter-reduce", 64, "identical")["nmse"]  # all of it e'
        assert mean_error("scatter-reduce", one, one, n) == pytest.approx(row["nmse"], rel=0.06)

    @pytest.mark.parametrize("n", [2, 8, 64])
    def test_tree(self, n: int) -> None:
        row = self.row("global-exp:bits=8@tree", n)
        assert mean_error("tree", 0.0785, 0, n) == pytest.approx(row["nmse"], rel=0.12)
        same = self.row("global-exp:bits=8@tree", 64, "identical")
        assert mean_error("tree", 0.0785, 0, 64, 1.0) == pytest.approx(same["nmse"], rel=0.12)

    @pytest.mark.parametrize("n", [2, 8, 64])
    def test_a_ring_of_independent_gradients_averages_nothing_away(self, n: int) -> None:
        assert mean_error("ring", 0.0003, 0, n) == pytest.approx(0.0003)
        assert mean_error("ring", 0.0003, 0, n, kappa=1.0) == pytest.approx(0.0003 / n)

    def test_hierarchical(self) -> None:
        row = self.row("dqsg:bits=4@hierarchical", 64)
        found = mean_error("hierarchical", 0.0184, 0.0184, 64, per_node=8)
        assert found == pytest.approx(row["nmse"], rel=0.06)

    def row(self, pair_text: str, n: int, kind: str = "independent") -> dict:
        for row in self.ROWS:
            if (row["pair"], row["ranks"], row["kind"]) == (pair_text, n, kind):
                return row
        raise LookupError(pair_text, n, kind)


def test_the_slowest_tenth_does_not_count() -> None:
    assert typical([*[1.0] * 5, *[2.0] * 4, 100.0]) == pytest.approx(13 / 9)
    assert typical([3.0]) == 3.0
