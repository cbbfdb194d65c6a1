"""Error feedback: nothing is lost, every codec contracts, memory follows parameters."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import (
    DTYPES,
    FLT_MAX,
    INPUTS,
    PATIENCE_S,
    assert_same_bits,
    decode,
    device_of,
    gaussian,
    mostly_zero,
    student_t3,
)
from torch import Tensor

import laconic as lc
from laconic._scratch import Scratch, borrowed
from laconic._wire import HEADER_BYTES
from laconic.codecs import _feedback
from laconic.kernels import using

KEY = lc.Key(seed=3, tensor=5)
COARSE = (  # NMSE above 1 on some of the inputs
    "dqsg:bits=2",
    "dqsg:bits=2,block=tensor",
    "qsgd:bits=2",
    "qsgd:bits=2,norm=l2,block=tensor",
    "global:bits=4,levels=1",
    "global-exp:bits=3",
)
NESTED = ("rotate(dqsg:bits=2)", "rotate(ecdq:error=0.3)", "dqsg:bits=2,coder=bitmap")
INNER = (*lc.codecs(), *COARSE, *NESTED)
SOME = ("dqsg:bits=2", "qsgd-topk", "bf16")  # a kernel's, one that sorts, a cast
BAD = (math.nan, math.inf, -math.inf)


class Owing:
    """feedback(inner), with the residuals that a caller keeps."""

    def __init__(self, inner: str) -> None:
        found = lc.codec(f"feedback({inner})")
        assert isinstance(found, lc.Feedback)
        self.codec, self.kept = found, lc.Residuals()
        self.decode, self.nbytes = found.decode, found.nbytes

    def encode(self, x: Tensor, key: lc.Key, **options) -> lc.Wire:
        return self.codec.encode(x, key, residuals=self.kept, **options)


def wrap(inner: str) -> Owing:
    return Owing(inner)


def step(codec: Owing, x: Tensor, key: lc.Key = KEY, **options) -> Tensor:
    """Encode and decode in fp32; ndqsg decodes with what it encoded, so that no cell is wrong."""
    kept = codec.kept.state_dict().get(f"{key.tensor},{key.phase}")
    side = x if kept is None else x.flatten().float() + kept
    wire = codec.encode(x, key, **options)
    return codec.decode(wire, side=side, out=torch.empty(x.numel()))


@pytest.fixture(params=["cpu", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's shortcuts, and the way without a look at values that other devices take."""
    if request.param == "device":
        monkeypatch.setattr(_feedback, "_readable", lambda x: False)


def factor_of(wire: lc.Wire) -> float:
    return float(wire.data[HEADER_BYTES : HEADER_BYTES + 4].view(torch.float32))


def energy(x: Tensor) -> float:
    return float(x.double().square().sum())


# --- the equations -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", INNER)
def test_what_was_decoded_and_what_is_remembered_make_up_the_input(
    path: None, inner: str, dtype: torch.dtype
) -> None:
    codec = wrap(inner)
    given, decoded = (torch.zeros(1000, dtype=torch.float64) for _ in range(2))
    largest = 0.0
    for i in range(12):
        x = INPUTS["student-t3"](1000, seed=i).to(dtype)
        given += x.double()
        y = step(codec, x, lc.Key(seed=3, step=i, tensor=5))
        decoded += y.double()
        largest = max(largest, float(y.abs().max()))
    memory = codec.kept.state_dict()["5,0"].double()
    assert inner in ("none", "fp16", "bf16") or memory.abs().max() > 0  # casts may be exact
    torch.testing.assert_close(decoded + memory, given, rtol=0, atol=12 * 2.0**-22 * largest)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("inner", INNER)
def test_every_codec_contracts(path: None, inner: str, name: str) -> None:
    """‖c - λQ‖² = (1 - cos²)·‖c‖², with Q from the codec itself; also when c holds a memory."""
    codec, plain = wrap(inner), lc.codec(inner)
    for i in range(4):
        x, key = INPUTS[name](2000, seed=i), lc.Key(step=i, tensor=5)
        c = x + codec.kept.state_dict().get("5,0", torch.zeros(2000))
        q = decode(plain, plain.encode(c, key), c).double()
        cosine = float(q @ c.double()) / math.sqrt(energy(q) * energy(c))
        error = energy(c - step(codec, x, key)) / energy(c)
        assert error <= 1.0
        assert error == pytest.approx(1 - cosine**2, abs=2e-7)
        assert energy(codec.kept.state_dict()["5,0"]) / energy(c) == pytest.approx(error, abs=2e-7)


def test_some_of_these_codecs_do_not_contract_alone() -> None:
    """Else the test above would show little."""
    for inner in COARSE:
        plain = lc.codec(inner)
        errors = [
            energy(plain.decode(plain.encode(x, KEY)) - x) / energy(x)
            for x in (gaussian(2000), student_t3(2000), mostly_zero(2000))
        ]
        assert max(errors) > 1, inner


