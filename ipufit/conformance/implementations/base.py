"""What the cases need of an implementation."""

from __future__ import annotations

from typing import Any, ContextManager, Dict, Optional, Protocol

import torch

from ipufit.conformance.scenario import Observed, Scenario

__all__ = ["Implementation", "MissingError"]


class MissingError(Exception):
    """The implementation is not on this machine; the text says why."""


class Implementation(Protocol):
    """Runs scenarios.

    Attributes:
        name: as on the command line.
        dtype: that it computes in.
        tolerance: that its numbers have to keep; see :class:`ipufit.conformance.kit.Kit`.
        poptorch: the package; None where there is only an engine.
    """

    name: str
    dtype: torch.dtype
    tolerance: float
    poptorch: Optional[Any]

    def versions(self) -> Dict[str, str]:
        """What is examined, for the head of the table."""
        ...

    def computing(self) -> ContextManager[None]:
        """What has to hold while a case runs."""
        ...

    def can(self, scenario: Scenario) -> bool:
        """Whether it has what the scenario asks for."""
        ...

    def observe(self, scenario: Scenario) -> Observed:
        """Run a scenario."""
        ...
