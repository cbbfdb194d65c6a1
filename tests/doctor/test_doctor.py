"""The whole doctor: alone, on two ranks, and where one does not come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import Programs
from typer.testing import CliRunner

from laconic import cli

SCRIPT = """
import os, sys
os.environ.update({env})
from laconic.cli import main
sys.argv[1:] = ["doctor", *{words}]
main()
"""
ALONE = {"versions", "frameworks", "backends", "threads", "memory", "addresses", "master", "group"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_a_host_alone() -> None:
    """What is wrong with the machine that runs the tests is not known; what is said of it is."""
    found = CliRunner().invoke(cli.app, ["doctor", "--json"], prog_name="laconic")
    told = json.loads(found.stdout)
    checks = {one["check"]: one for one in told["findings"]}
    assert {*checks} == {*ALONE, "kernels"} and (told["rank"], told["ranks"]) == (0, 1)
    assert checks["group"]["ok"] and checks["kernels"]["ok"] and checks["backends"]["ok"]
    assert told["ok"] == all(one["ok"] for one in told["findings"])
    assert found.exit_code == (0 if told["ok"] else 1)


@pytest.mark.usefixtures("alone")
def test_one_line_per_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.doctor._facts.free_memory", lambda: 1 << 20)
    found = CliRunner().invoke(cli.app, ["doctor"], prog_name="laconic")
    lines = found.stdout.splitlines()
    assert found.exit_code == 1 and "problem" in lines[-1]
    (line,) = [line for line in lines if line.startswith("problem memory")]
    assert "1.0 MB free" in line and "free memory" in lines[lines.index(line) + 1]
    assert sum(line.startswith(("ok ", "problem ")) for line in lines) >= len(ALONE)


def findings(text: str) -> dict[str, Any]:
    """What rank 0 printed, without what torch says in between."""
    (line,) = [line for line in text.splitlines() if line.startswith("{")]
    told = json.loads(line)
    return told | {"by": {one["check"]: one for one in told["findings"]}}


def test_two_ranks(programs: Programs, tmp_path: Path) -> None:
    script = SCRIPT.format(env={}, words=["--json"])
    ((first, second),) = programs.ends(script, 2, folder=tmp_path)
    told = findings(first.text)
    assert told["ranks"] == 2 and {*told["by"]} == {*ALONE, "kernels", "clocks", "links"}
    for check in ("versions", "group", "links", "kernels", "clocks", "master"):
        assert told["by"][check]["ok"], told["by"][check]
    assert "ranks 0 and 1" in told["by"]["links"]["text"]
    assert "Mbit/s" in told["by"]["links"]["text"] and "2 ranks" in told["by"]["group"]["text"]
    assert first.code == (0 if told["ok"] else 1) and second.code == 0, second.text
    assert "{" not in second.text


def test_ranks_that_differ_are_named(programs: Programs, tmp_path: Path) -> None:
    script = """
import os
import laconic.doctor._facts as facts
if os.environ["RANK"] == "1":
    facts.__version__ = "0.0.0"
""" + SCRIPT.format(env={}, words=["--json"])
    ((first, _),) = programs.ends(script, 2, folder=tmp_path)
    (found,) = [
        one for one in findings(first.text)["findings"] if not one["ok"] and "0.0.0" in one["text"]
    ]
    assert found["check"] == "versions" and "0.0.0" in found["text"] and first.code == 1


def test_a_rank_that_does_not_come_is_named(programs: Programs, tmp_path: Path) -> None:
    script = SCRIPT.format(env={"WORLD_SIZE": "3"}, words=["--json", "--timeout-s", "5"])
    ((first, second),) = programs.ends(script, 2, folder=tmp_path)
    told = findings(first.text)
    assert not told["by"]["master"]["ok"] and told["by"]["master"]["ranks"] == [2]
    assert "rank 2 did not come" in told["by"]["master"]["text"]
    assert (first.code, second.code) == (1, 0), second.text
    assert not {"group", "links", "kernels"} & {*told["by"]}
