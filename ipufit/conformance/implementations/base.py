"""Interface of the implementations that the cases examine."""

from __future__ import annotations

from typing import Any, ContextManager, Dict, Optional, Protocol

import torch

from ipufit.conformance.scenario import Observed, Scenario

__all__ = ["Implementation", "MissingError"]


class MissingError(Exception):
    """The implementation is not on this machine, for the reason in the text."""


class Implementation(Protocol):
    """Interface that runs scenarios.

    Attributes:
        name: the name on the command line.
        dtype: dtype of computation.
        tolerance: tolerance of results; see :class:`ipufit.conformance.kit.Kit`.
        poptorch: the package; None where there is only an engine.
    """

    name: str
    dtype: torch.dtype
    tolerance: float
    poptorch: Optional[Any]

    def versions(self) -> Dict[str, str]:
        """Return versions and the device, for the head of the table."""
        ...

    def computing(self) -> ContextManager[None]:
        """Return a context manager for the run of a case."""
        ...

    def can(self, scenario: Scenario) -> bool:
        """Return True if the implementation supports the scenario."""
        ...

    def observe(self, scenario: Scenario) -> Observed:
        """Run a scenario."""
        ...
