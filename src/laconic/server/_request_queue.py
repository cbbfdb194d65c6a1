"""A server's side of its links: a thread for each worker feeds one queue of requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ConfigError, WireError
from laconic.server._link import Frame, Kind, Link
from laconic.sharding._shard import Settings

_ENDED = "the servers have ended: the last worker had left"
MOST_SETTINGS_BYTES = 1 << 16


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """A worker's request, or its loss. The body is valid until the answer is given."""

    worker: int
    frame: Frame
    body: Tensor
    settings: Settings
    lost: str | None = None
    arrived_at: float = field(default_factory=time.perf_counter)
    _answer: Future[tuple[Frame, Tensor | None]] = field(default_factory=Future)

    def reply(self, frame: Frame, body: Tensor | None = None) -> None:
        """Once. The body may not be touched before the same worker asks again."""
        self._answer.set_result((frame, body))

    def done(self, **more: Any) -> None:
        """Answer without weights."""
        self.reply(Frame(kind=Kind.DONE, **more))


class RequestQueue:
    """Every worker sends one request and waits for the answer; workers do not wait for each other.

    `take` returns requests in the order of arrival. It returns within the links' time-out while
    some worker is not away, because a worker without a request for that time is lost.
    """

    def __init__(self, links: Sequence[Link], most_bytes: int, settings: Settings) -> None:
        self._links, self._like = links, settings
        self._inbox: Queue[Request] = Queue()
        self._lock, self._sentence = threading.Lock(), ""
        self._asked: dict[int, Request] = {}
        self._away: set[int] = set()
        self._answered = [threading.Event() for _ in links]  # its last request is answered
        self._most = {Kind.PUSH: most_bytes, Kind.SETTINGS: MOST_SETTINGS_BYTES}
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

        For late requests threads wait until the links are closed.
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
        buffers = {kind: torch.empty(most, dtype=torch.uint8) for kind, most in self._most.items()}
        nothing = torch.empty(0, dtype=torch.uint8)
        try:
            while True:
                frame = link.receive(patient=worker in self._away)
                body = link.body(frame, buffers.get(frame.kind, nothing))
                if frame.kind == Kind.SETTINGS:
                    settings = unpack_settings(body, self._like)
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
        """A worker that has left may be silent for any time."""
        if kind == Kind.LEAVE:
            self._away.add(worker)
        elif kind == Kind.JOIN:
            self._away.discard(worker)


def failed(sentence: str) -> tuple[Frame, Tensor]:
    """An answer with an error."""
    data = torch.frombuffer(bytearray(sentence.encode()[:4096]), dtype=torch.uint8)
    return Frame(kind=Kind.FAILED, length=data.numel()), data


def pack_settings(settings: Settings) -> Tensor:
    """Learning rates and the like as JSON, which keeps every bit of a float."""
    try:
        text = json.dumps(settings, default=_number, separators=(",", ":"))
    except TypeError as error:
        raise ConfigError(
            f"servers take numbers, strings and lists of them as optimizer settings: {error}"
        ) from None
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    if data.numel() > MOST_SETTINGS_BYTES:
        raise ConfigError(
            f"the settings of {len(settings)} parameter groups take {data.numel()} bytes, and "
            f"{MOST_SETTINGS_BYTES} are the most: use fewer groups"
        )
    return data


def unpack_settings(data: Tensor, like: Settings) -> Settings:
    """WireError unless they have the groups and names of `like`.

    Other names are left out: schedulers add some to groups (`initial_lr`), on workers alone.
    """
    try:
        found = json.loads(bytes(data.numpy()))
    except ValueError as error:
        raise WireError(f"settings are no JSON: {error}") from None
    if not _fits(found, like):
        raise WireError("settings have other groups or names than the optimizer's here")
    return [
        {name: _tuple(group[name]) for name in own} for group, own in zip(found, like, strict=True)
    ]


def _fits(found: Any, like: Settings) -> bool:
    if not isinstance(found, list) or len(found) != len(like):
        return False
    pairs = zip(found, like, strict=True)
    return all(isinstance(group, dict) and group.keys() >= own.keys() for group, own in pairs)


def _number(value: object) -> object:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"{value!r} is none")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
