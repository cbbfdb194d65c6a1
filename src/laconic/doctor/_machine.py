"""Checks of hosts: CPUs against threads, memory, clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laconic._units import seconds, size
from laconic.doctor._facts import Facts
from laconic.doctor._finding import Finding, fine, named, problem

_LEAST_BYTES = 1 << 30  # of memory per rank
_CLOCKS_S = 1.0  # apart: enough to mislead who reads logs of two hosts side by side
_JUMP_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Offset:
    """How much a rank's wall clock is ahead of rank 0's, known to ± `within_s`."""

    rank: int
    ahead_s: float
    within_s: float


def check_threads(rows: Sequence[Facts]) -> Iterator[Finding]:
    """Threads of torch on all ranks of a host, and its CPUs."""
    crowded = [row for row in rows if row.local_ranks * row.threads > row.cpus]
    for host in dict.fromkeys(row.place for row in crowded):
        here = [row for row in crowded if row.place == host]
        one, each = here[0], max(1, here[0].cpus // here[0].local_ranks)
        text = (
            f"{one.host}: {_count(one.local_ranks, 'rank')} of {_count(one.threads, 'thread')} on "
            f"{_count(one.cpus, 'CPU')}"
        )
        ranks = [row.rank for row in here]
        if one.threads > each:
            yield problem("threads", text, f"export OMP_NUM_THREADS={each}", ranks)
        else:
            advice = f"start {one.cpus} ranks per host at most (torchrun --nproc-per-node)"
            yield problem("threads", text, advice, ranks)
    if not crowded:
        told = dict.fromkeys(
            f"{_count(row.local_ranks, 'rank')} of {_count(row.threads, 'thread')} on "
            f"{_count(row.cpus, 'CPU')}"
            for row in rows
        )
        yield fine("threads", f"per host {', or '.join(told)}")


def check_memory(rows: Sequence[Facts]) -> Iterator[Finding]:
    """What is free on the hosts, per rank."""
    known = [(row, row.memory_bytes) for row in rows if row.memory_bytes is not None]
    if not known:
        yield fine("memory", "unknown on this system")
        return
    low = [row.rank for row, free in known if free / row.local_ranks < _LEAST_BYTES]
    least = min(free / row.local_ranks for row, free in known)
    text = f"{size(least)} free per rank on the fullest host"
    if low:
        yield problem("memory", text, f"free memory on the hosts of {named(low)}", low)
    else:
        yield fine("memory", text)


def check_clocks(offsets: Sequence[Offset]) -> Iterator[Finding]:
    """Wall clocks of ranks, against that of rank 0."""
    apart = [one for one in offsets if abs(one.ahead_s) - one.within_s > _CLOCKS_S]
    for one in apart:
        where = "ahead of" if one.ahead_s > 0 else "behind"
        yield problem(
            "clocks",
            f"the clock of {named([one.rank])} is {seconds(abs(one.ahead_s))} {where} rank 0's",
            "set it (timedatectl set-ntp true): logs, time-outs of files and certificates need it",
            [one.rank],
        )
    if not apart:
        most = max((abs(one.ahead_s) + one.within_s for one in offsets), default=0.0)
        yield fine("clocks", f"all within {seconds(most)}" if offsets else "of one rank")


def check_monotonic(wall_s: float, monotonic_s: float) -> Iterator[Finding]:
    """Two clocks over the time that all checks took."""
    if abs(wall_s - monotonic_s) > _JUMP_S:
        yield problem(
            "clocks",
            f"the wall clock of rank 0 moved {seconds(abs(wall_s - monotonic_s))} while "
            f"{seconds(monotonic_s)} passed",
            "something sets the clock in steps: let NTP run before training",
            [0],
        )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
