"""The page of a report: one HTML file that needs nothing else, of one run or of several.

``document`` puts it together of ``templates``, which escape whatever is put into them, and makes
the sections that compare runs; ``sections`` has plotly.py make the charts, ``assets`` has the
scripts for what plotly.js lacks, and each other module makes sections of a
:class:`~ipufit.report.run.Run`. Nothing here looks at a model or a fit.
"""

from ipufit.report.page.document import render_page, render_state, write_page

__all__ = ["render_page", "render_state", "write_page"]
