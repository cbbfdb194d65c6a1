"""Check sums of messages, of integers that are added, and of weights, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def words_check(words: Tensor, salt: int) -> Tensor:
    """See `Kernels`.

        check = Σ_i fmix(w_i xor (salt + i·0x9e3779b1)) mod 2^32

    with fmix as in `kernels/_coding.py`: a bijection, so that what changes one word, as any single
    bit does, is always seen; anything else is missed with probability 2^-32. Nothing waits for
    the device.
    """
    return _terms(words, salt).sum() & _MASK


def message_check(data: Tensor, salt: int) -> Tensor:
    """See `Kernels`. The result is what word 3 holds."""
    terms = _terms(data.view(torch.int32), salt)
    return (terms.sum() - terms[3:4].sum()) & _MASK


def payload_check(payload: Tensor, salt: int) -> Tensor:
    """See `Kernels`.

        check(q) = Σ_k w_k·q_k mod 2^32,   w_k = (salt + k·0x9e3779b2) | 1

    so that check(Σ_i q_i) = Σ_i check(q_i) as long as no integer overflows. Weights are odd: one
    integer that is wrong by less than 2^32 is always seen.
    """
    weight = (salt + torch.arange(payload.numel(), device=payload.device) * 0x9E3779B2 & _MASK) | 1
    return (payload.to(torch.int64) * weight & _MASK).sum() & _MASK


def _terms(words: Tensor, salt: int) -> Tensor:
    place = torch.arange(words.numel(), device=words.device)
    return _fmix((words.to(torch.int64) & _MASK) ^ (salt + place * 0x9E3779B1 & _MASK))


def _fmix(h: Tensor) -> Tensor:
    h = (h ^ h >> 16) * 0x7FEB352D & _MASK
    h = (h ^ h >> 15) * 0x846CA68B & _MASK
    return h ^ h >> 16
