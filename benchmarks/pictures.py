"""The documents' pictures, from recorded results and from the planner's formulas; no clock is read.

python -m benchmarks.pictures
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks._bar_plot import bar_plot
from benchmarks._line_plot import Axis, Series, line_plot
from benchmarks._race_tables import race_picture
from benchmarks._rows import load
from benchmarks._step_tracks import track
from benchmarks._time_plot import time_plot
from laconic._cost import EncodingError
from laconic._files import write_whole
from laconic.exchanges import ScatterReduce
from laconic.planner import Paper, Probe, Strategy, machine, paper_workload, predict, step_seconds

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
_ERROR_TICKS = ((0.001, "1e-3"), (0.01, "0.01"), (0.1, "0.1"), (1.0, "1"))
_PROBED = "4x100:mlp"  # of the kept probes: four hosts, 100 Mbit/s, 1.9 million parameters


def labels(*values: float) -> list[tuple[float, str]]:
    """Ticks of an axis."""
    return [(value, f"{value:g}") for value in values]


def probed() -> Probe:
    """What was measured of the cluster before its steps were."""
    row = next(
        row for row in load("predicted")["rows"] if row["config"] == _PROBED and "probe" in row
    )
    return Probe.parse(row["probe"])


def steps() -> str:
    """Milliseconds per step, at two rates."""
    names = {
        "fp32 (no hook)": "plain DDP, fp32",
        "fp16 (torch's hook)": "fp16 (torch's hook)",
        "global:bits=8": "global:bits=8",
        "dqsg:bits=4": "dqsg:bits=4",
        "ecdq:error=0.08": "ecdq:error=0.08",
        "ssd k=4 ecdq:error=0.08": "SSD, period 4, with ecdq:error=0.08",
    }
    groups = []
    for rate in ("100", "1000"):
        found: dict[str, float] = {}
        for row in (*load("network")["rows"], *load("schedules")["rows"]):
            if row["rate"] == rate:
                found.setdefault(row["strategy"], row["mean_ms"])
        groups.append((f"{rate} Mbit/s", [(told, found[name]) for name, told in names.items()]))
    return bar_plot(
        title="A step of training over slow links",
        description="Mean milliseconds per step of a network of 1.86 million parameters on four "
        "emulated hosts, for six strategies at 100 and 1000 Mbit/s.",
        groups=groups,
        unit="ms",
        note="Mean of a step, computation included; four hosts share one machine with two cores. "
        "Each rate has its own scale. SSD was measured in a run of its own.",
    )


def error_bits(model: str, words: str, longest: float) -> str:
    """Error over bits on one model's gradient."""
    found = {row["codec"]: row for row in load("codecs")["rows"] if row.get("model") == model}

    def series(name: str, specs: list[str], dash: str = "") -> Series:
        picked = [found[spec] for spec in specs]
        points = sorted((row["bits"], row["nmse"]) for row in picked)
        return Series(name=name, points=points, dash=dash)

    ticks = [(bits, f"{bits:g}") for bits in (0, 1, 2, 3, 4) if bits <= longest]
    return line_plot(
        title=f"Error against bits: {words}",
        description="NMSE of the decoded gradient over bits per value on the wire, headers and "
        "tables counted; the error axis is logarithmic. Lower and further left is better.",
        x=Axis(label="bits per value, all bytes of the wire", low=0, high=longest, ticks=ticks),
        y=Axis(
            label="NMSE",
            low=0.008,
            high=6,
            ticks=labels(0.01, 0.1, 1),
            log=True,
        ),
        series=[
            series("qsgd, 2-4 bits", [f"qsgd:bits={b},block=512" for b in (2, 3, 4)], "2 4"),
            series("dqsg, 2-4 bits", [f"dqsg:bits={b},block=512" for b in (2, 3, 4)], "6 4"),
            series("rotate(dqsg)", [f"rotate(dqsg:bits={b},block=512)" for b in (2, 3, 4)], "10 3"),
            series("ecdq, bitmap", [f"ecdq:error={e},coder=bitmap" for e in (0.02, 0.08, 0.3)]),
            series("ecdq, rans", [f"ecdq:error={e},coder=rans" for e in (0.02, 0.08, 0.3)]),
        ],
    )


def exchange_bytes() -> str:
    """Bytes that a rank sends over the number of workers, over those of a plain ring."""
    strategies = {
        "plain all-reduce": Strategy(),
        "global:bits=8@allreduce": Strategy(codec="global:bits=8"),
        "global:bits=8@ring": Strategy(codec="global:bits=8", exchange="ring"),
        "dqsg:bits=4@scatter-reduce": Strategy(codec="dqsg:bits=4"),
        "dqsg:bits=4@allgather": Strategy(codec="dqsg:bits=4", exchange="allgather"),
        "ecdq:error=0.08": Strategy(codec="ecdq:error=0.08"),
    }
    counts = (2, 4, 8, 16, 32, 64)
    model = paper_workload(params=10_000_000, compute_s=0.1)
    series = []
    for name, strategy in strategies.items():
        points = []
        for n in counts:
            cluster = Paper(machine=machine("home"), workers=n).cluster()
            points.append((n, predict(strategy, cluster, model).sent_bytes / 1e6))
        series.append(Series(name=name, points=points))
    return line_plot(
        title="What a worker sends per step",
        description="Megabytes that one worker sends per step of a model of 10 million "
        "parameters, over 2 to 64 workers, both axes logarithmic.",
        x=Axis(label="workers", low=1.8, high=72, ticks=labels(*counts), log=True),
        y=Axis(
            label="MB per worker and step, 10 million parameters",
            low=1.5,
            high=400,
            ticks=labels(2, 5, 10, 20, 50, 100, 200),
            log=True,
        ),
        series=series,
    )


