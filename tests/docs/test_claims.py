"""Numbers in documents are those of the kept rows."""

from __future__ import annotations

from benchmarks.tables import DOC, README, page, readme

STALE = "run python -m benchmarks.tables"


def test_the_benchmark_page_is_made_of_the_kept_rows() -> None:
    assert DOC.read_text() == page(), STALE


def test_the_readmes_table_is_made_of_the_kept_rows() -> None:
    assert README.read_text() == readme(), STALE
