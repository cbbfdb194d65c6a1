"""Coders: integers to bytes and back to the same integers, losslessly.

    fixed    bit planes, each chunk as wide as its largest integer
    elias    QSGD's code: gaps, signs and levels in Elias omega, or every level, if that is shorter
    bitmap   which values are not zero, then signs, then levels in unary, plane by plane
    rans     an entropy coder, given each group's spread and the dither

All work in independent chunks with an offset table and a check sum each (docs/wire.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import torch
from torch import Tensor

from laconic._key import Key, Stream
from laconic.errors import ConfigError, WireError
from laconic.kernels import Coding, backend
from laconic.kernels._coding import CHUNK, MAX_MAGNITUDE, Kind, Section, most_words, table

__all__ = ["Coder", "coder", "coders"]


@dataclass(frozen=True)
class Coder:
    """Integers of up to 16 bits ⇄ bytes.

    >>> import torch
    >>> q = torch.tensor([0, 0, -3, 1], dtype=torch.int16)
    >>> coder("elias").decode(coder("elias").encode(q), 4).tolist()
    [0, 0, -3, 1]
    """

    name: str
    kind: Kind
    form: int = 0
    does: str = field(default="", compare=False)  # in a line, for lists

    @property
    def id(self) -> int:
        """The header's number; 0 there means that nothing is coded."""
        return self.kind + 1

    def room(self, parts: tuple[int, ...], width: int = 15) -> int:
        """Bytes that never suffice less: of segments of integers of `width` bits and a sign."""
        return 4 * (2 * table(parts).chunks + most_words(parts, width))

    def undithered(self) -> Coder:
        """The coder for integers that were not made with the key's dither."""
        return replace(self, form=1) if self.kind is Kind.RANS else self

    def encode(self, q: Tensor, key: Key | None = None) -> Tensor:
        """Code int8 or int16 integers from -32767 to 32767."""
        if q.dtype not in (torch.int8, torch.int16):
            raise TypeError(f"coders take int8 or int16 integers, not {q.dtype}")
        q = q.contiguous().view(-1)
        if q.dtype == torch.int16 and q.numel() and int(q.min()) < -MAX_MAGNITUDE:
            raise ValueError(f"coders take integers from {-MAX_MAGNITUDE} to {MAX_MAGNITUDE}")
        parts = (q.numel(),) if q.numel() else ()
        data = torch.empty(self.room(parts), dtype=torch.uint8, device=q.device)
        if not parts:
            return data
        section = Section.of(data, table(parts).chunks)
        self.undithered().write(q, section, (key or Key()).stream())
        return data[: 8 * len(section.ends) + 4 * (int(section.ends[-1]) & 0xFFFFFFFF)]

    def decode(
        self,
        data: Tensor,
        numel: int,
        key: Key | None = None,
        dtype: torch.dtype = torch.int16,
        limit: int | None = None,
    ) -> Tensor:
        """The `numel` integers, within ±limit; WireError if `data` is not what encode made."""
        if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
            raise WireError("coded integers are a contiguous uint8 tensor of one dimension")
        if dtype not in (torch.int8, torch.int16):
            raise TypeError(f"coders make int8 or int16 integers, not {dtype}")
        # every chunk has a word and two table entries: nothing is allocated for a false claim
        chunks = -(-numel // CHUNK)
        if data.numel() % 4 or data.numel() < 12 * chunks or (not numel and data.numel()):
            raise WireError(f"{data.numel()} bytes cannot be {numel} coded integers")
        q = torch.empty(numel, dtype=dtype, device=data.device)
        if not numel:
            return q
        if data.storage_offset() % 4:
            data = data.clone()
        section = Section.of(data, chunks)
        if int(section.ends[-1]) & 0xFFFFFFFF != len(section.payload):
            raise WireError("the coded integers are shorter or longer than their table says")
        most = torch.iinfo(dtype).max
        good = self.read(section, q, (key or Key()).stream(), most if limit is None else limit)
        if good is not None and not bool(torch.isfinite(good)):
            raise WireError("a chunk is damaged, or not what an encoder writes")
        return q

    def write(self, q: Tensor, section: Section, stream: Stream) -> None:
        """Code into a section that has room."""
        backend(q.device).encode_integers(q, section, Coding(self.kind, stream, self.form))

    def read(self, section: Section, q: Tensor, stream: Stream, limit: int) -> Tensor | None:
        """Decode a section.

        Damage raises WireError, or where that would mean waiting for a device shows in the result:
        1, or NaN if any chunk is bad.
        """
        return backend(q.device).decode_integers(section, q, Coding(self.kind, stream), limit=limit)


_ELIAS, _CPU = "QSGD's Elias omega code", "; CPUs only"
_FIXED = "packed codes of `bits` each; for ecdq, bit planes as wide as each chunk needs"
_BITMAP = "a bitmap of nonzero values, signs, unary levels; the default of ecdq"
_RANS = "an entropy coder, given the spread of every 128 values and the dither"
_BY_NAME = {
    item.name: item
    for item in (
        Coder("fixed", Kind.FIXED, 0, _FIXED),
        Coder(
            "elias", Kind.ELIAS_SPARSE, 0, f"{_ELIAS}, sparse or dense, whichever is shorter{_CPU}"
        ),
        Coder("elias-sparse", Kind.ELIAS_SPARSE, 1, f"{_ELIAS}, always the sparse form{_CPU}"),
        Coder("elias-dense", Kind.ELIAS_SPARSE, 2, f"{_ELIAS}, always the dense form{_CPU}"),
        Coder("bitmap", Kind.BITMAP, 0, _BITMAP),
        Coder("rans", Kind.RANS, 0, f"{_RANS}{_CPU}"),
    )
}


def coder(name: str) -> Coder:
    """The coder of that name."""
    found = _BY_NAME.get(name) if isinstance(name, str) else None
    if found is None:
        close = get_close_matches(str(name), _BY_NAME, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"no coder is called {name!r}; {hint}there are {', '.join(_BY_NAME)}")
    return found


def coders() -> list[str]:
    """The names that `coder` accepts."""
    return list(_BY_NAME)
