"""The planner: measure a cluster (probe), predict step times of strategies (plan), choose (auto).

torchrun ... -m laconic probe --out probe.json        laconic plan --probe probe.json
"""

from __future__ import annotations

from typing import Any
from warnings import warn

from laconic._cost import (
    Bucket,
    Cluster,
    CodecCost,
    Device,
    EncodingError,
    LinearCost,
    Links,
    Mark,
    Move,
    Pause,
    Stage,
    Submit,
    Task,
    TensorLoad,
    Wait,
    Work,
    Workload,
    fit,
)
from laconic.planner._auto import Auto
from laconic.planner._auto_decide import Report
from laconic.planner._datasheet import Paper, paper_workload
from laconic.planner._machine_catalog import MACHINES, Machine, machine
from laconic.planner._plan import BreakEven, Choice, Plan, plan
from laconic.planner._predict import Prediction, predict, step_seconds
from laconic.planner._probe import CODECS, Probe, probe
from laconic.planner._probe_model import Setup, load_setup
from laconic.planner._resize import resized
from laconic.planner._strategy import Strategy

__all__ = [
    "CODECS",
    "MACHINES",
    "Auto",
    "BreakEven",
    "Bucket",
    "Choice",
    "Cluster",
    "CodecCost",
    "Device",
    "EncodingError",
    "LinearCost",
    "Links",
    "Machine",
    "Mark",
    "Move",
    "Paper",
    "Pause",
    "Plan",
    "Prediction",
    "Probe",
    "Report",
    "Setup",
    "Stage",
    "Strategy",
    "Submit",
    "Task",
    "TensorLoad",
    "Wait",
    "Work",
    "Workload",
    "fit",
    "load_setup",
    "machine",
    "paper_workload",
    "plan",
    "predict",
    "probe",
    "resized",
    "step_seconds",
]


def __getattr__(name: str) -> Any:
    if name != "Line":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn("laconic.planner.Line is now called LinearCost", DeprecationWarning, stacklevel=2)
    return LinearCost