@pytest.mark.parametrize("inner", [s for s in COARSE if not s.startswith("global-exp")])
def test_an_unbiased_codec_is_scaled_by_its_variance(inner: str) -> None:
    """λ is about 1/(1+w) and the error w/(1+w), below the bound that `contraction` states."""
    x, plain = student_t3(2000), lc.codec(inner)
    keys = [lc.Key(step=i) for i in range(60)]
    w = sum(energy(plain.decode(plain.encode(x, key)) - x) for key in keys) / 60 / energy(x)
    factors, errors = [], []
    for key in keys:
        codec = wrap(inner)  # without memory
        wire = codec.encode(x, key)
        factors.append(factor_of(wire))
        errors.append(energy(codec.decode(wire) - x) / energy(x))
    assert sum(factors) / 60 == pytest.approx(1 / (1 + w), rel=0.1)
    assert sum(errors) / 60 == pytest.approx(w / (1 + w), rel=0.05)
    assert sum(errors) / 60 <= wrap(inner).codec.contraction(2000) < 1


def test_contraction_is_a_bound_or_one() -> None:
    assert wrap("none").codec.contraction(100) == 0.0
    assert wrap("fp16").codec.contraction(100) == 1.0
    assert wrap("qsgd-topk").codec.contraction(100) == 1.0
    w = lc.codec("dqsg:bits=2").variance_bound(512)
    assert w is not None and wrap("dqsg:bits=2").codec.contraction(512) == pytest.approx(
        w / (1 + w)
    )


def test_feedback_promises_no_variance_and_no_sums() -> None:
    """With a memory even zeros decode to something else: no multiple of ‖x‖² bounds the error."""
    codec = wrap("qsgd-topk")
    assert (
        not codec.codec.unbiased
        and not codec.codec.summable
        and codec.codec.variance_bound(100) is None
    )
    step(codec, gaussian(100))
    assert step(codec, torch.zeros(100)).abs().max() > 0
    with pytest.raises(TypeError, match="cannot be summed"):
        codec.encode(gaussian(100), KEY).payload  # noqa: B018


@pytest.mark.parametrize("name", ["gaussian", "student-t3", "90%-zero"])
def test_topk_sends_the_mean_magnitude_of_what_it_keeps(name: str) -> None:
    x = INPUTS[name](3000)
    y = step(wrap("qsgd-topk"), x)
    kept = y != 0
    assert 1 < kept.sum() <= 55
    torch.testing.assert_close(y[kept], x[kept].abs().mean() * x[kept].sign(), rtol=1e-6, atol=0)


