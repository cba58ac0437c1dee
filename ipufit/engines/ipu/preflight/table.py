"""All facts, and which of them are about something."""

from __future__ import annotations

import collections
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ipufit.engines.ipu.preflight.control_flow import CONTROL_FLOW
from ipufit.engines.ipu.preflight.facts import UNKNOWN, Fact, Place
from ipufit.engines.ipu.preflight.layers import LAYERS
from ipufit.engines.ipu.preflight.losses import LOSSES
from ipufit.engines.ipu.preflight.operator_limits import OPERATOR_LIMITS
from ipufit.engines.ipu.preflight.operators import HANDLED
from ipufit.engines.ipu.preflight.optimizers import OPTIMIZERS
from ipufit.engines.ipu.preflight.places import guide
from ipufit.engines.ipu.preflight.settings import SETTINGS
from ipufit.engines.ipu.preflight.tensors import TENSORS

__all__ = ["FACTS", "Table", "unknown_operator"]

FACTS: Tuple[Fact, ...] = (
    *HANDLED,
    *OPERATOR_LIMITS,
    *LAYERS,
    *LOSSES,
    *OPTIMIZERS,
    *SETTINGS.values(),
    *TENSORS,
    *CONTROL_FLOW,
)

# An operator and the arguments of a loss are looked up by the same name.
_TOGETHER = {"losses": "operators"}


class Table:
    """Facts by what they are about."""

    def __init__(self, facts: Sequence[Fact] = FACTS) -> None:
        self._facts: Mapping[Tuple[str, str], List[Fact]]
        by: Dict[Tuple[str, str], List[Fact]] = collections.defaultdict(list)
        for fact in facts:
            by[_TOGETHER.get(fact.group, fact.group), fact.subject].append(fact)
        self._facts = by

    def of(self, group: str, subject: str, thing: Any = None) -> List[Fact]:
        """The facts of a group about a subject that hold for a call, a module, a tensor or such."""
        facts = self._facts.get((group, subject), [])
        return [fact for fact in facts if fact.applies(thing)]

    def knows(self, group: str, subject: str) -> bool:
        """Whether there is any."""
        return bool(self._facts.get((group, subject)))


def unknown_operator(name: str) -> Fact:
    """Of an operator that has no row."""
    return Fact(
        "operators",
        name,
        name,
        UNKNOWN,
        "nothing in the table says that PopTorch has it; a graph with an operator that it has no "
        "handler for is refused when it is compiled",
        (guide("supported_ops", 8), Place("poptorch/source/ErrorOnUnsupportedAten.cpp", 30)),
        "Write it with operators that are in the table.",
    )
