"""All checks, alone or on all ranks at once: ranks tell rank 0, which judges."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch._C._distributed_c10d import HashStore, PrefixStore

from laconic._progress import Watch, unwatched
from laconic._version import __version__
from laconic.doctor._facts import Facts, facts
from laconic.doctor._finding import Finding, fine, named, problem
from laconic.doctor._group import GroupState, backends_to_try, check_groups, try_group
from laconic.doctor._group import from_json as groups_from_json
from laconic.doctor._group import to_json as groups_to_json
from laconic.doctor._kernels import KernelState, check_kernels, kernel_states, own_devices
from laconic.doctor._kernels import from_json as kernels_from_json
from laconic.doctor._kernels import to_json as kernels_to_json
from laconic.doctor._links import check_links
from laconic.doctor._machine import (
    Offset,
    check_clocks,
    check_memory,
    check_monotonic,
    check_threads,
)
from laconic.doctor._meeting import Meeting, Seat
from laconic.doctor._network import check_addresses, check_port
from laconic.doctor._software import check_backends, check_frameworks, check_versions
from laconic.errors import ConfigError, LostError

_COMPILING_S = 300.0  # kernels compile when they are first used, on busy hosts slowly
_LINKS_S = 5.0
_USUAL_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found. Ranks other than 0 find nothing, unless they cannot tell rank 0."""

    rank: int
    ranks: int
    findings: tuple[Finding, ...]
    laconic: str = __version__
    stuck: bool = field(default=False, repr=False)  # a thread hangs in torch: end with os._exit

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return all(one.ok for one in self.findings)


def doctor(
    *,
    timeout_s: float = 30.0,
    environ: Mapping[str, str] = os.environ,
    watch: Watch = unwatched,
) -> Report:
    """Check this host, or call it on all ranks that torchrun started.

    Ranks that do not come within `timeout_s` are problems. `watch` is told what is done next, and
    the part of all that is done, 0 to 1.
    """
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be above 0, not {timeout_s}")
    seat = Seat.of(environ)
    if seat is None:
        return _alone(timeout_s, environ, watch)
    watch("waiting for ranks", 0.0)
    try:
        meeting = Meeting(seat, timeout_s)
        return _Rounds(meeting, timeout_s, environ, watch).run()
    except LostError as error:
        advice = "is rank 0 up, and its port open? docs/howto/several-nodes.md"
        lost = problem("master", f"{named([seat.rank])}: {error}", advice, [seat.rank])
        return Report(rank=seat.rank, ranks=seat.size, findings=(*_local(seat, environ), lost))


def _local(seat: Seat, environ: Mapping[str, str]) -> list[Finding]:
    """What a rank that nobody hears can say of itself."""
    return [one for one in check_addresses([facts(seat.rank, environ)]) if not one.ok]


def _alone(timeout_s: float, environ: Mapping[str, str], watch: Watch) -> Report:
    start = time.time(), time.monotonic()
    watch("this host", 0.0)
    row = facts(0, environ)
    found = _of_facts([row])
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    number = int(port) if port.isdecimal() and 0 < int(port) < 1 << 16 else _USUAL_PORT
    found.append(check_port(address, number, given=bool(address)))
    watch("process groups", 0.1)
    states = [
        try_group(backend, HashStore(), 0, 1, timeout_s, 0.0) for backend in backends_to_try([row])
    ]
    found += check_groups([(0, state) for state in states], 1)
    watch("kernels", 0.3)
    found += check_kernels([(0, state) for state in kernel_states(own_devices(0))])
    found += check_monotonic(time.time() - start[0], time.monotonic() - start[1])
    stuck = any(state.stuck for state in states)
    return Report(rank=0, ranks=1, findings=tuple(found), stuck=stuck)


def _of_facts(rows: Sequence[Facts]) -> list[Finding]:
    return [
        *check_versions(rows),
        *check_frameworks(rows),
        *check_backends(rows),
        *check_threads(rows),
        *check_memory(rows),
        *check_addresses(rows),
    ]