def test_one_value_is_sent_exactly() -> None:
    codec = wrap("dqsg:bits=2")
    x = torch.tensor([0.7310585])
    torch.testing.assert_close(step(codec, x), x, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("scale", [1e-43, 1e-38, 1e-30, 1e-20, 1e20, 1e29])
@pytest.mark.parametrize("inner", ["none", "dqsg:bits=2", "qsgd:bits=2,norm=l2", "qsgd-topk"])
def test_squares_neither_overflow_nor_vanish(path: None, inner: str, scale: float) -> None:
    x, codec = gaussian(500), wrap(inner)
    wanted = energy(x - step(wrap(inner), x)) / energy(x)
    y = step(codec, x * scale).double() / scale
    # the smallest floats are few and far between
    rough = 0.02 if scale < 1e-40 else 1e-4
    assert energy(x - y) / energy(x) == pytest.approx(wanted, abs=rough)
    assert codec.kept.state_dict()["5,0"].isfinite().all()


def test_products_of_many_chunks(path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The factor does not depend on how the sums are cut, but for rounding."""
    x = student_t3(1000)
    wanted = factor_of(wrap("dqsg:bits=2").encode(x, KEY))
    for size in (1, 100, 128, 999, 1000):
        monkeypatch.setattr(_feedback, "_CHUNK", size)
        monkeypatch.setattr(_feedback, "_CPU_CHUNK", size)
        factor = factor_of(wrap("dqsg:bits=2").encode(x, KEY))
        assert factor == pytest.approx(wanted, rel=1e-6)


# --- training ------------------------------------------------------------------------------


def descend(codecs: list[Any], rate: float, steps: int) -> float:
    """Workers i minimise Σ‖w - a_i‖²/2 together; returns how far from the best w they end."""
    targets = torch.stack([gaussian(64, seed=rank) for rank in range(len(codecs))])
    w, best = torch.zeros(64), targets.mean(0)
    for i in range(steps):
        mean = torch.zeros(64)
        for rank, codec in enumerate(codecs):
            wire = codec.encode(w - targets[rank], lc.Key(step=i, rank=rank))
            codec.decode(wire, out=mean, add=True, weight=1 / len(codecs))
        w -= rate * mean
    return float((w - best).norm() / best.norm())


def test_descent_converges_with_feedback_and_not_without() -> None:
    """A biased codec stops where the workers' decoded gradients cancel, at any rate."""
    assert descend([lc.QSGDTopK()] * 4, 0.02, 300) > 0.5
    assert descend([lc.QSGDTopK()] * 4, 0.01, 600) > 0.5
    assert descend([wrap("qsgd-topk") for _ in range(4)], 0.02, 300) < 0.1


@pytest.mark.parametrize("inner", ["qsgd-topk", "qsgd:bits=2,norm=l2,block=tensor"])
def test_feedback_without_the_factor_diverges(inner: str) -> None:
    """m ← c - Q with NMSE above 1: why the projection is there. Ours converges."""
    plain, codec = lc.codec(inner), wrap(inner)
    curvature = torch.linspace(0.1, 1, 256)
    ours, naive, m = gaussian(256), gaussian(256), torch.zeros(256)
    start = float(curvature @ ours.square())
    for i in range(300):
        key = lc.Key(step=i)
        ours -= 0.05 * codec.decode(codec.encode(curvature * ours, key))
        c = curvature * naive + m
        q = plain.decode(plain.encode(c, key))
        m = c - q
        naive -= 0.05 * q
    assert curvature @ ours.square() < 1e-2 * start
    assert not curvature @ naive.square() < 10 * start


# --- the memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("inner", SOME)
def test_a_run_resumes_bit_by_bit(inner: str) -> None:
    def go(codec: Owing, first: int, last: int) -> list[Tensor]:
        wires = []
        for i in range(first, last):
            for tensor, phase in ((0, 0), (9, 0), (9, 1)):
                key = lc.Key(step=i, tensor=tensor, phase=phase)
                wires.append(codec.encode(student_t3(700 + tensor, seed=i), key).data)
        return wires

    codec = wrap(inner)
    go(codec, 0, 4)
    state = pickle.loads(pickle.dumps(codec.kept.state_dict()))
    assert set(state) == {"0,0", "9,0", "9,1"}
    wanted = go(codec, 4, 7)
    again = wrap(inner)
    again.kept.load_state_dict(state)
    for got, want in zip(go(again, 4, 7), wanted, strict=True):
        assert torch.equal(got, want)
    fresh = go(wrap(inner), 4, 7)
    assert not all(torch.equal(got, want) for got, want in zip(fresh, wanted, strict=True))


def test_state_is_a_copy_both_ways() -> None:
    codec = wrap("qsgd-topk")
    step(codec, gaussian(100))
    state = codec.kept.state_dict()
    before = state["5,0"].clone()
    step(codec, gaussian(100))
    assert torch.equal(state["5,0"], before)
    codec.kept.load_state_dict(state)
    step(codec, gaussian(100))
    assert torch.equal(state["5,0"], before)


def test_copied_or_pickled_residuals_are_others() -> None:
    codec = wrap("qsgd-topk")
    step(codec, gaussian(100))
    state = codec.kept.state_dict()
    for other in (copy.deepcopy(codec.kept), pickle.loads(pickle.dumps(codec.kept))):
        assert torch.equal(other.state_dict()["5,0"], state["5,0"])
        codec.codec.encode(gaussian(100), KEY, residuals=other)
        assert not torch.equal(other.state_dict()["5,0"], state["5,0"])
    assert torch.equal(codec.kept.state_dict()["5,0"], state["5,0"])


def test_without_residuals_nothing_is_owed_and_nothing_kept() -> None:
    codec, x = wrap("qsgd-topk"), gaussian(100)
    wanted = codec.encode(x, KEY).data
    for _ in range(2):
        assert torch.equal(codec.codec.encode(x, KEY).data, wanted)
    assert set(codec.kept.state_dict()) == {"5,0"}
    with pytest.raises(ValueError, match="places must hold 100 values"):
        codec.codec.encode(x, KEY, places=[])


@pytest.mark.parametrize("inner", [*SOME, "rotate(dqsg:bits=2)"])
def test_feedback_under_feedback_keeps_both_apart(inner: str) -> None:
    """The outer one loses nothing, whatever it wraps; the inner one has residuals of its own."""
    codec = wrap(f"feedback({inner})")
    given, decoded = torch.zeros(300), torch.zeros(300)
    for i in range(20):
        x = student_t3(300, seed=i)
        given += x
        decoded += step(codec, x, lc.Key(step=i, tensor=5))
    state = codec.kept.state_dict()
    assert set(state) == {"5,0", "5,0,1"} and not torch.equal(state["5,0"], state["5,0,1"])
    largest = max(1.0, float(state["5,0"].abs().max()))
    torch.testing.assert_close(decoded + state["5,0"], given, rtol=0, atol=1e-4 * largest)
    again, x = wrap(f"feedback({inner})"), gaussian(300)
    again.kept.load_state_dict(state)
    assert torch.equal(again.encode(x, KEY).data, codec.encode(x, KEY).data)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"5": torch.zeros(100)}, "keys such as '3,0'"),
        ({"x,0": torch.zeros(100)}, "keys such as '3,0'"),
        ({"5,-1": torch.zeros(100)}, "keys such as '3,0'"),
        ({"5,0": torch.zeros(100, dtype=torch.float64)}, "float32 vectors, and that of '5,0'"),
        ({"5,0": torch.zeros(10, 10)}, "float32 vectors, and that of '5,0'"),
        ({"5,0": [0.0] * 100}, "float32 vectors, and that of '5,0'"),
        ({"5,0": torch.full((100,), math.nan)}, "'5,0' holds values that are not finite"),
        ({"5,0": torch.zeros(99)}, "99 residuals for '5,0', where 100 are in use"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state: dict, says: str) -> None:
    codec = wrap("qsgd-topk")
    step(codec, gaussian(100))
    before = codec.kept.state_dict()
    with pytest.raises(ValueError, match=says):
        codec.kept.load_state_dict({"8,0": torch.zeros(3), **state})
    after = codec.kept.state_dict()
    assert set(after) == {"5,0"} and torch.equal(after["5,0"], before["5,0"])


