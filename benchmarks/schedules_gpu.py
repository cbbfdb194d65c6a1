"""How well does SSD learn, and which local rule keeps up at long periods? Simulated workers, a GPU.

    python -m benchmarks.schedules_gpu --data FILE --stage screen [--seconds 500] [--save]
    python -m benchmarks.schedules_gpu --data FILE --stage final --repairs momentum [--save]
    python -m benchmarks.schedules_gpu --data FILE --stage defaults --rate 0.8 [--save]

ResNet-20 on CIFAR-10, 4 workers × batch 128, 12 epochs, SGD with momentum on the master weights;
and a transformer (4 layers, width 160) on the bytes of Python's own sources, 4 × 24 × 128, 1500
steps of AdamW. One cycle of the learning rate (no cycle of momentum). Warm-up: one epoch, or 150
steps. `screen` tries many rules with one seed, `final` few with three, `defaults` those that SSD
takes by itself with their neighbours, local SGD, and a codec, with three too. A wave of runs shares
the GPU; rows are written after each. `--quick` runs everything in miniature, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import laconic as lc
from benchmarks import _cifar
from benchmarks._local_rules import RULES
from benchmarks._rows import RESULTS, save
from benchmarks._simulated import Setting, Slot, begun
from benchmarks._tasks import Characters, Pictures
from laconic._files import write_whole

NAME = "schedules_gpu"
_ADAMS = ["adam-gain-2", "adam-gain-1"]
KNOWN_BAD = 1e6  # a training loss that is not finite, in JSON


@dataclass(frozen=True)
class Job:
    """One run."""

    setting: Setting
    seed: int


def rate_at(t: int, steps: int, peak: float) -> float:
    """One cycle: half a cosine up for 30% of the steps, one down for the rest."""
    top = 0.3 * steps
    if t < top:
        return peak * (0.04 + 0.96 * (1 - math.cos(math.pi * t / top)) / 2)
    return peak * (1e-4 + (1 + math.cos(math.pi * (t - top) / (steps - 1 - top))) / 2)


def sync(rate: float, **more: Any) -> Setting:
    return _named(Setting(name="sync", kind="sync", rate=rate, **more))


def ssd(period: int, rule: str, rate: float, **more: Any) -> Setting:
    name = f"ssd k={period} {rule}"
    own = RULES[rule]
    return _named(Setting(name=name, kind="ssd", period=period, rule=own, rate=rate, **more))


def local(period: int, outer: Any, rate: float, **more: Any) -> Setting:
    name = f"local H={period}" + (f" {outer}" if outer else "")
    return _named(Setting(name=name, kind="local", period=period, outer=outer, rate=rate, **more))


def _named(one: Setting) -> Setting:
    """What is not as usual is part of the name."""
    parts = [one.name, f"lr={one.rate:g}"]
    usual = Setting(name="", kind="", rate=0.0)
    if not one.adam:
        fields = ("momentum", "decay", "warmup", "clip", "codec")
        changed = [f for f in fields if getattr(one, f) != getattr(usual, f)]
        parts += [f"{f}={getattr(one, f)}" for f in changed]
    return replace(one, name=" ".join(parts))


Groups = list[tuple[str, list[Setting]]]  # most wanted first; each group is one task's


def screened(options: Any) -> Groups:
    rate, adam = options.rate, {"adam": True, "decay": 0.01}
    rates = [rate / 4, rate / 2, rate, 2 * rate]
    first = [sync(r) for r in rates] + [sync(rate, decay=1e-4)]
    first += [ssd(k, "glu", r) for k in (4, 8) for r in rates]
    first += [ssd(8, "momentum", r) for r in rates]
    tried = [name for name in RULES if not name.startswith("adam")]
    at8 = [ssd(8, name, rate) for name in tried if name not in ("glu", "momentum")]
    at4 = [ssd(4, name, rate) for name in tried if name != "glu"]
    adams: list[Setting] = []
    for r in (options.adam_rate / 2, options.adam_rate, 2 * options.adam_rate):
        adams += [sync(r, **adam), ssd(1, "none", r, **adam), ssd(4, "line", r, **adam)]
    names = ["none", "plain", "glu", "held-1-whole", "momentum"]
    names += [name for name in RULES if name.startswith("adam")]
    adams += [ssd(4, name, options.adam_rate, **adam) for name in names]
    adams += [ssd(1, name, options.adam_rate, **adam) for name in ("line", "adam-gain-1")]
    # a long-run step lr/(1-μ) as before
    slow = [{"momentum": 0.8, "rate": 2 * rate}, {"momentum": 0.5, "rate": 5 * rate}]
    others = [ssd(8, name, **more) for name in ("glu", "none") for more in slow]
    others += [ssd(8, "momentum-0.8", **slow[0])]
    others += [sync(**more) for more in slow]
    for name in ("glu", "momentum"):
        others += [ssd(8, name, rate, warmup=3.0), ssd(8, name, rate, clip=1.0)]
    others += [local(8, None, rate), local(8, lc.Nesterov(), rate)]
    others += [ssd(16, name, rate) for name in ("glu", "momentum", "line")]
    return [
        ("pictures", first),
        ("pictures", at8),
        ("characters", adams),
        ("pictures", at4),
        ("pictures", others),
    ]


def finals(options: Any) -> Groups:
    """Everything at the rate that suits synchronous training; some at one of their own, too."""
    rate, adam = options.rate, {"adam": True, "decay": 0.01}
    best, *more = options.repairs
    first = [sync(rate), sync(rate / 2)]
    first += [ssd(k, best, rate) for k in (2, 4, 8, 16)]
    first += [ssd(k, name, rate) for k in (2, 4, 8) for name in ("glu", "dcasgd", "plain", "none")]
    first += [ssd(8, best, rate / 2), ssd(4, "glu", rate / 4), ssd(8, "glu", rate / 4)]
    r, repairs = options.adam_rate, options.adam_repairs
    adams = [sync(r, **adam), sync(2 * r, **adam)]
    adams += [ssd(1, name, r, **adam) for name in ("none", *repairs)]
    adams += [ssd(4, name, r, **adam) for name in ("glu", "plain", "none", *repairs)]
    adams += [ssd(1, "none", r / 2, **adam)]
    adams += [ssd(4, name, 2 * r, **adam) for name in repairs[:1]]
    others = [ssd(8, name, rate) for name in more] + [ssd(4, name, rate) for name in more[:2]]
    coded = [ssd(4, name, rate, codec="ecdq:error=0.08") for name in (best, "glu")]
    outer = [local(8, None, rate), local(8, lc.Nesterov(), rate)]
    return [
        ("pictures", first),
        ("characters", adams),
        ("pictures", others),
        ("pictures", coded),
        ("pictures", outer),
    ]


def defaults(options: Any) -> Groups:
    """What local="auto" takes, beside other shares and gains, at each period."""
    rate, r, adam = options.rate, options.adam_rate, {"adam": True, "decay": 0.01}
    periods = (2, 4, 8)
    adams = [sync(r, **adam)] + [ssd(k, name, r, **adam) for k in periods for name in _ADAMS]
    shares = ("momentum-share-0.5", "momentum", "momentum-share-0")
    first = [sync(rate)] + [ssd(k, name, rate) for k in periods for name in shares]
    first += [local(4, None, rate), local(8, None, rate), local(8, lc.Nesterov(), rate)]
    coded = [ssd(4, name, rate, codec="ecdq:error=0.08") for name in (shares[0], "glu")]
    more = [ssd(1, name, r, **adam) for name in _ADAMS]
    more += [sync(2 * r, **adam), *(ssd(k, "adam-gain-2", 2 * r, **adam) for k in (4, 8))]
    names = ("adam-gain-2-share-0.5", "adam-gain-1.5")
    more += [ssd(k, name, r, **adam) for k in (4, 8) for name in names]
    more += [local(k, None, r, **adam) for k in (4, 8)]
    others = [ssd(k, "momentum-0.8-share-0.5", rate) for k in periods]
    others += [ssd(16, shares[0], rate)]
    return [
        ("characters", adams),
        ("pictures", first),
        ("pictures", coded),
        ("characters", more),
        ("pictures", others),
    ]


STAGES = {"screen": screened, "final": finals, "defaults": defaults}


class Study:
    """Tasks, their slots, what was found, and the time that is left."""

    def __init__(self, options: Any) -> None:
        self.options, self.began = options, time.perf_counter()
        self.device = torch.device(options.device)
        self.tasks: dict[str, Any] = {"pictures": _pictures(options, self.device)}
        small = {"batch": 4, "steps": 40, "length": 60_000, "small": True}
        self.tasks["characters"] = Characters(self.device, **(small if options.quick else {}))
        self.slots: dict[str, list[Slot]] = {}
        self.seconds: dict[str, float] = {}  # of one run in the last wave of a task
        self.rows: list[dict[str, Any]] = []
        path = RESULTS / f"{NAME}.json"
        if options.save and path.exists():
            self.rows = json.loads(path.read_text())["rows"]

    @property
    def left(self) -> float:
        return self.options.seconds - (time.perf_counter() - self.began)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", flush=True)

    def go(self, task: str, jobs: list[Job]) -> None:
        """As many jobs as time allows, in waves."""
        while jobs:
            count = self.options.slots
            if task in self.seconds:
                count = min(count, int(self.left / (1.1 * self.seconds[task])))
            if count < 1 or self.left <= 0:
                self.say(f"no time for {len(jobs)} runs of {task}")
                return
            now, jobs = jobs[:count], jobs[count:]
            self.wave(task, now)
            self.keep()

    def wave(self, name: str, jobs: list[Job]) -> None:
        """Runs side by side, one step of each in turn."""
        task = self.tasks[name]
        for seed in {0, *(job.seed for job in jobs)}:  # before streams could read them half made
            task.plan(seed)
            task.start(seed)
        self._wait()
        slots = self._slots(name, len(jobs))
        self._wait()
        began = time.perf_counter()
        runs = []
        for slot, job in zip(slots, jobs, strict=False):
            with slot.on():
                runs.append((slot, job, begun(slot, job.setting, job.seed)))
        early, steady = max(1, task.steps // 40), began
        for t in range(task.steps):
            if t == early:  # the first steps are slow
                self._wait()
                steady = time.perf_counter()
            elif t == 2 * early:
                self._wait()
                pace = (time.perf_counter() - steady) / early
                runs = self._fitting(name, runs, pace * task.steps)
            for slot, job, run in runs:
                with slot.on():
                    run.step(t, rate_at(t, task.steps, job.setting.rate))
        self._wait()
        if len(runs) == len(jobs):
            self.seconds[name] = (time.perf_counter() - began) / len(runs)
        for slot, job, run in runs:
            self._found(task, slot, job, task.score(run.result()))
        self.say(f"{len(runs)} runs of {name}, {self.seconds[name]:.2f} s each")

    def _fitting(self, name: str, runs: list[Any], seconds: float) -> list[Any]:
        """Those that can end in time, if all would take so long."""
        self.seconds[name] = seconds / len(runs)
        if seconds <= self.left:
            return runs
        kept = max(1, int(len(runs) * self.left / seconds))
        self.say(f"{name}: {len(runs) - kept} of {len(runs)} runs dropped for lack of time")
        return runs[:kept]

    def _slots(self, name: str, count: int) -> list[Slot]:
        own = self.slots.setdefault(name, [])
        while len(own) < count:
            own.append(Slot(self.tasks[name], not self.options.no_graph))
        return own[:count]

    def _found(self, task: Any, slot: Slot, job: Job, score: float) -> None:
        one = job.setting
        last = slot.losses[-task.epoch :].mean().item()
        row = {
            "stage": self.options.stage,
            "task": task.name,
            "setting": one.name,
            "seed": job.seed,
            task.measure: score if math.isfinite(score) else KNOWN_BAD,
            "training_loss": last if math.isfinite(last) else KNOWN_BAD,
            "kind": one.kind,
            "period": one.period,
            "rule": str(one.rule),
            "optimizer": "adamw" if one.adam else f"sgd momentum={one.momentum}",
            "rate": one.rate,
            "decay": one.decay,
            "warmup_steps": round(one.warmup * task.epoch),
            "clip": one.clip,
            "codec": one.codec,
            "outer": str(one.outer),
            "workers": task.workers,
            "steps": task.steps,
        }
        same = ("stage", "task", "setting", "seed")
        self.rows = [r for r in self.rows if any(r[key] != row[key] for key in same)]
        self.rows.append(row)
        self.say(f"{one.name:44} seed {job.seed}: {score:.4f} (training loss {last:.4f})")

    def keep(self) -> None:
        if self.options.save:
            path = save(NAME, self.rows)
            if self.options.out is not None:
                shutil.copy(path, self.options.out)
        elif self.options.out is not None:
            path = self.options.out / f"{NAME}.json"
            write_whole(path, json.dumps({"rows": self.rows}, indent=1) + "\n")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def summary(self) -> None:
        """Best first."""
        for task in self.tasks.values():
            scores: dict[str, list[float]] = defaultdict(list)
            for row in self.rows:
                if row["task"] == task.name and row["stage"] == self.options.stage:
                    scores[row["setting"]].append(row[task.measure])
            print(f"\n{task.name}: {task.measure}")
            ordered = sorted(scores.items(), key=lambda item: statistics.mean(item[1]))
            for name, found in ordered if task.name == "transformer" else reversed(ordered):
                print(
                    f"{name:52} {statistics.mean(found):.4f} "
                    f"({min(found):.4f} to {max(found):.4f}, {len(found)})"
                )


def _pictures(options: Any, device: torch.device) -> Pictures:
    if options.data is None and not options.quick:
        raise SystemExit("say where CIFAR-10 is: --data FOLDER or --data FILE.npz")
    if options.data is None:
        draw = np.random.default_rng(0)
        noise = draw.integers(0, 256, (1536, 32, 32, 3), dtype=np.uint8)
        labels = draw.integers(0, 10, 1536)
        train, test = (_cifar.Part(noise[i::3], labels[i::3]) for i in (0, 1))
    else:
        train, test = _cifar.load(options.data)
    if not options.quick:
        return Pictures(train, test, device, epochs=options.epochs)
    train, test = (_cifar.Part(part.pictures[:512], part.labels[:512]) for part in (train, test))
    return Pictures(train, test, device, batch=8, epochs=3, small=True)


def arguments() -> argparse.Namespace:
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=list(STAGES), default="screen")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default=found)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no wave after these")
    parser.add_argument("--slots", type=int, default=24, help="runs at a time")
    parser.add_argument("--seeds", type=int, help="1 to screen, else 3")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rate", type=float, default=0.4, help="peak for SGD")
    parser.add_argument("--adam-rate", type=float, default=2e-3)
    parser.add_argument("--repairs", nargs="*", default=["momentum"], choices=list(RULES))
    parser.add_argument("--adam-repairs", nargs="*", default=_ADAMS, choices=list(RULES))
    parser.add_argument("--only", default="", help="settings whose name has this")
    parser.add_argument("--out", type=Path, help="a folder that gets the rows after each wave")
    parser.add_argument("--save", action="store_true", help="keep under benchmarks/results")
    parser.add_argument("--no-graph", action="store_true", help="for a look at what is wrong")
    parser.add_argument("--quick", action="store_true", help="everything in miniature")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    if options.quick and options.save:
        raise SystemExit("--quick measures nothing: leave out --save")
    study = Study(options)
    study.say("data is there")
    groups = STAGES[options.stage](options)
    seeds = options.seeds or (1 if options.stage == "screen" else 3)
    for task, settings in groups:
        wanted = [one for one in settings if options.only in one.name]
        # seed by seed: where time runs out, every setting has been seen
        jobs = [Job(one, seed) for seed in range(seeds) for one in wanted]
        try:
            study.go(task, jobs)
        except RuntimeError:  # of the device: what other groups measure is not lost with it
            study.say(f"{task} failed:\n{traceback.format_exc()}")
    study.summary()


if __name__ == "__main__":
    main()
