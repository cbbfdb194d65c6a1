"""Scatter-reduce: every rank owns a chunk, adds it up exactly, and sends its mean to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic._cost import Cluster, EncodingError, Task, TensorLoad, Work
from laconic._wire import Wire
from laconic.codecs import Codec, Place
from laconic.comm._context import (
    ExchangeContext,
    Sizes,
    chunk_edges,
    chunks_of,
    decode,
    encode,
)
from laconic.comm._transport import (
    Message,
    all_gather,
    all_to_all,
    no_values,
)
from laconic.errors import ConfigError
from laconic.exchanges._base import MESSAGE_BYTES, Exchange, lengths
from laconic.exchanges._budget import ALONE, FIRST, Account

PLAIN_GRAIN = 4  # plain values: chunks start on 16-byte boundaries


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

    4. The first encodings get e1 = 0.4·f·E, f being the expected n·κ: estimated from the steps
       before, with a margin, or 1 (less for small parameters) without an estimate.
    5. What they spend, an exact expectation, travels with them (its root, fp32, per segment). The
       owner gives its own encoding what they have left of the budget, E·T - E1, from an eighth to
       three quarters of E·‖S‖².
    6. The owners' sums travel with the lengths of their wires, so all ranks know E1, E2 and T, the
       square of the mean, of each parameter. One with E1 + E2 > 1.1·E·T is added up once more, in
       fp32, and has no error at this step (`_budget.py`).

    So the expected error is at most 1.1·E at every step, whatever gradients do. n·κ is known for
    the next step without another pass over the values: 0.4·f·E·T/E1.
    Bytes per rank: 2·(n-1)/n of the encoded tensor.
    """

    name: ClassVar[str] = "scatter-reduce"

    def check(self, codec: Codec) -> None:
        if codec.side_information:
            raise ConfigError(
                "ndqsg decodes with side information, which scatter-reduce (FSDP's, too) does not "
                "have: ndqsg@nested has it, under DDP; or use dqsg"
            )

    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        n, rank = context.size, context.rank
        edges = chunk_edges(x.numel(), n)
        chunks = [x[edges[j] : edges[j + 1]] for j in range(n)]
        places = [context.inside(edges[j], edges[j + 1]) for j in range(n)]
        plain = chunks_of(no_values(x) if uncompressed is None else uncompressed, n, PLAIN_GRAIN)
        total = context.scratch.take("sum", chunks[rank].numel(), x.device, torch.float32)
        account = Account.of(codec, context, places, list(map(len, chunks)), FIRST)
        sent = {"places": places, "uncompressed": plain}
        if account is None:
            half = codec.at_share(0.5)
            scatter(chunks, half, context, total, uncompressed_out=plain[rank], **sent)
            gather(total, half, context, chunks, **sent)
            return
        first = scatter(
            chunks, codec, context, total, uncompressed_out=plain[rank], account=account, **sent
        )
        _gather_in_budget(total, codec, context, chunks, account=account, first=first, **sent)

    def cost(self, load: TensorLoad, cluster: Cluster) -> list[Task]:
        """Tasks of a bucket: those of `scatter`, then those of `gather`."""
        return [*scatter_cost(load, cluster), *gather_cost(load, cluster)]

    def mean_error(self, one: EncodingError, codec: Codec | None = None) -> float:
        """NMSE of the mean: (n-1)/n·e/(n·κ) + e'; the owner's own values are exact."""
        return (one.workers - 1) / one.workers * one.averaged + one.error_back

    def encodes_mean(self, codec: Codec) -> bool:
        return True


def scatter(
    chunks: Sequence[Tensor],
    codec: Codec,
    context: ExchangeContext,
    out: Tensor,
    *,
    places: Sequence[Sequence[Place]],
    uncompressed: Sequence[Tensor],
    uncompressed_out: Tensor,
    account: Account | None = None,
) -> Tensor:
    """out = the mean over ranks of chunk `rank`, in fp32; uncompressed_out of plain values.

    With an account, what encodings spent: E1 of each of out's segments.
    """
    n, rank, dtype = context.size, context.rank, chunks[0].dtype
    with_spent = uncompressed if account is None else account.with_room(uncompressed, range(n))
    messages = []
    for j, chunk in enumerate(chunks):
        wire, plain = None, with_spent[j]
        if j != rank and chunk.numel():
            spending = {}
            if account is not None:
                room = account.room("spent", j, out.device)
                spending = {"shares": account.shares(j), "spent": room}
            wire = encode(codec, chunk, context.key(rank, j), places[j], context, **spending)
            if spending:
                plain[uncompressed[j].numel() :].copy_(spending["spent"].sqrt())
        messages.append(Message.of(wire, plain if j != rank else plain[:0]))
    here = [0 if i == rank else out.numel() for i in range(n)]
    plain_here = [0 if i == rank else with_spent[rank].numel() for i in range(n)]
    sizes = Sizes.of(codec, here, [places[rank]] * n, dtype)
    arriving = all_to_all(messages, context, sizes, plain_here)
    out.copy_(chunks[rank]).mul_(1 / n)  # in fp32 before it is weighed
    torch.mul(uncompressed[rank], 1 / n, out=uncompressed_out)
    count, exact = with_spent[rank].numel() - uncompressed_out.numel(), torch.float64
    spent = torch.zeros(count, dtype=exact, device=out.device)
    for i, message in enumerate(arriving):
        if here[i]:
            key = context.key(i, rank)
            decode(
                codec, message.wire, out, key, places[rank], dtype, context, add=True, weight=1 / n
            )
        if plain_here[i]:
            uncompressed_out.add_(message.uncompressed[: uncompressed_out.numel()], alpha=1 / n)
            spent.add_(
                message.uncompressed[uncompressed_out.numel() :].double().square(), alpha=1 / n**2
            )
    return spent


