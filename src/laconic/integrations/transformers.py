"""Hugging Face Trainer: a callback that compresses gradients.

from laconic.integrations.transformers import CompressCallback

trainer = Trainer(model, args, callbacks=[CompressCallback("ecdq:error=0.08")], ..)
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.integrations._compress import Compression
from laconic.integrations._handle import Handle, own_rank

__all__ = ["CompressCallback"]

_ADVICE = "start with torchrun, on CPUs with TrainingArguments(use_cpu=True), without DeepSpeed"
_log = logging.getLogger("laconic")


class CompressCallback(TrainerCallback):
    """`lc.compress(model, spec, **settings)` for the model that a Trainer wraps.

    For DDP and FSDP2; on one process it does nothing, with a warning. What the Trainer logs has
    "laconic/ratio", "laconic/sent_bytes" and so on beside it; `log=False` for none. Every rank
    writes laconic_<rank>.pt into the Trainer's checkpoints, as it does with the state of random
    numbers. They are read again where a run is resumed: from `args.resume_from_checkpoint`, or the
    checkpoint of that step in `args.output_dir`. `resume_from` is for others. Under DDP gradients
    are encoded in the units of the Trainer's optimizer, as `lc.compress(optimizer=)` does it;
    `optimizer=None` for their own.
    """

    def __init__(
        self,
        spec: str | Codec,
        *,
        log: bool = True,
        resume_from: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """The settings are those of `lc.compress`."""
        self._compression = Compression(spec, settings)
        self._log, self._resume_from = log, resume_from

    @property
    def handle(self) -> Handle | None:
        """What `lc.compress` returned; None before training, and on one process."""
        return self._compression.handle

    def close(self) -> None:
        """Give threads and process groups back, on all ranks; the process's end does it, too."""
        self._compression.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer has wrapped the model."""
        trainer = self._trainer()
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))  # before those that report logs
        model = trainer.model_wrapped
        assert model is not None
        optimizers = [] if trainer.optimizer is None else [trainer.optimizer]
        if not self._compression.start(model, _ADVICE, optimizers):
            _log.warning("a single process sends nothing, so nothing is compressed")
        elif state.global_step:
            self._restore(args, state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put our numbers beside the Trainer's, where they are of training."""
        news = self._compression.news()
        if news is not None and own_rank() == 0:
            _log.warning("%s", news)  # what a user of "auto" waits for
        if self._log and logs is not None and "loss" in logs:
            scalars = self._compression.scalars()
            logs.update(scalars)
            state.log_history[-1].update(scalars)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Every rank's state into the checkpoint that was just written."""
        if self.handle is not None and not args.save_only_model:
            folder = _folder(args, state)
            folder.mkdir(parents=True, exist_ok=True)  # other nodes may have disks of their own
            torch.save(self.handle.state_dict(), folder / _name())

    def _restore(self, args: TrainingArguments, state: TrainerState) -> None:
        named = self._resume_from or args.resume_from_checkpoint
        folder = Path(named) if isinstance(named, (str, Path)) else _folder(args, state)
        assert self.handle is not None
        try:
            saved = torch.load(folder / _name(), map_location="cpu", weights_only=True)
            self.handle.load_state_dict(saved)
        except (FileNotFoundError, ConfigError) as problem:
            _log.warning(
                "rank %d: compression starts afresh at step %d, without what was remembered: %s; "
                "CompressCallback(.., resume_from=folder) names another checkpoint",
                own_rank(),
                state.global_step,
                problem,
            )

    def _trainer(self) -> Trainer:
        """The Trainer that this callback was given to.

        Callbacks are given the model inside of DDP, and neither the wrapper nor the Trainer. (By
        type() because isinstance would wake proxies that others have made.)
        """
        for one in gc.get_objects():
            if issubclass(type(one), Trainer) and self in one.callback_handler.callbacks:
                return one
        raise ConfigError("give CompressCallback to a Trainer: Trainer(.., callbacks=[callback])")


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _name() -> str:
    return f"laconic_{own_rank()}.pt"
