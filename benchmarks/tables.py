"""docs/benchmarks.md, and the README's table, from the rows under benchmarks/results.

python -m benchmarks.tables
"""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks import _geometry_tables as geometry
from benchmarks import _planner_tables as planner
from benchmarks import _training_tables as training
from benchmarks._race_tables import race_table, race_verdicts
from benchmarks._rows import RESULTS, load, markdown
from laconic._files import write_whole

DOC = Path(__file__).parent.parent / "docs" / "benchmarks.md"
README = Path(__file__).parent.parent / "README.md"

_SHOWN = (
    "qsgd:bits=4,block=512",
    "dqsg:bits=2,block=512",
    "dqsg:bits=4,block=512",
    "dqsg:bits=8,block=512",
    "global:bits=8",
)


def page() -> str:
    """The whole document."""
    return f"""# Benchmarks

Made by `python -m benchmarks.tables` from the rows in `benchmarks/results/`; each table names the
command that measured it. Times are medians; a ratio compares two medians of one run.

## Codecs on real gradients

`make bench GRADIENTS=gradients.npz` (`python -m benchmarks.codecs --save --gradients ...`),
{_machine("codecs")}. One gradient of each model, every matrix a wire of its own, headers and tables
counted:

- digits: a small network (64-256-256-10, handwritten digits), after 200 steps; without
  GRADIENTS= this is the only one, so that anyone can reproduce it.
- cnn: conv32-conv64-fc256 on Fashion-MNIST, SGD, 1,500 steps, batch 64: 77% of the largest matrix
  is exactly zero. resnet20: CIFAR-10, SGD, 250 steps, batch 128. transformer: 4 layers, width 160,
  characters, AdamW, 600 steps.

Bits per value / NMSE of the whole gradient. The CNN's two convolutions are small and dense, and
hold 40% of its squared norm; in parentheses the NMSE per value, each value relative to its own
matrix's norm. GB/s of fp32 input, encode / decode-accumulate, on the transformer's and the CNN's
gradient repeated to 2^24 values.

{_codecs()}

For comparison, a Gaussian source (no header, no table):

{_theory()}

Observations:

- At the error of 4-bit buckets, `ecdq` with `rans` needs about half the bits on dense gradients and
  less than a tenth on the sparse CNN.
- Real gradients are not Gaussian: with the spread of every 128 values known, `rans` needs fewer
  bits than an ideal coder of one Gaussian per matrix would.
- EDEN rotates, which makes every gradient look dense and Gaussian: its rate is the same on all
  models. Where a gradient is sparse, not rotating and coding the zeros is several times better;
  where it is dense, `ecdq` at EDEN's bits has less error.
- QSGD as printed (2-norm, s = √B, Elias code) is smaller and nearer than 3-bit max-norm buckets on
  every model: the code that implementations leave out is the better half of it. `ecdq` is smaller
  and nearer still.

## Steps over shaped links

`python -m benchmarks.network --rates 100,1000,100/256,1000/256,loopback --save`,
{_machine("network")}. Four hosts in network namespaces of one machine with two cores, one worker
each, links shaped in both directions; an MLP of 1.86 million parameters on Fashion-MNIST, batch 64.
Milliseconds per step (quartiles), relative to fp32 in the same run; KB per rank and step as counted
by the kernel at the link / by `stats()`; and the time outside communication (codec, copies, Python:
the time of the hook's threads less their time in collectives; two threads overlap).

{_network()}

Observations:

- Four workers share two cores, so the codec's time counts double here. At 100 Mbit/s communication
  still dominates; at 1 Gbit/s `ecdq`'s coder takes longer than its bits save, and fixed widths win.
- An idle link passes a burst at full speed. The lab's own bursts are short (31 KB at 100 Mbit/s);
  bursts of 256 KB favor strategies that send little, which is why both are listed.
- At 100 Mbit/s the kernel counts every packet's headers and acknowledgements (6%); at 1 Gbit/s it
  counts large packets before segmentation, and `stats()` is within 2%.
- On the loopback interface there is nothing to save: fixed widths cost nothing there either,
  because fewer bytes are copied; `ecdq` costs time.

## Schedules over shaped links

`python -m benchmarks.network --schedules --rates 100,1000 --save`, {_machine("schedules")}. As
above; SSD-SGD with its default local rule, its codec on push and pull. Mean milliseconds per step
(every k-th step pulls), and bytes at the link relative to fp32: (1 + 1/k)/2 without a codec, apart
from headers.

{_schedules()}

Observations: bytes are as predicted. In fp32, SSD with k = 1 is slower than synchronous training
here although it sends no more: all-to-all takes longer for the same bytes than the ring of Gloo's
all-reduce. With a codec it is the fastest at both rates. At 1 Gbit/s it does not hide all
communication: two cores compute and encode for four workers.

## Adapters over a slow link

`python -m benchmarks.lora --save`, {_machine("lora")}. Two hosts, links of 50 Mbit/s; a vision
transformer of 25 million parameters with PEFT's adapters on all linear layers, AdamW. Milliseconds
per step (quartiles), relative to plain DDP before and after; bytes per rank and step.

{_lora()}

## Time to accuracy over shaped links

`python -m benchmarks.time_to_accuracy --rates 100,1000 --seconds 200 --save`,
{_machine("time_to_accuracy")}. The same network from random weights, SGD with momentum 0.9, the
rate falling from 0.1 to 0 over 700 steps, until the accuracy on Fashion-MNIST's test set is 88%,
evaluated every 20 steps. SSD without warm-up, with its default local rule. Each strategy has 200
seconds.

{training.time_to_accuracy(load("time_to_accuracy")["rows"])}

Observations: delayed training needs more steps, 660 instead of 540, and still SSD with ecdq is
first at both rates; at 1 Gbit/s by little, because two cores encode for four workers. One run of
each, one seed.

## Predicted against measured

`python -m benchmarks.predicted --save`, {_machine("predicted")}. Hosts of the lab, one worker each,
share one machine with two cores. In every configuration a probe measured links, device, codecs and
the network's computation, but no strategy; the table lists the planner's prediction and then the
measurement, in ms per step. Networks train on Fashion-MNIST in batches of 64 per worker: a CNN
(0.82 million parameters) and MLPs of 1.9 (mlp) and 5.8 million (wide).

![Predicted against measured step times](predicted.svg)

{planner.predicted()}

{planner.predicted_summary()}
The simulation was developed on 2 x 50 and 4 x 100 with the MLP and on three configurations that are
not listed; the other eleven were first run here.

## auto

`python -m benchmarks.auto --rates loopback,100 --rounds 8 --save`, {_machine("auto")}. The training
of "Steps over shaped links", four workers. On the loopback interface plain DDP and auto alternate,
a new model each; auto's steps count from its decision on. At 100 Mbit/s the best fixed strategy and
auto alternate.

{planner.auto()}

## The lab's links

`python -m benchmarks.lab_rate --save`, {_machine("lab_rate")}. Bytes that plain DDP on four hosts
sends in fp32, relative to what the link could carry in a step without its computation.

{planner.lab_rate()}

## Which local rule?

`python -m benchmarks.schedules_gpu --data FILE --stage final --rate 0.8 --adam-rate 0.002 --repairs
momentum momentum-share-0 glu-alpha-4-beta-1 momentum-0.8 glu-alpha-8-beta-1 momentum-share-0.5
--seconds 520 --save`, then `.. --stage defaults --rate 0.8 --adam-rate 0.002 --seconds 460 --save`,
and for one rule that this did not reach again with `--only momentum-0.8-share-0.5 --seconds 90`,
{_machine("schedules_gpu")}. ResNet-20 on CIFAR-10 (a JPEG copy), 4 simulated workers with batches
of 128, 12 epochs with one cycle of the rate, momentum 0.9 on the owners, one epoch of warm-up;
rules and optimizers of the product, the transport simulated (bitwise equal to real processes:
`tests/benchmarks/test_simulated.py`). Test accuracy in %: mean (minimum to maximum; number of
seeds). Some settings appear in both commands: minimum and maximum are over all runs, and a seed
that ran twice counts once.

{training.rules(load("schedules_gpu")["rows"])}

AdamW on a transformer (4 layers, width 160, characters of Python's standard library), 1,500 steps,
150 of them warm-up; bits per character of held-out text:

{training.adam(load("schedules_gpu")["rows"])}

Observations: while it waits, a rank must step as the owners do, including momentum. Rules that make
plain SGD steps, GLU among them, are slower by a factor of ten at momentum 0.9, and with k = 4 or
more do not recover under this recipe; lower rates help little. A lag of one step without a local
step costs AdamW 0.6 to 0.9 bits.

- MomentumRule: shares of 0, ½ and 1 are equal at each k; 0.3 to 0.6 points below synchronous
  training at k = 2, about 1.3 at k = 4 and 2.4 at k = 8. `momentum=0.8` on the ranks may be better
  at k = 4 and 8: there are few runs of it.
- AdamRule: at a rate of 0.002 a gain of 2, √4 for 4 workers, costs 0.04 to 0.07 bits, one of 1 0.07
  to 0.33; at 0.004 2 costs 0.09 to 0.12. `share=0.5` was better than the default 1 in four pairs of
  runs out of four, by 0.006 to 0.023. Results without bias correction are recorded but not shown:
  they are equal to these.
- A codec with an NMSE of 0.08 changes nothing at k = 4.
- Local SGD with the same period is as accurate as SSD under SGD, and less accurate under AdamW.
  DiLoCo's outer step is far too large around SGD with momentum at this rate.

Repeated runs of one seed of ResNet-20 differ by up to 0.8 points (the transformer's are mostly
bitwise equal), rules were chosen on the same test set, and synchronous training was best at the
highest rates tried, so its lead may be larger. The results of the screening, one seed of each, are
recorded as well.

## NDQSG against DQSG

`python -m benchmarks.nested --device cuda --steps 300 --save`, {_machine("nested")}. Fashion-MNIST,
a network of LeNet's size and FC 784-300-100-10; 2, 4, 8 and 16 simulated workers with 200 images
in total, 300 steps, three seeds; means over workers and seeds, the difference to dqsg by pairs.
Bits are those of codes, scales, checks and headers on the way to the receiver; every 16th step is
plain.

{training.nested(load("nested")["rows"])}

Observations: gradients of different workers have little in common here (correlations of decoded
values lie between -0.03 and 0.2, also with 1,024 images per worker), so nesting gains little. The
paper's fixed ratio saves 15% of the bits and costs accuracy wherever scales are fine or the network
is FC; the ratio controller detects that and sends dqsg. With one scale per matrix it nests the
large matrix of LeNet some of the time. Where gradients are nearly equal (rank noise 1%) it goes
down to ρ = 3 and stays exact (`tests/exchanges/test_nested.py`).

## Accuracy

`python -m benchmarks.accuracy --device cuda --epochs 3 --save`, {_machine("accuracy")}. A network
of LeNet's size (1,663,370 parameters) on Fashion-MNIST, 4 processes over Gloo, batch 64 each, three
seeds for the start, the data and all draws.

{_accuracy()}

## The hook on a GPU

`python -m benchmarks.hook_gpu --save`, {_machine("hook_gpu")}. NCCL with one rank: nothing is sent,
but all of the hook's kernels, copies, streams and events run, overlapped with backward. 134 million
parameters. Waits are those of the host for the device in one step, without the measurement's own.

{_hook_gpu()}

## The error of the mean, by the number of ranks

`python -m benchmarks.mean_error --save`, {_machine("mean_error")}. NMSE of the mean that all ranks
end with. The real exchanges run on threads of one process that emulate 2 to 64 ranks, 2^20 Gaussian
values each: independent ones, and for 64 ranks also half common to all (in power), and the same on
all. Bits per value, out / back, are bits sent per rank over (n-1)/n of the values, including
headers, lengths and norms. `hierarchical` has nodes of 8 ranks, and its bits are those that leave a
node. With κ, every rank knows how much the gradients have in common.

{_mean_error()}

Observations:

- The levels of an int8 sum shrink with the number of ranks. A ring that widens its sums keeps them,
  at the cost of more bits; the errors of rounding at every addition add up.
- The error of scatter-reduce hardly depends on the number of ranks. For 64 independent ones `ecdq`
  at `error=0.02` (half of it for each encoding) has {_at_64("ecdq:error=0.02@scatter-reduce")} bits
  each way; with `rans`, {_at_64("ecdq:error=0.02,coder=rans@scatter-reduce")}.
- Where gradients have much in common, knowing κ turns the error that averages away into fewer bits
  on the way out.
- Between 8 nodes of 8 ranks, int8 sums are useful again.

## Whether the budget is kept

`python -m benchmarks.budget --save`, {_machine("budget")}. Error of the averaged gradient under
`error=0.08` in percent of it: the mean over {_budget_steps()} steps / the largest single step, the
worse of 2, 3, 5 and 8 ranks. Bits per value, both ways, with 8 ranks. Exact means are steps of all
these runs in which a parameter would have broken its budget and was sent uncompressed.

{_budget()}

{_units()}## What check sums cost

`python -m benchmarks.verify --save`, {_machine("verify")}. Milliseconds of 4 ranks on 2 cores over
the loopback interface, `verify="none"` and `"sum"` alternating: exchanges of 2,000,000 values, then
training steps of an MLP of 1.86 million parameters under DDP. Processor time is of one rank; other
work on the machine affects it less.

{_verify()}

One check of 1 MiB takes {_check_us()} µs. With codecs over scatter-reduce the difference is within
the noise. With the backend's all-reduce (`global`) it is not: each bucket's scale travels in
checked messages instead of one small all-reduce, and the integers are read twice more.
`lc.compress(.., verify="none")` turns it off.

## Kernels: summary

Encode / decode-add, stochastic rounding and one scale per 512 values included; the next two
sections have all rows and the commands.

{_summary()}

## CPU

`make bench` (`python -m benchmarks.cpu --save`), {_machine("cpu")}. Encode makes a whole wire in
an existing buffer; decode adds to an existing tensor. Rows alternate, 2^26 float32 values.
pi-quant rounds to nearest with one scale, which it is given here (finding it takes another pass).

{_cpu()}

## GPU

`python -m benchmarks.gpu --save`, {_machine("gpu")}. 2^26 values. The share is the bandwidth
achieved relative to a device copy, every byte read and written counted once; `tensor` and `ndqsg`
read the input twice, for the scale. Shares above 100% are real: encoding mostly reads, and reading
is faster than a copy's half reading, half writing. Times are of captured graphs, so nothing waits
for the host.

{_gpu("float32")}

{_gpu("bfloat16")}

The slow row is `block=100`: blocks that are not a power of two need one program each for their
scale.

### ecdq with the bitmap coder

`python -m benchmarks.ecdq_gpu --save`, {_machine("ecdq_gpu")}. 2^26 values; GB/s of fp32 input, to
the final contiguous wire and back (decode-accumulate, check sums verified), as captured graphs.
Fine steps fall back to bit planes wider than four, which take slow loops.

{_ecdq_gpu()}

## Rotation

`python -m benchmarks.rotate --save` ({_machine("rotate-cpu")}) and, on a GPU,
`python -m benchmarks.rotate --cuda --save` ({_machine("rotate-cuda")}). Time over that of the codec
inside, 2^26 values. Rotation is fused into qsgd and dqsg with scales of blocks; with one scale a
tensor it is a pass of its own.

{_rotate()}
"""


