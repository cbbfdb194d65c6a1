"""ecdq with the bitmap coder on a GPU: whole wires, in bytes of fp32 input a second.

    python -m benchmarks.ecdq_gpu [--numel 67108864] [--save]

Encode finds the step, quantizes, codes and collects one contiguous wire; decode-add verifies the
check sums and adds onto a target. All is timed as a captured graph: nothing waits for the host.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks._rows import codec_work, command_line, keep, milliseconds

SPECS = (
    "ecdq:error=0.083",
    "ecdq:error=0.083,subtract=always",
    "ecdq:error=0.01",
    "ecdq:error=0.0001",
    "ecdq:error=0.083,coder=fixed",
    "ecdq:error=0.083,max_bits=3",
)


def inputs(numel: int) -> dict[str, torch.Tensor]:
    """Dense, heavy-tailed and sparse values."""
    normal = torch.randn(numel, device="cuda")
    tails = torch.distributions.StudentT(torch.tensor(3.0, device="cuda"))
    return {
        "gaussian": normal,
        "gaussian bf16": normal.bfloat16(),
        "student-t3": tails.sample(torch.Size((numel,))),
        "95%-zero": normal * (torch.rand(numel, device="cuda") < 0.05),
    }


def rows_of(name: str, x: torch.Tensor, spec: str) -> list[dict[str, Any]]:
    """Encode and decode-add of one input."""
    wire, work = codec_work(spec, x, torch.zeros_like(x))
    rows = []
    for kind, function in work.items():
        ms = milliseconds(function)
        row = {"name": kind, "codec": spec, "input": name, "numel": x.numel(), "ms": ms}
        row["bits"] = 8 * wire.nbytes / x.numel()
        rows.append({**row, "fp32_gb_s": 4 * x.numel() / ms / 1e6})
    return rows


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--numel", type=int, default=1 << 26)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.ecdq_gpu needs a CUDA device")
    rows: list[dict[str, Any]] = []
    for name, x in inputs(options.numel).items():
        for spec in SPECS if name == "gaussian" else SPECS[:1]:
            rows += rows_of(name, x, spec)
    for row in rows:
        print(
            f"{row['name']:11} {row['input']:14} {row['codec']:34} {row['bits']:6.3f} bits "
            f"{row['ms']:8.4f} ms {row['fp32_gb_s']:7.0f} GB/s"
        )
    keep("ecdq_gpu", rows, options)


if __name__ == "__main__":
    main()
