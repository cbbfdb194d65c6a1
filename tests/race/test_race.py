"""The race: data, strategies, verdicts, and a small real one."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import laconic as lc
from laconic import lab
from laconic.cli._app import app
from laconic.cli._race_view import View
from laconic.race import (
    COURSES,
    DEFAULT,
    Lane,
    Machine,
    Parts,
    Point,
    Race,
    Settings,
    Task,
    Watcher,
    entries,
    race,
    seconds_to_target,
    verdict,
)
from laconic.race._data import load, made

PICTURES = np.arange(3 * 32 * 32 * 4, dtype=np.int64).astype(np.uint8).reshape(4, 3, 32, 32)
LABELS = [3, 1, 0, 2]


def settings(**changes: Any) -> Settings:
    usual = Settings(
        data="digits", workers=2, rate="none", steps=8, batch=16, lr=0.2, seed=0, target=0.2
    )
    return replace(usual, **changes)


# Data


def test_digits_are_real_and_split() -> None:
    data = load("digits")
    assert len(data.training) == 1437 and len(data.testing) == 360
    values, labels = data.training.at(slice(None))
    assert values.shape == (1437, 1, 8, 8) and set(labels.tolist()) == set(range(10))
    assert abs(values.mean()) < 0.05 and abs(values.std() - 1) < 0.05
    shares = [data.training.share(rank, 3) for rank in range(3)]
    assert sum(map(len, shares)) == 1437
    assert torch.equal(shares[1].pictures[0], data.training.pictures[1])


def idx(values: np.ndarray) -> bytes:
    return (
        b"\0\0\x08"
        + bytes([values.ndim])
        + np.array(values.shape, ">u4").tobytes()
        + values.tobytes()
    )


def write_fashion(folder: Path, packed: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 6), ("t10k", 2)):
        pictures = np.arange(count * 784).astype(np.uint8).reshape(count, 28, 28)
        labels = np.arange(count).astype(np.uint8)
        for name, values in (("images-idx3", pictures), ("labels-idx1", labels)):
            data = idx(values)
            file = folder / f"{part}-{name}-ubyte{'.gz' if packed else ''}"
            file.write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("inside", [".", "FashionMNIST/raw"])
def test_fashion_mnist_is_read_from_a_folder(tmp_path: Path, packed: bool, inside: str) -> None:
    write_fashion(tmp_path / inside, packed)
    data = load("fashion-mnist", tmp_path)
    assert data.training.pictures.shape == (6, 1, 28, 28) and len(data.testing) == 2
    assert data.training.labels.tolist() == list(range(6))
    assert data.training.pictures[1, 0, 0, :3].tolist() == [16, 17, 18]  # 784 modulo 256


def test_no_more_than_two_thousand_pictures_are_tested(tmp_path: Path) -> None:
    write_fashion(tmp_path, packed=False)
    pictures, labels = np.zeros((2001, 28, 28), np.uint8), (np.arange(2001) % 10).astype(np.uint8)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(pictures))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    data = load("fashion-mnist", tmp_path)
    assert len(data.testing) == 2000 and data.testing.labels[:3].tolist() == [0, 1, 2]


def write_cifar(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        if kind == "python":
            found = {b"data": PICTURES.reshape(4, 3072), b"labels": LABELS}
            (folder / name).write_bytes(pickle.dumps(found, protocol=2))
        else:
            rows = np.concatenate(
                [np.array(LABELS, np.uint8)[:, None], PICTURES.reshape(4, 3072)], axis=1
            )
            (folder / f"{name}.bin").write_bytes(rows.tobytes())


@pytest.mark.parametrize(
    ("kind", "inside"), [("python", "cifar-10-batches-py"), ("python", "."), ("binary", ".")]
)
def test_cifar10_is_read_from_a_folder(tmp_path: Path, kind: str, inside: str) -> None:
    write_cifar(tmp_path / inside, kind)
    data = load("cifar10", tmp_path)
    assert data.training.pictures.shape == (20, 3, 32, 32) and len(data.testing) == 4
    assert data.training.labels[:4].tolist() == LABELS
    assert torch.equal(data.testing.pictures, torch.from_numpy(PICTURES))


class Bad:
    def __reduce__(self) -> Any:
        return os.system, ("echo bad",)


def test_a_pickle_that_is_no_array_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path, "python")
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"data": Bad(), b"labels": []}))
    with pytest.raises(lc.ConfigError, match="it wants .*system"):
        load("cifar10", tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(lc.ConfigError, match="data sets are digits, fashion-mnist, cifar10"):
        load("imagenet")
    with pytest.raises(lc.ConfigError, match="leave out --folder"):
        load("digits", tmp_path)
    with pytest.raises(lc.ConfigError, match="give --folder with its four idx files"):
        load("fashion-mnist", tmp_path)
    with pytest.raises(lc.ConfigError, match="cifar-10-batches-py, as torchvision"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("data", COURSES)
def test_networks_have_about_half_a_million_parameters_and_fit_the_data(data: str) -> None:
    shape = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}[data]
    network = made(data, seed=3)
    assert network(torch.zeros(2, *shape)).shape == (2, 10)
    assert 450_000 < sum(p.numel() for p in network.parameters()) < 550_000
    again = made(data, seed=3)
    assert all(map(torch.equal, network.parameters(), again.parameters()))


# Strategies


def test_all_default_strategies_have_a_line_of_code() -> None:
    found = {one.name: one for one in entries(",".join(DEFAULT))}
    assert list(found) == [
        "fp32", "fp16", "qsgd", "dqsg", "global", "ecdq", "ssd+ecdq", "auto",
    ]  # fmt: skip
    assert found["fp32"].code == "DDP(model)" and found["fp32"].codec is None
    assert found["ecdq"].code == 'lc.compress(model, "ecdq:error=0.08")'
    assert found["ssd+ecdq"].code == (
        'lc.SSD(optimizer, model, period=4, codec="ecdq:error=0.08", pull_codec="ecdq:error=0.08")'
    )
    assert found["auto"].code == 'lc.compress(model, "auto")' and found["auto"].plan is None


def test_any_text_of_compress_races_and_none_twice() -> None:
    names = (
        "dqsg:bits=2@allgather,ecdq:error=0.1,coder=rans,rotate(dqsg:bits=4,block=256),fp16,fp16"
    )
    found = entries(names)
    assert [one.name for one in found] == [
        "dqsg:bits=2@allgather",
        "ecdq:error=0.1,coder=rans",
        "rotate(dqsg:bits=4,block=256)",
        "fp16",
    ]
    assert found[0].plan is not None and found[0].plan.exchange == "allgather"
    assert found[0].code == 'lc.compress(model, "dqsg:bits=2@allgather")'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ecdp", "'ecdp' is not a strategy.*choose from fp32, fp16"),
        ("ssd+nothing", "not a strategy"),
        ("dqsg@allreduce", "not a strategy"),
        ("", "name a strategy: fp32"),
    ],
)
def test_other_strategies_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(lc.ConfigError, match=sentence):
        entries(text)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"workers": 1}, "workers must be an integer from 2 to 64, not 1"),
        ({"steps": 0}, "steps must be an integer from 1"),
        ({"batch": 0}, "batch must be"),
        ({"seed": -1}, "seed must be"),
        ({"lr": float("nan")}, "lr must be above 0"),
        ({"target": 97.0}, "target is an accuracy above 0 and up to 1, not 97"),
        ({"rate": "fast"}, "a rate is like 100mbit"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(lc.ConfigError, match=sentence):
        settings(**changes)


# Verdicts


def lane(name: str, step_s: float, accuracies: tuple[float, ...], **changes: Any) -> Lane:
    """Ten steps between points, a megabyte a step."""
    points = tuple(
        Point(step=10 * i, seconds=10 * i * step_s, sent_bytes=1e7 * i, loss=1.0, accuracy=a)
        for i, a in enumerate(accuracies)
    )
    usual = Lane(
        name=name,
        strategy=name,
        code="",
        points=points,
        step_s=step_s,
        parts=Parts(compute_s=step_s, codec_s=0, wire_s=0),
        sent_bytes=1e6,
        link_bytes=None,
        predicted_step_s=2 * step_s,
        same_bits=True,
    )
    return replace(usual, **changes)


def raced(*lanes: Lane, shaped: bool = True) -> Race:
    machine = Machine(
        system="s", processor="p", cores=2, python="3", torch="2", shaped=shaped, why_unshaped=None
    )
    task = Task(network="n", parameters=1, training=1, testing=1)
    where = settings(rate="100mbit", steps=20, target=0.9)
    return Race(settings=where, machine=machine, task=task, lanes=lanes)


SLOW = lane("fp32", 0.1, (0.1, 0.5, 0.95))
QUICK = lane("ecdq", 0.01, (0.1, 0.5, 0.95))
SMALL = replace(
    QUICK, points=tuple(replace(point, sent_bytes=point.sent_bytes / 40) for point in QUICK.points)
)
LATE = lane("fp16", 0.2, (0.1, 0.5, 0.95))
NEVER = lane("qsgd", 0.01, (0.1, 0.5, 0.6))


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (raced(SLOW, SMALL), "ecdq reached 90% 10.0× faster than fp32 and sent 40× fewer bytes."),
        (raced(SLOW, LATE), "not pay off on these links: fp32 reached 90% in 2.0 s, fp16 in 4.0"),
        (raced(SLOW, replace(SLOW, name="alike")), "does not pay off on these links: fp32"),
        (raced(SLOW, NEVER), "and no other strategy did in 20 steps."),
        (raced(NEVER), "No strategy reached 90% in 20 steps; qsgd came closest, with 60.0%: give"),
        (raced(QUICK, LATE), "ecdq reached 90% first, after 0.2 s."),
        (raced(replace(NEVER, name="fp32"), QUICK), "after 0.2 s; fp32 did not in 20 steps."),
        (
            raced(SLOW, SMALL, shaped=False),
            "ecdq would reach 90% 10.0× faster than fp32 over links of 100mbit (predicted)",
        ),
        (raced(SLOW, replace(QUICK, same_bits=False)), "But replicas of ecdq ended with different"),
    ],
)  # fmt: skip
def test_the_verdict(found: Race, sentence: str) -> None:
    assert sentence in verdict(found)


def test_without_shaped_links_times_are_predictions() -> None:
    found = raced(SLOW, NEVER, shaped=False)
    assert seconds_to_target(found, SLOW) == pytest.approx(20 * 0.2)
    assert seconds_to_target(found, NEVER) is None
    assert seconds_to_target(found, replace(SLOW, predicted_step_s=None)) is None
    assert seconds_to_target(raced(SLOW), SLOW) == pytest.approx(20 * 0.1)


def test_a_race_is_saved_and_read(tmp_path: Path) -> None:
    file = tmp_path / "race.json"
    found = raced(SLOW, QUICK)
    found.save(file)
    assert Race.load(file) == found and [path.name for path in tmp_path.iterdir()] == ["race.json"]
    file.write_text(json.dumps({"format": 99}))
    with pytest.raises(lc.ConfigError, match="format 99, not 1: race anew"):
        Race.load(file)
    file.write_text("{")
    with pytest.raises(lc.ConfigError, match="is no race.*--save makes one"):
        Race.load(file)


# Real ones


@pytest.fixture(autouse=True)
def _short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("laconic.race._race"), "PROBE_S", 0.5)


def test_a_race(tmp_path: Path) -> None:
    """Two workers, as hosts where that is possible; stopped, and gone on with."""
    file, seen = tmp_path / "race.json", []

    def stop(found: Race) -> None:
        if len(found.lanes) == 2:
            raise KeyboardInterrupt

    chosen, where = entries("fp32,dqsg,ssd+ecdq"), settings()
    with pytest.raises(KeyboardInterrupt):
        race(where, chosen, save=file, watcher=Watcher(ended=stop))
    assert [one.name for one in Race.load(file).lanes] == ["fp32", "dqsg"]
    watcher = Watcher(started=lambda one: seen.append(one.name))
    found = race(where, chosen, save=file, watcher=watcher)
    assert seen == ["ssd+ecdq"] and Race.load(file) == found
    plain, dqsg, ssd = found.lanes
    assert all(one.same_bits and one.predicted_step_s for one in found.lanes)
    assert [point.step for point in plain.points] == list(range(9))
    assert all(one.points[-1].accuracy > 0.3 for one in found.lanes)  # 0.1 is chance
    values = found.task.parameters
    assert plain.sent_bytes == pytest.approx(4 * values)  # of 2 workers: 2·(2-1)/2
    assert dqsg.sent_bytes < plain.sent_bytes / 6 and ssd.sent_bytes < dqsg.sent_bytes
    if found.machine.shaped:
        assert all(one.link_bytes == pytest.approx(one.sent_bytes, rel=0.25) for one in found.lanes)
    for one in found.lanes:
        parts = one.parts
        assert parts.compute_s + parts.codec_s + parts.wire_s == pytest.approx(one.step_s)
    assert plain.parts.codec_s == 0 and 0 < dqsg.parts.codec_s < dqsg.step_s
    by_spec = {one.spec: one for one in found.codecs}
    assert by_spec["dqsg:bits=8"].error < by_spec["dqsg:bits=4"].error
    assert by_spec["ecdq:error=0.08"].error == pytest.approx(0.08, rel=0.1)
    assert race(where, chosen, save=file) == found  # nothing is left to do
    with pytest.raises(lc.ConfigError, match="holds another race .seed 0, not 1."):
        race(settings(seed=1), chosen, save=file)


def test_where_links_cannot_be_shaped_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "missing", lambda: "no tc here")
    found = race(settings(rate="1mbit", steps=4, workers=3), entries("fp32,dqsg,auto"))
    assert not found.machine.shaped and found.machine.why_unshaped == "no tc here"
    plain, dqsg, auto = found.lanes
    assert plain.link_bytes is None and plain.choice is None
    assert auto.choice == "plain DDP" and auto.predicted_step_s is None  # no trial in four steps
    assert plain.predicted_step_s and dqsg.predicted_step_s
    wire = 8 * plain.sent_bytes / 1e6
    assert wire < plain.predicted_step_s < 2 * wire
    assert plain.predicted_step_s > 5 * dqsg.predicted_step_s


def laconic(*words: str) -> Any:
    """Its outcome, in this process."""
    return CliRunner().invoke(app, ["race", *words])


SHORT = (
    *("--workers", "2", "--rate", "none", "--steps", "3", "--batch", "8"),
    *("--target", "0.05", "--strategies", "fp32,fp16"),
)


def test_the_command_ends_with_a_verdict_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = laconic(*SHORT, "--save", "race.json")
    assert found.exit_code == 0, found.output
    assert "2 workers train on digits for 3 steps" in found.stdout
    assert "reached 5%" in found.stdout and "In your own script: " in found.stdout
    assert "Figures: report.html" in found.stdout
    page = (tmp_path / "report.html").read_text()
    assert Race.load(tmp_path / "race.json").verdict in page
    again = laconic(*SHORT, "--save", "race.json", "--json", "--no-report")
    told = json.loads(again.stdout)
    assert [one["name"] for one in told["lanes"]] == ["fp32", "fp16"]
    assert told == json.loads((tmp_path / "race.json").read_text())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--data", "imagenet"), "--data is one of digits"),
        (("--strategies", "ecdp"), "is not a strategy"),
        (("--save", "nowhere/race.json"), "no folder nowhere"),
        (("--data", "fashion-mnist", "--folder", "."), "Fashion-MNIST is not in ."),
        (("--target", "97"), "target is an accuracy"),
    ],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = laconic(*words)
    assert found.exit_code == 2 and sentence in found.stderr
    assert found.stderr.count("\n") == 1


# What is seen of it


def looked(*events: Any, terminal: bool = True) -> str:
    """What stands on a screen after some events, or what was printed on the way."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    where = settings(rate="100mbit", steps=20, target=0.9)
    with View(console, where, entries("fp32,ecdq,fp16"), shaped=True) as view:
        watcher = view.watcher()
        for name, *what in events:
            getattr(watcher, name)(*what)
        if terminal:
            console.print(view._show())
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_a_table_fills_and_says_how_long_it_will_take() -> None:
    fp32, ecdq = entries("fp32,ecdq")
    planned = ("planned", {"fp32": 100.0, "ecdq": 10.0, "fp16": None})
    assert "training with plain DDP, about 165 s left" in looked(planned, ("started", fp32))
    half = replace(QUICK.points[1], sent_bytes=2.5e6)
    shown = looked(
        planned,
        ("started", fp32),
        ("ended", raced(SLOW)),
        ("started", ecdq),
        ("moved", ecdq, half),
    )
    last = shown[shown.rindex("strategy") :]
    assert re.search(r"fp32 .* 95\.0% +2\.0 +1\.0 +100\.0 +20\.00 +1\.0", last)
    assert re.search(r"ecdq +━+.* 50\.0% +10\.0 +2\.50", last)
    assert "about 55 s left" in last  # of fp16: no prediction, so the mean of the others


def test_without_a_terminal_every_strategy_is_a_line() -> None:
    assert "ecdq: 95.0%, 10.0 ms and 1000.0 KB per step" in looked(
        ("ended", raced(QUICK)), terminal=False
    )


def test_help_says_what_the_digits_course_takes() -> None:
    told = " ".join(CliRunner().invoke(app, ["race", "--help"]).stdout.split())
    course = COURSES["digits"]
    assert f"; {course.steps} for digits" in told and f"{course.target:g} for digits" in told