def _machine(name: str) -> str:
    info = load(name)["machine"]
    skip = ("date", "cpu") if "gpu" in info else ("date",)
    return f"{info['date']}: " + ", ".join(f"{k} {v}" for k, v in info.items() if k not in skip)


def _codecs() -> str:
    rows = [row for row in load("codecs")["rows"] if "codec" in row]
    models = list(dict.fromkeys(row["model"] for row in rows))
    head, lines = f"| | {' | '.join([*models, 'GB/s, dense', 'GB/s, sparse'])} |", []
    for start in range(0, len(rows), len(models)):
        found = {row["model"]: row for row in rows[start : start + len(models)]}
        cells = []
        for model, row in found.items():
            cell = f"{row['bits']:.2f} / {_short(row['nmse'])}"
            cells.append(f"{cell} ({_short(row['nmse_per_value'])})" if model == "cnn" else cell)
        for model in ("transformer", "cnn"):
            row = found.get(model)
            cells.append(f"{row['encode_gbs']:.1f} / {row['decode_gbs']:.1f}" if row else "")
        lines.append([f"`{rows[start]['codec']}`", *cells])
    return markdown(head, lines)


def _network() -> str:
    rows = load("network")["rows"]
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    lines = []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        cells = [
            _step([r for r in rows if (r["strategy"], r["rate"]) == (strategy, rate)])
            for rate in rates
        ]
        lines.append([strategy, *cells])
    return markdown(f"| | {' | '.join(map(_rate, rates))} |", lines)