def test_reset_forgets() -> None:
    codec, x = wrap("qsgd-topk"), gaussian(100)
    first = step(codec, x)
    assert not torch.equal(step(codec, x), first)
    codec.kept.reset()
    assert codec.kept.state_dict() == {}
    assert torch.equal(step(codec, x), first)
    codec.kept.reset()
    step(codec, gaussian(77))  # another length is fine then


def test_tensors_and_phases_have_memories_of_their_own() -> None:
    codec, x = wrap("qsgd-topk"), gaussian(100)
    first = step(codec, x, lc.Key(tensor=1))
    for key in (lc.Key(tensor=2), lc.Key(tensor=1, phase=1)):
        assert torch.equal(step(codec, x, key), first)
    for key in (lc.Key(tensor=1, step=9), lc.Key(tensor=1, seed=9)):
        assert not torch.equal(step(codec, x, key), first)


def test_a_tensor_of_another_length_says_what_to_do() -> None:
    codec = wrap("dqsg")
    step(codec, gaussian(100))
    before = codec.kept.state_dict()["5,0"]
    with pytest.raises(ValueError, match=r"tensor 5 has 90 values, but had 100 .* places= .*reset"):
        codec.encode(gaussian(90), KEY)
    assert torch.equal(codec.kept.state_dict()["5,0"], before)


def test_another_device_says_what_to_do_unless_the_state_was_just_loaded() -> None:
    """A meta tensor stands for a GPU's."""
    place, meta = lc.Place(parameter=2, start=0, numel=4, total=4), torch.device("meta")
    memory = lc.Residuals()
    memory.of(place, 0, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"tensor 2 is on meta, but its residual is on cpu: load"):
        memory.of(place, 0, meta)
    memory.load_state_dict(memory.state_dict())
    assert memory.of(place, 0, meta).device == meta
    with pytest.raises(ValueError, match=r"tensor 2 is on cpu, but its residual is on meta"):
        memory.of(place, 0, torch.device("cpu"))


def test_ranks_do_not_share_a_memory() -> None:
    codec = wrap("dqsg")
    step(codec, gaussian(100), lc.Key(rank=0))
    with pytest.raises(ValueError, match="of rank 0, but rank 1 encodes: make one lc.Residuals"):
        codec.encode(gaussian(100), lc.Key(rank=1))
    codec.kept.load_state_dict(
        codec.kept.state_dict()
    )  # ranks may be numbered anew after a restart
    step(codec, gaussian(100), lc.Key(rank=1))


def test_a_failed_encode_leaves_the_memory_alone() -> None:
    codec = wrap("dqsg")
    step(codec, gaussian(100))
    before = codec.kept.state_dict()["5,0"]
    with pytest.raises(TypeError, match="norm="):
        codec.encode(gaussian(100), KEY, norm=1.0)
    with pytest.raises(ValueError, match="out must"):
        codec.encode(gaussian(100), KEY, out=torch.empty(3, dtype=torch.uint8))
    assert torch.equal(codec.kept.state_dict()["5,0"], before)


# --- places: buckets and chunks ------------------------------------------------------------

TOTALS = {7: 300, 2: 200, 40: 500}  # parameters of a small model


