"""One server, and workers that do not wait for each other, one of them slow.

    torchrun --nproc-per-node 5 examples/parameter_server.py [--max-delay 8]

Rank 0 keeps the weights. The others learn handwritten digits with quantized gradients (QSGD, 4
bits), each at its own speed: the last worker computes every batch four times, as an old machine
would. Prints how often each came, how late its gradients were, and what was learnt.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import digits
import torch
import torch.distributed as dist
from torch import nn

import laconic as lc

TEST = 360  # digits kept for testing
UPDATES = 600


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-delay", type=int, default=8)
    parser.add_argument("--codec", default="qsgd:bits=4")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    model = digits.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    opt = lc.AsyncSGD(optimizer, model, max_delay=options.max_delay, codec=options.codec)
    if opt.serves:
        opt.serve()
        told = opt.server_stats()
        print(f"{told.updates} updates, workers were held back {told.held_seconds:.1f} s in all")
        for rank, delay in sorted(told.delays.items()):
            print(
                f"rank {rank}: {delay.count} gradients, {delay.mean:.1f} updates late on average,"
                f" {delay.most} at most"
            )
    else:
        work(opt, model)
    dist.destroy_process_group()


def work(opt: lc.AsyncSGD, model: nn.Module) -> None:
    """Until all workers together have made UPDATES updates."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    data = digits.load()
    pixels, labels = data.pixels, data.labels
    pick = torch.Generator().manual_seed(rank)
    share = UPDATES // last
    for _ in range(share // 2 if rank == last else share):
        at = torch.randint(len(labels) - TEST, (32,), generator=pick)
        for _ in range(4 if rank == last else 1):
            opt.zero_grad()
            nn.functional.cross_entropy(model(pixels[at]), labels[at]).backward()
        opt.step()
    opt.leave()
    if rank == 1:
        right = model(pixels[-TEST:]).argmax(1) == labels[-TEST:]
        print(
            f"rank 1: {right.float().mean():.1%} of the test digits, {opt.stats().ratio:.1f} times"
            " fewer bytes sent than by synchronous fp32"
        )


if __name__ == "__main__":
    main()
