"""Lightning's Trainer on two real ranks: its loggers, checkpoints, accumulation and strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from helpers import equal, equal_everywhere
from programs import Programs
from test_frameworks import needs, network
from test_frameworks_hf import MEMORY, norms, remove, shared_folder
from torch import nn

import laconic as lc


def made() -> tuple[Any, Any]:
    """A LightningModule and its data, the same on all ranks."""
    import lightning as L  # noqa: N812
    from torch.utils.data import DataLoader, TensorDataset

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.network(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    return Model(), DataLoader(TensorDataset(x, x[:, :10].argmax(1)), 8)


def trainer(callbacks: list[Any], steps: int, **options: Any) -> Any:
    import lightning as L  # noqa: N812

    quiet: Any = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    settings = {"strategy": "ddp", **quiet, **options}
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        max_epochs=-1,
        callbacks=callbacks,
        **settings,
    )


def logs_and_accumulates(rank: int) -> dict[str, Any]:
    from lightning.pytorch.loggers.logger import DummyLogger

    from laconic.integrations.lightning import Compress

    class Recorder(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if any(name.startswith("laconic/") for name in metrics):
                self.seen.append((step or 0, dict(metrics)))

    model, data = made()
    callback, recorder = Compress("dqsg:bits=4"), Recorder()
    silent, other = Compress("dqsg:bits=4", log=False), Recorder()
    options: Any = {"accumulate_grad_batches": 2, "log_every_n_steps": 3, "gradient_clip_val": 1.0}
    trainer([callback], 8, logger=recorder, **options).fit(model, data)
    trainer([silent], 4, logger=other, **options).fit(made()[0], data)
    assert callback.handle is not None
    return {
        "same": equal_everywhere(model),
        "steps": callback.handle.stats().steps,
        "ratio": callback.handle.stats().ratio,
        "logged": [step for step, _ in recorder.seen],
        "names": sorted(recorder.seen[-1][1]) if recorder.seen else [],
        "silent": len(other.seen),
    }


def resumes(rank: int) -> dict[str, Any]:
    from lightning.pytorch import Callback

    from laconic.integrations.lightning import Compress

    class Look(Callback):
        state: Any = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert again.handle is not None
            self.state = again.handle.state_dict()

    folder = shared_folder(rank)
    path = folder / "some.ckpt"
    model, data = made()
    first, again, look = Compress(MEMORY), Compress(MEMORY), Look()
    run = trainer([first], 4)
    run.fit(model, data)
    run.save_checkpoint(path)
    assert first.handle is not None
    saved = first.handle.state_dict()
    model, data = made()
    trainer([again, look], 7).fit(model, data, ckpt_path=path, weights_only=True)
    changed = Compress("dqsg:bits=4")
    trainer([changed], 6).fit(made()[0], data, ckpt_path=path)
    remove(folder, rank)
    assert again.handle is not None and changed.handle is not None
    return {
        "step": saved["step"],
        "equal": equal(saved, look.state),
        "memory": norms(saved),
        "ended": again.handle.stats().steps,
        "same": equal_everywhere(model),
        "changed": changed.handle.stats().steps,
    }


def fits_twice(rank: int) -> tuple[int, bool]:
    """DDP wraps the model anew: memory and steps go on."""
    from laconic.integrations.lightning import Compress

    model, data = made()
    callback = Compress(MEMORY)
    run = trainer([callback], 3)
    run.fit(model, data)
    run.fit_loop.epoch_loop.max_steps = 5
    run.fit(model, data)
    assert callback.handle is not None
    return callback.handle.stats().steps, equal_everywhere(model)


def decides(rank: int) -> dict[str, Any]:
    from laconic.integrations.lightning import Compress

    model, data = made()
    callback = Compress("auto", error=0.1)
    trainer([callback], 40).fit(model, data)
    handle: Any = callback.handle
    return {
        "same": equal_everywhere(model),
        "decided": handle.report() is not None,
        "compressing": callback._compression.scalars()["laconic/compressing"],
        "choice": handle.choice,
    }


def hooks(rank: int) -> dict[str, Any]:
    """DDPStrategy's own way, which Lightning takes on CUDA only, and a strategy of its own."""
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import DDPStrategy

    class OnCPU(DDPStrategy):
        def _register_ddp_hooks(self) -> None:
            _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook)  # pyright: ignore

    model, data = made()
    state = lc.HookState(model, "dqsg:bits=4")
    strategy = OnCPU(ddp_comm_hook=lc.comm_hook, ddp_comm_state=state)
    trainer([], 4, strategy=strategy).fit(model, data)
    ignored = lc.HookState(model, "dqsg:bits=4")
    strategy = DDPStrategy(ddp_comm_hook=lc.comm_hook, ddp_comm_state=ignored)
    trainer([], 2, strategy=strategy).fit(model, data)
    return {
        "same": equal_everywhere(model),
        "ratio": state.stats().ratio,
        "steps": state.stats().steps,
        "ignored": ignored.stats().steps,
    }


