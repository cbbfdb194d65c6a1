"""`lc.log_stats` and stand-ins that have the signatures of real loggers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

import laconic as lc


class Handle:
    """Stands for what lc.compress returns."""

    def stats(self) -> lc.Stats:
        return lc.Stats(
            steps=3, sent_bytes=10, plain_bytes=40, exchange_seconds=0.5, wire_seconds=float("nan")
        )


VALUES = {
    "laconic/ratio": 4.0,
    "laconic/steps": 3.0,
    "laconic/sent_bytes": 10.0,
    "laconic/plain_bytes": 40.0,
    "laconic/exchange_seconds": 0.5,
    "laconic/local_bytes": 0.0,
}


class SummaryWriter:
    """torch.utils.tensorboard 2.13, tensorboardX 2.6."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], int | None]] = []

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        assert walltime is None and not (new_style or double_precision)
        self.seen.append(({tag: scalar_value}, global_step))


class Run:
    """wandb 0.31."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], int | None]] = []

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        assert commit is None
        self.seen.append((data, step))


class MlflowModule(ModuleType):
    """mlflow 3.17."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.seen: list[tuple[dict[str, Any], int | None]] = []

    def log_metrics(
        self,
        metrics: dict[str, float],
        step: int | None = None,
        synchronous: bool | None = None,
        run_id: str | None = None,
        timestamp: int | None = None,
        model_id: str | None = None,
        dataset: object = None,
    ) -> None:
        assert not any((synchronous, run_id, timestamp, model_id, dataset))
        self.seen.append((metrics, step))


@pytest.mark.parametrize(("step", "expected"), [(70, 70), (None, 3), (0, 0)])
def test_numbers_go_to_tensorboard_and_functions_one_by_one(
    step: int | None, expected: int
) -> None:
    writer, seen = SummaryWriter(), []
    lc.log_stats(Handle(), writer, step)
    assert writer.seen == [({name: value}, expected) for name, value in VALUES.items()]
    for function in (writer.add_scalar, lambda *told: seen.append(told)):
        lc.log_stats(Handle(), function, step)
    assert writer.seen[: len(VALUES)] == writer.seen[len(VALUES) :]
    assert seen == [(*one, expected) for one in VALUES.items()]


@pytest.mark.parametrize(("step", "expected"), [(70, 70), (None, 3), (0, 0)])
def test_numbers_go_to_mlflow_at_once(step: int | None, expected: int) -> None:
    mlflow = MlflowModule()
    lc.log_stats(Handle(), mlflow, step)
    assert mlflow.seen == [(VALUES, expected)]


@pytest.mark.parametrize("step", [70, None, 0])
def test_wandb_counts_steps_that_are_not_given(step: int | None) -> None:
    """It drops what has a lower step than it has reached: ours must not be made up."""
    run, module = Run(), ModuleType("wandb")
    vars(module)["log"] = run.log  # as wandb.init sets it
    lc.log_stats(Handle(), run, step)
    lc.log_stats(Handle(), module, step)  # pyright: ignore[reportArgumentType]
    assert run.seen == [(VALUES, step)] * 2


def test_loggers_of_other_ranks_are_accepted() -> None:
    """Lightning's `logger.experiment` is an object of any method, and no function."""

    class Nothing:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    other: Any = Nothing()
    lc.log_stats(Handle(), other, 1)


def test_what_is_no_logger_is_named() -> None:
    with pytest.raises(lc.ConfigError, match=r"add_scalar .*log .*log_metrics .*not 'runs/1'"):
        lc.log_stats(Handle(), "runs/1")  # pyright: ignore[reportArgumentType]
