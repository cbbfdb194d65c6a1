"""One rank's own weights: what was pulled, and local steps on top of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.schedules._rules import LocalRule, Moment
from laconic.server._flat import Flat


class Replica:
    """Three flat vectors: own weights, the last pull, and the next one.

    The next pull's memory is a local step's room while no pull is on its way (`coming`).
    """

    def __init__(
        self, flat: Flat, rule: LocalRule | None, period: int, *, decoupled: bool = False
    ) -> None:
        self._flat, self._rule, self._period = flat, rule, period
        self._decoupled = decoupled  # weight decay, where the settings do not say
        self.own, self.pulled, self.next = flat.empty(), flat.empty(), flat.empty()
        flat.read(self.own)
        self.pulled.copy_(self.own)
        kept = () if rule is None else rule.remembers
        self._memory = {name: torch.zeros_like(self.own) for name in kept}
        self._rates = [0.0] * len(flat.groups)  # of the last step
        self._count = 0  # of steps since the memories began
        self.coming = False  # a pull was started, and not taken over yet

    def move(self, g: Tensor, spoilt: Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """Own weights = (what has come, or own weights) - a local step, which is 0 if spoilt."""
        fresh = self.coming
        # the step is computed in memory that is free: W's own, if there are newer weights
        w, room = (self.next, self.own) if fresh else (self.own, self.next)
        if self._rule is not None:
            self._count += 1
            for number, (first, last) in enumerate(self._flat.groups):
                at = self._moment(w, g, groups[number], slice(first, last), self._rates[number])
                self._rule.step(at, room[first:last])
            self._rates = [float(settings["lr"]) for settings in groups]
            room.masked_fill_(spoilt > 0, 0.0)  # without waiting for a device
            torch.sub(w, room, out=self.own)
        elif fresh:
            self.own.copy_(w)
        if fresh:
            self._take_over()

    def _moment(
        self, w: Tensor, g: Tensor, settings: Mapping[str, Any], part: slice, before: float
    ) -> Moment:
        assert self._rule is not None
        lr = float(settings["lr"])
        first, second = settings.get("betas", Moment.betas)
        return Moment(
            w=w[part],
            g=g[part],
            seen=self.own[part],
            pulled=self.pulled[part],
            **{name: memory[part] for name, memory in self._memory.items()},
            fresh=self.coming,
            period=self._period,
            lr=lr * self._rule.local_lr_scale,
            lr_change=lr / before if before else 1.0,
            count=self._count,
            decay=float(settings.get("weight_decay", 0.0)),
            momentum=float(settings.get("momentum", 0.0)),
            dampening=float(settings.get("dampening", 0.0)),
            nesterov=bool(settings.get("nesterov", False)),
            betas=(float(first), float(second)),
            eps=float(settings.get("eps", Moment.eps)),
            decoupled=bool(settings.get("decoupled_weight_decay", self._decoupled)),
        )

    def take_as_they_are(self) -> None:
        """Own weights = what has come, one synchronous step later."""
        velocity = self._memory.get("velocity")
        if velocity is not None:
            torch.sub(self.own, self.next, out=velocity)
        self.own.copy_(self.next)
        self._take_over()

    def begin_again(self) -> None:
        """Own weights = what has come, after an absence: what was remembered is of no use now."""
        for memory in self._memory.values():
            memory.zero_()
        self._count = 0
        self.own.copy_(self.next)
        self._take_over()

    def _take_over(self) -> None:
        self.pulled, self.next = self.next, self.pulled
        self.coming = False

    def state_dict(self) -> dict[str, Any]:
        """Copies; of the next pull only if it has come and was not taken over."""
        return {
            "own": self.own.clone(),
            "pulled": self.pulled.clone(),
            "coming": self.next.clone() if self.coming else None,
            "memory": {name: memory.clone() for name, memory in self._memory.items()},
            "rates": list(self._rates),
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        self.own.copy_(state["own"])
        self.pulled.copy_(state["pulled"])
        self.coming = state["coming"] is not None
        if self.coming:
            self.next.copy_(state["coming"])
        self._rates, self._count = list(state["rates"]), int(state["count"])
        for name, memory in self._memory.items():
            memory.copy_(state["memory"][name])
