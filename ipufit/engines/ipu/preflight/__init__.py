"""Preflight: find out without PopTorch if a model can run on IPUs through PopTorch 3.4.

``facts.json`` holds what is known of PopTorch, each row with the lines of its source or guide that
say so, and ``facts`` says when a row holds. ``recording`` follows a micro-batch, with operators
taken apart as PopTorch would, and ``evaluate`` judges what it met. A new fact is a row of the file
with a case in its tests; the rest stays.
"""

from ipufit.engines.ipu.preflight.facts import COMMIT, FACTS, Fact, Line
from ipufit.engines.ipu.preflight.report import PreflightFinding, PreflightReport

__all__ = ["COMMIT", "FACTS", "Fact", "Line", "PreflightFinding", "PreflightReport"]
