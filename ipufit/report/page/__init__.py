"""The page of a report: one HTML file that needs nothing else, of one run or of several."""

from ipufit.report.page.document import page_of, state_of

__all__ = ["page_of", "state_of"]
