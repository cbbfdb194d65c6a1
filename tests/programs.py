"""Programs on ranks, as torchrun starts them; what they import is imported once for all.

Every rank is forked from one process, becomes the script, and ends as an interpreter does.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import Answers, Job

TESTS = Path(__file__).parent
PATHS = [str(one) for one in (TESTS.parent / "src", TESTS, TESTS / "integrations")]


_JOBS = """
import os, pickle, {module} as tests
from ranks import answered, member
rank = int(os.environ["RANK"])
with member(rank, int(os.environ["WORLD_SIZE"]), os.path.abspath("store")):
    told = dict(answered([getattr(tests, name) for name in {names}], rank))
with open(f"{{rank}}.answers", "wb") as file:
    pickle.dump(told, file)
"""


@dataclass(frozen=True, kw_only=True)
class End:
    """How one rank ended: all that it wrote, and seconds after the first rank had ended."""

    code: int
    text: str
    later_s: float


class Programs:
    """The process that every rank is forked from."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ends(
        self, script: str | Path, ranks: int = 0, *, folder: Path, times: int = 1, **env: str
    ) -> list[list[End]]:
        """The end of every rank, in each of the runs of a script: its text, or where it lies.

        No ranks: one process, which is told of none, as by `python script.py`.
        """
        if isinstance(script, str):
            path = folder / "script.py"
            path.write_text(script)
            script = path
        assert self.process.stdin is not None and self.process.stdout is not None
        runs = []
        for _ in range(times):
            request = {"script": str(script), "ranks": ranks, "env": env, "cwd": str(folder)}
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
            assert answer, "the process that ranks are forked from has ended"
            runs.append([End(**rank) for rank in json.loads(answer)])
        return runs

    def run(self, script: str | Path, ranks: int = 0, *, folder: Path, **env: str) -> list[str]:
        """What every rank wrote; all of them must end well."""
        (found,) = self.ends(script, ranks, folder=folder, times=1, **env)
        for one in found:
            assert one.code == 0, one.text
        return [one.text for one in found]

    def answers(self, jobs: Sequence[Job], ranks: int, folder: Path) -> Answers:
        """job(rank) of every job, functions of one module, on every rank, over Gloo."""
        names = [job.__name__ for job in jobs]
        self.run(_JOBS.format(module=jobs[0].__module__, names=names), ranks, folder=folder)
        files = [folder / f"{rank}.answers" for rank in range(ranks)]
        told = [pickle.loads(file.read_bytes()) for file in files]
        return {(rank, name): told[rank][name] for rank in range(ranks) for name in names}


@contextmanager
def started(*imports: str) -> Iterator[Programs]:
    """Ready to fork, with these modules imported; all that it has started ends with it."""
    path = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, __file__, *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    try:
        yield Programs(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def main(*imports: str) -> None:
    """Every rank is forked from here."""
    for name in imports:
        importlib.import_module(name)
    import warm  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    for line in sys.stdin:
        request = json.loads(line)
        port, outputs, pids = free_port(), [], {}
        for rank in range(request["ranks"] or 1):
            outputs.append(output := tempfile.TemporaryFile("w+"))  # noqa: SIM115
            if (pid := os.fork()) == 0:
                _be(request, rank, port, output.fileno())
                return  # and the interpreter ends
            pids[pid] = rank
        print(json.dumps(_reports(pids, outputs)), flush=True)


def free_port() -> int:
    """Nobody else is given it for a minute, as its last connection has just been closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        client = socket.create_connection(address)
        server.accept()[0].close()  # first, so that it is the server's end that lingers
        client.close()
    return address[1]


def _be(request: dict[str, Any], rank: int, port: int, output: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request["env"])
    if ranks := request["ranks"]:
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in here.items()})
    torch.seed()  # ranks that were started one by one would not draw the same
    os.chdir(request["cwd"])
    sys.argv = [request["script"]]
    sys.path[0] = request["cwd"]
    runpy.run_path(request["script"], run_name="__main__")


def _reports(pids: dict[int, int], outputs: list[Any]) -> list[dict[str, Any]]:
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
    return [vars(told[rank]) for rank in sorted(told)]


if __name__ == "__main__":
    main(*sys.argv[1:])
