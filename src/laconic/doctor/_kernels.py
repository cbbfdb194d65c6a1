"""Kernels of this rank's devices: their form, whether it loads, and makes the right bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from laconic._key import Key
from laconic._records import record
from laconic.codecs import Codec, codec
from laconic.doctor._finding import Finding, fine, named, problem
from laconic.kernels import choice, using

SPECS = (
    "qsgd:bits=4",
    "dqsg:bits=3",
    "global-exp:bits=4",
    "rotate(dqsg:bits=4)",
    "ecdq:error=0.08",
)
SIZES = (1, 129, 1000)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KEY = Key(seed=1, step=2)


@dataclass(frozen=True, kw_only=True)
class KernelState:
    """Of a device: its form, why that one, and what is wrong with it, or ""."""

    device: str
    form: str
    why: str
    wrong: str = ""


def kernel_states(devices: Sequence[torch.device]) -> list[KernelState]:
    """Of all of them; nothing is raised."""
    return [_state(device) for device in devices]


def own_devices(local_rank: int) -> list[torch.device]:
    """The CPU on the host's first rank, and this rank's accelerator."""
    found = [torch.device("cpu")] if local_rank == 0 else []
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        count = torch.accelerator.device_count()
        found.append(torch.device(kind.type, local_rank % max(1, count)))
    return found


def check_kernels(states: Sequence[tuple[int, KernelState]]) -> Iterator[Finding]:
    """Those of all ranks; equal ones are told once."""
    wrong = [(rank, state) for rank, state in states if state.wrong]
    for rank, state in wrong:
        yield problem(
            "kernels",
            f"{state.device} on {named([rank])}, {state.form}: {state.wrong}",
            _advice(state),
            [rank],
        )
    told: dict[str, list[str]] = {}
    for _, state in states:
        if not state.wrong:
            kind = state.device.partition(":")[0]
            told.setdefault(f"{kind} {state.form} ({state.why})", []).append(state.device)
    for text in told:
        yield fine("kernels", f"{text}: {len(SPECS)} codecs make the bytes of the reference")


def to_json(states: Sequence[KernelState]) -> str:
    """One line."""
    return json.dumps([asdict(state) for state in states])


def from_json(text: str) -> list[KernelState]:
    """ValueError for anything else."""
    return [record(KernelState, one) for one in json.loads(text)]


def _advice(state: KernelState) -> str:
    packages = {"numba": "numba", "triton": "triton", "staged": "numba", "torch": "torch"}
    return (
        f"pip install --force-reinstall {packages.get(state.form, 'torch')}; meanwhile, in your "
        'script: laconic.kernels.using("reference"), which is slow'
    )


def _state(device: torch.device) -> KernelState:
    form, why = "none", ""
    try:
        found = choice(device)
        form, why = found.form, found.why
        if found.torch_s is not None and found.staged_s is not None:
            why += f": torch {1e3 * found.torch_s:.1f} ms, staged {1e3 * found.staged_s:.1f} ms"
        wrong = _self_test(device)
    except Exception as error:  # whatever a broken installation raises is what we look for
        wrong = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return KernelState(device=str(device), form=form, why=why, wrong=wrong)


def _self_test(device: torch.device) -> str:
    """The first difference to the reference on the CPU, or ""."""
    for spec in SPECS:
        own = codec(spec)
        for dtype in DTYPES:
            for count in SIZES:
                x = torch.linspace(-2, 3, count).pow(3).to(dtype)
                if _differs(own, x, device):
                    return f"{spec} makes other bytes of {count} {dtype} values"
    return ""


def _differs(own: Codec, x: Tensor, device: torch.device) -> bool:
    """In the wire, unless its length varies: then steps may differ in their last bits.

    In what the device's own wire decodes to, in any case.
    """
    wire = own.encode(x.to(device), _KEY)
    got, here = own.decode(wire).cpu(), wire.data.cpu()
    with using("reference"):
        wanted = own.encode(x, _KEY)
        if own.varies:
            wanted = type(wire).parse(here, key=_KEY, shape=x.shape, dtype=x.dtype)
        back = own.decode(wanted)
    return not (torch.equal(here, wanted.data) and torch.equal(got, back))
