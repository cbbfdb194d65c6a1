"""The error of the mean against the number of ranks, and the bits that it takes each way.

    python -m benchmarks.mean_error [--save] [--values 20]

Every exchange runs as it is, on 2 to 64 ranks that are threads of one process (`_ranks.py`), on
2^20 Gaussian values per rank: independent ones, half common to all ranks, or the same on all. The
error is ‖result - mean‖²/‖mean‖². Bits are what a rank sends over (n-1)/n of the values, headers,
lengths and norms included: out, to whoever adds, and back, the mean to all. Between nodes they are
those of a node's ranks together, (K-1)/K of the values on K nodes. Rows with κ are of the last of
some steps, when exchanges know how much of their gradients ranks have in common; others of a first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import laconic as lc
from benchmarks._ranks import Rank, World
from benchmarks._rows import command_line, keep, view
from laconic.exchanges import Hierarchical, pair

RANKS = (2, 4, 8, 16, 32, 64)
KNOWN = ", κ"
STEPS = 12  # in rows with κ
NODE = 8  # ranks on a node, in rows of hierarchical exchanges
KINDS = {"independent": 0.0, "half common": 0.5, "identical": 1.0}
SPECS = (
    "global:bits=8@allreduce",
    "global:bits=4@ring",
    "global:bits=8@ring",
    "global-exp:bits=5@tree",
    "global-exp:bits=8@tree",
    "qsgd:bits=4@scatter-reduce",
    "dqsg:bits=4@scatter-reduce",
    "rotate(dqsg:bits=4)@scatter-reduce",
    "ecdq:error=0.08@scatter-reduce",
    "ecdq:error=0.02@scatter-reduce",
    "ecdq:error=0.02,coder=rans@scatter-reduce",
    "ecdq:error=0.02,coder=rans@scatter-reduce, κ",
    "global:bits=8@hierarchical",
    "dqsg:bits=4@hierarchical",
    "ecdq:error=0.02@hierarchical",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an exchange made of the gradients, and what a rank or a node sent for it."""

    mean: Tensor
    bits_out: float
    bits_back: float


def gradients(common: float, ranks: int, count: int) -> list[Tensor]:
    """Gaussian values of variance 1, of which a share `common` is the same on all ranks."""
    generator = torch.Generator().manual_seed(ranks)
    shared = torch.randn(count, generator=generator)
    if common == 1:
        return [shared] * ranks
    own = (torch.randn(count, generator=generator) for _ in range(ranks))
    return [common**0.5 * shared + (1 - common) ** 0.5 * part for part in own]


def outcome(spec: str, xs: list[Tensor]) -> Outcome | None:
    """None where a pair cannot serve so many ranks, or they are all on one node."""
    steps = STEPS if spec.endswith(KNOWN) else 1
    spec = spec.removesuffix(KNOWN)
    _, way = pair(spec)
    nodes: tuple[tuple[int, ...], ...] = ()
    if isinstance(way, Hierarchical):
        nodes = tuple(tuple(range(i, i + NODE)) for i in range(0, len(xs), NODE))
        if len(xs) <= NODE:
            return None
    with World(spec, len(xs), nodes) as world:
        mean = xs[0]
        try:
            for step in range(steps):
                mean = world.mean(xs, (), step)
        except lc.ConfigError:
            return None
        return _outcome(mean, world.far or world.ranks, way.name, NODE if nodes else 1)


def _outcome(mean: Tensor, ranks: list[Rank], name: str, lanes: int) -> Outcome:
    """Bits from the bytes of the ranks; a node of several `lanes` sends through all of them."""
    n, count = ranks[0].size(), len(ranks)
    out = sum(rank.out_bytes for rank in ranks) / count
    back = sum(rank.back_bytes for rank in ranks) / count
    if name == "ring":  # as many messages while sums grow as when they go around
        second = sum(sum(rank.sends[len(rank.sends) // 2 :]) for rank in ranks) / count
        out, back = out - second, back + second
    scale = 8 * lanes / ((n - 1) / n * mean.numel())
    return Outcome(mean=mean, bits_out=scale * out, bits_back=scale * back)


def measure(values: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each pair, kind of gradients and number of ranks."""
    rows: list[dict[str, Any]] = []
    for kind, common in KINDS.items():
        for ranks in RANKS:
            report(f"{kind}, {ranks} ranks")
            xs = gradients(common, ranks, 1 << values)
            exact = torch.zeros(1 << values, dtype=torch.float64)
            for x in xs:
                exact.add_(x, alpha=1 / ranks)
            for spec in SPECS:
                found = outcome(spec, xs)
                row = {"pair": spec, "kind": kind, "ranks": ranks, "nmse": None}
                if found is not None:
                    error = (found.mean.double() - exact).square().sum() / exact.square().sum()
                    row |= {
                        "nmse": float(error),
                        "bits_out": found.bits_out,
                        "bits_back": found.bits_back,
                    }
                rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--values", type=int, default=20, help="log2 of values per rank")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor`", FutureWarning)
    console = Console(width=150)
    rows = measure(options.values, lambda text: console.print(text, style="dim"))
    for kind in KINDS:
        table = view(f"{kind}: NMSE of the mean (bits out / back)", ("", *map(str, RANKS)))
        for spec in SPECS:
            found = [row for row in rows if row["pair"] == spec and row["kind"] == kind]
            cells = [
                "–"
                if row["nmse"] is None
                else f"{row['nmse']:.4f} ({row['bits_out']:.1f}/{row['bits_back']:.1f})"
                for row in found
            ]
            table.add_row(spec, *cells)
        console.print(table)
    keep("mean_error", rows, options)


if __name__ == "__main__":
    main()
