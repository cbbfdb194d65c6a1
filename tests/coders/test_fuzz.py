"""A short run of `make fuzz`."""

from __future__ import annotations

import pytest

fuzz = pytest.importorskip("fuzz", reason="needs mprotect, which this system does not have")


@pytest.mark.parametrize("name", fuzz.coders())
def test_hostile_streams_end_in_wireerror_or_in_what_was_coded(name: str) -> None:
    for _ in fuzz.rounds(name, count=3000, seed=7):
        pass


def test_the_guard_pages_are_where_they_should_be() -> None:
    """Not by touching them: that would end the process."""
    guarded = fuzz.Guarded(100, fuzz.np.uint32)
    array = guarded.array(100)
    start = guarded.bytes.ctypes.data
    assert (array.ctypes.data + array.nbytes) == start + fuzz.PAGE + guarded.room
    assert guarded.array(100, at_end=False).ctypes.data == start + fuzz.PAGE
    array[:] = 5
    assert (array == 5).all()
