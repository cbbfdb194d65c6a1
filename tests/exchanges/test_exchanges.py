"""Every codec on every exchange that carries it: the same bits on 3 and on 5 ranks, near the mean.

One set of processes per number of ranks, over Gloo, runs all pairs; each is asserted on its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import ranks
import torch
import torch.distributed as dist

import laconic as lc
from laconic._scratch import Scratch
from laconic.comm._context import ExchangeContext, Sizes, chunk_edges
from laconic.comm._transport import checked_sizes
from laconic.exchanges import exchange, exchanges, pair

STEPS = int(os.environ.get("LACONIC_TEST_STEPS", "5"))  # 200 in `make long`
PARTS = (5000, 1, 12_000, 3000)  # parameters in the tensor
CODECS = (
    "none",
    "fp16",
    "bf16",
    "qsgd:bits=4",
    "qsgd:bits=4,coder=elias",
    "dqsg:bits=4",
    "dqsg:bits=3,block=100",
    "global:bits=8",
    "global:bits=32",
    "global:bits=8,subtract=true",
    "global:bits=32,subtract=true",
    "global:bits=8,norm=l2,coder=elias",
    "global-exp:bits=8",
    "rotate(dqsg:bits=4)",
    "ecdq:error=0.05",
    "ecdq:error=0.05,coder=rans",
    "ecdq:error=0.05,block=512",
    "feedback(qsgd-topk)",
    "feedback(ecdq:error=0.5)",
)


def pairs() -> Iterator[str]:
    for codec in CODECS:
        for way in exchanges():
            try:
                pair(codec, way)
            except lc.ConfigError:
                continue
            yield f"{codec}@{way}"


def gradients(size: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One vector a rank, half of it shared by all."""
    generator = torch.Generator().manual_seed(step)
    common = torch.randn(sum(PARTS), generator=generator)
    own = [torch.randn(sum(PARTS), generator=generator) for _ in range(size)]
    return [(common + part).to(dtype) for part in own]


def every_pair(rank: int) -> dict[str, dict[str, Any]]:
    places = tuple(
        lc.Place(parameter=i, start=0, numel=numel, total=numel) for i, numel in enumerate(PARTS)
    )
    return {text: outcome(text, dist.get_world_size(), places) for text in pairs()}


def outcome(text: str, size: int, places: tuple[lc.Place, ...]) -> dict[str, Any]:
    """Bits after all steps, the error of the last mean, and what a lone odd step makes of NaN."""
    codec, way = pair(text)
    group = dist.group.WORLD
    assert group is not None
    space, bits, error, uncompressed = Scratch(), [], 0.0, torch.empty(0)
    for step in range(STEPS):
        dtype = torch.bfloat16 if step == STEPS - 2 else torch.float32
        xs = gradients(size, step, dtype)
        x = xs[group.rank()].clone()
        context = ExchangeContext(group=group, step=step, tensor=3, places=places, scratch=space)
        uncompressed = torch.arange(11.0) * (group.rank() + 1)  # travels as it is
        way.mean(x, codec, context, uncompressed)
        bits.append(hash_of(torch.cat([x.float(), uncompressed])))
        if step == STEPS - 1:
            mean = torch.stack([v.double() for v in xs]).mean(0)
            error = float((x.double() - mean).square().sum() / mean.square().sum())
    x = gradients(size, 99, torch.float32)[group.rank()]
    if group.rank() == 1:
        x[700] = torch.nan
    way.mean(
        x, codec, ExchangeContext(group=group, step=99, tensor=3, places=places, scratch=space)
    )
    found = {"bits": bits, "error": error, "nan": not bool(x.isfinite().all()), "last": hash_of(x)}
    exact = torch.arange(11.0) * (size + 1) / 2
    found["rest"] = float((uncompressed - exact).abs().max())
    x, uncompressed = torch.zeros(sum(PARTS)), torch.zeros(11)
    if group.rank() == 1:
        uncompressed[5] = torch.nan
    way.mean(
        x,
        codec,
        ExchangeContext(group=group, step=98, tensor=3, places=places, scratch=space),
        uncompressed,
    )
    found["nan in rest"] = uncompressed.isnan().nonzero().flatten().tolist()
    return found


def hash_of(x: torch.Tensor) -> int:
    words = x.contiguous().view(torch.int16).to(torch.int64)
    return int((words * (torch.arange(words.numel()) * 2654435761 % 1000003 + 1)).sum())


