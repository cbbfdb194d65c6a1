"""One rank's own weights: what was pulled, and local steps on top of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.schedules._flat import Flat
from laconic.schedules._rules import LocalRule, Moment


class Replica:
    """Three flat vectors: own weights, the last pull, and the next one.

    The next pull's memory is a local step's room while no pull is on its way (`coming`).
    """

    def __init__(self, flat: Flat, rule: LocalRule | None, period: int) -> None:
        self._flat, self._rule, self._period = flat, rule, period
        self.own, self.pulled, self.next = flat.empty(), flat.empty(), flat.empty()
        flat.read(self.own)
        self.pulled.copy_(self.own)
        remembers = rule is not None and rule.remembers
        self._square = torch.zeros_like(self.own) if remembers else None
        self.coming = False  # a pull was started, and not taken over yet

    def move(self, g: Tensor, spoilt: Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """Own weights = (what has come, or own weights) - a local step, which is 0 if spoilt."""
        fresh = self.coming
        # the step is computed in memory that is free: W's own, if there are newer weights
        w, room = (self.next, self.own) if fresh else (self.own, self.next)
        if self._rule is not None:
            for settings, (first, last) in zip(groups, self._flat.groups, strict=True):
                at = self._moment(w, g, settings, slice(first, last))
                self._rule.step(at, room[first:last])
            room.masked_fill_(spoilt > 0, 0.0)  # without waiting for a device
            torch.sub(w, room, out=self.own)
        elif fresh:
            self.own.copy_(w)
        if fresh:
            self._take_over()

    def _moment(self, w: Tensor, g: Tensor, settings: Mapping[str, Any], part: slice) -> Moment:
        assert self._rule is not None
        return Moment(
            w=w[part],
            g=g[part],
            seen=self.own[part],
            pulled=self.pulled[part],
            square=None if self._square is None else self._square[part],
            fresh=self.coming,
            period=self._period,
            lr=float(settings["lr"]) * self._rule.local_lr_scale,
            decay=float(settings.get("weight_decay", 0.0)),
        )

    def take_as_they_are(self) -> None:
        """Own weights = what has come."""
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
            "square": None if self._square is None else self._square.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        self.own.copy_(state["own"])
        self.pulled.copy_(state["pulled"])
        self.coming = state["coming"] is not None
        if self.coming:
            self.next.copy_(state["coming"])
        if self._square is not None:
            self._square.copy_(state["square"])
