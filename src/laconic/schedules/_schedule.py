"""The interface of schedules, for training loops and tests."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from laconic.comm._frame import Call
from laconic.comm._statistics import CompressionStats


@dataclass(frozen=True, kw_only=True)
class ScheduleStats(CompressionStats):
    """What one rank has done so far; every schedule adds its own."""

    steps: int
    sent_bytes: int
    plain_bytes: int  # what synchronous fp32 training would have sent, in a ring
    wire_seconds: float  # in communication, waiting for other ranks included


@dataclass(frozen=True, kw_only=True)
class BudgetStats(ScheduleStats):
    """Of codecs with a budget: expected relative squared error of a mean, of each parameter."""

    error_budget: float | None = None  # error= of the codec
    error_mean: float | None = None  # over parameters and exchanges
    error_largest: float | None = None  # of any parameter in any exchange
    exact_means: int | None = None  # how often only the exact mean could keep the budget
    kappa: float | None = None  # ‖mean‖²/average ‖what ranks sent‖²


@runtime_checkable
class Schedule(Protocol):
    """When ranks communicate. SSD, AsyncSGD, LocalSGD and QSVRG are schedules.

    A schedule is made on all ranks at once, and used like a torch optimizer: `zero_grad()`, forward
    and backward, `step()`. It exchanges by itself, in a thread where it overlaps communication with
    computation.

    >>> import torch, laconic as lc
    >>> data = torch.eye(4), torch.arange(4.0)
    >>> model = torch.nn.Linear(4, 1, bias=False)
    >>> loss = lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean()
    >>> isinstance(lc.QSVRG(model, loss, data, lr=0.2, steps=40), lc.Schedule)
    True
    """

    def step(self) -> Any:
        """One training step of this rank, and what it communicates with others."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the parameters that the schedule trains."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; save it on every rank. Waits for what is in flight."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Resume from this rank's state_dict, bit for bit."""
        ...

    def stats(self) -> ScheduleStats:
        """Counts, bytes and times so far."""
        ...

    def wait(self) -> None:
        """Return when nothing is in flight; errors of the communication thread are raised here."""
        ...

    def close(self) -> None:
        """Release threads and process groups; on all ranks, after the last step."""
        ...

    def global_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights to evaluate and save; this rank's own ones afterwards.

        All ranks must enter: weights that are cut among ranks are gathered.
        """
        ...

    def barrier(self, call: Call = Call.BARRIER) -> None:
        """Return when all ranks have come here after the same step; an error on all if not.

        `call` is what they are about to do together: `lc.save` comes here first.
        """
        ...

    def latest_weights(self) -> AbstractContextManager[int]:
        """Inside, the model has the newest global weights that this rank has; own ones afterwards.

        How many steps old they are is what `with .. as steps_old` gives. Any rank may enter, at any
        step, without the others: to evaluate on one.
        """
        ...
