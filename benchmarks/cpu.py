"""CPU kernels beside a memory copy and pi-quant, in one interleaved run.

    python -m benchmarks.cpu [--numel 67108864] [--runs 41] [--save]

Every row is the median over runs taken in turns. `encode` makes the whole wire into an existing
buffer; `decode` adds onto an existing tensor (dither included for dqsg).
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from benchmarks._rows import (
    Work,
    codec_work,
    command_line,
    interleaved,
    keep,
    machine,
    quantiles,
    view,
)

SPECS = (
    "qsgd:bits=2,block=512",
    "qsgd:bits=3,block=512",
    "qsgd:bits=4,block=512",
    "qsgd:bits=8,block=512",
    "qsgd:bits=4,norm=l2,block=512",
    "dqsg:bits=2,block=512",
    "dqsg:bits=4,block=512",
    "dqsg:bits=8,block=512",
    "dqsg:bits=4,block=tensor",
    "ndqsg",
    "global:bits=8",
    "global-exp:bits=8",
    *(f"ecdq:error=0.083,coder={coder}" for coder in ("fixed", "bitmap", "elias", "rans")),
)


def piquant_work(x: torch.Tensor, target: torch.Tensor) -> Work:
    """pi-quant's nearest rounding and its dequantize-add; nothing if it is not installed."""
    try:
        from piquant import Context, DataType, ReduceOp, RoundMode
    except ImportError:
        return {}
    context, n = Context(torch.get_num_threads()), x.numel()
    work: Work = {}
    for bits, kind in ((8, DataType.UINT8), (4, DataType.UINT4)):
        codes = torch.empty(n * bits // 8, dtype=torch.uint8)
        scale, zero = context.compute_quant_params_ptr_float32(x.data_ptr(), kind, n)
        source = (x.data_ptr(), DataType.F32, codes.data_ptr(), kind, n, scale, zero)
        back = (codes.data_ptr(), kind, target.data_ptr(), DataType.F32, n, scale, zero)
        work |= {
            f"encode pi-quant nearest {bits} bit, scale given": (
                lambda a=source, _=codes: context.quantize_ptr(*a, RoundMode.NEAREST)
            ),
            f"decode pi-quant add {bits} bit": (
                lambda a=back: context.dequantize_ptr(*a, ReduceOp.ADD)
            ),
        }
        context.quantize_ptr(*source, RoundMode.NEAREST)
    return work


def measure(numel: int, runs: int) -> list[dict[str, Any]]:
    """All rows, with ratios to the copy and to pi-quant's 8-bit dequantize-add."""
    torch.manual_seed(0)
    x, target = torch.randn(numel), torch.zeros(numel)
    work: Work = {"copy": lambda: target.copy_(x)}
    work |= piquant_work(x, target)
    for spec in SPECS:
        _, own = codec_work(spec, x, target)
        work |= {f"encode {spec}": own["encode"], f"decode {spec}": own["decode-add"]}
    rows = []
    for name, seconds in interleaved(work, runs).items():
        rows.append({"name": name, "numel": numel, "runs": runs, **quantiles(seconds)})
    medians = {row["name"]: row["ms"] for row in rows}
    peer = medians.get("decode pi-quant add 8 bit")
    for row in rows:
        row["per_copy"] = row["ms"] / medians["copy"]
        row["per_piquant_add"] = row["ms"] / peer if peer else None
    return rows


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--runs", type=int, default=41)
    options = parser.parse_args()
    rows = measure(options.numel, options.runs)
    title = f"{options.numel:,} fp32 values, {machine()['threads']} threads"
    table = view(title, ("", "median ms", "quartiles", "× copy", "× pi-quant add"))
    for row in rows:
        peer = row["per_piquant_add"]
        spread = f"{row['ms_q1']:.1f}–{row['ms_q3']:.1f}"
        ratio = f"{peer:.2f}" if peer else "–"
        table.add_row(row["name"], f"{row['ms']:.1f}", spread, f"{row['per_copy']:.2f}", ratio)
    Console().print(table)
    if not any(row["per_piquant_add"] for row in rows):
        print("without pi-quant, which is not installed: pypiquant has no wheel for Python 3.14")
    keep("cpu", rows, options)


if __name__ == "__main__":
    main()
