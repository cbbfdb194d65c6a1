"""The command line, and what only it does with a lab."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S
from typer.testing import CliRunner

import laconic as lc
from laconic import cli, lab
from laconic.cli._common import split_codecs
from laconic.lab._rates import Rate, parse_rates, rates_of
from laconic.planner import Paper, Probe, machine

LACKING = lab.missing()
needs_lab = pytest.mark.skipif(LACKING is not None, reason=LACKING or "")
WHERE = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def laconic(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Its outcome; what a lab of it left behind fails the test."""
    command = [sys.executable, "-m", "laconic", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
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
        ("100mbit/s", (Rate(up_mbit=100, down_mbit=100),) * 2),
        ("0.5 Mbit/s/1mbit/s", (Rate(up_mbit=0.5, down_mbit=1),) * 2),
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
        ("0mbit", "like 100mbit"),
        ("1bit", "rate_mbit must be a number from 0.1"),
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


def test_a_command_is_needed() -> None:
    found = laconic("lab", "run")
    assert found.returncode == 2 and "laconic lab run -- python train.py" in found.stderr


@needs_lab
def test_ranks_run_on_hosts_and_their_lines_have_numbers() -> None:
    found = laconic(
        "lab", "run", "--hosts", "2", "--ranks-per-host", "2", "--rate", "none",
        sys.executable, "-c", WHERE,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert sorted(lines) == [f"{rank} │ rank {rank} of 4" for rank in range(4)]
    assert "MB received" in found.stderr


@needs_lab
def test_json_of_a_lab_is_alone_on_stdout() -> None:
    found = laconic("lab", "run", "--hosts", "2", "--json", "--", sys.executable, "-c", WHERE)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert len(told["links"]) == 2 and told["seconds"] > 0
    lines = found.stderr.splitlines()
    assert sorted(lines) == [f"{rank} │ rank {rank} of 2" for rank in range(2)]


def test_a_labs_check_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(lacking: str | None, rootless: bool) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr("laconic.lab.missing", lambda: lacking)
        monkeypatch.setattr("laconic.lab._requirements.can_enter", lambda: rootless)
        told = CliRunner().invoke(cli.app, ["lab", "check", "--json"])
        said = CliRunner().invoke(cli.app, ["lab", "check"])
        assert told.exit_code == said.exit_code
        return told.exit_code, json.loads(told.stdout), said.stdout

    ready = {"ready": True, "user_namespace": False, "missing": None}
    assert checked(None, False) == (0, ready, "A lab can run here.\n")
    status, told, said = checked("`tc` is missing.", True)
    assert (status, told["ready"], told["user_namespace"]) == (0, True, True)
    assert "without root" in said
    status, told, said = checked("`tc` is missing.", False)
    assert (status, told["ready"], told["missing"]) == (1, False, "`tc` is missing.")
    assert said == "`tc` is missing.\n"


@needs_lab
def test_the_status_is_that_of_the_rank_that_failed() -> None:
    code = "import os, sys; print('bad luck', file=sys.stderr); sys.exit(7)"
    found = laconic("lab", "run", "--hosts", "2", "--", sys.executable, "-c", code)
    assert found.returncode == 7
    assert "ended with status 7" in found.stderr and "│ bad luck" in found.stdout


@needs_lab
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--rate", "fast"), "a rate is like 100mbit"),
        (("--rate", "1mbit,2mbit"), "give one rate, or 4"),
        (("--hosts", "0"), "hosts must be"),
        (("--ranks-per-host", "0"), "ranks_per_host must be"),
        (("--timeout-s", "nan"), "--timeout-s must be above 0, not nan"),
        (("--burst-kb", "nan"), "burst_kb is above 0"),
        (("--hots", "2"), "did you mean --hosts?"),
    ],
)
def test_bad_settings_of_a_lab_are_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    found = laconic("lab", "run", *words, "--", "true")
    assert found.returncode == 2 and sentence in found.stderr
    assert found.stderr.count("\n") == 1 and not found.stdout


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
    assert process.wait(PATIENCE_S) != 0
    assert not namespaces(process.pid)


