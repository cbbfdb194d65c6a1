"""Messages between ranks: nothing that is wrong is used, and the error says who sent it.

Most of it runs on ranks that are threads (`memory_ranks`), what Gloo itself does on processes.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from memory_ranks import MemoryGroup, memory_groups, on_all
from torch import Tensor

import laconic as lc
from laconic.comm import _frame
from laconic.comm._agreement import compare, digest
from laconic.comm._context import ExchangeContext, Sizes
from laconic.comm._frame import FRAME_BYTES, Kind, Name, announce, announced, opened, seal
from laconic.comm._sums import gather_numbers, plain_mean, sum_in_place
from laconic.comm._transport import (
    Message,
    all_to_all,
    all_to_all_in_turn,
    checked_sizes,
    no_values,
)
from laconic.exchanges import pair

RANKS, VALUES, STEP = 3, 3000, 18
FLIPS = 500
PAIRS = (
    "none@allreduce",
    "bf16@allreduce",
    "global:bits=4@allreduce",
    "global:bits=8@allreduce",
    "global:bits=32@allreduce",
    "dqsg:bits=4@scatter-reduce",
    "qsgd:bits=3@scatter-reduce",
    "ecdq:error=0.05@scatter-reduce",
    "feedback(qsgd-topk)@scatter-reduce",
    "none@scatter-reduce",
    "dqsg:bits=4@allgather",
    "ecdq:error=0.05@allgather",
    "global:bits=4@ring",
    "global-exp:bits=8@tree",
    "global:levels=127,norm=l2,coder=elias@sparse",
    "ndqsg@nested",
    "rotate(dqsg:bits=4)@scatter-reduce",
)

Arrived = Callable[[Tensor, int, ExchangeContext], None]


def gradient(rank: int, numel: int = VALUES) -> Tensor:
    common = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    return common + 0.3 * torch.randn(numel, generator=torch.Generator().manual_seed(1 + rank))


def run(text: str, context: Callable[[MemoryGroup], ExchangeContext] | None = None) -> list[Any]:
    """Every rank's mean and plain values, or its error."""

    def work(group: MemoryGroup) -> Tensor:
        codec, way = pair(text)
        x, uncompressed = gradient(group.place), torch.arange(40.0) * (group.place + 1)
        own = (
            ExchangeContext(group=group, step=STEP, tensor=3) if context is None else context(group)
        )
        way.mean(x, codec, own, uncompressed)
        return torch.cat([x, uncompressed])

    with memory_groups(RANKS) as groups:
        return on_all(groups, work)


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Callable[[Arrived], None]:
    """Puts a function where messages arrive."""
    return lambda function: monkeypatch.setattr(_frame, "arrived", function)


