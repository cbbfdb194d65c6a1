"""Every backend has every kernel, with the arguments that `Kernels` says."""

from __future__ import annotations

from inspect import Parameter, Signature, signature

import pytest
import torch
from helpers import kernels

from laconic.kernels import Kernels, _reference, backend, using
from laconic.kernels._choice import FORMS

DEFINITION: Kernels = _reference  # which a type checker compares, too

NAMES = sorted(name for name in vars(Kernels) if not name.startswith("_"))


def declared(name: str) -> Signature:
    """Without self."""
    own = signature(getattr(Kernels, name))
    return own.replace(parameters=list(own.parameters.values())[1:])


def shape(own: Signature) -> list[tuple[str, object, object, object]]:
    return [(p.name, p.kind, p.default, p.annotation) for p in own.parameters.values()]


@pytest.mark.parametrize("name", FORMS)
def test_a_backend_is_what_the_protocol_lists(name: str) -> None:
    module = kernels(name)
    if module is None:
        pytest.skip(f"the {name} kernels cannot be loaded here (is {name} installed?)")
    for kernel in NAMES:
        own = signature(getattr(module, kernel))
        assert shape(own) == shape(declared(kernel)), kernel
    extra = {name for name, value in vars(module).items() if callable(value)} - {*NAMES}
    assert not extra, "kernels that the protocol does not list"


def test_the_protocol_has_a_word_on_every_kernel() -> None:
    """It is where one reads what kernels do; settings have names where they are given."""
    for name in NAMES:
        assert getattr(Kernels, name).__doc__, name
        plain = [p for p in declared(name).parameters.values() if p.kind != Parameter.KEYWORD_ONLY]
        assert len(plain) <= 8, name


def test_the_backend_is_chosen_by_device_or_by_name() -> None:
    cpu = torch.device("cpu")
    assert backend(cpu) is kernels("numba")
    assert backend(torch.device("meta")) is kernels("reference")
    with using("reference"):
        assert backend(cpu) is kernels("reference")
