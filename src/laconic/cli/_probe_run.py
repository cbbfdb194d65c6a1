"""laconic probe: what it does, on all ranks of a cluster."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from laconic._files import Kind, check_target
from laconic._units import rate, seconds, size
from laconic.cli._common import FAILED, INPUT, leave, print_json
from laconic.codecs import codec
from laconic.codecs._spec import split
from laconic.errors import ConfigError, LaconicError
from laconic.exchanges._ending import wait_for_gloo_threads
from laconic.planner import Line, Links, Probe, load_setup
from laconic.planner import probe as measure
from laconic.planner._names import short

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WIDTH = 100  # of tables; narrower terminals wrap their lines
_FREE = 1e17  # amounts a second: what is as fast as this costs nothing


def run(
    *,
    model: str | None,
    codecs: str | None,
    patience_s: float,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Probe, and show it on rank 0."""
    if any(name not in os.environ for name in _NEEDED):
        raise ConfigError(
            "a probe runs on all ranks: torchrun --nproc-per-node 2 -m laconic probe, or laconic "
            "lab run --hosts 4 -- laconic probe"
        )
    rank = int(os.environ["RANK"])
    try:
        wanted = split_codecs(codecs) if codecs else None
        if not 0 < patience_s < math.inf:
            raise ConfigError(f"--seconds is above 0, not {patience_s}")
        if out is not None:
            check_target(out, Kind.PROBE, force=force)
    except ConfigError as error:  # the same on all ranks: one says it
        if rank:
            raise typer.Exit(INPUT) from error
        raise
    try:
        with _ranks(patience_s) as device:
            setup = load_setup(model) if model else None
            found = measure(setup, codecs=wanted, device=device, patience_s=patience_s)
    except LaconicError:
        raise
    except RuntimeError as error:  # torch's: a rank that is gone, a time-out
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        leave(f"the probe failed on rank {rank}: {problem}", FAILED)
    if rank:
        return
    if as_json:  # before it is written: what was measured is not lost with a full disk
        print_json(asdict(found))
    else:
        show(found, Console())
    if out is not None:
        found.save(out, force=force)
        if not as_json:
            print(f"Next: laconic plan --probe {shlex.quote(str(out))}")


@contextmanager
def _ranks(patience_s: float) -> Iterator[torch.device]:
    """A process group of the ranks that torchrun started; NCCL where each has a GPU of its own."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    together = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if cuda and together > torch.cuda.device_count():
        raise ConfigError(
            f"{together} ranks share {torch.cuda.device_count()} GPUs here; start one for each"
        )
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    patience = timedelta(seconds=max(120.0, 10 * patience_s))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=patience)
    try:
        yield device
        dist.barrier()  # Gloo aborts a rank whose peer leaves while it still listens
    finally:
        dist.destroy_process_group()
        wait_for_gloo_threads()


def split_codecs(text: str) -> tuple[str, ...]:
    """Texts of codecs between commas; each is checked."""
    found = split(text)
    for spec in found:
        codec(spec)
    return found


def show(found: Probe, console: Console) -> None:
    """As tables."""
    console.width = max(_WIDTH, console.width)
    cluster, device = found.cluster, asdict(found.cluster.device)
    copy = 8 * cluster.device.copy.per_s
    parts = [f"{name} {value:.2f}" for name, value in device.items() if name != "copy"]
    console.print(
        f"{cluster.workers} workers, {cluster.per_node} on a node, {cluster.backend}; "
        f"{found.machine}: {', '.join(parts)}, copies {size(copy)}/s"
    )
    console.print(_links_table(cluster.flat, cluster.inside, cluster.between))
    table = _table("codecs", ("codec", "bits", "NMSE", "encode", "", "decode", ""))
    for cost in cluster.codecs:
        speeds = [cell for line in (cost.encode, cost.decode) for cell in _codec_cells(line)]
        table.add_row(short(cost.spec), f"{cost.bits_once:.2f}", f"{cost.error:.2g}", *speeds)
    console.print(table)
    work = found.workload
    if work is not None:
        kappa = "" if work.kappa is None else f"; κ = {work.kappa:.3f}"
        units = ", in the optimizer's units" if work.adaptive else ""
        console.print(
            f"model: {work.values:,} values in DDP's buckets ({len(work.buckets)}); forward "
            f"{seconds(work.forward_s)}, backward {seconds(work.backward_s)}, rest "
            f"{seconds(work.rest_s)}{kappa}{units}"
        )


def _links_table(flat: Links, inside: Links | None, between: Links | None) -> Table:
    table = _table("links", ("", "start", "rate of a rank", "spread"))
    named = [("all", flat), ("inside a node", inside), ("between nodes", between)]
    for where, links in ((where, links) for where, links in named if links is not None):
        lines = [("all-reduce", line) for line in links.allreduce]
        for kind, line in [*lines, ("swap", links.swap), ("hop", links.hop)]:
            speed = "no limit seen" if line.per_s > _FREE else rate(8 * line.per_s)
            table.add_row(f"{kind}, {where}", seconds(line.start_s), speed, f"{line.spread:.0%}")
    return table


def _codec_cells(line: Line) -> tuple[str, str]:
    """Start, and bytes of fp32 input a second."""
    return seconds(line.start_s), "" if line.per_s > _FREE else f"{size(4 * line.per_s)}/s"


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table
