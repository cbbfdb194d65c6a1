"""The names that help and completion offer, from names.json: neither waits for torch.

`python -m laconic.cli._names` writes names.json from the registries; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

_FILE = Path(__file__).with_name("names.json")
NAMES: dict[str, list[str]] = json.loads(_FILE.read_text())


def registered() -> dict[str, list[str]]:
    """The names as the packages themselves know them; this imports torch."""
    import laconic as lc
    from laconic.bench import DTYPES
    from laconic.coders import coders
    from laconic.planner import MACHINES
    from laconic.planner._machine_catalog import MEMORY
    from laconic.race import COURSES, DEFAULT

    return {
        "codecs": lc.codecs(),
        "wrappers": lc.wrappers(),
        "coders": coders(),
        "exchanges": lc.exchanges(),
        "machines": list(MACHINES),
        "devices": list(MEMORY),
        "strategies": list(DEFAULT),
        "data": list(COURSES),
        "dtypes": list(DTYPES),
    }


def complete(*kinds: str, listed: bool = False) -> Callable[[str], list[str]]:
    """What completes a name of these kinds; with `listed`, also the last of a list with commas."""
    names = [
        f"{name}(" if listed and kind == "wrappers" else name
        for kind in kinds
        for name in NAMES[kind]
    ]

    def completions(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if listed else ("", "", incomplete)
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return completions


if __name__ == "__main__":
    _FILE.write_text(json.dumps(registered(), indent=1) + "\n")
