"""ecdq and coded sections on Numba and Triton against the reference: bytes, bits, damage.

Steps may differ between backends in their last bits, so bytes are compared for equal steps. The
reference always runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    INPUTS,
    assert_same_bits,
    captured,
    covering,
    gaussian,
    mostly_zero,
    student_t3,
)
from test_backends import Fast, fast, fast_backend
from torch import Tensor

import laconic as lc
from benchmarks._gradients import gradients
from laconic.kernels import Coding, Output, StepRule, _reference, using
from laconic.kernels._coding import CHUNK, Budgets, Kind, Section, Subtract, most_words, table
from laconic.kernels._reference.coding import _check
from laconic.kernels._reference.group import draws

__all__ = ["fast"]
STREAM = lc.Key(seed=5, step=2, tensor=1).stream()
CODING = Coding(Kind.BITMAP, STREAM)
EMPTY = 0x55555555  # what a section holds before it is written


@pytest.fixture
def triton() -> Iterator[Fast]:
    yield from fast_backend("triton")


Run = tuple[Any, torch.device]


def both(fast: Fast) -> tuple[Run, Run]:
    """The kernels of the reference and these, and where their tensors live."""
    return (_reference, torch.device("cpu")), (fast.module, fast.device)


def section(parts: tuple[int, ...], device: torch.device, behind: int = 8) -> Section:
    """Room for integers of 16 bits, and a few words more."""
    words = 2 * table(parts).chunks + most_words(parts, 15) + behind
    body = torch.full((words,), EMPTY, dtype=torch.int32, device=device).view(torch.uint8)
    return Section.of(body, table(parts).chunks)


def moved(wire: Section, device: torch.device) -> Section:
    return Section(*(part.to(device) for part in (wire.ends, wire.checks, wire.payload)))


def assert_same_section(got: Section, want: Section) -> None:
    """Equal words, and none behind the last chunk."""
    end = int(want.ends[-1])
    assert_same_bits(got.ends.cpu(), want.ends, "ends")
    assert_same_bits(got.payload[:end].cpu(), want.payload[:end], "payload")
    assert_same_bits(got.checks.cpu(), want.checks, "checks")
    assert (got.payload[end:] == EMPTY).all()


# --- ecdq ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    x: Tensor
    steps: tuple[float, ...]
    parts: tuple[int, ...] = ()
    coder: Kind = Kind.BITMAP
    subtract: Subtract = Subtract.AUTO


def with_large(places: list[int], value: float, count: int = CHUNK) -> Tensor:
    """Small values, and a few that no bit plane of four bits holds."""
    x = gaussian(count)
    x[places] = value * torch.where(x[places] < 0, -1.0, 1.0)
    return x


SEGMENTS = (700, 8203, 1, 600)
CASES = {
    "dense": Case(gaussian(CHUNK + 700), (1.0,)),
    "always subtracted": Case(gaussian(CHUNK), (0.4,), subtract=Subtract.ALWAYS),
    "never subtracted": Case(mostly_zero(CHUNK), (1.5,), subtract=Subtract.NEVER),
    "sparse": Case(mostly_zero(CHUNK), (4.0,)),
    "zeros": Case(torch.zeros(CHUNK + 5), (1.0,)),
    "one value": Case(gaussian(1), (0.3,)),
    "heavy": Case(student_t3(CHUNK + 512), (1.5,)),
    "one tail": Case(with_large([77], 16.0), (1.0,)),
    "two tails in a lane": Case(with_large([0, 16], 31000.0), (1.0,)),
    "three tails in a lane": Case(with_large([0, 16, 32], 99.0), (1.0,)),
    "tails in two lanes": Case(with_large([0, 16, 1, 8000], 500.0), (1.0,)),
    "more tails than a row has bits": Case(with_large(list(range(0, 8192, 456)), 40.0), (1.0,)),
    "many tails": Case(with_large(list(range(0, 8192, 150)), 40.0), (1.0,)),
    "tails in a short chunk": Case(with_large([3, 900], 300.0, 1000), (1.0,)),
    "beyond what a step allows": Case(with_large([5, 6, 21, 4000], 1e9), (1.0,)),
    "wide planes": Case(gaussian(600), (0.01,)),
    "wide planes of a whole chunk": Case(gaussian(CHUNK), (0.003,)),
    "widest planes": Case(gaussian(520), (1e-9,)),
    "plane form": Case(gaussian(CHUNK + 3), (1.0,), coder=Kind.FIXED),
    "a step that needs a lift": Case(1e-35 * gaussian(CHUNK), (1e-35,)),
    "huge": Case(1e37 * gaussian(CHUNK), (3e38,)),
    "segments": Case(gaussian(9504), (0.7, 2.0, 0.0, float("nan")), SEGMENTS),
    "segments of 16 bits": Case(gaussian(9504).bfloat16(), (2.0, 0.3, 1.0, float("inf")), SEGMENTS),
    "aligned segments": Case(gaussian(9216).half(), (1.0, 0.5), (1024, CHUNK)),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_decoded_bits_are_equal(fast: Fast, name: str) -> None:
    case = CASES[name]
    parts, steps = case.parts or (case.x.numel(),), torch.tensor(case.steps)
    wires = []
    for module, device in both(fast):
        wires.append(section(parts, device))
        module.ecdq_encode(
            case.x.to(device),
            steps.to(device),
            wires[-1],
            parts,
            Coding(case.coder, STREAM),
            subtract=case.subtract,
        )
    wanted, wire = wires
    assert_same_section(wire, wanted)
    for dtype, weight, add in ((case.x.dtype, 0.3, True), (torch.float16, 1.0, False)):
        results = []
        for module, source in ((_reference, wanted), (fast.module, wire)):
            out = gaussian(case.x.numel(), seed=8).to(source.ends.device, dtype)
            module.ecdq_decode(
                source,
                steps.to(source.ends.device),
                Output(out, weight, add),
                parts,
                Coding(case.coder, STREAM),
            )
            results.append(out.cpu())
        assert_same_bits(results[1], results[0], (dtype, weight, add))


def test_tensors_may_start_anywhere(fast: Fast) -> None:
    """Loads of 16 bytes need a boundary; a view need not have one."""
    x = gaussian(CHUNK + 3).to(fast.device)[3:]
    steps, parts = torch.ones(1), (CHUNK,)
    wanted, wire = section(parts, torch.device("cpu")), section(parts, fast.device)
    options = {"coding": CODING, "subtract": Subtract.AUTO}
    _reference.ecdq_encode(x.cpu(), steps, wanted, parts, **options)
    fast.module.ecdq_encode(x, steps.to(fast.device), wire, parts, **options)
    assert_same_section(wire, wanted)


def mixed(count: int) -> Tensor:
    """Some blocks that subtract, some that do not."""
    values = gaussian(count)
    return torch.where(torch.arange(count) // 512 % 3 == 0, values, mostly_zero(count))


@pytest.mark.parametrize("name", ["gaussian", "90%-zero", "student-t3", "mixed"])
@pytest.mark.parametrize(
    "wish",
    [
        {"error": 0.08},
        {"error": 0.3, "subtract": Subtract.NEVER},
        {"error": 0.01, "subtract": Subtract.ALWAYS},
        {"step": 0.7},
        {"error": 0.003, "max_bits": 3.0},
    ],
    ids=str,
)
def test_steps_are_those_of_the_reference(fast: Fast, name: str, wish: dict) -> None:
    make = {**INPUTS, "mixed": mixed}[name]
    x, parts = make(60_000), (40_000, 513, 1, 19_486)
    x[-400:] *= 1e-38
    rule = StepRule(4 * (wish.get("error", 0.0),))
    rule = rule._replace(**{name: value for name, value in wish.items() if name != "error"})
    wanted, got = torch.zeros(4), torch.zeros(4, device=fast.device)
    _reference.ecdq_steps(x, wanted, parts, rule)
    fast.module.ecdq_steps(x.to(fast.device), got, parts, rule)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=0)


def test_steps_of_zeros_and_of_what_is_not_finite(fast: Fast) -> None:
    x = gaussian(3000)
    x[:1000], x[1500], x[2500] = 0.0, float("nan"), float("-inf")
    got = torch.ones(3, device=fast.device)
    rule = StepRule((0.08, 0.08, 0.08), max_bits=4.0)
    fast.module.ecdq_steps(x.to(fast.device), got, (1000, 1000, 1000), rule)
    assert got[0] == 0 and got[1:].isnan().all()


WIDE_PARTS = (160_000, 40_000, 300)
WIDE = {
    "heavy tails": lambda: student_t3(200_300) ** 3,
    "one large value": lambda: with_large([77_777], 2e4, 200_300),
    "few blocks": lambda: torch.cat([gradients("block_sparse", 1, 0)[0], torch.zeros(620)]),
    "one level, half of it sparse": lambda: misleading(200_300),
    "many levels": lambda: gaussian(200_300) * 2.0 ** (torch.arange(200_300) // 512 % 80 - 40),
}


def misleading(count: int) -> Tensor:
    """Blocks of about equal energy: in every other one a single value has it."""
    x = gaussian(-(-count // 1024) * 1024).view(-1, 2, 512)
    x[:, 1, 1:], x[:, 1, 0] = 0.0, 23.0
    return x.view(-1)[:count].clone()


@pytest.mark.parametrize("subtract", [Subtract.AUTO, Subtract.NEVER], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_samples_of_blocks_and_budgets_are_those_of_the_reference(
    fast: Fast, name: str, subtract: Subtract
) -> None:
    """Segments of more blocks than are sampled."""
    x = WIDE[name]()
    results = []
    for module, device in both(fast):
        steps, budgets = torch.zeros(3, device=device), Budgets.of(3, device)
        rule = StepRule((0.08, 0.02, 0.3), subtract=subtract)
        module.ecdq_steps(x.to(device), steps, WIDE_PARTS, rule, budgets)
        results.append((steps.cpu(), budgets.limit.cpu(), budgets.safe.cpu()))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("subtract", list(Subtract), ids=str)
def test_segments_that_cost_too_much_take_their_safe_steps(fast: Fast, subtract: Subtract) -> None:
    """The first and the third have a limit below what they cost; the last one's step is safe."""
    parts = (CHUNK + 700, 600, 9000, 100, 513)
    x = torch.cat([student_t3(CHUNK + 700), gaussian(600), mostly_zero(9000), gaussian(613)])
    limits = torch.tensor([1e-3, 1e9, 1e-3, torch.inf, 1e-3], dtype=torch.float64)
    results = []
    for module, device in both(fast):
        steps, budgets = torch.zeros(5, device=device), Budgets.of(5, device)
        rule = StepRule(5 * (0.0,), step=1.3, subtract=subtract)
        module.ecdq_steps(x.to(device), steps, parts, rule, budgets)
        steps.copy_(torch.tensor([1.3, 0.9, 1.1, 0.8, 0.7]))
        budgets.limit.copy_(limits)
        budgets.safe.copy_(torch.tensor([0.3, 0.2, 0.4, 0.1, 0.7]))
        wire, spent = section(parts, device), torch.zeros(5, dtype=torch.float64, device=device)
        options = {"coding": CODING, "subtract": subtract}
        module.ecdq_encode(
            x.to(device), steps, wire, parts, budgets=budgets, spent=spent, **options
        )
        results.append((wire, steps.cpu(), spent.cpu()))
    (wanted, steps, spent), (wire, got_steps, got_spent) = results
    assert_same_section(wire, wanted)
    assert_same_bits(steps, torch.tensor([0.3, 0.9, 0.4, 0.8, 0.7]))
    assert_same_bits(got_steps, steps)
    torch.testing.assert_close(got_spent, spent, rtol=1e-14, atol=0)


