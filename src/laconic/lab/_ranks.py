"""The processes of a run: where each rank starts, and what it is told."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO

_TAIL_LINES, _TAIL_BYTES = 30, 6000
_LINGER_S = 2.0  # for what an ended process wrote last
Echo = Callable[[int, str], None]


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
    With `echo`, threads read both outputs, hand on every line and keep it. Processes that it leaves
    behind may hold these pipes without end: nobody waits for them.
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
        """Until the process, and all that it has left behind, has closed the stream."""
        with io.BufferedReader(stream) as lines:  # pyright: ignore[reportArgumentType]
            for line in lines:
                with self._lock:
                    if kept.closed:  # it was left behind, and the run has ended
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
        """Close its stdin: it will be told nothing more."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def kill(self) -> None:
        """End the process and all of its group."""
        self.signal(signal.SIGKILL)

    def finish(self) -> None:
        """What the ended process wrote has been read, as far as that comes to an end soon."""
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
