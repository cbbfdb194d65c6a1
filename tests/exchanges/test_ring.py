"""The ring: exact sums of integers at every width, the bytes that its text promises, any group.

One set of five processes, over Gloo, runs all cases in groups of 1, 2, 3 and 5 of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import device_of, difference, kernels
from torch import Tensor

import laconic as lc
from laconic._scratch import Scratch
from laconic.comm._context import ExchangeContext, Traffic, chunks_of
from laconic.comm._transport import message_bytes
from laconic.exchanges import AllReduce, Ring, pair
from laconic.exchanges import _ring as ring
from laconic.exchanges._ring import sum_bits
from laconic.kernels import Lattice
from laconic.kernels._layout import GROUP, packed_bytes
from laconic.kernels._reference import sums as reference

Found = list[dict[str, Any]]

GROUPS = ((3,), (1, 4), (1, 2, 4), (0, 1, 2, 3, 4))
LONG = 5 * 3 * ring.PIECE_VALUES + 129  # at least two pieces a chunk, whatever the group
# codec, values, dtype, pieces
CASES = (
    ("global:bits=4", 5000, "float32", 4),
    ("global:bits=4", LONG, "float32", 3),
    ("global:bits=4,levels=1", 700, "float32", 1),
    ("global:bits=8", LONG, "float32", 2),
    ("global:bits=8", 1, "float32", 4),
    ("global:bits=8", 4, "bfloat16", 4),
    ("global:bits=8", 513, "float16", 4),
    ("global:bits=8,levels=31,norm=l2", 3000, "float32", 4),
    ("global:bits=32", 3000, "float32", 4),
    ("global:bits=32,norm=2/inf", LONG, "bfloat16", 4),
)


def gradient(rank: int, numel: int, dtype: torch.dtype, step: int = 0) -> Tensor:
    """Half of it shared by all ranks."""
    shared, own = (torch.Generator().manual_seed(7 * step + seed) for seed in (0, 1 + rank))
    mixed = torch.randn(numel, generator=shared) + torch.randn(numel, generator=own)
    return mixed.to(dtype)


def expected(codec: Any, xs: list[Tensor], context: ExchangeContext, pieces: int) -> Tensor:
    """Δ·Σq/n in one process: integers of the codec's own decoding, added in 64 bits."""
    n, levels = len(xs), codec.levels_for(1)
    norm = codec.global_norm(torch.cat([codec.local_norm(x) for x in xs]))
    total = torch.zeros(xs[0].numel(), dtype=torch.int64)
    for i, x in enumerate(xs):
        for j, (chunk, into) in enumerate(zip(chunks_of(x, n), chunks_of(total, n), strict=True)):
            parts, sums = (chunks_of(one, pieces, ring.PIECE_VALUES) for one in (chunk, into))
            for p, part in enumerate(parts):
                if part.numel():
                    wire = codec.encode(part, context.key(i, j * pieces + p), norm=norm, workers=1)
                    value = codec.decode(wire, out=torch.empty(part.numel()))
                    sums[p] += (value.double() * levels / norm.double()).round().long()
    step = (norm * float(np.float32(1 / levels))) * float(np.float32(1 / n))
    return (total.to(torch.float32) * step).to(xs[0].dtype)


def promised(numel: int, levels: int, n: int, pieces: int, rank: int) -> int:
    """The docstring's equation, with every piece in whole groups and a frame, and the norms."""
    chunks = [chunks_of(c, pieces, ring.PIECE_VALUES) for c in chunks_of(torch.empty(numel), n)]
    sent = (n - 1) * message_bytes(4 * (n + 3), 0)  # with the plain values
    for hop in range(2 * n - 2):
        width = sum_bits(levels, min(hop + 1, n))
        pieces_ = [packed_bytes(p.numel(), width) for p in chunks[(rank - 1 - hop) % n]]
        sent += sum(message_bytes(size, 0) for size in pieces_)
    return sent


def everywhere(rank: int) -> dict[int, Any]:
    return ranks.in_groups(outcomes, GROUPS, rank)


def outcomes(group: Any) -> dict[str, Any]:
    n, rank, space = group.size(), group.rank(), Scratch()
    found: dict[str, Any] = {"cases": [], "rest": []}
    for number, (text, numel, dtype, pieces) in enumerate(CASES):
        codec: Any = lc.codec(text)
        xs = [gradient(i, numel, getattr(torch, dtype)) for i in range(n)]
        context = ExchangeContext(
            group=group, step=number, tensor=2, scratch=space, traffic=Traffic()
        )
        x, uncompressed = xs[rank].clone(), torch.full((3,), float(rank))
        Ring(pieces=pieces).mean(x, codec, context, uncompressed)
        want = expected(codec, xs, context, pieces)
        sent = context.traffic.sent_bytes
        bytes_ = promised(numel, codec.levels_for(1), n, pieces, rank)
        found["cases"].append((difference(x, want), sent, bytes_))
        found["rest"].append(uncompressed.tolist())
    found["nothing"] = empty(group, space)
    found["errors"] = errors(group, space)
    found["kept"] = kept(group)
    found["ahead"] = pieces_ahead(group)
    return found


