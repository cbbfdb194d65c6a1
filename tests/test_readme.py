"""The README's script, as a newcomer copies it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from laconic import lab

README = Path(__file__).parent.parent / "README.md"


def sides(diff: str) -> dict[str, str]:
    """The script before and after."""
    lines = diff.splitlines()
    return {
        side: "\n".join(line[1:] for line in lines if line[:1] != gone)
        for side, gone in (("before", "+"), ("after", "-"))
    }


@pytest.mark.parametrize("side", ["before", "after"])
def test_its_script_works_without_the_line_and_with_it(side: str, tmp_path: Path) -> None:
    diff = re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)[0]
    script = sides(diff)[side]
    if side == "before":  # torch's own threads may abort a program that ends without laconic
        script += "\nimport os\nos._exit(0)"
    (tmp_path / "train.py").write_text(script)
    with lab.Loopback(hosts=2) as net:
        run = net.start([sys.executable, "train.py"], cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
        outputs = run.wait(timeout_s=100)
    for one in outputs:
        told = re.match(r"Stats\(ratio=([0-9.]+), steps=100, ", one.stdout)
        assert (told is not None) == (side == "after")
        assert told is None or 10 < float(told[1]) < 12  # the README says 10.7