def options(rank: int) -> dict[str, Any]:
    """Unused parameters, bfloat16, and another strategy."""
    from lightning.pytorch.strategies import DDPStrategy

    from laconic.integrations.lightning import Compress

    found = {}
    for name, settings in {
        "unused": {"strategy": DDPStrategy(find_unused_parameters=True)},
        "bf16": {"precision": "bf16-mixed"},
        "static": {"strategy": DDPStrategy(static_graph=True, gradient_as_bucket_view=True)},
    }.items():
        model, data = made()
        if name == "unused":
            model.spare = nn.Linear(200, 200)
        callback = Compress("ecdq:error=0.08")
        trainer([callback], 4, **settings).fit(model, data)
        assert callback.handle is not None
        found[name] = equal_everywhere(model) and callback.handle.stats().ratio > 2
    return found


def with_fabric(rank: int) -> dict[str, Any]:
    """Fabric wraps DDP once more; `lc.compress` looks inside."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    inside: Any = network()
    model, optimizer = fabric.setup(inside, torch.optim.SGD(inside.parameters(), lr=0.1))
    handle = lc.compress(model, "dqsg:bits=4")
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(torch.randn(8, 64)).square().mean())
        optimizer.step()
    return {"same": equal_everywhere(inside), "ratio": handle.stats().ratio}


JOBS = (logs_and_accumulates, resumes, fits_twice, decides, hooks, options, with_fabric)


@pytest.fixture(scope="module")
def found(frameworks: Programs, tmp_path_factory: pytest.TempPathFactory) -> ranks.Answers:
    needs("lightning")
    return frameworks.answers(JOBS, 2, tmp_path_factory.mktemp("lightning"))


def test_loggers_are_told_at_the_trainers_pace(found: ranks.Answers) -> None:
    for rank in range(2):
        told = found[rank, "logs_and_accumulates"]
        assert told["same"] and told["ratio"] > 3
        assert told["steps"] == 8  # two batches each: the hook runs where gradients travel
    assert found[0, "logs_and_accumulates"]["logged"] == [0, 3, 6]
    assert found[0, "logs_and_accumulates"]["silent"] == 0
    names = found[0, "logs_and_accumulates"]["names"]
    assert {"laconic/sent_bytes", "laconic/ratio", "laconic/wire_seconds"} <= set(names)


def test_a_checkpoint_goes_on_with_every_ranks_memory(found: ranks.Answers) -> None:
    zero, one = (found[rank, "resumes"] for rank in range(2))
    for told in (zero, one):
        assert told["step"] == 4 and told["equal"] and told["same"]
        assert told["ended"] == 7
        assert told["changed"] == 2  # another codec starts anew
    assert zero["memory"] != one["memory"] and all(zero["memory"].values())


def test_a_second_fit_goes_on(found: ranks.Answers) -> None:
    assert found[0, "fits_twice"] == found[1, "fits_twice"] == (5, True)


def test_auto_decides(found: ranks.Answers) -> None:
    for rank in range(2):
        told = found[rank, "decides"]
        assert told["same"] and told["decided"]
        assert told["compressing"] == (told["choice"] != "none")


def test_the_strategys_own_hook(found: ranks.Answers) -> None:
    for rank in range(2):
        told = found[rank, "hooks"]
        assert told["same"] and told["ratio"] > 3 and told["steps"] == 4
        assert told["ignored"] == 0  # what docs/howto/lightning.md warns of


@pytest.mark.parametrize("name", ["unused", "bf16", "static"])
def test_options_of_ddp(found: ranks.Answers, name: str) -> None:
    assert found[0, "options"][name] and found[1, "options"][name]


def test_fabric(found: ranks.Answers) -> None:
    for rank in range(2):
        assert found[rank, "with_fabric"]["same"] and found[rank, "with_fabric"]["ratio"] > 3


# what a user may write first: on one process; the hook's state before there are ranks
ALONE = """
import lightning as L
from laconic.integrations.lightning import Compress
from test_frameworks_lightning import made
model, data = made()
callback = Compress("ecdq:error=0.08")
L.Trainer(accelerator="cpu", devices=1, max_steps=2, callbacks=[callback], logger=False,
          enable_checkpointing=False, enable_progress_bar=False).fit(model, data)
assert callback.handle is None
for wrong in ({"spec": "dqsq"}, {"spec": "dqsg", "warmup": 3}):
    try:
        Compress(**wrong)
    except Exception as error:
        print(error)
"""
EARLY = """
import torch.distributed as dist
import laconic as lc
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy
from helpers import equal_everywhere
from test_frameworks_lightning import made, trainer
class OnCPU(DDPStrategy):
    def _register_ddp_hooks(self):
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook)
model, data = made()
state = lc.HookState(model, "dqsg:bits=4")
assert not dist.is_initialized()
strategy = OnCPU(ddp_comm_hook=lc.comm_hook, ddp_comm_state=state)
trainer([], 3, strategy=strategy).fit(model, data)
assert equal_everywhere(model) and state.stats().steps == 3 and state.stats().ratio > 3
"""


def test_one_process_trains_and_settings_are_checked_at_once(
    frameworks: Programs, tmp_path: Path
) -> None:
    needs("lightning")
    (output,) = frameworks.run(ALONE, folder=tmp_path)
    assert "a single process sends nothing" in output
    assert "did you mean dqsg" in output
    assert "no setting 'warmup'; there are" in output and "warmup_steps" in output


def test_the_hooks_state_is_made_before_lightning_starts_ranks(
    frameworks: Programs, tmp_path: Path
) -> None:
    needs("lightning")
    frameworks.run(EARLY, 2, folder=tmp_path)
