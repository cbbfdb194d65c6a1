"""One line in a DistributedDataParallel script: gradients travel encoded, behind backward."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic._version import __version__
from laconic.codecs import Codec, Place
from laconic.codecs._memory import Scratch
from laconic.errors import ConfigError
from laconic.exchanges import Call, Exchange, Traffic, pair
from laconic.exchanges._transport import plain_mean
from laconic.integrations._agree import agree
from laconic.integrations._policy import Policy

Chooser = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What one rank has done so far."""

    steps: int
    sent_bytes: int
    plain_bytes: int  # what DDP would have sent, in a ring all-reduce
    exchange_seconds: float  # in the communication thread: codec, copies and wire
    wire_seconds: float  # of these, in collectives, waiting for other ranks included

    @property
    def ratio(self) -> float:
        """How many times fewer bytes."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0


@dataclass(frozen=True)
class _Piece:
    """A parameter inside a bucket."""

    number: int
    start: int
    numel: int
    compressed: bool


class HookState:
    """What the hook needs to know, and what it remembers; `lc.compress` makes and registers one.

    Make it on all ranks of the group at once: they compare settings, and end together if those
    differ. For Lightning and Accelerate, which register hooks themselves:
    `HookState(model, "ecdq:error=0.08")` and `lc.comm_hook`.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: str | Codec,
        *,
        exchange: str | Exchange | None = None,
        policy: Chooser | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.codec, self.exchange = pair(spec, exchange)
        if not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be an integer from 0, not {warmup_steps!r}")
        if not dist.is_initialized():
            raise ConfigError("start torch.distributed first: torchrun, then init_process_group()")
        self.warmup_steps, self.seed, self.step = warmup_steps, seed, 0
        self.traffic, self.scratch = Traffic(), Scratch()
        self.plain_bytes, self.exchange_seconds = 0, 0.0
        chosen = policy or Policy()
        self._names: dict[int, tuple[int, bool]] = {}
        layout = []
        for number, (name, parameter) in enumerate(module.named_parameters()):
            compressed = parameter.requires_grad and chosen(name, parameter)
            self._names[id(parameter)] = number, compressed
            layout.append(f"{name} {tuple(parameter.shape)} {parameter.dtype} {compressed}")
        self._pieces: dict[tuple[int, ...], tuple[_Piece, ...]] = {}
        self.group = _own_group(group, timeout_s)
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        settings = {
            "laconic": __version__,
            "codec": str(self.codec),
            "exchange": str(self.exchange),
            "warmup_steps": str(warmup_steps),
            "seed": str(seed),
            "parameters": "\n".join(layout),
        }
        agree(settings, self.group, device)

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        """The one thread that talks: a blocking collective inside a future's callback hangs."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="laconic-hook")
        weakref.finalize(self, pool.shutdown, wait=False)
        return pool

    def stats(self) -> Stats:
        """Bytes and times so far."""
        return Stats(
            steps=self.step,
            sent_bytes=self.traffic.sent_bytes,
            plain_bytes=self.plain_bytes,
            exchange_seconds=self.exchange_seconds,
            wire_seconds=self.traffic.wire_seconds,
        )

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on exactly: the step, and a codec's memory."""
        state: dict[str, Any] = {"step": self.step, "codec": str(self.codec)}
        if self.codec.remembers:
            state["memory"] = self.codec.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        if state["codec"] != str(self.codec):
            raise ConfigError(f"this state is of {state['codec']}, not of {self.codec}")
        self.step = int(state["step"])
        if self.codec.remembers:
            self.codec.load_state_dict(state["memory"])  # pyright: ignore[reportAttributeAccessIssue]

    def pieces(self, parameters: list[Tensor]) -> tuple[_Piece, ...]:
        """What a bucket is made of; known by its parameters, because buckets are rebuilt."""
        key = tuple(map(id, parameters))
        found = self._pieces.get(key)
        if found is None:
            start, made = 0, []
            for parameter in parameters:
                number, compressed = self._names[id(parameter)]
                made.append(_Piece(number, start, parameter.numel(), compressed))
                start += parameter.numel()
            found = self._pieces[key] = tuple(made)
        return found


