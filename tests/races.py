"""Races that never ran: curves from formulas, in the sizes that real ones have."""

from __future__ import annotations

import math
from dataclasses import replace

from laconic.race._result import (
    Lane,
    Machine,
    Parts,
    Point,
    Quantized,
    Race,
    Settings,
    Task,
)

STEPS, EVERY = 400, 10
FULL = 510_000.0  # bytes a step of plain DDP

# name, strategy, share of plain DDP's bytes, ms of compute, codec and wire, accuracy in the end,
# predicted over measured
_STRATEGIES = (
    ("fp32", "plain DDP", 1.0, (7.4, 0.0, 84.8), 0.9362, 0.97),
    ("fp16", "fp16", 0.52, (7.4, 0.9, 54.6), 0.9360, 1.04),
    ("qsgd", "qsgd:bits=4", 0.161, (7.4, 2.9, 14.4), 0.9348, 0.92),
    ("dqsg", "dqsg:bits=4", 0.161, (7.4, 2.4, 11.7), 0.9357, 1.06),
    ("global", "global:bits=8", 0.278, (7.4, 1.6, 24.2), 0.9355, 1.02),
    ("ecdq", "ecdq:error=0.08", 0.098, (7.4, 3.8, 6.9), 0.9361, 1.09),
    ("topk", "feedback(qsgd-topk)", 0.045, (7.4, 6.1, 4.4), 0.8722, 0.84),
)
_CODECS = {
    "qsgd": lambda bits: 1.9 * 4.0**-bits * 4,
    "dqsg": lambda bits: 1.1 * 4.0**-bits * 4,
    "global": lambda bits: 30 * 4.0**-bits,
    "ecdq": lambda bits: 0.55 * 4.0**-bits,
}


def lane(
    name: str = "fp32",
    strategy: str = "plain DDP",
    share: float = 1.0,
    ms: tuple[float, float, float] = (7.4, 0.0, 84.8),
    final: float = 0.936,
    predicted: float | None = 1.0,
) -> Lane:
    """Accuracy rises from chance (0.1) to `final`, the same for all until noise tells."""
    step_s = sum(ms) / 1e3
    points = tuple(
        Point(
            step=step,
            seconds=step * step_s,
            sent_bytes=step * share * FULL,
            loss=0.2 + 2.1 * math.exp(-step / 70),
            accuracy=final - (final - 0.1) * math.exp(-step / 62) * (1 + 0.04 * math.sin(step / 9)),
        )
        for step in range(0, STEPS + 1, EVERY)
    )
    return Lane(
        name=name,
        strategy=strategy,
        code="DistributedDataParallel(model)"
        if name == "fp32"
        else f'lc.compress(model, "{strategy}")',
        points=points,
        step_s=step_s,
        parts=Parts(compute_s=ms[0] / 1e3, codec_s=ms[1] / 1e3, wire_s=ms[2] / 1e3),
        sent_bytes=share * FULL,
        link_bytes=1.07 * share * FULL,
        predicted_step_s=predicted and predicted * step_s,
        same_bits=True,
    )


def sample() -> Race:
    lanes = tuple(lane(*row) for row in _STRATEGIES)
    codecs = tuple(
        Quantized(codec=name, spec=_spec(name, bits), bits=_bits(name, bits), error=error(bits))
        for name, error in _CODECS.items()
        for bits in ((4, 8) if name == "global" else (2, 3, 4, 5, 6, 7, 8))
    )
    exact = Quantized(codec="none", spec="none", bits=32.0, error=0.0)
    half = Quantized(codec="fp16", spec="fp16", bits=16.0, error=4e-8)
    return Race(
        settings=Settings(
            data="digits", workers=4, rate="50mbit", steps=STEPS, batch=64, lr=0.1, seed=0,
            target=0.9,
        ),
        machine=Machine(
            system="Linux 6.1", processor="x86-64 at 2.4 GHz", cores=2, python="3.11.2",
            torch="2.13.0+cpu", shaped=True, why_unshaped=None,
        ),
        task=Task(network="a network of two hidden layers", parameters=85_002, training=1437,
                  testing=360),
        lanes=lanes,
        codecs=(exact, half, *codecs),
        verdict="ecdq:error=0.08 reaches 90% 5.1 times faster than fp32, with 10 times fewer "
        "bytes, and ends within 0.1 points of it.",
        laconic="0.9.0",
    )  # fmt: skip


