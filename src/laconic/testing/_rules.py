"""The contract, rule by rule: what every codec must do with single wires."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import DTYPES, HEADER_BYTES, Header, Wire
from laconic.codecs import Codec
from laconic.errors import ConfigError, WireError
from laconic.testing._subject import Subject, broken, inputs, same_bits

_KEY = Key(seed=1, step=2, tensor=3, rank=4)
_CLOSE = 2.0**-18  # of the largest value: some roundings in fp32


_PROMISED = {
    "shared_norm": ("local_norm", "global_norm"),
    "pairwise": ("reduce",),
    "integer_sum": ("levels_for",),
}


def declares(subject: Subject) -> None:
    """What classes say of themselves."""
    own, twin = subject.fresh(), subject.fresh()
    rule = "a codec says what it is"
    for name, kind in (("name", str), ("id", int), ("unbiased", bool), ("summable", bool)):
        value = getattr(own, name, None)
        if type(value) is not kind:
            broken(
                own, rule, f"its {name} is {value!r}", f"Give the class a {name}: {kind.__name__}"
            )
    if not 0 <= own.id <= 255:
        broken(own, rule, f"its id is {own.id}", "A wire's header has a byte for it: 128 to 255")
    try:
        alike = hash(own) == hash(twin) and own == twin
    except TypeError:
        alike = False
    if not alike:
        broken(
            own,
            "equal settings are equal codecs",
            "two that were made alike are not equal, or have no hash",
            "Make the class a dataclass with frozen=True, kw_only=True, and settings that are "
            "numbers or strings",
        )
    bound = own.variance_bound(1000)
    if bound is not None and not 0 <= bound < math.inf:
        broken(own, rule, f"variance_bound(1000) is {bound}", "Return None if there is no bound")
    for flag, names in _PROMISED.items():
        missing = [name for name in names if vars(Codec)[name] is getattr(type(own), name)]
        if getattr(own, flag) and missing:
            broken(own, rule, f"it says {flag}=True and lacks {', '.join(missing)}", "Write them")
    if own.lossless:
        x = subject.gaussian(100)
        sent = own.encode(x, _KEY).data[HEADER_BYTES:].view(x.dtype)
        if not torch.equal(sent, x):
            what = "it says lossless=True, and its wire does not hold the values as they are"
            broken(own, rule, what, "It is for such codecs alone: servers then send plain values")


def has_a_text(subject: Subject) -> None:
    """str(codec) names it again, where its name is registered."""
    from laconic.codecs import codec, codecs, wrappers

    own = subject.fresh()
    if own.name not in (*codecs(), *wrappers()):
        return
    try:
        same = codec(str(own)) == own
    except ConfigError:
        same = False
    if not same:
        broken(
            own,
            "its spec string names it",
            f"laconic.codec({str(own)!r}) is not the same codec",
            "Let every setting be a field of the dataclass that its __init__ takes",
        )


def shapes_and_dtypes(subject: Subject) -> None:
    """Empty, one, odd; fp32, fp16, bf16; not contiguous."""
    tensors = inputs(subject)
    tensors["a transposed matrix"] = subject.gaussian(33, 17).t()
    for label, x in tensors.items():
        own, before = subject.fresh(), x.clone()
        wire = own.encode(x, _KEY)
        rule = "any tensor of the three dtypes comes back in its shape and dtype"
        if wire.shape != x.shape or wire.dtype != x.dtype or wire.header.numel != x.numel():
            broken(own, rule, f"the wire of {label} has others", "Look at _header")
        y = subject.decode(own, wire, x)
        if y.shape != x.shape or y.dtype != x.dtype or y.device != x.device:
            got = f"{tuple(y.shape)}, {y.dtype}, {y.device}"
            broken(own, rule, f"{label} came back as {got}", "Write into into.out, in its shape")
        if not torch.isfinite(y).all():
            broken(own, rule, f"{label}, all finite, came back with NaN or infinity", "")
        if not torch.equal(x, before):
            broken(own, "encoding leaves its input alone", f"it changed {label}", "Copy first")


def zeros(subject: Subject) -> None:
    """All zeros decode to zeros."""
    for label, x in inputs(subject).items():
        y = subject.round_trip(torch.zeros_like(x), _KEY)
        if y.count_nonzero():
            broken(
                subject.fresh(),
                "zeros decode to zeros",
                f"of {label}, all zero, {int(y.count_nonzero())} came back as something else",
                "Mind a scale of 0, and dithers that are taken off: parameters without a gradient "
                "would move",
            )


def not_finite(subject: Subject) -> None:
    """NaN and infinity anywhere are seen in what is decoded."""
    for dtype in DTYPES:
        for value in (math.nan, math.inf, -math.inf):
            for place in (0, 500, 999):
                x = subject.gaussian(1000, dtype=dtype)
                x[place] = value
                if torch.isfinite(subject.round_trip(x, _KEY)).all():
                    broken(
                        subject.fresh(),
                        "a value that is not finite shows in what is decoded",
                        f"{value} at {place} of 1000 {dtype} values came back as finite ones",
                        "GradScaler and NaN checks would not see it: make the scale NaN where "
                        "max|x| is not finite (NaN is lost by comparisons)",
                    )


def sizes(subject: Subject) -> None:
    """nbytes is the length of a wire, or where that varies no less."""
    for label, x in inputs(subject).items():
        own = subject.fresh()
        wire, most = own.encode(x, _KEY), own.nbytes(x.numel(), x.dtype)
        rule = "nbytes is the length of a wire, or where it varies the most that it can be"
        length = wire.nbytes
        if length > most or (length != most and not own.varies):
            what = f"the wire of {label} has {length} bytes, nbytes says {most}"
            broken(own, rule, what, "Count bytes in one place, and use it in _header's body_bytes")
        if wire.data.numel() != length or wire.data.dtype != torch.uint8:
            broken(own, rule, f"wire.data of {label} has {wire.data.numel()} bytes", "")


def same_key(subject: Subject) -> None:
    """The same key makes the same bytes, in whatever buffer."""
    for label, x in inputs(subject).items():
        wires = []
        for filling in (0xAA, 0x55):
            own = subject.fresh()
            room = own.nbytes(x.numel(), x.dtype)
            out = torch.full((room,), filling, dtype=torch.uint8, device=x.device)
            wires.append(own.encode(x, _KEY, out=out).data.clone())
        if not torch.equal(*wires):
            broken(
                subject.fresh(),
                "the same input and key make the same bytes",
                f"two wires of {label} differ",
                "Draw from the key (laconic.codecs.uniform), not from torch's generator, and write "
                "every byte of the body, padding too",
            )


def no_state(subject: Subject) -> None:
    """What was encoded before makes no difference: all that is remembered is the caller's."""
    own, x = subject.fresh(), subject.gaussian(1000)
    wires = []
    for step in range(2):
        wires.append(own.encode(x, _KEY).data.clone())
        own.encode(subject.gaussian(1000, seed=1 + step), replace(_KEY, step=step))
    if not torch.equal(*wires):
        broken(
            own,
            "a codec has no state",
            "the same input and key make other bytes after another encode",
            "Keep what is owed in residuals=, which the caller gives and saves",
        )