def places_of(order: list[int], first: int, last: int) -> list[lc.Place]:
    """Which parts of which parameters lie in [first, last) of a bucket in this order."""
    places, offset = [], 0
    for number in order:
        total = TOTALS[number]
        a, b = max(first - offset, 0), min(last - offset, total)
        if a < b:
            places.append(lc.Place(parameter=number, start=a, numel=b - a, total=total))
        offset += total
    return places


@pytest.mark.parametrize("inner", ["qsgd-topk", "dqsg:bits=2", "ecdq:error=0.5"])
def test_memory_follows_parameters_when_buckets_are_rebuilt(path: None, inner: str) -> None:
    """Two buckets, then one in another order; chunks cut parameters anywhere, and move.

    For each parameter, all that was decoded plus its memory is all that was given.
    """
    codec = wrap(inner)
    before = ([7, 2], [40]), (0.0, 0.31, 0.77, 1.0)
    after = ([40, 7, 2],), (0.0, 0.5, 1.0)
    given = {number: torch.zeros(total) for number, total in TOTALS.items()}
    decoded = {number: torch.zeros(total) for number, total in TOTALS.items()}
    for i, (buckets, cuts) in enumerate([before, after, after, before, after]):
        gradients = {n: student_t3(total, seed=100 * i + n) for n, total in TOTALS.items()}
        for n in TOTALS:
            given[n] += gradients[n]
        for number, order in enumerate(buckets):
            flat = torch.cat([gradients[n] for n in order])
            edges = [round(cut * flat.numel()) for cut in cuts]
            for first, last in pairwise(edges):
                places = places_of(order, first, last)
                key = lc.Key(step=i, tensor=1000 * number + first)
                lengths = [place.numel for place in places]
                wire = codec.encode(flat[first:last], key, places=places, segments=lengths)
                for place, y in zip(places, codec.decode(wire).split(lengths), strict=True):
                    decoded[place.parameter][place.start :][: place.numel] += y
    state = codec.kept.state_dict()
    assert set(state) == {"7,0", "2,0", "40,0"}
    for n, total in TOTALS.items():
        assert state[f"{n},0"].shape == (total,) and state[f"{n},0"].abs().max() > 0.1
        torch.testing.assert_close(decoded[n] + state[f"{n},0"], given[n], rtol=0, atol=1e-4)


def test_the_default_place_is_the_whole_of_the_keys_tensor() -> None:
    one, other = wrap("dqsg:bits=2"), wrap("dqsg:bits=2")
    place = lc.Place(parameter=5, start=0, numel=300, total=300)
    for i in range(3):
        x, key = student_t3(300, seed=i), lc.Key(step=i, tensor=5)
        assert torch.equal(one.encode(x, key).data, other.encode(x, key, places=[place]).data)
    assert torch.equal(one.kept.state_dict()["5,0"], other.kept.state_dict()["5,0"])


def test_cutting_a_tensor_into_places_changes_no_byte() -> None:
    """Several views of one residual, in order, are that residual."""
    whole, cut = wrap("dqsg:bits=2"), wrap("dqsg:bits=2")
    places = [
        lc.Place(parameter=5, start=start, numel=numel, total=300)
        for start, numel in ((0, 1), (1, 130), (131, 169))
    ]
    for i in range(3):
        x, key = student_t3(300, seed=i), lc.Key(step=i, tensor=5)
        assert torch.equal(whole.encode(x, key).data, cut.encode(x, key, places=places).data)
    assert torch.equal(whole.kept.state_dict()["5,0"], cut.kept.state_dict()["5,0"])


def test_a_chunk_leaves_the_rest_of_a_parameter_alone() -> None:
    codec = wrap("qsgd-topk")
    codec.encode(gaussian(10), KEY, places=[lc.Place(parameter=1, start=20, numel=10, total=50)])
    kept = codec.kept.state_dict()["1,0"]
    assert kept[20:30].abs().min() > 0 and kept[:20].abs().max() == kept[30:].abs().max() == 0


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([(0, 50)], "places must hold 100 values together, not 50"),
        ([(0, 60), (60, 60)], "places must hold 100 values together, not 120"),
        ([], "places must hold 100 values together, not 0"),
        ([(0, 60), (59, 40)], "places overlap"),
        ([(40, 60), (0, 40), (99, 1)], "not 101"),
        ([(50, 50), (50, 50)], "places overlap"),
    ],
)
def test_places_that_do_not_make_up_the_tensor_are_refused(
    spans: list[tuple[int, int]], says: str
) -> None:
    places = [lc.Place(parameter=1, start=a, numel=n, total=200) for a, n in spans]
    with pytest.raises(ValueError, match=says):
        wrap("dqsg").encode(gaussian(100), KEY, places=places)


