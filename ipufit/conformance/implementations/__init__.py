"""Implementations that can be examined: the embedded engine, the stand-in, and PopTorch."""

from __future__ import annotations

from typing import Any, Dict

from ipufit.conformance.implementations.base import Implementation, MissingError
from ipufit.conformance.implementations.embedded import Embedded
from ipufit.conformance.implementations.poptorch import PopTorch, StandIn

__all__ = ["IMPLEMENTATIONS", "Implementation", "MissingError"]

IMPLEMENTATIONS: Dict[str, Any] = {
    "embedded": Embedded,
    "standin": StandIn,
    "poptorch": PopTorch,
}
