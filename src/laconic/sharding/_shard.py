"""One rank's part of the master weights, and the user's optimizer rebuilt on it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.errors import ConfigError

# each value's step depends on this value, its gradients and its state alone, so that a chunk of a
# flat vector takes the step that it would take inside its parameter
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

Settings = list[dict[str, Any]]  # of each parameter group


def check_optimizer(optimizer: object) -> None:
    """ConfigError unless it can work on chunks, from the beginning."""
    names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"give a torch optimizer ({names}), not {type(optimizer).__name__}")
    if type(optimizer) not in ELEMENTWISE:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be cut among ranks: owners of chunks need an "
            f"optimizer that steps value by value: {names}"
        )
    # Adagrad's state is there from the beginning, at step 0
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state):
        raise ConfigError(
            "the optimizer has taken steps already: make the schedule first, and load its own "
            "state_dict() to resume"
        )


def settings_of(groups: Sequence[dict[str, Any]]) -> Settings:
    """Learning rates and the like, as they are now."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in groups
    ]


class Shard:
    """Master weights in fp32, with one flat parameter for each group of the user's optimizer.

    Groups that have nothing in this chunk keep an empty parameter without gradient, which
    optimizers pass over.
    """

    def __init__(
        self, optimizer: Optimizer, weights: Tensor, parts: Sequence[tuple[int, int]]
    ) -> None:
        self.weights, self.mean = weights.clone(), torch.empty_like(weights)
        self.skipped_steps = self.skipped_shards = 0
        groups = []
        settings = settings_of(optimizer.param_groups)
        for (first, last), one in zip(parts, settings, strict=True):
            parameter = nn.Parameter(self.weights[first:last])
            parameter.grad = self.mean[first:last] if first < last else None
            groups.append({**one, "params": [parameter]})
        self.optimizer = _alike(optimizer, groups)

    def step(self, settings: Settings, found_inf: Tensor) -> None:
        """One step with `mean`, unless some rank's gradient was not finite (found_inf > 0)."""
        # waits for the device: nothing uses the settings of the last step any more
        skip, finite = torch.cat([found_inf > 0, finite_everywhere(self.mean)]).tolist()
        for group, one in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(one)
        if skip:
            self.skipped_steps += 1
        elif not finite:  # a finite gradient was too large for its wire, as in fp16
            self.skipped_shards += 1
        elif self.mean.numel():
            self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Copies of weights and of the optimizer's state."""
        return {
            "weights": self.weights.clone(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "skipped_steps": self.skipped_steps,
            "skipped_shards": self.skipped_shards,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict."""
        self.weights.copy_(state["weights"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch keeps its tensors
        self.skipped_steps = int(state["skipped_steps"])
        self.skipped_shards = int(state["skipped_shards"])


def _alike(optimizer: Optimizer, groups: Settings) -> Optimizer:
    """A new optimizer with other parameters; some settings (Adagrad's) are looked at only here."""
    kind: Any = type(optimizer)
    known = inspect.signature(kind).parameters
    return kind(groups, **{k: v for k, v in optimizer.defaults.items() if k in known})


def projection(found: Tensor, delta: Tensor) -> Tensor:
    """λ = ⟨Q, c⟩/⟨Q, Q⟩, Q being what a delta c was decoded to; 1 where Q is zero or has NaN."""
    square = torch.dot(found, found)
    return torch.where(square > 0, torch.dot(found, delta) / square, 1.0)


def apply_delta(found: Tensor, factor: Tensor, before: Tensor, *, out: Tensor) -> None:
    """out = before + λ·Q, with Q in `found`; the same bits wherever it is computed."""
    found.mul_(factor)
    torch.add(found, before, out=out)


def finite_everywhere(x: Tensor) -> Tensor:
    """One boolean, on x's device; nothing of x's size is made for it."""
    if not x.numel():
        return torch.ones(1, dtype=torch.bool, device=x.device)
    low, high = torch.aminmax(x)
    return (low.isfinite() & high.isfinite()).view(1)
