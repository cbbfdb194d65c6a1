"""Every example runs as its first line says, learns, and sends less; mistakes get a sentence."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import PATIENCE_S, equal, refusal
from programs import PATHS, Programs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# runs a script as __main__, then says what its variables hold; $SCRIPT, because Lightning starts
# its second rank by the words of the command line
WATCH = """
import hashlib, json, os
names = {"__name__": "__main__"}
with open(os.environ["SCRIPT"]) as file:
    exec(compile(file.read(), os.environ["SCRIPT"], "exec"), names)
told = {}
weights = names.get("weights") or names["model"].state_dict()
values = [v.detach().cpu() for v in weights.values() if type(v).__name__ != "DTensor"]
told["weights"] = hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest()
told["accuracy"] = names["accuracy"]
handle = names.get("opt") or names.get("handle") or names["compress"].handle
told["scalars"] = handle.stats().scalars()
rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
with open(os.path.join(os.environ["TOLD"], rank + ".json"), "w") as file:
    json.dump(told, file)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def start(command: list[str], folder: Path, **env: str) -> str:
    """Run to the end; what it wrote. All that it started ends with it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS), **env},
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"not done after {PATIENCE_S} s: {output}") from None
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize(
    ("name", "least", "fewer", "module"),
    [
        ("ddp", 0.8, 6, "sklearn"),
        ("fsdp2", 0.8, 3, "sklearn"),
        ("hsdp", 0.85, 6, "sklearn"),
        ("ssd", 0.8, 3, "sklearn"),
        ("lightning", 0.85, 6, "lightning"),
        ("accelerate", 0.85, 6, "accelerate"),
        ("trainer", 0.6, 5, "transformers"),
        ("lora", 0.6, 8, "peft"),
    ],
)
def test_an_example_learns_and_sends_less(
    name: str, least: float, fewer: float, module: str, tmp_path: Path, frameworks: Programs
) -> None:
    """One of them by torchrun itself; Lightning starts its second rank."""
    needs("sklearn", module)
    env = {"SCRIPT": str(EXAMPLES / f"train_{name}.py"), "TOLD": str(tmp_path)}
    (tmp_path / "watch.py").write_text(WATCH)
    if name == "ddp":
        output = start([sys.executable, *TORCHRUN, "watch.py"], tmp_path, **env)
    else:
        ranks = {"lightning": 0, "hsdp": 4}.get(name, 2)
        output = "".join(frameworks.run(tmp_path / "watch.py", ranks, folder=tmp_path, **env))
    told: list[Any] = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert len(told) == (4 if name == "hsdp" else 2)
    for one in told:
        assert one["weights"] == told[0]["weights"]
        assert one["accuracy"] == told[0]["accuracy"] > least
        assert one["scalars"]["laconic/ratio"] > fewer
        assert one["scalars"]["laconic/sent_bytes"] * fewer < one["scalars"]["laconic/plain_bytes"]
    said = f"{told[0]['accuracy']:.1%} right, {told[0]['scalars']['laconic/ratio']:.1f} times"
    assert output.count(said) == 1


# what people get wrong


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 10))


def step(model: nn.Module, rank: int = 0) -> None:
    model.zero_grad()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()


@pytest.fixture(autouse=True)
def without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice differs where it is imported, and another test may have done that."""
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)


@pytest.mark.parametrize("spec", ["dqsg:bits=4", "auto"])
def test_compressing_before_torchrun_says_what_comes_first(spec: str) -> None:
    with pytest.raises(lc.ConfigError, match=r"torchrun.*init_process_group.*Distributed.*then"):
        lc.compress(network(), spec)


@pytest.mark.parametrize("spec", ["dqsg:bits=4", "auto"])
def test_compressing_a_plain_module_says_what_to_do(alone: None, spec: str) -> None:
    with pytest.raises(lc.ConfigError, match="single process sends nothing; wrap"):
        lc.compress(network(), spec)


