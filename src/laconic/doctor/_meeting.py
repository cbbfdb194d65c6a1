"""Where ranks tell rank 0 what they found: a store, as torchrun's; everything has a time-out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, TCPStore

from laconic.doctor._addresses import unreachable
from laconic.errors import ConfigError, LostError

Result = TypeVar("Result")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TURNS = 3  # of a clock's comparison; the quickest counts


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What torchrun tells a rank."""

    rank: int
    size: int
    address: str
    port: int
    local_rank: int = 0
    hosted: bool = False  # the store is torchrun's own
    attempt: str = "0"

    @staticmethod
    def of(environ: Mapping[str, str]) -> Seat | None:
        """None for a process that was started alone; ConfigError if something is missing."""
        given = [name for name in VARIABLES if environ.get(name)]
        if "RANK" not in given and "WORLD_SIZE" not in given:
            return None
        if missing := [name for name in VARIABLES if name not in given]:
            raise ConfigError(
                f"{', '.join(given)} set, but not {', '.join(missing)}: torchrun sets all four"
            )
        numbers = {"LOCAL_RANK": environ.get("LOCAL_RANK", "0")}
        numbers |= {name: environ[name] for name in VARIABLES if name != "MASTER_ADDR"}
        for name, text in numbers.items():
            if not text.isdecimal():
                raise ConfigError(f"{name} is a number, not {text!r}: torchrun sets it")
        seat = Seat(
            rank=int(numbers["RANK"]),
            size=int(numbers["WORLD_SIZE"]),
            address=environ["MASTER_ADDR"],
            port=int(numbers["MASTER_PORT"]),
            local_rank=int(numbers["LOCAL_RANK"]),
            hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        if not seat.rank < seat.size or not 0 < seat.port < 1 << 16:
            raise ConfigError(
                f"RANK must be below WORLD_SIZE, and MASTER_PORT from 1 to 65535, not {seat.rank}, "
                f"{seat.size} and {seat.port}: torchrun sets them"
            )
        return seat


class Meeting:
    """The store of all ranks; LostError where it is not to be had."""

    def __init__(self, seat: Seat, timeout_s: float) -> None:
        self.seat, self._timeout_s = seat, timeout_s
        self._silent = set[int]()
        serves = seat.rank == 0 and not seat.hosted
        where = f"MASTER_ADDR, {seat.address}:{seat.port}"
        if not serves and (why := unreachable(seat.address, seat.port, timeout_s)):
            raise LostError(f"{where} cannot be reached: {why}")
        try:
            self._server = within(
                timeout_s,
                lambda: TCPStore(
                    seat.address,
                    seat.port,
                    None,
                    serves,
                    timedelta(seconds=timeout_s),
                    wait_for_workers=False,
                ),
            )
        except (RuntimeError, TimeoutError) as error:
            raise LostError(f"{where}: {first_line(error)}") from error
        self.store = PrefixStore(f"laconic-doctor-{seat.attempt}", self._server)

    def tell(self, name: str, text: str) -> None:
        """This rank's answer, for rank 0."""
        try:
            self.store.set(f"{name}/{self.seat.rank}", text)
        except RuntimeError as error:
            raise LostError(f"the store of rank 0 is gone: {first_line(error)}") from error

    def gather(self, name: str, timeout_s: float | None = None) -> list[str | None]:
        """On rank 0: the answers of all ranks, None of those that give none in time.

        Who gave none once is not waited for again.
        """
        end = time.monotonic() + (timeout_s or self._timeout_s)
        found = [
            None if rank in self._silent else self._get(f"{name}/{rank}", end - time.monotonic())
            for rank in range(self.seat.size)
        ]
        self._silent |= {rank for rank, text in enumerate(found) if text is None}
        return found

    def agree(self, name: str, go: bool | None = None) -> bool:
        """Rank 0 says whether all go on; the others wait for its word."""
        if go is not None:
            self.store.set(name, json.dumps(go))
            return go
        return bool(json.loads(self.wait(name)))

    def wait(self, name: str) -> str:
        """What rank 0 has set under that name."""
        told = self._get(name, 2 * self._timeout_s)
        if told is None:
            raise LostError("rank 0 gave no answer in time")
        return told

    def clock(self, rank: int) -> tuple[float, float] | None:
        """On rank 0: seconds that a rank's clock is ahead, and how well that is known."""
        best = None
        for turn in range(_TURNS):
            start = time.time()
            self.store.set(f"clock/{turn}/{rank}", "")
            told = self._get(f"time/{turn}/{rank}", self._timeout_s)
            end = time.time()
            if told is None:
                return None
            found = float(told) - (start + end) / 2, (end - start) / 2
            best = found if best is None or found[1] < best[1] else best
        return best

    def answer_clock(self) -> None:
        """On the others."""
        for turn in range(_TURNS):
            asked = self._get(f"clock/{turn}/{self.seat.rank}", 2 * self._timeout_s)
            if asked is None:
                raise LostError("rank 0 did not compare clocks in time")
            self.store.set(f"time/{turn}/{self.seat.rank}", repr(time.time()))

    def _get(self, key: str, timeout_s: float) -> str | None:
        try:
            self.store.wait([key], timedelta(seconds=max(timeout_s, 0.05)))
            return self.store.get(key).decode()
        except (RuntimeError, ConnectionError):  # of the store: nobody has set it, or it is gone
            return None


def within(timeout_s: float, action: Callable[[], Result]) -> Result:
    """The result of an action; TimeoutError if it takes longer.

    torch has calls that ignore their time-out. One that hangs is left behind in its thread.
    """
    done: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((action(), None))
        except BaseException as error:
            done.put((None, error))

    Thread(target=run, daemon=True, name="laconic-doctor").start()
    try:
        result, error = done.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError(f"no end in {timeout_s:g} s") from None
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]


def first_line(error: BaseException) -> str:
    """Without a stack of C++ behind it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
