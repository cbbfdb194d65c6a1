"""Whether every pin of constraints.txt has a wheel for every Python that pyproject.toml names.

`python tests/wheels.py` asks the package index, and installs nothing. It takes a few minutes: pip
downloads the wheels of packages whose metadata the index does not have apart.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
CLASSIFIER = "Programming Language :: Python :: 3."
# what Linux on x86-64 accepts today, as pip must be told for another Python
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")
PATIENCE_S = 900


def versions() -> list[str]:
    """3.11, 3.12, .."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [one for one in project["classifiers"] if one.startswith(CLASSIFIER)]
    return [one.rpartition(" ")[2] for one in found]


def pins(version: str) -> Iterator[str]:
    """Those whose marker says so: pip itself evaluates markers for the Python that it runs on."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        python = {"python_version": version, "python_full_version": f"{version}.0"}
        if pin.marker is None or pin.marker.evaluate(python):
            yield f"{pin.name}{pin.specifier}"


def missing(version: str, folder: str) -> str:
    """What pip complains of, or nothing. It takes 3.11 for 3.11.0."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--target", folder, "--python-version", version]
    command += [f"--platform={name}" for name in PLATFORMS]
    done = subprocess.run(
        [*command, *pins(version)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    return "\n".join(re.findall("^ERROR:.*", done.stderr, re.MULTILINE)) if done.returncode else ""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        found = {version: missing(version, empty) for version in versions()}
    for version, told in found.items():
        print(version, told or "all wheels")
    sys.exit(any(found.values()))
