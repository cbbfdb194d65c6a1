"""The lab: hosts that reach each other over shaped links only, and never outlive their block."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S

import laconic as lc
from laconic import lab
from laconic.lab import _hosts, _lab, _requirements, _signals

LACKING = lab.missing()
needs_lab = pytest.mark.skipif(LACKING is not None, reason=LACKING or "")

SIZE = 1_000_000  # bytes of a transfer
RATE = 20  # Mbit/s
FOREVER = "import time; time.sleep(600)"

# Ranks with a server each; for every line of stdin, all transfers at once. Prints when it began
# and ended, by the clock that all processes of a machine share.
TRANSFERS = """
import json, os, socket, sys, threading, time
rank, pairs, size = int(os.environ["RANK"]), json.loads(sys.argv[1]), int(sys.argv[2])
server = socket.create_server((f"10.77.0.{rank + 1}", 5000))
def send(to):
    with socket.create_connection((f"10.77.0.{to + 1}", 5000)) as link:
        link.sendall(bytes(size))
        link.shutdown(socket.SHUT_WR)
        assert link.recv(1) == b"k"
def take():
    link, _ = server.accept()
    with link:
        while link.recv(1 << 16):
            pass
        link.sendall(b"k")
print("up", flush=True)
for line in sys.stdin:
    began = time.monotonic()
    work = [threading.Thread(target=send, args=(b,)) for a, b in pairs if a == rank]
    work += [threading.Thread(target=take) for _, b in pairs if b == rank]
    [one.start() for one in work]
    [one.join() for one in work]
    print(json.dumps([began, time.monotonic()]), flush=True)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def transfers(net: lab.Network, *pairs: tuple[int, int]) -> lab.Run:
    """Started, and ready to send SIZE bytes from host to host for each pair."""
    run = net.start(python(TRANSFERS, json.dumps(pairs), str(SIZE)), talk=True)
    assert run.receive(timeout_s=PATIENCE_S) == ("up",) * len(net.hosts)
    return run


def seconds(run: lab.Run) -> float:
    """From the first rank's begin to the last one's end."""
    run.send("go")
    times = [json.loads(line) for line in run.receive(timeout_s=PATIENCE_S)]
    return max(end for _, end in times) - min(begin for begin, _ in times)


def at_least(nbytes: int, rate_mbit: float) -> float:
    """No link of this rate is faster: all but the first burst waits for tokens."""
    return (nbytes - _hosts.burst_bytes(rate_mbit)) * 8e-6 / rate_mbit


def left(net: lab.Network) -> list[str]:
    """Namespaces of this lab that exist."""
    return names(net.hosts[0].namespace.removesuffix("-0"))


def names(prefix: str) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"{prefix}-*")]


def root_links() -> set[str]:
    text = subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True).stdout
    return {link["ifname"] for link in json.loads(text)}


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# Links


@needs_lab
def test_bytes_are_counted_and_take_their_time() -> None:
    with lab.Lab(hosts=3, rate_mbit=RATE) as net:
        run = transfers(net, (1, 0))
        before = net.counters()
        assert seconds(run) >= at_least(SIZE, RATE)
        taken, sender, idle = (a - b for a, b in zip(net.counters(), before, strict=True))
        run.wait(timeout_s=PATIENCE_S)
    assert SIZE < sender.sent_bytes < 1.06 * SIZE
    assert SIZE < taken.received_bytes < 1.06 * SIZE
    assert taken.sent_bytes < 0.06 * SIZE and sender.received_bytes < 0.06 * SIZE  # replies
    assert idle.sent_bytes < 0.01 * SIZE and idle.received_bytes < 0.01 * SIZE


@needs_lab
@pytest.mark.parametrize("pairs", [[(0, 1), (0, 2)], [(1, 0), (2, 0)]], ids=["sends", "receives"])
def test_a_host_sends_and_receives_at_the_rate_of_its_link(pairs: list[tuple[int, int]]) -> None:
    """Host 0's two transfers share one link, whichever end they enter it at."""
    with lab.Lab(hosts=3, rate_mbit=RATE) as net:
        assert seconds(transfers(net, *pairs)) >= at_least(2 * SIZE, RATE)


@needs_lab
def test_the_rate_changes_while_processes_run() -> None:
    with lab.Lab(hosts=2) as net:
        run = transfers(net, (0, 1))
        seconds(run)
        net.shape(RATE)
        assert seconds(run) >= at_least(SIZE, RATE)
        net.shape(None)
        seconds(run)
        net.hosts[1].shape(RATE)  # one host's link is enough
        assert seconds(run) >= at_least(SIZE, RATE)


