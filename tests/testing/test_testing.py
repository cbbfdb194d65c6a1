"""check_codec holds for every codec of ours, and finds what is wrong with broken ones."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor

import laconic as lc
from laconic.codecs import DecodeTarget, Header, uniform
from laconic.errors import ConfigError
from laconic.testing import check_codec
from laconic.testing._subject import RuleError

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_codec.py"
SPECS = (
    *lc.codecs(),
    "qsgd:levels=1,norm=l2",
    "qsgd:bits=3,coder=elias",
    "dqsg:bits=8,coder=rans",
    "global:bits=4",
    "global:bits=32",
    "global:subtract=true",
    "global:norm=l2,coder=elias",
    "global-exp:bits=4",
    "ecdq:error=0.5,coder=rans",
    "ecdq:step=1,subtract=always,coder=fixed",
    "ecdq:error=0.1,max_bits=3",
    "rotate(dqsg:bits=4)",
    "rotate(qsgd-topk)",
    "rotate(ecdq:error=0.05)",
    "feedback(qsgd-topk)",
    "feedback(ecdq:error=0.5,coder=rans)",
    "feedback(rotate(dqsg:bits=2))",
)


def own_codec() -> ModuleType:
    """The example, imported; it registers its codec."""
    spec = importlib.util.spec_from_file_location("own_codec", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_codec"] = module
    spec.loader.exec_module(module)
    return module


def known(x: Tensor) -> Tensor:
    """What a receiver of ndqsg has: x itself, as far as it is a number."""
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("spec", SPECS)
def test_our_codecs_keep_the_contract(spec: str) -> None:
    check_codec(spec, side=known if "ndqsg" in spec else None, draws=128)
    assert not dist.is_initialized()


def test_a_codec_and_a_function_are_checked_as_texts_are() -> None:
    check_codec(lc.DQSG(bits=2), draws=64)
    check_codec(lambda: lc.Feedback(inner=lc.QSGDTopK()), draws=64)
    check_codec(lc.Feedback(inner=lc.DQSG(bits=2)), draws=64)  # one object, with a memory


# Broken ones: each breaks one thing of a sound codec, TernGrad's with a byte for every value.


@dataclass(frozen=True, kw_only=True)
class Sound(lc.Codec):
    name: ClassVar[str] = "sound"
    id: ClassVar[int] = 200
    unbiased: ClassVar[bool] = True

    def variance_bound(self, d: int) -> float | None:
        return (d**0.5 - 1) / 2

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        return Header(codec=self.id, dtype=dtype, numel=numel, body_bytes=numel and 4 + numel)

    def _draw(self, key: lc.Key, x: Tensor) -> Tensor:
        return uniform(key, x.numel(), x.device)

    def _scale(self, x: Tensor) -> Tensor:
        return x.abs().max()

    def _write(
        self, x: Tensor, key: lc.Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        x = x.float()
        scale = self._scale(x)
        sent = self._draw(key, x) * scale < x.abs()
        body[:4].view(torch.float32).copy_(scale)
        body[4 : 4 + x.numel()].view(torch.int8).copy_(torch.where(sent, x.sign(), 0))

    def _value(self, wire: lc.Wire, body: Tensor) -> Tensor:
        codes = body[4 : 4 + wire.header.numel].view(torch.int8).float()
        return codes * body[:4].view(torch.float32)

    def _read(self, wire: lc.Wire, body: Tensor, into: DecodeTarget) -> None:
        into.put(self._value(wire, body))


class Nearest(Sound):
    """Rounds to nearest."""

    def _draw(self, key: lc.Key, x: Tensor) -> Tensor:
        return torch.full_like(x, 0.5)


class Shrinks(Sound):
    """A fiftieth too small."""

    def _value(self, wire: lc.Wire, body: Tensor) -> Tensor:
        return 0.98 * super()._value(wire, body)


class IgnoresKey(Sound):
    def _draw(self, key: lc.Key, x: Tensor) -> Tensor:
        return super()._draw(lc.Key(), x)


class IgnoresRank(Sound):
    def _draw(self, key: lc.Key, x: Tensor) -> Tensor:
        return super()._draw(replace(key, rank=0), x)


class IgnoresStep(Sound):
    def _draw(self, key: lc.Key, x: Tensor) -> Tensor:
        return super()._draw(replace(key, step=0), x)


class Generator(Sound):
    """Draws from torch's own generator."""

    def _draw(self, key: lc.Key, x: Tensor) -> Tensor:
        return torch.rand(x.numel())


