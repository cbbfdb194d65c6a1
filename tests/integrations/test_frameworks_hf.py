"""Accelerate and the Transformers Trainer on two real ranks."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import equal, equal_everywhere
from programs import Programs
from test_frameworks import needs, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

MEMORY = "feedback(qsgd:bits=2)"  # of which every rank has its own


def shared_folder(rank: int) -> Path:
    where: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where)
    return Path(where[0])


def remove(folder: Path, rank: int) -> None:
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


def norms(state: dict[str, Any]) -> dict[str, float]:
    return {name: value.norm().item() for name, value in state["residuals"].items()}


# Accelerate


def accelerated(rank: int, spec: str, **options: Any) -> tuple[Any, ...]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **options)
    plain = network()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return accelerator, model, optimizer, lc.compress(model, spec)


def trained(accelerator: Any, model: Any, optimizer: Any, steps: int, rank: int) -> list[float]:
    generator, norms = torch.Generator().manual_seed(rank), []
    for _ in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(8, 64, generator=generator)).square().mean())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.01)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def accumulates(rank: int) -> dict[str, Any]:
    accelerator, model, optimizer, handle = accelerated(
        rank, "dqsg:bits=4", gradient_accumulation_steps=3
    )
    clipped = trained(accelerator, model, optimizer, 9, rank)
    return {
        "wrapped": isinstance(model, DistributedDataParallel),
        "steps": handle.stats().steps,
        "ratio": handle.stats().ratio,
        "same": equal_everywhere(model),
        "norms": clipped,
    }


def saves(rank: int) -> dict[str, Any]:
    folder = shared_folder(rank)
    accelerator, model, optimizer, handle = accelerated(rank, MEMORY)
    accelerator.register_for_checkpointing(lc.AllRanks(handle))
    trained(accelerator, model, optimizer, 3, rank)
    accelerator.save_state(str(folder / "all"))
    accelerator.wait_for_everyone()
    saved = handle.state_dict()
    accelerator.free_memory()
    accelerator, model, optimizer, again = accelerated(rank, MEMORY)
    accelerator._custom_objects.clear()
    accelerator.register_for_checkpointing(lc.AllRanks(again))
    accelerator.load_state(str(folder / "all"))
    loaded = again.state_dict()
    trained(accelerator, model, optimizer, 2, rank)
    remove(folder, rank)
    return {
        "equal": equal(saved, loaded),
        "memory": norms(saved),
        "steps": again.stats().steps,
        "same": equal_everywhere(model),
    }


def tracks(rank: int) -> list[str]:
    from accelerate.tracking import GeneralTracker

    class Recorder(GeneralTracker):
        name = "recorder"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, float] = {}

        @property
        def tracker(self) -> Any:
            return self.seen

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.seen |= values

    recorder = Recorder()
    accelerator, model, optimizer, handle = accelerated(rank, "dqsg:bits=4", log_with=recorder)
    accelerator.init_trackers("digits")
    trained(accelerator, model, optimizer, 1, rank)
    accelerator.log(handle.stats().scalars(), step=1)
    return sorted(recorder.seen)


def only_enums(rank: int) -> str:
    """Accelerate's own option for hooks takes its own, and ignores all others."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    wrong: Any = DistributedDataParallelKwargs(comm_hook=lc.comm_hook)  # pyright: ignore
    model = Accelerator(cpu=True, kwargs_handlers=[wrong]).prepare(network())
    return str(model._comm_hooks)


@pytest.fixture(scope="module")
def accelerate(frameworks: Programs, tmp_path_factory: pytest.TempPathFactory) -> ranks.Answers:
    needs("accelerate")
    jobs = [accumulates, saves, tracks, only_enums]
    return frameworks.answers(jobs, 2, tmp_path_factory.mktemp("accelerate"))


