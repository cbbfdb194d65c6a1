"""`import laconic` waits for nothing, and still has all of its names."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from helpers import PATIENCE_S

import laconic as lc

LISTINGS = ("codecs", "exchanges")


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def declared() -> dict[str, str]:
    """Names that a type checker and an editor see, and the modules that they are from."""
    top = ast.parse(Path(lc.__file__).read_text()).body
    hidden = [node for outer in top if isinstance(outer, ast.If) for node in outer.body]
    found = {}
    for node in (*top, *hidden):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laconic"):
            every = [alias.name for alias in node.names]
            if every == ["*"]:
                module = import_module(str(node.module))
                every = getattr(module, "__all__", vars(module))
            found |= dict.fromkeys(every, str(node.module))
    return found


def test_importing_laconic_does_not_import_torch() -> None:
    assert run("import laconic, sys; print('torch' in sys.modules)") == "False"


def test_every_public_name_is_declared_for_type_checkers() -> None:
    assert set(lc.__all__) <= set(declared())


@pytest.mark.parametrize("name", sorted(set(lc.__all__) - {"server", *LISTINGS}))
def test_a_name_is_what_its_declaration_says(name: str) -> None:
    assert getattr(lc, name) is getattr(import_module(declared()[name]), name)


@pytest.mark.parametrize("name", LISTINGS)
def test_a_package_lists_its_names_when_it_is_called(name: str) -> None:
    """`import laconic.codecs as c` gives the package, and `lc.codecs()` goes on to work."""
    code = f"""
import laconic.{name} as package
from laconic import {name} as same
import laconic as lc
print(package is same is lc.{name}, package.__file__.endswith("__init__.py"))
print(package() == lc.{name}() == package.{name}() and len(package()) > 3)
"""
    assert run(code) == "True True\nTrue"
    assert run(f"import laconic as lc\nprint(len(lc.{name}()) > 3)") == "True"


def test_all_names_are_listed_and_imported_by_a_star() -> None:
    code = "import laconic\nprint(set(laconic.__all__) <= set(dir(laconic)))"
    assert run(code) == "True"
    assert run("from laconic import *\nprint(SSD.__name__, callable(codecs))") == "SSD True"


def test_functions_that_use_laconic_are_sent_to_other_processes() -> None:
    """As Ray and Dask do: functions of a script with the modules that they use."""
    code = """
import pickle
import laconic as lc, laconic.codecs, laconic.exchanges
for module in (lc, lc.codecs, lc.exchanges):
    assert pickle.loads(pickle.dumps(module)) is module
try:
    import cloudpickle
except ImportError:
    cloudpickle = None
def names():
    return lc.codecs()
print(not cloudpickle or pickle.loads(cloudpickle.dumps(names))() == lc.codecs())
"""
    assert run(code) == "True"


# Types in public signatures are public


# made and passed on by laconic itself: nobody else calls what takes them
INTERNAL = {"StepTimer", "Preconditioner", "BucketLayout", "CodecGroup", "CommLane"}
PUBLIC = (
    *("codecs", "coders", "exchanges", "schedules", "server", "integrations", "planner"),
    *("lab", "race", "report", "bench", "testing", "doctor"),
)


def exported() -> set[str]:
    """Classes that `laconic` or a public subpackage exports, by their full names."""
    modules = [lc, *(import_module(f"laconic.{name}") for name in PUBLIC)]
    found = [getattr(module, name) for module in modules for name in module.__all__]
    return {f"{one.__module__}.{one.__qualname__}" for one in found if isinstance(one, type)}


def functions(value: Any) -> Iterator[Any]:
    """A function; a class, for its fields, and its public methods and properties."""
    kinds = value.__mro__ if isinstance(value, type) else ()
    yield from () if kinds else (value,)
    for kind in (kind for kind in kinds if kind.__module__.startswith("laconic")):
        yield kind
        for name, member in vars(kind).items():
            member = member.fget if isinstance(member, property) else member
            member = getattr(member, "__func__", member)
            own = name == "__init__" and not is_dataclass(kind)  # theirs are made of the fields
            if inspect.isfunction(member) and (own or not name.startswith("_")):
                yield member


def annotated(value: Any) -> Iterator[type]:
    """The classes of laconic in its annotations."""
    names = {}
    module = sys.modules[value.__module__]
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec("\n".join(map(ast.unparse, node.body)), names)  # what annotations may name, too
    names.update(vars(module))
    own = inspect.get_annotations(value)
    left = [
        eval(hint, names) if isinstance(hint, str) else hint
        for name, hint in own.items()
        if not name.startswith("_")
    ]
    while left:
        hint = left.pop()
        left += [one for one in get_args(hint) if not isinstance(one, list)]
        left += [two for one in get_args(hint) if isinstance(one, list) for two in one]
        if isinstance(hint, type) and hint.__module__.startswith("laconic"):
            yield hint


@pytest.mark.parametrize("name", sorted(set(lc.__all__) - {"server", *LISTINGS, "__version__"}))
def test_types_in_public_signatures_are_exported(name: str) -> None:
    found = {
        f"{kind.__module__}.{kind.__qualname__}"
        for one in functions(getattr(lc, name))
        if callable(getattr(lc, name))
        for kind in annotated(one)
        if kind.__name__ not in INTERNAL
    }
    assert found <= exported()


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'laconic' has no attribute 'compres'"):
        lc.compres  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    assert not hasattr(lc, "torch")