def compress(
    model: DistributedDataParallel,
    spec: str | Codec,
    *,
    exchange: str | Exchange | None = None,
    policy: Chooser | None = None,
    warmup_steps: int = 0,
    seed: int = 0,
    timeout_s: float = 300.0,
) -> HookState:
    """Let a DDP model's gradients travel encoded; call it on all ranks, before the first step.

    `spec` names codec and, behind an @, the exchange ("dqsg:bits=4", "global:bits=8@allreduce").
    `policy(name, parameter)` says what to compress, `warmup_steps` how many steps stay plain DDP.
    """
    if not isinstance(model, DistributedDataParallel):
        kind = type(model).__name__
        raise ConfigError(f"compress takes a DistributedDataParallel model, not {kind}")
    state = HookState(
        model.module,
        spec,
        exchange=exchange,
        policy=policy,
        warmup_steps=warmup_steps,
        seed=seed,
        group=model.process_group,
        timeout_s=timeout_s,
    )
    model.register_comm_hook(state, comm_hook)
    return state


def comm_hook(state: HookState, bucket: Any) -> Future[Tensor]:
    """DDP's hook: starts the exchange of a bucket and returns at once."""
    buffer = bucket.buffer()
    if buffer.is_sparse:
        raise ConfigError("sparse gradients cannot be compressed; use nn.Embedding(sparse=False)")
    pieces, step = state.pieces(bucket.parameters()), state.step
    if bucket.is_last():
        state.step += 1
    cuda = buffer.device.type == "cuda"
    done: Future[Tensor] = Future(devices=[buffer.device]) if cuda else Future()
    ready = torch.cuda.current_stream(buffer.device).record_event() if cuda else None
    state.thread.submit(_job, state, buffer, pieces, step, ready, done)
    return done


# DDP compares these with the objects themselves, which postponed annotations are not
comm_hook.__annotations__ |= {
    "bucket": dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
    "return": Future[Tensor],
}


def _job(
    state: HookState,
    buffer: Tensor,
    pieces: tuple[_Piece, ...],
    step: int,
    ready: Any,
    done: Future[Tensor],
) -> None:
    """Runs in the communication thread; on CUDA, on a stream of its own."""
    try:
        if ready is None:
            _exchange(state, buffer, pieces, step)
            done.set_result(buffer)
            return
        with torch.cuda.stream(_side_stream(buffer.device)):
            ready.wait()
            _exchange(state, buffer, pieces, step)
            done.set_result(buffer)
    except Exception as error:
        done.set_exception(error)  # pyright: ignore[reportArgumentType]


def _exchange(state: HookState, buffer: Tensor, pieces: tuple[_Piece, ...], step: int) -> None:
    """The bucket becomes its mean over ranks, in place."""
    start = time.perf_counter()
    size = state.group.size()
    state.plain_bytes += round(2 * (size - 1) / size * buffer.numel() * buffer.element_size())
    packed = [piece for piece in pieces if piece.compressed and step >= state.warmup_steps]
    plain = [piece for piece in pieces if piece not in packed]
    call = Call(
        group=state.group,
        seed=state.seed,
        step=step,
        tensor=pieces[0].number,
        places=tuple(
            Place(parameter=p.number, start=0, numel=p.numel, total=p.numel) for p in packed
        ),
        scratch=state.scratch,
        traffic=state.traffic,
    )
    if not packed:
        plain_mean(buffer, call)
    else:
        with (
            _gathered(buffer, packed, state.scratch, "packed", buffer.dtype) as x,
            _gathered(buffer, plain, state.scratch, "plain", torch.float32) as rest,
        ):
            state.exchange.mean(x, state.codec, call, rest if plain else None)
    state.exchange_seconds += time.perf_counter() - start


@contextmanager
def _gathered(
    buffer: Tensor, pieces: list[_Piece], space: Scratch, name: str, dtype: torch.dtype
) -> Iterator[Tensor]:
    """The pieces as one tensor, put back afterwards; the buffer itself if they lie together."""
    total = sum(piece.numel for piece in pieces)
    start = pieces[0].start if pieces else 0
    if buffer.dtype == dtype and (
        not pieces or pieces[-1].start + pieces[-1].numel - start == total
    ):
        yield buffer[start : start + total]
        return
    x = space.take(name, total, buffer.device, dtype)
    parts = x.split([piece.numel for piece in pieces])
    for part, piece in zip(parts, pieces, strict=True):
        part.copy_(buffer[piece.start : piece.start + piece.numel])
    yield x
    for part, piece in zip(parts, pieces, strict=True):
        buffer[piece.start : piece.start + piece.numel].copy_(part)


def _own_group(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """A group of the same ranks for us alone: DDP's own collectives run in another thread."""
    timeout = timedelta(seconds=timeout_s)
    if group is None or group is dist.group.WORLD:
        made = dist.new_group(timeout=timeout)
    else:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