def other_keys(subject: Subject) -> None:
    """Draws differ between ranks, steps, tensors, phases and seeds."""
    own = subject.fresh()
    if not own.unbiased or subject.lossless:
        return
    x = subject.gaussian(4096)
    first = subject.round_trip(x, _KEY) - x
    others = {
        name: subject.round_trip(x, replace(_KEY, **{name: getattr(_KEY, name) + 1})) - x
        for name in ("rank", "step", "tensor", "phase", "seed")
    }
    if all(torch.equal(first, other) for other in others.values()):
        return  # nothing is drawn from the key: if that is wrong, so is the mean
    for name, other in others.items():
        related = float(first @ other / (first.norm() * other.norm()))
        if abs(related) > 0.2:  # 12 standard deviations of unrelated ones
            broken(
                own,
                "draws differ between ranks, steps, tensors, phases and seeds",
                f"errors with keys that differ in {name} have a correlation of {related:.2f}",
                "Errors that are alike do not average out: draw from the whole key, "
                "key.stream() or laconic.codecs.uniform",
            )


def bytes_alone(subject: Subject) -> None:
    """A receiver has the bytes, the key, shape and dtype, and nothing else."""
    for label, x in inputs(subject).items():
        own = subject.fresh()
        wire = own.encode(x, _KEY)
        here = subject.decode(own, wire, x)
        there = subject.decode(subject.fresh(), _parsed(wire.data.clone(), x), x)
        if not same_bits(here, there):
            broken(
                own,
                "a wire is decoded from its bytes, key, shape and dtype alone",
                f"the wire of {label} decodes otherwise where it was received",
                "Put what decoding needs into the body, or derive it from key and settings",
            )


