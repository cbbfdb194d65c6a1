"""A run: the processes of all ranks of one command, which succeed together or not at all."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_any
from typing import IO, Any

from laconic.errors import ConfigError
from laconic.lab._hosts import LabError
from laconic.lab._signals import postponed

_TAIL_LINES, _TAIL_BYTES = 30, 6000
_LINGER_S = 2.0  # for what an ended process wrote last
Echo = Callable[[int, str], None]


class RankError(LabError):
    """A rank failed. All others were killed."""

    def __init__(self, *, rank: int, host: int, status: int, stderr: str) -> None:
        self.rank, self.host, self.status, self.stderr = rank, host, status, stderr
        said = f"its stderr ends:\n{stderr}" if stderr else "it wrote nothing to stderr"
        super().__init__(f"rank {rank} (host {host}) {_how(status)}; {said}")


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where and as what one rank starts: words before its command, and variables."""

    host: int
    prefix: tuple[str, ...]
    variables: Mapping[str, str]


def seats(
    *,
    prefixes: Sequence[tuple[str, ...]],
    ranks_per_host: int,
    address: str,
    port: int,
    interface: str,
) -> list[Seat]:
    """A seat for every rank, numbered host by host, with the variables that torchrun would set."""
    return [
        Seat(
            host=host,
            prefix=prefix,
            variables={
                "RANK": str(host * ranks_per_host + local),
                "WORLD_SIZE": str(len(prefixes) * ranks_per_host),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "GROUP_RANK": str(host),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": interface,
            },
        )
        for host, prefix in enumerate(prefixes)
        for local in range(ranks_per_host)
    ]


class Rank:
    """One process, in a session of its own, so that a Ctrl-C for us is not one for it.

    It writes to files, which never fill up as pipes do; with `talk`, stdin and stdout are pipes.
    With `echo`, threads read both outputs, pass on every line and keep it. Child processes that
    outlive it may hold these pipes open forever: they are not waited for.
    """

    def __init__(
        self,
        number: int,
        seat: Seat,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        talk: bool,
        echo: Echo | None = None,
    ) -> None:
        self.number, self.host = number, seat.host
        with ExitStack() as files:
            self.stderr: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
            written = None if talk else files.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                [*seat.prefix, *command],
                stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                stdout=subprocess.PIPE if echo else written or subprocess.PIPE,
                stderr=subprocess.PIPE if echo else self.stderr,
                bufsize=0,  # a line is read to its end and not beyond: what is left wakes a wait
                env={**os.environ, **env, **seat.variables},
                cwd=cwd,
                start_new_session=True,
            )
            self._file: IO[bytes] | None = written
            self._files = files.pop_all()
        self._lock = threading.Lock()  # of the files' positions
        self._readers = [
            threading.Thread(target=self._follow, args=(stream, kept, echo), daemon=True)
            for stream, kept in (
                (self.process.stdout, self._file),
                (self.process.stderr, self.stderr),
            )
            if echo is not None and stream is not None and kept is not None
        ]
        for reader in self._readers:
            reader.start()

    def _follow(self, stream: IO[bytes], kept: IO[bytes], echo: Echo) -> None:
        """Until the process and its children have closed the stream."""
        with io.BufferedReader(stream) as lines:  # pyright: ignore[reportArgumentType]
            for line in lines:
                with self._lock:
                    if kept.closed:  # a child outlived the run
                        return
                    kept.seek(0, os.SEEK_END)
                    kept.write(line)
                    kept.flush()
                echo(self.number, line.decode(errors="replace").rstrip("\n"))

    @property
    def stdout(self) -> IO[bytes]:
        """Where its output is read from."""
        stream = self._file or self.process.stdout
        assert stream is not None
        return stream

    def tail(self) -> str:
        """The end of what it wrote to stderr."""
        with self._lock:
            size = self.stderr.seek(0, os.SEEK_END)
            self.stderr.seek(max(0, size - _TAIL_BYTES))
            lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def read(self) -> tuple[str, str]:
        """All that the ended process wrote: stdout (what is left of it, when talking), stderr."""
        self.finish()
        with self._lock:
            if self._file is not None:
                self._file.seek(0)
            self.stderr.seek(0)
            return (
                self.stdout.read().decode(errors="replace"),
                self.stderr.read().decode(errors="replace"),
            )

    def hang_up(self) -> None:
        """Close its stdin: nothing more is sent."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def kill(self) -> None:
        """End the process and all of its group."""
        self.signal(signal.SIGKILL)

    def finish(self) -> None:
        """Wait, not for long, until what the ended process wrote has been read."""
        deadline = time.monotonic() + _LINGER_S
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        self._readers = []  # once is enough

    def signal(self, number: signal.Signals) -> None:
        """To the process and all of its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Reap the ended process and forget what it wrote."""
        self.process.wait()
        self.finish()
        self.hang_up()
        with self._lock:
            self.stdout.close()
            self._files.close()


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a rank that ended well had written."""

    rank: int
    stdout: str
    stderr: str


