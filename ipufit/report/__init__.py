"""The execution report: what a ``fit`` did, where its time and memory went, as one page.

``recorder`` writes facts and rows down while a run goes on (``files`` says in which form), ``run``
reads and sums them up, and ``page`` and ``chrome`` make of them what people and viewers look at;
``live_server`` shows a run that goes on. A new fact goes into ``facts`` and ``files``, its picture
into a module of ``page``. Training itself is not touched from here.
"""

from ipufit.report.settings import Report

__all__ = ["Report"]
