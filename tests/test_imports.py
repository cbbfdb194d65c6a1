"""Imports point one way, and importing laconic does nothing but define names."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import PATIENCE_S

import laconic

PACKAGE = Path(laconic.__file__).parent

# each layer imports from its own row and from rows above only
LAYERS = (
    (
        "errors",
        "_key",
        "_scratch",
        "_settings",
        "_spec",
        "_version",
        "_units",
        "_host",
        "_files",
        "_records",
        "_progress",
    ),
    ("kernels",),
    ("_wire",),
    ("coders",),
    ("codecs",),
    ("_cost",),
    ("comm",),
    ("sharding",),
    ("exchanges",),
    ("server",),
    ("schedules",),
    ("integrations",),
    ("planner", "lab", "bench", "testing", "doctor"),
    ("race",),
    ("report",),
    ("cli", "__main__", "_compress"),
)
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}


def imported(tree: ast.AST, module: str) -> Iterator[str]:
    """Full names of what a module imports, anywhere in it; `from . import x` is made absolute."""
    package = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            # the names may themselves be modules: laconic.codecs in `from laconic import codecs`
            yield from (f"{start}.{alias.name}" for alias in node.names)


def violations(source: str, module: str) -> list[str]:
    """What `module` imports although it is in a later layer."""
    own = RANK[module.split(".")[1]]
    wrong = []
    for name in imported(ast.parse(source), module):
        parts = name.split(".")
        if parts[0] != "laconic":
            continue
        # a name of the package itself (`from laconic import QSGD`) comes from the top
        rank = RANK.get(parts[1], len(LAYERS) - 1) if len(parts) > 1 else len(LAYERS) - 1
        if rank > own:
            wrong.append(f"{module} imports {name}")
    return wrong


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts)


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_every_module_has_a_layer() -> None:
    tops = {module_name(path).split(".")[1] for path in SOURCES}
    assert tops <= set(RANK), f"say in LAYERS where {sorted(tops - set(RANK))} belong"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    assert not violations(path.read_text(), module_name(path))


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from laconic.codecs import QSGD", "laconic.kernels._numba.linear"),
        ("import laconic.codecs._base", "laconic.kernels._layout"),
        ("from laconic import codecs", "laconic._wire"),
        ("from ..codecs import QSGD", "laconic.kernels.__init__"),
        ("from ...codecs import QSGD", "laconic.kernels._numba.linear"),
        ("def f():\n    from laconic.exchanges import ring", "laconic.codecs._dqsg"),
        ("from laconic import QSGD", "laconic.codecs._dqsg"),
        ("from laconic.lab import Lab", "laconic.integrations._ddp"),
        ("import laconic", "laconic.codecs._dqsg"),
        ("from laconic.kernels import backend", "laconic._key"),
    ],
)
def test_a_wrong_import_is_seen(source: str, module: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from laconic.kernels import backend", "laconic.codecs._base"),
        ("from laconic._key import Key\nfrom laconic import errors", "laconic._wire"),
        ("from . import _layout\nfrom .._key import Key", "laconic.kernels.__init__"),
        ("import numpy\nfrom torch import Tensor", "laconic._key"),
        ("from laconic import QSGD", "laconic.cli"),
    ],
)
def test_a_right_import_is_allowed(source: str, module: str) -> None:
    assert not violations(source, module)


def test_only_schedules_with_servers_import_the_server() -> None:
    users = {"_async", "_flat_optimizer", "_master", "_ssd"}
    for path in (PACKAGE / "schedules").glob("*.py"):
        names = imported(ast.parse(path.read_text()), module_name(path))
        uses = any(name.startswith("laconic.server") for name in names)
        assert not uses or path.stem in users, path


def run(code: str) -> str:
    """Output and complaints of a fresh interpreter, warnings being errors."""
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# `import laconic` alone imports nothing: names are imported when they are used
EVERYTHING = "from laconic import *\n"


@pytest.fixture(scope="module")
def modules() -> set[str]:
    """What all names of laconic import."""
    return set(run(f"{EVERYTHING}import sys; print(*sys.modules)").split())


def test_importing_laconic_imports_neither_numba_nor_triton(modules: set[str]) -> None:
    """They take seconds; kernels load them when first used."""
    assert "laconic.kernels" in modules and not modules & {"numba", "triton", "llvmlite"}


def test_importing_laconic_does_not_import_the_lab(modules: set[str]) -> None:
    assert "laconic.planner" in modules and "laconic.lab" not in modules


def test_making_a_codec_imports_neither_numba_nor_triton() -> None:
    code = (
        "import laconic as lc, sys; lc.codec('dqsg:bits=4').nbytes(10); str(lc.codec('ndqsg')); "
        "lc.Key().stream(); print({'numba', 'triton'} & set(sys.modules))"
    )
    assert run(code).strip() == "set()"


def test_importing_laconic_is_silent_and_changes_nothing() -> None:
    code = f"""
import os, random, threading, numpy, torch, torch.distributed, torch.optim
def state():
    return (
        dict(os.environ), threading.active_count(), torch.get_num_threads(),
        torch.get_default_dtype(), random.getstate(), torch.get_rng_state().tolist(),
        str(numpy.random.get_state()), numpy.geterr(),
    )
before = state()
{EVERYTHING}
assert "laconic.integrations" in __import__("sys").modules
assert state() == before
"""
    assert run(code) == ""


def test_public_names_exist_and_are_listed() -> None:
    assert sorted(laconic.__all__) == sorted(set(laconic.__all__))
    for name in laconic.__all__:
        assert hasattr(laconic, name)


def test_library_code_does_not_print() -> None:
    """The command line may; everything below it may not."""
    for path in SOURCES:
        top = module_name(path).split(".")[1]
        if RANK[top] == len(LAYERS) - 1:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            assert not (isinstance(called, ast.Name) and called.id == "print"), path
