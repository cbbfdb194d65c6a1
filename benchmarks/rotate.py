"""What rotation costs: encode and decode-accumulate with and without it, in one run.

    python -m benchmarks.rotate [--numel 67108864] [--runs 21] [--cuda] [--save]

On the CPU the functions take turns, and every row is a median. On CUDA, times are of captured
graphs. `ratio` compares a row with the same codec unrotated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks._rows import codec_work, command_line, interleaved, keep, milliseconds, quantiles

PLAIN = ("dqsg:bits=4,block=512", "qsgd:bits=4,block=512", "dqsg:bits=8,block=512")
OTHERS = ("dqsg:bits=4,block=tensor",)  # rotated on their own, then encoded
BLOCKS = (512, 1024, 2048, 4096)

Work = dict[tuple[str, str], Callable[[], object]]


def specs() -> dict[str, str]:
    """Codecs to measure, and which one each is compared with."""
    pairs = {plain: plain for plain in (*PLAIN, *OTHERS)}
    pairs |= {f"rotate({plain})": plain for plain in (*PLAIN, *OTHERS)}
    pairs |= {f"rotate({PLAIN[0]}):block={block}": PLAIN[0] for block in BLOCKS if block != 1024}
    return pairs


def on_cpu(work: Work, runs: int) -> dict[tuple[str, str], dict[str, float]]:
    """Median and quartiles of runs that take turns."""
    named = {" ".join(key): function for key, function in work.items()}
    seconds = interleaved(named, runs)
    return {key: quantiles(seconds[" ".join(key)]) for key in work}


def on_cuda(work: Work, runs: int) -> dict[tuple[str, str], dict[str, float]]:
    """Medians of captured graphs: any wait for the host would fail here."""
    return {key: {"ms": milliseconds(function, runs)} for key, function in work.items()}


def measure(numel: int, runs: int, device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """All rows, with their ratios."""
    x = torch.randn(numel, device=device).to(dtype)
    target = torch.zeros_like(x)
    pairs = specs()
    work: Work = {}
    for spec in pairs:
        work |= {(name, spec): run for name, run in codec_work(spec, x, target)[1].items()}
    times = (on_cuda if device == "cuda" else on_cpu)(work, runs)
    kind = {"dtype": str(dtype).removeprefix("torch."), "device": device, "numel": numel}
    rows = []
    for (name, spec), values in times.items():
        ratio = values["ms"] / times[name, pairs[spec]]["ms"]
        rows.append({"name": name, "codec": spec, **kind, "runs": runs, **values, "ratio": ratio})
    return rows


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--runs", type=int, default=21, help="on CUDA, milliseconds of each")
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if options.cuda else "cpu"
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16) if options.cuda else (torch.float32,):
        rows += measure(options.numel, options.runs, device, dtype)
    for row in rows:
        print(
            f"{row['name']:10} {row['dtype']:8} {row['codec']:42} {row['ms']:8.4g} ms "
            f"{row['ratio']:5.2f} x"
        )
    keep(f"rotate-{device}", rows, options)


if __name__ == "__main__":
    main()
