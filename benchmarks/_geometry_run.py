"""One run of `benchmarks/geometry.py`: a character transformer whose gradients are encoded.

There is one network. Its gradient is taken once per worker, on that worker's data, and the
product's own exchange averages them on ranks that are threads (`_ranks.py`). On a GPU forward and
backward passes of all workers are one graph, and nothing but the exchange waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import laconic as lc
from benchmarks._ranks import Rank, Switch, on_all
from benchmarks._simulated import mean_of
from benchmarks._spectral import Spectral
from benchmarks._tasks import Attention, library_text
from laconic.comm._context import ExchangeContext, Traffic
from laconic.comm._sums import plain_mean
from laconic.exchanges import ScatterReduce
from laconic.exchanges._preconditioner import Preconditioner, SecondMoment, second_moment

OPTIMIZERS = ("adamw", "sgd", "rmsprop", "adafactor", "muon")
CONTEXT, HEADS, CLIP, DECAY = 64, 4, 1.0, 0.1
LENGTH = 3_000_000  # bytes of text
_ENCODED = 2000  # values of a matrix that is worth encoding
_EARLY, _EVERY = 20, 25  # errors are measured at the steps 1 .. 20, and then at every 25th
_SETTLED = 5  # steps until kernels are compiled and buffers made
_PART = 256  # rows of held-out text at a time
_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How gradients travel: a codec, and whether in the optimizer's units; None is plain fp32.

    With `freeze`, gradients travel in fp32 for this share of the steps; then Adam's second moments
    stay what they are, and gradients are encoded. So does 1-bit Adam (Tang et al. 2021).
    `spectral` is the error of an experiment for Muon (`_spectral.py`).
    """

    spec: str | None = None  # {coder} is rans where that runs
    units: bool = False
    freeze: float = 0.0
    spectral: float = 0.0

    def spec_on(self, device: str) -> str | None:
        """The codec there: rans runs on CPUs only."""
        coder = ",coder=rans" if device == "cpu" else ""
        return None if self.spec is None else self.spec.format(coder=coder)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    strategy: str
    optimizer: str
    workers: int
    steps: int
    seed: int
    rate: float  # the peak
    batch: int = 8  # of one worker
    width: int = 64
    layers: int = 3
    pairs: bool = False  # tokens are two characters: thousands, most of them rare