def _rate(rate: str) -> str:
    mbit, _, burst = rate.partition("/")
    return (
        "loopback"
        if mbit == "loopback"
        else f"{mbit} Mbit/s" + (f", bursts {burst} KB" if burst else "")
    )


def _step(rows: list[dict[str, Any]]) -> str:
    """fp32 is measured first and last: both are shown."""
    text = " and ".join(f"{row['ms']:.0f} ({row['ms_q1']:.0f}-{row['ms_q3']:.0f})" for row in rows)
    row = rows[0]
    text = f"{text} ms"
    if len(rows) == 1:
        text += f", {1 / row['times_faster']:.2f} x"
    if row.get("link_bytes"):
        sent = f" / {row['sent_bytes'] / 1e3:.0f}" if "sent_bytes" in row else ""
        text += f"; {row['link_bytes'] / 1e3:.0f}{sent} KB"
    if "exchange_ms" in row:
        text += f"; {row['exchange_ms'] - row['wire_ms']:.0f} ms outside"
    return text


def _schedules() -> str:
    rows = load("schedules")["rows"]
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    base = {rate: next(row for row in rows if row["rate"] == rate) for rate in rates}
    head, lines = f"| | {' | '.join(f'{_rate(rate)} | bytes' for rate in rates)} |", []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        cells = []
        for rate in rates:
            row = next(r for r in rows if (r["strategy"], r["rate"]) == (strategy, rate))
            share = row["link_bytes"] / base[rate]["link_bytes"]
            cells.append(f"{row['mean_ms']:.0f} ms | {share:.3f}")
        lines.append([strategy, *cells])
    return markdown(head, lines)


