"""FSDP2 through Accelerate, the Transformers Trainer and Lightning: 2 shards, and 2×2 ranks.

Accelerate, and so the Trainer, shards on accelerators only, and wraps models in DDP on CPUs. Here
it is told that its processes have GPUs (`sharding_on_cpus`); all else of it runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from programs import Programs
from test_frameworks import needs
from test_frameworks_hf import remove, shared_folder
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import laconic as lc

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"),
    reason="FSDP2's collectives can be replaced from torch 2.9 on",
)

STEPS, PARTS = 24, 2  # steps of the optimizer, micro-batches of each
SPEC = "ecdq:error=0.08,block=4096"


class Classifier(nn.Module):
    """What the Trainer takes: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :10].argmax(1)


def equal_weights(model: nn.Module) -> bool:
    """Whether ranks that hold the same shard hold the same bits, and gather the same weights."""
    values: list[Any] = [p.detach() for p in model.parameters()]
    mine = torch.cat([value.full_tensor().flatten() for value in values])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def told(model: nn.Module, handle: Any, losses: list[float]) -> dict[str, bool]:
    """What holds in every framework."""
    third, stats = len(losses) // 3, handle.stats()
    first, last = sum(losses[:third]), sum(losses[-third:])
    ranks_of = {"shards": 2, "replicas": 4}[handle.between]
    return {
        "sharded": isinstance(handle, lc.FSDPHandle) and dist.get_world_size() == ranks_of,
        "equal": equal_weights(model),
        "loss goes down": last < 0.8 * first,
        "fewer bytes": stats.ratio > 4,
        "one exchange per step": stats.steps == STEPS,
    }


@contextmanager
def sharding_on_cpus() -> Iterator[dict[str, Any]]:
    """Accelerate's check of the device is turned off; yields its settings of a 2-D mesh."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plain = PartialState.__init__

    def on_gpus(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    hybrid = dist.get_world_size() == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialState, "__init__", on_gpus)
        patch.delenv("ACCELERATE_USE_FSDP", raising=False)
        AcceleratorState._reset_state(reset_partial_state=True)
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if hybrid else None
        yield {"parallelism_config": config} if hybrid else {}
        AcceleratorState._reset_state(reset_partial_state=True)


def with_accelerate(rank: int) -> dict[str, bool]:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    with sharding_on_cpus() as mesh:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10_000
        )
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=PARTS, **mesh
        )
        plain = Classifier()
        optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.5)
        model, optimizer = accelerator.prepare(plain, optimizer)
        handle = lc.compress(model, SPEC)
        accelerator.register_for_checkpointing(lc.AllRanks(handle))
        losses = []
        for i in range(STEPS * PARTS):
            with accelerator.accumulate(model):
                loss = model(*rows(32, seed=4 * i + rank))["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss))
        folder = shared_folder(rank)
        accelerator.save_state(str(folder / "all"))
        before = handle.state_dict()["steps"]
        model(*rows(8))["loss"].backward()  # moves on
        moved = handle.state_dict()["steps"] != before
        accelerator.load_state(str(folder / "all"))
        remove(folder, rank)
        found = {"saved": moved and handle.state_dict()["steps"] == before}
        return found | told(model, handle, losses)


def with_the_trainer(rank: int) -> dict[str, bool]:
    from transformers import Trainer, TrainingArguments

    from laconic.integrations.transformers import CompressCallback

    def trainer(folder: Path, callback: Any, steps: int, mesh: dict[str, Any]) -> Any:
        x, y = rows(4096)
        data: Any = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
        config = {
            "min_num_params": 10_000,
            "auto_wrap_policy": "SIZE_BASED_WRAP",
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        args = TrainingArguments(
            str(folder),
            use_cpu=True,
            fsdp=True,  # pyright: ignore[reportArgumentType] (a string until transformers 4)
            fsdp_config=config,
            max_steps=steps,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=PARTS,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_steps=STEPS // 2,
            report_to="none",
            disable_tqdm=True,
            **mesh,
        )
        return Trainer(Classifier(), args, train_dataset=data, callbacks=[callback])

    with sharding_on_cpus() as mesh:
        folder, callback = shared_folder(rank), CompressCallback(SPEC)
        run = trainer(folder, callback, STEPS, mesh)
        run.train()
        losses = [row["loss"] for row in run.state.log_history if "loss" in row]
        found = told(run.model_wrapped, callback.handle, losses)
        logged = [row for row in run.state.log_history if "laconic/ratio" in row]
        found["logs"] = len(logged) == STEPS
        path = folder / f"checkpoint-{STEPS // 2}"
        found["saved"] = (path / f"laconic_{rank}.pt").is_file()
        again = CompressCallback(SPEC)
        run = trainer(folder, again, STEPS // 2 + 2, mesh)
        run.train(resume_from_checkpoint=str(path))
        assert again.handle is not None
        found["resumed"] = again.handle.stats().steps == STEPS // 2 + 2
        remove(folder, rank)
        return found


def with_lightning(rank: int) -> dict[str, bool]:
    import lightning as L  # noqa: N812
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader, TensorDataset

    from laconic.integrations.lightning import Compress

    hybrid, losses = dist.get_world_size() == 4, list[float]()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Classifier()

        def configure_model(self) -> None:
            mesh: Any = self.device_mesh
            mesh = mesh if hybrid else mesh["data_parallel"]
            if not isinstance(self.model, FSDPModule):
                fully_shard(self.model.network[0], mesh=mesh)
                fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = self.model(*batch)["loss"]
            losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    def trainer(callback: Any, steps: int) -> Any:
        return L.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=ModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=2 if hybrid else 1
            ),
            max_steps=steps,
            max_epochs=-1,
            accumulate_grad_batches=PARTS if hybrid else 1,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    data = DataLoader(TensorDataset(*rows(4096)), 32)
    callback, module = Compress(SPEC), Module()
    run = trainer(callback, STEPS)
    run.fit(module, data)
    found = told(module, callback.handle, losses)
    folder = shared_folder(rank)
    run.save_checkpoint(folder / "some.ckpt")
    again = Compress(SPEC)
    trainer(again, STEPS + 2).fit(Module(), data, ckpt_path=folder / "some.ckpt")
    assert again.handle is not None
    found["resumed"] = again.handle.stats().steps == STEPS + 2
    remove(folder, rank)
    return found


JOBS: list[Any] = [with_accelerate, with_the_trainer, with_lightning]
NEEDS = {
    "with_accelerate": ["accelerate"],
    "with_the_trainer": ["transformers", "accelerate"],
    "with_lightning": ["lightning"],
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("job", JOBS)
def test_a_framework(job: Any, size: int, frameworks: Programs, tmp_path: Path) -> None:
    needs(*NEEDS[job.__name__])
    found: ranks.Answers = frameworks.answers([job], size, tmp_path)
    for rank in range(size):
        wrong = [name for name, good in found[rank, job.__name__].items() if not good]
        assert not wrong, f"rank {rank}"