class _Rounds:
    """Ranks that have met; rank 0 says before every round whether all take part."""

    def __init__(
        self, meeting: Meeting, timeout_s: float, environ: Mapping[str, str], watch: Watch
    ) -> None:
        self.meeting, self.seat, self.watch = meeting, meeting.seat, watch
        self.timeout_s, self.environ = timeout_s, environ
        self.found: list[Finding] = []
        self.stuck = False

    def run(self) -> Report:
        start = time.time(), time.monotonic()
        rows = self._facts()
        if rows is not None:
            self._clocks()
            self._groups(rows)
            self._kernels()
            self.found += check_monotonic(time.time() - start[0], time.monotonic() - start[1])
        self._end()
        findings = tuple(self.found) if self.seat.rank == 0 else ()
        return Report(
            rank=self.seat.rank, ranks=self.seat.size, findings=findings, stuck=self.stuck
        )

    def _facts(self) -> list[Facts] | None:
        """Those of all ranks, on rank 0; its own on others. None if some did not come."""
        mine = facts(self.seat.rank, self.environ)
        self.meeting.tell("facts", mine.to_json())
        if self.seat.rank:
            return [mine] if self.meeting.agree("met") else None
        told = self.meeting.gather("facts")
        rows = [Facts.from_json(text) for text in told if text is not None]
        missing = [rank for rank, text in enumerate(told) if text is None]
        self.found += _of_facts(rows)
        where = f"{self.seat.address}:{self.seat.port}"
        if missing:
            self.found.append(
                problem(
                    "master",
                    f"{named(missing)} did not come to {where} within {self.timeout_s:g} s",
                    "look at their output: were they started, with the same MASTER_ADDR, "
                    "MASTER_PORT and WORLD_SIZE, and is the port open?",
                    missing,
                )
            )
        else:
            self.found.append(fine("master", f"all {self.seat.size} ranks came to {where}"))
        self.meeting.agree("met", not missing)
        return None if missing else rows

    def _clocks(self) -> None:
        self.watch("clocks", 0.1)
        if self.seat.rank:
            self.meeting.answer_clock()
            return
        offsets = []
        for rank in range(1, self.seat.size):
            told = self.meeting.clock(rank)
            if told is not None:
                offsets.append(Offset(rank=rank, ahead_s=told[0], within_s=told[1]))
        self.found += check_clocks(offsets)

    def _groups(self, rows: Sequence[Facts]) -> None:
        self.watch("process groups and links", 0.2)
        states: list[GroupState] = []
        first = self.seat.rank == 0
        tried = self._shared("backends", ",".join(backends_to_try(rows))).split(",")
        for backend in filter(None, tried):
            store = PrefixStore(backend, self.meeting.store)
            links_s = _LINKS_S if backend == "gloo" else 0.0
            states.append(
                try_group(backend, store, self.seat.rank, self.seat.size, self.timeout_s, links_s)
            )
            if states[-1].wrong:
                break
        self.stuck = any(state.stuck for state in states)
        self.meeting.tell("groups", groups_to_json(states))
        if first:
            told = self.meeting.gather("groups", 4 * self.timeout_s + 10 * _LINKS_S)
            every = [
                (rank, state)
                for rank, text in enumerate(told)
                for state in (groups_from_json(text) if text else [_silent(tried)])
            ]
            self.found += check_groups(every, self.seat.size)
            links = [one for _, state in every for one in state.links]
            self.found += check_links(links, rows)

    def _kernels(self) -> None:
        self.watch("kernels", 0.6)
        self.meeting.tell(
            "kernels", kernels_to_json(kernel_states(own_devices(self.seat.local_rank)))
        )
        if self.seat.rank:
            return
        told = self.meeting.gather("kernels", self.timeout_s + _COMPILING_S)
        silent = KernelState(device="a device", form="unknown", why="", wrong="no answer in time")
        self.found += check_kernels(
            [
                (rank, state)
                for rank, text in enumerate(told)
                for state in ([silent] if text is None else kernels_from_json(text))
            ]
        )

    def _shared(self, name: str, text: str) -> str:
        """Rank 0's text, on all ranks."""
        if self.seat.rank == 0:
            self.meeting.store.set(name, text or ",")
            return text
        return self.meeting.wait(name)

    def _end(self) -> None:
        """Rank 0's store serves until all have read it."""
        self.meeting.tell("end", "")
        if self.seat.rank == 0 and not self.seat.hosted:
            self.meeting.gather("end", min(self.timeout_s, 5.0))


def _silent(tried: Sequence[str]) -> GroupState:
    return GroupState(backend=(list(tried) or ["gloo"])[0], wrong="no answer in time")
