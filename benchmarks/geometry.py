"""In which units to encode gradients: what training loses, what is sent, how often clipping acts.

    python -m benchmarks.geometry [--device cuda] [--jobs 16] [--seconds 300] [--save]
    python -m benchmarks.geometry --list
    python -m benchmarks.geometry --steps 5 --seeds 0

A character transformer (3 layers, width 64, 0.17 million parameters) on Python's standard library;
simulated workers with batches of 8 each, scatter-reduce with real wires. Matrices of 2,000 values
or more are encoded, the rest is averaged in fp32 and not counted. A seed names the first weights
and the data, whatever the strategy: differences of losses are taken by pairs. Strategies encode
gradients as they are, with one step per tensor (uniform) or per 4,096 values (block)
or 512 (block512), or in the optimizer's units (adam, `exchanges/_preconditioner.py`); frozen ones
are Adam's after a fifth of the steps, as in 1-bit Adam, and gradients travel in fp32 until then;
spectral ones are an experiment for Muon (`_spectral.py`). With --pairs tokens are pairs of
characters: about 5,000, most of them rare, in an embedding that is not the last layer.

Without --strategies, --optimizers, --workers or --steps the whole study runs, what matters first;
with any of them all their combinations, by default every strategy, adamw, 3 workers and 250 steps.
--rates tries learning rates other than those that were best for plain. With --save, rows go to
geometry.json or geometry_gpu.json in benchmarks/results after every run, and runs that are there
are not run again.
ecdq's coder is rans on a CPU and bitmap on a GPU, where the same errors take more bits.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks._geometry_run import Case, Strategy, train
from benchmarks._geometry_tables import tables
from benchmarks._rows import RESULTS, machine, save
from laconic._host import processor

FILES = {"cpu": "geometry", "cuda": "geometry_gpu"}  # in benchmarks/results
STRATEGIES = {
    "plain": Strategy(),
    "uniform 0.02": Strategy(spec="ecdq:error=0.02{coder}"),
    "uniform 0.08": Strategy(spec="ecdq:error=0.08{coder}"),
    "uniform 0.15": Strategy(spec="ecdq:error=0.15{coder}"),
    "dqsg4": Strategy(spec="dqsg:bits=4"),
    "block 0.08": Strategy(spec="ecdq:error=0.08,block=4096{coder}"),
    "block 0.15": Strategy(spec="ecdq:error=0.15,block=4096{coder}"),
    "block 0.3": Strategy(spec="ecdq:error=0.3,block=4096{coder}"),
    "block512 0.15": Strategy(spec="ecdq:error=0.15,block=512{coder}"),
    "adam 0.04": Strategy(spec="ecdq:error=0.04{coder}", units=True),
    "adam 0.08": Strategy(spec="ecdq:error=0.08{coder}", units=True),
    "adam 0.15": Strategy(spec="ecdq:error=0.15{coder}", units=True),
    "adam 0.3": Strategy(spec="ecdq:error=0.3{coder}", units=True),
    "adam 0.5": Strategy(spec="ecdq:error=0.5{coder}", units=True),
    "adam block 0.15": Strategy(spec="ecdq:error=0.15,block=4096{coder}", units=True),
    "adam block 0.3": Strategy(spec="ecdq:error=0.3,block=4096{coder}", units=True),
    "adam dqsg3": Strategy(spec="dqsg:bits=3", units=True),
    "adam feedback 0.5": Strategy(spec="feedback(ecdq:error=0.5{coder})", units=True),
    "adam feedback 1.0": Strategy(spec="feedback(ecdq:error=1.0{coder})", units=True),
    "spectral 0.08": Strategy(spec="ecdq:error=0.08{coder}", spectral=0.08),
    "spectral 0.15": Strategy(spec="ecdq:error=0.15{coder}", spectral=0.15),
    "frozen": Strategy(freeze=0.2),
    "frozen 0.5": Strategy(spec="ecdq:error=0.5{coder}", units=True, freeze=0.2),
    "frozen 1.0": Strategy(spec="ecdq:error=1.0{coder}", units=True, freeze=0.2),
    "frozen feedback 0.5": Strategy(spec="feedback(ecdq:error=0.5{coder})", units=True, freeze=0.2),
    "frozen feedback 1.0": Strategy(spec="feedback(ecdq:error=1.0{coder})", units=True, freeze=0.2),
}
RATES = {  # the best for plain
    "adamw": 4e-3,
    "sgd": 0.2,
    "rmsprop": 1e-3,
    "adafactor": 0.1,
    "muon": 4e-3,
}
SEEDS = range(5)
FIRST = ("plain", "adam 0.08", "adam 0.15", "uniform 0.08", "dqsg4", "block 0.15")
LONG = FIRST[:4]
OTHERS = ("plain", "uniform 0.08", "block 0.08", "adam 0.08")
ONLY_MUON = ("uniform 0.02", "spectral 0.08", "spectral 0.15")
MUON = ("plain", "uniform 0.08", "block 0.08", "dqsg4", *ONLY_MUON)
_PACE: dict[bool, float] = {}  # seconds of a step in this process, plain and encoded


def study(seeds: Sequence[int]) -> Iterator[Case]:
    """Every run, what matters first."""
    yield from cases(FIRST, ["adamw"], [3], [250], seeds)
    yield from cases(FIRST, ["adamw"], [4], [250], seeds)
    rest = [name for name in STRATEGIES if name not in FIRST + ONLY_MUON]
    yield from cases(rest, ["adamw"], [3], [250], seeds)
    yield from cases(OTHERS, ["rmsprop", "adafactor"], [3], [250], seeds)
    yield from cases(("plain", "uniform 0.08", "adam 0.08"), ["sgd"], [3], [250], seeds)
    yield from cases(MUON, ["muon"], [3], [250], seeds)
    yield from cases((*FIRST, "block 0.08"), ["adamw"], [3], [250], seeds, pairs=True)
    yield from cases((*FIRST, "adam 0.3"), ["adamw"], [3], [1000], seeds)
    yield from cases(LONG, ["adamw"], [3], [3000], seeds)


def cases(
    strategies: Iterable[str],
    optimizers: Iterable[str],
    workers: Iterable[int],
    steps: Iterable[int],
    seeds: Iterable[int],
    rates: Sequence[float] = (),
    **sizes: Any,
) -> Iterator[Case]:
    """All combinations; of a seed all strategies, then those of the next."""
    for optimizer, n, length, seed in product(optimizers, workers, steps, seeds):
        for rate, name in product(rates or [RATES[optimizer]], strategies):
            yield Case(
                strategy=name,
                optimizer=optimizer,
                workers=n,
                steps=length,
                seed=seed,
                rate=rate,
                **sizes,
            )


def chosen(options: argparse.Namespace) -> list[Case]:
    """What the options ask for."""
    named = (options.strategies, options.optimizers, options.workers, options.steps, options.rates)
    same = (options.width, options.layers) == (Case.width, Case.layers) and not options.pairs
    if not any(named) and same:
        return list(study(options.seeds))
    found = cases(
        options.strategies or STRATEGIES,
        options.optimizers or ["adamw"],
        options.workers or [3],
        options.steps or [250],
        options.seeds,
        options.rates or (),
        width=options.width,
        layers=options.layers,
        pairs=options.pairs,
    )
    return list(found)


def run(case: Case, device: str, deadline: float) -> dict[str, Any] | str | None:
    """A row, or what went wrong; None where it would not be done in time."""
    strategy = STRATEGIES[case.strategy]
    coded = strategy.spec is not None
    if time.time() + case.steps * _PACE.get(coded, 0.0) > deadline:
        return None
    try:
        row = train(case, strategy, device)
    except Exception:  # the other runs are worth having
        return f"{case}\n{traceback.format_exc()}"
    _PACE[coded] = row["step_seconds"]
    return {**row, "processor": processor()}


def done(rows: Iterable[dict[str, Any]], device: str) -> set[Case]:
    """The runs that these rows are of."""
    names = [field.name for field in fields(Case)]
    own = [row for row in rows if row["device"] == device]
    return {Case(**{name: row[name] for name in names if name in row}) for row in own}


def kept(name: str) -> list[dict[str, Any]]:
    """Rows of runs before, with the same versions: one description is kept for all."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    found, here = json.loads(path.read_text()), machine()
    same = ("gpu", "python", "torch")
    other, own = ({key: info.get(key) for key in same} for info in (found["machine"], here))
    if other != own:
        raise SystemExit(f"{path} has rows of other versions ({other}, not {own}): move it away")
    return found["rows"]


