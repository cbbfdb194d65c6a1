"""Signals, after which a lab must still be removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,)


def unwind_on_signals() -> dict[signal.Signals, Any]:
    """Let signals that would end the process at once raise SystemExit instead, as Ctrl-C does.

    Handlers that someone has set, and ignored signals, stay as they are; so does everything in
    threads other than the main one, which may not set any. Returns what `restore` needs.
    """
    if not _main_thread():
        return {}
    return {
        number: signal.signal(number, _leave)
        for number in _ENDING
        if signal.getsignal(number) is signal.SIG_DFL
    }


def restore(handlers: dict[signal.Signals, Any]) -> None:
    """Put back what `unwind_on_signals` replaced."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def postponed() -> Iterator[None]:
    """Signals that would end or interrupt the block, Ctrl-C included, come after it."""
    if not _main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    unheard = (signal.SIG_IGN, None)  # None: set by other than Python, and not ours to replace
    numbers = [n for n in (signal.SIGINT, *_ENDING) if signal.getsignal(n) not in unheard]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        restore(before)
        for number in came[:1]:
            signal.raise_signal(number)


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def close_last(opened: list[tuple[Any, dict[signal.Signals, Any]]]) -> None:
    """Close the network that was opened last; signals are as before it, whatever happens."""
    network, handlers = opened.pop()
    try:
        network.close()
    finally:
        restore(handlers)