def _lora() -> str:
    lines = []
    for row in load("lora")["rows"]:
        values = f"r = {row['r']} ({row['values'] / 1e6:.2f} million), batch {row['batch']}"
        time = f"{row['ms']:.0f} ({row['ms_q1']:.0f}-{row['ms_q3']:.0f})"
        sent = f"{row['sent_bytes'] / 1e3:.0f}"
        cells = [f"{row['times_faster']:.2f}", sent, f"{row['times_fewer']:.1f}"]
        lines.append([values, row["strategy"], time, *cells])
    head = "| adapters | strategy | ms per step | times faster | KB | times fewer |"
    return markdown(head, lines)


def _accuracy() -> str:
    rows = load("accuracy")["rows"]
    lines = []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        found = [row for row in rows if row["strategy"] == strategy]
        got = [100 * row["accuracy"] for row in found]
        ratio = sum(row["fewer_bytes"] for row in found) / len(found)
        mean = sum(got) / len(got)
        spread = f"{mean:.2f} ({min(got):.2f} to {max(got):.2f})"
        lines.append([strategy, spread, f"{ratio:.1f}"])
    return markdown("| | test accuracy: mean (minimum to maximum) | fewer bytes |", lines)


def _hook_gpu() -> str:
    rows = load("hook_gpu")["rows"]
    base = rows[0]
    lines = []
    for row in rows:
        ratio, more = row["step_ms"] / base["step_ms"], row["waits"] - base["waits"]
        lines.append([row["strategy"], f"{row['step_ms']:.1f}", f"{ratio:.3f}", more])
    return markdown("| | step, ms | over plain DDP | waits more than plain |", lines)