@needs_lab
def test_a_later_lab_removes_what_a_killed_one_left_and_nothing_else() -> None:
    killed, living = started(), started()
    try:
        mine, others = namespaces(killed.pid), namespaces(living.pid)
        assert len(mine) == len(others) == 3
        killed.kill()
        killed.wait(PATIENCE_S)
        with lab.Lab(hosts=1):
            while mine & namespaces():  # where another lab that begins now is removing them, too
                time.sleep(0.01)
            assert others <= namespaces()
    finally:
        living.terminate()
        living.wait(PATIENCE_S)
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
            command, capture_output=True, text=True, timeout=PATIENCE_S, env=USER, cwd="/"
        )

    lacking = user("-c", "from laconic import lab; print(lab.missing())")
    assert "no CAP_NET_ADMIN" in lacking.stdout
    found = user("-m", "laconic", "lab", "run", "--hosts", "2", "--", sys.executable, "-c", WHERE)
    assert found.returncode == 0, found.stderr
    assert "1 │ rank 1 of 2" in found.stdout


# Probe and plan


TINY = """
import torch
from torch import nn

def setup():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, lambda model: model(torch.randn(16, 128)).square().mean()
"""
PAPER = ("--link", "1gbit", "--workers", "4", "--params", "30m", "--compute", "100ms")


def planned(*words: str) -> dict[str, Any]:
    found = CliRunner().invoke(cli.app, ["plan", *words, "--json"])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_a_probe_wants_ranks() -> None:
    found = laconic("probe", env={k: v for k, v in os.environ.items() if k != "RANK"})
    assert found.returncode == 2 and not found.stdout
    assert found.stderr.count("\n") == 1 and "torchrun --nproc-per-node 2" in found.stderr


