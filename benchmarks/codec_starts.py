"""What a call of a codec costs before its first value: Python, checks, launches.

    python -m benchmarks.codec_starts [--device cuda] [--save]

As the probe measures codecs, with one rank: encode and decode-add of 2^16 to 2^22 Gaussian values,
called in a loop; a line through the times, of which the start is kept. The paper clusters of the
planner use it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import laconic as lc
from benchmarks._rows import command_line, keep
from laconic.planner import CODECS
from laconic.planner._probe_cluster import Clock
from laconic.planner._probe_codecs import Sample, probe_codec


def rows_of(spec: str, clock: Clock) -> list[dict[str, Any]]:
    sample = Sample.gaussian(clock.device, 1)
    try:
        cost = probe_codec(spec, sample, clock, 4.0)
    except lc.ConfigError as error:
        print(f"{spec}: {error}")
        return []
    row: dict[str, Any] = {"codec": spec, "device": clock.device.type}
    for kind in ("encode", "decode", "norm", "reduce"):
        line = getattr(cost, kind)
        row[f"{kind}_us"] = 1e6 * line.start_s
        row[f"{kind}_values_s"] = line.per_s
    return [row]


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        world = dist.group.WORLD
        assert isinstance(world, dist.ProcessGroup)
        device = torch.device(options.device, 0) if options.device == "cuda" else "cpu"
        clock = Clock(world, torch.device(device))
        rows = [row for spec in CODECS for row in rows_of(spec, clock)]
        dist.destroy_process_group()
    for row in rows:
        told = [f"{kind} {row[f'{kind}_us']:6.1f} µs" for kind in ("encode", "decode")]
        print(f"{row['codec']:28} {', '.join(told)}")
    keep(f"codec_starts_{options.device}", rows, options)


if __name__ == "__main__":
    main()
