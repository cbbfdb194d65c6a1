"""laconic plan: predict step times, for a probed cluster or for one on paper."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic._files import Kind, check_target, write_made
from laconic._progress import part
from laconic._units import parse_count, parse_rate, parse_seconds, rate, seconds, size
from laconic.cli._common import (
    Force,
    Json,
    Quiet,
    console,
    examples,
    print_json,
    progress,
    table,
)
from laconic.cli._names import NAMES, complete
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.planner import Choice, Machine, Plan, Workload
    from laconic.planner._plan import At

EPILOG = examples(
    "laconic plan --probe probe.json",
    "laconic plan --probe probe.json --params 125m --compute 300ms --plot plan.html",
    "laconic plan --machine p4d.24xlarge --workers 64 --params 7b --compute 400ms --dtype bf16",
    "laconic plan --link 25gbit --latency 30us --gpus-per-node 8 --params 7b --compute 400ms",
)
_MODEL, _PAPER, _OUTPUT = "Model", "Cluster on paper", "Output"
_SHOWN, _SHOWN_ABOVE = 12, 4  # strategies within the error budget, and above it
_WIDTH = 120
_BEFORE_PLOT = 0.8  # of the work


@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """Options of a cluster on paper, as they were given."""

    machine: str | None
    device: str | None
    link: str | None
    latency: str | None
    gpus_per_node: int | None
    inside: str | None

    def given(self) -> str:
        """The names of those that were given: --link, --device."""
        names = [name for name, value in asdict(self).items() if value is not None]
        return ", ".join(f"--{name.replace('_', '-')}" for name in names)

    def figures(self) -> Machine:
        """A machine's figures, changed by the other options."""
        from laconic.planner import machine
        from laconic.planner._machine_catalog import node

        device = self.device and self.device.lower()
        changes = {
            "device": device,
            "link_bit_s": self.link and parse_rate(self.link),
            "latency_s": self.latency and parse_seconds(self.latency),
            "per_node": self.gpus_per_node,
            "inside_byte_s": self.inside and parse_rate(self.inside) / 8,
        }
        usual = node(device or "h100", 1, 1e9, 30e-6)
        if self.machine is not None:
            usual = machine(self.machine)
        return replace(usual, **{k: v for k, v in changes.items() if v is not None})


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What to plan for."""

    at: At
    workload: Workload
    link_bit_s: float | None
    title: str


def plan_command(
    probe: Annotated[
        Path | None,
        typer.Option(help="File of laconic probe, in place of a cluster on paper."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of workers, 2 to 4096.",
            show_default="those of the probe; two nodes on paper",
        ),
    ] = None,
    error: Annotated[
        float, typer.Option(help="Allowed error (NMSE) of the averaged gradient.")
    ] = 0.1,
    params: Annotated[
        str | None, typer.Option(help="Number of parameters: 125m, 7b.", rich_help_panel=_MODEL)
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(help="Time per step without communication: 400ms.", rich_help_panel=_MODEL),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help=f"Type of the gradients: {', '.join(NAMES['dtypes'])}.",
            rich_help_panel=_MODEL,
            autocompletion=complete("dtypes"),
        ),
    ] = "fp32",
    machine: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(NAMES['machines'])}.",
            rich_help_panel=_PAPER,
            autocompletion=complete("machines"),
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            "--rate",
            help="Rate of a node's NIC: 100mbit, 25gbit.",
            rich_help_panel=_PAPER,
        ),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(help="Latency between nodes: 30us, 10ms.", rich_help_panel=_PAPER),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Workers that share a NIC.", rich_help_panel=_PAPER)
    ] = None,
    inside: Annotated[
        str | None,
        typer.Option(
            help="Rate between workers of a node, in one direction: 2400gbit.",
            rich_help_panel=_PAPER,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(NAMES['devices'])}.",
            show_default="the machine's, or h100",
            rich_help_panel=_PAPER,
            autocompletion=complete("devices"),
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="HTML page with step times by link rate.", rich_help_panel=_OUTPUT),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show all strategies.", rich_help_panel=_OUTPUT)
    ] = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict which strategies pay off, and at which link rates.

    A probe with a model needs no other option. On paper, options override the machine's figures;
    without --machine, --link is required.
    """
    from laconic.cli._plot import plotted
    from laconic.planner import plan

    if plot is not None:
        check_target(plot, Kind.PAGE, force=force)
    paper = PaperOptions(
        machine=machine,
        device=device,
        link=link,
        latency=latency,
        gpus_per_node=gpus_per_node,
        inside=inside,
    )
    model = None if params is None and compute is None else _workload(params, compute, dtype)
    if probe is None:
        job = _on_paper(paper, model, workers)
    else:
        job = _probed(probe, paper, model, workers)
    with progress(quiet=quiet) as watch:
        found = plan(
            job.at(1.0),
            job.workload,
            error=error,
            link_bit_s=job.link_bit_s,
            at=job.at,
            watch=part(watch, 0.0, 1.0 if plot is None else _BEFORE_PLOT),
        )
        page = None
        if plot is not None:
            watch("plot", _BEFORE_PLOT)
            page = plotted(found, job.workload, job.at)
    if as_json:
        best = {"verdict": found.verdict, "best": found.best.name, "code": found.best.code}
        print_json(asdict(found) | best)
    else:
        _show(found, job, every)
    if plot is not None and page is not None:
        write_made(plot, page, Kind.PAGE, force=force)