@pytest.fixture(scope="module", params=[3, 5])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    answers = ranks.run([every_pair], request.param, tmp_path_factory.mktemp("pairs"))
    return [answers[rank, "every_pair"] for rank in range(request.param)]


def allowed(text: str) -> float:
    """Error of the mean that a pair may have on these gradients."""
    if text.startswith("feedback"):
        return 2.0
    bounds = {"none": 1e-12, "fp16": 1e-5, "bf16": 1e-3, "global:bits=32": 1e-3}
    for name, bound in bounds.items():
        if text.startswith(name):
            return bound
    if text.endswith("@sparse"):
        return 0.5  # one norm of all values makes a step √(n·d)/s values wide
    if text.startswith("global-exp"):
        return 0.5  # re-rounding does not average out
    return 0.05 if text.startswith("ecdq") else 0.25  # error= is the budget of the mean


@pytest.mark.timeout(200 + 6 * STEPS)  # the first starts ranks and compiles
@pytest.mark.parametrize("text", list(pairs()))
def test_all_ranks_hold_the_same_bits_near_the_mean(text: str, found: Any) -> None:
    first, *others = (one[text] for one in found)
    for rank, one in enumerate(others, 1):
        assert one["bits"] == first["bits"] and one["last"] == first["last"], f"rank {rank} differs"
    assert first["error"] <= allowed(text)
    for one in (first, *others):
        assert one["nan"] and one["rest"] < 1e-5 and one["nan in rest"] == [5]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dqsg:bits=4@allreduce", "scatter-reduce"),
        ("ndqsg@scatter-reduce", "use dqsg"),
        ("dqsg@scater-reduce", "did you mean scatter-reduce"),
        ("ndqsg@allgather", "use dqsg"),
        ("dqsg@tree", "scatter-reduce"),
        ("global@tree", "allreduce"),
        ("none@ring", "'none@allreduce'"),
        ("dqsg:bits=4@ring", r"block=512\S*@scatter-reduce'"),
        ("global:bits=8,coder=elias@ring", r"coder=elias\S*@scatter-reduce'"),
        ("global:subtract=true@ring", r"subtract=true\S*@allreduce'"),
        ("global-exp@ring", "global:bits=4@ring"),
        ("rotate(dqsg)@ring", "global:bits=4@ring"),
        ("none@sparse", "'none@allreduce'"),
        ("global:norm=l2@sparse", r"coder=fixed\S*@allreduce'"),
        ("global:levels=1,coder=elias@sparse", "norm=l2,coder=elias@sparse"),
        ("global:norm=2/inf,coder=elias@sparse", "on CUDA coder=bitmap"),
        ("qsgd:bits=4,coder=elias@sparse", r"coder=elias\S*@scatter-reduce'"),
    ],
)
def test_pairs_that_make_no_sense_are_refused_with_advice(text: str, match: str) -> None:
    with pytest.raises(lc.ConfigError, match=match):
        pair(text)
    with pytest.raises(lc.ConfigError, match="leave exchange= out"):
        pair("none@allreduce", "allreduce")


def test_default_exchanges() -> None:
    assert str(pair("global:bits=8")[1]) == "allreduce"
    assert str(pair("ecdq")[1]) == "scatter-reduce"
    assert str(pair("global-exp")[1]) == "tree"


def test_places_of_a_chunk_keep_their_offset_in_the_parameter() -> None:
    """Error feedback's memory would follow the wrong values otherwise."""
    group: Any = None
    places = tuple(
        lc.Place(parameter=i, start=10, numel=numel, total=9000) for i, numel in enumerate((5, 8))
    )
    context = ExchangeContext(group=group, places=places)
    cut = [(p.parameter, p.start, p.numel, p.total) for p in context.inside(3, 9)]
    assert cut == [(0, 13, 2, 9000), (1, 10, 4, 9000)]
    assert [(p.parameter, p.start, p.numel) for p in context.inside(9, 13)] == [(1, 14, 4)]
    assert context.inside(13, 20) == []


def test_a_false_size_is_refused_before_anything_is_allocated() -> None:
    most = Sizes((100, 50), known=False)
    assert checked_sizes([100, 0], most) == (100, 0)
    for wrong in ([101, 0], [0, 51], [-1, 0], [1 << 60, 0]):
        with pytest.raises(lc.WireError, match="announced"):
            checked_sizes(wrong, most)


