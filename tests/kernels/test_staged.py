"""Devices without kernels of ours: torch on them or copies to the CPU, and the same bytes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PATIENCE_S, assert_same_bits, gaussian, kernels
from test_protocol import NAMES
from torch import Tensor
from torch.utils import backend_registration

import laconic as lc
from laconic.kernels import Kernels, _choice, _reference, backend, choice, scratch_device, using
from laconic.kernels._choice import STAGED, outcomes
from laconic.kernels._staging import staged

CPU, META = torch.device("cpu"), torch.device("meta")
SPECS = (
    *lc.codecs(),
    "qsgd:norm=l2,coder=elias",
    "global:norm=l2",
    "global:norm=3/2",
    "rotate(dqsg)",
    "feedback(dqsg)",
    "ecdq:coder=rans",
    "ecdq:block=512",
)


@pytest.fixture(autouse=True)
def bare_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if there were no kernels for the CPU."""
    monkeypatch.delitem(_choice._BY_DEVICE, "cpu")
    choice.cache_clear()
    yield
    choice.cache_clear()


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch knows no devices that are written in Python",
)
@pytest.mark.parametrize(
    ("form", "lacking"), [("", "float64"), ("staged", ""), ("torch", "")], ids=str
)
def test_another_device_makes_the_same_wires(form: str, lacking: str) -> None:
    script, tests = Path(__file__).with_name("standin.py"), str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run(
        [sys.executable, str(script), form, lacking, *SPECS],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert found.returncode == 0, found.stderr


def lacks(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """On the second call, which is the one on the device."""
    own, calls = getattr(_reference, name), []

    def kernel(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            raise error
        return own(*args, **options)

    monkeypatch.setattr(_reference, name, kernel)


@pytest.mark.parametrize(
    "error",
    [TypeError("no float64 on MPS"), NotImplementedError("aten::bitwise"), RuntimeError("no dot")],
    ids=str,
)
def test_torch_is_not_used_where_it_lacks_an_operation(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks(monkeypatch, "rotate_back", error)
    found = choice(CPU)
    assert found.form == "staged" and str(error) in found.why and found.torch_s is None
    assert backend(CPU) is kernels("staged")


def test_torch_is_not_used_where_it_makes_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = _reference.scales, []

    def rough(x: Tensor, out: Tensor, **options: Any) -> None:
        own(x, out, **options)
        calls.append(x)
        if len(calls) > 3:  # two calls of the trial on the CPU, two on the device
            out.mul_(1.0000002)

    monkeypatch.setattr(_reference, "scales", rough)
    assert choice(CPU).form == "staged" and choice(CPU).why.endswith("in scales")


@pytest.mark.parametrize("faster", STAGED)
def test_the_faster_form_is_used(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(own: Kernels, device: torch.device) -> float:
        return 1.0 if own is _choice.load(faster) else 2.0

    monkeypatch.setattr(_choice, "_seconds", seconds)
    found = choice(CPU)
    assert found.form == faster and {found.torch_s, found.staged_s} == {1.0, 2.0}
    assert backend(CPU) is kernels(faster)


def test_both_forms_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choice, "VALUES", 4000)
    found = choice(CPU)
    assert found.torch_s and found.staged_s and found.form in STAGED


def test_a_device_whose_tensors_cannot_be_copied_has_the_reference() -> None:
    found = choice(META)
    assert found.form == "reference" and "cannot be copied" in found.why


def test_cuda_without_triton_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_choice, "find_spec", lambda name: None)
    monkeypatch.setitem(_choice._BY_DEVICE, "meta", "triton")  # a GPU that every machine has
    with caplog.at_level(logging.WARNING, "laconic"):
        assert choice(META).form == "reference"
    assert "pip install triton" in caplog.text


def test_a_name_overrides_the_choice() -> None:
    with using("reference"):
        assert backend(META) is kernels("reference") and scratch_device(META) == META
    with using("staged"):
        assert backend(CPU) is kernels("staged") and scratch_device(META) == CPU


def test_the_trial_calls_every_kernel_that_torch_would_run() -> None:
    mixed: Any = kernels("torch")
    own = {name for name in NAMES if getattr(mixed, name) is getattr(_reference, name)}
    assert {name for name, _ in outcomes(_reference, gaussian(1000))} == own
    assert {*NAMES} - own == {
        *("encode_integers", "decode_integers"),
        *("ecdq_steps", "ecdq_encode", "ecdq_decode"),
    }


@pytest.mark.parametrize("name", ["numba", *STAGED])
def test_the_trial_has_one_outcome(name: str) -> None:
    module: Any = kernels(name)
    x = _choice._values()
    for (kernel, got), (_, want) in zip(outcomes(module, x), outcomes(_reference, x), strict=True):
        assert_same_bits(got, want, kernel)


def test_what_a_kernel_writes_is_an_argument_of_it() -> None:
    with pytest.raises(TypeError, match="outputs"):
        staged(_reference.scales, "outputs")
