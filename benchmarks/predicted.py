"""Predicted against measured: a probe, what the planner makes of it, and the steps themselves.

    python -m benchmarks.predicted [--configs 4x100:mlp,..] [--save]

A configuration is hosts x Mbit/s : network. Hosts are in the lab, links shaped in both directions.
The probe has links, codecs and the network's computation, and no strategy; every strategy is then
predicted from it alone, and measured. Networks train on Fashion-MNIST, batches of 64 per worker: a
CNN (0.82 million parameters) and MLPs of 1.9 (mlp) and 5.8 million (wide).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._network_worker import FP32
from benchmarks._rows import command_line, keep, view
from benchmarks.network import ask, measure, ready
from laconic import lab
from laconic.planner import Probe, Strategy, predict

CONFIGS = (
    *("2x50:mlp", "4x50:cnn", "3x100:wide", "4x100:mlp", "6x100:cnn", "5x200:mlp"),
    *("2x200:wide", "4x500:wide", "3x500:cnn", "6x500:mlp", "2x1000:mlp", "4x1000:wide"),
    "4x2000:cnn",
)
CODECS = ("fp16", "dqsg:bits=4", "global:bits=8", "ecdq:error=0.08")
STRATEGIES = {
    FP32: Strategy(),
    **{spec: Strategy(codec=spec) for spec in CODECS},
    "ssd k=4 dqsg:bits=4": Strategy(codec="dqsg:bits=4", schedule="ssd", period=4),
    "ssd k=4 ecdq:error=0.08": Strategy(codec="ecdq:error=0.08", schedule="ssd", period=4),
}
_PROBE_S, _PATIENCE_S = 24.0, 300.0


def measured(config: str) -> list[dict[str, Any]]:
    """A row for each strategy."""
    place, network = config.split(":")
    hosts, rate = place.split("x")
    rows = []
    with tempfile.TemporaryDirectory() as folder, lab.Lab(hosts=int(hosts)) as net:
        command = [sys.executable, "-m", "benchmarks._predicted_worker", network, f"{folder}/start"]
        run = net.start(command, talk=True)
        run.receive(timeout_s=_PATIENCE_S)
        net.shape(float(rate))
        answers = ask(run, {"probe": CODECS, "seconds": _PROBE_S})
        probe = Probe.parse(answers[0])
        assert probe.workload
        for name, strategy in STRATEGIES.items():
            found = measure(run, net, name, 0)
            predicted = predict(strategy, probe.cluster, probe.workload)
            # SSD's steps differ by design; others' median keeps a disturbed step out
            ms = found["mean_ms"] if strategy.schedule == "ssd" else found["ms"]
            rows.append(
                {
                    "config": config,
                    "strategy": name,
                    "measured_ms": ms,
                    "predicted_ms": 1e3 * predicted.step_s,
                    "ms_q1": found["ms_q1"],
                    "ms_q3": found["ms_q3"],
                    "link_bytes": found["link_bytes"],
                    "predicted_bytes": predicted.sent_bytes,
                    "limit": predicted.limit,
                    **{name: found[name] for name in ("exchange_ms", "wire_ms") if name in found},
                }
            )
        rows[0]["probe"] = answers[0]
    return rows


def off(row: dict[str, Any]) -> float:
    """Relative error of a prediction."""
    return row["predicted_ms"] / row["measured_ms"] - 1


def missed(rows: list[dict[str, Any]]) -> float:
    """How much slower the strategy that was predicted to be best is than the best one."""
    chosen = min(rows, key=lambda row: row["predicted_ms"])
    return chosen["measured_ms"] / min(row["measured_ms"] for row in rows) - 1


def table(config: str, rows: list[dict[str, Any]]) -> Table:
    """One configuration for a terminal."""
    heads = ("strategy", "predicted ms", "measured ms", "quartiles", "off", "limit")
    title = f"{config}: the best predicted is {missed(rows):.0%} above the best"
    found = view(title, (*heads, "KB predicted", "link"))
    for row in rows:
        found.add_row(
            row["strategy"],
            f"{row['predicted_ms']:.1f}",
            f"{row['measured_ms']:.1f}",
            f"{row['ms_q1']:.1f}-{row['ms_q3']:.1f}",
            f"{off(row):+.0%}",
            row["limit"],
            f"{row['predicted_bytes'] / 1e3:.0f}",
            f"{row['link_bytes'] / 1e3:.0f}",
        )
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Over all configurations."""
    errors = sorted(abs(off(row)) for row in rows)
    configs = list(dict.fromkeys(row["config"] for row in rows))
    misses = [missed([row for row in rows if row["config"] == one]) for one in configs]
    return {
        "configurations": len(configs),
        "predictions": len(errors),
        "median": statistics.median(errors),
        "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "best within 10%": sum(miss <= 0.10 for miss in misses),
    }


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--configs", default=",".join(CONFIGS))
    options = parser.parse_args()
    ready()
    console, rows = Console(width=130), []
    for config in options.configs.split(","):
        rows += (found := measured(config))
        console.print(table(config, found))
    console.print(summary(rows))
    keep("predicted", rows, options)


if __name__ == "__main__":
    main()
