"""The race: workers on hosts with shaped links train the same network, strategy by strategy.

1. Workers start once and keep running.
2. A short probe measures links, codecs and the network: the expected time of every strategy.
3. Each strategy starts from the same weights, with the same batches. Its clock runs while it
   trains, and pauses while its weights are tested.
4. Results are saved after every strategy, so that an interrupted race can resume.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from laconic import lab
from laconic._files import Kind, check_target
from laconic._host import processor
from laconic._key import Key
from laconic.codecs import codec
from laconic.errors import ConfigError
from laconic.lab._rates import parse_rates
from laconic.planner import Machine as PaperMachine
from laconic.planner import Paper, Probe, predict
from laconic.race._data import COURSES, load, made
from laconic.race._quantize import SPECS
from laconic.race._result import (
    Lane,
    Machine,
    Parts,
    Point,
    Quantized,
    Race,
    Settings,
    Task,
    verdict,
)
from laconic.race._strategies import SHORT, Entry

PROBE_S, PATIENCE_S = 4.0, 300.0
POINTS = 20  # of a curve
Network = lab.Network | lab.LoopbackNetwork


@dataclass(frozen=True)
class Watcher:
    """Callbacks for the progress of a race; by default they do nothing."""

    note: Callable[[str], None] = lambda text: None
    planned: Callable[[dict[str, float | None]], None] = lambda seconds: None
    started: Callable[[Entry], None] = lambda one: None
    moved: Callable[[Entry, Point], None] = lambda one, point: None
    ended: Callable[[Race], None] = lambda race: None


def race(
    settings: Settings,
    entries: Sequence[Entry],
    *,
    folder: Path | None = None,
    save: Path | None = None,
    watcher: Watcher | None = None,
    force: bool = False,
) -> Race:
    """Race; with `save`, store results in that file, and resume from it.

    A file there that is not a race is an error; with `force` it is replaced.
    """
    watch = watcher or Watcher()
    kept = _kept(save, settings, force) if save else None
    done = {lane.name for lane in kept.lanes} if kept else set()
    left = [one for one in entries if one.name not in done]
    if kept and not left:
        return kept
    if save:
        check_target(save, Kind.RACE, force=force)
    data = load(settings.data, folder)  # errors are better reported here than by ranks
    counts = {"training": len(data.training), "testing": len(data.testing)}
    lacking = lab.missing()
    where = lab.Loopback(hosts=settings.workers) if lacking else lab.Lab(hosts=settings.workers)
    rates = parse_rates(settings.rate, settings.workers)
    watch.note("preparing kernels (a minute or less, once)")
    _compile([one.codec for one in left if one.codec])
    del data
    with where as net:
        watch.note(f"starting {settings.workers} workers")
        given = json.dumps({**asdict(settings), "folder": folder and str(folder.absolute())})
        run = net.start([sys.executable, "-m", "laconic.race._worker", given], talk=True)
        run.receive(timeout_s=PATIENCE_S)
        if isinstance(net, lab.Network):
            net.shape(rates)
        found = kept or Race(
            settings=settings, machine=_machine(lacking), task=_task(settings.data, counts)
        )
        track = _Track(settings, net, run, watch)
        watch.note("probing links, codecs and the network")
        probe = track.probe(sorted({one.codec for one in left if one.codec}))
        if lacking:
            probe = _on_paper(probe, [r.up_mbit for r in rates if r.up_mbit])
        found = replace(found, codecs=found.codecs or track.quantize())
        steps = {one.name: _predicted(one, probe) for one in left}
        watch.planned({name: s and settings.steps * s for name, s in steps.items()})
        for one in left:
            watch.started(one)
            lane = track.lane(one, probe)
            found = replace(found, lanes=(*found.lanes, lane))
            found = replace(found, verdict=verdict(found))
            if save:
                found.save(save, force=force)
            watch.ended(found)
    return found


class _Track:
    """The running workers."""

    def __init__(self, settings: Settings, net: Network, run: lab.Run, watch: Watcher) -> None:
        self.settings, self.net, self.run, self.watch = settings, net, run, watch

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Every rank's answer."""
        self.run.send(json.dumps(order))
        return [json.loads(line) for line in self.run.receive(timeout_s=PATIENCE_S)]

    def probe(self, codecs: list[str]) -> Probe:
        """Measurements to predict from; they also warm up the kernels."""
        return Probe.parse(self.ask(probe=codecs, seconds=PROBE_S)[0])

    def quantize(self) -> tuple[Quantized, ...]:
        """Error against bits."""
        return tuple(Quantized(**one) for one in self.ask(quantize=True)[0]["codecs"])

    def lane(self, one: Entry, probe: Probe) -> Lane:
        """One strategy from start to end."""
        steps = self.settings.steps
        self.ask(prepare=one.name)
        point = Point(step=0, seconds=0.0, sent_bytes=0.0, loss=0.0, accuracy=self.accuracy())
        points, totals, links = [point], Counter[str](), 0
        while point.step < steps:
            count = min(max(1, steps // POINTS), steps - point.step)
            before = self.sent()
            trained = self.ask(train=count)[0]
            links += self.sent() - before
            totals.update(trained)
            step = point.step + count
            point = Point(
                step=step,
                seconds=totals["seconds"],
                sent_bytes=totals.get("sent_bytes", self.ring_bytes(step)),
                loss=trained["loss"],
                accuracy=self.accuracy(),
            )
            points.append(point)
            self.watch.moved(one, point)
        finished = self.ask(finish=True)
        step_s = _usual_step(points)
        return Lane(
            name=one.name,
            strategy=one.strategy,
            code=one.code,
            points=tuple(points),
            step_s=step_s,
            parts=_parts(step_s, probe, totals),
            sent_bytes=point.sent_bytes / steps,
            link_bytes=links / steps if isinstance(self.net, lab.Network) else None,
            predicted_step_s=_predicted(one, probe),
            same_bits=len({rank["weights"] for rank in finished}) == 1,
            choice=_called(finished[0]["choice"]),
            error=finished[0]["error"],
            error_budget=finished[0]["error_budget"],
        )

    def accuracy(self) -> float:
        """Of the current weights; the clock is paused."""
        return self.ask(test=True)[0]["accuracy"]

    def sent(self) -> int:
        """Bytes that the first host has sent through its link, if it has one."""
        return self.net.hosts[0].counters().sent_bytes if isinstance(self.net, lab.Network) else 0

    def ring_bytes(self, steps: int) -> float:
        """What a worker sends for plain DDP: twice every byte but its own share."""
        n, values = self.settings.workers, _parameters(self.settings.data)
        return steps * 2 * (n - 1) / n * 4 * values


def _kept(path: Path, settings: Settings, force: bool) -> Race | None:
    """The results of an earlier race with the same settings."""
    if not path.is_file() or not path.stat().st_size:
        return None
    try:
        kept = Race.load(path)
    except ConfigError:
        if force:
            return None
        raise
    old, new = asdict(kept.settings), asdict(settings)
    differing = [f"{name} {old[name]}, not {new[name]}" for name in old if old[name] != new[name]]
    if differing:
        raise ConfigError(
            f"{path} holds another race ({'; '.join(differing)}): give the same settings, or "
            "another file"
        )
    return kept


def _compile(codecs: Sequence[str]) -> None:
    """Compile the kernels here, once: otherwise all workers would, at the same time."""
    x = torch.randn(20_000)
    for spec in {*codecs, *SHORT.values(), *SPECS}:
        own: Any = codec(spec)
        shared = {"norm": own.local_norm(x), "workers": 2} if own.shared_norm else {}
        own.decode(own.encode(x, Key(), **shared), out=torch.zeros_like(x), add=True)


def _called(choice: str | None) -> str | None:
    """auto's choice in words: "none" is plain DDP."""
    return "plain DDP" if choice == "none" else choice


def _usual_step(points: Sequence[Point]) -> float:
    """The mean of the second half: strategies have settled, and auto has chosen."""
    middle, end = points[len(points) // 2], points[-1]
    if end.step == middle.step:
        middle = points[0]
    return (end.seconds - middle.seconds) / (end.step - middle.step)


def _parts(step_s: float, probe: Probe, counters: Mapping[str, float]) -> Parts:
    """Time beyond computation, divided as codec and communication share the exchange's thread."""
    load = probe.workload
    assert load is not None
    compute = min(step_s, load.forward_s + load.backward_s + load.rest_s + load.skew_s)
    total, wire = counters.get("exchange_seconds", 0.0), counters.get("wire_seconds", 0.0)
    share = wire / total if total else 1.0
    exposed = step_s - compute
    return Parts(compute_s=compute, codec_s=(1 - share) * exposed, wire_s=share * exposed)


def _predicted(one: Entry, probe: Probe) -> float | None:
    """Predicted time of a step; None for auto, and for codecs that cannot be probed."""
    if one.plan is None or probe.workload is None:
        return None
    try:
        return predict(one.plan, probe.cluster, probe.workload).step_s
    except ConfigError:
        return None


def _on_paper(probe: Probe, rates_mbit: Sequence[float]) -> Probe:
    """The same machines with links of the slowest rate, which cannot be measured here."""
    cluster = probe.cluster
    if not rates_mbit:
        return probe
    figures = PaperMachine(
        device="cpu",
        per_node=1,
        link_bit_s=1e6 * min(rates_mbit),
        latency_s=cluster.flat.sendrecv.start_s,
    )
    flat = Paper(machine=figures, workers=cluster.workers).cluster().flat
    links = replace(cluster, per_node=1, flat=flat, inside=None, between=None)
    return replace(probe, cluster=links)


def _task(data: str, counts: dict[str, int]) -> Task:
    return Task(network=COURSES[data].words, parameters=_parameters(data), **counts)


def _parameters(data: str) -> int:
    return sum(p.numel() for p in made(data, 0).parameters())


def _machine(lacking: str | None) -> Machine:
    return Machine(
        system=platform.platform(terse=True),
        processor=processor(),
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        torch=torch.__version__,
        shaped=lacking is None,
        why_unshaped=lacking,
    )