def _mean_error() -> str:
    rows = {(row["pair"], row["kind"], row["ranks"]): row for row in load("mean_error")["rows"]}
    kinds = list(dict.fromkeys(key[1] for key in rows))
    counts = list(dict.fromkeys(key[2] for key in rows))
    most = counts[-1]
    columns = [*((kinds[0], n) for n in counts), *((kind, most) for kind in kinds[1:])]
    names = [f"{n} ranks" for n in counts] + [f"{most}, {kind}" for kind in kinds[1:]]
    head, lines = f"| | {' | '.join([*names, *(f'bits, {k}' for k in kinds)])} |", []
    for pair in dict.fromkeys(key[0] for key in rows):
        found = [rows[pair, kind, n]["nmse"] for kind, n in columns]
        cells = ["–" if nmse is None else _digits(nmse) for nmse in found]
        for kind in kinds:
            row = rows[pair, kind, most]
            cells.append(f"{row['bits_out']:.2f} / {row['bits_back']:.2f}")
        known = ", κ" * pair.endswith(", κ")
        lines.append([f"`{pair.removesuffix(', κ')}`{known}", *cells])
    return markdown(head, lines)


def _budget() -> str:
    rows = load("budget")["rows"]
    specs = list(dict.fromkeys(row["spec"] for row in rows))
    columns = [f"`{spec}` | bits" for spec in specs]
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cells = []
        for spec in specs:
            found = [row for row in rows if (row["kind"], row["spec"]) == (kind, spec)]
            if not found:
                cells.append("– | –")
                continue
            mean, largest = (max(row[key] for row in found) for key in ("mean", "largest"))
            bits = max(found, key=itemgetter("ranks"))["bits"]
            cells.append(f"{mean:.0%} / {largest:.0%} | {bits:.2f}")
        exact = sum(row["exact_means"] for row in rows if row["kind"] == kind)
        lines.append([kind.replace("_", " "), *cells, exact])
    return markdown(f"| | {' | '.join(columns)} | exact means |", lines)