def test_one_process_of_accelerate_gets_advice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    with pytest.raises(lc.ConfigError, match=r"torchrun.*accelerator.num_processes > 1"):
        lc.compress(network(), "dqsg:bits=4")


def test_data_parallel_and_fsdp1_are_named() -> None:
    with pytest.raises(lc.ConfigError, match="one process per device"):
        lc.compress(nn.DataParallel(network()), "dqsg:bits=4")
    fsdp1: Any = type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2)
    with pytest.raises(lc.ConfigError, match="call fully_shard"):
        lc.compress(fsdp1, "dqsg:bits=4")


@pytest.mark.parametrize("first", ["dqsg:bits=4", "auto"])
@pytest.mark.parametrize("second", ["dqsg:bits=4", "auto"])
def test_compressing_twice_says_so(alone: None, first: str, second: str) -> None:
    model = DistributedDataParallel(network())
    lc.compress(model, first)
    with pytest.raises(lc.ConfigError, match="compressed already: call compress once"):
        lc.compress(model, second)
    step(model)


@pytest.mark.parametrize("spec", ["ecdq:error=0.08", "auto"])
def test_a_model_can_be_copied(alone: None, spec: str) -> None:
    """For a moving average of its weights, say."""
    model = DistributedDataParallel(network())
    lc.compress(model, spec)
    step(model)
    copied = copy.deepcopy(model)
    assert all(map(torch.equal, copied.parameters(), model.parameters()))
    copied(torch.zeros(1, 64))
    step(model)


def test_another_hook_is_named(alone: None) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(network())
    model.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(lc.ConfigError, match="fp16_compress_hook"):
        lc.compress(model, "dqsg:bits=4")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch imports it
def test_what_takes_ddps_hook_is_named(alone: None) -> None:
    from torch.distributed.optim import (
        _apply_optimizer_in_backward,  # pyright: ignore[reportPrivateImportUsage]
    )

    model = network()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(lc.ConfigError, match="step inside backward.*use an ordinary optimizer"):
        lc.compress(DistributedDataParallel(model), "dqsg:bits=4")
    mixed: Any = DistributedDataParallel(network(), mixed_precision=half_precision())
    with pytest.raises(lc.ConfigError, match=r"mixed_precision=.*use torch.autocast"):
        lc.compress(mixed, "dqsg:bits=4")


def half_precision() -> Any:
    from torch.nn.parallel.distributed import _MixedPrecision

    return _MixedPrecision(param_dtype=torch.bfloat16)


def test_a_world_of_one_trains(alone: None) -> None:
    model = DistributedDataParallel(network())
    handle = lc.compress(model, "ecdq:error=0.08")
    step(model)
    assert handle.stats().steps == 1
    assert all(p.grad is not None for p in model.parameters())


def test_frozen_parameters_are_left_alone(alone: None) -> None:
    frozen = network()
    frozen[0].requires_grad_(False)
    model = DistributedDataParallel(nn.Sequential(frozen, nn.Linear(10, 2000)))
    handle = lc.compress(model, "ecdq:error=0.08")
    step(model)
    assert handle.stats().steps == 1
    assert frozen[0].weight.grad is None