def test_spent_without_a_limit(fast: Fast) -> None:
    """Where a step is given, nothing is checked, but counted all the same."""
    x, spent = mostly_zero(CHUNK + 9), torch.zeros(1, device=fast.device)
    wanted = torch.zeros(1)
    with using("reference"):
        lc.ECDQ(step=2.0).encode(x, lc.Key(), spent=wanted)
    with using(fast.name):
        lc.ECDQ(step=2.0).encode(x.to(fast.device), lc.Key(), spent=spent)
    torch.testing.assert_close(spent.cpu(), wanted)


@pytest.mark.parametrize("block", [512, 4096])
def test_runs_have_the_bytes_of_the_reference(fast: Fast, block: int) -> None:
    """Squares of small integers have the same sum in any order, so steps are equal, too."""
    parts = (block + 200, 100)
    x = (4 * mixed(sum(parts))).round()
    x[block:] *= 64
    codec, results = lc.ECDQ(step=1.0, block=block), []
    for name, device in (("reference", torch.device("cpu")), (fast.name, fast.device)):
        spent = torch.zeros(2, dtype=torch.float64, device=device)
        with using(name):
            wire = codec.encode(x.to(device), lc.Key(seed=3), segments=parts, spent=spent)
            results.append((wire.data.cpu(), codec.decode(wire).cpu(), spent.cpu()))
    (wanted, values, costs), (got, got_values, got_costs) = results
    assert_same_bits(got, wanted)
    assert_same_bits(got_values, values)
    torch.testing.assert_close(got_costs, costs, rtol=1e-14, atol=0)


