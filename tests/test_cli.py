"""The command line, and what only it does with a lab."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import laconic as lc
from laconic import cli, lab
from laconic.lab._rates import Rate, parse_rates, rates_of

LACKING = lab.missing()
needs_lab = pytest.mark.skipif(LACKING is not None, reason=LACKING or "")
WHERE = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def laconic(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Its outcome; what a lab of it left behind fails the test."""
    command = [sys.executable, "-m", "laconic", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=50)
        finally:
            process.kill()
    assert not namespaces(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def namespaces(pid: int | str = "*") -> set[str]:
    """Those of a process: others may have labs of their own."""
    folder = Path("/run/netns")
    return {path.name for path in folder.glob(f"laconic-{pid}-*")} if folder.exists() else set()


# Rates


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("100mbit", (Rate(up_mbit=100, down_mbit=100),) * 2),
        ("1.5gbit", (Rate(up_mbit=1500, down_mbit=1500),) * 2),
        ("none", (Rate(),) * 2),
        ("500kbit/none, 20mbit", (Rate(up_mbit=0.5), Rate(up_mbit=20, down_mbit=20))),
    ],
)
def test_rates_are_written_as_people_do(text: str, rates: tuple[Rate, ...]) -> None:
    assert parse_rates(text, 2) == rates


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("100", "like 100mbit"),
        ("fast", "like 100mbit"),
        ("1.2.3mbit", "like 100mbit"),
        ("1mbit/2mbit/3mbit", "two rates at most"),
        ("1mbit,2mbit,3mbit", "give one rate, or 2"),
        ("0mbit", "rate_mbit must be a number from 0.1"),
    ],
)
def test_other_rates_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(lc.ConfigError, match=sentence):
        parse_rates(text, 2)


def test_a_lab_takes_one_rate_or_one_for_each() -> None:
    assert rates_of([1, None], 2) == (Rate(up_mbit=1, down_mbit=1), Rate())
    with pytest.raises(lc.ConfigError, match="give one rate, or 3"):
        lab.Lab(hosts=3, rate_mbit=[1, 2])


# Commands


def test_it_says_its_version() -> None:
    found = CliRunner().invoke(cli.app, ["--version"])
    assert found.exit_code == 0 and found.output.strip() == lc.__version__


def test_a_command_is_needed() -> None:
    found = laconic("lab", "run")
    assert found.returncode == 2 and "laconic lab run -- python train.py" in found.stderr


@needs_lab
def test_ranks_run_on_hosts_and_their_lines_have_numbers() -> None:
    found = laconic(
        "lab", "run", "--hosts", "2", "--ranks-per-host", "2", "--rate", "none", "--json", "--",
        sys.executable, "-c", WHERE,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    *lines, last = found.stdout.splitlines()
    assert sorted(lines) == [f"{rank} │ rank {rank} of 4" for rank in range(4)]
    told = json.loads(last)
    assert len(told["links"]) == 2 and told["seconds"] > 0


@needs_lab
def test_the_status_is_that_of_the_rank_that_failed() -> None:
    code = "import os, sys; print('bad luck', file=sys.stderr); sys.exit(7)"
    found = laconic("lab", "run", "--hosts", "2", "--", sys.executable, "-c", code)
    assert found.returncode == 7
    assert "ended with status 7" in found.stderr and "│ bad luck" in found.stdout


@needs_lab
def test_bad_settings_are_a_sentence() -> None:
    found = laconic("lab", "run", "--rate", "fast", "--", "true")
    assert found.returncode == 1 and "a rate is like 100mbit" in found.stderr
    assert "Traceback" not in found.stderr


FOREVER = "import time; print('up', flush=True); time.sleep(600)"


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "laconic", "lab", "run", "--hosts", "2", *words, "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", FOREVER], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and "up" in process.stdout.readline()
    process.stdout.close()  # it writes nothing more
    return process


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_take_everything_away(number: signal.Signals) -> None:
    process = started()
    assert len(namespaces(process.pid)) == 3
    process.send_signal(number)
    assert process.wait(30) != 0
    assert not namespaces(process.pid)