@pytest.mark.parametrize(
    "bad",
    [
        *({"start": -1}, {"numel": 0}, {"numel": 11}, {"start": 5}, {"total": 9}),
        *({"parameter": -1}, {"parameter": 1.0}, {"parameter": True}),
    ],
)
def test_a_place_lies_in_its_parameter(bad: dict) -> None:
    with pytest.raises(ValueError, match=r"Place\.|a place holds"):
        lc.Place(**{"parameter": 0, "start": 0, "numel": 10, "total": 10, **bad})


# --- what is not finite --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("inner", INNER)
def test_a_step_that_is_not_finite_shows_and_is_forgotten(
    path: None, inner: str, bad: float, dtype: torch.dtype
) -> None:
    """All of it decodes to NaN, for the scaler to see; the next steps are as if it had not been."""
    codec, control = wrap(inner), wrap(inner)
    for i in range(5):
        x, key = student_t3(700, seed=i).to(dtype), lc.Key(step=i, tensor=5)
        if i == 2:
            x[333] = bad
            wire = codec.encode(x, key)
            y = codec.decode(wire, side=torch.zeros(700))
            assert y.isnan().all() and y.dtype == dtype
            out = torch.ones(700, dtype=dtype)
            assert codec.decode(wire, side=torch.zeros(700), out=out, add=True).isnan().all()
        else:
            assert torch.equal(codec.encode(x, key).data, control.encode(x, key).data)
        assert torch.equal(codec.kept.state_dict()["5,0"], control.kept.state_dict()["5,0"])


def test_a_first_step_that_is_not_finite_leaves_a_memory_of_zeros() -> None:
    codec = wrap("dqsg")
    codec.encode(torch.full((100,), math.nan), KEY)
    assert torch.equal(codec.kept.state_dict()["5,0"], torch.zeros(100))


@pytest.mark.parametrize("inner", ["fp16", "global:bits=8"])
def test_what_only_the_codec_cannot_hold_shows_and_is_forgotten(path: None, inner: str) -> None:
    """x is finite; fp16 overflows, and a shared norm that covers x does not cover x + m."""
    codec, x = wrap(inner), gaussian(100).abs()
    if inner == "fp16":
        wire = codec.encode(x * 1e6, KEY)
    else:
        codec.kept.load_state_dict({"5,0": x.clone()})
        wire = codec.encode(x, KEY, norm=float(x.max()))
    assert codec.decode(wire).isnan().all()
    wanted = torch.zeros(100) if inner == "fp16" else x
    assert torch.equal(codec.kept.state_dict()["5,0"], wanted)


@pytest.mark.parametrize("inner", [s for s in INNER if s != "fp16"])
def test_values_at_the_end_of_float32_never_poison_the_memory(path: None, inner: str) -> None:
    codec = wrap(inner)
    for i in range(6):
        x = gaussian(200, seed=i).sign() * (FLT_MAX if i % 2 else 1.0)
        x[i] = FLT_MAX
        step(codec, x, lc.Key(step=i, tensor=5))
        assert codec.kept.state_dict()["5,0"].isfinite().all()
    codec.kept.reset()
    assert step(codec, gaussian(200)).isfinite().all()


def test_the_largest_half_stays_finite() -> None:
    """Values are up to 3/2 of it: noise, and what was not sent before."""
    codec, precise = wrap("dqsg:bits=2"), torch.empty(100)
    for i in range(8):
        x = torch.full((100,), 65504.0, dtype=torch.float16)
        wire = codec.encode(x, lc.Key(step=i))
        y = codec.decode(wire)
        assert y.isfinite().all()
        codec.decode(wire, out=precise)
        assert_same_bits(y, precise.clamp(-65504, 65504).to(torch.float16))
    assert precise.max() > 65520


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", BAD)
def test_a_factor_that_is_not_finite_decodes_to_nothing_plausible(
    bad: float, dtype: torch.dtype
) -> None:
    codec, x = wrap("qsgd-topk"), gaussian(100).to(dtype)
    wire = codec.encode(x, KEY)
    wire.data[64:68].view(torch.float32).fill_(bad)
    for add in (False, True):
        out = torch.ones(100, dtype=dtype)
        assert codec.decode(wire, out=out, add=add, weight=0.5).isnan().all()


# --- the wire ------------------------------------------------------------------------------


def test_the_layout() -> None:
    """Header, factor and zeros, then the wire of x + m in float32 that the codec inside writes."""
    x = student_t3(300).to(torch.bfloat16)
    wire = wrap("dqsg:bits=3").encode(x, KEY)
    inside = lc.codec("dqsg:bits=3").encode(x.float(), KEY)
    assert wire.header.codec == 11 and wire.header.dtype == torch.bfloat16
    assert wire.header.levels == int(inside.data[60:64].view(torch.int32)) & 0xFFFFFFFF
    assert wire.data[68:80].tolist() == [0] * 12
    assert torch.equal(wire.data[80:], inside.data)
    assert 0 < factor_of(wire) < 1