def test_a_ceiling_is_a_ceiling(triton: Fast) -> None:
    """A body that ends where max_bits says: nothing is written behind."""
    codec, key = lc.codec("ecdq:error=1e-4,max_bits=2.5"), lc.Key(seed=4)
    room = codec.nbytes(9000)
    data = torch.full((room + 64,), 0x55, dtype=torch.uint8, device=triton.device)
    with using("triton"):
        wire = codec.encode(gaussian(9000).to(triton.device), key, out=data[:room])
        assert wire.nbytes <= room and (data[room:] == 0x55).all()
        y = codec.decode(wire)
    assert y.isfinite().all()


# --- integers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "dtype", "kind"),
    covering((1, 14, 15, 16, 120), (torch.int8, torch.int16), (Kind.FIXED, Kind.BITMAP)),
)
def test_integers(fast: Fast, top: int, dtype: torch.dtype, kind: Kind) -> None:
    """A whole chunk with one extreme, and a short one."""
    rng = np.random.default_rng(top)
    q = torch.from_numpy(rng.integers(-min(top, 3), min(top, 3) + 1, CHUNK + 40)).to(dtype)
    q[4000], q[-1] = -top, top
    parts = (q.numel(),)
    wanted, wire = section(parts, torch.device("cpu")), section(parts, fast.device)
    _reference.encode_integers(q, wanted, Coding(kind, STREAM))
    fast.module.encode_integers(q.to(fast.device), wire, Coding(kind, STREAM))
    assert_same_section(wire, wanted)
    out = torch.full_like(q, 99).to(fast.device)
    assert decoded(fast, wire, out, kind, top)
    assert_same_bits(out.cpu(), q)
    assert not decoded(fast, wire, out, kind, top - 1)
    wire.payload[0] ^= 1
    assert not decoded(fast, wire, out, kind, top)


