"""The planner: measure a cluster (probe), predict what strategies take there (plan), choose (auto).

torchrun ... -m laconic probe --out probe.json        laconic plan --probe probe.json
"""

from __future__ import annotations

from laconic.planner._cluster import Bucket, Cluster, CodecCost, Device, Links, Workload
from laconic.planner._figures import MACHINES, Machine, machine
from laconic.planner._line import Line, fit
from laconic.planner._paper import Paper, paper_workload
from laconic.planner._plan import BreakEven, Choice, Plan, plan
from laconic.planner._predict import Prediction, predict
from laconic.planner._probe import CODECS, Probe, probe
from laconic.planner._probe_model import Setup, load_setup
from laconic.planner._resize import resized
from laconic.planner._step_time import step_seconds
from laconic.planner._strategy import Strategy

__all__ = [
    "CODECS",
    "MACHINES",
    "BreakEven",
    "Bucket",
    "Choice",
    "Cluster",
    "CodecCost",
    "Device",
    "Line",
    "Links",
    "Machine",
    "Paper",
    "Plan",
    "Prediction",
    "Probe",
    "Setup",
    "Strategy",
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
