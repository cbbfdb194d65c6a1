"""What the DDP hook knows and remembers."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic._key import seed_of
from laconic._version import __version__
from laconic._wire import DTYPES
from laconic.codecs import Codec, Place
from laconic.codecs._memory import Scratch
from laconic.errors import ConfigError
from laconic.exchanges import Exchange
from laconic.exchanges._agree import agree
from laconic.exchanges._base import checked_verify, saved_memory
from laconic.exchanges._lane import Lane
from laconic.exchanges._lane import lanes as make_lanes
from laconic.exchanges._ledger import (
    BUDGET,
    ParameterBudget,
    budget_report,
    error_stats,
    ledger_of,
    load_budget,
    saved_budget,
)
from laconic.exchanges._nested import nesting
from laconic.exchanges._policy import Chooser, Policy
from laconic.exchanges._preconditioner import (
    BLOCKS,
    NO_UNITS,
    Preconditioner,
    preconditioner_of,
)
from laconic.exchanges._replicas import absent, compare, digest
from laconic.integrations._bucket_order import BucketOrder, real_numel
from laconic.integrations._choices import Choices, check_warmup, line
from laconic.integrations._common import OWN, Stats, check_own, check_ranks, own_rank
from laconic.integrations._stepped import hear_of_steps, warn_of_noise

_log = logging.getLogger("laconic")
_CHECKED_EVERY = 500  # steps between two comparisons of weights
_LOOKED_EVERY = 100  # steps between two looks at the error that was made
_WEIGHED_EVERY = 16  # steps between two estimates of the error in gradients' own units
_WATCHED_EVERY = 128  # .. and between two looks at them
_TOLERATED = 1.2  # times the budget
_AMPLIFIED = 1.0  # relative squared error of gradients as they are, where their units are others
_MOST_FILLED = 1 / 64  # of a load, zeros that are encoded to save copying


@dataclass(frozen=True)
class Piece:
    """A parameter inside a bucket."""

    number: int
    start: int
    numel: int


@dataclass(frozen=True)
class Load:
    """The pieces of a bucket that travel under one codec.

    `fillers` are among them, zeroed: small plain pieces that lie between encoded ones. Encoding
    zeros costs less than copying all the others together and back.
    """

    codec: Codec
    exchange: Exchange
    pieces: tuple[Piece, ...]
    fillers: tuple[Piece, ...] = ()

    @cached_property
    def lossy(self) -> bool:
        """Whether it matters in which units the pieces are encoded."""
        return self.codec.variance_bound(1) != 0

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The pieces, for codecs with a step or a memory for each."""
        return tuple(
            Place(parameter=piece.number, start=0, numel=piece.numel, total=piece.numel)
            for piece in self.pieces
        )


@dataclass(frozen=True)
class Plan:
    """What a bucket is made of: encoded loads, and values that travel as they are."""

    loads: tuple[Load, ...]
    plain: tuple[Piece, ...]


class _Seen:
    """Mean and maximum of numbers that a device knows, read when somebody asks."""

    def __init__(self) -> None:
        self._count, self._total, self._largest = 0, torch.zeros(()), torch.zeros(())
        self._lock = threading.Lock()  # lanes add at the same time

    def add(self, value: Tensor) -> None:
        value = value.nan_to_num(posinf=0.0)  # of a mean that is zero nothing is known
        with self._lock:
            self._count += 1
            self._total = self._total.to(value) + value
            self._largest = torch.maximum(self._largest.to(value), value)

    def stats(self) -> dict[str, Any]:
        """The fields of statistics; none before anything was seen."""
        if not self._count:
            return {}
        return {
            "gradient_error_mean": float(self._total) / self._count,
            "gradient_error_largest": float(self._largest),
        }


class _Heard(NamedTuple):
    """An optimizer that has made a step."""

    optimizer: weakref.ref[Any]
    parameters: int  # how many: where that changes, they are looked at again
    trains: bool  # this model


class _Waiting(NamedTuple):
    """What is needed when ranks meet, and not afterwards."""

    module: nn.Module
    policy: Chooser
    group: dist.ProcessGroup | None
    timeout_s: float