def test_a_model_with_nothing_to_compress_is_told(
    alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    lc.compress(DistributedDataParallel(nn.Linear(10, 10)), "dqsg:bits=4")
    assert "min_numel" in caplog.text
    caplog.clear()
    lc.compress(DistributedDataParallel(network()), "dqsg:bits=4")
    lc.compress(DistributedDataParallel(nn.Linear(10, 10)), "none")
    assert not caplog.text


# states made before ranks are


def early(rank: int, store: str, results: Any) -> None:
    """As in Lightning: the hook's state, then the process group, then DDP."""
    model = network()
    spec = "dqsg:bits=4"
    state = lc.HookState(model, spec)
    before = state.stats().steps, state.state_dict()["step"]
    with ranks.member(rank, 2, store):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(state, lc.comm_hook)
        step(wrapped, rank)
        same = network()
        other = DistributedDataParallel(same)
        lc.compress(other, spec)
        step(other, rank)
        pairs = zip(model.parameters(), same.parameters(), strict=True)
        equal = all(torch.equal(own(a), own(b)) for a, b in pairs)
        partial = DistributedDataParallel(network())
        partial.register_comm_hook(lc.HookState(partial.module[0], spec), lc.comm_hook)
        said = ""
        try:
            step(partial, rank)
        except Exception as error:
            said = str(error)
        results.put((before, equal, state.stats().sent_bytes, said))


def own(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_a_hook_state_may_come_before_the_process_group(tmp_path: Path) -> None:
    context = ranks.processes()
    results = context.Queue()
    arguments = [(rank, str(tmp_path / "store"), results) for rank in range(2)]
    started = [context.Process(target=early, args=one) for one in arguments]
    for process in started:
        process.start()
    try:
        for _ in started:
            before, equal, sent, said = results.get(timeout=PATIENCE_S)
            assert before == (0, 0)
            assert equal and sent > 0
            assert "module that DDP wraps" in said
    finally:
        for process in started:
            process.join(20)
            process.kill()


def test_a_hook_state_names_one_codec() -> None:
    with pytest.raises(lc.ConfigError, match=r'Compress\("auto"\)'):
        lc.HookState(network(), "auto")
    with pytest.raises(lc.ConfigError, match="did you mean dqsg"):
        lc.HookState(network(), "dqsq")


def test_a_hook_state_waits_for_its_model_to_reach_the_gpu(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes no tensors from the host."""
    assert lc.HookState(network(), "dqsg:bits=4").lanes
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    assert not lc.HookState(network(), "dqsg:bits=4").lanes


# statistics and states


def test_scalars_are_finite_numbers_with_names() -> None:
    stats = lc.Stats(
        steps=3,
        sent_bytes=10,
        plain_bytes=40,
        exchange_seconds=0.5,
        wire_seconds=float("nan"),
    )
    scalars = stats.scalars()
    assert scalars["laconic/ratio"] == 4 and scalars["laconic/steps"] == 3
    assert "laconic/wire_seconds" not in scalars and "laconic/kappa" not in scalars
    assert all(type(value) is float for value in scalars.values())
    assert stats.scalars("net.")["net.sent_bytes"] == 10
    assert str(stats).startswith("Stats(ratio=4, steps=3, sent_bytes=10, ")
    assert "None" not in str(stats)


def test_schedules_have_scalars() -> None:
    from laconic.schedules._async import AsyncStats
    from laconic.schedules._local import LocalStats
    from laconic.schedules._ssd import SSDStats
    from laconic.server._async_server import Delays

    known: Any = {"steps": 2, "sent_bytes": 5, "plain_bytes": 20, "wire_seconds": 0.0}
    skips: Any = {"skipped_steps": 0, "skipped_shards": 0}
    delayed = AsyncStats(**known, **skips, delays=Delays(count=2, total=6, most=4))
    for stats in (
        SSDStats(**known, **skips, pulls=1, exchange_seconds=1.0),
        LocalStats(**known, exchanges=1, skipped=0),
        delayed,
    ):
        assert stats.scalars()["laconic/ratio"] == 4
    assert delayed.scalars()["laconic/delays/most"] == 4
    assert delayed.scalars()["laconic/delays/mean"] == 3


def test_log_stats_fits_tensorboard(alone: None, tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = DistributedDataParallel(network())
    handle = lc.compress(model, "dqsg:bits=4")
    with SummaryWriter(str(tmp_path / "runs")) as writer:
        for at in range(2):
            step(model)
            lc.log_stats(handle, writer.add_scalar, 10 * at)
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    steps = [(event.step, event.value) for event in events.Scalars("laconic/steps")]
    assert steps == [(0, 1), (10, 2)]
    seen = []
    lc.log_stats(handle, lambda *told: seen.append(told))
    assert ("laconic/steps", 2.0, 2) in seen


def states(rank: int) -> dict[str, Any]:
    """Error feedback's memory of two ranks through one checkpoint."""
    models = [DistributedDataParallel(network()) for _ in range(3)]
    spec = "feedback(qsgd:bits=2)"
    first, second = (lc.compress(model, spec) for model in models[:2])
    for _ in range(3):
        step(models[0], rank)
    saved = lc.AllRanks(first).state_dict()
    every: list[Any] = [saved]
    dist.broadcast_object_list(every)  # stands for a file that all ranks read
    lc.AllRanks(second).load_state_dict(every[0])
    mine, theirs = first.state_dict(), second.state_dict()
    memory = {k: v.norm().item() for k, v in mine["residuals"].items()}
    of_another = every[0]["states"][1 - rank]
    plain = lc.compress(models[2], "dqsg:bits=4")
    lc.AllRanks(plain).load_state_dict(every[0])  # of another codec: anew
    fewer = {"states": every[0]["states"][:1]}
    return {
        "saved": len(saved.get("states", ())),
        "equal": equal(mine, theirs),
        "memory": memory,
        "said": refusal(lambda: second.load_state_dict(of_another)),
        "fewer": refusal(lambda: lc.AllRanks(second).load_state_dict(fewer)),
        "anew": plain.state_dict()["step"],
    }


def compiled(rank: int) -> int:
    """The handle of a model that was compiled before it."""
    model: Any = torch.compile(DistributedDataParallel(network()))
    handle = lc.compress(model, "dqsg:bits=4")
    step(model._orig_mod, rank)
    return handle.stats().steps


def nested_states(rank: int) -> bool:
    """What the nested exchange remembers has keys that JSON does not: tuples."""
    models = [DistributedDataParallel(network()) for _ in range(2)]
    first, second = (lc.compress(model, "ndqsg:levels=3") for model in models)
    for _ in range(3):
        step(models[0], rank)
    every: list[Any] = [lc.AllRanks(first).state_dict()]
    dist.broadcast_object_list(every)
    lc.AllRanks(second).load_state_dict(every[0])
    return bool(first.state_dict()["exchange memory"]) and equal(
        first.state_dict(), second.state_dict()
    )


found = ranks.shared([states, nested_states, compiled], 2)


def test_one_checkpoint_holds_what_every_rank_remembers(found: ranks.Answers) -> None:
    zero, one = (found[rank, "states"] for rank in range(2))
    assert (zero["saved"], one["saved"]) == (2, 0)
    assert zero["equal"] and one["equal"]
    assert zero["memory"] != one["memory"] and all(zero["memory"].values())
    assert found[0, "nested_states"] and found[1, "nested_states"]


def test_a_compiled_ddp_model_is_taken(found: ranks.Answers) -> None:
    assert found[0, "compiled"] == found[1, "compiled"] == 1


def test_a_state_of_another_rank_is_refused(found: ranks.Answers) -> None:
    assert "rank 0, loaded by rank 1" in found[1, "states"]["said"]
    assert "lc.AllRanks" in found[1, "states"]["said"]


def test_a_state_of_another_number_of_ranks_is_refused(found: ranks.Answers) -> None:
    assert "of 1 rank, and here are 2" in found[0, "states"]["fewer"]
    assert "Resume on 1 rank, or leave" in found[1, "states"]["fewer"]


def test_a_state_of_another_codec_is_left_out(found: ranks.Answers) -> None:
    assert found[0, "states"]["anew"] == found[1, "states"]["anew"] == 0


def test_importing_laconic_imports_no_framework() -> None:
    code = (
        "import sys, laconic.integrations; print([m for m in sys.modules if m.partition('.')[0]"
        " in ('lightning', 'pytorch_lightning', 'transformers', 'accelerate', 'tensorboard')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == "[]", done.stderr