class Flip:
    """Flips one bit in one message, or only counts messages: by the rank that receives them."""

    def __init__(self, target: tuple[int, int] | None = None, bit: int = 0) -> None:
        self.target, self.bit = target, bit
        self.sizes: dict[tuple[int, int], int] = {}
        self.senders: dict[tuple[int, int], int] = {}
        self._count: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __call__(self, data: Tensor, sender: int, context: ExchangeContext) -> None:
        with self._lock:
            where = context.rank, self._count[context.rank]
            self._count[context.rank] += 1
            self.sizes[where], self.senders[where] = data.numel(), sender
        if where == self.target:
            data[self.bit // 8] ^= 1 << self.bit % 8


def flips(text: str) -> list[tuple[tuple[int, int], int]]:
    """Random bits of random messages, the same ones in every run."""
    seen = Flip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_frame, "arrived", seen)
        run(text)
    chance = random.Random(text)
    messages = sorted(seen.sizes)
    chosen = [chance.choice(messages) for _ in range(-(-FLIPS // len(PAIRS)))]
    return [(where, chance.randrange(8 * seen.sizes[where])) for where in chosen]


@pytest.mark.parametrize("text", PAIRS)
def test_a_flipped_bit_is_found_wherever_it_is(text: str, tap: Callable[[Arrived], None]) -> None:
    """500 single bits in all: whoever received one says so, and nobody ends with another mean."""
    clean = run(text)
    assert all(isinstance(one, Tensor) for one in clean), clean
    for where, bit in flips(text):
        fault = Flip(where, bit)
        tap(fault)
        found = run(text)
        receiver, sender = where[0], fault.senders[where]
        error = found[receiver]
        assert isinstance(error, lc.WireError), (where, bit, error)
        assert f"step {STEP}" in str(error)
        if sender != receiver:  # else it was inside of the backend's sum
            assert f"rank {sender}" in str(error)
        for rank, one in enumerate(found):
            lost = isinstance(one, lc.WireError | lc.LostError)
            assert lost or torch.equal(one, clean[rank]), (where, bit, one)


@pytest.mark.parametrize("verify", ["sum", "none", "auto"])
@pytest.mark.parametrize("text", PAIRS)
def test_check_sums_change_no_result(text: str, verify: str) -> None:
    found = run(
        text, lambda group: ExchangeContext(group=group, step=STEP, tensor=3, verify=verify)
    )
    assert all(torch.equal(one, found[0]) for one in found)


def test_without_check_sums_frames_are_checked_all_the_same(
    tap: Callable[[Arrived], None],
) -> None:
    def context(group: MemoryGroup) -> ExchangeContext:
        return ExchangeContext(group=group, step=STEP, verify="none")

    for bit in range(8 * FRAME_BYTES):
        tap(Flip((1, 0), bit))
        assert isinstance(run("dqsg:bits=4@scatter-reduce", context)[1], lc.WireError)
    tap(Flip((1, 0), 8 * FRAME_BYTES + 8 * 64))
    assert isinstance(run("dqsg:bits=4@scatter-reduce", context)[1], Tensor)  # as is documented


def test_verify_is_one_of_three() -> None:
    with memory_groups(1) as (group,), pytest.raises(lc.ConfigError, match="auto, sum, none"):
        ExchangeContext(group=group, verify="crc")


@pytest.mark.parametrize("text", [one for one in PAIRS if one != "bf16@allreduce"])
def test_a_rank_at_another_step_is_named(text: str) -> None:
    """It ran backward once more than the others."""

    def context(group: MemoryGroup) -> ExchangeContext:
        return ExchangeContext(group=group, step=STEP - (group.place == 2), tensor=3)

    found = run(text, context)
    assert all(isinstance(one, lc.LaconicError) for one in found), found
    said = [str(one) for one in found[:2] if isinstance(one, lc.WireError)]
    assert any(f"rank 2 sent step {STEP - 1}, this rank is at step {STEP}" in one for one in said)


def test_another_tensor_is_named() -> None:
    def context(group: MemoryGroup) -> ExchangeContext:
        return ExchangeContext(group=group, step=STEP, tensor=5 if group.place == 1 else 3)

    found = run("dqsg:bits=4@scatter-reduce", context)
    assert any("rank 1 sent" in str(one) and "tensor 5" in str(one) for one in found)


def test_a_shorter_message_is_refused() -> None:
    """Gloo takes it as whole, and what the buffer held before stands in for the rest."""

    def work(group: MemoryGroup) -> Any:
        context = ExchangeContext(group=group, step=STEP)
        counts = [0] * RANKS
        for length in (6400, 6400 if group.place != 1 else 320):
            data = torch.full((length,), group.place, dtype=torch.uint8)
            sizes = Sizes((6400,) * RANKS, known=True)
            every = [Message(data, no_values(data))] * RANKS
            # what a rank sends itself is as long as what it awaits
            every[group.place] = Message(data.new_zeros(6400), no_values(data))
            all_to_all(every, context, sizes, counts)

    with memory_groups(RANKS) as groups:
        found = on_all(groups, work)
    assert "rank 1 sent 320 bytes" in str(found[0]) and "6400 were awaited" in str(found[0])
    assert isinstance(found[2], lc.LaconicError)


@pytest.mark.parametrize("kept", [0, 4, 15, FRAME_BYTES, 200, 527])
def test_a_message_of_which_the_end_is_missing_is_damaged(kept: int) -> None:
    """What was there before is the message before: of the same length, and one step older."""
    with memory_groups(2) as groups:
        context, name = ExchangeContext(group=groups[0], step=STEP), Name(Kind.ALL_TO_ALL, 1, 0)
        old, new = (torch.randint(256, (528,), dtype=torch.uint8) for _ in range(2))
        seal(old, replace(context, step=STEP - 1), name)
        seal(new, context, name)
        old[:kept] = new[:kept]
        with pytest.raises(lc.WireError, match="rank 1"):
            opened(old, context, name)
        assert opened(new, context, name).data_ptr() == new.data_ptr() + FRAME_BYTES


def test_every_bit_of_a_message_counts() -> None:
    with memory_groups(2) as groups:
        context = ExchangeContext(group=groups[0], seed=3, step=STEP)
        name = Name(Kind.ALL_GATHER, 1)
        data = torch.randint(256, (FRAME_BYTES + 64,), dtype=torch.uint8)
        seal(data, context, name)
        for bit in range(8 * data.numel()):
            wrong = data.clone()
            wrong[bit // 8] ^= 1 << bit % 8
            with pytest.raises(lc.WireError):
                opened(wrong, context, name)
        for other in (
            Name(Kind.ALL_TO_ALL, 1),
            Name(Kind.ALL_GATHER, 0),
            Name(Kind.ALL_GATHER, 1, 1),
        ):
            with pytest.raises(lc.WireError):
                opened(data.clone(), context, other)
        for change in ({"seed": 4}, {"tensor": 1 << 16}, {"first_chunk": 1}):
            with pytest.raises(lc.WireError):
                opened(data.clone(), replace(context, **change), name)


def test_lengths_travel_in_frames() -> None:
    with memory_groups(2) as groups:
        context, name = ExchangeContext(group=groups[0], step=STEP), Name(Kind.SIZES, 1)
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        announce(1 << 33, frame, context, name)
        assert announced(frame, context, name) == 1 << 33
        for bit in range(8 * FRAME_BYTES):
            wrong = frame.clone()
            wrong[bit // 8] ^= 1 << bit % 8
            with pytest.raises(lc.WireError, match="rank 1"):
                announced(wrong, context, name)
        for size in (1 << 40, 6):
            with pytest.raises(ValueError, match="split"):
                announce(size, frame, context, name)


def test_a_length_that_no_encoder_announces_is_refused() -> None:
    """Posted, a receive for a shorter message than comes would end the process inside Gloo."""
    codec = lc.codec("ecdq")
    sizes = Sizes.of(codec, [9000, 0], [[], []], torch.float32)
    assert sizes.smallest[0] > 64 and sizes.smallest[1] == 0
    assert codec.encode(torch.zeros(9000), lc.Key()).nbytes >= sizes.smallest[0]
    checked_sizes([sizes.smallest[0], 0], sizes)
    with pytest.raises(lc.WireError, match="rank 0 announced"):
        checked_sizes([sizes.smallest[0] - 4, 0], sizes)


CODECS = ("none", "fp16", "bf16", "qsgd:bits=4", "dqsg:bits=3,block=100", "ndqsg", "global",
          "global-exp", "qsgd-topk", "ecdq", "ecdq:coder=rans", "rotate(dqsg:bits=4)",
          "feedback(qsgd-topk)", "feedback(ecdq:error=0.5)", "rotate(ecdq)",
          "dqsg:bits=4,coder=elias", "ndqsg:levels=7,coder=bitmap")  # fmt: skip


@pytest.mark.parametrize("text", CODECS)
def test_no_bytes_make_parse_or_decode_fail_otherwise(text: str) -> None:
    """Cut, longer, random, and headers of which any field is another with a good check."""
    x, key, chance = gradient(0, 700), lc.Key(step=4), random.Random(text)
    codec = lc.codec(text)
    good = codec.encode(x, key).data.clone()
    side: dict[str, Any] = {"side": x} if codec.name == "ndqsg" else {}
    for _ in range(300):
        data = altered(good, chance)
        try:
            wire = lc.Wire.parse(data, key=key, shape=x.shape, dtype=x.dtype)
            found = codec.decode(wire, **side)
        except (lc.WireError, lc.ConfigError):
            continue
        assert found.shape == x.shape


def altered(good: Tensor, chance: random.Random) -> Tensor:
    data = good.clone()
    for _ in range(chance.randint(1, 3)):
        way = chance.randrange(5)
        if way == 0:
            data = data[: chance.randint(0, data.numel())].clone()
        elif way == 1:
            more = bytes(chance.randbytes(chance.randint(1, 40)))
            data = torch.cat([data, torch.frombuffer(bytearray(more), dtype=torch.uint8)])
        elif way == 2 and data.numel() > 64:
            start = chance.randint(64, data.numel() - 1)
            size = min(data.numel() - start, chance.randint(1, 64))
            data[start : start + size] = torch.randint(256, (size,), dtype=torch.uint8)
        elif data.numel() >= 64:
            place = chance.choice([*range(5, 64), *range(48, 56), 56, 57])
            data[place] = chance.randrange(256)
            data[:64] = with_check(data[:64])
    return data


def with_check(head: Tensor) -> Tensor:
    import zlib

    body = bytes(head[:60].tolist())
    check = zlib.crc32(body).to_bytes(4, "little")
    return torch.frombuffer(bytearray(body + check), dtype=torch.uint8)


def test_an_odd_body_is_a_wire_error() -> None:
    """Its table of chunks does not start at a word."""
    good = lc.codec("ecdq").encode(gradient(0, 700), lc.Key()).data.clone()
    for body in range(0, 40):
        data = good.clone()
        data[48] = body
        data[:64] = with_check(data[:64])
        if body != int(good[48]):
            with pytest.raises(lc.WireError):
                lc.Wire.parse(data, key=lc.Key(), shape=(700,), dtype=torch.float32)


class TestSums:
    """Plain values travel in messages of our own, small ones at once, others in parts."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
    @pytest.mark.parametrize("numel", [1, 7, 500, 20_000, 100_001])
    def test_all_ranks_get_the_sum(self, numel: int, dtype: torch.dtype) -> None:
        def work(group: MemoryGroup) -> Tensor:
            x = (torch.arange(numel) % 100 * (group.place + 1)).to(dtype)
            sum_in_place(x, ExchangeContext(group=group, step=STEP))
            return x

        with memory_groups(RANKS) as groups:
            found = on_all(groups, work)
        want = (torch.arange(numel) % 100 * 6).to(dtype)
        assert all(torch.equal(one, want) for one in found)

    def test_long_and_unchecked_sums_are_the_backend_s(self, tap: Any) -> None:
        """Their bytes pass the tap, too: nothing finds what is wrong in them."""
        senders: list[tuple[int, int]] = []
        tap(lambda data, sender, context: senders.append((context.rank, sender)))

        def work(group: MemoryGroup) -> Tensor:
            x = torch.ones((1 << 18) + 1)
            plain_mean(x, ExchangeContext(group=group))
            plain_mean(x[:5], ExchangeContext(group=group, verify="none"))
            return x

        with memory_groups(RANKS) as groups:
            found = on_all(groups, work)
        assert all(torch.equal(one, torch.ones_like(one)) for one in found)
        assert sorted(senders) == [(rank, rank) for rank in range(RANKS) for _ in range(2)]

    @pytest.mark.parametrize("plain", [0, 3, 30_000])
    def test_numbers_and_plain_values(self, plain: int) -> None:
        def work(group: MemoryGroup) -> tuple[Tensor, Tensor]:
            uncompressed = torch.full((plain,), float(group.place))
            value = torch.tensor(torch.nan if group.place == 1 else float(group.place))
            return gather_numbers(
                value, ExchangeContext(group=group), uncompressed
            ).clone(), uncompressed

        with memory_groups(RANKS) as groups:
            for numbers, uncompressed in on_all(groups, work):
                assert numbers[0] == 0 and numbers[1].isnan() and numbers[2] == 2
                assert bool((uncompressed == 1).all())


def test_a_wrong_sum_of_integers_is_found_with_values_that_are_not_finite() -> None:
    """Integers under such a scale mean nothing: the mean is NaN everywhere, and no error."""

    def work(group: MemoryGroup) -> Tensor:
        x = gradient(group.place)
        if group.place == 1:
            x[5] = torch.inf
        codec, way = pair("global:bits=8")
        way.mean(x, codec, ExchangeContext(group=group))
        return x

    with memory_groups(RANKS) as groups:
        assert all(bool(one.isnan().all()) for one in on_all(groups, work))


def test_a_lost_rank_is_named() -> None:
    def work(group: MemoryGroup) -> None:
        if group.place == 2:
            raise ValueError("this rank ends")
        codec, way = pair("dqsg:bits=4")
        way.mean(gradient(group.place), codec, ExchangeContext(group=group, step=STEP))

    with memory_groups(RANKS) as groups:
        found = on_all(groups, work)
    for error in found[:2]:
        assert isinstance(error, lc.LostError) and isinstance(error.__cause__, RuntimeError)
        assert f"at step {STEP}" in str(error) and "is gone" in str(error)
    assert any("rank 2 is gone" in str(error) for error in found[:2])


class TestOnADevice:
    """Frames on a device, here the host: errors come with the next message."""

    @staticmethod
    def opened(data: Tensor, context: ExchangeContext, name: Name) -> Tensor:
        return _frame.opened_on_device([(data, name)], context)[0]

    @pytest.mark.parametrize("verify", ["sum", "none"])
    def test_frames_are_those_of_the_host(self, verify: str) -> None:
        with memory_groups(2) as groups:
            context = ExchangeContext(group=groups[0], step=STEP, verify=verify)
            name = Name(Kind.ALL_TO_ALL, 1)
            data = torch.randint(256, (80,), dtype=torch.uint8)
            other = data.clone()
            seal(data, context, name)
            _frame.seal_on_device([(other, name)], context)
            assert torch.equal(data, other)
            assert torch.equal(self.opened(data, context, name), other[FRAME_BYTES:])
            _frame.raise_what_is_known(context.group)

    def test_what_is_wrong_decodes_to_nan_and_is_told_later(self) -> None:
        with memory_groups(2) as groups:
            context = ExchangeContext(group=groups[0], step=STEP, verify="sum")
            name = Name(Kind.ALL_TO_ALL, 1)
            for text in CODECS:
                codec, x = lc.codec(text), gradient(0, 1000)
                wire = codec.encode(x, lc.Key())
                size = FRAME_BYTES + -(-wire.nbytes // 16) * 16
                data = torch.zeros(size, dtype=torch.uint8)
                data[FRAME_BYTES : FRAME_BYTES + wire.nbytes] = wire.data
                seal(data, context, name)
                data[FRAME_BYTES + 100] ^= 1
                body = self.opened(data, context, name)
                assert bool((body == 255).all())
                with pytest.raises(lc.WireError, match=rf"rank 1's message at step {STEP}"):
                    _frame.raise_what_is_known(context.group)

    def test_another_step_is_told_later(self) -> None:
        with memory_groups(2) as groups:
            for verify in ("sum", "none"):
                context = ExchangeContext(group=groups[0], step=STEP, verify=verify)
                name = Name(Kind.ALL_TO_ALL, 1)
                data = torch.zeros(80, dtype=torch.uint8)
                seal(data, replace(context, step=7), name)
                self.opened(data, context, name)
                with pytest.raises(lc.WireError, match="rank 1 sent step 7"):
                    _frame.raise_what_is_known(context.group)

    def test_lengths(self) -> None:
        with memory_groups(2) as groups:
            context = ExchangeContext(group=groups[0], step=STEP)
            names = [Name(Kind.SIZES, 1, j) for j in range(3)]
            out = torch.empty(3 * FRAME_BYTES, dtype=torch.uint8)
            lengths = [8, torch.tensor([1 << 20]), torch.tensor([12])]
            _frame.announce_on_device(lengths, out, context, names)
            found = [
                announced(one, context, n) for one, n in zip(out.split(16), names, strict=True)
            ]
            assert found == [8, 1 << 20, 12]


class TestReplicas:
    TENSORS = (
        torch.randn(1000),
        torch.randn(33).bfloat16(),
        torch.arange(7),
        torch.ones(5, dtype=torch.bool),
        torch.zeros(0),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(4, 6).t(),
    )

    def test_any_bit_and_any_order_show(self) -> None:
        want = int(digest(self.TENSORS))
        assert want == int(digest([one.clone() for one in self.TENSORS]))
        assert want != int(digest(self.TENSORS[::-1]))
        for number, tensor in enumerate(self.TENSORS):
            for place in {0, tensor.nbytes - 1} - {-1}:
                other = [one.contiguous().clone() for one in self.TENSORS]
                if tensor.nbytes:
                    other[number].view(-1).view(torch.uint8)[place] ^= 1
                    assert int(digest(other)) != want, number
        assert int(digest([])) == 0

    @pytest.mark.parametrize("backend", ["reference", "numba"])
    def test_backends_agree(self, backend: str) -> None:
        from laconic.kernels import using

        with using(backend):
            found = int(digest([torch.arange(1000.0), torch.ones(3).half()]))
        assert found == int(digest([torch.arange(1000.0), torch.ones(3).half()]))

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({}, ""),
            ({2: 0.5}, "rank 2 from the 3 that agree (ranks 0, 1, 3)"),
            ({0: 0.5, 1: 0.25}, "rank 0, rank 1 from the 2 that agree (ranks 2, 3)"),
            ({0: 0.5, 1: 0.5}, "ranks 0, 1 from ranks 2, 3"),
        ],
    )
    def test_ranks_that_differ_are_named(self, wrong: dict[int, float], said: str) -> None:
        def work(group: MemoryGroup) -> None:
            x = torch.ones(100)
            x[50] += wrong.get(group.place, 0.0)
            compare(digest([x]), group, step=500)

        with memory_groups(4) as groups:
            found = on_all(groups, work)
        for error in found:
            assert (error is None) == (not wrong)
            if wrong:
                assert isinstance(error, lc.ReplicaError)
                assert f"at step 500: {said}" in str(error)


def attempt(rank: int, text: str, step: int = STEP, leaves: bool = False) -> tuple[str, str]:
    """What comes out on a process group of its own; of an error, its kind and words."""
    group = dist.new_group(timeout=ranks.PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    codec, way = pair(text)
    warm = ExchangeContext(group=group, step=1)
    way.mean(gradient(rank), codec, warm)  # connections are there
    try:
        if leaves:
            dist.destroy_process_group(group)
        else:
            way.mean(gradient(rank), codec, ExchangeContext(group=group, step=step))
        return "", ""
    except lc.LaconicError as error:
        dist.destroy_process_group(group)  # as a rank does that ends
        return type(error).__name__, f"{error} [{error.__cause__!r}]"


def behind(rank: int) -> tuple[str, str]:
    return attempt(rank, "dqsg:bits=4@scatter-reduce", STEP - (rank == 2))


def behind_with_lengths(rank: int) -> tuple[str, str]:
    return attempt(rank, "ecdq:error=0.05@scatter-reduce", STEP - (rank == 2))


def lost_in_swap(rank: int) -> tuple[str, str]:
    return attempt(rank, "dqsg:bits=4@scatter-reduce", leaves=rank == 2)


def lost_with_lengths(rank: int) -> tuple[str, str]:
    return attempt(rank, "ecdq:error=0.05@scatter-reduce", leaves=rank == 2)


def lost_in_ring(rank: int) -> tuple[str, str]:
    return attempt(rank, "global:bits=4@ring", leaves=rank == 2)


def test_gloo_s_own_ranks(tmp_path: Path) -> None:
    """Nobody hangs, and those who saw it say who was at another step, or is gone."""
    lost = (lost_in_swap, lost_with_lengths, lost_in_ring)
    jobs = (behind, behind_with_lengths, *lost)
    ranks.alone(lambda group: attempt(0, "dqsg:bits=4@scatter-reduce"), tmp_path)
    answers = ranks.run(jobs, RANKS, tmp_path)
    for name in ("behind", "behind_with_lengths"):
        found = [answers[rank, name] for rank in range(RANKS)]
        assert all(kind in ("WireError", "LostError") for kind, _ in found), found
        said = f"rank 2 sent step {STEP - 1}, this rank is at step {STEP}"
        assert any(said in text for _, text in found), found
    for name in (job.__name__ for job in lost):
        found = [answers[rank, name] for rank in range(RANKS - 1)]
        assert all(kind == "LostError" for kind, _ in found), found
        assert all("[RuntimeError" in text for _, text in found), found
        assert any("rank 2 is gone" in text for _, text in found), found


class _Unheard:
    """A message that Gloo had begun to send when the peer went: it never tells."""

    def wait(self, *_: Any) -> None:
        raise AssertionError("waited for what leaves before what arrives")


def test_a_peer_that_goes_while_we_send_is_known_by_what_it_does_not_send() -> None:
    with memory_groups(2) as groups:
        mine: Any = groups[0]
        mine.send = lambda *_: _Unheard()
        mine.hub.leave(1)
        arriving, leaving = ([torch.zeros(32, dtype=torch.uint8) for _ in range(2)] for _ in "ab")
        with pytest.raises(lc.LostError, match="rank 1 is gone"):
            all_to_all_in_turn(arriving, leaving, ExchangeContext(group=mine))
