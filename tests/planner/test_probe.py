"""The probe on real ranks: the same numbers everywhere, real buckets, nodes, and files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import ranks
import torch
from torch import nn

import laconic as lc
from laconic import planner
from laconic.planner import LinearCost, Probe, Setup, Strategy, load_setup, plan, probe
from laconic.planner._probe_cluster import _through_ends
from laconic.planner._probe_model import checked_setup

CODECS = ("dqsg:bits=4", "fp16", "global:bits=8", "ecdq:error=0.08")
PATIENCE_S = 0.6
SIZES = (64, 300, 300, 10)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


TOLD: list[tuple[str, float]] = []


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(SIZES)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def setup(rank: int) -> Setup:
    generator = torch.Generator().manual_seed(rank)

    def loss(model: nn.Module) -> torch.Tensor:
        x = torch.randn(16, SIZES[0], generator=generator)
        return nn.functional.cross_entropy(model(x), torch.arange(16) % SIZES[-1])

    return Setup(network(), loss)


def with_a_model(rank: int) -> dict:
    return asdict(probe(setup(rank), codecs=CODECS, patience_s=PATIENCE_S))


def with_adamw(rank: int) -> dict:
    made = setup(rank)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4)
    adamw = Setup(made.model, made.loss, optimizer)
    return asdict(probe(adamw, codecs=("dqsg:bits=4",), patience_s=PATIENCE_S))


def on_two_nodes(rank: int) -> dict:
    names = {"LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2}
    os.environ |= {name: str(value) for name, value in names.items()}
    TOLD.clear()
    watch = lambda *one: TOLD.append(one)  # noqa: E731
    return asdict(probe(codecs=("dqsg:bits=4",), patience_s=PATIENCE_S, watch=watch))


def told_meanwhile(rank: int) -> list[tuple[str, float]]:
    """By the job before."""
    return TOLD


answers = ranks.shared([with_a_model, with_adamw, on_two_nodes, told_meanwhile], 4)


@pytest.mark.parametrize("job", ["with_a_model", "with_adamw", "on_two_nodes"])
def test_all_ranks_know_the_same(answers: ranks.Answers, job: str) -> None:
    found = [answers[rank, job] for rank in range(4)]
    assert all(one == found[0] for one in found)


def test_buckets_are_ddps(answers: ranks.Answers) -> None:
    found = Probe.parse(answers[0, "with_a_model"])
    work = found.workload
    assert work is not None
    assert work.values == sum(p.numel() for p in network().parameters())
    encoded = sum(p.numel() for p in network().parameters() if p.dim() > 1 and p.numel() >= 10_000)
    assert sum(bucket.encoded for bucket in work.buckets) == encoded
    assert all(0 <= bucket.ready_s <= work.backward_s for bucket in work.buckets)
    assert work.forward_s > 0 and work.backward_s > 0 and work.skew_s >= 0
    assert work.kappa is not None and 0.25 <= work.kappa < 1  # batches of ranks differ


def test_codecs_are_measured_on_these_gradients(answers: ranks.Answers) -> None:
    found = Probe.parse(answers[0, "with_a_model"])
    costs = {lc.codec(cost.spec).name: cost for cost in found.cluster.codecs}
    assert set(costs) == {"dqsg", "fp16", "global", "ecdq"}
    assert costs["dqsg"].bits_out == pytest.approx(4.1, abs=0.1)
    assert costs["fp16"].error < 1e-6 < costs["dqsg"].error < 0.2
    assert costs["ecdq"].error_back == pytest.approx(0.04, rel=0.2)  # half of its budget
    assert costs["ecdq"].bits_once <= costs["ecdq"].bits_back
    assert costs["global"].norm.seconds(1e6) > 0 == costs["dqsg"].norm.start_s


def test_gradients_are_measured_in_the_optimizers_units(answers: ranks.Answers) -> None:
    found, plain = (Probe.parse(answers[0, name]) for name in ("with_adamw", "with_a_model"))
    assert found.workload is not None and plain.workload is not None
    assert found.workload.adaptive and not plain.workload.adaptive
    errors = [
        next(cost.error for cost in one.cluster.codecs if cost.spec.startswith("dqsg"))
        for one in (found, plain)
    ]
    assert errors[0] < errors[1]  # values of one spread: a block's largest is nearer to the others
    every = plan(found.cluster, found.workload, strategies=[Strategy(codec="dqsg:bits=4")])
    codes = [choice.code for choice in every.choices]
    assert 'lc.compress(model, "dqsg:bits=4", optimizer=optimizer)' in codes
    assert "DDP(model)" in codes


def test_nodes_are_measured_apart(answers: ranks.Answers) -> None:
    cluster = Probe.parse(answers[0, "on_two_nodes"]).cluster
    assert (cluster.workers, cluster.per_node, cluster.nodes) == (4, 2, 2)
    assert cluster.inside is not None and cluster.between is not None
    assert cluster.flat.ranks == 4 and cluster.inside.ranks == cluster.between.ranks == 2


def test_a_probe_tells_what_it_measures(answers: ranks.Answers) -> None:
    told = answers[0, "told_meanwhile"]
    assert [what for what, _ in told][-2:] == ["the device", "dqsg:bits=4"]
    done = [part for _, part in told]
    assert done[0] == 0 and done == sorted(done) and done[-1] < 1


def test_a_file_holds_all(answers: ranks.Answers, tmp_path: Path) -> None:
    found = Probe.parse(answers[0, "with_a_model"])
    found.save(tmp_path / "probe.json")
    assert Probe.load(tmp_path / "probe.json") == found


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 0}', "no"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(lc.ConfigError):
        Probe.load(path)


def test_a_newer_file_is_named(answers: ranks.Answers, tmp_path: Path) -> None:
    path = tmp_path / "newer.json"
    path.write_text(json.dumps({**answers[0, "with_a_model"], "format": 9}))
    with pytest.raises(lc.ConfigError, match="format 9"):
        Probe.load(path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("train", "module:function"),
        ("no_such_module:setup", "cannot be loaded"),
        ("os:no_such_function", "cannot be loaded"),
        ("os:getcwd", r"must return \(model, loss\)"),
    ],
)
def test_a_wrong_setup_is_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(lc.ConfigError, match=sentence):
        load_setup(name)


def test_a_setup_may_bring_its_optimizer() -> None:
    model = network()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    assert checked_setup((model, len, own), "it").optimizer is own


def test_without_ranks_there_is_nothing_to_probe() -> None:
    with pytest.raises(lc.ConfigError, match="torchrun"):
        probe()


def test_bursts_do_not_make_a_link_look_faster() -> None:
    """1 MB/s behind 10 ms, but the first 50 KB are free: large messages say what bytes cost."""
    points = [(x, 0.01 + max(0.0, x - 5e4) / 1e6) for x in (1e3, 4e3, 1.6e4, 6.4e4, 1e7, 4e7)]
    found = _through_ends(points)
    assert found.start_s == pytest.approx(0.01)
    assert found.per_s == pytest.approx(1e6, rel=0.01)
    assert isinstance(found, LinearCost) and found.spread < 0.5


def test_a_probe_of_the_first_format_is_read() -> None:
    rows = json.loads((RESULTS / "predicted.json").read_text())["rows"]
    kept = next(row["probe"] for row in rows if "probe" in row)
    old, links = kept["cluster"]["device"], kept["cluster"]["flat"]
    assert kept["format"] == 1 and "room" in old and "swap" in links
    cluster = Probe.parse(kept).cluster
    device = cluster.device
    found = device.slots, device.wire_cpu_share, device.overlap_bandwidth, device.overlap_starts
    assert found == (old["room"], old["drain"], old["pace"], old["start_pace"])
    assert cluster.flat.all_to_all.per_s == links["swap"]["per_s"]
    assert cluster.flat.sendrecv.per_s == links["hop"]["per_s"]


def test_the_old_name_of_a_linear_cost() -> None:
    with pytest.warns(DeprecationWarning, match="LinearCost"):
        assert planner.Line is LinearCost