@needs_lab
def test_a_later_lab_removes_what_a_killed_one_left_and_nothing_else() -> None:
    killed, living = started(), started()
    try:
        mine, others = namespaces(killed.pid), namespaces(living.pid)
        assert len(mine) == len(others) == 3
        killed.kill()
        killed.wait(30)
        assert mine <= namespaces()
        with lab.Lab(hosts=1):
            assert not mine & namespaces() and others <= namespaces()
    finally:
        living.terminate()
        living.wait(30)
    assert not others & namespaces()


def as_a_user(*words: str) -> list[str]:
    """As somebody who is not root."""
    drop = ("--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps", "-all")
    return ["setpriv", *drop, "--bounding-set", "-all", *words]


def may_make_namespaces() -> bool:
    """Others than root may, and may use this interpreter."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    inside = ("unshare", "--user", "--map-root-user", "--net", "--mount")
    words = as_a_user(*inside, sys.executable, "-c", "import typer, laconic")
    return subprocess.run(words, capture_output=True, env=USER, cwd="/").returncode == 0


USER = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": "/nowhere"}


@pytest.mark.skipif(
    not may_make_namespaces(),
    reason="others than root cannot make namespaces, or not run this Python",
)
def test_it_runs_without_root_in_a_user_namespace() -> None:
    def user(*words: str) -> subprocess.CompletedProcess[str]:
        command = as_a_user(sys.executable, *words)
        return subprocess.run(
            command, capture_output=True, text=True, timeout=50, env=USER, cwd="/"
        )

    lacking = user("-c", "from laconic import lab; print(lab.missing())")
    assert "no CAP_NET_ADMIN" in lacking.stdout
    found = user("-m", "laconic", "lab", "run", "--hosts", "2", "--", sys.executable, "-c", WHERE)
    assert found.returncode == 0, found.stderr
    assert "1 │ rank 1 of 2" in found.stdout


# Faults


PING = """
import os, socket, sys
rank = int(os.environ["RANK"])
if rank == 0:
    server = socket.create_server(("10.77.0.1", 5000))
    print("up", flush=True)
    for line in sys.stdin:
        server.settimeout(float(line))
        try:
            link, _ = server.accept()
            link.close()
            print("heard", flush=True)
        except TimeoutError:
            print("nothing", flush=True)
else:
    print("up", flush=True)
    for line in sys.stdin:
        try:
            socket.create_connection(("10.77.0.1", 5000), timeout=float(line)).close()
            print("reached", flush=True)
        except OSError:
            print("cut off", flush=True)
"""


@needs_lab
def test_a_cable_can_be_pulled_and_plugged_in() -> None:
    with lab.Lab(hosts=2, rate_mbit=100) as net:
        run = net.start([sys.executable, "-c", PING], talk=True)
        run.receive(timeout_s=20)

        def ask() -> tuple[str, ...]:
            run.send("1.5")
            return run.receive(timeout_s=20)

        assert ask() == ("heard", "reached")
        net.hosts[1].cut()
        assert ask() == ("nothing", "cut off")
        net.hosts[1].mend()
        assert ask() == ("heard", "reached")
        run.wait(timeout_s=20)


@needs_lab
def test_hosts_can_be_lost_and_stopped() -> None:
    code = "import os, sys; print(os.environ['RANK'], flush=True); [print(l) for l in sys.stdin]"
    with lab.Lab(hosts=3) as net:
        run = net.start([sys.executable, "-c", code], talk=True)
        run.receive(timeout_s=20)
        run.pause(1)
        texts = [Path(f"/proc/{pid}/stat").read_text() for pid in run.pids]
        states = [text.rpartition(")")[2].split()[0] for text in texts]
        assert states[1] == "T" and "T" not in (states[0], states[2])
        run.resume(1)
        run.lose(2)
        outputs = run.wait(timeout_s=20)  # the others end well
        assert [one.rank for one in outputs] == [0, 1, 2]
        with pytest.raises(lab.LabError, match="has ended"):
            run.pause(0)
    with lab.Lab(hosts=1) as net:
        run = net.start(["true"])
        with pytest.raises(lc.ConfigError, match="no rank of this run is on host 5"):
            run.lose(5)