def error_workers() -> str:
    """Error of the mean over the number of workers, as measured."""
    pairs = {
        "global:bits=8@allreduce": "global:bits=8@allreduce",
        "global:bits=8@ring": "global:bits=8@ring",
        "global-exp:bits=8@tree": "global-exp:bits=8@tree",
        "dqsg:bits=4@scatter-reduce": "dqsg:bits=4@scatter-reduce",
        "ecdq:error=0.08@scatter-reduce": "ecdq:error=0.08",
        "ecdq:error=0.02@scatter-reduce": "ecdq:error=0.02",
    }
    found = [row for row in load("mean_error")["rows"] if row["kind"] == "independent"]
    series = [
        Series(
            name=name,
            points=sorted(
                {row["ranks"]: row["nmse"] for row in found if row["pair"] == text}.items()
            ),
        )
        for text, name in pairs.items()
    ]
    return line_plot(
        title="Error of the mean, by number of workers",
        description="Measured NMSE of the mean that all workers end with, for independent "
        "gradients on 2 to 64 workers, both axes logarithmic.",
        x=Axis(
            label="workers, independent gradients",
            low=1.8,
            high=72,
            ticks=labels(2, 4, 8, 16, 32, 64),
            log=True,
        ),
        y=Axis(
            label="NMSE of the mean",
            low=1e-4,
            high=6,
            ticks=((1e-4, "1e-4"), *_ERROR_TICKS),
            log=True,
        ),
        series=series,
    )


def error_likeness() -> str:
    """What is left of a budget as gradients become alike, by formula and as measured."""
    spec, budget = "ecdq:error=0.08@scatter-reduce", 0.08
    series = []
    for n in (4, 16, 64):
        kappas = [n ** (-step / 24) for step in range(25)]
        each = EncodingError(error=budget / 2, error_back=budget / 2, workers=n)
        points = [
            (kappa, ScatterReduce().mean_error(replace(each, kappa=kappa)))
            for kappa in sorted(kappas)
        ]
        dash = {4: "2 4", 16: "7 4", 64: ""}[n]
        series.append(Series(name=f"{n} workers", points=points, dash=dash, marks=False))
    common = {"independent": 0.0, "half common": 0.5, "identical": 1.0}
    measured = [
        (common[row["kind"]] + (1 - common[row["kind"]]) / row["ranks"], row["nmse"])
        for row in load("mean_error")["rows"]
        if row["pair"] == spec and row["ranks"] in (4, 16, 64) and row["kind"] in common
    ]
    series.append(Series(name="measured (4, 16, 64 workers)", points=measured, dash=None))
    return line_plot(
        title="A budget of 0.08, and what is used of it",
        description="NMSE of the mean under scatter-reduce with half of a budget of 0.08 for each "
        "of its two encodings, over kappa from one over n (independent) to 1 (equal gradients).",
        x=Axis(
            label="κ = ‖mean‖² / average ‖gradient‖²",
            low=1 / 80,
            high=1.1,
            ticks=((1 / 64, "1/64"), (1 / 16, "1/16"), (1 / 4, "1/4"), (1, "1")),
            log=True,
        ),
        y=Axis(
            label="NMSE of the mean",
            low=0.0,
            high=0.1,
            ticks=labels(0, 0.02, 0.04, 0.06, 0.08),
        ),
        series=series,
    )


def rates() -> str:
    """Step times of strategies over link rates, on a probed cluster."""
    probe = probed()
    assert probe.workload is not None
    shares = [2 ** (step / 4) for step in range(-12, 21)]
    strategies = {
        "plain DDP": Strategy(),
        "fp16": Strategy(codec="fp16"),
        "dqsg:bits=4": Strategy(codec="dqsg:bits=4"),
        "ecdq:error=0.08": Strategy(codec="ecdq:error=0.08"),
        "SSD, period 4, ecdq": Strategy(codec="ecdq:error=0.08", schedule="ssd", period=4),
    }
    dashes = ("", "2 4", "7 4", "12 4", "4 2 1 2")
    series = [
        Series(
            name=name,
            points=[
                (100 * share, 1e3 * step_seconds(one, probe.cluster.faster(share), probe.workload))
                for share in shares
            ],
            dash=dash,
            marks=False,
        )
        for (name, one), dash in zip(strategies.items(), dashes, strict=True)
    ]
    return line_plot(
        title="Which is fastest depends on the link",
        description="Predicted milliseconds per step of five strategies over link rates from 12 to "
        "3200 Mbit/s, both logarithmic, from a probe of four emulated hosts at 100 Mbit/s.",
        x=Axis(
            label="link rate",
            low=12,
            high=3300,
            log=True,
            ticks=((25, "25 Mbit/s"), (100, "100"), (400, "400"), (1600, "1.6 Gbit/s")),
        ),
        y=Axis(
            label="ms per step, predicted",
            low=20,
            high=9000,
            log=True,
            ticks=labels(20, 50, 100, 200, 500, 1000, 5000),
        ),
        series=series,
        note="An MLP of 1.9 million parameters on four hosts that share two cores.",
    )