@pytest.mark.parametrize("inner", [*SOME, "ecdq", "rotate(ecdq)"])
def test_cut_lengthened_and_altered_wires_raise(inner: str) -> None:
    """Also a damaged header inside, and the zeros in front of it."""
    codec = wrap(inner)
    wire = codec.encode(gaussian(300), KEY)

    def read(data: Tensor) -> Tensor:
        received = lc.Wire.parse(data, key=KEY, shape=(300,), dtype=torch.float32)
        return codec.decode(received)

    read(wire.data.clone())
    for length in (0, 63, 64, 67, 79, 80, 143, 144, wire.nbytes // 2, wire.nbytes - 1):
        with pytest.raises(lc.WireError):
            read(wire.data[:length])
    for extra in (1, 4, 16, wire.nbytes):
        with pytest.raises(lc.WireError):
            read(torch.cat([wire.data, torch.zeros(extra, dtype=torch.uint8)]))
    for place in (*range(64), *range(68, 144)):
        for change in (1, 16, 255):
            data = wire.data.clone()
            data[place] ^= change
            with pytest.raises(lc.WireError):
                read(data)


@pytest.mark.parametrize(
    "inner",
    ["dqsg:bits=4", "qsgd:bits=4", "dqsg:bits=4,block=tensor", "rotate(dqsg:bits=4)"],
)
def test_a_wire_of_another_codec_inside_raises(inner: str) -> None:
    """Without looking inside: dqsg and qsgd have equal lengths."""
    codec = wrap("dqsg:bits=4,block=512")
    wire = wrap(inner).encode(gaussian(300), KEY)
    if wrap(inner).codec == codec.codec:
        codec.decode(wire)
    else:
        with pytest.raises(lc.WireError, match=r"was not written by feedback\(dqsg"):
            codec.decode(wire)
    with pytest.raises(lc.WireError, match="was not written by"):
        lc.codec(inner).decode(wire)
    with pytest.raises(lc.WireError, match="was not written by"):
        codec.decode(lc.codec(inner).encode(gaussian(300), KEY))


def test_segments_reach_the_codec_inside() -> None:
    codec, x = wrap("ecdq:error=0.3"), torch.cat([gaussian(600), 1e-3 * gaussian(400)])
    assert codec.codec.segmented and not wrap("dqsg").codec.segmented
    wire = codec.encode(x, KEY, segments=(600, 400))
    assert wire.header.segments == (600, 400)
    again = lc.Wire.parse(
        wire.data.clone(), key=KEY, shape=(1000,), dtype=torch.float32, segments=(600, 400)
    )
    y = codec.decode(again)
    assert_same_bits(y, codec.decode(wire))
    assert energy(y[600:] - x[600:]) < energy(x[600:])  # one step for all would send zeros
    with pytest.raises(lc.WireError, match="2 segments"):
        lc.Wire.parse(wire.data, key=KEY, shape=(1000,), dtype=torch.float32)
    with pytest.raises(ValueError, match="add up to 1000"):
        codec.encode(x, KEY, segments=(600, 300))


# --- the codec's contract ------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["dqsg:bits=2", "qsgd:bits=3,block=100", "bf16", "qsgd-topk"])
def test_every_backend_writes_the_same_bytes(backend: str, inner: str) -> None:
    device = device_of(backend)
    codec, other = wrap(inner), wrap(inner)
    for i in range(3):
        x, key = student_t3(500, seed=i), lc.Key(step=i)
        wire = codec.encode(x.to(device), key)
        with using("reference"):
            wanted = other.encode(x, key)
        if device.type == "cpu":
            assert torch.equal(wire.data, wanted.data)
        for dtype in DTYPES:
            start = gaussian(500, seed=9).to(dtype)
            out = codec.decode(wire, out=start.clone().to(device), add=True, weight=0.3)
            precise = codec.decode(wire, out=torch.empty(500, device=device), weight=0.3).cpu()
            assert_same_bits(out, (start.float() + precise).to(dtype))


@pytest.mark.parametrize("inner", [*SOME, "ecdq", "rotate(ecdq)"])
def test_encode_reuses_out(inner: str) -> None:
    one, other = wrap(inner), wrap(inner)
    wire = None
    for i in range(3):
        x, key = gaussian(300, seed=i), lc.Key(step=i)
        wire = one.encode(x, key, out=wire)
        assert torch.equal(wire.data, other.encode(x, key).data)
    assert wire is not None
    # the same buffer after another codec of equal length wrote its header there
    qsgd, dqsg = wrap("qsgd:bits=4"), wrap("dqsg:bits=4")
    used = dqsg.encode(gaussian(300), KEY, out=qsgd.encode(gaussian(300), KEY))
    assert torch.equal(used.data, wrap("dqsg:bits=4").encode(gaussian(300), KEY).data)


def test_strides_history_and_workers_do_not_matter() -> None:
    x = gaussian(600).view(20, 30)
    wanted = wrap("dqsg").encode(x.t().contiguous(), KEY).data
    for other in (x.t(), x.t().clone().requires_grad_(), torch.stack([x.t(), x.t()], 2)[..., 0]):
        assert torch.equal(wrap("dqsg").encode(other, KEY).data, wanted)
    assert torch.equal(wrap("dqsg").encode(x.t(), KEY, workers=8).data, wanted)
    # global needs no shared norm, because these wires are never added
    assert wrap("global:bits=4").encode(x, KEY, workers=200).header.workers == 1
    with pytest.raises(lc.ConfigError, match="workers must be a positive integer"):
        wrap("dqsg").encode(x, KEY, workers=0)
    with pytest.raises(TypeError, match="float64"):
        wrap("dqsg").encode(x.double(), KEY)


def test_a_step_allocates_no_more_tensors_once_buffers_exist() -> None:
    """On the codec's side: the largest allocation of a step is far smaller than its tensor."""
    codec, x = wrap("dqsg:bits=2"), gaussian(100_000)
    places = [lc.Place(parameter=i, start=0, numel=50_000, total=50_000) for i in range(2)]
    out, wire = torch.zeros(100_000), codec.encode(x, KEY, places=places)
    codec.decode(wire, out=out, add=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        codec.decode(codec.encode(x, KEY, places=places, out=wire), out=out, add=True)
    largest = max(event.self_cpu_memory_usage for event in profile.events() or ())
    assert 0 < largest < 10_000


def test_every_thread_has_buffers_of_its_own() -> None:
    scratch, cpu = Scratch(), torch.device("cpu")
    mine = scratch.take("a", 100, cpu)
    assert scratch.take("a", 80, cpu).data_ptr() == mine.data_ptr()
    assert scratch.take("b", 100, cpu).data_ptr() != mine.data_ptr()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(scratch.take, "a", 100, cpu).result(timeout=PATIENCE_S)
    assert other.data_ptr() != mine.data_ptr()
    assert scratch.take("a", 100, cpu).data_ptr() == mine.data_ptr()


def test_borrowed_buffers_are_given_back_and_never_shared() -> None:
    cpu = torch.device("cpu")
    with borrowed(100, cpu) as one, borrowed(100, cpu) as two:
        places = {one.data_ptr(), two.data_ptr()}
        assert len(places) == 2
    with borrowed(50, cpu) as one, borrowed(80, cpu) as two:
        assert {one.data_ptr(), two.data_ptr()} == places and one.numel() == 50
    with ThreadPoolExecutor(1) as pool, borrowed(100, cpu) as mine:
        other = pool.submit(lambda: borrowed(100, cpu).__enter__().data_ptr()).result(timeout=30)
        assert other not in places and mine.data_ptr() in places


def test_two_threads_encode_at_once() -> None:
    """A hook's thread and the main one, with one codec; every wire is compared."""
    codec, together = wrap("dqsg:bits=2"), threading.Barrier(2, timeout=PATIENCE_S)
    xs = [student_t3(20_000, seed=i) for i in range(2)]
    wanted = [
        [single.encode(x, lc.Key(step=i, tensor=n)).data for i in range(30)]
        for n, (x, single) in enumerate((x, wrap("dqsg:bits=2")) for x in xs)
    ]

    def work(n: int) -> None:
        for i in range(30):
            together.wait()
            wire = codec.encode(xs[n], lc.Key(step=i, tensor=n))
            assert torch.equal(wire.data, wanted[n][i])

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(copy_context().run, work, n) for n in range(2)]:
            future.result(timeout=PATIENCE_S)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inner", ["dqsg:bits=2", "qsgd:bits=4", "bf16"])
def test_a_step_never_waits_for_the_device(inner: str) -> None:
    """A captured graph cannot hold a synchronisation; replays go on where the steps stopped."""
    codec, control = wrap(inner), wrap(inner)
    x, out = student_t3(10_000).cuda(), torch.zeros(10_000, device="cuda")
    places = [lc.Place(parameter=i, start=0, numel=5000, total=5000) for i in range(2)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wire = codec.encode(x, KEY, places=places)
        codec.decode(wire, out=out, add=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        codec.decode(codec.encode(x, KEY, places=places, out=wire), out=out)
    graph.replay()
    wanted = [control.encode(x, KEY, places=places) for _ in range(2)][1]
    assert_same_bits(out, control.decode(wanted))
    for name, kept in control.kept.state_dict().items():
        assert_same_bits(codec.kept.state_dict()[name], kept)