def test_chunks_cover_the_tensor() -> None:
    for numel, size in ((0, 3), (1, 3), (511, 2), (20_001, 5), (512 * 3, 3)):
        edges = chunk_edges(numel, size)
        assert edges[0] == 0 and edges[-1] == numel and len(edges) == size + 1
        assert edges == sorted(edges) and all(edge % 512 == 0 or edge == numel for edge in edges)


SPECS = {
    "ring": lc.Ring(),
    "ring:pieces=8": lc.Ring(pieces=8),
    "nested:side=own,every=8": lc.Nested(side="own", every=8),
    "hierarchical:nodes=((0,1),(2,3))": lc.Hierarchical(nodes=((0, 1), (2, 3))),
    "hierarchical:inner=ring:pieces=8": lc.Hierarchical(inner=lc.Ring(pieces=8)),
    "hierarchical:nodes=((0,),(1,)),inner=(nested:side=own,every=8)": lc.Hierarchical(
        nodes=((0,), (1,)), inner=lc.Nested(side="own", every=8)
    ),
}


@pytest.mark.parametrize("spec", SPECS)
def test_an_exchange_has_a_spec(spec: str) -> None:
    assert exchange(spec) == SPECS[spec]
    assert str(SPECS[spec]) == spec


def test_specs_name_a_codec_and_an_exchange_with_settings_each() -> None:
    assert pair("global:bits=4@ring:pieces=8") == (lc.codec("global:bits=4"), lc.Ring(pieces=8))
    spec = "global:bits=4@hierarchical:inner=(ring:pieces=8)"
    assert pair(spec)[1] == lc.Hierarchical(inner=lc.Ring(pieces=8))
    assert exchange("nested(side=own)") == lc.Nested(side="own")  # as printed before


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("rnig", r"'rnig'; did you mean ring\?"),
        ("ring:piece=4", "'piece'; did you mean pieces"),
        ("ring:pieces", "pieces"),
        ("ring:pieces=many", "pieces.*'many'"),
        ("ring:pieces=2,pieces=3", "pieces is given twice"),
        ("allgather:pieces=2", "'pieces'; it has no settings"),
        ("hierarchical:nodes=(0,1)", "each rank of the group once"),
        ("hierarchical:nodes=((0,1)", "nodes"),
        ("hierarchical:inner=rnig", "'rnig'"),
        ("hierarchical:inner=hierarchical", "flat"),
        ("", "''"),
    ],
)
def test_errors_of_specs_say_what_there_is(spec: str, told: str) -> None:
    with pytest.raises(lc.ConfigError, match=told):
        exchange(spec)


@dataclass(frozen=True, kw_only=True)
class Mine(lc.Exchange):
    """Plain means."""

    name: ClassVar[str] = "mine"

    times: int = 1

    def check(self, codec: lc.Codec) -> None: ...

    def mean(
        self,
        x: torch.Tensor,
        codec: lc.Codec,
        context: ExchangeContext,
        uncompressed: torch.Tensor | None = None,
    ) -> None: ...


def test_a_registered_exchange_is_known_by_its_spec() -> None:
    from laconic.exchanges import _pair

    try:
        assert lc.register_exchange(Mine) is Mine
        assert pair("dqsg:bits=4@mine:times=2")[1] == Mine(times=2)
        assert "mine" in exchanges() and str(Mine(times=2)) == "mine:times=2"
        lc.register_exchange(Mine)  # a module that is imported anew
        with pytest.raises(lc.ConfigError, match=r"mine.*cost"):
            Mine().cost(None, None)  # pyright: ignore[reportArgumentType]
    finally:
        _pair._BY_NAME.pop("mine", None)


@pytest.mark.parametrize("name", ["ring", "a@b", "", "auto", 3])
def test_names_that_specs_cannot_have_are_refused(name: Any) -> None:
    kind = dataclass(frozen=True, kw_only=True)(type("Other", (Mine,), {"name": name}))
    with pytest.raises(lc.ConfigError, match="name"):
        lc.register_exchange(kind)
    with pytest.raises(lc.ConfigError, match="dataclass"):
        lc.register_exchange(lc.DQSG)  # pyright: ignore[reportArgumentType]