def scatter_cost(load: TensorLoad, cluster: Cluster) -> list[Task]:
    """Every chunk to its owner, who adds.

    E((n-1)c, n-1), [X(f(n-1)),] X((n-1)(b·c/8 + h) + 4p·(n-1)/n), D((n-1)c, n-1)
    """
    links, cost = cluster.flat, load.cost
    n, others = links.ranks, links.ranks - 1
    c = load.encoded / n
    sent = others * (cost.bits_out / 8 * c + MESSAGE_BYTES) + 4 * load.plain * others / n
    adding = cluster.device.copy.seconds(2 * c) + cost.decode.seconds(others * c, others)
    return [
        Work(cost.encode.seconds(others * c, others)),
        *lengths(load, links),
        links.all_to_all.move(sent),
        Work(adding),
    ]


def gather_cost(load: TensorLoad, cluster: Cluster) -> list[Task]:
    """Every owner's chunk to all.

    E(c, 1), [X(f(n-1)),] X((n-1)(b'·c/8 + h) + 4p·(n-1)/n), D(d, n)
    """
    links, cost = cluster.flat, load.cost
    n, others = links.ranks, links.ranks - 1
    c = load.encoded / n
    sent = others * (cost.bits_back / 8 * c + MESSAGE_BYTES) + 4 * load.plain * others / n
    return [
        Work(cost.encode.seconds(c)),
        *lengths(load, links),
        links.all_to_all.move(sent),
        Work(cost.decode.seconds(load.encoded, n)),
    ]


def scatter_in_budget(
    chunks: Sequence[Tensor],
    codec: Codec,
    context: ExchangeContext,
    out: Tensor,
    *,
    places: Sequence[Sequence[Place]],
    uncompressed: Sequence[Tensor],
    uncompressed_out: Tensor,
) -> None:
    """`scatter` alone, within a codec's budget; a broken one gets the exact mean.

    What was spent reaches all ranks in a small message of its own, with a wait for it.
    """
    account = Account.of(codec, context, places, [chunk.numel() for chunk in chunks], ALONE)
    sent = {"places": places, "uncompressed": uncompressed, "uncompressed_out": uncompressed_out}
    first = scatter(chunks, codec, context, out, account=account, **sent)
    if account is not None:
        account.settle_among(first, out)
        targets = [out if j == context.rank else out[:0] for j in range(context.size)]
        with account.exact(chunks, targets):
            pass


def gather(
    mine: Tensor,
    codec: Codec,
    context: ExchangeContext,
    chunks: Sequence[Tensor],
    *,
    places: Sequence[Sequence[Place]],
    uncompressed: Sequence[Tensor],
    wire: Wire | None = None,
) -> None:
    """Every rank's `mine`, encoded once, becomes its chunk on all ranks; plain values likewise.

    `wire` is that of `mine`, where the caller has needed it before.
    """
    rank, counts = context.rank, [chunk.numel() for chunk in chunks]
    if wire is None and counts[rank]:
        wire = encode(codec, mine, context.key(rank, rank, 1), places[rank], context)
    sizes = Sizes.of(codec, counts, places, mine.dtype)
    plain = [part.numel() for part in uncompressed]
    arrived = all_gather(Message.of(wire, uncompressed[rank]), context, sizes, plain)
    _decode_all(arrived, codec, context, chunks, places, uncompressed, mine.dtype)


def _gather_in_budget(
    mine: Tensor,
    codec: Codec,
    context: ExchangeContext,
    chunks: Sequence[Tensor],
    *,
    places: Sequence[Sequence[Place]],
    uncompressed: Sequence[Tensor],
    account: Account,
    first: Tensor,
) -> None:
    """`gather`, with what the first encodings have left; broken budgets get the exact mean."""
    rank, counts = context.rank, [chunk.numel() for chunk in chunks]
    wire, numbers = None, []
    if counts[rank]:
        squares, second = account.squares(rank, mine), account.room("spent back", rank, mine.device)
        spending = {"shares": account.back(first, squares), "spent": second}
        wire = encode(codec, mine, context.key(rank, rank, 1), places[rank], context, **spending)
        numbers = [first, second, squares]
    sizes = Sizes.of(codec, counts, places, mine.dtype)
    plain = [part.numel() for part in uncompressed]
    arrived = account.all_gather(Message.of(wire, uncompressed[rank]), sizes, plain, numbers)
    with account.exact(chunks, chunks):
        _decode_all(arrived, codec, context, chunks, places, uncompressed, mine.dtype)


def _decode_all(
    arrived: Sequence[Message],
    codec: Codec,
    context: ExchangeContext,
    chunks: Sequence[Tensor],
    places: Sequence[Sequence[Place]],
    uncompressed: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Owners' messages become chunks and plain values."""
    for j, message in enumerate(arrived):
        if chunks[j].numel():
            decode(codec, message.wire, chunks[j], context.key(j, j, 1), places[j], dtype, context)
        if uncompressed[j].numel() and j != context.rank:
            uncompressed[j].copy_(message.uncompressed)