def into_others(subject: Subject) -> None:
    """out=, add= and weight=, in all dtypes."""
    rule = "decode ends in out, times weight, and added with add=True"
    for dtype in DTYPES:
        x, base = subject.gaussian(1000), subject.gaussian(1000, seed=1).to(dtype)
        own = subject.fresh()
        wire = own.encode(x, _KEY)
        y = subject.decode(own, wire, x).double()
        for add, weight in ((False, 1.0), (False, 0.25), (True, 1.0), (True, -0.5)):
            out = base.clone()
            got = subject.decode(own, wire, x, out=out, add=add, weight=weight)
            label = f"out of {dtype}, add={add}, weight={weight}"
            if got.data_ptr() != out.data_ptr():
                broken(
                    own, rule, f"with {label} the result is another tensor", "Use into.put(value)"
                )
            want = weight * y + (base.double() if add else 0)
            room = max(_CLOSE, torch.finfo(dtype).eps) * (want.abs() + y.abs().max())
            if ((got.double() - want).abs() > room).any():
                broken(own, rule, f"with {label} it is not so", "Use into.put(value)")


def damaged(subject: Subject) -> None:
    """Wires that were cut, lengthened, or altered in their header raise WireError."""
    x = subject.gaussian(1000)
    own = subject.fresh()
    good = own.encode(x, _KEY).data.clone()
    more = good.new_zeros(16)
    wrong: dict[str, Tensor] = {
        "without its last byte": good[:-1],
        "cut in half": good[: good.numel() // 2].clone(),
        "of nothing": good[:0],
        "with a byte too many": torch.cat([good, more[:1]]),
        "with sixteen bytes too many": torch.cat([good, more]),
    }
    for place in range(HEADER_BYTES):
        bad = good.clone()
        bad[place] ^= 0x55
        wrong[f"with byte {place} of its header altered"] = bad
    header = own.encode(x, _KEY).header
    for name in ("codec", "bits", "levels", "block", "norm", "ratio"):
        forged = replace(header, **{name: getattr(header, name) ^ 1})
        wrong[f"of a codec with another {name}"] = torch.cat(
            [_head(forged, good), good[HEADER_BYTES:]]
        )
    longer = replace(header, body_bytes=header.body_bytes + 16)
    wrong["that says it is longer, and is"] = torch.cat(
        [_head(longer, good), good[HEADER_BYTES:], more]
    )
    for label, data in wrong.items():
        _refused(subject, own, label, lambda data=data: _parsed(data, x), x)
    other = subject.gaussian(1001)
    _refused(subject, own, "of another length", lambda: _parsed(good, other), other)
    half = x.half()
    _refused(subject, own, "of another dtype", lambda: _parsed(good, half), half)


def _refused(
    subject: Subject, own: Codec, label: str, parse: Callable[[], Wire], x: Tensor
) -> None:
    try:
        subject.decode(subject.fresh(), parse(), x)
    except WireError:
        return
    broken(
        own,
        "bytes that no encoder wrote raise WireError",
        f"a wire {label} was decoded",
        "Let Codec.encode and Codec.decode do their part: override _header, _write and _read only, "
        "and put all settings that change bytes into the header",
    )


def _head(header: Header, like: Tensor) -> Tensor:
    """With its check sum: a codec must look at what it says."""
    return torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8).to(like.device)


def _parsed(data: Tensor, x: Tensor) -> Wire:
    return Wire.parse(data, key=_KEY, shape=x.shape, dtype=x.dtype)


def segments(subject: Subject) -> None:
    """A codec with a step per tensor takes segments."""
    own = subject.fresh()
    if not own.segmented:
        return
    x, cut = subject.gaussian(1000), (1, 300, 699)
    wire = own.encode(x, _KEY, segments=cut)
    got = Wire.parse(wire.data.clone(), key=_KEY, shape=x.shape, dtype=x.dtype, segments=cut)
    if not same_bits(subject.decode(own, wire, x), subject.decode(subject.fresh(), got, x)):
        broken(own, "wires of segments decode where they arrive", f"of {cut} they do not", "")
    if wire.nbytes > own.nbytes(x.numel(), x.dtype, cut):
        broken(own, "nbytes counts segments", f"a wire of {cut} is longer", "")