class HookState:
    """What the hook needs to know, and what it remembers; `lc.compress` makes and registers one.

    Make it on all ranks of the group at once: they compare settings, and end together if those
    differ. It may come before `init_process_group`, or before the model is moved to its GPU, in
    programs that do these themselves, such as Lightning: ranks then meet at the first bucket.
    `module` is what DDP wraps. States of one model that take turns may share `lanes`, threads and
    process groups. `optimizer`, or a list of several, steps the parameters: gradients are encoded
    in its units then, where it has second moments. A single rank has nobody to exchange with, and
    its gradients stay exact, unless `even_alone` asks for what more ranks would do to them.
    `static_graph` is DDP's setting.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: str | Codec,
        *,
        exchange: str | Exchange | None = None,
        policy: Chooser | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        even_alone: bool = False,
        verify: str = "auto",
        static_graph: bool = False,
        lanes: tuple[Lane, ...] | None = None,
        optimizer: Any = None,
    ) -> None:
        if spec == "auto":
            raise ConfigError(
                'a HookState is of one codec; "auto" is lc.compress(model, "auto"), or Compress('
                '"auto") of laconic.integrations.lightning'
            )
        self._pairs = Choices(spec, exchange)
        self.codec, self.exchange = self._pairs[""]
        check_warmup(warmup_steps)
        self.warmup_steps, self.seed, self.step = warmup_steps, seed, 0
        self.passes: int | None = None  # of backward, since an optimizer stepped the model
        self._optimizers: dict[int, _Heard] = {}  # that have made a step, of other models, too
        self._counts = False  # passes: optimizers that were heard step all that is encoded
        self._warns = lanes is None  # of noise; states that take turns leave it to their owner
        self.draws = seed  # once the model is known, the seed of its own draws
        self.even_alone, self.alone = even_alone, False
        self.order = BucketOrder(passes=2 if static_graph else 1)
        self.verify = checked_verify(verify)
        self._every, self._weights = _CHECKED_EVERY, list[weakref.ref[Tensor]]()
        self._over_budget = self._amplified = False  # said so
        self.scratch = Scratch()
        self.known: set[Hashable] = set()
        self.memory: dict[Hashable, Any] = {}  # of exchanges
        self.preconditioner = preconditioner_of(optimizer)  # states that take turns share one
        if self.preconditioner is not None:
            self.preconditioner.listen(self._changed)
        self._encoded: dict[int, weakref.ref[Tensor]] = {}  # parameters, by number
        self._gradient_errors = _Seen()
        self._parameters: dict[int, tuple[int, str | None]] = {}  # number, and text if encoded
        self._names: list[str] = []
        self._warned: set[str] = set()  # names of parameters that travel uncompressed
        self._plans: dict[tuple[int, ...], Plan] = {}
        self.turns: dict[int, int] = {}  # of parameters that come one by one
        self.lanes: tuple[Lane, ...] = lanes or ()
        self._waiting: _Waiting | None = _Waiting(module, policy or Policy(), group, timeout_s)
        hear_of_steps(self)
        if _can_talk(group, _device(module)):
            self.meet()
        else:  # what is wrong with the policy is said now; parameters may still be replaced
            self._choose(module, self._waiting.policy)

    def meet(self) -> None:
        """Compare settings with the other ranks, if that was not done yet."""
        if self._waiting is None:
            return
        module, policy, group, timeout_s = self._waiting
        self._waiting = None
        layout = self._choose(module, policy)
        device = _device(module)
        self.lanes = self.lanes or make_lanes(group, device, timeout_s)
        ranks = self.lanes[0].group.size()
        self.alone = ranks == 1 and not self.even_alone
        settings = {
            "laconic": __version__,
            "codec": str(self.codec),
            "exchange": str(self.exchange),
            "warmup_steps": str(self.warmup_steps),
            "verify": self.verify,
            "seed": str(self.seed),
            "optimizer": "none" if self.preconditioner is None else "given",
            "parameters": "\n".join(layout),
        }
        agree(settings, self.lanes[0].group, device)
        for lane in self.lanes:
            for own, way in self._pairs.values():
                way.prepare(lane.group)
                way.check_group(own, lane.group)

    def _choose(self, module: nn.Module, policy: Chooser) -> list[str]:
        """Ask the policy about every parameter; a line for each, to be compared between ranks."""
        lines, strange = [], []
        self._parameters.clear()
        self._optimizers.clear()
        self._counts = False
        self._encoded.clear()
        self._names = [name for name, _ in module.named_parameters()]
        for number, (name, parameter) in enumerate(module.named_parameters()):
            text = self._pairs.text(policy(name, parameter)) if parameter.requires_grad else None
            if text is not None and not encodable(parameter):
                text = None
                strange += [f"{name} ({parameter.dtype})"] if parameter.numel() else []
            self._parameters[id(parameter)] = number, text
            if text is not None:
                self._encoded[number] = weakref.ref(parameter)
            lines.append(line(name, parameter, text))
        trained = [one for one in module.parameters() if one.requires_grad]
        self._weights = [weakref.ref(one) for one in trained]
        self.order.know((self._parameters[id(one)][0], one) for one in trained)
        self.draws = seed_of(self.seed, "\n".join(lines))
        self._warn(strange, "their dtype cannot be encoded")
        self._use_units()
        return lines

    def _use_units(self) -> None:
        """Tell the preconditioner of all codecs."""
        if self.preconditioner is not None:
            for own, way in self._pairs.values():
                way.check_units(own)
                if own.variance_bound(1) != 0:
                    self.preconditioner.allow(own.budget)

    def _changed(self, number: int, growth: Tensor) -> None:
        """A parameter's units have changed: what codecs remember of it has the old ones."""
        for _, codec in self._remembering():
            codec.change_units(number, growth)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step: of this model, or of another one."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        heard = self._optimizers.get(id(optimizer))
        if heard is None or heard.optimizer() is not optimizer or heard.parameters != count:
            heard = self._hear(optimizer, count)
        if heard.trains:
            self.passes = 0 if self._counts else None

    def _hear(self, optimizer: Any, count: int) -> _Heard:
        """Get to know an optimizer, which steps so many parameters.

        Passes count only where this rank's optimizers step all that is encoded. Ranks that share
        them out may step their shares at other times: whoever has none of a layer waits for it.
        """
        own = self._trained_by(optimizer)
        heard = _Heard(weakref.ref(optimizer), count, bool(own))
        alive = {key: one for key, one in self._optimizers.items() if one.optimizer() is not None}
        self._optimizers = alive | {id(optimizer): heard}
        if own:
            self._warn_of_noise(optimizer, own)
            found = [one.optimizer() for one in self._optimizers.values() if one.trains]
            stepped = {id(one) for each in found if each is not None for one in _stepped_by(each)}
            self._counts = stepped.issuperset(map(id, self._encoded_parameters().values()))
        return heard

    def _warn_of_noise(self, optimizer: Any, own: Sequence[Tensor]) -> None:
        units = self.preconditioner
        if self._warns and (units is None or not units.reads(own)):
            self._warns = False
            wrong = "optimizer= was given one without moments of these parameters; "
            advice = f"{BLOCKS}, or encode in its units, compress(.., optimizer=optimizer)"
            warn_of_noise(optimizer, self.codec, advice if units is None else wrong + BLOCKS)

    def end_pass(self) -> None:
        """The last bucket of a backward pass has come."""
        self.step += 1
        if self.passes is not None:
            self.passes += 1

    def _trained_by(self, optimizer: Any) -> list[Tensor]:
        """The encoded parameters that an optimizer steps."""
        own = {id(one) for one in self._encoded_parameters().values()}
        return [one for one in _stepped_by(optimizer) if id(one) in own]

    @property
    def cold(self) -> bool:
        """Whether the optimizer's units are not known yet, because it has made no step."""
        return self.preconditioner is not None and self.preconditioner.cold

    def units_of(self, load: Load) -> Preconditioner | None:
        """The units to encode it in, None for gradients' own."""
        return self.preconditioner if load.lossy else None

    def units_due(self, step: int) -> bool:
        """Whether a snapshot of the optimizer's units is to be made at this step."""
        units = self.preconditioner
        return units is not None and step >= self.warmup_steps and units.due(step)

    def renew_units(self, step: int) -> Tensor | None:
        """Make that snapshot; its digest, to be compared. None if there are no units."""
        assert self.preconditioner is not None
        return self.preconditioner.refresh(step, self._encoded_parameters())

    def weighs(self, load: Load, step: int) -> bool:
        """Whether the error of this step's gradient is estimated, where its units are others."""
        known = load.codec.budget is not None and load.codec.knows_error
        return known and self.units_of(load) is not None and step % _WEIGHED_EVERY == 0

    def weigh(
        self,
        load: Load,
        own: Sequence[Tensor],
        encoded: Sequence[Tensor],
        means: Sequence[Tensor],
        step: int,
    ) -> None:
        """Estimate the relative squared error of gradients ĝ from that of ŷ = ĝ/w; none waits.

        An error e·‖ŷ‖² is one of e·‖ŷ‖²·mean(w²) of ĝ, spread evenly over the values that are not
        0. Where it is not (rare words), ‖ĝ‖² grows: without errors it is κ times what ranks have.
        Norms of this rank's gradients and of ŷ are given, and ĝ, of each piece.
        """
        assert self.preconditioner is not None
        numbers = [piece.number for piece in load.pieces]
        known = zip(numbers, *ledger_of(self.memory).latest(numbers), own, encoded, strict=True)
        for (number, error, kappa, x, y), mean in zip(known, means, strict=True):
            power = self.preconditioner.power(number, mean)
            if power is not None and error == error:
                norm = torch.linalg.vector_norm(mean, dtype=torch.float32).double()
                even, grown = error * power * (y / norm).square(), (norm / x).square() / kappa - 1
                self._gradient_errors.add(torch.where(grown > _AMPLIFIED, grown, even))
        if step and step % _WATCHED_EVERY == 0:
            self._watch_gradients()

    def _watch_gradients(self) -> None:
        """Say once if units serve the optimizer badly; in a lane's thread, which may wait."""
        made = self._gradient_errors.stats().get("gradient_error_mean", 0.0)
        if made > _AMPLIFIED and not self._amplified and own_rank() == 0:
            self._amplified = True
            _log.warning(
                "in the optimizer's units errors are as small as asked for, and gradients' own are "
                "%.3g of their squares: some rows have far smaller moments than others, as those "
                "of rare words do. Leave optimizer= out, and %s",
                made,
                BLOCKS,
            )

    def _encoded_parameters(self) -> dict[int, Tensor]:
        return {number: one for number, ref in self._encoded.items() if (one := ref()) is not None}

    def check_replicas(self, every: int = _CHECKED_EVERY) -> None:
        """Compare the weights of all ranks every so many steps; 0 for never. On all ranks.

        Eight bytes per rank travel. If they differ, `backward` raises `lc.ReplicaError` on all
        ranks, which names those that differ from most.
        """
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise ConfigError(f"check_replicas: every must be an integer from 0, not {every!r}")
        self._every = every

    def replicas_due(self, step: int) -> bool:
        """Whether weights are to be compared at this step."""
        return bool(self._every) and step > 0 and step % self._every == 0

    def compare_replicas(self, lane: Lane, step: int, *, has_joined: bool = False) -> None:
        """In a lane's thread, before the step's last bucket ends: nobody changes weights yet.

        A rank that `has_joined` (DDP's `join`) gets the others' weights at the end.
        """
        weights = [one for ref in self._weights if (one := ref()) is not None]
        found = digest(weights)
        compare(absent(found) if has_joined else found, lane.group, step)

    def watch_budget(self, step: int) -> None:
        """Say once if the error that was made has left the budget; it is looked at now and then."""
        if self._over_budget or step % _LOOKED_EVERY != _LOOKED_EVERY - 1 or own_rank() != 0:
            return
        report = budget_report(self.memory)
        if report is not None and report.mean > _TOLERATED * report.budget:
            self._over_budget = True
            worst, found = max(self.errors().items(), key=lambda one: one[1].mean)
            _log.warning(
                "the mean gradient's error is %.3g, and error=%g was asked for (worst: %s, %.3g): "
                "leave max_bits= out, or give that parameter a codec of its own, "
                "policy=lc.Policy(rules=..)",
                report.mean,
                report.budget,
                worst,
                found.mean,
            )

    def warn_of_sparse(self, parameters: Sequence[Tensor]) -> None:
        """Say once that sparse gradients travel as they are."""
        numbers = [self._parameters[id(one)][0] for one in parameters]
        names = [name for i, name in enumerate(self._names) if i in numbers]
        self._warn(names, "their gradients are sparse; nn.Embedding(sparse=False) makes dense ones")

    def _warn(self, names: Sequence[str], why: str) -> None:
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        if new and own_rank() == 0:
            more = f" and {len(new) - 5} more" if len(new) > 5 else ""
            _log.warning("uncompressed: %s%s: %s", ", ".join(new[:5]), more, why)

    @property
    def ranks(self) -> int | None:
        """How many exchange gradients; None before they have met."""
        return self.lanes[0].group.size() if self.lanes else None

    @property
    def encodes(self) -> bool:
        """Whether any parameter is worth it, says the policy."""
        return any(text is not None for _, text in self._parameters.values())

    def stats(self) -> Stats:
        """Bytes and times so far."""
        nested = nesting(self.memory)
        return Stats(
            steps=self.step,
            sent_bytes=sum(lane.traffic.sent_bytes for lane in self.lanes),
            plain_bytes=sum(lane.plain_bytes for lane in self.lanes),
            exchange_seconds=sum(lane.seconds for lane in self.lanes),
            wire_seconds=sum(lane.traffic.wire_seconds for lane in self.lanes),
            local_bytes=sum(lane.traffic.local_bytes for lane in self.lanes),
            **error_stats(self.memory),
            **self._gradient_errors.stats(),
            nesting_ratio=nested and nested.ratio,
            decode_failures=nested and nested.failures,
            correlation=nested and nested.correlation,
        )

    def errors(self) -> dict[str, ParameterBudget]:
        """The error of each parameter's mean gradient so far, by name, where it had a budget."""
        report = budget_report(self.memory)
        rows = () if report is None else report.parameters
        return {self._names[row.parameter]: row for row in rows}

    def close(self) -> None:
        """Give threads, connections and process groups back; on all ranks, behind the last step.

        It also happens when the process ends.
        """
        for lane in self.lanes:
            lane.close()

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to go on exactly: steps, and all memories."""
        memories = {text: codec.state_dict() for text, codec in self._remembering()}
        return {
            "rank": own_rank(),
            "step": self.step,
            "turns": dict(self.turns),
            "ranks": self.ranks,
            "order": self.order.state_dict(),
            "codec": str(self.codec),
            "budget": saved_budget(self.memory),
            "units": None if self.preconditioner is None else self.preconditioner.state_dict(),
            "memory": memories,
            "exchange memory": {
                key: kept for key, kept in saved_memory(self.memory).items() if key != BUDGET
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        if state["codec"] != str(self.codec):
            raise ConfigError(f"this state is of {state['codec']}, not of {self.codec}")
        check_own(state, *OWN)
        check_ranks(state, self.ranks, *OWN)
        self.step, self.turns = int(state["step"]), dict(state["turns"])
        self.passes = None  # ranks may have come from different places
        if "order" in state:  # older states do not know it: their first step differs in rounding
            self.order.load_state_dict(state["order"])
        for text, codec in self._remembering():
            codec.load_state_dict(state["memory"][text])
        self.memory = dict(state.get("exchange memory", {}))  # exchanges take up what is theirs
        load_budget(self.memory, state.get("budget"))
        units = state.get("units") or NO_UNITS
        if self.preconditioner is not None:
            self.preconditioner.load_state_dict(units, self._encoded_parameters())
            return
        for number, exponents in units["exponents"].items():  # back to gradients as they are
            self._changed(int(number), exponents.neg())

    def _remembering(self) -> list[tuple[str, Any]]:
        return [(text, codec) for text, (codec, _) in self._pairs.items() if codec.remembers]

    def plan(self, parameters: Sequence[Tensor]) -> Plan:
        """What a bucket is made of; known by its parameters, because buckets are rebuilt."""
        key = tuple(map(id, parameters))
        if key not in self._plans:
            self._plans[key] = self._planned(parameters)
        return self._plans[key]

    def _planned(self, parameters: Sequence[Tensor]) -> Plan:
        by_text: dict[str | None, list[Piece]] = {}
        start = 0
        for parameter in parameters:
            if id(parameter) not in self._parameters:
                raise ConfigError(
                    "DDP has a parameter that the hook's state does not know: make HookState with "
                    "the module that DDP wraps, all of it"
                )
            number, text = self._parameters[id(parameter)]
            count = real_numel(parameter)
            if count:
                by_text.setdefault(text, []).append(Piece(number, start, count))
            start += count
        plain = tuple(by_text.pop(None, []))
        loads = [
            Load(*self._pairs[text], *_filled(pieces, plain))
            for text, pieces in by_text.items()
            if text is not None
        ]
        return Plan(tuple(loads), plain)


def _stepped_by(optimizer: Any) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def encodable(parameter: Tensor) -> bool:
    """Whether codecs take its gradient; all else travels as DDP would send it."""
    return parameter.dtype in DTYPES and parameter.numel() > 0


def _can_talk(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether there is a process group, and the model is where that takes tensors from."""
    return dist.is_initialized() and (device.type != "cpu" or dist.get_backend(group) != "nccl")


def _filled(
    pieces: Sequence[Piece], plain: Sequence[Piece]
) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The pieces, with plain ones between them if these are few and make one run of all."""
    first, last = pieces[0].start, pieces[-1].start + pieces[-1].numel
    between = tuple(piece for piece in plain if first < piece.start < last)
    added, total = (sum(piece.numel for piece in some) for some in (between, pieces))
    if added + total != last - first or added > _MOST_FILLED * total:
        return tuple(pieces), ()
    return tuple(sorted((*pieces, *between), key=lambda piece: piece.start)), between
