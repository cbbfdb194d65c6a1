"""What codecs make of a network's gradients: error against bits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from laconic._key import Key
from laconic.codecs import Codec, codec
from laconic.exchanges._policy import policy_for
from laconic.race._result import Quantized

SPECS = (
    *(f"qsgd:bits={bits}" for bits in (2, 3, 4, 6, 8)),
    *(f"dqsg:bits={bits}" for bits in (2, 3, 4, 6, 8)),
    *(f"global:bits={bits}" for bits in (8,)),
    *(f"ecdq:error={error:g}" for error in (0.5, 0.2, 0.08, 0.03, 0.01, 0.003, 0.001)),
    *(f"ecdq:error={error:g},coder=rans" for error in (0.5, 0.2, 0.08, 0.03, 0.01, 0.003, 0.001)),
)


def quantized(network: nn.Module, workers: int) -> Iterator[Quantized]:
    """Bits and error of all tensors that are worth compressing, together, for each setting."""
    worth = policy_for(None, network.named_parameters())
    gradients = [
        parameter.grad
        for name, parameter in network.named_parameters()
        if parameter.grad is not None and worth(name, parameter)
    ]
    power = sum(float(x.square().sum()) for x in gradients)
    values = sum(x.numel() for x in gradients)
    for spec in SPECS if gradients and power else ():
        sent, off = 0.0, 0.0
        for number, gradient in enumerate(gradients):
            nbytes, error = _once(codec(spec), gradient, number, workers)
            sent, off = sent + nbytes, off + error
        yield Quantized(codec=family(spec), spec=spec, bits=8 * sent / values, error=off / power)


def family(spec: str) -> str:
    """The line that a codec's settings make together.

    >>> family("ecdq:error=0.08,coder=rans"), family("rotate(dqsg:bits=4):block=256")
    ('ecdq+rans', 'rotate(dqsg)')
    """
    name = re.sub(r":[^)]*", "", spec)
    return f"{name}+rans" if "coder=rans" in spec else name


def _once(own: Codec, x: Tensor, number: int, workers: int) -> tuple[float, float]:
    """Bytes, and |decoded - x|²."""
    shared = {}
    if own.shared_norm:  # one scale for all workers, who share the levels
        shared = {"norm": own.local_norm(x), "workers": workers}
    wire = own.encode(x, Key(seed=0, tensor=number), **shared)
    return wire.nbytes, float((own.decode(wire) - x).square().sum())
