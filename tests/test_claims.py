"""Numbers in documents are those of the kept rows."""

from __future__ import annotations

from benchmarks.tables import DOC, page


def test_the_benchmark_page_is_made_of_the_kept_rows() -> None:
    assert DOC.read_text() == page(), "run python -m benchmarks.tables"
