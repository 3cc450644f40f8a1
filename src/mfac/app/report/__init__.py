"""One self-contained HTML page from what `mfac prune` and `mfac train` have recorded."""

from mfac.app.report.page import render_page, write_page

__all__ = ["render_page", "write_page"]
