"""The DDP hook on one GPU: what it adds to a step, and whether the host ever waits.

    python -m benchmarks.hook_gpu [--save]

NCCL with one rank: nothing travels, but all kernels, copies, streams and events of the hook run. A
model of 8 matrices of 4096² (134 million values, 537 MB of fp32 gradients), batch 4096.
`waits` counts the host's waits for the device in the hook's own thread, in one step after warm-up,
as torch's profiler sees them (stream, event and device synchronisation, copies to the host).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import laconic as lc
from benchmarks._rows import command_line, keep

SPECS = (
    "plain DDP",
    "fp16",
    "qsgd:bits=4",
    "dqsg:bits=4",
    "rotate(dqsg:bits=4)",
    "global:bits=8",
    "ecdq:error=0.08",
)
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "DtoH")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(4096, 4096, bias=False), nn.ReLU()]
    return nn.Sequential(*layers).cuda()


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def measured(spec: str) -> dict[str, Any]:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    if spec != "plain DDP":
        lc.compress(model, spec, even_alone=True)
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        step(model, x)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(model, x)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step(model, x)
        torch.cuda.synchronize()
    waits = [
        event.name for event in seen.events() or [] if any(name in event.name for name in WAITS)
    ]
    times.sort()
    return {
        "strategy": spec,
        "step_ms": 1e3 * times[len(times) // 2],
        "waits": len(waits) - 1,  # the measurement's own
        "waited_in": sorted(set(waits)),
    }


def main() -> None:
    options = command_line(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1
        )
        rows = [measured(spec) for spec in SPECS]
        dist.destroy_process_group()
    for row in rows:
        print(f"{row['strategy']:24} {row['step_ms']:7.2f} ms  waits {row['waits']}")
    keep("hook_gpu", rows, options)


if __name__ == "__main__":
    main()
