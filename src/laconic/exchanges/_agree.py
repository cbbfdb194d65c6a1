"""Ranks that were started with different settings find out, and all say so."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from laconic.errors import ConfigError


def agree(settings: dict[str, str], group: dist.ProcessGroup, device: torch.device) -> None:
    """ConfigError on every rank, naming ranks and difference, unless all have these settings."""
    found = [json.loads(text) for text in _texts(json.dumps(settings), group, device)]
    problems = []
    for name in sorted(set().union(*found)):
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(found):
            values.setdefault(str(one.get(name, "nothing")), []).append(rank)
        if len(values) > 1:
            said = "; ".join(
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {value}"
                for value, ranks in values.items()
            )
            problems.append(f"{name} ({said})")
    if problems:
        raise ConfigError(f"ranks disagree on {'; and on '.join(problems)}")


def _texts(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Every rank's text: plain bytes, no objects are unpickled."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    if longest > 1 << 26:
        raise ConfigError(f"a rank announced settings of {longest} bytes")
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    every = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(every, padded, group=group)
    return [
        bytes(data[: int(size)].tolist()).decode() for data, size in zip(every, sizes, strict=True)
    ]
