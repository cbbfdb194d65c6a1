"""What handles observe of training: steps of optimizers, and the errors that codecs have made."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from laconic.codecs import Codec
from laconic.comm._context import ExchangeSession
from laconic.errors import ConfigError
from laconic.exchanges._budget import ledger_of
from laconic.exchanges._error_report import ParameterBudget, budget_report, error_stats
from laconic.exchanges._preconditioner import BLOCKS, Preconditioner, amplifying
from laconic.integrations._buckets import CodecGroup
from laconic.integrations._handle import own_rank

_log = logging.getLogger("laconic")
_BUDGET_EVERY = 100  # steps between two checks of the error that was made
_WATCHED_EVERY = 128  # steps between two checks of estimates of the error in gradients' own units
_TOLERATED = 1.2  # times the budget
_AMPLIFIED = 1.0  # relative squared error of gradients as they are, where their units are others


class StepListener(Protocol):
    """What is notified of optimizers' steps."""

    def stepped(self, optimizer: Any) -> None:
        """Called after each step of any optimizer, of other models, too."""
        ...


_listeners: weakref.WeakSet[StepListener] = weakref.WeakSet()
_registered = False


def listen_to_steps(listener: StepListener) -> None:
    """Have its `stepped` called as long as it lives."""
    global _registered
    _listeners.add(listener)
    if not _registered:  # for good: torch cannot take a hook away while it calls it
        _registered = True
        register_optimizer_step_post_hook(_tell)


# A compiled step would trace all listeners, anew for each number of passes. torch.compiler.disable
# does the same, and imports all of torch's compiler.
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _tell(optimizer: Any, *_: Any) -> None:
    for listener in list(_listeners):
        listener.stepped(optimizer)


def warn_of_noise(optimizer: Any, codec: Codec, advice: str) -> None:
    """Warn, with advice, if an optimizer that has made a step amplifies a codec's noise."""
    why = amplifying(optimizer, codec, advice)
    if why and own_rank() == 0:
        _log.warning(why)


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All that it steps."""
    return [one for group in optimizer.param_groups for one in group["params"]]


class LateParameters:
    """Finds parameters that an optimizer trains and no rank exchanges: they came too late.

    Adapters that are added to a wrapped model, or parameters unfrozen in it, have no place in what
    the wrapper reduces: each rank would train its own, without a word.
    """

    def __init__(self, model: nn.Module, reduced: Iterable[Tensor], wrapper: str) -> None:
        self._model, self._wrapper = weakref.ref(model), wrapper
        self._reduced = [weakref.ref(one) for one in reduced]
        self._counts: dict[int, int] = {}  # parameters of optimizers that were looked at, by id

    def add(self, reduced: Iterable[Tensor]) -> None:
        """These came in a bucket, although they were frozen at first."""
        self._reduced += [weakref.ref(one) for one in reduced]

    def check(self, optimizer: Any) -> None:
        """ConfigError with their names; looks at an optimizer anew if it has other parameters."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        model = self._model()
        if self._counts.get(id(optimizer)) == count or model is None:
            return
        self._counts[id(optimizer)] = count
        trained = {id(one) for one in parameters_of(optimizer) if one.requires_grad}
        known = {id(one) for ref in self._reduced if (one := ref()) is not None}
        late = [
            name
            for name, one in model.named_parameters()
            if id(one) in trained and id(one) not in known
        ]
        if late:
            raise ConfigError(
                f"{', '.join(late[:5])}{f' and {len(late) - 5} more' if len(late) > 5 else ''}: "
                f"added, or unfrozen, after {self._wrapper}, which does not average their "
                "gradients, so that every rank trains its own. Add adapters and unfreeze "
                f"parameters first, then {self._wrapper}, then compress"
            )


class _Optimizer(NamedTuple):
    """An optimizer that has made a step."""

    it: weakref.ref[Any]
    parameters: int  # how many: where that changes, they are looked at again
    trains: bool  # this model


