"""Gradients in an optimizer's own units: each value divided by a power of two before it is encoded.

Adam moves a weight by about g/√v. An error ε of its gradient moves it by ε/√v, so what training
notices is Σ(ε/√v)² beside Σ(g/√v)², and not Σε² beside Σg². Codecs spend their error evenly over a
tensor; so that it is even in the units that count, ranks encode y = g/w and decode times w,

    w = 2^e,    e = max(round(log2(√u + ε)), e₀),    u = (k·v̂ + mean of v̂'s row)/(k + 1)

with v̂ the optimizer's second moment, bias-corrected, ε what it adds to the denominator, and k the
number of steps that v̂ is an average of, (1 - β^t)/(1 - β): at first v̂ is one square, which says
little of a value alone, so its row counts as one more.

1. Every rank holds v with the same bits, so w costs no traffic. It is a snapshot, renewed at the
   same step on all ranks, with growing gaps up to 16 steps, and part of the saved state. A digest
   of it is compared whenever it is made.
2. Powers of two make y exact (`kernels/_reference/powers.py`): the sum of y times w is the sum of
   g, and exchanges need not know. Nothing differs between devices, one byte per value is kept.
3. The floor e₀ bounds what the plain error can become. With E the relative squared error of y's
   mean, spread evenly over the values of a tensor,

       E‖ĝ - g‖²/‖g‖²  =  E·mean(w²)·‖g/w‖²/‖g‖²  ≤  E·mean(w²)/min(w²)  ≤  10

   whatever the gradient does, if 4^e₀ ≥ mean(4^e)·E/(10 - E): raising values to the floor adds at
   most 4^e₀ to the mean. For E = 0.08 no w is below a ninth of their root mean square.

4. Where a row's or a column's mean of w² is more than 128 times that of all, as in embeddings of
   many words, most of which are rare, w = 1. Zeros of such gradients cost ecdq nothing, so that its
   error is not even, and 3. would not hold: it grew to 20, and clipping acted more often.

Optimizers that keep no second moment (SGD) see gradients as they are, w = 1, and so do parameters
that have not been stepped yet.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic._wire import DTYPES
from laconic.codecs import Codec
from laconic.comm._agreement import digest
from laconic.errors import ConfigError
from laconic.kernels import backend
from laconic.kernels._layout import MOST_EXPONENT

_EVERY = 16  # steps between two snapshots, at most
_GROWTH = 8  # a snapshot holds for an eighth of the steps that were made before it
_COLD = 4  # steps that may pass before an optimizer has made its first one
_SETTINGS = {"betas", "alpha", "rho", "lr_decay", "beta2_decay", "clip_threshold"}
_WORST = 10.0  # the plain relative squared error that is allowed
BLOCKS = (  # advice where ranks do not know second moments
    "take a codec with a step for every few thousand values, such as ecdq:error=0.08,block=4096"
)
_APART = 128.0  # times the mean of w², for that of a row or a column
_USUAL = 0.1  # the relative squared error of codecs that name none
_MOST_ERROR = 5.0  # above it all w are alike
_BIAS = 1023  # of exponents in fp64
_PART = 1 << 15  # values whose intermediate results fit a core's cache
_TINY = 1e-30
NO_UNITS: dict[str, Any] = {"next": 0, "waited": 0, "exponents": {}}  # a state before any


@dataclass(frozen=True)
class SecondMoment:
    """v̂ = factor·v, of how many steps it is an average, and what is added to its root."""

    v: Tensor
    steps: float | Tensor
    epsilon: float = 0.0
    factor: float | Tensor = 1.0


class Preconditioner:
    """The units of each parameter of some optimizers; one per model and rank."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizers, self._error = _checked(optimizer), 0.0
        self._listeners: list[weakref.WeakMethod[Callable[[int, Tensor], None]]] = []
        self._units: dict[int, Tensor] = {}  # exponents, flat
        self._next = 0  # the step that the next snapshot is due at
        self._waited = 0  # steps without any state of the optimizer
        self._cold = False
        self._made = threading.Event()  # not set while another thread makes a snapshot
        self._made.set()

    def allow(self, error: float | None) -> None:
        """Take a codec's error budget, or None, into account: the largest sets the floor."""
        self._error = max(self._error, error or _USUAL)

    def listen(self, listener: Callable[[int, Tensor], None]) -> None:
        """Have a method called with a parameter and how much its exponents have grown."""
        self._listeners.append(weakref.WeakMethod(listener))

    def reads(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the optimizers that were given have second moments of any of these."""
        moments = self._second_moments()
        return any(id(one) in moments and moments[id(one)]() is not None for one in parameters)

    def due(self, step: int) -> bool:
        """Whether a snapshot is to be made before this step's gradients are encoded."""
        return self._made.is_set() and step >= self._next

    def begin(self) -> None:
        """Before `refresh`, perhaps in another thread: encoders wait until `end`.

        In between nothing is encoded, so that ranks can compare their snapshots.
        """
        self._made.clear()

    def end(self, *, agreed: bool) -> None:
        """Encoders resume; if ranks do not agree, gradients travel uncompressed on all ranks."""
        self._cold = self._cold or not agreed
        self._made.set()

    def refresh(self, step: int, parameters: Mapping[int, Tensor]) -> Tensor | None:
        """Make a snapshot of `parameters`, by number; its digest, or None if there is none.

        Listeners, which hold values in the former units, are called with the growth of exponents.
        """
        before, self._units = self._units, {}
        moments = self._second_moments()
        for number, parameter in parameters.items():
            read = moments.get(id(parameter))
            found = None if read is None or not parameter.numel() else read()
            if found is not None and found.v.numel() == parameter.numel():
                order = parameter.dim_order()
                self._units[number] = units = _units(found, _floor(self._error), order)
                self._notify(number, units, before.get(number))
        for number in before.keys() - self._units.keys():  # its moments are gone: back to w = 1
            lost = before[number]
            self._notify(number, torch.zeros_like(lost), lost)
        if not self._units:
            idle = any(all(map(_fresh, _states(one))) and divides(one) for one in self._optimizers)
            self._waited += idle
            self._cold = idle and self._waited <= _COLD
            self._next = step + (1 if idle else _gap(step))
            return None
        self._cold = False
        self._next = step + _gap(step)
        return digest(self._units.values())

    def _notify(self, number: int, now: Tensor, before: Tensor | None) -> None:
        listeners = [one for ref in self._listeners if (one := ref()) is not None]
        if listeners:
            growth = now if before is None else _difference(now, before)
            for listener in listeners:
                listener(number, growth)

    @property
    def cold(self) -> bool:
        """Whether the optimizer is still to make its first step, so that units are unknown.

        Gradients then travel uncompressed: Adam's first step is their sign, in which errors of
        small ones count as much as those of large ones. Steps may be skipped (GradScaler), so
        this ends soon.
        """
        self._made.wait()
        return self._cold

    @property
    def undecided(self) -> bool:
        """`cold`, for the thread that makes the snapshot, without waiting for it."""
        return self._cold

    def units(self, number: int) -> Tensor | None:
        """The exponents of a parameter's values, None for gradients as they are."""
        self._made.wait()
        return self._units.get(number)

    def power(self, number: int, gradient: Tensor) -> Tensor | None:
        """mean(w²) of the values of a gradient that are not 0, on its device; None if w = 1."""
        exponents, used = self.units(number), gradient.view(-1) != 0
        if exponents is None:
            return None
        at_once = _PART if exponents.device.type == "cpu" else used.numel()
        parts = zip(exponents.split(at_once), used.split(at_once), strict=True)
        found = [torch.where(chosen, _square(part), 0.0).sum() for part, chosen in parts]
        return torch.stack(found).sum() / used.sum()

    def into(self, x: Tensor, number: int, out: Tensor) -> None:
        """out = x in the optimizer's units."""
        self._times(x, number, out, inverse=True)

    def back(self, y: Tensor, number: int, out: Tensor) -> None:
        """out = y, which has the optimizer's units, as a gradient."""
        self._times(y, number, out, inverse=False)

    def _times(self, x: Tensor, number: int, out: Tensor, *, inverse: bool) -> None:
        units = self.units(number)
        if units is not None:
            backend(x.device).times_powers(x, units, out, inverse=inverse)
        elif out.data_ptr() != x.data_ptr():
            out.copy_(x)

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to resume bit for bit."""
        self._made.wait()
        return {
            "next": self._next,
            "waited": self._waited,
            "exponents": dict(self._units),
        }

    def load_state_dict(self, state: Mapping[str, Any], parameters: Mapping[int, Tensor]) -> None:
        """Resume from a state_dict; ConfigError if it is of other parameters."""
        units = {}
        for number, exponents in state["exponents"].items():
            parameter = parameters.get(int(number))
            if parameter is None or exponents.numel() != parameter.numel():
                raise ConfigError(
                    "this state has units of other parameters: load it into the model it is of"
                )
            units[int(number)] = exponents.to(parameter.device, torch.int8, copy=True)
        self._units, self._next = units, int(state["next"])
        self._waited, self._cold = int(state["waited"]), False

    def _second_moments(self) -> dict[int, Callable[[], SecondMoment | None]]:
        """How to read that of each parameter that has been stepped, by its id."""
        return {
            id(parameter): partial(second_moment, group, optimizer.state[parameter])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if optimizer.state.get(parameter)
        }


def preconditioner_of(optimizer: Any) -> Preconditioner | None:
    """That of one optimizer or several, if any; one that was made already is taken as it is."""
    if optimizer is None or isinstance(optimizer, Preconditioner):
        return optimizer
    return Preconditioner(optimizer)


def second_moment(group: Mapping[str, Any], state: Mapping[str, Any]) -> SecondMoment | None:
    """What an optimizer of torch's (or Transformers' Adafactor) divides by, from its state.

    Recognized by the names of its entries, so that optimizers modelled on Adam are known, too. None
    where there is no second moment, or none yet.
    """
    found = next((read for key, read in _READERS.items() if key in state), None)
    return None if found is None else found(group, state)


def _adam(group: Mapping[str, Any], state: Mapping[str, Any]) -> SecondMoment:
    v = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    epsilon = group.get("eps", 0.0)
    epsilon = epsilon if isinstance(epsilon, float) else 0.0  # Adafactor's are two
    step = state.get("step", group.get("step"))  # Apex counts steps of groups
    if "betas" not in group or step is None:  # Adafactor's vectors: corrected already
        return SecondMoment(v, steps=math.inf, epsilon=epsilon)
    beta = group["betas"][1]
    left = 1 - beta**step  # a tensor on the device where the step is one
    return SecondMoment(v, steps=left / (1 - beta), epsilon=epsilon, factor=1 / left)


def _adamax(group: Mapping[str, Any], state: Mapping[str, Any]) -> SecondMoment:
    return SecondMoment(state["exp_inf"].square(), steps=1 / (1 - group["betas"][1]))


def _rmsprop(group: Mapping[str, Any], state: Mapping[str, Any]) -> SecondMoment:
    v = state["square_avg"]
    if "grad_avg" in state:
        v = (v - state["grad_avg"].square()).clamp(min=0)
    return SecondMoment(v, steps=1 / (1 - group["alpha"]), epsilon=group["eps"])


def _adadelta(group: Mapping[str, Any], state: Mapping[str, Any]) -> SecondMoment:
    """It moves by √(d + ε)/√(v + ε) of the gradient, d being what it moved lately, squared."""
    v = (state["square_avg"] + group["eps"]) / (state["acc_delta"] + group["eps"])
    return SecondMoment(v, steps=1 / (1 - group["rho"]))


def _adagrad(group: Mapping[str, Any], state: Mapping[str, Any]) -> SecondMoment | None:
    if _fresh(state):
        return None
    return SecondMoment(state["sum"], steps=state["step"], epsilon=group["eps"])


def _fresh(state: Mapping[str, Any]) -> bool:
    """Whether this is Adagrad's state as it is made, before any step."""
    step = state.get("step", 1)
    on_host = not isinstance(step, Tensor) or step.device.type == "cpu"
    return "sum" in state and on_host and not step