def _budget_steps() -> str:
    return " or ".join(sorted({str(row["steps"]) for row in load("budget")["rows"]}, key=int))


def _units() -> str:
    """A section of its own, once there are rows."""
    if not (RESULTS / "geometry.json").exists():
        return ""
    rows = load("geometry")["rows"]
    return f"""## Units of the optimizer

`python -m benchmarks.geometry --device {rows[0]["device"]} --save`, {_machine("geometry")}. A
transformer ({geometry.sizes(rows)}; tied embedding) on characters of Python's standard library;
simulated workers with batches of 8 each, scatter-reduce with real wires, clipping at 1, one cosine
of the learning rate. Matrices of 2,000 values or more are encoded, the rest is averaged in fp32 and
not counted. Loss is cross-entropy in nats on text held out; a seed names first weights and data for
all strategies, and differences are those of pairs. Encodings: `ecdq` with that error and one step
per tensor (uniform), per 4,096 values (block) or per 512 (block512), `dqsg`, and the same in the
optimizer's units (adam: `optimizer=`; steps before it has any are plain, and counted). The coder of
`ecdq` is {geometry.coders(rows)}.

Bits are those per value and way, all bytes of wires. Errors are the mean gradient's, squared, over
its square: as it is / divided by what the optimizer divides it by; then the largest of one tensor.

Frozen: gradients travel in fp32 for a fifth of the steps, then Adam's second moments stay what they
are, as in 1-bit Adam, and bits are those of the steps after. Spectral: an experiment for Muon, with
errors as its orthogonalisation weighs them (`benchmarks/_spectral.py`). Tokens of two characters
are 4,854, most of them rare.

{geometry.tables(rows)}

Observations:

- Under AdamW one step per tensor costs 1.2% of the loss after 250 steps, on 3 and on 4 workers,
  0.7% after 1,000, and nothing to be seen after 3,000. A step per 4,096 values, or the optimizer's
  units, cost nothing that five seeds could show down to 2 bits per value; at 1.7 about half a
  percent after 250 steps, and nothing after 1,000.
- Clipping acts as often as in plain training down to 2 bits; at 1.7 in 3 to 10% more of the steps.
- The two are equal within the spread, and `block=` needs to know nothing. With tokens of two
  characters single runs differ by several percent, so that losses tell little; embeddings of rare
  tokens have no units in the product.
- Under RMSprop units are better than blocks, under Adafactor blocks are better than units.
- Below 1.5 bits unbiased noise is the better half: error feedback costs 15 to 19%, because Adam's
  second moments see its bursts, and 6 to 11% even where these moments are frozen. Frozen moments
  and no feedback cost nothing at one bit per value.
- Muon makes singular values alike, so that noise in weak directions counts as much as signal:
  error=0.08 costs 2.4%, 0.02 half of that. Errors that grow with the singular values would cost a
  third at 0.4 more bits; that is not in the product.
- SGD has no units, and no use for any.

"""