@needs_lab
def test_there_is_no_other_way() -> None:
    """Two interfaces, and no route to anywhere else; nothing of it in the machine's own network."""
    code = """
import os, socket, sys
print(sorted(os.listdir("/sys/class/net")))
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error:
    print(error.strerror)
"""
    before = root_links()
    with lab.Lab(hosts=2, rate_mbit=RATE) as net:
        assert not (root_links() - before) & {"switch", "port0", "port1"}
        for output in net.start(python(code)).wait(timeout_s=PATIENCE_S):
            assert output.stdout.splitlines() == ["['eth0', 'lo']", "Network is unreachable"]


@needs_lab
def test_two_labs_at_once() -> None:
    with lab.Lab(hosts=2, rate_mbit=RATE) as slow:
        with lab.Lab(hosts=2) as fast:
            assert not set(left(slow)) & set(left(fast))
            runs = transfers(slow, (0, 1)), transfers(fast, (0, 1))
            for run in runs:
                run.send("go")
            for run in runs:
                run.receive(timeout_s=PATIENCE_S)
            assert fast.counters()[0].sent_bytes > SIZE
        assert left(fast) == []
        assert len(left(slow)) == 3
        assert seconds(runs[0]) >= at_least(SIZE, RATE)
    assert left(slow) == []


@pytest.mark.parametrize("rate", [0.1, 1, 10, 100, 200, 300, 1000, 10_000, 100_000])
def test_a_burst_is_short_and_from_some_rate_on_holds_a_whole_packet(rate: float) -> None:
    burst = _hosts.burst_bytes(rate)
    assert burst == 4096 or burst * 8e-6 / rate <= 2.51e-3  # seconds
    assert burst >= 70 * 1024 or rate < 230
    assert burst == 70 * 1024 or rate < 230 or rate > 1000


# Ranks


SAY = """
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
         "GLOO_SOCKET_IFNAME", "EXTRA")
print(json.dumps([os.environ[name] for name in names] + [os.getcwd()]))
"""