class MovesZeros(Sound):
    def _value(self, wire: lc.Wire, body: Tensor) -> Tensor:
        return super()._value(wire, body) + 1e-3


class SwallowsNaN(Sound):
    def _scale(self, x: Tensor) -> Tensor:
        return x[torch.isfinite(x)].abs().max() if torch.isfinite(x).any() else x.new_zeros(())


class SwallowsInfinity(Sound):
    def _scale(self, x: Tensor) -> Tensor:
        return x.abs().clamp(max=1e30).max()


class SaysTooMuch(Sound):
    def nbytes(self, *words: Any, **options: Any) -> int:
        return super().nbytes(*words, **options) + 1


class LeavesBytes(Sound):
    """Does not write the end of its body."""

    def _header(self, numel: int, *words: Any, **options: Any) -> Header:
        header = super()._header(numel, *words, **options)
        return replace(header, body_bytes=header.body_bytes + 3 if numel else 0)


class KeepsToItself(Sound):
    """Decodes with what only the encoder knows."""

    secrets: ClassVar[dict[int, Tensor]] = {}

    def _write(self, x: Tensor, key: lc.Key, body: Tensor, header: Header, norm: Any) -> None:
        super()._write(x, key, body, header, norm)
        self.secrets[body.data_ptr()] = body[:4].view(torch.float32).clone()
        body[:4].zero_()

    def _value(self, wire: lc.Wire, body: Tensor) -> Tensor:
        codes = body[4 : 4 + wire.header.numel].view(torch.int8).float()
        return codes * self.secrets.get(body.data_ptr(), torch.ones(1))


class IgnoresWeight(Sound):
    def _read(self, wire: lc.Wire, body: Tensor, into: DecodeTarget) -> None:
        replace(into, weight=1.0).put(self._value(wire, body))


class IgnoresAdd(Sound):
    def _read(self, wire: lc.Wire, body: Tensor, into: DecodeTarget) -> None:
        replace(into, add=False).put(self._value(wire, body))


class Elsewhere(Sound):
    def decode(self, *words: Any, **options: Any) -> Tensor:
        return super().decode(*words, **options).clone()


class TrustsHeaders(Sound):
    def _check(self, wire: lc.Wire) -> None:
        return


class PromisesMuch(Sound):
    def variance_bound(self, d: int) -> float | None:
        return (d**0.5 - 1) / 4


class Infinite(Sound):
    def variance_bound(self, d: int) -> float | None:
        return float("inf")


class OnlyFloats(Sound):
    def _write(self, x: Tensor, key: lc.Key, body: Tensor, header: Header, norm: Any) -> None:
        if x.dtype != torch.float32:
            raise TypeError("floats only")
        super()._write(x, key, body, header, norm)


class Spoils(Sound):
    """Changes its input."""

    def _write(self, x: Tensor, key: lc.Key, body: Tensor, header: Header, norm: Any) -> None:
        super()._write(x, key, body, header, norm)
        x.zero_()


class MakesNaN(Sound):
    """0/0 at a single value."""

    def _value(self, wire: lc.Wire, body: Tensor) -> Tensor:
        value = super()._value(wire, body)
        return value / value if value.numel() == 3 else value


class Nameless(Sound):
    name: ClassVar[Any] = None


class LargeId(Sound):
    id: ClassVar[int] = 256


class Different(Sound):
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class Forgetful(Sound):
    """Says that it has residuals, and leaves nothing in them."""

    residuals: ClassVar[bool] = True


