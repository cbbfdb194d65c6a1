"""Rules about several wires: sums, residuals, exchanges and lc.compress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from laconic._key import Key
from laconic.codecs import Codec, Residuals
from laconic.comm._context import ExchangeContext, ExchangeMemory
from laconic.exchanges import pair
from laconic.testing._subject import Subject, broken, same_bits

_PATIENCE = timedelta(seconds=60)
_WORKERS = 3
_STEPS = 16
_ROUNDING = 1e-5


def sums(subject: Subject) -> None:
    """decode_sum of added payloads is the mean of what each decodes to."""
    own: Any = subject.fresh()
    if not own.summable:
        return
    keys = [Key(seed=3, rank=rank) for rank in range(_WORKERS)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        xs = [subject.gaussian(1000, seed=rank, dtype=dtype) for rank in range(_WORKERS)]
        norm = None
        if own.shared_norm:
            norm = own.global_norm(torch.cat([own.local_norm(x).view(1) for x in xs]))
        wires = [
            own.encode(x, key, norm=norm, workers=_WORKERS) for x, key in zip(xs, keys, strict=True)
        ]
        total = wires[0].payload.clone()
        for wire in wires[1:]:
            total += wire.payload
        got = own.decode_sum(total, keys, norm=norm, shape=xs[0].shape, dtype=dtype)
        each = [
            subject.decode(own, wire, x, out=x.float()) for wire, x in zip(wires, xs, strict=True)
        ]
        want = torch.stack(each).double().mean(0)
        kind = total.dtype if total.dtype.is_floating_point else torch.float32
        eps = max(torch.finfo(kind).eps, torch.finfo(dtype).eps)
        if ((got.double() - want).abs() > 4 * eps * want.abs().max()).any():
            broken(
                own,
                "the decoded sum of payloads is the mean of what the wires decode to",
                f"for {_WORKERS} wires of {dtype} values it is not",
                "Leave room for the sum (workers=), and divide by the number of keys once",
            )


def residuals(subject: Subject) -> None:
    """What was not sent is in the residuals, which are saved and loaded."""
    own = subject.fresh()
    if not own.residuals:
        return
    x, kept = subject.gaussian(1000), Residuals()
    total = torch.zeros_like(x)
    for step in range(3):
        wire = own.encode(x, Key(step=step), residuals=kept)
        total += subject.decode(own, wire, x)
    saved = kept.state_dict()
    owed = saved.get("0,0", torch.zeros_like(x))  # of tensor 0 in phase 0
    if (total + owed - 3 * x).abs().max() > _ROUNDING * x.abs().max():
        broken(
            own,
            "what was not sent is in the residuals",
            "what was decoded at three steps, and what is left, are not the sum of what was given",
            "Add residuals.of(place, key.phase, x.device) to x, and leave there what was lost",
        )
    again = Residuals()
    again.load_state_dict(saved)
    following = [own.encode(x, Key(step=3), residuals=one).data.clone() for one in (kept, again)]
    if not torch.equal(*following):
        what = "with residuals from a state_dict it encodes otherwise"
        broken(own, "a run resumes from its residuals", what, "Keep nothing elsewhere")


def exchange(subject: Subject) -> None:
    """In the exchange that lc.compress would take: the same bits everywhere, and the mean."""
    own, way = pair(subject.fresh())
    group = dist.group.WORLD
    assert group is not None
    way.prepare(group)
    mine = subject.gaussian(5000, seed=dist.get_rank())
    mean = mine.clone()
    dist.all_reduce(mean)
    mean /= group.size()
    kept = ExchangeMemory()
    found = []
    for step in range(_STEPS):
        x = mine.clone()
        way.mean(x, own, ExchangeContext(group=group, step=step, memory=kept))
        _agreed(own, x, f"{way} at step {step}")
        found.append(x.double())
    once = float((found[0] - mean).square().sum())
    if once > 1e-9 * float(mean.square().sum()) and own.unbiased and not subject.lossless:
        average = torch.stack(found).mean(0)
        often = float((average - mean).square().sum())
        if often > once / 4:
            broken(
                own,
                "errors average out in an exchange",
                f"the mean of {_STEPS} steps by {way} is no better than one step",
                "Draw from the whole key: the step, the rank and the phase are in it",
            )


def compressed(subject: Subject) -> None:
    """Through lc.compress, under DistributedDataParallel."""
    from laconic.integrations import compress

    own = subject.fresh()
    model = nn.Linear(200, 100)  # enough values to be worth encoding
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            value.copy_(subject.gaussian(*value.shape, seed=number).cpu() / 10)
    ddp = DistributedDataParallel(model.to(subject.device))
    compress(ddp, own, timeout_s=_PATIENCE.total_seconds(), even_alone=True)
    for step in range(3):
        x = subject.gaussian(32, 200, seed=100 + step + 10 * dist.get_rank())
        loss = ddp(x).square().mean()
        (plain,) = torch.autograd.grad(model(x).square().mean(), [model.weight])
        ddp.zero_grad()
        loss.backward()
        gradient = model.weight.grad
        assert gradient is not None
        _agreed(own, gradient, f"lc.compress at step {step}")
        if float((gradient * plain).sum()) <= 0:
            broken(
                own,
                "a compressed gradient points where the gradient does",
                f"under lc.compress, step {step}, it does not",
                "Encode what is given, and decode the whole of it",
            )


def _agreed(own: Codec, x: Tensor, where: str) -> None:
    x = x.detach().contiguous()
    if not torch.isfinite(x).all():
        broken(own, "finite gradients stay finite", f"by {where} they do not", "")
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    if not all(same_bits(one, x) for one in every):
        broken(
            own,
            "all ranks end with the same bits",
            f"by {where} they do not",
            "Let decoding depend on the bytes and the key alone",
        )


@contextmanager
def ranks() -> Iterator[None]:
    """The process group that there is, or one of this process alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=_PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()