def _states(optimizer: Any) -> list[Mapping[str, Any]]:
    """Of its parameters; optimizers may keep numbers of their own beside these."""
    return [state for state in optimizer.state.values() if isinstance(state, Mapping)]


def _factored(row: str, column: str, *, keeps: bool) -> Callable[..., SecondMoment]:
    """Adafactor's: a mean of each row and of each column, and v = row·column/mean(row).

    torch `keeps` the dimension that a mean is taken over.
    """

    def read(group: Mapping[str, Any], state: Mapping[str, Any]) -> SecondMoment:
        rows, columns = state[row].float(), state[column].float()
        if keeps:
            rows, columns = rows.squeeze(-1), columns.squeeze(-2)
        mean = rows.double().mean(-1, keepdim=True).float().clamp(min=_TINY)
        v = (rows / mean).unsqueeze(-1) * columns.unsqueeze(-2)
        return SecondMoment(v, steps=math.inf)  # no value has a moment of its own

    return read


_READERS: dict[str, Callable[..., SecondMoment | None]] = {
    "exp_avg_sq": _adam,
    "exp_inf": _adamax,
    "acc_delta": _adadelta,
    "square_avg": _rmsprop,
    "sum": _adagrad,
    "variance": lambda _, state: SecondMoment(state["variance"], steps=math.inf),
    "row_var": _factored("row_var", "col_var", keeps=True),
    "exp_avg_sq_row": _factored("exp_avg_sq_row", "exp_avg_sq_col", keeps=False),
}


