"""GPU kernels beside a device copy, in one run.

    python -m benchmarks.gpu [--numel 67108864] [--save]

`share` is the bandwidth reached, counting every byte read and written once (input, wire, and
for decode-accumulate the target twice), over the bandwidth of a device-to-device copy.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks._rows import codec_work, command_line, keep, milliseconds

SPECS = (
    "qsgd:bits=2,block=512",
    "qsgd:bits=4,block=512",
    "qsgd:bits=8,block=512",
    "qsgd:bits=4,block=1024",
    "dqsg:bits=2,block=512",
    "dqsg:bits=3,block=512",
    "dqsg:bits=4,block=512",
    "dqsg:bits=8,block=512",
    "dqsg:bits=2,block=1024",
    "dqsg:bits=4,block=1024",
    "dqsg:bits=8,block=1024",
    "qsgd:bits=4,norm=l2,block=512",
    "dqsg:bits=4,block=tensor",
    "dqsg:bits=4,block=100",
    "ndqsg",
    "global:bits=8",
    "global:bits=32",
    "global-exp:bits=8",
    "global-exp:bits=4",
)


def codec_rows(x: torch.Tensor, spec: str, speed: float) -> list[dict[str, Any]]:
    """Encode and decode-accumulate of one codec; speed is the copy's bytes per ms."""
    size = x.numel() * x.element_size()
    reads = 2 if "tensor" in spec or spec == "ndqsg" else 1  # a whole-tensor scale is read first
    wire, work = codec_work(spec, x, torch.zeros_like(x))
    counts = {
        "encode": reads * size + wire.nbytes,
        "decode-add": (3 if spec.startswith("ndqsg") else 2) * size + wire.nbytes,
    }
    rows = []
    for name, count in counts.items():
        ms = milliseconds(work[name])
        row = {"name": name, "codec": spec, "dtype": str(x.dtype).removeprefix("torch.")}
        rows.append({**row, "numel": x.numel(), "ms": ms, "share": count / ms / speed})
    return rows


def measure(numel: int) -> list[dict[str, Any]]:
    """All rows, for fp32 and bf16."""
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(numel, device="cuda").to(dtype)
        other = torch.empty_like(x)
        ms = milliseconds(lambda x=x, other=other: other.copy_(x))
        speed = 2 * numel * x.element_size() / ms
        name = str(dtype).removeprefix("torch.")
        rows.append({"name": "copy", "dtype": name, "numel": numel, "ms": ms, "share": 1.0})
        for spec in SPECS:
            rows += codec_rows(x, spec, speed)
    return rows


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--numel", type=int, default=1 << 26)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device; benchmarks.cpu does not")
    rows = measure(options.numel)
    for row in rows:
        codec = row.get("codec", "")
        print(
            f"{row['name']:11} {row['dtype']:9} {codec:32} {row['ms']:8.4f} ms {row['share']:6.1%}"
        )
    keep("gpu", rows, options)


if __name__ == "__main__":
    main()