def empty(group: Any, space: Scratch) -> bool:
    x, uncompressed = torch.empty(0), torch.full((2,), float(group.rank()))
    Ring().mean(x, lc.codec("global"), ExchangeContext(group=group, scratch=space), uncompressed)
    return bool((uncompressed == (group.size() - 1) / 2).all())


def errors(group: Any, space: Scratch) -> tuple[float, float]:
    """Squared error of the ring and of allreduce, both at 8 bits."""
    n, numel = group.size(), 20_000
    exact = torch.stack([gradient(i, numel, torch.float64) for i in range(n)]).mean(0)
    found = []
    for way in (Ring(), AllReduce()):
        x = gradient(group.rank(), numel, torch.float32)
        way.mean(x, lc.codec("global:bits=8"), ExchangeContext(group=group, scratch=space))
        found.append(float((x.double() - exact).square().sum() / exact.square().sum()))
    return found[0], found[1]


def kept(group: Any) -> bool:
    """Whether a second call makes do with the buffers of the first."""
    space, seen = Scratch(), []
    for step in range(2):
        x = gradient(group.rank(), LONG, torch.float32)
        Ring().mean(
            x, lc.codec("global:bits=4"), ExchangeContext(group=group, step=step, scratch=space)
        )
        seen.append({name: kept.data_ptr() for name, kept in space._kept.items()})
    return seen[0] == seen[1]


def pieces_ahead(group: Any) -> list[int]:
    """How many messages are under way whenever a sum is made of one that came."""
    sums: Any = import_module("laconic.kernels._numba")
    start, add, seen, under_way = dist.batch_isend_irecv, sums.add_codes, [], 0

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            nonlocal under_way
            self.work.wait()
            under_way -= 1

    def started(moves: Any) -> list[Watched]:
        nonlocal under_way
        under_way += len(moves)
        return [Watched(work) for work in start(moves)]

    def added(own: Tensor, arrived: Tensor | None, *args: Any, **options: Any) -> None:
        if arrived is not None:
            seen.append(under_way)
        add(own, arrived, *args, **options)

    dist.batch_isend_irecv, sums.add_codes = started, added
    try:
        x = torch.ones(group.size() * 4 * ring.PIECE_VALUES)
        Ring(pieces=4).mean(x, lc.codec("global:bits=4"), ExchangeContext(group=group))
    finally:
        dist.batch_isend_irecv, sums.add_codes = start, add
    return seen


found = ranks.shared_in_groups(everywhere, outcomes, GROUPS)


def test_the_result_is_the_exact_sum_of_integers_on_every_rank(found: Found) -> None:
    for one in found:
        for case, (wrong, _, _) in zip(CASES, one["cases"], strict=True):
            assert not wrong, case


def test_a_rank_sends_the_bytes_of_the_equation(found: Found) -> None:
    for one in found:
        for case, (_, sent, bytes_) in zip(CASES, one["cases"], strict=True):
            assert sent == bytes_, case


def test_plain_values_become_their_mean(found: Found) -> None:
    for one in found:
        assert one["nothing"]
        for uncompressed in one["rest"]:
            assert uncompressed == pytest.approx([(len(found) - 1) / 2] * 3)