def _verify() -> str:
    rows = [row for row in load("verify")["rows"] if "verify" in row]
    lines = []
    for none, checked in zip(rows[::2], rows[1::2], strict=True):
        name = f"`{none['pair']}`" if "pair" in none else f"a step with `{none['step']}`"
        cells = [f"{row[key]:.1f}" for key in ("ms", "cpu_ms") for row in (none, checked)]
        lines.append([name, *cells])
    return markdown("| | wall, none | wall, sum | processor, none | processor, sum |", lines)


def _check_us() -> str:
    return f"{load('verify')['rows'][-1]['check_us']:.0f}"


def _digits(nmse: float) -> str:
    return f"{nmse:.3g}" if nmse >= 0.001 else f"{nmse:.1e}"


def _at_64(pair: str) -> str:
    """Error and bits, the larger of out and back, of independent gradients."""
    (row,) = (
        row
        for row in load("mean_error")["rows"]
        if (row["pair"], row["kind"], row["ranks"]) == (pair, "independent", 64)
    )
    return f"{row['nmse']:.4f} at {max(row['bits_out'], row['bits_back']):.1f}"


def _theory() -> str:
    found = [row for row in load("codecs")["rows"] if "name" in row]
    lines = [[row["name"], f"{row['bits']:.2f}", f"{row['nmse']:.4f}"] for row in found]
    return markdown("| | bits | NMSE |", lines)


def _short(value: float) -> str:
    return (
        f"{value:.3f}" if 0.001 <= value < 10 else f"{value:.1e}" if value < 1 else f"{value:.0f}"
    )


def _cpu() -> str:
    lines = []
    for row in load("cpu")["rows"]:
        spread = f"{row['ms_q1']:.1f}–{row['ms_q3']:.1f}"
        peer = row["per_piquant_add"]
        ratio = f"{peer:.2f}" if peer and "decode" in row["name"] else ""
        lines.append([row["name"], f"{row['ms']:.1f}", spread, f"{row['per_copy']:.2f}", ratio])
    return markdown("| | ms | quartiles | × copy | × pi-quant add |", lines)


