"""A report as one HTML page that needs nothing from elsewhere."""

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from limitformer.checking.report import Report


def page(report: "Report") -> str:
    """The whole page."""
    return f"<!doctype html><meta charset='utf-8'><title>{escape(report.name)}</title><pre>{escape(str(report))}</pre>"
