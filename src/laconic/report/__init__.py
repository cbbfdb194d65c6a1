"""Report: a race as one HTML page that opens without a network."""

from laconic.report._page import html, write

__all__ = ["html", "write"]
