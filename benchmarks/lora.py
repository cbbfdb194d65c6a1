"""Steps of a LoRA fine-tune over a slow link: time and bytes, plain DDP beside codecs.

    python -m benchmarks.lora [--rate 50] [--cases 8/1] [--steps N] [--save]

Two hosts in the lab. A vision transformer (8 layers, width 512, 25M parameters, random weights)
learns handwritten digits, AdamW, with PEFT's adapters on all its linear layers; nothing else
trains. A case is the adapters' rank and a worker's batch, which decides how long a step computes.
Strategies take turns; plain DDP is first and last.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from benchmarks._rows import command_line, keep, quantiles
from laconic import lab

HOSTS = 2
PLAIN = "fp32 (no hook)"
ORDER = (PLAIN, "fp16", "dqsg:bits=4", "ecdq:error=0.08", PLAIN)
_UNMEASURED = 3  # steps: DDP rebuilds its buckets, the first one of ecdq is not encoded
_PATIENCE_S = 400.0


def adapted(r: int) -> nn.Module:
    """The model, with adapters of rank r; the same on all hosts."""
    from peft import LoraConfig, get_peft_model
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_labels": 10}
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=512,
        intermediate_size=2048,
        **shape,
    )
    base: Any = ViTForImageClassification(config)
    return get_peft_model(base, LoraConfig(r=r, target_modules="all-linear"))


def worker() -> None:
    """Answer lines of JSON, such as {"strategy": .., "r": 8, "batch": 1, "steps": 8}."""
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    digits: Any = load_digits()
    x = torch.tensor(digits.images / 8 - 1, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target)
    made: dict[int, nn.Module] = {}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = made.setdefault(job["r"], adapted(job["r"]))
        model = DistributedDataParallel(copy.deepcopy(start))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        handle = None
        if job["strategy"] != PLAIN:
            handle = lc.compress(model, job["strategy"], optimizer=optimizer)
        generator = torch.Generator().manual_seed(dist.get_rank())
        seconds, before = [], 0
        for step in range(_UNMEASURED + job["steps"]):
            if step == _UNMEASURED and handle is not None:
                before = handle.stats().sent_bytes
            began = time.perf_counter()
            index = torch.randint(len(y), (job["batch"],), generator=generator)
            optimizer.zero_grad()
            logits = model(pixel_values=x[index]).logits
            nn.functional.cross_entropy(logits, y[index]).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
        answer = {"seconds": seconds[_UNMEASURED:], "values": sum(p.numel() for p in trained)}
        if handle is None:
            size = dist.get_world_size()
            answer["sent_bytes"] = 2 * (size - 1) / size * 4 * answer["values"]
        else:
            answer["sent_bytes"] = (handle.stats().sent_bytes - before) / job["steps"]
            handle.close()
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


def measured(run: Any, r: int, batch: int, strategy: str, steps: int) -> dict[str, Any]:
    """A row; times are means over ranks."""
    run.send(json.dumps({"strategy": strategy, "r": r, "batch": batch, "steps": steps}))
    answers = [json.loads(line) for line in run.receive(timeout_s=_PATIENCE_S)]
    seconds = [statistics.mean(step) for step in zip(*(a["seconds"] for a in answers), strict=True)]
    sent = statistics.mean(answer["sent_bytes"] for answer in answers)
    row = {"r": r, "batch": batch, "values": answers[0]["values"], "strategy": strategy}
    return {**row, "steps": steps, **quantiles(seconds), "sent_bytes": sent}


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--rate", type=float, default=50.0, help="Mbit/s")
    parser.add_argument("--cases", default="8/1", help="rank of adapters / batch")
    parser.add_argument("--steps", type=int, default=8, help="of each strategy")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker()
    lacking = lab.missing()
    if lacking:
        sys.exit(lacking)
    rows: list[dict[str, Any]] = []
    with lab.Lab(hosts=HOSTS, rate_mbit=options.rate) as net:
        run = net.start([sys.executable, "-m", "benchmarks.lora", "--worker"], talk=True)
        run.receive(timeout_s=_PATIENCE_S)
        for case in options.cases.split(","):
            r, batch = map(int, case.split("/"))
            found = [measured(run, r, batch, strategy, options.steps) for strategy in ORDER]
            plain = [row for row in found if row["strategy"] == PLAIN]
            middle = statistics.mean(row["ms"] for row in plain)
            for row in found:
                row["times_faster"] = middle / row["ms"]
                row["times_fewer"] = plain[0]["sent_bytes"] / row["sent_bytes"]
                row["rate_mbit"] = options.rate
                print(json.dumps(row))
            rows += found
    keep("lora", rows, options)
    return None


if __name__ == "__main__":
    main()
