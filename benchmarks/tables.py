"""docs/benchmarks.md, and the README's table, from the rows under benchmarks/results.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks._rows import RESULTS

DOC = Path(__file__).parent.parent / "docs" / "benchmarks.md"
README = Path(__file__).parent.parent / "README.md"

_START, _END = "<!-- kernels -->", "<!-- end -->"
_SHOWN = (
    "qsgd:bits=4,block=512",
    "dqsg:bits=2,block=512",
    "dqsg:bits=4,block=512",
    "dqsg:bits=8,block=512",
    "global:bits=8",
)


def page() -> str:
    """The whole document."""
    return f"""# Kernel benchmarks

Made by `python -m benchmarks.tables` from the rows in `benchmarks/results/`; each table names the
command that measured it. Times are medians; a ratio compares two medians of one run.

## CPU

`make bench` (`python -m benchmarks.cpu --save`), {_machine("cpu")}. Encode makes a whole wire in
an existing buffer; decode adds onto an existing tensor. Rows take turns, 2^26 float32 values.
pi-quant rounds to nearest with one scale, which it is given here (finding it takes another pass).

{_cpu()}

## GPU

`python -m benchmarks.gpu --save`, {_machine("gpu")}. 2^26 values. The share is the bandwidth
reached over that of a device copy, every byte read and written counted once; `tensor` and `ndqsg`
read the input twice, for the scale. Shares above 100% are real: encoding mostly reads, and reading
is faster than a copy's half reading, half writing. Times are of captured graphs, so nothing waits
for the host.

{_gpu("float32")}

{_gpu("bfloat16")}

The slow row is `block=100`: blocks that are no power of two take a program each for their scale.
"""


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _machine(name: str) -> str:
    info = _load(name)["machine"]
    skip = ("date", "cpu") if "gpu" in info else ("date",)
    return f"{info['date']}: " + ", ".join(f"{k} {v}" for k, v in info.items() if k not in skip)


def _cpu() -> str:
    lines = ["| | ms | quartiles | × copy | × pi-quant add |", "|---|---|---|---|---|"]
    for row in _load("cpu")["rows"]:
        spread = f"{row['ms_q1']:.1f}–{row['ms_q3']:.1f}"
        peer = row["per_piquant_add"]
        ratio = f"{peer:.2f}" if peer and "decode" in row["name"] else ""
        lines.append(
            f"| {row['name']} | {row['ms']:.1f} | {spread} | {row['per_copy']:.2f} | {ratio} |"
        )
    return "\n".join(lines)


def _gpu(dtype: str) -> str:
    rows = [row for row in _load("gpu")["rows"] if row["dtype"] == dtype]
    lines = [f"| {dtype} | encode ms | share | decode-add ms | share |", "|---|---|---|---|---|"]
    lines.append(f"| device copy | {rows[0]['ms']:.4f} | | | |")
    for encode, decode in zip(rows[1::2], rows[2::2], strict=True):
        cells = [f"{row['ms']:.4f} | {row['share']:.0%}" for row in (encode, decode)]
        lines.append(f"| {encode['codec']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def readme() -> str:
    """The README with its table of kernels made anew."""
    before, rest = README.read_text().split(_START)
    return before + _START + "\n" + _summary() + "\n" + _END + rest.split(_END)[1]


def _summary() -> str:
    cpu = {row["name"]: row["per_copy"] for row in _load("cpu")["rows"]}
    gpu = {
        (row["codec"], row["dtype"], row["name"]): row["share"]
        for row in _load("gpu")["rows"]
        if "codec" in row
    }
    lines = [
        "| encode / decode-add | CPU: time over a memory copy | "
        "H200: share of a copy's bandwidth | H200, bfloat16 |",
        "|---|---|---|---|",
    ]
    for spec in _SHOWN:
        cells = [f"{cpu[f'encode {spec}']:.2f} / {cpu[f'decode {spec}']:.2f}"]
        for dtype in ("float32", "bfloat16"):
            encode, decode = (gpu[spec, dtype, name] for name in ("encode", "decode-add"))
            cells.append(f"{encode:.0%} / {decode:.0%}")
        lines.append(f"| `{spec}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    DOC.write_text(page())
    README.write_text(readme())