def _probed(path: Path, paper: PaperOptions, model: Workload | None, workers: int | None) -> _Job:
    from laconic.planner import Probe, resized

    if extra := paper.given():
        raise ConfigError(f"a probe has its own figures: leave out {extra}")
    found = Probe.load(path)
    workload = model or found.workload
    if workload is None:
        raise ConfigError(
            "this probe has no model: give --params 125m --compute 300ms, or probe with --model"
        )
    cluster, changed = resized(found.cluster, workload, workers or found.cluster.workers)
    assert changed is not None
    count = f"{found.cluster.workers} probed" if workers else "as probed"
    title = f"{cluster.workers} workers ({count}), {found.machine}"
    return _Job(at=cluster.faster, workload=changed, link_bit_s=None, title=title)


def _on_paper(options: PaperOptions, model: Workload | None, workers: int | None) -> _Job:
    from laconic.planner import Paper

    if options.machine is None and options.link is None:
        raise ConfigError(
            "give --probe probe.json (laconic probe makes it), --machine p4d.24xlarge, or --link "
            "25gbit"
        )
    if model is None:
        raise ConfigError("give the model: --params 7b --compute 400ms")
    figures = options.figures()
    count = workers if workers is not None else 2 * figures.per_node
    paper = Paper(machine=figures, workers=count)
    nodes = -(-count // figures.per_node)
    title = (
        f"{count} workers on {nodes} {'node' if nodes == 1 else 'nodes'}, {figures.device}, "
        f"{rate(figures.link_bit_s)} per node; on paper"
    )
    return _Job(at=paper.cluster, workload=model, link_bit_s=paper.link_bit_s, title=title)


def _workload(params: str | None, compute: str | None, dtype: str) -> Workload:
    from laconic.planner import paper_workload

    if params is None or compute is None:
        raise ConfigError("--params and --compute belong together: --params 7b --compute 400ms")
    return paper_workload(parse_count(params), parse_seconds(compute), dtype)


def _show(found: Plan, job: _Job, every: bool) -> None:
    out, work = console(_WIDTH), job.workload
    largest = max(bucket.values for bucket in work.buckets) * work.value_bytes
    buckets = "1 bucket" if len(work.buckets) == 1 else f"{len(work.buckets)} buckets"
    out.print(
        f"{job.title}. {work.values:,} values, {seconds(work.compute_s)} of computation per step, "
        f"{buckets} of up to {size(largest)}",
        highlight=False,
        markup=False,
    )
    rows = table(
        f"Predicted step, error of the averaged gradient up to {found.error:g}",
        *("strategy", "step", "speedup", "bottleneck", "sent", "memory", "NMSE"),
        "beats plain DDP",
    )
    shown = [
        choice
        for number, choice in enumerate(found.choices)
        if every or number < _SHOWN or choice in (found.best, found.plain)
    ]
    for choice in shown:
        rows.add_row(*_cells(choice), style="bold" if choice is found.best else "")
    above = found.above_error if every else found.above_error[:_SHOWN_ABOVE]
    if above:
        rows.add_section()
    for choice in above:
        rows.add_row(*_cells(choice), style="dim")
    out.print(rows)
    if any(choice.changes_training for choice in found.choices):
        out.print("* changes the training algorithm, not only the gradient's precision")
    if above:
        out.print("Below the line: strategies with a larger error.")
    hidden = len(found.choices) + len(found.above_error) - len(shown) - len(above)
    if hidden:
        out.print(f"{hidden} more with --all")
    out.print(found.verdict, highlight=False, soft_wrap=True)
    out.print(f"\n    {found.best.code}", highlight=False, soft_wrap=True)


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