@pytest.mark.parametrize("kind", [pytest.param(lab.Lab, marks=needs_lab), lab.Loopback])
def test_ranks_know_who_and_where_they_are(kind: Any, tmp_path: Path) -> None:
    with kind(hosts=2) as net:
        run = net.start(python(SAY), ranks_per_host=2, env={"EXTRA": "x"}, cwd=tmp_path)
        outputs = run.wait(timeout_s=PATIENCE_S)
    where = ["10.77.0.1", "eth0"] if kind is lab.Lab else ["127.0.0.1", "lo"]
    assert [json.loads(output.stdout) for output in outputs] == [
        [str(rank), "4", str(rank % 2), "2", str(rank // 2), *where, "x", str(tmp_path)]
        for rank in range(4)
    ]
    assert [output.rank for output in outputs] == [0, 1, 2, 3]


@needs_lab
def test_gloo_adds_up_over_the_links() -> None:
    code = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
x = torch.full((100_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(dist.get_world_size(), x.unique().tolist())
dist.barrier()
dist.destroy_process_group()
"""
    with lab.Lab(hosts=3, rate_mbit=1000) as net:
        outputs = net.start(python(code)).wait(timeout_s=PATIENCE_S)
        for counters in net.counters():  # a ring sends 2·(n-1)/n of the tensor
            assert counters.sent_bytes > 500_000
    assert [output.stdout for output in outputs] == ["3 [6.0]\n"] * 3


@needs_lab
def test_hierarchical_keeps_bytes_inside_hosts() -> None:
    """Two ranks on each of two hosts, as torchrun numbers them: links carry what stats() say."""
    code = """
import datetime, torch, torch.distributed as dist
import laconic as lc
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
torch.set_num_threads(1)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(1000, 400, bias=False))
handle = lc.compress(model, "dqsg:bits=4@hierarchical")
for step in range(5):
    model(torch.randn(8, 1000)).square().mean().backward()
stats = handle.stats()
print(stats.sent_bytes, stats.local_bytes, int(model.module.weight.grad.view(torch.int32).sum()))
dist.barrier()
dist.destroy_process_group()
"""
    with lab.Lab(hosts=2) as net:
        outputs = net.start(python(code), ranks_per_host=2).wait(timeout_s=PATIENCE_S)
        links = [counters.sent_bytes for counters in net.counters()]
    said = [[int(word) for word in output.stdout.split()] for output in outputs]
    for host, link in enumerate(links):
        sent = sum(said[rank][0] for rank in (2 * host, 2 * host + 1))
        start = 0 if host else 2 * 4 * 400_000  # DDP's first parameters, to the other host's ranks
        assert sent + start < link < 1.1 * sent + 1.05 * start
        assert sent < sum(said[rank][1] for rank in (2 * host, 2 * host + 1)) / 4
    assert len({one[2] for one in said}) == 1  # the same bits


FAIL = "import os, sys, time; time.sleep(600 if os.environ['RANK'] != '{}' else 0); {}"
KINDS = [pytest.param(lab.Lab, marks=needs_lab), lab.Loopback]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_fails_is_named_and_ends_all(kind: Any) -> None:
    with kind(hosts=3) as net:
        run = net.start(python(FAIL.format(1, "print('boom', file=sys.stderr); sys.exit(3)")))
        with pytest.raises(lab.RankError, match=r"rank 1 .*ended with status 3.*\n?boom") as caught:
            run.wait(timeout_s=PATIENCE_S)
        assert (caught.value.rank, caught.value.host, caught.value.status) == (1, 1, 3)
        assert caught.value.stderr == "boom"
        assert not any(map(alive, run.pids))
        with pytest.raises(lab.LabError, match="has ended"):
            run.wait(timeout_s=1)


def test_a_rank_killed_by_a_signal_says_which() -> None:
    with lab.Loopback(hosts=2) as net:
        run = net.start(python(FAIL.format(0, "os.kill(os.getpid(), 9)")))
        with pytest.raises(lab.RankError, match="rank 0 .*killed by SIGKILL; it wrote nothing"):
            run.wait(timeout_s=PATIENCE_S)


def test_time_over_names_who_is_late() -> None:
    with lab.Loopback(hosts=3) as net:
        run = net.start(python(FAIL.format(1, "")))
        with pytest.raises(lab.LabError, match="ranks were not done: 0, (1, )?2"):  # 1 may be slow
            run.wait(timeout_s=1)
        assert not any(map(alive, run.pids))


def test_ranks_answer_in_their_order() -> None:
    code = """
import os
while x := input():
    print(x, os.environ["RANK"], flush=True)
print("bye")
"""
    with lab.Loopback(hosts=2) as net:
        run = net.start(python(code), talk=True)
        for word in ("a", "b"):
            run.send(word)
            assert run.receive(timeout_s=PATIENCE_S) == (f"{word} 0", f"{word} 1")
        run.send("")
        assert [output.stdout for output in run.wait(timeout_s=PATIENCE_S)] == ["bye\n"] * 2


def test_a_rank_that_dies_instead_of_answering_is_named() -> None:
    code = (
        "import os; x = input(); assert os.environ['RANK'] != '1', 'no'; print(x, flush=True); "
        "input()"
    )
    with lab.Loopback(hosts=3) as net:
        run = net.start(python(code), talk=True)
        run.send("x")
        with pytest.raises(lab.RankError, match=r"(?s)rank 1 .*AssertionError: no"):
            run.receive(timeout_s=PATIENCE_S)
        assert not any(map(alive, run.pids))


def test_silence_is_an_error() -> None:
    with lab.Loopback(hosts=2) as net:
        with pytest.raises(lab.LabError, match="not done: 0, 1"):
            net.start(python(FOREVER), talk=True).receive(timeout_s=0.1)
        with pytest.raises(lab.LabError, match="closed its stdout"):
            net.start(python("pass"), talk=True).receive(timeout_s=PATIENCE_S)


@pytest.mark.parametrize("status", [0, 3])
def test_lines_are_kept_to_the_last_and_who_holds_the_pipes_is_not_waited_for(
    status: int, tmp_path: Path
) -> None:
    """The rank ends; a child of it, in a session of its own, holds both pipes and writes later."""
    late = f"""
import pathlib, time
end = time.monotonic() + 600
while not pathlib.Path({str(tmp_path / "go")!r}).exists() and time.monotonic() < end:
    time.sleep(0.01)
print("too late", flush=True)
"""
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {late!r}], start_new_session=True)
print("\\n".join(map(str, range(5000))))
print(child.pid)
print("the end", file=sys.stderr)
sys.exit({status})
"""
    before, heard = set(threading.enumerate()), []
    try:
        with lab.Loopback(hosts=1) as net:
            run = net.start(python(code), echo=lambda rank, line: heard.append(line))
            if status:
                with pytest.raises(lab.RankError, match="the end"):
                    run.wait(timeout_s=PATIENCE_S)
            else:
                (output,) = run.wait(timeout_s=PATIENCE_S)
                assert output.stdout.splitlines()[:-1] == [str(x) for x in range(5000)]
                assert alive(int(output.stdout.splitlines()[-1])) and output.stderr == "the end\n"
    finally:
        (tmp_path / "go").touch()
    assert len(heard) == 5002
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()
    assert "too late" not in heard  # the run had ended


def test_a_command_that_does_not_exist_leaves_nothing() -> None:
    with lab.Loopback(hosts=2) as net, pytest.raises(FileNotFoundError):
        net.start(["/nonexistent/program"])


# Teardown


@needs_lab
def test_nothing_is_left_after_the_block() -> None:
    settings = lab.Lab(hosts=2, rate_mbit=RATE)
    for _ in range(2):  # the same settings serve again
        with settings as net:
            assert len(left(net)) == 3
            run = net.start(python(FOREVER))
            assert all(map(alive, run.pids))
        assert left(net) == [] and not any(map(alive, run.pids))
        net.close()  # and closing twice is no error


@pytest.mark.parametrize("other_lab_was_faster", [True, False])
def test_two_labs_may_remove_what_a_killed_one_left(
    other_lab_was_faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = tmp_path / "laconic-1-switch"
    namespace.touch()

    def ip(*words: str) -> str:
        if words[1] == "del":
            if other_lab_was_faster:
                namespace.unlink()
            raise lab.LabError("Cannot remove namespace file")
        return ""

    monkeypatch.setattr(_lab, "NAMESPACES", tmp_path)
    monkeypatch.setattr(_lab, "ip", ip)
    with nullcontext() if other_lab_was_faster else pytest.raises(lab.LabError, match="namespace"):
        _lab._remove(namespace.name)


@needs_lab
def test_nothing_is_left_after_an_exception() -> None:
    started: list[tuple[lab.Network, lab.Run]] = []

    def work() -> None:
        with lab.Lab(hosts=2) as net:
            started.append((net, net.start(python(FOREVER))))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    ((net, run),) = started
    assert left(net) == [] and not any(map(alive, run.pids))


@needs_lab
def test_nothing_is_left_when_making_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[lab.Network] = []

    def shape(self: lab.Network, rate_mbit: float | None) -> None:
        made.append(self)
        assert len(left(self)) == 3
        raise KeyboardInterrupt

    monkeypatch.setattr(lab.Network, "shape", shape)
    with pytest.raises(KeyboardInterrupt), lab.Lab(hosts=2):
        pass
    assert left(made[0]) == []


@needs_lab
def test_processes_that_hide_are_found() -> None:
    """A rank may start processes in sessions of their own, and end before them."""
    code = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(600)'], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    )
    with lab.Lab(hosts=1) as net:
        (output,) = net.start(python(code)).wait(timeout_s=PATIENCE_S)
        assert alive(int(output.stdout))
    assert left(net) == [] and not alive(int(output.stdout))


PARENT = """
import sys
from laconic import lab
with lab.Lab(hosts=2, rate_mbit=100) as net:
    run = net.start([sys.executable, "-c", "import time; time.sleep(600)"])
    print(net.hosts[0].namespace, *run.pids, flush=True)
    run.wait(timeout_s=500)
"""


@needs_lab
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT)],
)
def test_nothing_is_left_after_a_signal(number: signal.Signals, status: int) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(python(PARENT), stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdout is not None
        namespace, *pids = parent.stdout.readline().split()
        prefix = namespace.removesuffix("-0")
        assert len(names(prefix)) == 3 and all(alive(int(pid)) for pid in pids)
        parent.send_signal(number)
        parent.communicate(timeout=PATIENCE_S)
    assert parent.returncode == status
    assert names(prefix) == [] and not any(alive(int(pid)) for pid in pids)


def test_signals_unwind_inside_and_are_as_before_outside() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with lab.Loopback(hosts=1), lab.Loopback(hosts=1), pytest.raises(SystemExit) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_of_the_program_stay() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with lab.Loopback(hosts=1):
            signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_waits_for_teardown() -> None:
    steps: list[str] = []

    def teardown() -> None:
        with _signals.postponed():
            signal.raise_signal(signal.SIGINT)
            steps.append("torn down")
        steps.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        teardown()
    assert steps == ["torn down"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_may_use_it_without_signals() -> None:
    outputs: list[lab.Output] = []

    def work() -> None:
        with lab.Loopback(hosts=1) as net:
            outputs.extend(net.start(python("print(1)")).wait(timeout_s=PATIENCE_S))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [output.stdout for output in outputs] == ["1\n"]


# Settings, and machines without a lab


@pytest.mark.parametrize("hosts", [0, -1, 251, 2.0, True, "4", None])
def test_a_wrong_number_of_hosts_is_refused(hosts: Any) -> None:
    with pytest.raises(lc.ConfigError, match="hosts must be an integer from 1 to 250"):
        lab.Lab(hosts=hosts)


@pytest.mark.parametrize("rate", [0, -1, 0.01, 1e6, float("nan"), float("inf"), True, "100"])
def test_a_wrong_rate_is_refused(rate: Any) -> None:
    with pytest.raises(lc.ConfigError, match="rate_mbit must be a number from 0.1 to 100000"):
        lab.Lab(hosts=2, rate_mbit=rate)


@needs_lab
def test_what_cannot_be_done_later_is_refused_later() -> None:
    with lab.Lab(hosts=1) as net:
        with pytest.raises(lc.ConfigError, match="rate_mbit"):
            net.shape(-5)
        with pytest.raises(lc.ConfigError, match="ranks_per_host"):
            net.start(["true"], ranks_per_host=0)


@pytest.mark.parametrize("command", ["python train.py", []])
def test_a_command_is_words(command: Sequence[str]) -> None:
    with lab.Loopback(hosts=1) as net, pytest.raises(lc.ConfigError, match="must be words"):
        net.start(command)


def test_talking_is_agreed_on_at_the_start() -> None:
    with lab.Loopback(hosts=1) as net:
        run = net.start(python(FOREVER))
        with pytest.raises(lc.ConfigError, match="talk=True"):
            run.send("x")


def test_settings_do_not_change() -> None:
    with pytest.raises(AttributeError):
        lab.Lab(hosts=2).hosts = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert lab.Lab(hosts=2, rate_mbit=5) == lab.Lab(hosts=2, rate_mbit=5)


class TestMissing:
    """Every sentence, on a machine that is made to lack things."""

    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """One that lacks nothing."""
        self.patch, self.status = monkeypatch, tmp_path / "status"
        self.status.write_text("Name:\tpython\nCapEff:\t000001ffffffffff\n")
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(_requirements, "_STATUS", self.status)
        monkeypatch.setattr(_requirements, "find", lambda tool: f"/sbin/{tool}")
        monkeypatch.setattr(_requirements, "ip", lambda *arguments: "")
        monkeypatch.setattr(_hosts, "ip", lambda *arguments: "")
        monkeypatch.setattr(_hosts, "tc", lambda *arguments: "")

    def test_nothing(self) -> None:
        assert lab.missing() is None

    def test_linux(self) -> None:
        self.patch.setattr(sys, "platform", "darwin")
        assert lab.missing() == "The lab needs Linux (network namespaces); this is darwin."

    def test_tools(self) -> None:
        self.patch.setattr(_requirements, "find", lambda tool: None if tool == "tc" else "/sbin/ip")
        assert lab.missing() == "`tc` is not installed: install the package iproute2."
        self.patch.setattr(_requirements, "find", lambda tool: None)
        assert lab.missing() == "`ip` and `tc` are not installed: install the package iproute2."

    def test_root(self) -> None:
        self.status.write_text("CapEff:\t0000000000000000\n")
        assert lab.missing() == (
            "The lab needs root: this process has no CAP_NET_ADMIN and no CAP_SYS_ADMIN. Try sudo, "
            "or `laconic lab run`, which makes a user namespace where the kernel allows it."
        )
        self.status.write_text("CapEff:\t00000000a80425fb\n")  # a container's usual ones
        assert "CAP_NET_ADMIN" in (lab.missing() or "")
        self.status.write_text("CapEff:\t000001ffffdfffff\n")
        assert "no CAP_SYS_ADMIN." in (lab.missing() or "")
        assert "CAP_NET_ADMIN" not in (lab.missing() or "")

    def test_the_kernel(self) -> None:
        def refuse(*arguments: str) -> str:
            raise lab.LabError("`tc qdisc` failed: Unknown qdisc")

        self.patch.setattr(_hosts, "tc", refuse)
        assert lab.missing() == (
            "The kernel refuses what the lab needs: `tc qdisc` failed: Unknown qdisc"
        )

    def test_a_lab_says_it_too(self) -> None:
        self.patch.setattr(_lab, "missing", lambda: "It is Tuesday.")
        with pytest.raises(lab.LabError, match="It is Tuesday"), lab.Lab(hosts=2):
            pass
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_tool_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "ip"
    tool.write_text("#!/bin/sh\necho no such thing >&2\nexit 2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    with pytest.raises(lab.LabError, match="`ip netns add x` failed: no such thing"):
        _lab.ip("netns", "add", "x")
