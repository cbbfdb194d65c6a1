"""A schedule of one's own: SGD whose weights are averaged every k-th step; it is checked.

python examples/own_schedule.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn, no_grad
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import laconic as lc
from laconic.schedules import LocalStats
from laconic.testing import check_schedule


class Periodic(lc.schedules.Schedule):
    """k steps of SGD, then common += mean over ranks of (weights - common), encoded."""

    def __init__(self, model: nn.Module, *, lr: float = 0.05, k: int = 4) -> None:
        self.model, self.lr, self.k, self.t = model, lr, k, 0
        self.codec, self.exchange = lc.pair("dqsg:bits=8")
        self.traffic, self.common = lc.Traffic(), self.weights
        dist.broadcast(self.common, 0)
        self.weights = self.common

    @property
    def weights(self) -> Tensor:
        """This rank's own."""
        return parameters_to_vector(self.model.parameters()).detach().clone()

    @weights.setter
    def weights(self, value: Tensor) -> None:
        vector_to_parameters(value.clone(), self.model.parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)

    def step(self) -> None:
        with no_grad():
            for one in self.model.parameters():
                if one.grad is not None:
                    one.sub_(one.grad, alpha=self.lr)
        self.t += 1
        if self.t % self.k == 0:
            assert isinstance(dist.group.WORLD, dist.ProcessGroup)
            delta = self.weights - self.common
            context = lc.ExchangeContext(group=dist.group.WORLD, step=self.t, traffic=self.traffic)
            self.exchange.mean(delta, self.codec, context)
            self.weights = self.common.add_(delta)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        own, self.weights = self.weights, self.common
        yield
        self.weights = own

    @contextmanager
    def latest_weights(self) -> Iterator[int]:
        with self.global_weights():
            yield self.t % self.k

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t, "common": self.common.clone(), "weights": self.weights}

    def load_state_dict(self, state_dict: Any) -> None:
        self.t, self.common = state_dict["t"], state_dict["common"].clone()
        self.weights = state_dict["weights"]

    def stats(self) -> LocalStats:
        n, sent = dist.get_world_size(), self.traffic.sent_bytes
        plain = round(2 * (n - 1) / n * 4 * self.common.numel() * self.t)
        counts = {"steps": self.t, "exchanges": self.t // self.k, "skipped": 0}
        return LocalStats(**counts, sent_bytes=sent, plain_bytes=plain, wire_seconds=0.0)

    def wait(self) -> None: ...

    def barrier(self, call: Any = None) -> None:
        dist.barrier()

    def close(self) -> None: ...


if __name__ == "__main__":
    check_schedule(Periodic)  # starts processes; says which rule is broken, and how to fix it
    print("every rule is kept")
