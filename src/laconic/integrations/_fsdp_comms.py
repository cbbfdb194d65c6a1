"""FSDP2's three collectives with encoded messages, each bound to one sharded module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._wire import DTYPES
from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges import Exchange
from laconic.exchanges._scatter_reduce import gather, scatter_in_budget
from laconic.integrations._fsdp_units import ShardLayout, SlotBuffers, Unit, places
from laconic.sharding._fsdp_shards import Done, InPlaceOfReplicas


class _FSDPBuffers:
    """FSDP's collectives bring their memory along."""

    plain: Any

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP's buffers, as without us."""
        return self.plain.allocate(size, dtype=dtype, device=device)


class ReduceScatter(_FSDPBuffers):
    """Gradients inside a shard group: the first half of scatter-reduce.

        shard_j = Σ_i Q(x_i)_j / n, with rank j's own x_j exact, in fp32

    Every rank encodes each other rank's shard once, one message to each; owners decode and add in
    order of ranks. One encoding: with error e of each wire, the error of the mean is
    e·Σ_{i≠j}‖x_i‖²/n², about e/(n·κ) of ‖mean‖². A codec's budget E is kept as in scatter-reduce:
    e = 0.9·f·E, f being the n·κ to count on. What was spent reaches all ranks in a small message of
    its own (there is no second half to carry it), and a parameter that has broken its budget is
    added up once more. Parameters that are not encoded travel in the same messages.
    """

    def __init__(self, unit: Unit, codecs: Mapping[str, Codec], plain: Any) -> None:
        self.unit, self.codecs, self.plain = unit, codecs, plain

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """FSDP's contract; the result is ordered in the current stream, so there is no Work."""
        unit, run, n = self.unit, self.unit.run, group.size()
        step, layout = unit.reductions, unit.gradients(output_tensor.numel())
        unit.reductions += 1
        ring = (n - 1) / n * input_tensor.numel() * input_tensor.element_size()
        with run.exchanging(ring):
            if step < run.warmup_steps or not layout.coded or output_tensor.dtype not in DTYPES:
                with run.inside.traffic.sending(ring):
                    return self.plain(output_tensor, input_tensor, group, op, async_op)
            self._reduce(output_tensor, list(input_tensor.view(n, -1)), group, layout, step)
            if (scale := factor(op, n)) != 1:
                output_tensor.mul_(scale)

    def _reduce(
        self,
        out: Tensor,
        shards: list[Tensor],
        group: dist.ProcessGroup,
        layout: ShardLayout,
        step: int,
    ) -> None:
        """The mean over ranks of this rank's shard."""
        unit, scratch, rank = self.unit, self.unit.run.inside.scratch, group.rank()
        ranks, plain = range(len(shards)), layout.plain
        for choice, slots in layout.coded:
            coded = SlotBuffers(shards, ranks, slots, out.dtype, scratch, "coded")
            uncompressed = SlotBuffers(shards, ranks, plain, torch.float32, scratch, "plain")
            coded_mean = SlotBuffers([out], [rank], slots, torch.float32, scratch, "coded mean")
            uncompressed_mean = SlotBuffers(
                [out], [rank], plain, torch.float32, scratch, "plain mean"
            )
            coded.load()
            uncompressed.load()
            scatter_in_budget(
                coded.parts,
                self.codecs[choice],
                unit.context(unit.run.inside, group, slots, step, unit.replica),
                coded_mean.parts[0],
                places=[places(slots, j) for j in ranks],
                uncompressed=uncompressed.parts,
                uncompressed_out=uncompressed_mean.parts[0],
            )
            coded_mean.store()
            uncompressed_mean.store()
            plain = ()  # they have travelled


