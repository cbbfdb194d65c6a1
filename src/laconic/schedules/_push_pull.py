"""Gradients to the owners of chunks, and the owners' weights to all."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.exchanges import Call
from laconic.exchanges._scatter_reduce import gather, scatter_in_budget
from laconic.exchanges._transport import no_values
from laconic.exchanges._wires import encode
from laconic.server._difference import projection
from laconic.server._flat import Flat


def push(flat: Flat, g: Tensor, spoilt: Tensor, codec: Codec, call: Call, out: Tensor) -> Tensor:
    """out = the mean of this rank's chunk over ranks; returns the mean of `spoilt`.

    `spoilt`, one number that every rank gives, travels behind the wires: all owners, those of
    nothing too, know in the same round trip whether any rank's gradient is to be thrown away.
    """
    anywhere = torch.empty_like(spoilt)
    scatter_in_budget(
        flat.chunks(g),
        codec,
        call,
        out,
        places=_places(flat, call),
        rest=[spoilt] * call.size,
        rest_out=anywhere,
    )
    return anywhere


def pull(flat: Flat, mine: Tensor, codec: Codec, call: Call, out: Tensor) -> None:
    """out = every owner's weights, to the bit if the codec is `none`."""
    plain = [no_values(mine)] * call.size
    gather(mine, codec, call, flat.chunks(out), places=_places(flat, call), rest=plain)


def pull_difference(
    flat: Flat, mine: Tensor, codec: Codec, call: Call, before: Tensor, out: Tensor
) -> None:
    """out = before + λ·Q(weights - before): a lossy pull whose errors do not accumulate.

    All ranks hold the same `before`, the result of the last pull, so its owner knows exactly what
    the others have: c = M - P is what is new since then and all that earlier pulls lost. That is
    error feedback without a memory. With λ = ⟨Q, c⟩/⟨Q, Q⟩, the projection of c on Q,

        P' = P + λ·Q(c)        ‖M - P'‖² = (1 - cos²φ)·‖M - P‖²,  φ the angle between Q(c) and c

    so that any codec brings P nearer to M; for an unbiased one of relative variance w the factor
    is about w/(1+w). With D the distance that M moves in a period and ρ² a bound of the factor,
    ‖M - P‖ stays below ρ·D/(1-ρ) for ever. With λ = 1 and w above 1 it would grow w-fold each time.
    λ travels, one number from each owner; all ranks compute the same sums, hence the same bits.
    """
    rank, places = call.rank, _places(flat, call)
    was, chunks = flat.chunks(before), flat.chunks(out)
    change = call.scratch.take("change", mine.numel(), mine.device, torch.float32)
    torch.sub(mine, was[rank], out=change)
    factors = list(torch.ones(call.size, device=mine.device).split(1))
    wire = None
    if mine.numel():
        found = chunks[rank]
        wire = encode(codec, change, call.key(rank, rank, 1), places[rank], call)
        codec.decode(wire, out=found)
        factors[rank].copy_(projection(found, change))
    gather(change, codec, call, chunks, places=places, rest=factors, wire=wire)
    for chunk, factor, old in zip(chunks, factors, was, strict=True):
        chunk.mul_(factor).add_(old)


def _places(flat: Flat, call: Call) -> list:
    edges = flat.edges
    return [call.inside(edges[j], edges[j + 1]) for j in range(call.size)]
