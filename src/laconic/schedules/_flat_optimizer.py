"""What optimizers whose weights lie elsewhere have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from laconic.errors import ConfigError
from laconic.server._flat import Flat
from laconic.server._serving import ServerStats, Serving


class FlatOptimizer(Optimizer):
    """Trains the flat vector of an optimizer's parameters, on servers perhaps. Abstract."""

    optimizer: Optimizer  # the user's, which has the settings
    flat: Flat
    serves: bool  # this rank keeps weights for the others: call serve()
    _serving: Serving  # where `serves`
    _away: bool  # this worker has left
    _swapped: bool  # the model shows global weights

    def serve(self, each: Callable[[int], object] | None = None) -> None:
        """On server ranks: keep weights until the last worker has left, or is lost.

        `each(updates)` is called behind every update of this server, say to save `state_dict()`.
        Where training cannot go on without a lost worker, LostError here and on all workers.
        """
        if not self.serves:
            raise ConfigError("this rank works: the first `servers` ranks serve (opt.serves)")
        self._serving.serve(each)

    def server_stats(self) -> ServerStats:
        """On a server rank: updates, who is there, who is lost, how late gradients were."""
        if not self.serves:
            raise ConfigError("this rank works: stats()")
        return self._serving.stats()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the schedule is made."""
        if hasattr(self, "flat"):
            raise ConfigError("add parameter groups to the optimizer before making the schedule")
        super().add_param_group(param_group)

    def _check_worker(self, what: str) -> None:
        if self.serves:
            raise ConfigError(f"{what}: this rank keeps weights for the others, call serve() on it")
        if self._away:
            raise ConfigError(f"{what}: this worker has left, call join() first")

    def _check_step(self, closure: object) -> None:
        if closure is not None:
            raise ConfigError("step() takes no closure: call backward() first, then step()")
        self._check_worker("step()")
        if self._swapped:
            raise ConfigError("step() inside global_weights(): leave the with block first")
        trained = sum(p.requires_grad for group in self.param_groups for p in group["params"])
        if trained != len(self.flat.parameters):
            raise ConfigError(
                "the optimizer's trainable parameters have changed: freeze, unfreeze and add "
                "parameters before making the schedule"
            )
        self.optimizer._opt_called = True  # pyright: ignore (schedulers of its own look at this)

    @contextmanager
    def _showing(self, weights: Tensor, own: Callable[[], Tensor]) -> Iterator[None]:
        """The model has these weights inside, and this rank's own afterwards."""
        self.flat.write(weights)
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            self.flat.write(own())
