"""NDQSG's receiving side: what is added up, what the controller sees, and when it acts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic as lc
from laconic.exchanges._side_information import (
    RatioController,
    SideInformation,
    at_ratio,
    check_nesting,
    in_first_group,
    plain_codec,
    ratios_of,
    wrong_values,
)

D = 20_000


def gradients(n: int, noise: float, seed: int = 0, numel: int = D) -> list[Tensor]:
    """A common part of variance 1, and parts of their own."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator)
    return [common + noise * torch.randn(numel, generator=generator) for _ in range(n)]


def receive(
    codec: lc.NDQSG,
    xs: list[Tensor],
    control: RatioController,
    *,
    step: int = 0,
    own: bool = True,
    calibrates: bool = True,
    side: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rank 0 receives from all others; the first half sends plainly, or none with `side`."""
    n, out = len(xs), torch.empty(xs[0].numel()) if out is None else out
    side_information = SideInformation(
        codec, out, workers=n, control=control, calibrates=calibrates, side=side
    )
    side_information.start(xs[0] if own else None)
    for rank in range(1 if own else 0, n):
        first = side is None and in_first_group(rank, n)
        sent = plain_codec(codec) if first or calibrates else at_ratio(codec, control.ratio)
        side_information.add(sent.encode(xs[rank], lc.Key(step=step, rank=rank)), first=first)
    side_information.finish()
    return out


def at(codec: lc.NDQSG, ratio: int, **settings: Any) -> RatioController:
    control = RatioController(codec, **settings)
    control.ratio = ratio
    return control


@pytest.mark.parametrize(
    ("text", "ratios"),
    [
        ("ndqsg", (3, 7)),
        ("ndqsg:levels=2", (3, 5)),
        ("ndqsg:levels=20", (3, 7, 15, 31, 41)),
        ("ndqsg:levels=20,ratio=5", (7, 15, 31, 41)),
        ("ndqsg:levels=63", (3, 7, 15, 31, 63, 127)),
        ("ndqsg:levels=4,coder=rans", (3, 5, 7, 9)),
        ("ndqsg:levels=4,ratio=5,coder=rans", (5, 7, 9)),
    ],
)
def test_every_ratio_of_the_ladder_saves_bytes(text: str, ratios: tuple[int, ...]) -> None:
    codec: Any = lc.codec(text)
    assert ratios_of(codec) == ratios
    assert str(at_ratio(codec, ratios[-1])) == str(plain_codec(codec))
    if "coder" not in text:
        sizes = [at_ratio(codec, ratio).nbytes(D) for ratio in ratios]
        assert sizes == sorted(set(sizes))
    with pytest.raises(lc.ConfigError, match="nests at ratios"):
        at_ratio(codec, 9 if 9 not in ratios else 11)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ndqsg:levels=1", "no fewer bits than dqsg"),
        ("ndqsg:levels=3,ratio=5", "lower ratio="),
        ("ndqsg:levels=3,ratio=7,coder=rans", "no fewer bits"),
        ("ndqsg:alpha=0.9", "alpha=1"),
    ],
)
def test_settings_that_gain_nothing_are_refused(text: str, sentence: str) -> None:
    codec: Any = lc.codec(text)
    with pytest.raises(lc.ConfigError, match=sentence):
        check_nesting(codec)
    with pytest.raises(lc.ConfigError, match="positive number"):
        RatioController(lc.NDQSG(), tolerance=0)


def test_half_of_the_workers_send_plainly() -> None:
    assert [sum(in_first_group(i, n) for i in range(n)) for n in (1, 2, 3, 8)] == [1, 1, 2, 4]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("calibrates", [True, False])
@pytest.mark.parametrize("text", ["ndqsg:block=512", "ndqsg:levels=7,ratio=3,coder=rans"])
def test_a_nest_adds_what_its_text_says(text: str, own: bool, calibrates: bool) -> None:
    codec: Any = lc.codec(text)
    xs, n = gradients(5, 0.1), 5
    out = receive(codec, xs, at(codec, 3), own=own, calibrates=calibrates)
    done = [xs[0].double()] if own else []
    for rank in range(len(done), n):
        if calibrates or in_first_group(rank, n):
            plain = plain_codec(codec)
            value = plain.decode(plain.encode(xs[rank], lc.Key(rank=rank)))
        else:
            nested = at_ratio(codec, 3)
            y = torch.stack(done).mean(0).float()
            value = nested.decode(nested.encode(xs[rank], lc.Key(rank=rank)), side=y)
        done.append(value.double())
    # y may differ in its last bit, and with it a value at the edge of a cell
    near = torch.isclose(out.double(), torch.stack(done).mean(0), atol=1e-6)
    assert float(near.double().mean()) > 0.999


def test_a_server_needs_a_plain_wire_first() -> None:
    codec = lc.NDQSG()
    side_information = SideInformation(codec, torch.empty(D), workers=2, control=at(codec, 3))
    side_information.start(None)
    with pytest.raises(ValueError, match="first group"):
        side_information.add(at_ratio(codec, 3).encode(gradients(1, 0)[0], lc.Key()), first=False)


def test_the_mean_is_unbiased_while_no_decode_fails() -> None:
    """400 draws of 64 coordinates: none beyond 5 standard errors, 4e-5 likely for a right mean."""
    codec, draws = lc.NDQSG(levels=3), 400
    xs = gradients(5, 0.02, numel=64)
    exact = torch.stack(xs).double().mean(0)
    control = at(codec, 3)
    total, squares = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for step in range(draws):
        error = receive(codec, xs, control, step=step, calibrates=False).double() - exact
        total += error
        squares += error.square()
    control.decide()
    assert control.ratio == 3 and control.failures == 0
    assert bool((total.abs() <= 5 * squares.sqrt()).all())
    # 4 of 5 workers were quantized, at D1 each
    step2 = sum(float(x.abs().max() / 3) ** 2 for x in xs[1:])
    assert float(squares.mean() / draws) == pytest.approx(step2 / 12 / 25, rel=0.1)


@pytest.mark.parametrize("block", [None, 512, 100])
@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_a_calibration_counts_exactly_what_would_fail(block: int | None, noise: float) -> None:
    """Plain wires tell what every ratio would have done to them, with the same dither."""
    codec = lc.NDQSG(levels=20, block=block)
    xs, control = gradients(2, noise), RatioController(codec)
    receive(codec, xs, control)
    assert control._tally is not None
    compared, counts = control._tally[3].item(), control._tally[7:].tolist()
    assert compared == D
    plain, key = plain_codec(codec), lc.Key(rank=1)
    fine = plain.decode(plain.encode(xs[1], key))
    for ratio, count in zip(ratios_of(codec), counts, strict=False):
        nested = at_ratio(codec, ratio)
        found = nested.decode(nested.encode(xs[1], key), side=xs[0])
        wrong = int(((found - fine).abs() > 1e-4).sum())
        assert abs(wrong - count) <= 2, ratio  # edges of cells, in fp32
    assert counts[0] > 100  # so that something was tested


def test_zeros_never_fail() -> None:
    codec = lc.NDQSG(block=512)
    xs, control = [torch.ones(D), torch.zeros(D)], RatioController(codec)
    receive(codec, xs, control)
    assert control._tally is not None and control._tally[7:].tolist() == [0.0]


def test_flags_tell_the_share_of_wrong_values() -> None:
    codec = lc.NDQSG(levels=3)  # one scale: all blocks fail alike
    xs = gradients(2, 0.5, numel=1 << 18)
    compared, flagged = RatioController(codec), at(codec, 3, tolerance=1e9)
    receive(codec, xs, compared)
    assert compared._tally is not None
    truth = (compared._tally[7] / compared._tally[3]).item()
    receive(codec, xs, flagged, calibrates=False)
    flagged.decide()
    # 512 blocks with a wrong value in two of three: 5 standard errors are a quarter
    assert 0.001 < truth < 0.004
    assert flagged.failures == pytest.approx(truth, rel=0.25)
    assert wrong_values(0, 0) == 0 and wrong_values(0, 9) == 0
    assert math.isfinite(wrong_values(9, 9)) and wrong_values(9, 9) > wrong_values(8, 9)


def test_alike_gradients_narrow_the_ratio_after_four_calibrations() -> None:
    codec = lc.NDQSG(levels=20)
    control, found = RatioController(codec), []
    for step in range(6):
        receive(codec, gradients(4, 0.003, step), control, step=step)
        found.append(control.decide())
    assert found == [41, 41, 41, 3, 3, 3]
    assert control.failures == 0
    assert control.correlation is not None and control.correlation > 0.99


def test_the_ratio_is_the_narrowest_that_failures_allow() -> None:
    codec = lc.NDQSG(levels=20, block=512)
    control = RatioController(codec)
    for step in range(8):
        receive(codec, gradients(4, 0.2, step), control, step=step)
        control.decide()
    for step in range(8, 16):
        receive(codec, gradients(4, 0.2, step), control, step=step, calibrates=False)
        control.decide()
    assert control.ratio == 15 and control.failures <= control.allowed(15)
    other = at(codec, 7, tolerance=1e9)
    receive(codec, gradients(4, 0.2, 9), other, calibrates=False)
    other.decide()
    assert other.failures * 4 > control.allowed(7)


@pytest.mark.parametrize(("part", "ratio"), [(0.2, 3), (0.3, 7), (0.9, 7)])
def test_a_narrower_ratio_is_taken_with_a_margin_of_four(part: float, ratio: int) -> None:
    control, compared = RatioController(lc.NDQSG()), 1e6
    for _ in range(4):
        tally = torch.zeros(8, dtype=torch.float64)
        tally[3], tally[7] = compared, part * control.allowed(3) * compared
        control.add(tally, torch.tensor(True))
        control.decide()
    assert control.ratio == ratio


def test_the_codecs_own_ratio_is_the_narrowest_ever_taken() -> None:
    codec = lc.NDQSG(levels=20, ratio=9)
    control = RatioController(codec)
    for step in range(5):
        receive(codec, gradients(4, 0.0, step), control, step=step)
        control.decide()
    assert control.ratio == 15  # of 4 bits, as 9 would be


def test_gradients_with_nothing_in_common_stay_plain() -> None:
    codec = lc.NDQSG(block=512)
    control = RatioController(codec)
    for step in range(10):
        receive(codec, gradients(4, 30.0, step), control, step=step)
        assert control.decide() == 7
    assert control.correlation is not None and abs(control.correlation) < 0.05


def test_failures_widen_at_once_and_one_bad_calibration_spoils_four() -> None:
    codec = lc.NDQSG()
    control = at(codec, 3)
    receive(codec, gradients(4, 2.0), control, calibrates=False)
    assert control.decide() == 7
    assert control.failures > control.allowed(3)
    control.ratio = 3
    receive(codec, gradients(4, 0.7), control)  # a calibration
    assert control.decide() == 7
    for step, noise in enumerate((0.0, 0.0, 0.0, 30.0, 0.0, 0.0, 0.0)):
        receive(codec, gradients(4, noise, step), control, step=step)
        assert control.decide() == 7
    receive(codec, gradients(4, 0.0), control)
    assert control.decide() == 3


@pytest.mark.parametrize("who", [0, 1, 3])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_that_is_not_finite_counts_for_nothing(who: int, bad: float) -> None:
    codec = lc.NDQSG()
    control = at(codec, 3)
    xs = gradients(4, 0.01)
    receive(codec, xs, control)
    control.decide()
    before = control.state_dict()
    xs[who][700] = bad
    assert not bool(receive(codec, xs, control).isfinite().all())
    assert control.decide() == 3
    assert control.state_dict() | {"correlation": 0} == before | {"correlation": 0}


def test_side_information_from_elsewhere() -> None:
    codec, xs = lc.NDQSG(), gradients(4, 0.05)
    control = at(codec, 3)
    exact = torch.stack(xs).mean(0)
    near = receive(codec, xs, control, side=exact + 0.05)
    assert float((near - exact).abs().max()) < float(max(x.abs().max() for x in xs)) / 6
    assert control.decide() == 3 and control.failures == 0
    receive(codec, xs, control, side=-exact, calibrates=False)
    assert control.decide() == 7


def test_flags_miss_what_a_calibration_sees() -> None:
    """All failures in a few blocks: the alarm is too low, the next calibration is exact."""
    codec = lc.NDQSG()
    xs = gradients(2, 0.0)
    xs[1][: D // 20] *= -1  # a twentieth of the blocks
    control = at(codec, 3)
    receive(codec, xs, control, calibrates=False)
    assert control.decide() == 3 and control.failures < control.allowed(3)
    receive(codec, xs, control)
    assert control.decide() == 7


def test_failures_are_at_least_those_that_the_last_calibration_foretold() -> None:
    codec = lc.NDQSG()
    xs = gradients(2, 0.0)
    xs[1][: D // 20] *= -1
    control = at(codec, 3, tolerance=1e9)
    receive(codec, xs, control)
    control.decide()
    assert control.failures == 0  # a calibration is plain
    receive(codec, xs, control, calibrates=False)
    control.decide()
    # half of all values that P2 has sent, and of a twentieth those beyond D2/4
    assert 0.001 < control.failures < 0.025


def test_a_wire_of_another_ratio_is_refused() -> None:
    codec, x = lc.NDQSG(levels=20, coder="rans"), gradients(1, 0)[0]
    side_information = SideInformation(codec, torch.empty(D), workers=2, control=at(codec, 5))
    side_information.start(x)
    with pytest.raises(lc.WireError, match="not written by ndqsg"):
        side_information.add(at_ratio(codec, 7).encode(x, lc.Key()), first=False)
    with pytest.raises(lc.WireError, match="not written by dqsg"):
        side_information.add(at_ratio(codec, 5).encode(x, lc.Key()), first=True)
    with pytest.raises(lc.WireError, match="not written by ndqsg"):
        side_information.add(plain_codec(codec).encode(x, lc.Key()), first=False)


def test_a_control_goes_on_from_its_state() -> None:
    codec = lc.NDQSG(levels=20)
    control = RatioController(codec)
    for step in range(3):
        receive(codec, gradients(4, 0.01, step), control, step=step)
        if step < 2:
            control.decide()
    again = RatioController(codec)
    again.load_state_dict(control.state_dict())
    for one in (control, again):
        receive(codec, gradients(4, 0.01, 3), one, step=3)
        one.decide()
        receive(codec, gradients(4, 0.01, 4), one, step=4)
        one.decide()
    assert again.state_dict() == control.state_dict() and control.ratio < 41
    with pytest.raises(lc.ConfigError, match="of another codec"):
        RatioController(lc.NDQSG()).load_state_dict(control.state_dict())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("block", [None, 512])
def test_cuda_finds_what_the_cpu_finds_without_waiting(block: int | None) -> None:
    codec, found = lc.NDQSG(levels=20, block=block), {}
    for device in ("cpu", "cuda"):
        control, out = RatioController(codec), torch.empty(0)
        for step in range(12):
            xs = [x.to(device) for x in gradients(4, 0.05, step)]
            out = torch.empty(D, device=device)
            receive(codec, xs, control, step=step, calibrates=step % 2 == 0, out=out)  # warms up
            if device == "cuda":
                again = at(codec, control.ratio)
                torch.cuda.set_sync_debug_mode("error")
                try:
                    receive(codec, xs, again, step=step, calibrates=step % 2 == 0, out=out)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            control.decide()
        found[device] = out.cpu(), control.ratio, control.correlation
    assert torch.allclose(found["cpu"][0], found["cuda"][0], atol=1e-5)
    assert found["cpu"][1] == found["cuda"][1] < 41
    assert found["cpu"][2] == pytest.approx(found["cuda"][2], rel=1e-3)
