"""Files: written atomically, and never over other programs' files; JSON that is checked.

A file is written beside its target, under a random name (so that no link can be planted there),
and renamed. A symbolic link is followed: the file that it names is replaced, not
the link. What is no file (/dev/stdout, a pipe) is written to directly.

A file that exists is replaced if it is empty, or if laconic made one of that kind: `Kind` says by
what it is known. Any other is replaced with `force` only.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO, Any

from laconic.errors import ConfigError

GENERATOR = '<meta name="generator" content="laconic'  # in the head of every page
_HEAD_BYTES = 1 << 16  # of a page: GENERATOR is among them
_MOST_BYTES = 1 << 26  # of JSON: more than laconic ever writes


class Kind(Enum):
    """What laconic writes. JSON is known by "laconic", "format" and the key that is the value."""

    PAGE = ""
    PROBE = "cluster"
    RACE = "lanes"


def check_target(path: str | Path, kind: Kind, *, force: bool = False) -> None:
    """Before long work: ConfigError if `write_made` would fail after it."""
    path = Path(path)
    try:
        if not _is_stream(path):
            with _beside(_checked(path, kind, force)):
                pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def write_made(path: str | Path, text: str, kind: Kind, *, force: bool = False) -> None:
    """Write a file of that kind, which holds what it is known by."""
    path = Path(path)
    if not _is_stream(path):
        _checked(path, kind, force)
    write_whole(path, text)


def write_whole(path: str | Path, text: str) -> None:
    """Replace what is there; until then readers find the former content.

    If this fails, no partial file is left, and the OSError names `path`.
    """
    path = Path(path)
    if not _is_stream(path):
        with replacing(path) as stream:
            stream.write(text.encode())
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """What is written in here becomes the file at the end, as in `write_whole`; else nothing.

    The stream can be read, too.
    """
    real = Path(os.path.realpath(path))
    try:
        with _beside(real) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            with suppress(FileNotFoundError):
                os.fchmod(stream.fileno(), stat.S_IMODE(real.stat().st_mode) & 0o777)
            os.replace(stream.name, real)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_json(path: str | Path) -> Any:
    """OSError, or ValueError for what is not unambiguous JSON."""
    with Path(path).open("rb") as stream:
        data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it says {twice[:40]!r} twice")
    return found


def _is_stream(path: Path) -> bool:
    """Something that exists and can be written to, but not replaced."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _checked(path: Path, kind: Kind, force: bool) -> Path:
    """The file that will be made or replaced, links followed."""
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir():
        folder = real.parent if path.is_symlink() else path.parent
        raise ConfigError(f"{path} cannot be written: there is no folder {folder}, make it first")
    if real.is_dir():
        raise ConfigError(f"{path} is a folder: name a file in it")
    if not real.exists():
        return real
    if not os.access(real, os.W_OK):
        raise PermissionError(0, "it is read-only", str(path))
    if not force and real.stat().st_size and not _is_made(real, kind):
        what = "a page" if kind is Kind.PAGE else f"a {kind.name.lower()}"
        raise ConfigError(
            f"{path} exists and is not {what} that laconic wrote: give another name, or --force "
            "(in Python, force=True) to replace it"
        )
    return real


def _is_made(path: Path, kind: Kind) -> bool:
    """Whether laconic wrote it, as far as its text tells."""
    if kind is Kind.PAGE:
        with path.open("rb") as stream:
            return GENERATOR.encode() in stream.read(_HEAD_BYTES)
    try:
        found = read_json(path)
    except ValueError:
        return False
    return isinstance(found, dict) and {"laconic", "format", kind.value} <= found.keys()


@contextmanager
def _beside(real: Path) -> Iterator[IO[bytes]]:
    """A new file in the same folder, with the rights that new files get; gone afterwards."""
    name = real.parent / f".laconic-{secrets.token_hex(8)}.tmp"
    with name.open("x+b") as stream:
        try:
            yield stream
        finally:
            with suppress(FileNotFoundError):  # it has been renamed
                name.unlink()
