"""What goes wrong in a lab."""

from __future__ import annotations

import signal

from laconic.errors import LaconicError


class LabError(LaconicError, RuntimeError):
    """This machine, or a process in the lab, did not do what it was asked to."""


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
