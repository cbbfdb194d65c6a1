"""A device without kernels, in a process of its own: `python standin.py FORM LACKING SPEC ...`

Its tensors are kept on the CPU, out of reach, and what it lacks is refused, as MPS refuses float64.
All that codecs do with them goes through `Device`, a dispatch mode. torch has to know of the
device, and can be told so once in a process.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
from helpers import assert_same_bits, decode, gaussian
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _setup_privateuseone_for_python_backend,  # pyright: ignore[reportAttributeAccessIssue]
)

import laconic as lc
from laconic.kernels import choice, using

DEVICE = torch.device("privateuseone:0")
CPU = torch.device("cpu")


class There(Tensor):
    """A tensor on the device; `kept` holds its values."""

    kept: Tensor

    @staticmethod
    def __new__(cls, kept: Tensor) -> There:
        made = Tensor._make_wrapper_subclass(
            cls,
            kept.shape,
            strides=kept.stride(),
            storage_offset=kept.storage_offset(),
            dtype=kept.dtype,
            device=DEVICE,
        )
        made.kept = kept
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of the device")


class Device(TorchDispatchMode):
    """Runs operations of the device's tensors on the CPU, except `lacking` dtypes."""

    def __init__(self, *lacking: torch.dtype) -> None:
        super().__init__()
        self.lacking = lacking

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = list[Any]()
        tree_map(given.append, (args, kwargs))
        there = any(isinstance(one, There) for one in given)
        target = kwargs.get("device")
        if func is torch.ops.aten.copy_.default:
            target = args[0].device
        elif target is None:
            target = DEVICE if there else CPU
        if not there and target.type != DEVICE.type:
            return func(*args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = CPU
        on_device = target.type == DEVICE.type
        if on_device and kwargs.get("dtype") in self.lacking:
            raise TypeError(f"{DEVICE.type} has no {kwargs['dtype']}")
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if not copies and any(
            isinstance(one, Tensor) and not isinstance(one, There) and one.dim() for one in given
        ):
            raise RuntimeError(f"{func}: tensors on two devices")
        out = func(*tree_map(_kept, args), **tree_map(_kept, kwargs))
        if isinstance(out, Tensor) and args and out is _kept(args[0]):
            return args[0]  # it worked in place
        return tree_map(self._made, out) if on_device else out

    def _made(self, one: Any) -> Any:
        if isinstance(one, Tensor) and one.dtype in self.lacking:
            raise TypeError(f"{DEVICE.type} has no {one.dtype}")
        return There(one) if isinstance(one, Tensor) else one


def _kept(one: Any) -> Any:
    return one.kept if isinstance(one, There) else one


def check(spec: str) -> None:
    """A codec on the device makes the wires that it makes on the CPU, and decodes to the same."""
    codec, key = lc.codec(spec), lc.Key(seed=3, step=1)
    for numel, dtype in ((1, torch.float32), (700, torch.bfloat16), (1000, torch.float16)):
        x = gaussian(numel).to(dtype)
        wanted = codec.encode(x, key)
        back, there = decode(codec, wanted, x), x.to(DEVICE)
        wire = codec.encode(there, key)
        assert isinstance(there, There) and wire.buffer.device == DEVICE
        assert_same_bits(wire.data.to(CPU), wanted.data, (spec, dtype))
        assert_same_bits(decode(codec, wire, there).to(CPU), back, (spec, dtype))


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend()
    form, lacking, *specs = sys.argv[1:]
    with Device(*(getattr(torch, name) for name in lacking.split(",") if name)):
        found = choice(DEVICE)
        assert found.form in ("staged", "torch") and (lacking in found.why), found
        for one in specs:
            with using(form) if form else nullcontext():
                check(one)
