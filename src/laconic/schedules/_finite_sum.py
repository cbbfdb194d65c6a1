"""A sum of finitely many fixed terms: a module, a loss, and samples by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import TensorDataset, default_collate

from laconic.errors import ConfigError
from laconic.schedules._inputs import check_module
from laconic.sharding._flat_parameters import FlatParameters
from laconic.sharding._trained import Trained

Loss = Callable[[Any, Any], Tensor]


class FiniteSum:
    """f_j(x) = loss(module at x, sample j); vectors such as x are flat and fp32."""

    def __init__(self, model: nn.Module, loss: Loss, data: Any) -> None:
        self._model, self._loss, self._samples = model, loss, _Samples(data)
        _check_model(model)
        self._trained = Trained(self._groups(), model, "QSVRG")
        self.flat = FlatParameters(self._trained.groups, owner="QSVRG")

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, index: Sequence[int]) -> Any:
        """These samples, as the loss takes them."""
        return self._samples.batch(index)

    def gradient(self, batch: Any, out: Tensor) -> Tensor:
        """out = the gradient of a batch's mean term where the module is now; returns the mean."""
        with torch.enable_grad():
            value = self._loss(self._model, batch)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ConfigError("loss(model, batch) must return one number: the batch's mean")
            own = self.flat.parameters
            found = torch.autograd.grad(value.sum(), own, allow_unused=True)
        for part, gradient in zip(self.flat.views(out), found, strict=True):
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.to_dense())
        return value.detach()

    def check(self) -> None:
        """ConfigError for a module that changes its terms, or what it trains."""
        _check_model(self._model)
        self._trained.check(self._groups())

    def _groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self._model.parameters())}]

    @contextmanager
    def without_draws(self) -> Iterator[None]:
        """ConfigError if torch's generators are used inside: terms are fixed functions."""
        before = _generators(self.flat.device)
        yield
        if not all(map(torch.equal, before, _generators(self.flat.device))):
            raise ConfigError(
                "the loss or the data draws random numbers (dropout, augmentation), so that a "
                "sample's loss is another function each time and the losses are no finite sum: "
                "switch that off (model.eval())"
            )


class _Samples:
    """This rank's samples: a tensor, a tuple of tensors, or any dataset with a length."""

    def __init__(self, data: Any) -> None:
        data = data.tensors if isinstance(data, TensorDataset) else data
        self._columns = (data,) if isinstance(data, Tensor) else data
        self._data = data
        if isinstance(self._columns, tuple):
            _check_columns(self._columns)
        elif isinstance(data, dict) or not all(
            hasattr(data, name) for name in ("__len__", "__getitem__")
        ):
            raise ConfigError(
                "data must be a tensor, a tuple of tensors or a dataset with a length and samples "
                f"by number, not {type(data).__name__}"
            )

    def __len__(self) -> int:
        return len(self._columns[0] if isinstance(self._columns, tuple) else self._data)

    def batch(self, index: Sequence[int]) -> Any:
        """Tensors of these samples; a dataset's are collated as a DataLoader does."""
        if not isinstance(self._columns, tuple):
            return default_collate([self._data[i] for i in index])
        found = tuple(_rows(column, index) for column in self._columns)
        return found[0] if isinstance(self._data, Tensor) else found


def _rows(column: Tensor, index: Sequence[int]) -> Tensor:
    if isinstance(index, range):
        return column[index.start : index.stop]
    return column[torch.tensor(index, device=column.device)]


def _check_columns(columns: tuple[Any, ...]) -> None:
    good = all(isinstance(column, Tensor) and column.dim() for column in columns)
    if not good or len({len(column) for column in columns}) != 1:
        raise ConfigError("a tuple of data holds tensors with one row for each sample, all as long")


def _check_model(model: nn.Module) -> None:
    check_module(model)
    for name, layer in model.named_modules():
        _check_layer(name or type(layer).__name__, layer)


def _check_layer(name: str, layer: nn.Module) -> None:
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        raise ConfigError(
            f"{name} normalizes by the batch's statistics, so that samples' losses depend on each "
            "other and are no finite sum: use model.eval(), or GroupNorm or LayerNorm"
        )
    if isinstance(layer, _DropoutNd) and layer.training and layer.p:
        raise ConfigError(
            f"{name} draws at random, so that a sample's loss is another function each time and "
            "the losses are no finite sum: use model.eval(), or p=0"
        )


def _generators(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