def _spec(name: str, bits: int) -> str:
    if name == "ecdq":
        return "ecdq:error=0.08" if bits == 3 else f"ecdq:error={0.55 * 4.0**-bits * 5:.2g}"
    return f"{name}:bits={bits}"


def _bits(name: str, bits: int) -> float:
    return bits - 0.6 if name == "ecdq" else bits + 32 / 512


def unshaped() -> Race:
    race = sample()
    why = "network namespaces are not allowed here: run as root, or install slirp4netns"
    machine = replace(race.machine, shaped=False, why_unshaped=why)
    return replace(race, machine=machine)


def many() -> Race:
    race = sample()
    lanes = [
        lane(
            f"ecdq:error={0.02 * n:.2f},coder=rans@hierarchical" if n % 3 else f"s{n}",
            f"ecdq:error={0.02 * n:.2f}",
            0.3 / n,
            (7.4, 3.0 + n / 7, 60 / n),
            0.94 - 0.002 * n,
            1 + 0.02 * math.sin(n),
        )
        for n in range(1, 20)
    ]
    return replace(race, lanes=(race.lanes[0], *lanes))


def alone() -> Race:
    """One strategy, and not fp32."""
    race = sample()
    return replace(race, lanes=race.lanes[5:6], codecs=())


def out_of_reach() -> Race:
    race = sample()
    return replace(race, settings=replace(race.settings, target=0.99))


def unpredicted() -> Race:
    race = sample()
    lanes = tuple(replace(one, predicted_step_s=None) for one in race.lanes)
    return replace(race, lanes=lanes)


def unshaped_unpredicted() -> Race:
    return replace(unshaped(), lanes=unpredicted().lanes)


def unfinished() -> Race:
    """The second strategy is under way, the third has no points yet."""
    race = sample()
    first, second, third, *_ = race.lanes
    lanes = (first, replace(second, points=second.points[:9]), replace(third, points=()))
    return replace(race, lanes=lanes, verdict="", codecs=())


def not_begun() -> Race:
    return replace(sample(), lanes=(), codecs=(), verdict="")


def diverged() -> Race:
    """The loss of the third strategy is no number from half of its way on, nor is a time."""
    race = sample()
    bad = race.lanes[2]
    half = len(bad.points) // 2
    lost = tuple(
        replace(point, loss=math.nan, accuracy=0.1, seconds=math.inf) for point in bad.points[half:]
    )
    lanes = (*race.lanes[:2], replace(bad, points=bad.points[:half] + lost, same_bits=False))
    infinite = Quantized(codec="qsgd", spec="qsgd:bits=2", bits=2.0, error=math.nan)
    return replace(race, lanes=lanes, codecs=(*race.codecs, infinite))


HOSTILE = "</script><script>window.taken = 1</script><b>&amp;\"'%{y}$__proto__ \u2028--lane-1"


def hostile() -> Race:
    """Names, code and all other texts that try to be markup."""
    race = sample()
    lanes = tuple(
        replace(one, name=HOSTILE + str(at), strategy=HOSTILE, code=HOSTILE, choice=HOSTILE)
        for at, one in enumerate(race.lanes)
    )
    return replace(
        race,
        lanes=lanes,
        codecs=tuple(replace(one, codec=HOSTILE, spec=HOSTILE) for one in race.codecs),
        verdict=HOSTILE,
        laconic=HOSTILE,
        settings=replace(race.settings, data=HOSTILE),
        machine=replace(race.machine, system=HOSTILE, shaped=False, why_unshaped=HOSTILE),
        task=replace(race.task, network=HOSTILE),
    )


ODD = {
    one.__name__: one
    for one in (
        alone, diverged, hostile, many, not_begun, out_of_reach, unfinished, unpredicted, unshaped,
        unshaped_unpredicted,
    )
}  # fmt: skip