def timelines() -> str:
    """What a worker does when, under three schedules."""
    probe = probed()
    assert probe.workload is not None
    tracks = [
        track("plain DDP", Strategy(), probe),
        track("every step, ecdq:error=0.08", Strategy(codec="ecdq:error=0.08"), probe),
        track(
            "SSD, period 4, ecdq:error=0.08",
            Strategy(codec="ecdq:error=0.08", schedule="ssd", period=4),
            probe,
        ),
        track("local steps, period 4, fp32", Strategy(schedule="local", period=4), probe),
    ]
    return time_plot(
        title="Who waits for what",
        description="Computation, codec and wire of one worker over 1.2 seconds under four "
        "strategies, simulated from a probe of four hosts at 100 Mbit/s.",
        kinds=["computation", "codec and copies", "wire"],
        tracks=tracks,
        end=1.2,
        ticks=(0, 0.3, 0.6, 0.9, 1.2),
        note="Upper row: the training loop. Lower rows: communication threads. Strokes: steps end.",
    )


def budget() -> str:
    """How much of the budget steps really used, by shape of gradients."""
    found = load("budget")["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in found))
    groups = []
    for heading, field in (("Mean over steps", "mean"), ("Largest single step", "largest")):
        most = [
            (kind.replace("_", " "), 100 * max(r[field] for r in found if r["kind"] == kind))
            for kind in kinds
        ]
        groups.append((f"{heading}, the worst of all runs", most))
    return bar_plot(
        title="error=0.08, and the error that was made",
        description="Relative squared error of the averaged gradient in percent of the budget of "
        "0.08, for shapes of gradients, on 2, 3, 5 and 8 ranks.",
        groups=groups,
        unit="%",
        note="100% is error=0.08. python -m benchmarks.budget",
    )


def geometry() -> str:
    """What an error costs AdamW, over bits: one step per tensor, one per run, Adam's own units."""
    found = [
        row
        for row in load("geometry")["rows"]
        if (row["optimizer"], row["workers"], row["steps"]) == ("adamw", 3, 250)
        and not row.get("pairs")
    ]
    plain = {row["seed"]: row["loss"] for row in found if row["strategy"] == "plain"}

    def point(strategy: str) -> tuple[float, float]:
        own = [row for row in found if row["strategy"] == strategy]
        more = [100 * (row["loss"] / plain[row["seed"]] - 1) for row in own]
        return statistics.mean(row["bits"] for row in own), statistics.mean(more)

    kinds = {
        "one step per tensor": ["uniform 0.08", "uniform 0.15"],
        "a step per 4,096 values (block=4096)": ["block 0.08", "block 0.15", "block 0.3"],
        "Adam's units (optimizer=)": ["adam 0.04", "adam 0.08", "adam 0.15", "adam 0.3"],
        "dqsg:bits=4": ["dqsg4"],
    }
    dashes: tuple[str | None, ...] = ("2 4", "7 4", "", None)
    return line_plot(
        title="What an error costs AdamW",
        description="Loss of a character transformer after 250 steps of AdamW, in percent above "
        "plain DDP's, over bits per value; means of five pairs of runs, on three workers.",
        x=Axis(
            label="bits per value and way",
            low=1.4,
            high=4.3,
            ticks=labels(1.5, 2, 2.5, 3, 3.5, 4),
        ),
        y=Axis(
            label="loss above plain DDP's, %",
            low=-0.5,
            high=2.0,
            ticks=labels(-0.5, 0, 0.5, 1, 1.5, 2),
        ),
        series=[
            Series(name=name, points=sorted(map(point, names)), dash=dash)
            for (name, names), dash in zip(kinds.items(), dashes, strict=True)
        ],
        note="Means of 5 seeds; a mean's own error is about 0.4.",
    )


PICTURES: dict[str, Callable[[], str]] = {
    "race": race_picture,
    "steps": steps,
    "error-bits-dense": lambda: error_bits("transformer", "a transformer's gradient", 4.3),
    "error-bits-sparse": lambda: error_bits("cnn", "a CNN's sparse gradient", 4.3),
    "exchange-bytes": exchange_bytes,
    "error-workers": error_workers,
    "error-likeness": error_likeness,
    "budget": budget,
    "geometry": geometry,
    "rates": rates,
    "timelines": timelines,
}


def drawn() -> Iterator[tuple[Path, str]]:
    """Every picture: its file, and what belongs into it."""
    for name, draw in PICTURES.items():
        yield FOLDER / f"{name}.svg", draw()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in drawn():
        write_whole(path, text)
        print(path.name)
