"""The page of a report: one HTML file that needs nothing else, of one run or of several.

``document`` puts it together, ``html`` escapes, ``assets`` has the scripts, and each other module
makes a section of a :class:`~ipufit.report.run.Run`. Nothing here looks at a model or at a fit.
"""

from ipufit.report.page.document import render_page, render_state

__all__ = ["render_page", "render_state"]