def amplifying(optimizer: Any, codec: Codec, advice: str) -> str | None:
    """Why an optimizer that has made a step amplifies the noise of a codec; None if it does not.

    Muon makes the singular values of its momentum alike, and noise has many small ones.
    """
    if codec.variance_bound(1) == 0:
        return None
    if is_adaptive(optimizer) and codec.even_noise:
        return amplified(optimizer, codec, advice)
    if any("ns_steps" in group for group in optimizer.param_groups):
        return (
            f"{type(optimizer).__name__} makes singular values alike, which amplifies the error of "
            f"{codec.name} where they are small: ecdq:error=0.02 costs half as much as error=0.08"
        )
    return None


def amplified(optimizer: Any, codec: Codec, advice: str) -> str:
    """The warning about even noise under an optimizer that divides by a second moment."""
    return (
        f"{type(optimizer).__name__} divides gradients by a second moment, which amplifies the "
        f"error of {codec.name} where gradients are small: {advice}"
    )


def is_adaptive(optimizer: Any) -> bool:
    """Whether an optimizer that has made a step divides gradients by a second moment."""
    return any(not _READERS.keys().isdisjoint(state) for state in _states(optimizer))


def divides(optimizer: Any) -> bool:
    """Whether an optimizer that has made no step has settings of one with a second moment."""
    return any(not _SETTINGS.isdisjoint(group) for group in optimizer.param_groups)