def test_integers_have_no_marks(fast: Fast) -> None:
    q = torch.tensor([1, 0, -2], dtype=torch.int8)
    wire, out = section((3,), torch.device("cpu")), torch.empty_like(q).to(fast.device)
    _reference.encode_integers(q, wire, CODING)
    words = [int(word) & 0xFFFFFFFF for word in wire.payload[: int(wire.ends[0])]]
    for mark in (0, 1):
        marked = sealed([words[0] | mark << 16, *words[1:]], 3, stamp=0)
        accepted = decoded(fast, moved(marked, fast.device), out, Kind.BITMAP, 2)
        assert accepted is (mark == 0)


def decoded(fast: Fast, wire: Section, out: Tensor, kind: Kind, limit: int) -> bool:
    """Decode integers; whether they were accepted."""
    try:
        verdict = fast.module.decode_integers(wire, out, Coding(kind, STREAM), limit=limit)
    except lc.WireError:
        return False
    return verdict is None or bool(verdict == 1)


# --- damage --------------------------------------------------------------------------------


def damaged_decode(triton: Fast, wire: Section, parts: tuple[int, ...]) -> Tensor:
    out = torch.zeros(sum(parts), device=triton.device)
    triton.module.ecdq_decode(
        moved(wire, triton.device),
        torch.ones(len(parts), device=triton.device),
        Output(out, add=True),
        parts,
        CODING,
    )
    return out.cpu()


@pytest.mark.parametrize("place", ["first word", "stream", "check", "end", "step", "count"])
def test_a_damaged_chunk_is_nan_and_the_others_are_not(triton: Fast, place: str) -> None:
    parts = (CHUNK + 600,)
    x, wire = gaussian(parts[0]), section(parts, torch.device("cpu"))
    options = {"coding": CODING, "subtract": Subtract.AUTO}
    _reference.ecdq_encode(x, torch.ones(1), wire, parts, **options)
    if place in ("first word", "stream"):
        wire.payload[0 if place == "first word" else 300] ^= 1 << 16
    elif place == "check":
        wire.checks[0] ^= 1
    elif place == "end":
        wire.ends[1] += 1
    elif place == "count":
        parts = (CHUNK + 599,)
    elif place == "step":
        _reference.ecdq_encode(x, torch.full((1,), 2.0), wire, parts, **options)
    bad = damaged_decode(triton, wire, parts).isnan()
    assert bad[:CHUNK].all() == (place not in ("end", "count"))
    assert bad[CHUNK:].all() == (place in ("end", "count", "step"))


