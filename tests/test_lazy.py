"""`import laconic` waits for nothing, and still has all of its names."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import laconic as lc


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def declared() -> dict[str, str]:
    """Names that a type checker and an editor see, and the modules that they are from."""
    top = ast.parse(Path(lc.__file__).read_text()).body
    hidden = [node for outer in top if isinstance(outer, ast.If) for node in outer.body]
    found = {}
    for node in (*top, *hidden):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laconic"):
            for alias in node.names:
                found[alias.name] = str(node.module)
    return found


def test_importing_laconic_does_not_import_torch() -> None:
    assert run("import laconic, sys; print('torch' in sys.modules)") == "False"


def test_every_public_name_is_declared_for_type_checkers() -> None:
    own = {"compress"}  # defined there
    hidden = {"Auto", "Chooser"}  # types of its arguments
    assert set(lc.__all__) - own == set(declared()) - own - hidden


@pytest.mark.parametrize("name", sorted(set(lc.__all__) - {"compress", "server"}))
def test_a_name_is_what_its_declaration_says(name: str) -> None:
    assert getattr(lc, name) is getattr(import_module(declared()[name]), name)


def test_functions_are_not_hidden_by_packages_of_their_names() -> None:
    code = """
import laconic.codecs, laconic.exchanges
from laconic.codecs import DQSG
import laconic as lc
print(lc.codecs()[0], lc.exchanges()[0], lc.DQSG is DQSG, lc.server.__name__)
"""
    assert run(code) == "none allreduce True laconic.server"


def test_all_names_are_listed_and_imported_by_a_star() -> None:
    code = "import laconic\nprint(set(laconic.__all__) <= set(dir(laconic)))"
    assert run(code) == "True"
    assert run("from laconic import *\nprint(SSD.__name__, callable(codecs))") == "SSD True"


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'laconic' has no attribute 'compres'"):
        lc.compres  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    assert not hasattr(lc, "torch")
