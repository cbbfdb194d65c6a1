"""Check any codec for every rule of the codec contract."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.testing import _chance, _rules, _together
from laconic.testing._subject import RuleError, Subject

_RULES: tuple[Callable[[Subject], None], ...] = (
    _rules.declares,
    _rules.shapes_and_dtypes,
    _rules.has_a_text,
    _rules.zeros,
    _rules.not_finite,
    _rules.sizes,
    _rules.same_key,
    _rules.no_state,
    _rules.other_keys,
    _rules.bytes_alone,
    _rules.into_others,
    _rules.damaged,
    _rules.segments,
    _chance.unbiased,
    _chance.variance,
    _together.sums,
    _together.residuals,
)
_IN_GROUPS = (_together.exchange, _together.compressed)


def check_codec(
    codec_or_factory: str | Codec | Callable[[], Codec],
    *,
    side: Callable[[Tensor], Tensor] | None = None,
    draws: int = 256,
    device: str | torch.device = "cpu",
    exchange: bool = True,
) -> None:
    """AssertionError, naming the rule that was broken, by what, and how to fix it; else nothing.

    Takes a codec, its spec string, or a function that makes one. Rules are those of
    `laconic.Codec`: shapes and dtypes, zeros, values that are not finite, lengths, keys, out= and
    add=, damaged wires, and for those that declare it the mean, the bound of the variance, sums and
    residuals. Then (`exchange`) it goes through its exchange and `lc.compress`: with the process
    group that there is, if all of its ranks call, or alone.

    `draws` are the keys that means and variances are taken over. `side` makes, of x, what the
    receiver knows of it, for codecs that decode with side information.

    >>> from laconic.testing import check_codec
    >>> check_codec("dqsg:bits=4", draws=64, exchange=False)
    """
    make = codec_or_factory if callable(codec_or_factory) else lambda: codec(codec_or_factory)
    subject = Subject(make=make, side=side, device=torch.device(device), draws=draws)
    own = make()
    if not isinstance(own, Codec):
        raise RuleError(f"{own!r} is no codec: make its class a subclass of laconic.Codec")
    for rule in _RULES:
        _kept(rule, subject)
    if exchange and dist.is_available():
        with _together.ranks():
            for rule in _IN_GROUPS:
                _kept(rule, subject)


def _kept(rule: Callable[[Subject], None], subject: Subject) -> None:
    """Run a rule; errors that the codec raises are reported with it."""
    try:
        rule(subject)
    except RuleError:
        raise
    except Exception as error:
        what = (rule.__doc__ or rule.__name__).split("\n")[0]
        raise RuleError(
            f"{subject.make()} fails where this is checked: {what} It raised "
            f"{type(error).__name__}: {error}"
        ) from error