def test_the_error_is_that_of_all_levels(found: Found) -> None:
    """allreduce at 8 bits has s = 127 // n levels; a squared error is worth 1/s²."""
    for one in found:
        fine, coarse = one["errors"]
        ratio = (127 // (127 // len(found))) ** 2
        assert 0.7 * ratio < coarse / fine < 1.4 * ratio


def test_buffers_are_made_once(found: Found) -> None:
    assert all(one["kept"] for one in found)


def test_pieces_travel_while_one_is_added(found: Found) -> None:
    for one in found:
        assert len(one["ahead"]) == 4 * (len(found) - 1)
        assert all(count == 2 * 3 for count in one["ahead"])  # three other pieces, both ways


@pytest.mark.parametrize(
    ("levels", "widths"), [(7, [4, 5, 6, 6, 7, 7, 7, 7, 7, 8]), (1, [2, 3, 3, 4]), (127, [8, 9])]
)
def test_widths(levels: int, widths: list[int]) -> None:
    for workers, width in enumerate(widths, 1):
        assert sum_bits(levels, workers) == width
        assert 2 * workers * levels < 1 << width  # it holds all sums
        assert 2 * workers * levels >= 1 << (width - 1)  # one bit fewer would not


@pytest.mark.parametrize("n", range(1, 100))
def test_never_more_bits_than_allreduce_at_its_levels(n: int) -> None:
    for bits in (4, 8):
        levels = ((1 << (bits - 1)) - 1) // n
        assert levels == 0 or sum_bits(levels, n) <= bits


@pytest.mark.parametrize("pieces", [0, -1, 65, 2.0, True, "4"])
def test_pieces_are_checked(pieces: Any) -> None:
    with pytest.raises(lc.ConfigError, match="pieces must be an integer from 1 to 64"):
        Ring(pieces=pieces)


def test_ranks_that_compare_texts_see_different_pieces() -> None:
    assert str(Ring()) == "ring" == str(pair("global:bits=4@ring")[1])
    assert str(Ring(pieces=2)) != str(Ring(pieces=3))


def test_sums_beyond_31_bits_are_refused() -> None:
    class Many:
        def size(self) -> int:
            return 1 << 15  # 2·n·s takes 31 bits

        def rank(self) -> int:
            return 0

    context: Any = ExchangeContext(group=Many())  # pyright: ignore[reportArgumentType]
    norm = torch.ones(1)
    ring._Round(torch.ones(1), lc.codec("global:bits=32,levels=32767"), norm, context, 1)
    Many.size = lambda self: 1 << 16  # pyright: ignore
    with pytest.raises(lc.ConfigError, match="fewer levels="):
        ring._Round(torch.ones(1), lc.codec("global:bits=32,levels=32767"), norm, context, 1)


# --- kernels ---


def packed_as_documented(c: Tensor, width: int) -> Tensor:
    """A plane of p bits holds element j in byte j mod 16p, at bit p·(j div 16p)."""
    rows = c.view(-1, GROUP).tolist()
    out = []
    for row in rows:
        low = 0
        for p in [8] * (width // 8) + [p for p in (4, 2, 1) if width & p]:
            plane = [0] * (16 * p)
            for j, value in enumerate(row):
                plane[j % (16 * p)] |= (value >> low & ((1 << p) - 1)) << p * (j // (16 * p))
            out += plane
            low += p
    return torch.tensor(out, dtype=torch.uint8)


@pytest.mark.parametrize("numel", [1, 128, 1300])
@pytest.mark.parametrize(
    ("bits", "levels"), [(4, 7), (4, 1), (8, 127), (8, 20), (32, 32767), (32, 300)]
)
@pytest.mark.parametrize("name", ["reference", "numba", "triton"])
def test_sums_are_packed_as_documented(name: str, bits: int, levels: int, numel: int) -> None:
    if kernels(name) is None:
        pytest.skip(f"the {name} kernels cannot be loaded here (is {name} installed?)")
    sums, device = import_module(f"laconic.kernels._{name}.sums"), device_of(name)
    codec = lc.codec(f"global:bits={bits},levels={levels}")
    exact = torch.zeros(-(-numel // GROUP) * GROUP, dtype=torch.int64)
    before = None
    for k in range(1, 6):
        # every rank near the top: sums reach the ends of their range
        x = torch.where(torch.arange(numel) % 3 == k % 2, -1.0, 1.0)
        x[::5] = 0.3
        wire = codec.encode(x, lc.Key(rank=k), norm=1.0, workers=1)
        exact += levels
        exact[:numel] += (codec.decode(wire).double() * levels).round().long()
        width, wider = sum_bits(levels, k - 1), sum_bits(levels, k)
        out = torch.empty(packed_bytes(numel, wider), dtype=torch.uint8, device=device)
        sums.add_codes(
            wire.payload.to(device),
            before,
            out,
            Lattice(0, levels, bits),
            numel=numel,
            width=width,
            wider=wider,
        )
        assert torch.equal(out.cpu(), packed_as_documented(exact, wider)), k
        q = torch.empty(numel, dtype=torch.int32, device=device)
        sums.read_sums(out, q, width=wider, offset=k * levels)
        assert torch.equal(q.cpu().long(), exact[:numel] - k * levels), k
        before = out


def test_all_byte_patterns_are_read() -> None:
    """No bit of a message is ignored."""
    numba = import_module("laconic.kernels._numba.sums")
    generator = torch.Generator().manual_seed(0)
    for width in range(2, 32):
        data = torch.randint(0, 256, (3 * 16 * width,), generator=generator).to(torch.uint8)
        got, want = (torch.empty(3 * GROUP, dtype=torch.int32) for _ in range(2))
        numba.read_sums(data, got, width=width, offset=5)
        reference.read_sums(data, want, width=width, offset=5)
        assert torch.equal(got, want)
        assert torch.equal(packed_as_documented(want.long() + 5, width), data)
