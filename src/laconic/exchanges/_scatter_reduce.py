"""Scatter-reduce: every rank owns a chunk, adds it up exactly, and sends its mean to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic._wire import Wire
from laconic.codecs import Codec, Place
from laconic.errors import ConfigError
from laconic.exchanges._base import Call, Exchange
from laconic.exchanges._budget import ALONE, FIRST, Account
from laconic.exchanges._transport import Message, no_values, share, swap
from laconic.exchanges._wires import Sizes, chunk_edges, chunks_of, decode, encode

REST_GRAIN = 4  # plain values: chunks start on 16-byte boundaries


@dataclass(frozen=True, kw_only=True)
class ScatterReduce(Exchange):
    """`scatter-reduce`: any codec that decodes alone, any number of ranks.

    x is cut into n chunks; rank j owns chunk j.

    1. Every rank encodes each chunk but its own and sends it to its owner (all-to-all).
    2. The owner decodes and adds n - 1 of them, in order of ranks, to its own exact values, in
       fp32: S_j = Σ_i Q(x_i)_j / n.
    3. It encodes S_j once more and sends it to all; all, the owner too, decode that.

    Every rank decodes the same n wires, so all end with the same bits. The error of the mean is
    e1·Σ_{i≠j}‖x_i‖²/n² + e2·‖S‖²: relative to the mean about e1/(n·κ) + e2, with
    κ = ‖mean‖²/(average ‖x_i‖²): 1 for equal gradients, 1/n for independent ones, and as near to 0
    as gradients cancel. A codec's `error=` E is the budget of the mean, of each parameter, at every
    step:

    4. The first encodings get e1 = 0.4·f·E, f being the n·κ to count on: what the steps before
       tell, with a margin, and 1 (less for small parameters) where they tell nothing.
    5. What they spend, an exact expectation, travels with them (its root, fp32, per segment). The
       owner gives its own encoding what they have left of the budget, E·T - E1, from an eighth to
       three quarters of E·‖S‖².
    6. The owners' sums travel with the lengths of their wires, so all ranks know E1, E2 and T, the
       square of the mean, of each parameter. One with E1 + E2 > 1.1·E·T is added up once more, in
       fp32, and has no error at this step (`_budget.py`).

    So the expected error is at most 1.1·E at every step, whatever gradients do. n·κ is known for
    the next step without another pass over the values: 0.4·f·E·T/E1.
    Bytes a rank sends: 2·(n-1)/n of the encoded tensor.
    """

    name: ClassVar[str] = "scatter-reduce"

    def check(self, codec: Codec) -> None:
        if codec.needs_side:
            raise ConfigError(
                "ndqsg decodes with side information, which scatter-reduce (FSDP's, too) does not "
                "have: ndqsg@nested has it, under DDP; or use dqsg"
            )

    def mean(self, x: Tensor, codec: Codec, call: Call, rest: Tensor | None = None) -> None:
        n, rank = call.size, call.rank
        edges = chunk_edges(x.numel(), n)
        chunks = [x[edges[j] : edges[j + 1]] for j in range(n)]
        places = [call.inside(edges[j], edges[j + 1]) for j in range(n)]
        plain = chunks_of(no_values(x) if rest is None else rest, n, REST_GRAIN)
        total = call.scratch.take("sum", chunks[rank].numel(), x.device, torch.float32)
        account = Account.of(codec, call, places, list(map(len, chunks)), FIRST)
        sent = {"places": places, "rest": plain}
        if account is None:
            half = codec.at_share(0.5)
            scatter(chunks, half, call, total, rest_out=plain[rank], **sent)
            gather(total, half, call, chunks, **sent)
            return
        first = scatter(chunks, codec, call, total, rest_out=plain[rank], account=account, **sent)
        _gather_in_budget(total, codec, call, chunks, account=account, first=first, **sent)


def scatter(
    chunks: Sequence[Tensor],
    codec: Codec,
    call: Call,
    out: Tensor,
    *,
    places: Sequence[Sequence[Place]],
    rest: Sequence[Tensor],
    rest_out: Tensor,
    account: Account | None = None,
) -> Tensor:
    """out = the mean over ranks of chunk `rank`, in fp32; rest_out likewise of plain values.

    With an account, what encodings spent: E1 of each of out's segments.
    """
    n, rank, dtype = call.size, call.rank, chunks[0].dtype
    with_spent = rest if account is None else account.with_room(rest, range(n))
    messages = []
    for j, chunk in enumerate(chunks):
        wire, plain = None, with_spent[j]
        if j != rank and chunk.numel():
            spending = {}
            if account is not None:
                room = account.room("spent", j, out.device)
                spending = {"shares": account.shares(j), "spent": room}
            wire = encode(codec, chunk, call.key(rank, j), places[j], call, **spending)
            if spending:
                plain[rest[j].numel() :].copy_(spending["spent"].sqrt())
        messages.append(Message.of(wire, plain if j != rank else plain[:0]))
    here = [0 if i == rank else out.numel() for i in range(n)]
    plain_here = [0 if i == rank else with_spent[rank].numel() for i in range(n)]
    sizes = Sizes.of(codec, here, [places[rank]] * n, dtype)
    arriving = swap(messages, call, sizes, plain_here)
    out.copy_(chunks[rank]).mul_(1 / n)  # in fp32 before it is weighed
    torch.mul(rest[rank], 1 / n, out=rest_out)
    count, exact = with_spent[rank].numel() - rest_out.numel(), torch.float64
    spent = torch.zeros(count, dtype=exact, device=out.device)
    for i, message in enumerate(arriving):
        if here[i]:
            key = call.key(i, rank)
            decode(codec, message.wire, out, key, places[rank], dtype, call, add=True, weight=1 / n)
        if plain_here[i]:
            rest_out.add_(message.rest[: rest_out.numel()], alpha=1 / n)
            spent.add_(message.rest[rest_out.numel() :].double().square(), alpha=1 / n**2)
    return spent


def scatter_in_budget(
    chunks: Sequence[Tensor],
    codec: Codec,
    call: Call,
    out: Tensor,
    *,
    places: Sequence[Sequence[Place]],
    rest: Sequence[Tensor],
    rest_out: Tensor,
) -> None:
    """`scatter` alone, within a codec's budget; a broken one gets the exact mean.

    What was spent must reach all ranks by itself: one small message, and a wait for it.
    """
    account = Account.of(codec, call, places, [chunk.numel() for chunk in chunks], ALONE)
    sent = {"places": places, "rest": rest, "rest_out": rest_out}
    first = scatter(chunks, codec, call, out, account=account, **sent)
    if account is not None:
        account.settle_among(first, out)
        targets = [out if j == call.rank else out[:0] for j in range(call.size)]
        with account.exact(chunks, targets):
            pass


def gather(
    mine: Tensor,
    codec: Codec,
    call: Call,
    chunks: Sequence[Tensor],
    *,
    places: Sequence[Sequence[Place]],
    rest: Sequence[Tensor],
    wire: Wire | None = None,
) -> None:
    """Every rank's `mine`, encoded once, becomes its chunk on all ranks; plain values likewise.

    `wire` is that of `mine`, where the caller has needed it before.
    """
    rank, counts = call.rank, [chunk.numel() for chunk in chunks]
    if wire is None and counts[rank]:
        wire = encode(codec, mine, call.key(rank, rank, 1), places[rank], call)
    sizes = Sizes.of(codec, counts, places, mine.dtype)
    plain = [part.numel() for part in rest]
    arrived = share(Message.of(wire, rest[rank]), call, sizes, plain)
    _decode_all(arrived, codec, call, chunks, places, rest, mine.dtype)


def _gather_in_budget(
    mine: Tensor,
    codec: Codec,
    call: Call,
    chunks: Sequence[Tensor],
    *,
    places: Sequence[Sequence[Place]],
    rest: Sequence[Tensor],
    account: Account,
    first: Tensor,
) -> None:
    """`gather`, with what the first encodings have left; broken budgets get the exact mean."""
    rank, counts = call.rank, [chunk.numel() for chunk in chunks]
    wire, numbers = None, []
    if counts[rank]:
        squares, second = account.squares(rank, mine), account.room("spent back", rank, mine.device)
        spending = {"shares": account.back(first, squares), "spent": second}
        wire = encode(codec, mine, call.key(rank, rank, 1), places[rank], call, **spending)
        numbers = [first, second, squares]
    sizes = Sizes.of(codec, counts, places, mine.dtype)
    plain = [part.numel() for part in rest]
    arrived = account.share(Message.of(wire, rest[rank]), sizes, plain, numbers)
    with account.exact(chunks, chunks):
        _decode_all(arrived, codec, call, chunks, places, rest, mine.dtype)


def _decode_all(
    arrived: Sequence[Message],
    codec: Codec,
    call: Call,
    chunks: Sequence[Tensor],
    places: Sequence[Sequence[Place]],
    rest: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Owners' messages become chunks and plain values."""
    for j, message in enumerate(arrived):
        if chunks[j].numel():
            decode(codec, message.wire, chunks[j], call.key(j, j, 1), places[j], dtype, call)
        if rest[j].numel() and j != call.rank:
            rest[j].copy_(message.rest)