class Unpaired(Sound):
    pairwise: ClassVar[bool] = True


class Lossless(Sound):
    lossless: ClassVar[bool] = True


class Biased(Sound):
    """Promises nothing."""

    unbiased: ClassVar[bool] = False

    def variance_bound(self, d: int) -> float | None:
        return None


class Flips(Biased):
    """Points the wrong way once it is trained with."""

    def _value(self, wire: lc.Wire, body: Tensor) -> Tensor:
        return -super()._value(wire, body)


class Sums(lc.Uncompressed):
    """Forgets to divide."""

    name: ClassVar[str] = "sums"
    id: ClassVar[int] = 201

    def decode_sum(self, payload: Tensor, keys: Any, **options: Any) -> Tensor:
        options["weight"] = len(keys) * options.get("weight", 1.0)
        return super().decode_sum(payload, keys, **options)


class Remembers(Sound):
    """Draws by what it has encoded before, too."""

    _before: ClassVar[list[Tensor]] = []

    def encode(self, x: Tensor, key: lc.Key, *words: Any, **options: Any) -> lc.Wire:
        if not (self._before and torch.equal(self._before[-1], x)):
            self._before.append(x.clone())
        key = replace(key, seed=key.seed + len(self._before))
        return super().encode(x, key, *words, **options)


class ShortSegments(lc.ECDQ):
    """Counts bytes as if all were one tensor."""

    name: ClassVar[str] = "short-segments"

    def nbytes(self, numel: int, dtype: torch.dtype = torch.float32, segments: Any = None) -> int:
        return super().nbytes(numel, dtype) if segments is None else 100


def test_what_they_are_made_of_is_sound() -> None:
    check_codec(Sound(), draws=128)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Nearest, "unbiased=True has the input as its mean over keys: Gaussian values come back"),
        (Shrinks, "along x, are off by -"),
        (IgnoresKey, "unbiased=True has the input as its mean over keys"),
        (IgnoresRank, "keys that differ in rank have a correlation of 1.00"),
        (IgnoresStep, "keys that differ in step"),
        (Generator, "the same input and key make the same bytes: two wires"),
        (MovesZeros, "zeros decode to zeros"),
        (SwallowsNaN, "nan at 0 of 1000 torch.float32 values came back as finite"),
        (SwallowsInfinity, "inf at 0 of 1000"),
        (SaysTooMuch, "nbytes is the length of a wire"),
        (LeavesBytes, "write every byte of the body"),
        (KeepsToItself, "from its bytes, key, shape and dtype alone"),
        (IgnoresWeight, "add=False, weight=0.25 it is not so"),
        (IgnoresAdd, "add=True, weight=1.0 it is not so"),
        (Elsewhere, "the result is another tensor"),
        (TrustsHeaders, "a wire of a codec with another codec was decoded"),
        (PromisesMuch, "is at most variance_bound"),
        (Infinite, "variance_bound(1000) is inf. Return None"),
        (OnlyFloats, "It raised TypeError: floats only"),
        (Spoils, "encoding leaves its input alone"),
        (MakesNaN, "came back with NaN or infinity"),
        (Nameless, "its name is None"),
        (LargeId, "its id is 256"),
        (Different, "frozen=True"),
        (Forgetful, "what was not sent is in the residuals"),
        (Unpaired, "it says pairwise=True and lacks reduce"),
        (Lossless, "it says lossless=True"),
        (Flips, "a compressed gradient points where the gradient does"),
        (Sums, "the mean of what the wires decode to"),
        (Remembers, "a codec has no state"),
        (ShortSegments, "nbytes counts segments"),
    ],
)
def test_a_broken_codec_is_found_out(make: Callable[[], lc.Codec], sentence: str) -> None:
    with pytest.raises(AssertionError) as found:
        check_codec(make, draws=128)
    assert isinstance(found.value, RuleError) and sentence in str(found.value)
    assert not dist.is_initialized()


def test_what_is_no_codec_is_found_out() -> None:
    with pytest.raises(AssertionError, match="subclass of laconic.Codec"):
        check_codec(lambda: object())  # pyright: ignore[reportArgumentType]


