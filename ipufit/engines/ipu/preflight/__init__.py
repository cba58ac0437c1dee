"""Whether a model can run on IPUs through PopTorch 3.4, said without PopTorch."""

from ipufit.engines.ipu.preflight.facts import COMMIT, Fact, Place
from ipufit.engines.ipu.preflight.report import Finding, PreflightReport
from ipufit.engines.ipu.preflight.table import FACTS

__all__ = ["COMMIT", "FACTS", "Fact", "Finding", "Place", "PreflightReport"]
