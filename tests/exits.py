"""Scripts on ranks whose interpreters end as a program's does; torch is imported once for all.

`python tests/exits.py script.py RANKS TIMES` prints a line of JSON for every run.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class End:
    """How one rank ended: all that it wrote, and seconds after the first rank had ended."""

    code: int
    text: str
    later_s: float


def ends(script: str | Path, ranks: int, *, times: int = 1, folder: Path) -> list[list[End]]:
    """The end of every rank, in each of the runs of a script: its text, or where it lies."""
    if isinstance(script, str):
        path = folder / "script.py"
        path.write_text(script)
        script = path
    found = subprocess.run(
        [sys.executable, __file__, str(script), str(ranks), str(times)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
    )
    runs = [json.loads(line) for line in found.stdout.splitlines()]
    return [[End(**rank) for rank in run] for run in runs]


def main(script: str, ranks: int, times: int) -> None:
    """Every rank is forked from here."""
    import warm  # noqa: F401

    sys.path[0] = str(Path(script).parent)
    for _ in range(times):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        outputs = [tempfile.TemporaryFile("w+") for _ in range(ranks)]  # noqa: SIM115
        pids = {}
        for rank, output in enumerate(outputs):
            if (pid := os.fork()) == 0:
                _be(script, rank, ranks, port, output.fileno())
                return  # and the interpreter ends
            pids[pid] = rank
        _report(pids, outputs)


def _be(script: str, rank: int, ranks: int, port: int, output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def _report(pids: dict[int, int], outputs: list) -> None:
    told: dict[int, End] = {}
    first = None
    while len(told) < len(pids):
        pid, status = os.wait()
        first = first or time.monotonic()
        output = outputs[pids[pid]]
        output.seek(0)
        code, later = os.waitstatus_to_exitcode(status), time.monotonic() - first
        told[pids[pid]] = End(code=code, text=output.read(), later_s=later)
        output.close()
    print(json.dumps([vars(told[rank]) for rank in sorted(told)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
