"""laconic plan: what it does, on a probed cluster or on paper."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from laconic._files import Kind, check_target, write_made
from laconic._units import parse_count, parse_rate, parse_seconds, rate, seconds, size
from laconic.cli._common import print_json
from laconic.cli._plot import plotted
from laconic.errors import ConfigError
from laconic.planner import (
    Choice,
    Machine,
    Paper,
    Plan,
    Probe,
    Workload,
    machine,
    paper_workload,
    plan,
    resized,
)
from laconic.planner._figures import NVLINK, NVLINK_LATENCY_S
from laconic.planner._plan import At

_SHOWN, _SHOWN_ABOVE = 12, 4  # strategies within the error budget, and above it
_WIDTH = 120  # of the table; narrower terminals wrap its lines


@dataclass(frozen=True, kw_only=True)
class Paperwork:
    """Options of a cluster on paper, as they were typed."""

    machine: str | None
    device: str | None
    link: str | None
    latency: str | None
    gpus_per_node: int | None
    inside: str | None


def run(
    *,
    probe: Path | None,
    paper: Paperwork,
    workers: int | None,
    model: tuple[str | None, str | None, str],
    error: float,
    plot: Path | None,
    force: bool,
    every: bool,
    as_json: bool,
) -> None:
    """Plan, and show it."""
    if plot is not None:
        check_target(plot, Kind.PAGE, force=force)
    asked = None if model[:2] == (None, None) else _workload(*model)
    if probe is not None:
        given = [name for name, value in asdict(paper).items() if value is not None]
        extra = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        if extra:
            raise ConfigError(f"a probe has its own figures: leave out {extra}")
        job = _probed(probe, asked, workers)
    else:
        job = _on_paper(paper, asked, workers)
    found = plan(job.at(1.0), job.workload, error=error, link_bit_s=job.link_bit_s, at=job.at)
    page = None if plot is None else plotted(found, job.workload, job.at)
    if as_json:
        print_json(as_dict(found))
    else:
        _show(found, job, every)
    if plot is not None and page is not None:
        write_made(plot, page, Kind.PAGE, force=force)


@dataclass(frozen=True, kw_only=True)
class _Job:
    at: At
    workload: Workload
    link_bit_s: float | None
    title: str


def _probed(path: Path, asked: Workload | None, workers: int | None) -> _Job:
    found = Probe.load(path)
    workload = asked or found.workload
    if workload is None:
        raise ConfigError(
            "this probe has no model: give --params 125m --compute 300ms, or probe with --model"
        )
    cluster, changed = resized(found.cluster, workload, workers or found.cluster.workers)
    assert changed is not None
    count = f"{found.cluster.workers} probed" if workers else "as probed"
    title = f"{cluster.workers} workers ({count}), {found.machine}"
    return _Job(at=cluster.faster, workload=changed, link_bit_s=None, title=title)


def _on_paper(given: Paperwork, asked: Workload | None, workers: int | None) -> _Job:
    if given.machine is None and given.link is None:
        raise ConfigError(
            "give --probe probe.json (laconic probe makes it), --machine p4d.24xlarge, or --link "
            "25gbit"
        )
    if asked is None:
        raise ConfigError("give the model: --params 7b --compute 400ms")
    figures = _figures(given)
    count = workers if workers is not None else 2 * figures.per_node
    paper = Paper(machine=figures, workers=count)
    nodes = -(-count // figures.per_node)
    title = (
        f"{count} workers on {nodes} {'node' if nodes == 1 else 'nodes'}, {figures.device}, "
        f"{rate(figures.link_bit_s)} a node; on paper"
    )
    return _Job(at=paper.cluster, workload=asked, link_bit_s=paper.link_bit_s, title=title)


def _figures(given: Paperwork) -> Machine:
    """A machine's, changed by what was said."""
    if given.machine is not None:
        figures = machine(given.machine)
    else:
        figures = _node((given.device or "h100").lower())
    changes: dict[str, Any] = {}
    if given.device is not None:
        changes["device"] = given.device.lower()
    if given.link is not None:
        changes["link_bit_s"] = parse_rate(given.link)
    if given.latency is not None:
        changes["latency_s"] = parse_seconds(given.latency)
    if given.gpus_per_node is not None:
        changes["per_node"] = given.gpus_per_node
    if given.inside is not None:
        changes["inside_byte_s"] = parse_rate(given.inside) / 8
    return replace(figures, **changes)


def _node(device: str) -> Machine:
    """Of a device that has NVLink or not; what is not known of it is said by options."""
    node = Machine(device=device, per_node=1, link_bit_s=1e9, latency_s=30e-6)
    if device not in NVLINK:
        return node
    return replace(node, inside_byte_s=NVLINK[device], inside_latency_s=NVLINK_LATENCY_S)


def _workload(params: str | None, compute: str | None, dtype: str) -> Workload:
    if params is None or compute is None:
        raise ConfigError("--params and --compute belong together: --params 7b --compute 400ms")
    return paper_workload(parse_count(params), parse_seconds(compute), dtype)


def as_dict(found: Plan) -> dict[str, Any]:
    """For JSON: all fields, the verdict and the best."""
    told = asdict(found)
    return {**told, "verdict": found.verdict, "best": found.best.name, "code": found.best.code}


def _show(found: Plan, job: _Job, every: bool) -> None:
    console, work = Console(), job.workload
    console.width = max(_WIDTH, console.width)
    largest = max(bucket.values for bucket in work.buckets) * work.value_bytes
    console.print(
        f"{job.title}. {work.values:,} values, {seconds(work.compute_s)} of computation, "
        f"{_buckets(work)} of up to {size(largest)}",
        highlight=False,
        markup=False,
    )
    title = f"A step, error of the mean up to {found.error:g}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = "strategy", "step", "faster", "limit", "sent", "memory", "NMSE", "beats plain DDP"
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    shown = [
        choice
        for number, choice in enumerate(found.choices)
        if every or number < _SHOWN or choice in (found.best, found.plain)
    ]
    for choice in shown:
        table.add_row(*_cells(choice), style="bold" if choice is found.best else "")
    above = found.above_error if every else found.above_error[:_SHOWN_ABOVE]
    if above:
        table.add_section()
    for choice in above:
        table.add_row(*_cells(choice), style="dim")
    console.print(table)
    if any(choice.changes_training for choice in found.choices):
        console.print("* changes training, not only the gradient's precision")
    if above:
        console.print("Below the line: more error than that.")
    hidden = len(found.choices) + len(found.above_error) - len(shown) - len(above)
    if hidden:
        console.print(f"{hidden} more: --all")
    console.print(found.verdict, highlight=False, soft_wrap=True)
    console.print(f"\n    {found.best.code}", highlight=False, soft_wrap=True)


def _buckets(work: Workload) -> str:
    return "1 bucket" if len(work.buckets) == 1 else f"{len(work.buckets)} buckets"


def _cells(choice: Choice) -> tuple[str, ...]:
    one = choice.prediction
    return (
        choice.name + (" *" if choice.changes_training else ""),
        seconds(one.step_s),
        f"{choice.speedup:.1f} x",
        one.limit,
        size(one.sent_bytes),
        f"+{size(one.memory_bytes)}" if one.memory_bytes else "",
        f"{one.error:.2g}" if one.error else "0",
        "" if choice.break_even is None else str(choice.break_even),
    )
