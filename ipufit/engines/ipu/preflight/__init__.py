"""Preflight: find out without PopTorch if a model can run on IPUs through PopTorch 3.4.

``recording`` follows a micro-batch, taken apart by ``decompose`` as PopTorch would, and
``evaluate`` looks up in ``table`` what it met: rows of :class:`Fact`, each with the line of
PopTorch's source or guide that says so. A new fact goes into ``operators``, ``operator_limits``,
``layers``, ``tensors``, ``settings`` or ``optimizers``; the rest stays.
"""

from ipufit.engines.ipu.preflight.report import (
    COMMIT,
    Fact,
    Line,
    PreflightFinding,
    PreflightReport,
)
from ipufit.engines.ipu.preflight.table import FACTS

__all__ = ["COMMIT", "FACTS", "Fact", "Line", "PreflightFinding", "PreflightReport"]
