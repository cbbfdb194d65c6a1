"""laconic probe: measure links, devices and codecs, on all ranks of a cluster."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic._files import Kind, check_target
from laconic._units import rate, seconds, size
from laconic.cli._common import (
    FAILED,
    USAGE,
    Force,
    Json,
    Quiet,
    console,
    examples,
    exit_with,
    print_json,
    progress,
    split_codecs,
    table,
)
from laconic.cli._names import complete
from laconic.errors import ConfigError, LaconicError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from laconic.planner import LinearCost, Links, Probe

EPILOG = examples(
    "torchrun --nnodes 4 --nproc-per-node 8 ... -m laconic probe --out probe.json",
    "torchrun --nproc-per-node 2 -m laconic probe --model train:setup --out probe.json",
    "laconic lab run --hosts 4 --rate 100mbit -- laconic probe --out probe.json",
    note="Then: laconic plan --probe probe.json",
)
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WIDTH = 100
_UNLIMITED = 1e17  # per second: a speed above it was not the bottleneck of any measurement


def probe_command(
    model: Annotated[
        str | None,
        typer.Option(
            help="module:function that returns (model, loss) or (model, loss, optimizer)."
        ),
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            help="Codecs to measure, separated by commas.",
            show_default="ten common ones",
            autocompletion=complete("codecs", "wrappers", listed=True),
        ),
    ] = None,
    patience_s: Annotated[
        float, typer.Option("--seconds", help="Approximate duration; slow links take longer.")
    ] = 30.0,
    out: Annotated[
        Path | None, typer.Option(help="File to write, for laconic plan --probe.")
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure links, devices, codecs and a model, on all ranks at once.

    `loss` is a function that takes the model and returns the loss of a new batch.
    """
    if any(name not in os.environ for name in _VARIABLES):
        raise ConfigError(
            "a probe runs on all ranks: torchrun --nproc-per-node 2 -m laconic probe, or laconic "
            "lab run --hosts 4 -- laconic probe"
        )
    from laconic import planner

    rank = int(os.environ["RANK"])
    try:
        wanted = split_codecs(codecs) if codecs else None
        if not 0 < patience_s < math.inf:
            raise ConfigError(f"--seconds must be above 0, not {patience_s}")
        if out is not None:
            check_target(out, Kind.PROBE, force=force)
    except ConfigError as error:  # the same on all ranks: one reports it
        if rank:
            raise typer.Exit(USAGE) from error
        raise
    try:
        with _process_group(patience_s) as device:
            setup = planner.load_setup(model) if model else None
            with progress(quiet=quiet or rank > 0) as watch:
                found = planner.probe(
                    setup, codecs=wanted, device=device, patience_s=patience_s, watch=watch
                )
    except LaconicError:
        raise
    except RuntimeError as error:  # torch's: a lost rank, a time-out
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        exit_with(f"the probe failed on rank {rank}: {problem}", FAILED)
    if rank:
        return
    if as_json:  # before the file is written: a full disk does not lose the measurements
        print_json(asdict(found))
    else:
        _show(found)
    if out is not None:
        found.save(out, force=force)
        if not as_json:
            print(f"Next: laconic plan --probe {shlex.quote(str(out))}")


@contextmanager
def _process_group(patience_s: float) -> Iterator[torch.device]:
    """The ranks that torchrun started; over NCCL where each has a GPU of its own."""
    import torch
    import torch.distributed as dist

    from laconic.comm._closing import wait_for_gloo_threads

    local = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if cuda and ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{ranks} ranks share {torch.cuda.device_count()} GPUs here; start one rank per GPU"
        )
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=max(120.0, 10 * patience_s))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
    try:
        yield device
        dist.barrier()  # Gloo aborts a rank whose peer exits while it still listens
    finally:
        dist.destroy_process_group()
        wait_for_gloo_threads()


def _show(found: Probe) -> None:
    from laconic.planner._strategy import short

    out, cluster = console(_WIDTH), found.cluster
    copy = 8 * cluster.device.copy.per_s
    parts = [f"{name} {ms:.2f}" for name, ms in asdict(cluster.device).items() if name != "copy"]
    out.print(
        f"{cluster.workers} workers, {cluster.per_node} per node, {cluster.backend}; "
        f"{found.machine}: {', '.join(parts)}, copies {size(copy)}/s"
    )
    out.print(_links(cluster.flat, cluster.inside, cluster.between))
    rows = table("codecs", "codec", "bits", "NMSE", "encode", "", "decode", "")
    for cost in cluster.codecs:
        speeds = [cell for line in (cost.encode, cost.decode) for cell in _speed(line)]
        rows.add_row(short(cost.spec), f"{cost.bits_once:.2f}", f"{cost.error:.2g}", *speeds)
    out.print(rows)
    work = found.workload
    if work is not None:
        kappa = "" if work.kappa is None else f"; κ = {work.kappa:.3f}"
        units = ", in the optimizer's units" if work.adaptive else ""
        out.print(
            f"model: {work.values:,} values in {len(work.buckets)} buckets of DDP; forward "
            f"{seconds(work.forward_s)}, backward {seconds(work.backward_s)}, rest "
            f"{seconds(work.rest_s)}{kappa}{units}"
        )


def _links(flat: Links, inside: Links | None, between: Links | None) -> Table:
    rows = table("links", "", "latency", "rate per rank", "spread")
    named = [("all", flat), ("inside a node", inside), ("between nodes", between)]
    for where, links in ((where, links) for where, links in named if links is not None):
        lines = [("all-reduce", line) for line in links.allreduce]
        for kind, line in [
            *lines,
            ("all-to-all", links.all_to_all),
            ("send-receive", links.sendrecv),
        ]:
            speed = "no limit seen" if line.per_s > _UNLIMITED else rate(8 * line.per_s)
            rows.add_row(f"{kind}, {where}", seconds(line.start_s), speed, f"{line.spread:.0%}")
    return rows


def _speed(line: LinearCost) -> tuple[str, str]:
    """Fixed time per call, and bytes of fp32 input per second."""
    speed = "" if line.per_s > _UNLIMITED else f"{size(4 * line.per_s)}/s"
    return seconds(line.start_s), speed
