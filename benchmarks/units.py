"""What an optimizer's units cost: changing gradients into them and back, beside two codecs.

    python -m benchmarks.units [--numel 33554432] [--runs 11] [--cuda] [--save]

"into" and "back" are one pass over a gradient and its exponents each; "snapshot" makes exponents of
as many values from Adam's second moment, which happens at every sixteenth step. On the CPU all take
turns, and rows are medians; on CUDA times of passes are those of captured graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import laconic as lc
from benchmarks._rows import command_line, keep
from benchmarks.rotate import on_cpu, on_cuda
from laconic.exchanges._preconditioner import Preconditioner

SPECS = ("dqsg:bits=4", "ecdq:error=0.08")
WIDTH = 1024

Work = dict[tuple[str, str], Callable[[], object]]


def stepped(numel: int, device: str) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """A matrix that Adam has moved once, with gradients of wide range."""
    draw = torch.Generator(device).manual_seed(0)
    rows = torch.randn(numel // WIDTH, WIDTH, device=device, generator=draw)
    spread = torch.randn(numel // WIDTH, 1, device=device, generator=draw)
    weight = torch.nn.Parameter(torch.zeros_like(rows))
    weight.grad = rows * spread.exp()
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    return weight, optimizer


def work_of(numel: int, device: str) -> tuple[Work, Work]:
    """What happens at every step, and what happens now and then."""
    weight, optimizer = stepped(numel, device)
    assert weight.grad is not None
    x, units = weight.grad.view(-1), Preconditioner(optimizer)
    units.refresh(0, {0: weight})
    y = torch.empty_like(x)
    units.into(x, 0, y)
    back = torch.empty_like(x)
    units.back(y, 0, back)
    assert torch.equal(back, x)
    steps: Work = {
        ("into", "units"): lambda: units.into(x, 0, y),
        ("back", "units"): lambda: units.back(y, 0, back),
        ("copy", "units"): lambda: back.copy_(x),
    }
    for spec in SPECS:
        codec, key = lc.codec(spec), lc.Key(seed=1)
        wire = codec.encode(y, key)
        steps["encode", spec] = lambda codec=codec, key=key, wire=wire: codec.encode(
            y, key, out=wire
        )
        steps["decode", spec] = lambda codec=codec, wire=wire: codec.decode(wire, out=back)
    return steps, {("snapshot", "units"): lambda: units.refresh(0, {0: weight})}


def on_cuda_waiting(work: Work, runs: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Medians of events around what no graph can hold."""
    import triton.testing

    return {
        key: {"ms": triton.testing.do_bench(function, rep=20 * runs, return_mode="median")}
        for key, function in work.items()
    }


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--numel", type=int, default=2**25)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    steps, seldom = work_of(options.numel, "cuda" if options.cuda else "cpu")
    if options.cuda:
        found = on_cuda(steps, options.runs) | on_cuda_waiting(seldom, options.runs)
    else:
        found = on_cpu(steps | seldom, options.runs)
    rows: list[dict[str, Any]] = [
        {"name": name, "codec": codec, "numel": options.numel, **row}
        for (name, codec), row in found.items()
    ]
    for row in rows:
        print(f"{row['name']:10} {row['codec']:16} {row['ms']:.2f} ms")
    keep("units-cuda" if options.cuda else "units-cpu", rows, options)


if __name__ == "__main__":
    main()
