"""The strategies of a race: short names, or any spec that `lc.compress` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.codecs._register import split
from laconic.errors import ConfigError
from laconic.integrations import compress
from laconic.planner import Strategy
from laconic.planner._auto import auto
from laconic.race._result import PLAIN
from laconic.schedules import SSD, Schedule

SHORT = {
    "fp16": "fp16",
    "qsgd": "qsgd:bits=4",
    "dqsg": "dqsg:bits=4",
    "global": "global:bits=8",
    "ecdq": "ecdq:error=0.08",
}
DEFAULT = (PLAIN, *SHORT, "ssd+ecdq", "auto")
_AUTO, _SSD, _PERIOD = "auto", "ssd+", 4


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A strategy under its name; `plan` is what the planner calls it, None for auto."""

    name: str
    plan: Strategy | None
    text: str = ""  # its codec, as it was given
    delayed: bool = False  # SSD, instead of an exchange at every step

    @property
    def strategy(self) -> str:
        """In the planner's words."""
        if self.plan is None:
            return _AUTO
        return str(self.plan).replace(self.plan.codec, self.text) if self.text else str(self.plan)

    @property
    def code(self) -> str:
        """The line that turns it on."""
        if self.plan is None:
            return 'lc.compress(model, "auto")'
        return self.plan.code.replace(self.plan.codec, self.text) if self.text else self.plan.code

    @property
    def codec(self) -> str | None:
        """Its codec; None for plain DDP and auto."""
        return None if self.plan is None or self.plan.codec == "none" else self.plan.codec


def entry(name: str) -> Entry:
    """The strategy of that name; ConfigError lists the names."""
    if name == PLAIN:
        return Entry(name=name, plan=Strategy())
    if name == _AUTO:
        return Entry(name=name, plan=None)
    delayed, text = name.startswith(_SSD), name.removeprefix(_SSD)
    try:
        codec, _, exchange = SHORT.get(text, text).partition("@")
        if not delayed:
            plan = Strategy(codec=codec, exchange=exchange)
        else:
            plan = Strategy(codec=codec, schedule="ssd", period=_PERIOD)
        return Entry(name=name, plan=plan, text=codec, delayed=delayed)
    except ConfigError as error:
        known = ", ".join(DEFAULT)
        raise ConfigError(
            f"{name!r} is not a strategy: {error}; choose from {known}, ssd+CODEC, and all specs "
            "of lc.compress, such as dqsg:bits=2@allgather"
        ) from error


def entries(text: str) -> tuple[Entry, ...]:
    """Strategies between commas, each once.

    >>> [one.strategy for one in entries("fp32,ecdq:error=0.1,coder=rans,ssd+dqsg")]
    ['plain DDP', 'ecdq:error=0.1,coder=rans', 'ssd k=4 dqsg:bits=4']
    """
    names = split(text)
    found = tuple(entry(name) for name in dict.fromkeys(names))
    if not found:
        raise ConfigError(f"name a strategy: {', '.join(DEFAULT)}")
    return found


class Training(NamedTuple):
    """A network that trains under a strategy."""

    model: nn.Module
    optimizer: Any  # what steps
    handle: Any = None  # what has counters; plain DDP has none
    schedule: Schedule | None = None  # what has global weights, where those of replicas differ


def turned_on(one: Entry, model: nn.Module, optimizer: Optimizer, seed: int) -> Training:
    """Train with a strategy."""
    plan = one.plan
    if plan is not None and one.delayed:
        ssd = SSD(
            optimizer,
            model,
            period=plan.period,
            warmup_steps=0,
            codec=plan.codec,
            pull_codec=None if plan.codec == "none" else plan.codec,
            seed=seed,
        )
        return Training(model, ssd, ssd, ssd)
    replicas = DistributedDataParallel(model)
    if one.name == PLAIN:
        return Training(replicas, optimizer)
    if plan is None:
        return Training(replicas, optimizer, auto(replicas, seed=seed))
    return Training(replicas, optimizer, compress(replicas, plan.spec, seed=seed))