def _gpu(dtype: str) -> str:
    rows = [row for row in load("gpu")["rows"] if row["dtype"] == dtype]
    lines = [[f"device copy | {rows[0]['ms']:.4f} | | |"]]
    for encode, decode in zip(rows[1::2], rows[2::2], strict=True):
        cells = [f"{row['ms']:.4f} | {row['share']:.0%}" for row in (encode, decode)]
        lines.append([encode["codec"], *cells])
    return markdown(f"| {dtype} | encode ms | share | decode-add ms | share |", lines)


def _ecdq_gpu() -> str:
    rows = load("ecdq_gpu")["rows"]
    lines = []
    for encode, decode in zip(rows[::2], rows[1::2], strict=True):
        cells = [f"{row['ms']:.3f} | {row['fp32_gb_s']:.0f}" for row in (encode, decode)]
        lines.append([encode["input"], f"`{encode['codec']}`", f"{encode['bits']:.2f}", *cells])
    return markdown("| values | codec | bits | encode ms | GB/s | decode-add ms | GB/s |", lines)


def _rotate() -> str:
    found = {
        (row["codec"], row["device"], row["dtype"], row["name"]): row["ratio"]
        for name in ("rotate-cpu", "rotate-cuda")
        for row in load(name)["rows"]
        if row["codec"].startswith("rotate")
    }
    places = (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16"))
    lines = []
    for codec in dict.fromkeys(key[0] for key in found):
        cells = []
        for place in places:
            pair = [found.get((codec, *place, way)) for way in ("encode", "decode-add")]
            cells.append(" / ".join(f"{ratio:.2f}" if ratio else "–" for ratio in pair))
        lines.append([f"`{codec}`", *cells])
    return markdown("| encode / decode-add | CPU | GPU | GPU, bfloat16 |", lines)


def readme() -> str:
    """The README with its tables made anew."""
    text = README.read_text()
    for start, end, made in (
        ("<!-- race -->", "<!-- race end -->", race_table()),
        ("<!-- verdicts -->", "<!-- verdicts end -->", race_verdicts()),
        ("<!-- loopback -->", "<!-- loopback end -->", _loopback()),
    ):
        before, rest = text.split(start)
        text = before + start + "\n" + made + "\n" + end + rest.split(end)[1]
    return text


def _loopback() -> str:
    """What compression costs where there is nothing to gain."""
    rows = [row for row in load("network")["rows"] if row["rate"] == "loopback"]
    skipped = ("compute alone", "fp32 (no hook)")
    ratios = [1 / row["times_faster"] for row in rows if row["strategy"] not in skipped]
    return (
        "Where the network is not the bottleneck, codecs cost time: on the loopback interface a "
        f"step of\n1.86 million parameters took {min(ratios):.1f} to {max(ratios):.1f} times as "
        "long as with "
        "fp32 (`python -m benchmarks.network`)."
    )


def _summary() -> str:
    cpu = {row["name"]: row["per_copy"] for row in load("cpu")["rows"]}
    gpu = {
        (row["codec"], row["dtype"], row["name"]): row["share"]
        for row in load("gpu")["rows"]
        if "codec" in row
    }
    head = "| encode / decode-add | CPU: time over a memory copy | "
    head, lines = head + "H200: share of a copy's bandwidth | H200, bfloat16 |", []
    for spec in _SHOWN:
        cells = [f"{cpu[f'encode {spec}']:.2f} / {cpu[f'decode {spec}']:.2f}"]
        for dtype in ("float32", "bfloat16"):
            encode, decode = (gpu[spec, dtype, name] for name in ("encode", "decode-add"))
            cells.append(f"{encode:.0%} / {decode:.0%}")
        lines.append([f"`{spec}`", *cells])
    return markdown(head, lines)


if __name__ == "__main__":
    planner.write_plot()
    write_whole(DOC, page())
    write_whole(README, readme())
