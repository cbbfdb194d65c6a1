"""Clusters on paper: links by hand-worked numbers, codecs by the rows that were measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

import laconic as lc
from benchmarks._rows import load
from laconic._cost import level_distance, rounding_error
from laconic._units import parse_count, parse_rate, parse_seconds, rate, seconds, size
from laconic.planner import MACHINES, LinearCost, Links, Machine, Paper, machine, paper_workload
from laconic.planner import _machine_catalog as figures
from laconic.planner._datasheet import codec_costs


def rows(name: str) -> list[dict[str, Any]]:
    return load(name)["rows"]


def node(**changes: Any) -> Machine:
    """β = 1 GB/s between nodes, 10 µs; 10 GB/s inside, 1 µs."""
    usual: dict[str, Any] = {
        "device": "h200",
        "per_node": 4,
        "link_bit_s": 8e9 / 0.85,
        "latency_s": 10e-6,
        "inside_byte_s": 10e9,
        "inside_latency_s": 1e-6,
    }
    return Machine(**{**usual, **changes})


def check(line: LinearCost, start_us: float, per_s: float) -> None:
    assert line.start_s == pytest.approx(start_us * 1e-6)
    assert line.per_s == pytest.approx(per_s)


# Links


def test_two_nodes_of_four_by_hand() -> None:
    cluster = Paper(machine=node(), workers=8).cluster()
    flat, inside, between = cluster.flat, cluster.inside, cluster.between
    assert isinstance(inside, Links) and isinstance(between, Links)
    assert (flat.ranks, inside.ranks, between.ranks, cluster.nodes) == (8, 4, 2, 2)
    ring, tree = flat.allreduce
    check(ring, 2 * 7 / 8 * (2 * 10 + 6 * 1), 1e9)  # 2 of 8 links leave a node
    check(tree, 2 * 1 * 10 + 2 * 2 * 1, 1e9 * 7 / 8)
    check(flat.all_to_all, 10 + 6 * 2, 1e9 * 7 / (4 * 4))  # 4 of 7 messages leave, 4 ranks share
    check(flat.sendrecv, 10, 1e9 / 4)
    ring, tree = inside.allreduce
    check(ring, 2 * 3 * 1, 10e9)
    check(tree, 2 * 2 * 1, 10e9 * 3 / 4)
    check(inside.all_to_all, 1 + 2 * 2, 10e9)
    check(inside.sendrecv, 1, 10e9)
    (ring,) = between.allreduce  # two ranks: a tree is a ring
    check(ring, 2 * 10, 1e9 / 4)
    check(between.all_to_all, 10, 1e9 / 4)
    check(between.sendrecv, 10, 1e9 / 4)


def test_one_worker_a_node_has_no_levels() -> None:
    cluster = Paper(machine=node(per_node=1), workers=4).cluster()
    assert cluster.inside is None and cluster.between is None
    check(cluster.flat.allreduce[0], 2 * 3 * 10, 1e9)
    check(cluster.flat.allreduce[1], 2 * 2 * 10, 1e9 * 3 / 4)
    check(cluster.flat.all_to_all, 10 + 2 * 2, 1e9)
    check(cluster.flat.sendrecv, 10, 1e9)


def test_one_node_knows_no_nic() -> None:
    cluster = Paper(machine=node(per_node=8), workers=4).cluster()
    assert cluster.per_node == 4 and cluster.inside is None
    check(cluster.flat.allreduce[0], 2 * 3 * 1, 10e9)
    check(cluster.flat.all_to_all, 1 + 2 * 2, 10e9)
    check(cluster.flat.sendrecv, 1, 10e9)


def test_gloo_has_rings_and_a_latency_a_message() -> None:
    cluster = Paper(machine=node(per_node=1, device="cpu"), workers=4).cluster()
    assert cluster.backend == "gloo" and cluster.lanes == 2
    (ring,) = cluster.flat.allreduce
    check(ring, 60, 1e9)
    check(cluster.flat.all_to_all, 30, 1e9)


def test_wires_inside_limit_faster_nics() -> None:
    """A ring that goes through nodes is as fast as its slowest link."""
    paper = Paper(machine=node(), workers=8)
    assert paper.cluster(1e6).flat.allreduce[0].per_s == pytest.approx(10e9)
    assert paper.cluster(1e6).flat.all_to_all.per_s == pytest.approx(10e9 * 7 / 3)
    between = paper.cluster(2.0).between
    assert between is not None and between.all_to_all.per_s == pytest.approx(2e9 / 4)


@pytest.mark.parametrize(
    ("changes", "workers", "sentence"),
    [
        ({"device": "abacus"}, 8, "devices are b200"),
        ({"per_node": 0}, 8, "1 worker or more"),
        ({"link_bit_s": 0.0}, 8, "rates above 0"),
        ({"latency_s": math.inf}, 8, "rates above 0"),
        ({}, 6, "do not fill nodes of 4"),
        ({"per_node": 1}, 1, "2 to 4096 workers"),
        ({"per_node": 1}, 4097, "2 to 4096 workers"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], workers: int, sentence: str) -> None:
    with pytest.raises(lc.ConfigError, match=sentence):
        Paper(machine=node(**changes), workers=workers).cluster()


def test_machines_have_names() -> None:
    assert machine("P4D.24xlarge") is MACHINES["p4d.24xlarge"]
    with pytest.raises(lc.ConfigError, match="dgx-h100"):
        machine("vax")
    for one in MACHINES.values():
        Paper(machine=one, workers=2 * one.per_node).cluster()


# Codecs


def test_bits_and_errors_are_the_measured_ones() -> None:
    real = {row["codec"]: row for row in rows("codecs") if row.get("model") == "transformer"}
    by_meaning = {str(lc.codec(spec)): row for spec, row in real.items()}
    for one in figures.CODECS:
        row = by_meaning[str(lc.codec(one.spec))]
        assert one.bits == pytest.approx(row["bits"], rel=1e-3), one.spec
        assert one.error == pytest.approx(row["nmse"], rel=5e-3), one.spec
        speeds = row["encode_gbs"], row["decode_gbs"]
        assert one.cpu_gb_s == pytest.approx(speeds, rel=5e-3), one.spec


def gpu_rows() -> dict[str, tuple[float, float]]:
    found: dict[str, dict[str, float]] = {}
    every = [*rows("gpu"), *rows("rotate-cuda"), *rows("ecdq_gpu")]
    for row in every:
        if row.get("dtype", "float32") == "float32" and row.get("input", "gaussian") == "gaussian":
            assert row["numel"] == figures.MEASURED_VALUES
            found.setdefault(row.get("codec", "copy"), {}).setdefault(row["name"], row["ms"])
    return {
        name: (one["encode"], one["decode-add"]) for name, one in found.items() if "encode" in one
    }


def test_times_on_a_gpu_are_the_measured_ones() -> None:
    measured = gpu_rows()
    copy = next(row for row in rows("gpu") if row["name"] == "copy")
    assert copy["ms"] == pytest.approx(figures.GPU_COPY_MS, rel=1e-3)
    taken = {"ecdq:error=0.02": "ecdq:error=0.01", "ecdq:error=0.08": "ecdq:error=0.01"}
    taken |= {"ecdq:error=0.3": "ecdq:error=0.083"}
    for one in figures.CODECS:
        if one.gpu_ms is None:
            continue
        if one.spec in ("fp16", "bf16"):
            assert one.gpu_ms == pytest.approx((0.75 * copy["ms"],) * 2, rel=1e-3)
            continue
        name = taken.get(one.spec) or one.spec.replace("bits=4", "bits=4,block=512")
        name = name.replace("dqsg:bits=8", "dqsg:bits=8,block=512")
        assert one.gpu_ms == pytest.approx(measured[name], rel=5e-3), one.spec


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_starts_are_the_measured_ones(device: str) -> None:
    measured = {row["codec"]: row for row in rows(f"codec_starts_{device}")}
    for one in figures.CODECS:
        if device == "cuda" and one.gpu_ms is None:
            continue
        name = one.spec.replace("error=0.02", "error=0.08").replace("error=0.3", "error=0.08")
        starts = one.gpu_us if device == "cuda" else one.cpu_us
        row = measured[name]
        assert starts == pytest.approx((row["encode_us"], row["decode_us"]), abs=1), one.spec


def test_half_the_memory_bandwidth_is_half_the_speed() -> None:
    fast = {cost.spec: cost for cost in codec_costs("h200", 4)}
    slow = {cost.spec: cost for cost in codec_costs("a10g", 4)}
    assert fast.keys() == slow.keys()
    for spec, cost in fast.items():
        other = slow[spec]
        assert cost.encode.per_s == pytest.approx(8 * other.encode.per_s)
        assert cost.decode.per_s == pytest.approx(8 * other.decode.per_s)
        assert cost.encode.start_s == other.encode.start_s


def test_only_the_cpu_has_rans() -> None:
    assert not any("rans" in cost.spec for cost in codec_costs("h100", 4))
    assert any("rans" in cost.spec for cost in codec_costs("cpu", 4))


def test_budgets_are_halved_and_their_bits_lie_between() -> None:
    costs = {cost.spec: cost for cost in codec_costs("h200", 4)}
    one = costs[str(lc.codec("ecdq:error=0.08"))]
    assert one.error + one.error_back == pytest.approx(0.0786)
    assert one.bits_once == pytest.approx(2.332)
    assert one.bits_out == pytest.approx((2.332 + 3.249) / 2)  # 0.04 is half way to 0.02


def test_the_error_of_global_follows_its_levels() -> None:
    """Against the exchange itself: 2^20 Gaussian values of each of n independent workers."""
    measured = {
        row["ranks"]: row["nmse"]
        for row in rows("mean_error")
        if row["pair"] == "global:bits=8@allreduce" and row["kind"] == "independent"
    }
    assert sorted(measured) == [2, 4, 8, 16, 32, 64]
    for ranks, nmse in measured.items():
        largest = math.sqrt(2 * math.log(ranks * 2**20)) - 0.3  # of so many Gaussian values
        y = largest / (127 // ranks)
        assert rounding_error(y) == pytest.approx(nmse, rel=0.15), ranks


def test_global_on_nodes_and_rings_has_more_levels() -> None:
    """As measured: between 8 nodes of 8, and where sums widen."""
    measured = {
        (row["pair"], row["ranks"]): row["nmse"]
        for row in rows("mean_error")
        if row["kind"] == "independent" and row["pair"].startswith("global:bits=8")
    }
    cost = next(one for one in codec_costs("h200", 64) if "global:bits=8" in one.spec)
    spec = str(lc.codec("global:bits=8"))
    seen = cost.__class__(**{**vars(cost), "error": measured["global:bits=8@allreduce", 64]})
    own = lc.codec(spec)
    nodes, ring = seen.shared_by(own, 8, 64), seen.shared_by(own, 1, 64)
    assert nodes.spec == ring.spec == spec
    # nodes' means are fewer values, of which the largest is a little smaller
    assert nodes.error == pytest.approx(measured["global:bits=8@hierarchical", 64], rel=0.25)
    assert ring.error == pytest.approx(measured["global:bits=8@ring", 64], rel=0.2)
    with pytest.raises(lc.ConfigError):  # int8 holds no sum of 128
        seen.shared_by(own, 128, 64)
    assert seen.shared_by(own, 64, 64) is seen


@pytest.mark.parametrize("y", [0.01, 0.5, 2.19, 2.3, 5.0, 300.0])
def test_an_error_says_how_far_levels_are_apart(y: float) -> None:
    assert level_distance(rounding_error(y)) == pytest.approx(y, rel=0.05)


# Workloads


def test_buckets_hold_all_parameters_and_come_evenly() -> None:
    work = paper_workload(25_000_000, 0.9)
    assert len(work.buckets) == 4 and work.values == 25_000_000  # 100 MB in 25 MiB each
    assert work.forward_s == pytest.approx(0.3) and work.compute_s == pytest.approx(0.9)
    assert [b.ready_s for b in work.buckets] == pytest.approx([0.15, 0.3, 0.45, 0.6])
    encoded = sum(bucket.encoded for bucket in work.buckets)
    assert encoded == pytest.approx(0.995 * work.values, rel=1e-6)
    large = paper_workload(7_000_000_000, 0.4, "bf16")
    assert len(large.buckets) == 32 and large.values == 7_000_000_000 and large.value_bytes == 2
    assert len(paper_workload(1, 0.4).buckets) == 1


@pytest.mark.parametrize("bad", [(0, 1.0, "fp32"), (10, 0.0, "fp32"), (10, 1.0, "int4")])
def test_other_workloads_are_refused(bad: tuple[int, float, str]) -> None:
    with pytest.raises(lc.ConfigError):
        paper_workload(*bad)


# Units


def test_people_write_units() -> None:
    assert parse_rate("25gbit") == 25e9 and parse_rate("1.5 Mbit/s") == 1.5e6
    assert parse_seconds("30us") == pytest.approx(30e-6) and parse_seconds("2 min") == 120
    assert parse_count("7b") == 7_000_000_000 and parse_count("1860000") == 1_860_000


@pytest.mark.parametrize("text", ["", "fast", "1.2.3gbit", "0gbit", "10", "-1gbit", "1e9gbit"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(lc.ConfigError, match="a rate is like"):
        parse_rate(text)
    with pytest.raises(lc.ConfigError, match="a time is like"):
        parse_seconds(text)


def test_numbers_are_told_in_units() -> None:
    assert [rate(x) for x in (5.0, 99.6e6, 1e9, 2.5e12)] == [
        "5.0 bit/s", "100 Mbit/s", "1.0 Gbit/s", "2.5 Tbit/s",
    ]  # fmt: skip
    assert [seconds(x) for x in (0.0, 3e-7, 0.0123, 90.0)] == ["0", "300 ns", "12 ms", "90 s"]
    assert size(1.5e6) == "1.5 MB"