class OptimizerSteps:
    """How often backward has run since an optimizer stepped the model.

    `passes` is None where that is not known. They count only where this rank's optimizers step all
    that is encoded. Where parameters are divided among ranks, ranks may step theirs at different
    times.
    """

    def __init__(self, codec: Codec, units: Preconditioner | None, *, warns: bool) -> None:
        self.passes: int | None = None
        self._codec, self._units, self._warns = codec, units, warns
        self._encoded: Mapping[int, weakref.ref[Tensor]] = {}
        self._known: dict[int, _Optimizer] = {}  # by id; those of other models, too
        self._complete = False  # what is known steps all that is encoded
        self._late: LateParameters | None = None
        listen_to_steps(self)

    def observe(
        self, encoded: Mapping[int, weakref.ref[Tensor]], late: LateParameters | None
    ) -> None:
        """Restart, with these parameters of the model."""
        self._encoded, self._known, self._complete = encoded, {}, False
        self._late = late

    def end_pass(self) -> None:
        """The last bucket of a backward pass has come."""
        if self.passes is not None:
            self.passes += 1

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step: of this model, or of another one."""
        if self._late is not None:
            self._late.check(optimizer)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._known.get(id(optimizer))
        if known is None or known.it() is not optimizer or known.parameters != count:
            known = self._add(optimizer, count)
        if known.trains:
            self.passes = 0 if self._complete else None

    def _add(self, optimizer: Any, count: int) -> _Optimizer:
        encoded = {id(one) for ref in self._encoded.values() if (one := ref()) is not None}
        own = [one for one in parameters_of(optimizer) if id(one) in encoded]
        added = _Optimizer(weakref.ref(optimizer), count, bool(own))
        alive = {key: one for key, one in self._known.items() if one.it() is not None}
        self._known = alive | {id(optimizer): added}
        if own:
            self._warn_of_noise(optimizer, own)
            found = [one.it() for one in self._known.values() if one.trains]
            stepped = {id(p) for one in found if one is not None for p in parameters_of(one)}
            self._complete = stepped.issuperset(encoded)
        return added

    def _warn_of_noise(self, optimizer: Any, own: Sequence[Tensor]) -> None:
        units = self._units
        if self._warns and (units is None or not units.reads(own)):
            self._warns = False
            wrong = "optimizer= was given one without moments of these parameters; "
            advice = f"{BLOCKS}, or encode in its units, compress(.., optimizer=optimizer)"
            warn_of_noise(optimizer, self._codec, advice if units is None else wrong + BLOCKS)


class ErrorMonitor:
    """Errors of mean gradients, as exchanges know them; warns once if they are too large."""

    def __init__(self, session: ExchangeSession, units: Preconditioner | None) -> None:
        self._session, self._units = session, units
        self._warned_of_budget = self._warned_of_units = False
        self._lock = threading.Lock()  # lanes add estimates at the same time
        self._count, self._total, self._largest = 0, torch.zeros(()), torch.zeros(())

    def estimate(
        self,
        group: CodecGroup,
        own: Sequence[Tensor],
        encoded: Sequence[Tensor],
        means: Sequence[Tensor],
        step: int,
    ) -> None:
        """Estimate the relative squared error of gradients ĝ from that of ŷ = ĝ/w; none waits.

        An error e·‖ŷ‖² is one of e·‖ŷ‖²·mean(w²) of ĝ, spread evenly over the values that are not
        0. Where it is not (rare words), ‖ĝ‖² grows: without errors it is κ times what ranks have.
        Norms of this rank's gradients and of ŷ are given, and ĝ, of each slice.
        """
        assert self._units is not None
        numbers = [one.number for one in group.slices]
        latest = ledger_of(self._session.memory).latest(numbers)
        known = zip(numbers, *latest, own, encoded, strict=True)
        for (number, error, kappa, x, y), mean in zip(known, means, strict=True):
            power = self._units.power(number, mean)
            if power is not None and error == error:
                norm = torch.linalg.vector_norm(mean, dtype=torch.float32).double()
                even, grown = error * power * (y / norm).square(), (norm / x).square() / kappa - 1
                self._add(torch.where(grown > _AMPLIFIED, grown, even))
        if step and step % _WATCHED_EVERY == 0:
            self._watch_units()

    def watch_budget(self, step: int, names: Sequence[str]) -> None:
        """Warn once if the error exceeds the budget; checked every 100 steps."""
        if self._warned_of_budget or step % _BUDGET_EVERY != _BUDGET_EVERY - 1 or own_rank() != 0:
            return
        report = budget_report(self._session.memory)
        if report is not None and report.mean > _TOLERATED * report.budget:
            self._warned_of_budget = True
            worst, found = max(self.errors(names).items(), key=lambda one: one[1].mean)
            _log.warning(
                "the mean gradient's error is %.3g, above its budget error=%g (worst: %s, %.3g): "
                "leave max_bits= out, or give that parameter a codec of its own, "
                "policy=lc.Policy(rules=..)",
                report.mean,
                report.budget,
                worst,
                found.mean,
            )

    def errors(self, names: Sequence[str]) -> dict[str, ParameterBudget]:
        """The error of each parameter's mean gradient so far, by name, where it had a budget."""
        report = budget_report(self._session.memory)
        rows = () if report is None else report.parameters
        return {names[row.parameter]: row for row in rows}

    def stats(self) -> dict[str, Any]:
        """The fields of statistics that are known."""
        found = error_stats(self._session.memory)
        if self._count:
            found["gradient_error_mean"] = float(self._total) / self._count
            found["gradient_error_largest"] = float(self._largest)
        return found

    def _add(self, estimate: Tensor) -> None:
        """Keep mean and maximum, which `stats` reads: nothing here waits for a device."""
        value = estimate.nan_to_num(posinf=0.0)  # a mean of zero has no relative error
        with self._lock:
            self._count += 1
            self._total = self._total.to(value) + value
            self._largest = torch.maximum(self._largest.to(value), value)

    def _watch_units(self) -> None:
        """Warn once if units serve the optimizer badly; in a lane's thread, which may wait."""
        made = float(self._total) / max(1, self._count)
        if made > _AMPLIFIED and not self._warned_of_units and own_rank() == 0:
            self._warned_of_units = True
            _log.warning(
                "in the optimizer's units errors are within the budget, and gradients' own are "
                "%.3g of their squares: some rows have far smaller moments than others, as those "
                "of rare words do. Leave optimizer= out, and %s",
                made,
                BLOCKS,
            )
