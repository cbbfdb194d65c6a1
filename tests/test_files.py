"""Files that are written (whole, and never over somebody else's) and files that are read."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import pickle
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import races
from helpers import PATIENCE_S
from typer.testing import CliRunner

import laconic as lc
from laconic import cli, lab, report
from laconic.planner import Paper, Probe, machine, paper_workload
from laconic.race import Race, verdict
from laconic.race._data import load

PLAN = ("plan", "--link", "1gbit", "--workers", "4", "--params", "30m", "--compute", "100ms")


def probe() -> Probe:
    cluster = Paper(machine=machine("dgx-a100"), workers=16).cluster()
    work = paper_workload(1_000_000, 0.1)
    return Probe(cluster=cluster, workload=work, machine="paper")


def page(path: Path, **options: bool) -> None:
    report.write(races.alone(), path, **options)


WRITERS: dict[str, Callable[..., None]] = {
    "report": page,
    "probe": lambda path, **options: probe().save(path, **options),
    "race": lambda path, **options: races.alone().save(path, **options),
}
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def laconic(*words: object) -> Any:
    return CliRunner().invoke(cli.app, list(map(str, words)), prog_name="laconic")


def refused(found: Any, *parts: str) -> None:
    """Usage error: one sentence on stderr with these parts, and nothing on stdout."""
    assert found.exit_code == 2 and not found.stdout, found.output
    assert found.stderr.count("\n") == 1 and all(part in found.stderr for part in parts)


# Writing


@every_writer
def test_a_planted_link_is_not_followed(write: Callable[..., None], tmp_path: Path) -> None:
    """Where somebody may write beside the target, names of temporary files must not be known."""
    target, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out.part").symlink_to(victim)
    write(target)
    assert victim.read_text() == "precious" and target.is_file() and not target.is_symlink()


@every_writer
def test_rights_are_those_of_any_new_file(write: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write(tmp_path / "out")
    rights = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "out")]
    assert rights[0] == rights[1]
    (tmp_path / "out").chmod(0o640)
    write(tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640  # as its owner has set them


@every_writer
def test_a_link_is_followed(write: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    link, real = tmp_path / "out", tmp_path / "shared" / "real"
    link.symlink_to(real)
    write(link)
    write(link)
    assert link.is_symlink() and real.stat().st_size > 100
    assert [one.name for one in real.parent.iterdir()] == ["real"]


@every_writer
def test_somebody_elses_file_is_kept(write: Callable[..., None], tmp_path: Path) -> None:
    target = tmp_path / "out"
    for text in ("<html>mine</html>", '{"mine": 1}', "[1, 2]", "\0"):
        target.write_text(text)
        with pytest.raises(lc.ConfigError, match="out exists and is not a .*--force"):
            write(target)
        assert target.read_text() == text
    write(target, force=True)
    assert "laconic" in target.read_text()
    write(target)  # our own
    target.write_text("")
    write(target)  # an empty one, as mktemp makes them
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_kinds_do_not_replace_each_other(tmp_path: Path) -> None:
    for name, first in WRITERS.items():
        first(tmp_path / name)
        for other, second in WRITERS.items():
            if other != name:
                with pytest.raises(lc.ConfigError, match="exists and is not"):
                    second(tmp_path / name)


@every_writer
def test_a_full_disk_names_the_file(
    write: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    write(target)
    before = target.read_text()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/out'"):
        write(target)
    assert target.read_text() == before and [one.name for one in tmp_path.iterdir()] == ["out"]


@every_writer
def test_a_pipe_is_written_to_and_not_replaced(write: Callable[..., None], tmp_path: Path) -> None:
    """So is /dev/stdout. No real device here: whoever breaks this would replace it."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write(pipe)
    reader.join(30)
    assert pipe.is_fifo() and "laconic" in read[0]


