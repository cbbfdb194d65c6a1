"""What is published: the wheel, the sources, their metadata, and what builds and tests them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
from helpers import PATIENCE_S
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from wheels import versions

import laconic as lc

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*words: object, folder: Path, python_path: Path | None = None) -> str:
    """What Python prints."""
    hidden = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**hidden, **({"PYTHONPATH": str(python_path)} if python_path else {})}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, and the wheel that is made from them alone."""
    if missing := [name for name in ("build", "hatchling") if find_spec(name) is None]:
        pytest.skip(f"a wheel needs {' and '.join(missing)}: pip install 'laconic[test]'")
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> ZipFile:
    [found] = built.glob("*.whl")
    assert found.name == f"laconic-{lc.__version__}-py3-none-any.whl"
    return ZipFile(found)


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder.parent))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_is_the_package_and_nothing_else(wheel: ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == files(ROOT / "src" / "laconic")
    for name in (
        "py.typed",
        "cli/names.json",
        *(f"report/{asset}" for asset in ("template.html", "style.css", "report.js")),
        *(f"kernels/_{form}/linear.py" for form in ("reference", "numba", "triton")),
    ):
        assert f"laconic/{name}" in names


def test_the_wheel_says_what_it_is(wheel: ZipFile) -> None:
    info = f"laconic-{lc.__version__}.dist-info"
    told = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {lc.__version__}\n" in told
    assert "\nLicense-Expression: Apache-2.0\n" in told
    assert set(re.findall("^Provides-Extra: (.+)$", told, re.MULTILINE)) == set(
        PROJECT["optional-dependencies"]
    )
    assert "laconic = laconic.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_sources_can_be_tested(built: Path) -> None:
    [found] = built.glob("*.tar.gz")
    top = f"laconic-{lc.__version__}"
    with tarfile.open(found) as sources:
        names = {name.removeprefix(f"{top}/") for name in sources.getnames()}
    for name in ("Makefile", "constraints.txt", "tests/conftest.py", "benchmarks/cpu.py"):
        assert name in names
    assert not [name for name in names if name.startswith((".venv", "build/", "dist/", ".git/"))]
    assert not [name for name in names if "__pycache__" in name]


def test_an_installed_wheel_works(built: Path, tmp_path: Path) -> None:
    [found], target = built.glob("*.whl"), tmp_path / "site"
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run("-m", "pip", "install", *options, "--target", target, found, folder=tmp_path)
    code = "import laconic; laconic.compress; print(laconic.__file__)"
    assert run("-c", code, folder=tmp_path, python_path=target).startswith(str(target))
    pytest.importorskip("typer")
    for words in ([], ["race"], ["plan"]):
        program = target / "bin" / "laconic"
        told = run(program, *words, "--help", folder=tmp_path, python_path=target)
        assert " ".join(["Usage: laconic", *words]) in told


def test_every_dependency_has_a_pin() -> None:
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    extras = PROJECT["optional-dependencies"].values()
    asked = [Requirement(text) for texts in (PROJECT["dependencies"], *extras) for text in texts]
    assert {canonicalize_name(one.name) for one in asked} - {"laconic"} <= pinned


def test_there_is_one_version() -> None:
    assert f"\nversion: {lc.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased" or sections[0] == lc.__version__


def test_continuous_integration_runs_what_developers_run() -> None:
    yaml = pytest.importorskip("yaml")
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"push", "pull_request"} <= set(flow[True])  # YAML 1.1 reads `on` as true
    [job] = flow["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == versions()
    steps = job["steps"]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    assert all(re.search("@v[0-9]+$", step["uses"]) for step in steps if "uses" in step)
    commands = "\n".join(step.get("run", "") for step in steps)
    assert ".ci/run" in commands
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