def _units(moment: SecondMoment, floor: float, order: tuple[int, ...]) -> Tensor:
    """See the top of the file; `order` is that of dimensions in the parameter's memory."""
    v = moment.v.permute(order) if moment.v.dim() == len(order) else moment.v
    v = v if v.dtype in DTYPES else v.float()
    rows = v.reshape(v.shape[0], -1) if v.dim() > 1 else v.reshape(1, -1)
    exponents = torch.empty(rows.shape, dtype=torch.int8, device=v.device)
    share, epsilon = 1 / (moment.steps + 1), moment.epsilon
    work = backend(v.device).row_exponents
    known = work(rows, exponents, factor=moment.factor, share=share, epsilon=epsilon)
    power, largest = _powers(exponents)
    known = known * (largest <= _APART * power) if len(rows) > 1 else known  # else w = 1
    least = (0.5 * torch.log2(floor * power)).ceil()
    return exponents.view(-1).clamp_(min=least.to(torch.int8)).mul_(known.to(torch.int8))


def _difference(now: Tensor, before: Tensor) -> Tensor:
    wide = now.to(torch.int16) - before.to(torch.int16)
    return wide.clamp(-MOST_EXPONENT, MOST_EXPONENT).to(torch.int8)


def _powers(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """mean(w²) of all values, and the largest of a row or a column."""
    most = _PART if exponents.device.type == "cpu" else exponents.numel()
    rows, columns = (exponents.new_zeros(size, dtype=torch.float64) for size in exponents.shape)
    for wide, below in zip(exponents.split(most, 1), columns.split(most), strict=True):
        at_once = max(1, most // wide.shape[1])
        for part, beside in zip(wide.split(at_once), rows.split(at_once), strict=True):
            squares = _square(part)
            beside.add_(squares.sum(1))
            below.add_(squares.sum(0))
    total = torch.stack([part.sum() for part in rows.split(most)]).sum()
    largest = torch.maximum(rows.max() / len(columns), columns.max() / len(rows))
    return total / exponents.numel(), largest


def _square(exponents: Tensor) -> Tensor:
    """4^e in fp64, from its bits."""
    return exponents.long().mul_(2).add_(_BIAS).bitwise_left_shift_(52).view(torch.float64)


def _gap(step: int) -> int:
    """Steps until the next snapshot."""
    return max(1, min(_EVERY, step // _GROWTH))


def _floor(error: float) -> float:
    """4^e₀ relative to mean(4^e)."""
    most = min(error or _USUAL, _MOST_ERROR)
    return most / (_WORST - most)


def _checked(optimizer: Any) -> tuple[Any, ...]:
    """One optimizer or several, as a tuple."""
    every = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    for one in every:
        if not isinstance(getattr(one, "state", None), Mapping) or not hasattr(one, "param_groups"):
            raise ConfigError(
                "optimizer= takes the torch optimizer that steps the model's parameters, or a list "
                f"of several, not {type(one).__name__}"
            )
    return every