class Run:
    """The ranks of one command; `Network.start` makes it.

    A rank that fails, or a time-out, ends all of them. With `talk=True`, ranks read lines from
    stdin and answer with lines on stdout: `send` and `receive`.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        talk: bool = False,
        echo: Echo | None = None,
    ) -> None:
        if isinstance(command, str) or not command:
            raise ConfigError(f'command must be words, as in ["python", "x.py"], not {command!r}')
        self._ranks: list[Rank] = []
        self._talk, self._closed = talk, False
        self._lost: set[int] = set()  # hosts that were killed: their ranks need not end well
        try:
            for number, seat in enumerate(seats):
                rank = Rank(number, seat, command, env=env or {}, cwd=cwd, talk=talk, echo=echo)
                self._ranks.append(rank)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' process ids."""
        return tuple(rank.process.pid for rank in self._ranks)

    def wait(self, *, timeout_s: float) -> tuple[Output, ...]:
        """Wait until all ranks have ended well, and return what they wrote.

        RankError if one fails, naming it, and LabError when time is over: then none is left.
        """
        self._check_open()
        try:
            for rank in self._ranks:
                rank.hang_up()
            self._wait(timeout_s)
            found = [(rank.number, *rank.read()) for rank in self._ranks]
            return tuple(Output(rank=r, stdout=out, stderr=err) for r, out, err in found)
        finally:
            self.kill()

    def send(self, line: str) -> None:
        """Write a line to every rank's stdin."""
        self._check_open(talking=True)
        for rank in self._ranks:
            assert rank.process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: receive will raise
                rank.process.stdin.write(f"{line}\n".encode())

    def receive(self, *, timeout_s: float) -> tuple[str, ...]:
        """A line from every rank's stdout, in the order of ranks; fails as `wait` does."""
        self._check_open(talking=True)
        try:
            return self._receive(timeout_s)
        except BaseException:
            self.kill()
            raise

    def pause(self, host: int) -> None:
        """Stop the host's processes, as on an overloaded machine; its link stays up."""
        for rank in self._signal(host, signal.SIGSTOP):
            # until the kernel has stopped it, or it has ended
            os.waitid(os.P_PID, rank.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self, host: int) -> None:
        """Continue them."""
        self._signal(host, signal.SIGCONT)

    def lose(self, host: int) -> None:
        """Kill the host's processes; `wait` does not count that as a failure."""
        self._lost.add(host)
        self._signal(host, signal.SIGKILL)

    def _signal(self, host: int, number: signal.Signals) -> list[Rank]:
        self._check_open()
        found = [rank for rank in self._ranks if rank.host == host]
        if not found:
            raise ConfigError(f"no rank of this run is on host {host!r}")
        for rank in found:
            rank.signal(number)
        return found

    def kill(self) -> None:
        """End what still runs; done twice, it does nothing."""
        with postponed():
            for rank in self._ranks:
                if rank.process.returncode is None:
                    rank.kill()
            for rank in self._ranks:
                rank.close()
            self._closed = True

    def _wait(self, timeout_s: float) -> None:
        with ExitStack() as stack:
            ends = {_pidfd(rank, stack): rank for rank in self._ranks}
            for end in _as_ready(ends, timeout_s):
                rank = ends.pop(end)
                if rank.process.wait() and rank.host not in self._lost:
                    rank.finish()
                    raise self._failure(rank)

    def _receive(self, timeout_s: float) -> tuple[str, ...]:
        silent = {rank.stdout.fileno(): rank for rank in self._ranks}
        lines = {}
        for stream in _as_ready(silent, timeout_s):
            rank = silent.pop(stream)
            line = rank.stdout.readline()
            if not line:
                raise self._silence(rank, timeout_s)
            lines[rank.number] = line.decode().rstrip("\n")
        return tuple(lines[number] for number in sorted(lines))

    def _silence(self, rank: Rank, timeout_s: float) -> LabError:
        """Why a rank's stdout has ended: in most cases because it has."""
        with suppress(subprocess.TimeoutExpired):
            if rank.process.wait(timeout_s):
                return self._failure(rank)
        return LabError(f"rank {rank.number} closed its stdout without an answer")

    def _failure(self, rank: Rank) -> RankError:
        status = rank.process.returncode
        return RankError(rank=rank.number, host=rank.host, status=status, stderr=rank.tail())

    def _check_open(self, talking: bool = False) -> None:
        if self._closed:
            raise LabError("this run has ended; start another one")
        if talking and not self._talk:
            raise ConfigError("send and receive are for runs that were started with talk=True")


class Runs:
    """All runs of a network."""

    def __init__(self) -> None:
        self._all: list[Run] = []

    def __len__(self) -> int:
        return len(self._all)

    def start(self, seats: Sequence[Seat], command: Sequence[str], **options: Any) -> Run:
        """Start a Run; a signal finds its processes either not started, or known."""
        with postponed():
            run = Run(seats, command, **options)
            self._all.append(run)
        return run

    def kill(self) -> None:
        """End all that still run."""
        for run in self._all:
            run.kill()


def _pidfd(rank: Rank, stack: ExitStack) -> int:
    """A descriptor that becomes readable when the process ends, closed with the stack."""
    descriptor = os.pidfd_open(rank.process.pid)
    stack.callback(os.close, descriptor)
    return descriptor


def _as_ready(waiting: dict[int, Rank], timeout_s: float) -> Iterator[int]:
    """Descriptors as they become ready, until the caller has taken all out of `waiting`."""
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready = wait_for_any(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank.number) for rank in waiting.values())
            tails = "\n".join(filter(None, (rank.tail() for rank in waiting.values())))
            raise LabError(
                f"after {timeout_s:g} s these ranks were not done: {late}. All were killed. "
                + (f"Their stderr ends:\n{tails}" if tails else "They wrote nothing to stderr.")
            )
        yield from (one for one in ready if isinstance(one, int))
