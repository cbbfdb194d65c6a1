"""Encode and decode-add of codecs beside a memory copy: in turns, in one run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic._host import processor
from laconic._progress import Watch, announced, part, unwatched
from laconic.codecs import codec
from laconic.codecs._profiler import CodecProfiler, Quality
from laconic.errors import ConfigError

CODECS = (
    "fp16",
    "bf16",
    "qsgd:bits=4",
    "dqsg:bits=4",
    "dqsg:bits=8",
    "ndqsg",
    "global:bits=8",
    "global-exp:bits=8",
    "qsgd-topk",
    "ecdq:error=0.08",
    "ecdq:error=0.08,coder=rans",
    "rotate(dqsg:bits=4)",
    "feedback(dqsg:bits=4)",
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_ON_CPU, _ON_GPU = 16_000_000, 64_000_000  # values: larger than what caches hold
_FEWEST = 5  # rounds: below that there are no percentiles to speak of
_FIRST = 0.2  # of the work: the first calls, which compile
_REPLAYS = 5  # of a graph between two looks at a GPU's clock

Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of one item, over all rounds."""

    median_s: float
    p10_s: float
    p90_s: float
    copies: float  # the median over that of a memory copy of the same tensor
    gb_s: float  # of the tensor, not of the wire


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a codec costs, and what it makes of Gaussian values."""

    codec: str
    bits: float  # per value
    error: float  # NMSE: ‖decoded - x‖²/‖x‖²
    encode: Timing
    decode: Timing  # added onto a tensor


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One run on one device."""

    device: str  # cpu or cuda
    machine: str  # what it calls itself
    threads: int
    dtype: str
    values: int
    rounds: int
    copy: Timing
    rows: tuple[Row, ...]
    skipped: dict[str, str]  # codecs that do not run here, and why


def bench(
    *,
    codecs: Sequence[str] | None = None,
    values: int | None = None,
    dtype: str = "fp32",
    device: str = "cpu",
    threads: int | None = None,
    patience_s: float = 20.0,
    watch: Watch = unwatched,
) -> Bench:
    """Measure for about `patience_s`, the first calls not counted; five rounds at least.

    On a CPU each item runs twice in its turn, and the second time counts: threads of the item
    before may still spin. On CUDA it is captured as a graph where that is possible, so that what
    the host takes to launch it does not count.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r}")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device is cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here: leave --device out, or give cpu")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads are 1 or more, not {threads}")
    if not 0 < patience_s < math.inf:
        raise ConfigError(f"seconds are above 0, not {patience_s}")
    values = values or (_ON_CPU if device == "cpu" else _ON_GPU)
    with _threads(threads), _fitting(values):
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(values, generator=generator, device=device).to(DTYPES[dtype])
        return _measured(x, codecs or CODECS, dtype, patience_s, watch)


def _measured(
    x: Tensor, specs: Sequence[str], dtype: str, patience_s: float, watch: Watch
) -> Bench:
    target = torch.zeros_like(x)
    work: dict[tuple[str, str], Work] = {("", "copy"): lambda: target.copy_(x)}
    found: dict[str, Quality] = {}
    skipped: dict[str, str] = {}
    for spec in announced(specs, part(watch, 0.0, _FIRST)):
        try:
            found[spec], encode, decode = _works(spec, x, target)
            work[spec, "encode"], work[spec, "decode"] = encode, decode
        except (ConfigError, NotImplementedError, TypeError) as error:
            skipped[spec] = " ".join(str(error).split())
    seconds = _in_turns(work, x.device, patience_s, part(watch, _FIRST, 1.0))
    copy = statistics.median(seconds["", "copy"])
    size = x.numel() * x.element_size()

    def timing(name: tuple[str, str]) -> Timing:
        tenths = statistics.quantiles(seconds[name], n=10, method="inclusive")
        median = statistics.median(seconds[name])
        return Timing(
            median_s=median,
            p10_s=tenths[0],
            p90_s=tenths[-1],
            copies=median / copy,
            gb_s=size / median / 1e9,
        )

    rows = tuple(
        Row(
            codec=spec,
            bits=quality.bits,
            error=quality.error,
            encode=timing((spec, "encode")),
            decode=timing((spec, "decode")),
        )
        for spec, quality in found.items()
    )
    return Bench(
        device=x.device.type,
        machine=_name(x.device),
        threads=torch.get_num_threads(),
        dtype=dtype,
        values=x.numel(),
        rounds=len(seconds["", "copy"]),
        copy=timing(("", "copy")),
        rows=rows,
        skipped=skipped,
    )


def _works(spec: str, x: Tensor, target: Tensor) -> tuple[Quality, Work, Work]:
    """Bits and error of a codec, and its two works, which have run once: kernels are compiled."""
    own = CodecProfiler(codec(spec), x)
    quality, wire = own.quality(), own.encode()
    own.decode(wire, out=target, add=True)
    return (
        quality,
        lambda: own.encode(out=wire),
        lambda: own.decode(wire, out=target, add=True),
    )


def _in_turns(
    work: dict[tuple[str, str], Work], device: torch.device, patience_s: float, told: Watch
) -> dict[tuple[str, str], list[float]]:
    """Seconds of every round, each item once in a round."""
    watches = {
        name: _gpu_watch(one) if device.type == "cuda" else _cpu_watch(one)
        for name, one in work.items()
    }
    for watch in watches.values():
        watch()
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in work}
    end, rounds = time.perf_counter() + patience_s, 0
    while rounds < _FEWEST or time.perf_counter() < end:
        passed = 1 - (end - time.perf_counter()) / patience_s
        told("all codecs in turns", min(rounds / _FEWEST, passed))
        for name, watch in watches.items():
            seconds[name].append(watch())
        rounds += 1
    return seconds


def _cpu_watch(work: Work) -> Callable[[], float]:
    def watch() -> float:
        work()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return watch


def _gpu_watch(work: Work) -> Callable[[], float]:
    replay = _graph(work) or work
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def watch() -> float:
        replay()
        start.record()
        for _ in range(_REPLAYS):
            replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _REPLAYS

    return watch


def _graph(work: Work) -> Work | None:
    """The work without its launches; None for what waits for the host."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # a graph's first run elsewhere is what CUDA asks for
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


@contextmanager
def _fitting(values: int) -> Iterator[None]:
    """ConfigError for a tensor that memory cannot hold: torch has no exception of its own."""
    problem = f"{values:,} values do not fit into memory: give fewer"
    if values >= 2**62:
        raise ConfigError(problem)
    try:
        yield
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise ConfigError(problem) from error


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor()