class Network(nn.Module):
    """The next token from those before it; the embedding is also the last layer, if `tied`.

    If not, its gradient has a row for each token of the batch, and zeros.
    """

    def __init__(self, tokens: int, width: int, layers: int, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.layers = nn.Sequential(*(Attention(width, HEADS) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.out = self.tokens if tied else nn.Embedding(tokens, width)
        for one in self.modules():
            if isinstance(one, nn.Linear | nn.Embedding):
                nn.init.normal_(one.weight, std=0.02)
            if isinstance(one, nn.Linear):
                nn.init.zeros_(one.bias)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm(self.layers(self.tokens(x) + self.places.weight))
        return found @ self.out.weight.T

    def loss(self, rows: Tensor) -> Tensor:
        """Cross-entropy in nats, of rows with one character more than the context."""
        return F.cross_entropy(self(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@dataclass(frozen=True, eq=False)
class Data:
    """Sources of Python's standard library as numbers of tokens; the last 5% are held out."""

    tokens: int
    train: Tensor
    held_out: Tensor
    ahead: Tensor

    @staticmethod
    @lru_cache
    def on(device: str, length: int, pairs: bool = False) -> Data:
        read = library_text(length).long()
        if pairs:
            read = read[: len(read) // 2 * 2].view(-1, 2) @ torch.tensor([256, 1])
        used, text = read.unique(return_inverse=True)
        train, held_out = text.to(device).tensor_split([len(text) * 19 // 20])
        return Data(len(used), train, held_out, torch.arange(CONTEXT + 1, device=device))

    def plan(self, case: Case) -> Tensor:
        """(steps, workers, batch): where rows of tokens begin, whatever the strategy."""
        draw = torch.Generator().manual_seed(case.seed + 1000)
        shape, last = (case.steps, case.workers, case.batch), len(self.train) - CONTEXT - 1
        return torch.randint(0, last, shape, generator=draw).to(self.train.device)

    def rows(self, starts: Tensor) -> Tensor:
        return self.train[starts[..., None] + self.ahead]

    @torch.no_grad()
    def score(self, network: Network) -> float:
        """The loss on what was held out."""
        length = CONTEXT + 1
        rows = self.held_out[: len(self.held_out) // length * length].view(-1, length)
        losses = [network.loss(part) * len(part) for part in rows.split(_PART)]
        return float(torch.stack(losses).sum()) / len(rows)


class Workers:
    """One network, and its gradient on each worker's data as one vector: encoded values first."""

    def __init__(self, case: Case, data: Data) -> None:
        torch.manual_seed(case.seed)  # on the CPU, so that weights are the same on any device
        network = Network(data.tokens, case.width, case.layers, tied=not case.pairs)
        self.network, self._data = network.to(data.train.device), data
        every = list(self.network.parameters())
        self.encoded = [p for p in every if _is_encoded(p)]
        self.parameters = self.encoded + [p for p in every if not _is_encoded(p)]
        self.numel = sum(p.numel() for p in self.encoded)
        self.gradients = [self.vector() for _ in range(case.workers)]
        self._views = [self.views(x) for x in self.gradients]
        self._plan = data.plan(case)
        self._rows = data.rows(self._plan[0])
        self._graph = self._captured() if self._rows.is_cuda else None

    def vector(self) -> Tensor:
        """Room for a value of each parameter."""
        numel = sum(p.numel() for p in self.parameters)
        return torch.zeros(numel, device=self.parameters[0].device)

    def views(self, x: Tensor) -> list[Tensor]:
        """The vector as tensors like the parameters."""
        sizes = [p.numel() for p in self.parameters]
        return [part.view_as(p) for part, p in zip(x.split(sizes), self.parameters, strict=True)]

    def step(self, t: int) -> list[Tensor]:
        """All workers' gradients at their data of this step."""
        self._rows.copy_(self._data.rows(self._plan[t]))
        if self._graph is None:
            self._work()
        else:
            self._graph.replay()
        return self.gradients

    def _work(self) -> None:
        for rows, views in zip(self._rows, self._views, strict=True):
            _copy_all(views, torch.autograd.grad(self.network.loss(rows), self.parameters))

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries choose kernels and make their workspaces
                self._work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._work()
        return graph


class Encoded:
    """The mean of gradients by scatter-reduce, in the optimizer's units if there are any."""

    def __init__(
        self,
        case: Case,
        spec: str,
        parameters: Sequence[Tensor],
        units: Preconditioner | Spectral | None,
    ) -> None:
        self._units, self._parameters = units, dict(enumerate(parameters))
        self._codec = lc.codec(spec)
        self._exchange, self._switch = ScatterReduce(), Switch(case.workers)
        self._ranks = [Rank(self._switch, rank) for rank in range(case.workers)]
        self._calls = [
            ExchangeContext(group=rank, seed=case.seed, places=_places(parameters), verify="none")
            for rank in self._ranks
        ]
        if isinstance(units, Preconditioner):
            units.allow(self._codec.budget or 0.0)
            for context in self._calls:
                units.listen(context.memory.residuals.change_units)

    @property
    def traffic(self) -> list[Traffic]:
        return [context.traffic for context in self._calls]

    def mean(self, xs: Sequence[Tensor], t: int) -> Tensor:
        """Overwrites them; returns their mean."""
        units, calls = self._units, [replace(context, step=t) for context in self._calls]
        if units is not None and units.due(t):
            units.refresh(t, self._parameters)
        if units is not None and units.cold:
            self._on_all(
                partial(plain_mean, x, context) for x, context in zip(xs, calls, strict=True)
            )
            return xs[0]
        if units is not None:
            for x in xs:
                self._change(x, units.into)
        given = zip(xs, calls, strict=True)
        self._on_all(partial(self._exchange.mean, x, self._codec, context) for x, context in given)
        if units is not None:
            self._change(xs[0], units.back)
        return xs[0]

    def _on_all(self, work: Iterable[Callable[[], None]]) -> None:
        on_all([self._switch], list(work))

    def _change(self, x: Tensor, units: Callable[[Tensor, int, Tensor], None]) -> None:
        sizes = [p.numel() for p in self._parameters.values()]
        for number, part in enumerate(x.split(sizes)):
            units(part, number, part)

    def leave(self) -> None:
        """Give the ranks back."""
        for rank in self._ranks:
            rank.leave()


class Errors:
    """Relative squared errors of the mean gradient: plain, and as the optimizer weighs them."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[Tensor]
    ) -> None:
        self._optimizers, self._parameters = optimizers, parameters
        self._found: dict[int, Tensor] = {}

    @staticmethod
    def wanted(t: int) -> bool:
        return 1 <= t <= _EARLY or (t > _EARLY and t % _EVERY == 0)

    def record(self, t: int, got: Tensor, exact: Tensor) -> None:
        """Three numbers on the device: plain, in units, the largest plain one of a tensor."""
        sizes, wrong, u = [p.numel() for p in self._parameters], got - exact, self._units()
        each = zip(wrong.split(sizes), exact.split(sizes), strict=True)
        largest = torch.stack([_relative(a, b) for a, b in each]).max()
        found = [_relative(wrong, exact), _relative(wrong / u, exact / u), largest]
        self._found[t] = torch.stack(found)

    def _units(self) -> Tensor:
        """What the optimizer divides by; ones where that is nothing."""
        known = {
            id(p): (group, optimizer.state[p])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        parts = []
        for p in self._parameters:
            moment = second_moment(*known[id(p)])
            parts.append(torch.ones_like(p) if moment is None else root_of(moment))
        return torch.cat([part.detach().flatten() for part in parts])

    def row(self) -> dict[str, float | None]:
        """Means over the steps 1 .. 20 and over later ones; waits for the device."""
        found = {t: x.tolist() for t, x in self._found.items()}
        early = [x for t, x in found.items() if t <= _EARLY]
        late = [x for t, x in found.items() if t > _EARLY]
        return {
            "error_early": _mean(x[0] for x in early),
            "error_late": _mean(x[0] for x in late),
            "unit_error_early": _mean(x[1] for x in early),
            "unit_error_late": _mean(x[1] for x in late),
            "largest_error": max((x[2] for x in found.values()), default=None),
        }


class Training:
    """A run from the first weights on."""

    def __init__(self, case: Case, strategy: Strategy, device: str, length: int = LENGTH) -> None:
        self.start = self.settled = time.perf_counter()
        self.case, self.device, self.spec = case, device, strategy.spec_on(device)
        self.data = Data.on(device, length, case.pairs)
        self.workers = workers = Workers(case, self.data)
        self.optimizers = optimizers_of(case, workers.parameters)
        self._freeze = round(strategy.freeze * case.steps)  # the first step that is encoded
        units: Preconditioner | Spectral | None = None
        if strategy.units:
            units = Preconditioner(self.optimizers)
        elif strategy.spectral:
            units = Spectral(self.optimizers, strategy.spectral)
        self.encoded: Encoded | None = None
        if self.spec is not None:
            self.encoded = Encoded(case, self.spec, workers.encoded, units)
        self.errors = Errors(self.optimizers, workers.encoded)
        self.mean, self.clipped = workers.vector(), torch.zeros((), device=device)
        for p, view in zip(workers.parameters, workers.views(self.mean), strict=True):
            p.grad = view

    def step(self, t: int) -> None:
        if t == _SETTLED:
            self.settled = time.perf_counter()
        self._average(t)
        self.clipped += nn.utils.clip_grad_norm_(self.workers.parameters, CLIP) > CLIP
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(t, self.case)
            if 0 < self._freeze <= t:
                frozen_step(optimizer)
            else:
                optimizer.step()

    def _average(self, t: int) -> None:
        """The mean gradient of all workers, exact where values are not encoded."""
        gradients, numel = self.workers.step(t), self.workers.numel
        mean_of(gradients, self.mean)
        if self.encoded is not None and t >= self._freeze:
            own = self.mean[:numel]
            got = self.encoded.mean([x[:numel] for x in gradients], t)
            if self.errors.wanted(t):
                self.errors.record(t, got, own)
            own.copy_(got)

    def row(self) -> dict[str, Any]:
        """What came out; waits for the device."""
        clipped = float(self.clipped) / self.case.steps
        pace = (time.perf_counter() - self.settled) / max(1, self.case.steps - _SETTLED)
        return {
            **asdict(self.case),
            "codec": self.spec,
            "device": self.device,
            "parameters": self.mean.numel(),
            "encoded": self.workers.numel,
            "loss": self.data.score(self.workers.network),
            "bits": self._bits(),
            "clipped": clipped,
            **self.errors.row(),
            "seconds": time.perf_counter() - self.start,
            "step_seconds": pace,
        }

    def _bits(self) -> float:
        """Per value and way at encoded steps: what a rank sends, over 2(n-1)/n of the values."""
        if self.encoded is None:
            return 32.0
        n, traffic, steps = self.case.workers, self.encoded.traffic, self.case.steps - self._freeze
        sent = sum(own.sent_bytes for own in traffic) / n
        return 8 * sent / (steps * 2 * (n - 1) / n * self.workers.numel)

    def close(self) -> None:
        if self.encoded is not None:
            self.encoded.leave()


def train(case: Case, strategy: Strategy, device: str, length: int = LENGTH) -> dict[str, Any]:
    """All steps of a run, as a row."""
    with closing(Training(case, strategy, device, length)) as training:
        for t in range(case.steps):
            training.step(t)
        return training.row()


def rate_at(t: int, case: Case) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    warmup = max(10, case.steps // 10)
    done = max(0, t - warmup) / max(1, case.steps - warmup)
    return case.rate * min(1, (t + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def optimizers_of(
    case: Case, parameters: Sequence[nn.Parameter]
) -> tuple[torch.optim.Optimizer, ...]:
    """Decay where it is decoupled, on matrices only. Muon has AdamW for what is no matrix."""
    matrices = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY}
    vectors = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
    match case.optimizer:
        case "adamw":
            return (torch.optim.AdamW([matrices, vectors], case.rate, betas=(0.9, 0.99)),)
        case "sgd":
            return (torch.optim.SGD(parameters, case.rate, momentum=0.9),)
        case "rmsprop":
            return (torch.optim.RMSprop(parameters, case.rate),)
        case "adafactor":
            return (torch.optim.Adafactor([matrices, vectors], case.rate),)
        case "muon":
            muon = torch.optim.Muon([matrices], case.rate, adjust_lr_fn="match_rms_adamw")
            return (muon, torch.optim.AdamW([vectors], case.rate, betas=(0.9, 0.99)))
    raise ValueError(f"optimizers are {', '.join(OPTIMIZERS)}, not {case.optimizer!r}")


@torch.no_grad()
def frozen_step(adam: torch.optim.Optimizer) -> None:
    """One of AdamW whose second moments, and their bias correction, stay what they are."""
    for group in adam.param_groups:
        beta, other = group["betas"]
        for p in group["params"]:
            state = adam.state[p]
            state["exp_avg"].lerp_(p.grad, 1 - beta)
            root = (state["exp_avg_sq"] / (1 - other ** state["step"])).sqrt_()
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.addcdiv_(state["exp_avg"], root.add_(group["eps"]), value=-group["lr"])


def root_of(moment: SecondMoment) -> Tensor:
    """√v̂ + ε: what the optimizer divides gradients by."""
    return (moment.v * moment.factor).sqrt() + moment.epsilon


def _is_encoded(p: Tensor) -> bool:
    return p.dim() > 1 and p.numel() >= _ENCODED


def _places(parameters: Sequence[Tensor]) -> tuple[lc.Place, ...]:
    return tuple(
        lc.Place(parameter=number, start=0, numel=p.numel(), total=p.numel())
        for number, p in enumerate(parameters)
    )


def _relative(wrong: Tensor, exact: Tensor) -> Tensor:
    return wrong.square().sum() / exact.square().sum()


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
