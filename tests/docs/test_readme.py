"""The README's script, as a newcomer copies it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import Programs

README = Path(__file__).parents[2] / "README.md"


def sides(diff: str) -> dict[str, str]:
    """The script before and after."""
    lines = diff.splitlines()
    return {
        side: "\n".join(line[1:] for line in lines if line[:1] != gone)
        for side, gone in (("before", "+"), ("after", "-"))
    }


@pytest.mark.parametrize("side", ["before", "after"])
def test_its_script_works_without_the_line_and_with_it(
    programs: Programs, side: str, tmp_path: Path
) -> None:
    diff = re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)[0]
    script = sides(diff)[side]
    if side == "before":  # torch's own threads may abort a program that ends without laconic
        script += "\nimport os\nos._exit(0)"
    for output in programs.run(script, 2, folder=tmp_path):
        told = re.search(r"Stats\(ratio=([0-9.]+), steps=100, ", output)
        assert (told is not None) == (side == "after")
        assert told is None or 10 < float(told[1]) < 12  # the README says 10.7
