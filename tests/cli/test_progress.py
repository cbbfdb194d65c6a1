"""A line on stderr while a command works, where a person looks at it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from threading import Thread

import pytest
import torch
from helpers import PATIENCE_S

from laconic.bench import bench
from laconic.cli._common import progress
from laconic.planner import Paper, machine, paper_workload, plan

PLAN = ("plan", "--link", "1gbit", "--workers", "4", "--params", "1m", "--compute", "10ms")


def on_a_terminal(*words: str) -> tuple[str, str]:
    """What laconic writes to stdout, a pipe, and to stderr, a terminal."""
    ours, theirs = pty.openpty()
    shown = list[bytes]()

    def read() -> None:
        try:
            while more := os.read(ours, 1 << 16):
                shown.append(more)
        except OSError:  # the last of those who could write has gone
            pass

    try:
        reader = Thread(target=read)
        with subprocess.Popen(
            [sys.executable, "-m", "laconic", *words],
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        ) as process:
            os.close(theirs)
            reader.start()
            out, _ = process.communicate(timeout=PATIENCE_S)
        reader.join(PATIENCE_S)
        assert process.returncode == 0, b"".join(shown)
    finally:
        os.close(ours)
    return out, b"".join(shown).decode()


def test_a_terminal_sees_what_is_done_and_what_is_left() -> None:
    out, shown = on_a_terminal(*PLAN)
    assert "left" in shown and "Predicted step" in out and "left" not in out.splitlines()[0]


def test_quiet_shows_nothing() -> None:
    out, shown = on_a_terminal(*PLAN, "--quiet")
    assert not shown and "Predicted step" in out


def test_nothing_is_shown_where_stderr_is_no_terminal() -> None:
    command = [sys.executable, "-m", "laconic", *PLAN]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert found.returncode == 0 and not found.stderr


@pytest.mark.parametrize("quiet", [False, True])
def test_a_command_may_be_watched_where_nobody_looks(
    quiet: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with progress(quiet=quiet) as watch:
        watch("codecs", 0.5)
    assert capfd.readouterr().err == ""


def grows(told: list[tuple[str, float]]) -> bool:
    done = [part for _, part in told]
    return done == sorted(done) and done[0] >= 0 and done[-1] <= 1


def test_a_plan_tells_of_every_strategy() -> None:
    told = list[tuple[str, float]]()
    paper = Paper(machine=machine("home"), workers=4)
    workload = paper_workload(1_000_000, 0.01, "fp32")
    found = plan(paper.cluster(1.0), workload, watch=lambda *one: told.append(one))
    assert len(told) == len(found.choices) + len(found.above_error) and grows(told)


def test_a_bench_tells_of_codecs_and_rounds() -> None:
    told = list[tuple[str, float]]()
    threads = torch.get_num_threads()
    found = bench(
        codecs=["fp16", "qsgd"],
        values=1000,
        patience_s=0.05,
        threads=threads,
        watch=lambda *one: told.append(one),
    )
    assert grows(told) and [what for what, _ in told][:2] == ["fp16", "qsgd"]
    assert len(told) == 2 + found.rounds
