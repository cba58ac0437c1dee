"""Engines, one folder each; their base classes, and a call that tells which can run here.

``ipufit.engines()`` returns an :class:`EngineStatus` for each engine: whether it can run here, and
why or why not. Where the Poplar SDK is, it imports PopTorch to find out.

An engine of your own derives from :class:`Engine` and builds a :class:`Program`;
``Model(engine=...)`` takes it. What goes in and out of the two (``ProgramSpec``, ``Prepared``,
``ExecutionResult``, ``TrainState``) is in ``ipufit.engines.program``, and
:class:`ipufit.testing.EagerEngine` is one to copy.
"""

from __future__ import annotations

import sys
import types
from typing import List

from ipufit.engines.choice import EngineStatus, list_engines
from ipufit.engines.program import Engine, Program

__all__ = ["Engine", "EngineStatus", "Program"]


class _Engines(types.ModuleType):
    """This package, so that ``ipufit.engines()`` lists what ``ipufit.engines`` holds."""

    def __call__(self) -> List[EngineStatus]:
        """Every engine, whether it can run here, and why or why not."""
        return list_engines()


sys.modules[__name__].__class__ = _Engines