def sealed(words: list[int], count: int, stamp: int = 0x3F800000) -> Section:
    """A chunk with the right check sum, whatever it says; the stamp is that of a step of 1."""
    salt = (int(draws(STREAM, 1, torch.device("cpu"))[0]) ^ stamp) + count
    signed = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    check = torch.tensor([_check(words, salt)], dtype=torch.int64).to(torch.int32)
    return Section(torch.tensor([len(words)], dtype=torch.int32), check, signed)


def chunk_words(x: Tensor, step: float = 1.0) -> list[int]:
    wire = section((x.numel(),), torch.device("cpu"))
    options = {"coding": CODING, "subtract": Subtract.NEVER}
    _reference.ecdq_encode(x, torch.tensor([step]), wire, (x.numel(),), **options)
    return [int(word) & 0xFFFFFFFF for word in wire.payload[: int(wire.ends[0])]]


def test_streams_that_no_encoder_writes(triton: Fast) -> None:
    """With a right check sum only their form can give them away."""
    dense, count = chunk_words(gaussian(500)), 500
    planes = chunk_words(gaussian(500), 0.01)
    assert dense[0] == 1 and planes[0] & 0xFF == 0
    ragged = chunk_words(gaussian(512))
    large = chunk_words(torch.cat([torch.zeros(498), torch.tensor([40.0, -3e4])]))
    assert large[0] == 1 and len(large) == 6  # bits 110 .. 139 are 15 planes of the two tails
    hostile = {
        "a word more": [*dense, 0],
        "a word less": dense[:-1],
        "another kind": [4, *dense[1:]],
        "a width in a stream": [1 | 2 << 8, *dense[1:]],
        "a mark of a block that is not there": [dense[0] | 1 << 17, *dense[1:]],
        "padding that is set": [*dense[:-1], dense[-1] | 1 << 31],
        "values behind the end": ragged,
        "a used lane without values": [1, 1, 0],
        "nothing": [1, 0],
        "planes of another width": [planes[0] + (1 << 8), *planes[1:]],
        "planes too wide": [16 << 8, *([0] * 272)],
        "magnitudes above the limit": [15 << 8, *([0] * 16), *([0xFFFF] * 240)],
        "tails cut off": large[:-1],
        "tails above the limit": [*large[:-1], large[-1] | 0xFFF],
    }
    assert damaged_decode(triton, sealed(dense, count), (count,)).isfinite().all()
    assert damaged_decode(triton, sealed(planes, count), (count,)).isfinite().all()
    assert damaged_decode(triton, sealed(large, count), (count,)).isfinite().all()
    for name, words in hostile.items():
        out = damaged_decode(triton, sealed(words, count), (count,))
        assert out.isnan().all(), name


def test_any_bytes_are_safe(triton: Fast) -> None:
    rng = np.random.default_rng(0)
    parts = (CHUNK, 700)
    for trial in range(4):
        wire = section(parts, torch.device("cpu"))
        for part in (wire.ends, wire.checks, wire.payload):
            noise = rng.integers(-(2**31), 2**31, part.numel()).astype(np.int32)
            part.copy_(torch.from_numpy(noise))
        if trial % 2:
            wire.ends.copy_(torch.tensor([900, 1000]))
        assert damaged_decode(triton, wire, parts).isnan().all()


def test_coders_without_gpu_kernels_are_refused(triton: Fast) -> None:
    q = torch.zeros(10, dtype=torch.int8, device=triton.device)
    for kind in (Kind.ELIAS_SPARSE, Kind.RANS):
        with pytest.raises(lc.ConfigError, match="use coder=bitmap"):
            triton.module.encode_integers(q, section((10,), triton.device), Coding(kind, STREAM))


# --- what only a GPU can show --------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", ["ecdq:error=0.08", "ecdq:error=0.01,max_bits=3"])
def test_a_step_never_waits_for_the_device(spec: str) -> None:
    """A captured graph cannot hold a synchronisation; searching teams meet in every replay."""
    codec, key = lc.codec(spec), lc.Key(seed=2)
    parts = (300_000, 1000, 1, 99_999)
    x = mostly_zero(sum(parts)).cuda()
    out = torch.zeros_like(x)

    def work() -> None:
        codec.decode(codec.encode(x, key, segments=parts), out=out)

    work()
    expected, graph = out.clone(), captured(work)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert_same_bits(out, expected, spec)