# On ranks


class Drifts(Biased):
    """Decodes a little larger on every rank."""

    def _value(self, wire: lc.Wire, body: Tensor) -> Tensor:
        return super()._value(wire, body) * (1 + dist.get_rank() / 1000)


class Repeats(Sound):
    """Draws the same in every exchange."""

    def encode(self, x: Tensor, key: lc.Key, *words: Any, **options: Any) -> lc.Wire:
        same = key if key.seed else lc.Key(rank=key.rank)
        return super().encode(x, same, *words, **options)


def sound(rank: int) -> None:
    check_codec(Sound(), draws=64)
    check_codec("ecdq:error=0.1", draws=64)


def faults(rank: int) -> list[str]:
    found = []
    for codec in (Drifts(), Repeats()):
        with pytest.raises(AssertionError) as error:
            check_codec(codec, draws=64)
        found.append(str(error.value))
    return found


def trained(rank: int) -> tuple[float, float]:
    module = own_codec()
    check_codec("ternary", draws=64)
    return module.train(60)


def test_ranks_check_together_and_train_with_a_codec_of_their_own(tmp_path: Path) -> None:
    answers = run([sound, faults, trained], 2, tmp_path)
    for rank in range(2):
        drifting, repeating = answers[rank, "faults"]
        assert "all ranks end with the same bits: by scatter-reduce" in drifting
        assert "errors average out in an exchange" in repeating
        before, after = answers[rank, "trained"]
        assert after < 0.5 * before


# Registering


def test_the_example_registers_a_codec() -> None:
    module = own_codec()
    ternary = lc.codec("ternary")
    assert isinstance(ternary, module.Ternary) and str(ternary) == "ternary"
    assert "ternary" in lc.codecs() and lc.pair("ternary@allgather")[0] == ternary
    check_codec("ternary", draws=128)
    check_codec("rotate(ternary)", draws=128)
    check_codec("feedback(ternary)", draws=128)
    own_codec()  # imported anew, as in a notebook: it takes its own place
    assert type(lc.codec("ternary")) is not module.Ternary


def test_a_text_must_name_the_codec() -> None:
    class Mumbles(Sound):
        name: ClassVar[str] = "mumbles"

        def __str__(self) -> str:
            return "sounds"

    lc.register_codec(Mumbles)
    with pytest.raises(AssertionError, match="its spec string names it"):
        check_codec(Mumbles())


def kind(**names: Any) -> type[lc.Codec]:
    return type("Made", (Sound,), names)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (kind(name="dqsg"), "dqsg is DQSG's name"),
        (kind(name="feedback"), "feedback is Feedback's name"),
        (kind(name="a:b"), "the word that specs name it by"),
        (kind(name="auto"), "the word that specs name it by"),
        (kind(name=""), "the word that specs name it by"),
        (kind(id=4), "from 128 to 255, not 4"),
        (kind(id=None), "from 128 to 255, not None"),
        (int, "subclass of laconic.Codec"),
        (Sound(), "subclass of laconic.Codec"),
    ],
)
def test_bad_registrations_are_a_sentence(made: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as found:
        lc.register_codec(made)
    assert sentence in str(found.value)


def test_ids_are_not_shared() -> None:
    lc.register_codec(Sound)
    with pytest.raises(ConfigError, match="sound has id 200"):
        lc.register_codec(kind(name="other"))
    assert "other" not in lc.codecs()


def test_draws_are_the_same_everywhere() -> None:
    draws = uniform(lc.Key(seed=3), 100_000)
    assert draws.dtype == torch.float32 and draws.min() >= 0 and draws.max() < 1
    assert abs(float(draws.mean()) - 0.5) < 0.005 and abs(float(draws.var()) - 1 / 12) < 0.001
    assert torch.equal(draws[:10], uniform(lc.Key(seed=3), 10))
    assert not torch.equal(draws[:10], uniform(lc.Key(seed=3, rank=1), 10))
