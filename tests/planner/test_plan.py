"""Plans: what is ranked, where strategies break even, and what is said."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest

import laconic as lc
from laconic.planner import (
    MACHINES,
    Cluster,
    CodecCost,
    LinearCost,
    Links,
    Paper,
    Plan,
    Strategy,
    Workload,
    machine,
    paper_workload,
    plan,
    predict,
    resized,
)
from laconic.planner._plan import PLAIN_DDP, Curves, break_even, sensible
from laconic.planner._strategy import short

WORK = paper_workload(30_000_000, 0.1)


def on(name: str, workers: int, **changes: Any) -> Paper:
    return Paper(machine=replace(machine(name), **changes), workers=workers)


def planned(paper: Paper, workload: Workload = WORK, **options: Any) -> Plan:
    return plan(paper.cluster(), workload, link_bit_s=paper.link_bit_s, at=paper.cluster, **options)


def simple(per_s: float = 1e9, codec_per_s: float = 1e10, **changes: Any) -> Cluster:
    """Four workers with nothing but speeds."""
    line = LinearCost(start_s=1e-5, per_s=per_s)
    cost = CodecCost(
        spec=Strategy(codec="dqsg:bits=4").codec,
        bits_out=4.07,
        bits_back=4.07,
        bits_once=4.07,
        error=0.03,
        error_back=0.03,
        encode=LinearCost(start_s=1e-5, per_s=codec_per_s),
        decode=LinearCost(start_s=1e-5, per_s=codec_per_s),
    )
    links = Links(ranks=4, allreduce=(line,), all_to_all=line, sendrecv=line)
    usual: dict[str, Any] = {"workers": 4, "flat": links, "codecs": (cost,)}
    return Cluster(**{**usual, **changes})


# What is ranked


def test_the_fastest_is_first_and_plain_ddp_is_always_there() -> None:
    found = planned(on("workstation-4090", 4))
    times = [one.prediction.step_s for one in found.choices]
    assert times == sorted(times)
    assert found.plain.speedup == 1 and found.plain.break_even is None
    assert found.plain.name == "plain DDP" and found.plain.code == "DDP(model)"
    for one in found.choices:
        assert one.speedup == pytest.approx(found.plain.prediction.step_s / one.prediction.step_s)


@pytest.mark.parametrize("error", [1e-9, 0.01, 0.1, 1.0])
def test_the_error_budget_is_kept(error: float) -> None:
    found = planned(on("workstation-4090", 4), error=error)
    assert all(one.prediction.error <= error for one in found.choices)
    assert all(one.prediction.error > error for one in found.above_error)
    assert found.plain in found.choices
    total = len(found.choices) + len(found.above_error)
    assert total == len(planned(on("workstation-4090", 4)).choices) + len(
        planned(on("workstation-4090", 4)).above_error
    )


def test_all_sensible_combinations_are_there() -> None:
    names = {one.name for one in planned(on("workstation-4090", 4), error=10).choices}
    assert {
        "plain DDP",
        "dqsg:bits=4",
        "dqsg:bits=4@hierarchical",
        "dqsg:bits=4@allgather",
        "global:bits=8@ring",
        "global-exp:bits=8",
        "ssd k=4 ecdq:error=0.08",
        "local k=8 dqsg:bits=4",
    } <= names
    assert "global:bits=8@allgather" not in names  # an all-reduce of the same bits sends less
    single = {one.name for one in planned(on("home", 64), error=1e9).choices}
    assert not any("hierarchical" in name or "allgather" in name for name in single)
    assert not any("@ring" in name for name in single)


def test_int8_holds_no_sum_of_more_than_127() -> None:
    names = {one.name for one in planned(on("p4d.24xlarge", 1024), error=1e9).choices}
    assert "global:bits=8" not in names
    assert "global:bits=8@hierarchical" not in names  # 128 nodes
    names = {one.name for one in planned(on("p4d.24xlarge", 512), error=1e9).choices}
    assert "global:bits=8@hierarchical" in names and "global:bits=8" not in names


def test_schedules_are_marked_and_never_called_best() -> None:
    found = planned(on("home", 4))
    marked = {one.prediction.strategy.schedule for one in found.choices if one.changes_training}
    assert marked == {"ssd", "local"}
    assert found.choices[0].changes_training and not found.best.changes_training
    assert "changes training" in found.verdict and found.choices[0].name in found.verdict


def test_codecs_that_encode_once_spend_their_whole_budget() -> None:
    cluster = on("home", 4).cluster()
    once = Strategy(codec="ecdq:error=0.08", exchange="allgather")
    twice = Strategy(codec="ecdq:error=0.08")
    spent = [predict(one, cluster, WORK) for one in (once, twice)]
    assert spent[0].error == pytest.approx(0.08) and spent[1].error == pytest.approx(
        0.0688, rel=0.01
    )
    values = sum(bucket.encoded for bucket in WORK.buckets)
    plain = WORK.values - values
    assert spent[0].sent_bytes == pytest.approx(3 * (2.332 / 8 * values + 4 * plain), rel=1e-3)
    ssd = Strategy(codec="ecdq:error=0.08", schedule="ssd", period=4)
    assert predict(ssd, cluster, WORK).error == pytest.approx(0.08)


def test_given_strategies_are_the_only_ones_beside_plain() -> None:
    found = planned(on("home", 4), strategies=[Strategy(codec="dqsg:bits=4")] * 2)
    assert {one.name for one in found.choices} == {"plain DDP", "dqsg:bits=4"}
    with pytest.raises(lc.ConfigError, match="was not measured here"):
        planned(on("home", 4), strategies=[Strategy(codec="qsgd:bits=2")])


@pytest.mark.parametrize("error", [0.0, -1.0, math.nan, math.inf])
def test_other_budgets_are_refused(error: float) -> None:
    with pytest.raises(lc.ConfigError, match="NMSE"):
        planned(on("home", 4), error=error)


# Rates


MONOTONE = [
    (name, strategy)
    for name in ("home", "cpu-server", "workstation-4090", "p4d.24xlarge")
    for strategy in (
        Strategy(),
        Strategy(codec="dqsg:bits=4"),
        Strategy(codec="ecdq:error=0.08"),
        Strategy(codec="global:bits=8"),
        Strategy(codec="global-exp:bits=8"),
        Strategy(codec="dqsg:bits=4", schedule="ssd", period=4),
        Strategy(codec="dqsg:bits=4", schedule="local", period=8),
    )
]


@pytest.mark.parametrize(("name", "strategy"), MONOTONE, ids=lambda one: str(one))
def test_a_faster_link_never_makes_a_step_slower(name: str, strategy: Strategy) -> None:
    paper = on(name, 4 * machine(name).per_node)
    curves = Curves(WORK, paper.cluster)
    times = [curves.seconds(strategy, 10 ** (k / 4)) for k in range(-12, 13)]
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(times))
    assert times[-1] >= WORK.compute_s * (1 - 1e-9)


def test_more_bits_are_never_fewer_bytes_or_faster() -> None:
    strategy, before = Strategy(codec="dqsg:bits=4"), (0.0, 0.0)
    for bits in (1.0, 2.0, 4.0, 8.0, 16.0):
        cluster = simple(per_s=1e8)
        cost = replace(cluster.codecs[0], bits_out=bits, bits_back=bits, bits_once=bits)
        found = predict(strategy, replace(cluster, codecs=(cost,)), WORK)
        assert found.sent_bytes > before[0] and found.step_s >= before[1]
        before = found.sent_bytes, found.step_s


@pytest.mark.parametrize(("name", "workers"), [("workstation-4090", 8), ("p4d.24xlarge", 64)])
def test_break_even_is_where_times_cross(name: str, workers: int) -> None:
    paper = on(name, workers)
    found, curves = planned(paper), Curves(WORK, paper.cluster)
    kinds = set()
    for one in found.choices:
        where, strategy = one.break_even, one.prediction.strategy
        if where is None:
            continue
        kinds.add(where.when)

        def gain(bit_s: float, strategy: Strategy = strategy) -> float:
            times = bit_s / paper.link_bit_s
            return curves.seconds(PLAIN_DDP, times) - curves.seconds(strategy, times)

        if where.bit_s is None:
            sign = 1 if where.when == "always" else -1
            assert sign * gain(1e3) >= 0 and sign * gain(1e14) >= 0, one.name
            continue
        side = 1 if where.when == "below" else -1
        assert side * gain(where.bit_s / 1.02) > 0 >= side * gain(where.bit_s * 1.02), one.name
        assert f"{where.when} " in str(where)
    assert {"below", "never"} <= kinds


def test_break_even_of_a_hand_worked_cluster() -> None:
    """No overlap, no start: 2(n-1)/n·(32 - 4)/8·d/β saved against 2·d/γ of codec."""
    quiet = LinearCost(start_s=0.0, per_s=1e9)
    links = Links(ranks=4, allreduce=(quiet,), all_to_all=quiet, sendrecv=quiet)
    cost = replace(
        simple().codecs[0],
        bits_out=4.0,
        bits_back=4.0,
        encode=LinearCost(start_s=0.0, per_s=1e9),
        decode=LinearCost(start_s=0.0, per_s=1e9),
    )
    cluster = simple(flat=links, codecs=(cost,))
    d = 1_000_000
    work = replace(
        WORK,
        buckets=(replace(WORK.buckets[0], encoded=d, plain=0, ready_s=WORK.backward_s),),
    )
    found = break_even(Strategy(codec="dqsg:bits=4"), Curves(work, cluster.faster), link_bit_s=8e9)
    # encode 3/4 + 1/4, decode 3/4 + 1 of d values; 1.5·(4 - 0.5) bytes a value fewer
    assert found.when == "below" and found.bit_s is not None
    assert found.bit_s / 8 == pytest.approx(1.5 * 3.5 / (2.75 / 1e9), rel=0.02)


def test_plain_ddp_is_best_on_fast_links_with_slow_codecs() -> None:
    found = plan(simple(per_s=1e12, codec_per_s=1e8), WORK)
    assert found.best is found.plain and found.choices[0].prediction.strategy.schedule != "ssd"
    assert "Plain DDP is" in found.verdict
    only = plan(
        simple(per_s=1e12, codec_per_s=1e8), WORK, strategies=[Strategy(codec="dqsg:bits=4")]
    )
    assert only.choices[0] is only.plain and "predicted to be the fastest" in only.verdict


def test_a_codec_is_best_on_slow_links() -> None:
    found = plan(simple(per_s=1e6), WORK)
    assert found.best.name == "dqsg:bits=4" and found.best.speedup > 6
    assert found.best.prediction.limit == "wire"
    assert found.verdict.startswith("dqsg:bits=4 is predicted 7.") and "the wire" in found.verdict
    assert found.best.code == 'lc.compress(model, "dqsg:bits=4")'
    assert lc.codec("dqsg:bits=4")


def test_the_rate_of_a_probe_is_that_of_its_all_reduce() -> None:
    assert plan(simple(per_s=2e8), WORK).link_bit_s == pytest.approx(1.6e9)


def test_a_gain_that_is_hardly_there_is_not_called_one() -> None:
    """With 99% of the step computed, nothing gains 3%."""
    found = plan(simple(per_s=1e9), replace(WORK, forward_s=20.0))
    assert found.best is found.plain and "gain more than" in found.verdict


# Sizes


@pytest.mark.parametrize(("name", "workers"), [("home", 2), ("home", 4096), ("dgx-h100", 4096)])
def test_two_to_4096_workers(name: str, workers: int) -> None:
    start = time.process_time()
    found = planned(on(name, workers), paper_workload(7_000_000_000, 0.4, "bf16"))
    assert time.process_time() - start < 10  # about 2 on an idle machine
    assert len(found.choices) > 5 and all(
        0.4 <= one.prediction.step_s < math.inf for one in found.choices
    )
    json.dumps(asdict(found), allow_nan=False)


def test_every_machine_can_be_planned_for() -> None:
    for name, one in MACHINES.items():
        found = planned(on(name, 2 * one.per_node), strategies=[Strategy(codec="dqsg:bits=4")])
        assert found.verdict, name


def test_a_probe_can_be_thought_larger() -> None:
    paper = on("home", 4)
    small, large = paper.cluster(), on("home", 16).cluster()
    grown, work = resized(small, replace(WORK, kappa=0.4), 16)
    assert grown.workers == grown.flat.ranks == 16 and work is not None
    assert work.kappa == pytest.approx(0.2 + 0.8 / 16)  # (4·0.4 - 1)/3 is common
    ring = grown.flat.allreduce[0]
    assert ring.start_s == pytest.approx(large.flat.allreduce[0].start_s)
    assert (
        ring.per_s == large.flat.allreduce[0].per_s and grown.flat.sendrecv == small.flat.sendrecv
    )
    errors = [
        next(one.error for one in cluster.codecs if "global:bits" in one.spec)
        for cluster in (grown, large)
    ]
    assert errors[0] == pytest.approx(errors[1])
    assert resized(small, None, 4) == (small, None)


def test_nodes_stay_as_they_are_when_there_are_more() -> None:
    small, large = (on("p4d.24xlarge", n).cluster() for n in (16, 64))
    grown, _ = resized(small, None, 64)
    assert grown.inside == small.inside and grown.between is not None and large.between is not None
    assert grown.between.ranks == 8 and grown.nodes == 8
    assert grown.flat.all_to_all.per_s == pytest.approx(large.flat.all_to_all.per_s)
    with pytest.raises(lc.ConfigError, match="a multiple of 8"):
        resized(small, None, 20)
    one, _ = resized(small, None, 8)
    assert one.flat == small.inside and one.inside is None
    with pytest.raises(lc.ConfigError, match="2 to 4096"):
        resized(small, None, 8192)
    with pytest.raises(lc.ConfigError, match="two nodes or more"):
        resized(on("p4d.24xlarge", 8).cluster(), None, 64)


# Names


@pytest.mark.parametrize(
    "text",
    [
        "fp16",
        "dqsg:bits=4",
        "dqsg:bits=4,levels=5,coder=rans",
        "rotate(dqsg:bits=4)",
        "rotate(dqsg:bits=4,block=256):block=2048",
        "ecdq:error=0.08,coder=rans",
        "global:bits=8,subtract=true",
        "feedback(qsgd-topk)",
    ],
)
def test_short_names_mean_the_same(text: str) -> None:
    full = str(lc.codec(text))
    assert str(lc.codec(short(full))) == full
    assert len(short(full)) <= len(full) and short(full) == text


def test_every_line_of_code_names_a_pair_that_works() -> None:
    cluster = on("workstation-4090", 4).cluster()
    for strategy in sensible(cluster):
        lc.pair(strategy.spec)
