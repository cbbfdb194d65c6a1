"""Every codec on real gradients: bits per value, error, speed.

    python -m benchmarks.codecs [--gradients gradients.npz] [--save]

Always on the two large matrices of a small network for handwritten digits; a file adds other
models, one array per matrix, named model/parameter. Every matrix is a tensor of its own; bits count
whole wires, headers and tables included. The error is ‖ĝ-g‖²/‖g‖² over all matrices of a model
("all"), and its mean over values, each taken with its own matrix's norm ("per value"): the first is
what the optimizer sees, the second is not ruled by the few matrices with the largest gradients.
Speed is of fp32 input, on the model's gradient repeated to 2^24 values.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from scipy import integrate, stats
from torch import Tensor

import laconic as lc
from benchmarks._rows import codec_work, command_line, interleaved, keep, quantiles, view
from examples import digits

SPECS = (
    "fp16",
    "bf16",
    "qsgd:bits=2,block=512",
    "qsgd:bits=3,block=512",
    "qsgd:bits=4,block=512",
    "qsgd:bits=8,block=512",
    "qsgd:levels=127,norm=l2,block=16384,coder=elias",
    "qsgd:levels=1,norm=l2,block=tensor,coder=elias",
    "dqsg:bits=2,block=512",
    "dqsg:bits=3,block=512",
    "dqsg:bits=4,block=512",
    "dqsg:bits=8,block=512",
    "dqsg:bits=4,block=512,coder=rans",
    "rotate(dqsg:bits=2,block=512)",
    "rotate(dqsg:bits=3,block=512)",
    "rotate(dqsg:bits=4,block=512)",
    "global:bits=8",
    "global-exp:bits=8",
    "qsgd-topk",
    *(f"ecdq:step=1,subtract=always,coder={c}" for c in ("fixed", "bitmap", "elias", "rans")),
    *(f"ecdq:step=1,coder={c}" for c in ("bitmap", "elias", "rans")),
    *(f"ecdq:error={e},coder={c}" for e in (0.02, 0.08, 0.3) for c in ("bitmap", "elias", "rans")),
)
_TIMED = 1 << 24


def digits_gradients() -> list[Tensor]:
    """Of the small network after 200 steps."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model, data = digits.network(), digits.load()
    digits.train(model, data, 200, generator)
    digits.backward(model, data.batch(generator))
    gradients = [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]
    return [gradient for gradient in gradients if gradient.numel() >= digits.LARGE]


def load(path: Path) -> dict[str, list[Tensor]]:
    """Matrices by model."""
    models: dict[str, list[Tensor]] = {}
    with np.load(path) as file:
        for name in file.files:
            matrix = torch.from_numpy(file[name].astype(np.float32)).flatten()
            models.setdefault(name.split("/")[0], []).append(matrix)
    return models


def quality(codec: lc.Codec, matrices: list[Tensor]) -> dict[str, float]:
    """Bits and errors of a model's gradient."""
    bits, squares, energy, relative, count = 0, 0.0, 0.0, 0.0, 0
    for number, x in enumerate(matrices):
        wire = codec.encode(x, lc.Key(seed=1, tensor=number))
        error = float((codec.decode(wire).double() - x.double()).square().sum())
        power = float(x.double().square().sum())
        bits += 8 * wire.nbytes
        squares, energy = squares + error, energy + power
        relative += error / power * x.numel() if power else 0.0
        count += x.numel()
    return {"bits": bits / count, "nmse": squares / energy, "nmse_per_value": relative / count}


def speed(codec: lc.Codec, matrices: list[Tensor], runs: int) -> dict[str, float]:
    """GB/s of fp32 input, encode and decode-accumulate."""
    x = torch.cat(matrices)
    x = x.repeat(math.ceil(_TIMED / x.numel()))[:_TIMED].clone()
    _, work = codec_work(str(codec), x, torch.zeros(_TIMED))
    taken = {name: quantiles(found)["ms"] for name, found in interleaved(work, runs).items()}
    gbs = {name: 4e-6 * _TIMED / ms for name, ms in taken.items()}
    return {"encode_gbs": gbs["encode"], "decode_gbs": gbs["decode-add"]}


def eden(bits: int) -> float:
    """NMSE of EDEN: 1/(1-D) - 1 with D the distortion of the Lloyd-Max quantizer of a Gaussian.

    Vargaftik et al., EDEN, ICML 2022: rotate, quantize to the centroids, scale to be unbiased.
    """
    edges = stats.norm.ppf(np.linspace(0, 1, (1 << bits) + 1))
    for _ in range(2000):  # Lloyd's iteration
        mass = np.diff(stats.norm.cdf(edges))
        centre = -np.diff(stats.norm.pdf(edges)) / mass
        edges[1:-1] = (centre[1:] + centre[:-1]) / 2
    kept = float((mass * centre**2).sum())  # 1 - D
    return 1 / kept - 1


def dithered_bits(step: float) -> float:
    """H(q | dither) of a Gaussian at a step in units of its standard deviation."""
    levels = np.arange(-60, 61)

    def entropy(r: float) -> float:
        p = np.diff(stats.norm.cdf((np.append(levels, 61) - r) * step))
        p = p[p > 0]
        return float(-(p * np.log2(p)).sum())

    return integrate.quad(entropy, 0, 1)[0]


def theory() -> list[dict[str, Any]]:
    """What is known of Gaussian sources: EDEN, ideal ECDQ, Shannon."""
    rows = [
        {"name": f"EDEN, {b} bit{'s' * (b > 1)}", "bits": float(b), "nmse": eden(b)}
        for b in (1, 2, 3, 4)
    ]
    for step in (0.5, 1.0, 2.0):
        rows.append(
            {
                "name": f"ideal entropy coder of ecdq, step {step:g}",
                "bits": dithered_bits(step),
                "nmse": step**2 / 12,
            }
        )
    for nmse in (1 / 48, 1 / 12, 1 / 3):
        rows.append({"name": "Shannon", "bits": math.log2(1 / nmse) / 2, "nmse": nmse})
    return rows


def measure(models: dict[str, list[Tensor]], runs: int) -> list[dict[str, Any]]:
    """A row for each codec and model."""
    rows: list[dict[str, Any]] = []
    for spec in SPECS:
        codec = lc.codec(spec)
        for model, matrices in models.items():
            row = {"codec": spec, "model": model, **quality(codec, matrices)}
            rows.append(row | (speed(codec, matrices, runs) if runs else {}))
    return rows


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--gradients", type=Path, help=".npz of arrays model/parameter")
    parser.add_argument("--runs", type=int, default=7, help="timed runs; 0 for none")
    options = parser.parse_args()
    models = {"digits": digits_gradients()}
    if options.gradients:
        models |= load(options.gradients)
    rows = measure(models, options.runs)
    title = "bits per value / error (all; per value) / GB/s encode, decode"
    table = view(title, ("", *models))
    for start in range(0, len(rows), len(models)):
        cells = []
        for row in rows[start : start + len(models)]:
            cell = f"{row['bits']:.3f}  {row['nmse']:.3g} ({row['nmse_per_value']:.3g})"
            if options.runs:
                cell += f"  {row['encode_gbs']:.1f} {row['decode_gbs']:.1f}"
            cells.append(cell)
        table.add_row(rows[start]["codec"], *cells)
    Console(width=170).print(table)
    for row in theory():
        print(f"{row['name']}: {row['bits']:.2f} bits, {row['nmse']:.4f}")
    keep("codecs", rows + theory(), options)


if __name__ == "__main__":
    main()