def test_a_probe_is_planned_with(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    codecs = "fp16,dqsg:bits=4,ecdq:error=0.08,coder=rans"
    words = ("--seconds", "3", "--codecs", codecs, "--model", "tiny:setup", "--out", "probe.json")
    with lab.Loopback(hosts=2) as net:
        run = net.start([sys.executable, "-m", "laconic", "probe", *words], cwd=tmp_path)
        first, second = run.wait(timeout_s=PATIENCE_S)
    assert "all-reduce" in first.stdout and "ecdq:error=0.08,coder=rans" in first.stdout
    assert "Next: laconic plan --probe probe.json" in first.stdout and not second.stdout
    file = str(tmp_path / "probe.json")
    told = planned("--probe", file)
    names = {one["name"] for one in told["choices"]}
    assert {"plain DDP", "fp16", "dqsg:bits=4", "ssd k=4 ecdq:error=0.08,coder=rans"} <= names
    assert told["workers"] == 2 and told["link_bit_s"] > 1e6 and told["compute_s"] > 0


def as_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun would start it."""
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")


def measured() -> Probe:
    """What a probe of four CPUs without a model might find."""
    paper = Paper(machine=machine("cpu-server"), workers=4)
    return Probe(cluster=paper.cluster(), workload=None, machine="paper")


def test_a_probe_is_printed_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_rank(0, monkeypatch)
    monkeypatch.setattr("laconic.cli._probe._process_group", lambda patience_s: nullcontext())
    monkeypatch.setattr("laconic.planner.probe", lambda setup, **options: measured())
    file = str(tmp_path / "probe.json")
    found = CliRunner().invoke(cli.app, ["probe", "--json", "--out", file])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told == json.loads(Path(file).read_text()) and told["workload"] is None
    shown = CliRunner().invoke(cli.app, ["probe"])
    assert "all-reduce, all" in shown.stdout and "850 Mbit/s" in shown.stdout
    monkeypatch.setenv("RANK", "1")
    assert not CliRunner().invoke(cli.app, ["probe"]).output


def test_a_probe_without_a_model_needs_one_on_paper(tmp_path: Path) -> None:
    file = str(tmp_path / "probe.json")
    measured().save(file)
    refused = CliRunner().invoke(cli.app, ["plan", "--probe", file])
    assert refused.exit_code == 2 and "--params 125m --compute 300ms" in refused.stderr
    model = "--params", "10m", "--compute", "50ms"
    told = planned("--probe", file, *model)
    assert told["compute_s"] == pytest.approx(0.05) and told["workers"] == 4
    assert told["link_bit_s"] == pytest.approx(0.85e9)
    assert planned("--probe", file, *model, "--workers", "16")["workers"] == 16
    refused = CliRunner().invoke(cli.app, ["plan", "--probe", file, *model, "--link", "1gbit"])
    assert refused.exit_code == 2 and "leave out --link" in refused.stderr


def test_a_rank_that_is_lost_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(0, monkeypatch)

    def fail(patience_s: float) -> None:
        raise RuntimeError("connection closed\nsomewhere")

    monkeypatch.setattr("laconic.cli._probe._process_group", fail)
    found = CliRunner().invoke(cli.app, ["probe"])
    assert found.exit_code == 1 and "failed on rank 0: connection closed\n" in found.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--codecs", "nonsense"), "nonsense"),
        (("--seconds", "0"), "--seconds must be above 0"),
        (("--out", "nowhere/probe.json"), "no folder"),
    ],
)
def test_bad_probes_end_before_they_start(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sentence: str
) -> None:
    as_rank(0, monkeypatch)
    found = CliRunner().invoke(cli.app, ["probe", *words])
    assert found.exit_code == 2 and sentence in found.stderr
    assert found.stderr.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    found = CliRunner().invoke(cli.app, ["probe", *words])
    assert found.exit_code == 2 and not found.stderr  # one rank says it


def test_codecs_have_commas_inside() -> None:
    text = "rotate(dqsg:bits=4,block=256):block=2048,ecdq:error=0.08,coder=rans,fp16,qsgd"
    assert split_codecs(text) == (
        "rotate(dqsg:bits=4,block=256):block=2048",
        "ecdq:error=0.08,coder=rans",
        "fp16",
        "qsgd",
    )
    with pytest.raises(lc.ConfigError):
        split_codecs("fp16,fp17")


def test_a_plan_on_paper() -> None:
    told = planned(*PAPER)
    times = [one["prediction"]["step_s"] for one in told["choices"]]
    assert times == sorted(times) and "plain DDP" in {one["name"] for one in told["choices"]}
    assert told["link_bit_s"] == 1e9 and told["best"] in told["verdict"]
    assert told["code"].startswith("lc.compress(model, ")
    assert planned("--rate", *PAPER[1:]) == told  # as other commands call it
    slower = planned(*PAPER, "--latency", "10ms")
    assert slower["choices"][0]["prediction"]["step_s"] > times[0]
    halved = planned(*PAPER, "--dtype", "bf16")
    plain = [
        next(
            one["prediction"]["sent_bytes"]
            for one in found["choices"]
            if one["name"] == "plain DDP"
        )
        for found in (told, halved)
    ]
    assert plain == pytest.approx([1.5 * 120e6, 1.5 * 60e6])


def test_a_plan_is_shown_with_its_line_of_code() -> None:
    found = CliRunner().invoke(cli.app, ["plan", "--machine", "home", *PAPER[2:]])
    assert found.exit_code == 0 and "predicted" in found.stdout
    assert 'lc.compress(model, "ecdq:error=0.08")' in found.stdout.splitlines()[-1]
    assert "* changes the training" in found.stdout and "…" not in found.stdout
    few, every = found.stdout, CliRunner().invoke(cli.app, ["plan", *PAPER, "--all"]).stdout
    assert "more with --all" in few and "more with --all" not in every
    assert every.count("\n") > few.count("\n")


def test_options_change_a_machines_figures() -> None:
    words = "--machine", "p4d.24xlarge", "--params", "1b", "--compute", "100ms"
    assert planned(*words)["workers"] == 16 and planned(*words)["link_bit_s"] == 400e9
    changed = planned(*words, "--link", "100gbit", "--gpus-per-node", "4", "--device", "t4")
    assert changed["workers"] == 8 and changed["link_bit_s"] == 100e9
    near = [planned(*words, "--inside", speed)["choices"][0] for speed in ("2400gbit", "1gbit")]
    assert near[0]["prediction"]["step_s"] < near[1]["prediction"]["step_s"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "--probe probe.json"),
        (("--link", "fast", *PAPER[2:]), "a rate is like"),
        (PAPER[:4], "--params 7b --compute 400ms"),
        (PAPER[:6], "belong together"),
        ((*PAPER, "--gpus-per-node", "3"), "do not fill nodes of 3"),
        ((*PAPER, "--device", "abacus"), "devices are"),
        ((*PAPER, "--machine", "vax"), "no figures for 'vax'"),
        ((*PAPER, "--error", "-1"), "NMSE"),
        ((*PAPER, "--dtype", "int4"), "dtype is"),
        (("--probe", "nowhere.json"), "is no probe"),
        ((*PAPER, "--plot", "nowhere/plan.html"), "cannot be written"),
    ],
)
def test_bad_plans_are_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    found = CliRunner().invoke(cli.app, ["plan", *words])
    assert found.exit_code == 2 and sentence in found.stderr
    assert found.stderr.count("\n") == 1 and not found.stdout


def test_a_plot_is_one_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    found = CliRunner().invoke(cli.app, ["plan", *PAPER, "--plot", str(page)])
    assert found.exit_code == 0, found.output
    text = page.read_text()
    assert "plain DDP" in text and "computation alone" in text and "now: 1.0 Gbit" in text
    assert "lc.compress(model, &quot;ecdq:error=0.08&quot;)" in text
    assert not re.search(r"<(?:script|link|img)[^>]*\s(?:src|href)=", text)  # nothing to fetch
    lines = set(re.findall(r'"name":"([^"]+)"', text))
    best = planned(*PAPER)["best"]
    assert best in lines and f"{best} *" not in lines  # drawn, though others may be faster


def test_a_plot_without_plotly_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    found = CliRunner().invoke(cli.app, ["plan", *PAPER, "--plot", "plan.html"])
    assert found.exit_code == 2 and "pip install" in found.stderr


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
        run.receive(timeout_s=PATIENCE_S)

        def ask(patience_s: float = PATIENCE_S) -> tuple[str, ...]:
            run.send(str(patience_s))
            return run.receive(timeout_s=PATIENCE_S)

        assert ask() == ("heard", "reached")
        net.hosts[1].cut()
        assert ask(0.5) == ("nothing", "cut off")
        net.hosts[1].mend()
        assert ask() == ("heard", "reached")
        run.wait(timeout_s=PATIENCE_S)


@needs_lab
def test_hosts_can_be_lost_and_stopped() -> None:
    code = "import os, sys; print(os.environ['RANK'], flush=True); [print(l) for l in sys.stdin]"
    with lab.Lab(hosts=3) as net:
        run = net.start([sys.executable, "-c", code], talk=True)
        run.receive(timeout_s=PATIENCE_S)
        run.pause(1)
        texts = [Path(f"/proc/{pid}/stat").read_text() for pid in run.pids]
        states = [text.rpartition(")")[2].split()[0] for text in texts]
        assert states[1] == "T" and "T" not in (states[0], states[2])
        run.resume(1)
        run.lose(2)
        outputs = run.wait(timeout_s=PATIENCE_S)  # the others end well
        assert [one.rank for one in outputs] == [0, 1, 2]
        with pytest.raises(lab.LabError, match="has ended"):
            run.pause(0)
    with lab.Lab(hosts=1) as net:
        run = net.start(["true"])
        with pytest.raises(lc.ConfigError, match="no rank of this run is on host 5"):
            run.lose(5)