# Before long work


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing long may begin."""

    def begun(*words: object, **options: object) -> None:
        raise AssertionError("the long work began")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("laconic.race.race", begun)
    monkeypatch.setattr("laconic.planner.probe", begun)
    monkeypatch.setattr("laconic.planner.plan", begun)
    monkeypatch.setattr("laconic.cli._probe._process_group", lambda patience_s: nullcontext())
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    (tmp_path / "mine").write_text("mine")
    yield
    assert (tmp_path / "mine").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "words",
    [
        ("race", "--report"),
        ("race", "--no-report", "--save"),
        ("probe", "--out"),
        (*PLAN, "--plot"),
    ],
    ids=" ".join,
)
def test_targets_are_checked_before_long_work(words: tuple[str, ...]) -> None:
    refused(laconic(*words, "mine"), "mine exists", "--force")
    refused(laconic(*words, "mine/out"), "mine/out cannot be written")
    refused(laconic(*words, "nowhere/out"), "nowhere/out cannot be written", "no folder nowhere")
    refused(laconic(*words, "."), ". is a folder")
    begun = laconic(*words, "mine", "--force")
    assert begun.exit_code == 1 and "the long work began" in begun.stderr


@pytest.mark.usefixtures("no_work")
def test_two_files_have_two_names() -> None:
    refused(laconic("race", "--save", "x", "--report", "./x"), "--save and --report are both x")


def test_what_was_found_is_shown_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills meanwhile costs the file, not the numbers; stdout stays JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("laconic.race.race", lambda *words, **options: races.diverged())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found = laconic("race", "--json")
    assert found.exit_code == 1
    assert found.stderr == "laconic: No space left on device: report.html\n"
    told = json.loads(found.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert told["lanes"][2]["points"][-1]["loss"] is None  # NaN
    shown = laconic("race")
    assert shown.exit_code == 1 and "ecdq:error=0.08 reaches 90%" in shown.stdout
    assert not list(tmp_path.iterdir())


# Reading JSON


MALFORMED = {
    "empty": b"",
    "cut": json.dumps(asdict(races.alone())).encode()[:500],
    "deep": b"[" * 100_000,
    "deep objects": b'{"cluster":' * 100_000,
    "not UTF-8": b'{"format": 1, "laconic": "\xff"}',
    "UTF-16": json.dumps({"format": 1}).encode("utf-16"),
    "zeros": bytes(1000),
    "a list": b"[1, 2]",
    "a number": b"1e999",
    "NaN": b"NaN",
    "a huge number": b'{"format": ' + b"9" * 5000 + b"}",
    "a huge format": b'{"format": ' + b"9" * 4000 + b"}",
    "twice": b'{"format": 1, "format": 1}',
    "parts of the wrong type": b'{"format": 1, "cluster": [], "workload": 3, "machine": {}}',
    "none of the keys": b"{}",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_json_is_one_sentence(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(text)
    for kind in (Probe, Race):
        with pytest.raises(lc.ConfigError) as caught:
            kind.load(file)
        assert len(str(caught.value)) < 400
    refused(laconic("plan", "--probe", file))
    if text:  # an empty file is a new one
        refused(laconic("race", "--no-report", "--save", file), "file.json")


def test_what_is_no_file_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing.json", tmp_path / "x" / "y", "/dev/null"):
        refused(laconic("plan", "--probe", path), f"{path} is no probe")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a document; lists by their first item."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, one in value.items():
            yield from places(one, (*at, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def changed(document: Any, at: tuple[Any, ...], new: object) -> Any:
    """A copy with another value at that place."""
    copy = dict(document) if isinstance(document, dict) else list(document)
    first, *rest = at
    copy[first] = changed(copy[first], tuple(rest), new) if rest else new
    return copy


ODD_VALUES = (None, "x", "[/b]", -1, 0, 1e308, 1e-320, 10**30, math.nan, math.inf, True, [], {})


def used(read: Callable[[Any], Any], document: Any) -> int:
    """How many changed documents are read; all others must be a ValueError."""
    count, lengths = 0, [0]
    for at in places(document):
        for value in ODD_VALUES:
            try:
                read(changed(document, at, value))
                count += 1
            except ValueError as error:
                lengths.append(len(str(error)))
    assert max(lengths) < 400
    return count


def test_no_value_of_a_probe_is_trusted() -> None:
    """It is read, and every number is one from 0 up; or it is refused."""

    def read(document: Any) -> None:
        found = Probe.parse(document)
        assert min(line.per_s for line in found.cluster.flat.allreduce) > 0
        json.dumps(asdict(found), allow_nan=False)

    document = json.loads(json.dumps(asdict(probe())))
    assert Probe.parse(document) == probe()
    assert 0 < used(read, document) < 500


def test_no_value_of_a_race_is_trusted() -> None:
    """Whatever is read has a verdict, and a report."""
    race = races.sample()
    lanes = tuple(replace(one, points=one.points[-2:]) for one in race.lanes[:2])
    document = json.loads(json.dumps(asdict(replace(race, lanes=lanes))))

    def read(document: Any) -> None:
        found = Race.parse(document)
        assert verdict(found)
        report.html(found)

    assert Race.parse(document).lanes == lanes
    assert 0 < used(read, document) < 400


def test_other_versions_may_say_more() -> None:
    document = json.loads(json.dumps(asdict(races.alone())))
    document["lanes"][0]["novelty"] = document["novelty"] = 1
    del document["lanes"][0]["choice"]  # which may be left out
    assert Race.parse(document) == races.alone()


def test_marks_of_rich_in_a_race_are_text(tmp_path: Path) -> None:
    race = replace(races.alone(), verdict="won [/b] [red]")
    settings = race.settings
    race.save(tmp_path / "race.json")
    words = [
        f"--{name}={getattr(settings, name)}"
        for name in ("data", "workers", "rate", "steps", "batch", "lr", "seed", "target")
    ]
    name = race.lanes[0].name
    found = laconic(
        "race", "--no-report", "--save", tmp_path / "race.json", "--strategies", name, *words
    )
    assert found.exit_code == 0 and "won [/b] [red]" in found.stdout, found.output


# Reading pictures


def idx(*sizes: int, data: bytes = b"", kind: bytes = b"\0\0\x08") -> bytes:
    return kind + bytes([len(sizes)]) + b"".join(n.to_bytes(4, "big") for n in sizes) + data


GOOD = idx(2, 28, 28, data=bytes(2 * 784))
BAD_IDX = {
    "empty": b"",
    "cut in its head": GOOD[:9],
    "cut": GOOD[:-1],
    "longer": GOOD + b"\0",
    "no sizes": idx(),
    "floats": idx(2, 28, 28, data=bytes(2 * 784), kind=b"\0\0\x0d"),
    "huge": idx(2**32 - 1, 28, 28),
    "sizes that wrap around": idx(*[2**16] * 4),
    "255 sizes": idx(*[2**32 - 1] * 255),
    "other pictures": idx(2, 8, 8, data=bytes(128)),
    "other counts": idx(1, 28, 28, data=bytes(784)),
    "none": idx(0, 28, 28),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("data", BAD_IDX.values(), ids=BAD_IDX)
def test_malformed_idx_files_are_one_sentence(data: bytes, packed: bool, tmp_path: Path) -> None:
    files = {
        "train-images-idx3": data,
        "train-labels-idx1": idx(2, data=b"\0\1"),
        "t10k-images-idx3": GOOD,
        "t10k-labels-idx1": idx(2, data=b"\0\1"),
    }
    for name, content in files.items():
        file = tmp_path / f"{name}-ubyte{'.gz' if packed else ''}"
        file.write_bytes(gzip.compress(content) if packed else content)
    refused_data("fashion-mnist", tmp_path)


def test_damaged_gzip_and_labels_are_one_sentence(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(GOOD)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(2, data=b"\0\x0a"))
    refused_data("fashion-mnist", tmp_path, match="labels from 0 to 10, not from 0 to 9")
    (tmp_path / "train-images-idx3-ubyte").unlink()
    packed = bytearray(gzip.compress(GOOD))
    packed[12:20] = b"\xff" * 8  # zlib.error, which is no OSError
    for data in (bytes(packed), gzip.compress(GOOD)[:-12], b"\x1f\x8b", b""):
        (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(data)
        refused_data("fashion-mnist", tmp_path)


def refused_data(name: str, folder: Path, match: str | None = None) -> None:
    with pytest.raises(lc.ConfigError, match=match) as caught:
        load(name, folder)
    assert len(str(caught.value)) < 600


class Announced:
    """A terabyte of pictures in a hundred bytes."""

    def __reduce__(self) -> Any:
        return np.ndarray, ((2**28, 3072), "u1")


PIXELS = np.zeros((2, 3072), np.uint8)
BAD_BATCHES: dict[str, Any] = {
    "a list": [1, 2],
    "a number": 3,
    "nothing": {},
    "no labels": {b"data": PIXELS},
    "data that is a string": {b"data": "x", b"labels": [0, 1]},
    "data that is a list": {b"data": [[0] * 3072] * 2, b"labels": [0, 1]},
    "floats": {b"data": PIXELS.astype(np.float64), b"labels": [0, 1]},
    "objects": {b"data": PIXELS.astype(object), b"labels": [0, 1]},
    "other sizes": {b"data": PIXELS[:, :100], b"labels": [0, 1]},
    "labels that are strings": {b"data": PIXELS, b"labels": ["a", "b"]},
    "labels in labels": {b"data": PIXELS, b"labels": [[0], [1, 2]]},
    "labels that are nothing": {b"data": PIXELS, b"labels": None},
    "labels out of range": {b"data": PIXELS, b"labels": [0, 10]},
    "negative labels": {b"data": PIXELS, b"labels": [0, -1]},
    "huge labels": {b"data": PIXELS, b"labels": [0, 10**30]},
    "too few labels": {b"data": PIXELS, b"labels": [0]},
    "more than the file holds": {b"data": Announced(), b"labels": [0, 1]},
}
BAD_PICKLES = {
    **{name: pickle.dumps(found, protocol=2) for name, found in BAD_BATCHES.items()},
    "an empty file": b"",
    "no pickle": b"\x80\x63abc",
    "a length beyond the file": b"\x80\x04\x8e" + b"\xff" * 8,
    "a huge length": b"\x80\x04\x8e" + (2**50).to_bytes(8, "little"),
    "a huge frame": b"\x80\x04\x95" + (2**62).to_bytes(8, "little"),
    "deep": b"\x80\x02" + b"]" * 10 + b"a" * 10 + b".",
    "cut": pickle.dumps({b"data": PIXELS, b"labels": [0, 1]}, protocol=2)[:-40],
}


@pytest.mark.parametrize("data", BAD_PICKLES.values(), ids=BAD_PICKLES)
def test_malformed_cifar_batches_are_one_sentence(data: bytes, tmp_path: Path) -> None:
    good = pickle.dumps({b"data": PIXELS, b"labels": [0, 1]}, protocol=2)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (tmp_path / name).write_bytes(good)
    assert len(load("cifar10", tmp_path).training) == 10
    (tmp_path / "data_batch_4").write_bytes(data)
    refused_data("cifar10", tmp_path, match="labels from|data_batch_4 is no batch of CIFAR-10")


def test_malformed_cifar_records_are_one_sentence(tmp_path: Path) -> None:
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (tmp_path / f"{name}.bin").write_bytes(bytes(2 * 3073))
    for data in (b"", bytes(3072), b"\x0a" + bytes(3072)):
        (tmp_path / "test_batch.bin").write_bytes(data)
        refused_data("cifar10", tmp_path)


# Streams


def run(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """In a shell, with `laconic` in the place of the program; its exit code is the program's."""
    program = f"{sys.executable} -m laconic"
    command = f"{command.replace('laconic', program, 1)}; exit ${{PIPESTATUS[0]}}"
    usual = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        timeout=PATIENCE_S,
        env={**usual, **environment},
    )


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_fits_what_a_stream_can_hold(encoding: str, tmp_path: Path) -> None:
    words = "plan --link 1gbit --workers 4 --params 30k --compute 30us"
    found = run(f"laconic {words}", PYTHONIOENCODING=encoding)
    assert found.returncode == 0 and not found.stderr
    text = found.stdout.decode(encoding)
    assert ("30 us" if encoding == "ascii" else "30 µs") in text and "?" not in text


@pytest.mark.parametrize(
    "command", ["laconic codecs | true", "laconic codecs --json | true", "laconic --help | true"]
)
def test_a_reader_that_has_left_is_met_with_silence(command: str) -> None:
    found = run(command)
    assert (found.returncode, found.stderr) == (141, b"")


@pytest.mark.skipif(lab.missing() is not None, reason=str(lab.missing()))
def test_ranks_whose_output_nobody_reads_end_in_silence() -> None:
    code = "while True: print('up', flush=True)"
    found = run(f"laconic lab run --hosts 2 --rate none -- {sys.executable} -c {code!r} | head -1")
    assert found.returncode == 141 and not found.stderr and found.stdout.endswith(b" up\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_stdout_is_one_sentence() -> None:
    found = run("laconic codecs --json > /dev/full")
    assert found.returncode == 1 and found.stderr.count(b"\n") == 1
    assert found.stderr.startswith(b"laconic: No space left on device: stdout")
