"""The state of the DDP hook."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic._key import seed_of
from laconic._settings import whole
from laconic._version import __version__
from laconic._wire import DTYPES
from laconic.codecs import Codec
from laconic.comm._agreement import absent, compare, digest, require_same_settings
from laconic.comm._context import ExchangeSession
from laconic.comm._threads import CommLane
from laconic.comm._threads import lanes as make_lanes
from laconic.errors import ConfigError
from laconic.exchanges import Exchange
from laconic.exchanges._error_report import ParameterBudget
from laconic.exchanges._nested import nesting
from laconic.exchanges._policy import Chooser, policy_for
from laconic.exchanges._preconditioner import NO_UNITS, Preconditioner, preconditioner_of
from laconic.integrations._buckets import (
    BucketLayout,
    BucketOrder,
    CodecGroup,
    ParameterSlice,
    real_numel,
)
from laconic.integrations._handle import (
    CodecPairs,
    Stats,
    check_own,
    check_ranks,
    described,
    own_rank,
)
from laconic.integrations._monitor import ErrorMonitor, LateParameters, OptimizerSteps

_log = logging.getLogger("laconic")
_CHECKED_EVERY = 500  # steps between two comparisons of weights
_ESTIMATED_EVERY = 16  # .. between two estimates of the error in gradients' own units


class _Unconnected(NamedTuple):
    """What is needed until ranks have compared settings, and not afterwards."""

    module: nn.Module
    policy: Chooser | None
    group: dist.ProcessGroup | None
    timeout_s: float


class HookState:
    """The settings and the state of the hook; `lc.compress` makes and registers one.

    Make it on all ranks of the group at once: they compare settings, and end together if those
    differ. It may come before `init_process_group`, or before the model is moved to its GPU, in
    programs that do these themselves, such as Lightning: settings are then compared at the first
    bucket. `module` is what DDP wraps. States of one model that take turns may share `lanes`,
    threads and process groups. `optimizer`, or a list of several, steps the parameters: gradients
    are encoded in its units then, where it has second moments. A single rank has no other to
    exchange with, and its gradients stay exact, unless `even_alone` encodes them as several ranks
    would. `static_graph` is DDP's setting.

    Pickled or copied, in a DDP model or alone, it is its settings and its state_dict; `attach`
    gives the copy a model.
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
        lanes: tuple[CommLane, ...] | None = None,
        optimizer: Any = None,
    ) -> None:
        if spec == "auto":
            raise ConfigError(
                'a HookState is of one codec; "auto" is lc.compress(model, "auto"), or Compress('
                '"auto") of laconic.integrations.lightning'
            )
        self._settings: dict[str, Any] = {
            "spec": spec,
            "exchange": exchange,
            "policy": policy,
            "warmup_steps": warmup_steps,
            "seed": seed,
            "timeout_s": timeout_s,
            "even_alone": even_alone,
            "verify": verify,
            "static_graph": static_graph,
        }
        self._pairs = CodecPairs(spec, exchange)
        self.codec, self.exchange = self._pairs[""]
        whole("warmup_steps", warmup_steps, 0)
        self.warmup_steps, self.seed, self.step = warmup_steps, seed, 0
        self.even_alone, self.alone = even_alone, False
        self.order = BucketOrder(passes=2 if static_graph else 1)
        # once the model is known, the seed is that of its own draws
        self.session = ExchangeSession(seed=seed, verify=verify)
        self._every, self._weights = _CHECKED_EVERY, list[weakref.ref[Tensor]]()
        self.preconditioner = preconditioner_of(optimizer)  # states that take turns share one
        if self.preconditioner is not None:
            self.preconditioner.listen(self._changed)
        # states that take turns leave warnings of noise to their owner
        self.optimizers = OptimizerSteps(self.codec, self.preconditioner, warns=lanes is None)
        self.monitor = ErrorMonitor(self.session, self.preconditioner)
        self._encoded: dict[int, weakref.ref[Tensor]] = {}  # parameters, by number
        self._parameters: dict[int, tuple[int, str | None]] = {}  # number, and spec if encoded
        self._names: list[str] = []
        self._warned: set[str] = set()  # names of parameters that travel uncompressed
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}
        self.turns: dict[int, int] = {}  # of parameters that come one by one
        self.lanes: tuple[CommLane, ...] = lanes or ()
        self._unconnected: _Unconnected | None
        self._unconnected = first = _Unconnected(module, policy, group, timeout_s)
        if _can_talk(group, _device(module)):
            self.connect()
        else:  # errors of the policy are raised now; parameters may still be replaced
            self._choose(module, first.policy)

    def connect(self) -> None:
        """Make process groups and compare settings with other ranks, once."""
        if self._unconnected is None:
            return
        module, policy, group, timeout_s = self._unconnected
        self._unconnected = None
        layout = self._choose(module, policy)
        device = _device(module)
        self.lanes = self.lanes or make_lanes(group, device, timeout_s)
        ranks = self.lanes[0].group.size()
        self.alone = ranks == 1 and not self.even_alone
        if self.alone:  # nothing is averaged
            self.optimizers.observe(self._encoded, None)
        settings = {
            "laconic": __version__,
            "codec": str(self.codec),
            "exchange": str(self.exchange),
            "warmup_steps": str(self.warmup_steps),
            "verify": self.session.verify,
            "seed": str(self.seed),
            "optimizer": "none" if self.preconditioner is None else "given",
            "parameters": "\n".join(layout),
        }
        require_same_settings(settings, self.lanes[0].group, device)
        for lane in self.lanes:
            for own, way in self._pairs.values():
                way.prepare(lane.group)
                way.check_group(own, lane.group)

    def _choose(self, module: nn.Module, policy: Chooser | None) -> list[str]:
        """Ask the policy about every parameter; a line for each, to be compared between ranks."""
        lines, strange = [], []
        policy = policy_for(policy, module.named_parameters())
        self._parameters.clear()
        self._encoded.clear()
        self._names = [name for name, _ in module.named_parameters()]
        for number, (name, parameter) in enumerate(module.named_parameters()):
            spec = self._pairs.spec(policy(name, parameter)) if parameter.requires_grad else None
            if spec is not None and not (parameter.dtype in DTYPES and parameter.numel()):
                spec = None
                strange += [f"{name} ({parameter.dtype})"] if parameter.numel() else []
            self._parameters[id(parameter)] = number, spec
            if spec is not None:
                self._encoded[number] = weakref.ref(parameter)
            lines.append(described(name, parameter, spec))
        trained = [one for one in module.parameters() if one.requires_grad]
        self._weights = [weakref.ref(one) for one in trained]
        self.order.know((self._parameters[id(one)][0], one) for one in trained)
        self.session.seed = seed_of(self.seed, "\n".join(lines))
        self._warn(strange, "their dtype cannot be encoded")
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())  # torch's name
        left_out = [one for name, one in module.named_parameters() if name in ignored]
        reduced = [*trained, *left_out]
        self._late = LateParameters(module, reduced, "DistributedDataParallel(model)")
        self.optimizers.observe(self._encoded, self._late)
        self._use_units()
        return lines

    def _use_units(self) -> None:
        """Register all codecs with the preconditioner."""
        if self.preconditioner is not None:
            for own, way in self._pairs.values():
                way.check_units(own)
                if own.variance_bound(1) != 0:
                    self.preconditioner.allow(own.budget)

    def _changed(self, number: int, growth: Tensor) -> None:
        """A parameter's units have changed: its residuals have the old ones."""
        self.session.memory.residuals.change_units(number, growth)

    def end_pass(self) -> None:
        """The last bucket of a backward pass has come."""
        self.step += 1
        self.optimizers.end_pass()
        self.monitor.watch_budget(self.step - 1, self._names)

    @property
    def cold(self) -> bool:
        """Whether the optimizer's units are not known yet, because it has made no step."""
        return self.preconditioner is not None and self.preconditioner.cold

    def units_of(self, group: CodecGroup) -> Preconditioner | None:
        """The units to encode it in, None for gradients' own."""
        return self.preconditioner if group.lossy else None

    def estimates(self, group: CodecGroup, step: int) -> bool:
        """Whether the error of this step's gradient is estimated, where its units are others."""
        if self.units_of(group) is None or step % _ESTIMATED_EVERY:
            return False
        return group.codec.budget is not None and group.codec.knows_error

    def units_due(self, step: int) -> bool:
        """Whether a snapshot of the optimizer's units is to be made at this step."""
        units = self.preconditioner
        return units is not None and step >= self.warmup_steps and units.due(step)

    def renew_units(self, step: int) -> Tensor | None:
        """Make that snapshot; its digest, to be compared. None if there are no units."""
        assert self.preconditioner is not None
        return self.preconditioner.refresh(step, self._encoded_parameters())

    def _encoded_parameters(self) -> dict[int, Tensor]:
        return {number: one for number, ref in self._encoded.items() if (one := ref()) is not None}

    def check_replicas(self, every: int = _CHECKED_EVERY) -> None:
        """Compare the weights of all ranks every `every` steps; 0 for never. On all ranks.

        Eight bytes per rank travel. If they differ, `backward` raises `lc.ReplicaError` on all
        ranks, which names those that differ from most.
        """
        self._every = whole("check_replicas: every", every, 0)

    def replicas_due(self, step: int) -> bool:
        """Whether weights are to be compared at this step."""
        return bool(self._every) and step > 0 and step % self._every == 0

    def compare_replicas(self, lane: CommLane, step: int, *, has_joined: bool = False) -> None:
        """In a lane's thread, before the step's last bucket ends: no optimizer changes weights yet.

        A rank that `has_joined` (DDP's `join`) gets the others' weights at the end.
        """
        weights = [one for ref in self._weights if (one := ref()) is not None]
        found = digest(weights)
        compare(absent(found) if has_joined else found, lane.group, step)

    def warn_of_sparse(self, parameters: Sequence[Tensor]) -> None:
        """Warn once that sparse gradients travel as they are."""
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
        """How many exchange gradients; None before `connect`."""
        return self.lanes[0].group.size() if self.lanes else None

    @property
    def encodes(self) -> bool:
        """Whether the policy encodes any parameter."""
        return any(spec is not None for _, spec in self._parameters.values())

    def stats(self) -> Stats:
        """Bytes and times so far."""
        nested = nesting(self.session.memory)
        return Stats(
            steps=self.step,
            sent_bytes=sum(lane.traffic.sent_bytes for lane in self.lanes),
            plain_bytes=sum(lane.plain_bytes for lane in self.lanes),
            exchange_seconds=sum(lane.seconds for lane in self.lanes),
            wire_seconds=sum(lane.traffic.wire_seconds for lane in self.lanes),
            local_bytes=sum(lane.traffic.local_bytes for lane in self.lanes),
            **self.monitor.stats(),
            nesting_ratio=nested and nested.ratio,
            decode_failures=nested and nested.failures,
            correlation=nested and nested.correlation,
        )

    def errors(self) -> dict[str, ParameterBudget]:
        """The error of each parameter's mean gradient so far, by name, where it had a budget."""
        return self.monitor.errors(self._names)

    def close(self) -> None:
        """Give threads, connections and process groups back; on all ranks, after the last step.

        It also happens when the process ends.
        """
        for lane in self.lanes:
            lane.close()

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to resume exactly: steps, and all memories."""
        return {
            "rank": own_rank(),
            "step": self.step,
            "turns": dict(self.turns),
            "ranks": self.ranks,
            "order": self.order.state_dict(),
            "codec": str(self.codec),
            "units": None if self.preconditioner is None else self.preconditioner.state_dict(),
            **self.session.memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict."""
        if state["codec"] != str(self.codec):
            raise ConfigError(f"this state is of {state['codec']}, not of {self.codec}")
        check_own(state)
        check_ranks(state, self.ranks)
        self.step, self.turns = int(state["step"]), dict(state["turns"])
        self.optimizers.passes = None  # ranks may have made different numbers
        if "order" in state:  # older states do not know it: their first step differs in rounding
            self.order.load_state_dict(state["order"])
        self.session.memory.load_state_dict(state)
        units = state.get("units") or NO_UNITS
        if self.preconditioner is not None:
            self.preconditioner.load_state_dict(units, self._encoded_parameters())
            return
        for number, exponents in units["exponents"].items():  # back to gradients as they are
            self._changed(int(number), exponents.neg())

    def __getstate__(self) -> dict[str, Any]:
        """Settings and state: the model, its optimizers and process groups have other owners."""
        return {"_settings": self._settings, "_saved": self.state_dict()}

    def __getattr__(self, name: str) -> Any:
        """Of a copy that has no model yet, everything is missing."""
        if "_saved" in self.__dict__ and not name.startswith("__"):
            raise ConfigError(
                "this HookState was unpickled or copied, and has no model yet: call "
                "state.attach(model.module), then model.register_comm_hook(state, lc.comm_hook)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def attach(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        optimizer: Any = None,
    ) -> None:
        """Give a copy its model, as HookState(module, ..) does, on all ranks; it resumes."""
        saved = self.__dict__.pop("_saved", None)
        if saved is None:
            raise ConfigError("this HookState has a model: attach is for one that was unpickled")
        HookState.__init__(self, module, group=group, optimizer=optimizer, **self._settings)
        self.load_state_dict(saved)

    def layout(self, parameters: Sequence[Tensor]) -> BucketLayout:
        """What a bucket is made of; known by its parameters, because buckets are rebuilt."""
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            self._layouts[key] = self._layout_of(parameters)
        return self._layouts[key]

    def _layout_of(self, parameters: Sequence[Tensor]) -> BucketLayout:
        self._late.add(parameters)
        by_spec: dict[str | None, list[ParameterSlice]] = {}
        start = 0
        for parameter in parameters:
            if id(parameter) not in self._parameters:
                raise ConfigError(
                    "DDP has a parameter that the hook's state does not know: make HookState with "
                    "the module that DDP wraps, all of it"
                )
            number, spec = self._parameters[id(parameter)]
            count = real_numel(parameter)
            if count:
                by_spec.setdefault(spec, []).append(ParameterSlice(number, start, count))
            start += count
        plain = by_spec.pop(None, [])
        encoded = {spec: own for spec, own in by_spec.items() if spec is not None}
        return BucketLayout.of(encoded, plain, self._pairs)


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _can_talk(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether there is a process group, and the model is where that takes tensors from."""
    return dist.is_initialized() and (device.type != "cpu" or dist.get_backend(group) != "nccl")