def test_accumulation_and_clipping(accelerate: ranks.Answers) -> None:
    zero, one = (accelerate[rank, "accumulates"] for rank in range(2))
    for told in (zero, one):
        assert told["wrapped"] and told["same"]
        assert told["steps"] == 3 and told["ratio"] > 3
    assert zero["norms"] == one["norms"] and len(zero["norms"]) == 3  # of means: equal everywhere


def test_accelerates_checkpoints_hold_every_ranks_memory(accelerate: ranks.Answers) -> None:
    zero, one = (accelerate[rank, "saves"] for rank in range(2))
    for told in (zero, one):
        assert told["equal"] and told["same"] and told["steps"] == 5
    assert zero["memory"] != one["memory"] and all(zero["memory"].values())


def test_accelerates_trackers_take_scalars(accelerate: ranks.Answers) -> None:
    assert {"laconic/ratio", "laconic/sent_bytes"} <= set(accelerate[0, "tracks"])


def test_accelerates_own_hooks_are_an_enum(accelerate: ranks.Answers) -> None:
    assert accelerate[0, "only_enums"] == "[]"  # as docs/howto/accelerate.md says


ON_CPUS = """
import torch.distributed as dist, laconic as lc
from accelerate import Accelerator
from torch import nn
dist.init_process_group("gloo")
model = Accelerator().prepare(nn.Linear(200, 200))
try:
    lc.compress(model, "dqsg:bits=4")
except lc.ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate wraps models on CUDA")
def test_ranks_that_accelerate_leaves_alone_are_noticed(
    frameworks: Programs, tmp_path: Path
) -> None:
    needs("accelerate")
    for output in frameworks.run(ON_CPUS, 2, folder=tmp_path):
        assert "Accelerator(cpu=True)" in output


# Transformers


class Regressor(nn.Module):
    """A plain module, which the Trainer takes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer(
    folder: Path, callback: Any, steps: int, others: tuple[Any, ...] = (), **options: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    data: Any = [{"x": a, "labels": a[:10].argmax()} for a in x]
    settings: dict[str, Any] = {"save_strategy": "no", "logging_steps": 2, **options}
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    return Trainer(Regressor(), args, train_dataset=data, callbacks=[*others, callback])


def trainer_logs(rank: int) -> dict[str, Any]:
    from transformers import TrainerCallback

    from laconic.integrations.transformers import CompressCallback

    class Reporter(TrainerCallback):
        """Comes first, as those of TensorBoard and wandb do."""

        seen: Any = None

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if "loss" in kwargs["logs"]:
                self.seen = dict(kwargs["logs"])

    folder = shared_folder(rank)
    callback, reporter = CompressCallback("dqsg:bits=4"), Reporter()
    run = trainer(folder, callback, 6, (reporter,), gradient_accumulation_steps=2)
    run.train()
    assert callback.handle is not None
    first = callback.handle
    logged = [row for row in run.state.log_history if "laconic/ratio" in row]
    run.args.max_steps = 8
    run.train()  # the model is wrapped already
    assert callback.handle is first
    silent = CompressCallback("dqsg:bits=4", log=False)
    quiet = trainer(folder, silent, 2)
    quiet.train()
    remove(folder, rank)
    return {
        "wrapped": isinstance(run.model_wrapped, DistributedDataParallel),
        "steps": [row["laconic/steps"] for row in logged],
        "reported": sorted(name for name in reporter.seen if name.startswith("laconic/")),
        "same": equal_everywhere(run.model),
        "ratio": callback.handle.stats().ratio,
        "silent": any("laconic/ratio" in row for row in quiet.state.log_history),
    }


def trainer_resumes(rank: int) -> dict[str, Any]:
    from transformers import TrainerCallback

    from laconic.integrations.transformers import CompressCallback

    class Look(TrainerCallback):
        """Behind ours."""

        def __init__(self, of: CompressCallback) -> None:
            self.of, self.state = of, {}

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.state and self.of.handle is not None:
                self.state = self.of.handle.state_dict()

    folder = shared_folder(rank)
    save: Any = {"save_strategy": "steps", "save_steps": 4}
    callback = CompressCallback(MEMORY)
    trainer(folder / "a", callback, 4, **save).train()
    assert callback.handle is not None
    saved = callback.handle.state_dict()
    found = {"memory": norms(saved), "step": saved["step"]}

    again = CompressCallback(MEMORY)
    look = Look(again)
    run = trainer(folder / "a", again, 6, **save)
    run.add_callback(look)
    run.train(resume_from_checkpoint=True)
    assert again.handle is not None
    found |= {"equal": equal(saved, look.state), "ended": again.handle.stats().steps}
    found["same"] = equal_everywhere(run.model)

    elsewhere = str(folder / "a" / "checkpoint-4")
    for name, resume_from in (("lost", None), ("named", elsewhere)):
        moved = CompressCallback(MEMORY, resume_from=resume_from)
        look = Look(moved)
        run = trainer(folder / "b", moved, 6)
        run.add_callback(look)
        run.train(resume_from_checkpoint=elsewhere)
        found[name] = look.state["step"]
    remove(folder, rank)
    return found


def trainer_decides(rank: int) -> dict[str, Any]:
    from laconic.integrations.transformers import CompressCallback

    folder = shared_folder(rank)
    callback = CompressCallback("auto", error=0.1)
    run = trainer(folder, callback, 40, logging_steps=10)
    run.train()
    handle: Any = callback.handle
    remove(folder, rank)
    rows = [row for row in run.state.log_history if "laconic/compressing" in row]
    return {
        "same": equal_everywhere(run.model),
        "decided": handle.report() is not None,
        "last": rows[-1]["laconic/compressing"] == float(handle.choice != "none"),
    }


@pytest.fixture(scope="module")
def transformers(frameworks: Programs, tmp_path_factory: pytest.TempPathFactory) -> ranks.Answers:
    needs("transformers", "accelerate")
    jobs = [trainer_logs, trainer_resumes, trainer_decides]
    return frameworks.answers(jobs, 2, tmp_path_factory.mktemp("transformers"))


def test_the_trainers_logs_have_our_numbers(transformers: ranks.Answers) -> None:
    for rank in range(2):
        told = transformers[rank, "trainer_logs"]
        assert told["wrapped"] and told["same"] and told["ratio"] > 3
        assert told["steps"] == [2, 4, 6]  # not twelve: two batches a step
        assert {"laconic/ratio", "laconic/sent_bytes"} <= set(told["reported"])
        assert not told["silent"]


def test_the_trainers_checkpoints_hold_every_ranks_memory(transformers: ranks.Answers) -> None:
    zero, one = (transformers[rank, "trainer_resumes"] for rank in range(2))
    for told in (zero, one):
        assert told["step"] == 4 and told["equal"] and told["same"]
        assert told["ended"] == 6
        assert told["named"] == 4
        assert told["lost"] == 0  # with a warning: callbacks are not told where a run resumes
    assert zero["memory"] != one["memory"] and all(zero["memory"].values())


def test_auto_decides_in_the_trainer(transformers: ranks.Answers) -> None:
    for rank in range(2):
        assert all(transformers[rank, "trainer_decides"].values())


ALONE = """
from pathlib import Path
from laconic.integrations.transformers import CompressCallback
from test_frameworks_hf import trainer
callback = CompressCallback("ecdq:error=0.08")
trainer(Path("output"), callback, 2).train()
assert callback.handle is None
for wrong in ({"spec": "dqsq"}, {"spec": "dqsg", "warmup": 3}):
    try:
        CompressCallback(**wrong)
    except Exception as error:
        print(error)
"""


def test_one_process_trains_and_settings_are_checked_at_once(
    frameworks: Programs, tmp_path: Path
) -> None:
    needs("transformers", "accelerate")
    (output,) = frameworks.run(ALONE, folder=tmp_path)
    assert "a single process sends nothing" in output
    assert "did you mean dqsg" in output
    assert "no setting 'warmup'; there are" in output
