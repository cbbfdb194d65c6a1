"""Lightning: a callback that compresses gradients.

from laconic.integrations.lightning import Compress

trainer = Trainer(strategy="ddp", callbacks=[Compress("ecdq:error=0.08")])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_info
else:
    try:
        from lightning.pytorch import Callback
        from lightning.pytorch.utilities import rank_zero_info
    except ModuleNotFoundError:  # the same package by its older name
        from pytorch_lightning import Callback
        from pytorch_lightning.utilities import rank_zero_info

from laconic.codecs import Codec
from laconic.integrations._checkpoint import AllRanks
from laconic.integrations._compress import Compression
from laconic.integrations._handle import Handle

__all__ = ["Compress"]

_ADVICE = 'Trainer(strategy="ddp", ..), or ModelParallelStrategy'


class Compress(Callback):
    """`lc.compress(model, spec, **settings)` for the model that a Trainer wraps.

    For strategies of DDP ("ddp", DDPStrategy) and FSDP2 (ModelParallelStrategy); on one process it
    does nothing, with a message. Every `log_every_n_steps` of the Trainer its loggers get
    "laconic/ratio", "laconic/sent_bytes" and so on, of rank 0; `log=False` for none. Checkpoints
    hold the state of all ranks (`lc.AllRanks`). With `accumulate_grad_batches` replicas exchange
    gradients once per step. Under DDP gradients are encoded in the units of the
    Trainer's optimizers, as `lc.compress(optimizer=)` does it; `optimizer=None` for their own.
    """

    def __init__(self, spec: str | Codec, *, log: bool = True, **settings: Any) -> None:
        """The settings are those of `lc.compress`."""
        self._compression = Compression(spec, settings)
        self._log, self._logged = log, -1
        self._loaded: dict[str, Any] | None = None

    @property
    def handle(self) -> Handle | None:
        """What `lc.compress` returned; None before fit, and on one process."""
        return self._compression.handle

    def close(self) -> None:
        """Give threads and process groups back, on all ranks; the process's end does it, too."""
        self._compression.close()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The strategy has wrapped the model; a checkpoint's state may have come before that."""
        model = trainer.strategy.model
        wrapped = pl_module if model is None else model
        if not self._compression.start(wrapped, _ADVICE, trainer.optimizers):
            rank_zero_info("laconic: a single process sends nothing, so nothing is compressed")
        if self._compression.adds_up_shards:  # only of DDP Lightning knows how to leave it out
            strategy: Any = trainer.strategy
            strategy.block_backward_sync = self._compression.accumulating
        self._restore()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log what was sent, and print what "auto" has decided."""
        news = self._compression.news()
        if news is not None:
            rank_zero_info(news)
        step, every = trainer.global_step, getattr(trainer, "log_every_n_steps", 0)
        if self._log and every and step % every == 0 and step != self._logged:
            self._logged = step  # micro-batches that are accumulated have one number
            scalars = self._compression.scalars()
            for logger in trainer.loggers if scalars else ():
                logger.log_metrics(scalars, step=step)

    def state_dict(self) -> dict[str, Any]:
        """All ranks' states on rank 0; Lightning calls this on all ranks."""
        return {} if self.handle is None else AllRanks(self.handle).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from it as soon as there is a model."""
        self._loaded = state_dict
        self._restore()

    def _restore(self) -> None:
        if self.handle is not None and self._loaded is not None:
            AllRanks(self.handle).load_state_dict(self._loaded)
            self._loaded = None
