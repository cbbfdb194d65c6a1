"""A server's side of its links: a thread for each worker, one queue of what they ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from laconic.server._link import Frame, Kind, Link
from laconic.server._settings import MOST_BYTES, from_bytes
from laconic.server._shard import Settings

_ENDED = "the servers have ended: the last worker had left"


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What a worker asks, or that it is lost. The body is good until the answer is given."""

    worker: int
    frame: Frame
    body: Tensor
    settings: Settings
    lost: str | None = None
    came: float = field(default_factory=time.perf_counter)
    _answer: Future[tuple[Frame, Tensor | None]] = field(default_factory=Future)

    def reply(self, frame: Frame, body: Tensor | None = None) -> None:
        """Once. The body may not be touched before the same worker asks again."""
        self._answer.set_result((frame, body))

    def done(self, **more: Any) -> None:
        """Answer without weights."""
        self.reply(Frame(kind=Kind.DONE, **more))


class Desk:
    """Every worker asks one thing and waits for its answer; workers do not wait for each other.

    `take` gives what was asked in the order of arrival. It returns within the links' time-out while
    some worker is not away, because a worker that asks nothing for so long is lost.
    """

    def __init__(self, links: Sequence[Link], most_bytes: int, settings: Settings) -> None:
        self._links, self._like = links, settings
        self._inbox: Queue[Request] = Queue()
        self._lock, self._sentence = threading.Lock(), ""
        self._asked: dict[int, Request] = {}
        self._away: set[int] = set()
        self._answered = [threading.Event() for _ in links]  # nothing is owed to a worker
        self._most = {Kind.PUSH: most_bytes, Kind.SETTINGS: MOST_BYTES}
        self.threads = [
            threading.Thread(
                target=self._converse, args=(worker,), daemon=True, name=f"laconic-link-{worker}"
            )
            for worker in range(len(links))
        ]
        for thread in self.threads:
            thread.start()

    def take(self) -> Request:
        """The next request."""
        return self._inbox.get()

    def close(self, sentence: str = _ENDED, within_s: float | None = None) -> None:
        """Answer everything with this sentence, from now on; until all who are here know it.

        Some may ask too late; threads then wait for them until the links are closed.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        with self._lock:
            self._sentence = sentence
            waiting = list(self._asked.values())
        for request in waiting:
            if not request._answer.done():
                request.reply(*failed(sentence))
        for worker, thread in enumerate(self.threads):
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if worker in self._away:
                self._answered[worker].wait(left_s)
            else:
                thread.join(left_s)

    def _converse(self, worker: int) -> None:
        link, settings = self._links[worker], self._like
        rooms = {kind: torch.empty(most, dtype=torch.uint8) for kind, most in self._most.items()}
        nothing = torch.empty(0, dtype=torch.uint8)
        try:
            while True:
                frame = link.receive(patient=worker in self._away)
                body = link.body(frame, rooms.get(frame.kind, nothing))
                if frame.kind == Kind.SETTINGS:
                    settings = from_bytes(body, self._like)
                    continue
                self._answered[worker].clear()
                self._note(worker, frame.kind)
                answer, weights = self._ask(
                    Request(worker=worker, frame=frame, body=body, settings=settings)
                )
                link.send(answer, weights)
                self._answered[worker].set()
                if answer.kind == Kind.FAILED:
                    return
        except Exception as error:  # whatever it is: a silent end would leave `take` waiting
            self._answered[worker].set()
            frame = Frame(kind=Kind.LEAVE)
            self._inbox.put(
                Request(
                    worker=worker, frame=frame, body=nothing, settings=settings, lost=str(error)
                )
            )

    def _ask(self, request: Request) -> tuple[Frame, Tensor | None]:
        with self._lock:
            if self._sentence:
                return failed(self._sentence)
            self._asked[request.worker] = request
        self._inbox.put(request)
        answer = request._answer.result()
        with self._lock:
            del self._asked[request.worker]
        return answer

    def _note(self, worker: int, kind: Kind) -> None:
        """Who has left may be silent without end."""
        if kind == Kind.LEAVE:
            self._away.add(worker)
        elif kind == Kind.JOIN:
            self._away.discard(worker)


def failed(sentence: str) -> tuple[Frame, Tensor]:
    """An answer that tells what is wrong."""
    data = torch.frombuffer(bytearray(sentence.encode()[:4096]), dtype=torch.uint8)
    return Frame(kind=Kind.FAILED, length=data.numel()), data
