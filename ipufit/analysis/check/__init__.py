"""Check of a model for what a recorded program would not do as it is written.

``check`` is the way in. ``suite`` runs the module a few times (``runs``) and compares what it did:
``trace_facts`` records operators, ``python_state`` values of Python, ``output_events`` prints and
seeds. ``messages`` turns each into a :class:`Finding` of the :class:`CheckReport`. A new kind of
finding needs its text there and its name in ``report``.
"""

from __future__ import annotations

from ipufit.analysis.check.report import CheckReport, Finding

__all__ = ["CheckReport", "Finding"]
