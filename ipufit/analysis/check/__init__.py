"""Check of a model for code that would behave differently in a recorded program.

:meth:`ipufit.Model.check` makes one. docs/check.md says what is found.
"""

# check.py runs the module a few times (runs.py) and compares what it did. recorders.py has its
# operators, prints and seeds, a ValueSnapshot values of Python. findings.py turns each into a
# Finding of the CheckReport; a new kind needs its text there, and a row in docs/check.md.

from __future__ import annotations

from ipufit.analysis.check.findings import CheckReport, Finding

__all__ = ["CheckReport", "Finding"]