def _prepare() -> None:
    torch.set_num_threads(1)


def _started(job: tuple[Case, str, float]) -> dict[str, Any] | str | None:
    return run(*job)


def _finished(work: list[Case], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows as they come; runs that failed, or were not begun, are told."""
    deadline = time.time() + options.seconds
    jobs, late = [(case, options.device, deadline) for case in work], 0
    for found in _results(jobs, min(options.jobs, len(jobs))):
        if isinstance(found, dict):
            yield found
        elif found is None:
            late += 1
        else:
            print(f"failed: {found}", flush=True)
    if late:
        print(f"{late} runs were not begun: no time")


def _results(jobs: list[tuple[Case, str, float]], processes: int) -> Iterator[Any]:
    if processes < 2:
        yield from map(_started, jobs)
        return
    with mp.get_context("spawn").Pool(processes, _prepare) as pool:
        yield from pool.imap_unordered(_started, jobs)


def _told(row: dict[str, Any]) -> str:
    place = (
        f"{row['optimizer']}, {row['workers']} workers, {row['steps']} steps, rate {row['rate']:g}"
    )
    return (
        f"{place}, seed {row['seed']}: {row['strategy']:18} loss {row['loss']:.4f}, "
        f"{row['bits']:.2f} bits, clipping {row['clipped']:.0%}, {row['seconds']:.0f} s"
    )


def _listed(work: list[Case]) -> None:
    for case in work:
        print(", ".join(f"{name} {value}" for name, value in asdict(case).items()))
    print(f"{len(work)} runs")


def main() -> None:
    _prepare()
    options = _options()
    name = FILES[options.device]
    work, rows = chosen(options), kept(name) if options.save else []
    known = done(rows, options.device)
    work = [case for case in work if case not in known]
    if options.list:
        _listed(work)
        return
    for row in _finished(work, options):
        rows.append(row)
        print(_told(row), flush=True)
        if options.save:
            save(name, rows)
    print(tables(rows))
    if options.save:
        print(f"{len(rows)} rows in {Path(RESULTS, name)}.json")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--jobs", type=int, default=1, help="processes; each takes the next run")
    add("--seconds", type=float, default=float("inf"), help="begin no run that would end later")
    add("--strategies", type=_names, metavar="A,B", help=", ".join(STRATEGIES))
    add("--optimizers", type=_optimizers, metavar="A,B", help=", ".join(RATES))
    add("--workers", type=_numbers, metavar="3,4")
    add("--steps", type=_numbers, metavar="250,1000")
    add("--seeds", type=_numbers, default=list(SEEDS), metavar="0-4")
    add("--rates", type=_rates, metavar="0.001,0.002", help="learning rates")
    add("--width", type=int, default=Case.width)
    add("--layers", type=int, default=Case.layers)
    add("--pairs", action="store_true", help="tokens are pairs of characters")
    add("--save", action="store_true", help="keep rows in benchmarks/results")
    add("--list", action="store_true", help="only say which runs there are to do")
    return parser.parse_args()


def _names(text: str, among: Iterable[str] = STRATEGIES) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    unknown = [name for name in found if name not in among]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)} among {', '.join(among)}")
    return found


def _optimizers(text: str) -> list[str]:
    return _names(text, RATES)


def _numbers(text: str) -> list[int]:
    """0-4 or 0,1,2."""
    first, dash, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(x) for x in text.split(",")]


def _rates(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]


if __name__ == "__main__":
    main()
