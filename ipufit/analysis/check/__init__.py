"""Check of a model for what a recorded program would not do as it is written.

``check`` is the way in: it runs the module a few times (``runs``) and compares what it did.
``recorders`` has its operators, prints and seeds, ``python_state`` values of Python. ``findings``
turns each into a :class:`Finding` of the :class:`CheckReport`; a new kind of finding needs its text
and its name there.
"""

from __future__ import annotations

from ipufit.analysis.check.findings import CheckReport, Finding

__all__ = ["CheckReport", "Finding"]