class AllGather(_FSDPBuffers):
    """Weights inside a shard group: every rank's shard, encoded once, decoded by all ranks.

    The owner decodes its own wire, too, so all ranks compute with the same weights; optimizer and
    checkpoints keep the exact ones. Keys have the number of reductions so far: both gathers of a
    step, before forward and before backward, decode to the same bits.

    Markov et al., QSDP, ICML 2023.
    """

    def __init__(self, unit: Unit, codec: Codec, plain: Any) -> None:
        self.unit, self.codec, self.plain = unit, codec, plain

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """FSDP's contract: input_tensor is this rank's part of output_tensor."""
        unit, run, n = self.unit, self.unit.run, group.size()
        step, layout = unit.reductions + unit.means, unit.weights(input_tensor.numel())
        ring = (n - 1) * input_tensor.numel() * input_tensor.element_size()
        # a smaller group gathers in backward what was decoded in forward: exact, or it would differ
        strange = n != unit.shards or output_tensor.dtype not in DTYPES
        with run.exchanging(ring):
            if step < run.warmup_steps or not layout.coded or strange:
                with run.inside.traffic.sending(ring):
                    return self.plain(output_tensor, input_tensor, group, async_op)
            self._gather(list(output_tensor.view(n, -1)), group, layout, step)

    def _gather(
        self, shards: list[Tensor], group: dist.ProcessGroup, layout: ShardLayout, step: int
    ) -> None:
        """All shards from every rank's own."""
        unit, scratch, rank = self.unit, self.unit.run.inside.scratch, group.rank()
        ranks = range(len(shards))
        slots = tuple(slot for _, some in layout.coded for slot in some)
        uncompressed = SlotBuffers(shards, ranks, layout.plain, torch.float32, scratch, "plain")
        coded = SlotBuffers(shards, ranks, slots, shards[0].dtype, scratch, "coded")
        uncompressed.load(rank)
        coded.load(rank)
        gather(
            coded.parts[rank],
            self.codec,
            unit.context(unit.run.inside, group, slots, step, unit.replicas + unit.shards),
            coded.parts,
            places=[places(slots, j) for j in ranks],
            uncompressed=uncompressed.parts,
        )
        uncompressed.store()
        coded.store()


class Replicas(InPlaceOfReplicas):
    """The group between replicas (HSDP): its all-reduce is an exchange of encoded shards."""

    def __init__(
        self,
        unit: Unit,
        pairs: Mapping[str, tuple[Codec, Exchange]],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(group, group.rank(), group.size())
        self.unit, self.pairs = unit, pairs

    def allreduce(  # pyright: ignore[reportIncompatibleMethodOverride] (one of its three forms)
        self, tensors: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        """What dist.all_reduce calls."""
        unit, run, n = self.unit, self.unit.run, self.group.size()
        (out,), op = tensors, opts.reduceOp
        step, layout = unit.means, unit.gradients(out.numel()).without_empty(unit.shard)
        unit.means += 1
        ring = 2 * (n - 1) / n * out.numel() * out.element_size()
        with run.exchanging(ring):
            if step < run.warmup_steps or not layout.coded or out.dtype not in DTYPES:
                with run.inside.traffic.sending(ring):
                    dist.all_reduce(out, op=op, group=self.group)
            else:
                self._mean(out, layout, step)
                if (scale := factor(op, n)) != 1:
                    out.mul_(scale)
        return Done()

    def _mean(self, out: Tensor, layout: ShardLayout, step: int) -> None:
        """The mean over replicas of this shard, in place."""
        unit, scratch, own, plain = (
            self.unit,
            self.unit.run.inside.scratch,
            self.unit.shard,
            layout.plain,
        )
        for choice, slots in layout.coded:
            codec, exchange = self.pairs[choice]
            coded = SlotBuffers([out], [own], slots, out.dtype, scratch, "coded")
            uncompressed = SlotBuffers([out], [own], plain, torch.float32, scratch, "plain")
            coded.load()
            uncompressed.load()
            context = unit.context(
                unit.run.across,
                self.group,
                slots,
                step,
                unit.replicas + own,
                places(slots, own),
            )
            exchange.mean(coded.parts[0], codec, context, uncompressed.parts[0] if plain else None)
            coded.store()
            uncompressed.store()
            plain = ()  # they have travelled


def factor(op: Any, ranks: int) -> float:
    """By how much the result that FSDP asks for exceeds the mean."""
    if op == dist.ReduceOp.AVG:
        return 1.0
    if op == dist.ReduceOp.SUM:
        return float(ranks)
    if op == dist.ReduceOp.PREMUL_SUM:
        return ranks * op.__getstate__()[1]
    raise ConfigError(f"gradients are added or averaged, not reduced by {op}")
