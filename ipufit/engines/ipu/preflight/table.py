"""Table of all facts, looked up by their subject."""

from __future__ import annotations

import collections
from typing import Dict, List, Mapping, Sequence, Tuple

from ipufit.engines.ipu.preflight.layers import LAYERS, LOSSES
from ipufit.engines.ipu.preflight.operator_limits import OPERATOR_LIMITS
from ipufit.engines.ipu.preflight.operators import HANDLED
from ipufit.engines.ipu.preflight.report import UNKNOWN, UNSUPPORTED, Fact, Line, dispatcher, guide
from ipufit.engines.ipu.preflight.settings import OPTIMIZERS, SETTINGS
from ipufit.engines.ipu.preflight.tensors import TENSORS

__all__ = ["CONTROL_FLOW", "FACTS", "Table", "unknown_operator"]


def _inference_only(name: str, line: int, cure: str) -> Fact:
    return Fact(
        "control flow",
        f"poptorch.{name}",
        name,
        UNSUPPORTED,
        f"poptorch.{name} is for inference only",
        (Line("popart_compiler/source/Compiler.cpp", line),),
        cure,
    )


CONTROL_FLOW: Tuple[Fact, ...] = (
    Fact(
        "control flow",
        "a value in Python",
        "value",
        UNSUPPORTED,
        "the graph is static: no value of a tensor can decide what Python does, and .item() is "
        "refused",
        (guide("intro", 112), dispatcher("RegisterAtenOverloads.cpp", 508)),
        "Write torch.where(condition, a, b); for a slice that begins at a value, "
        "poptorch.dynamic_slice; in a model that only predicts, poptorch.cond.",
    ),
    Fact(
        "control flow",
        "a shape of values",
        "shape",
        UNSUPPORTED,
        "shapes are constant: none can follow from the values of a tensor",
        (guide("intro", 110), Line("tests/index_ops_test.py", 124)),
        "Keep the full shape: torch.where(mask, x, 0) instead of x[mask], topk with a fixed k "
        "instead of nonzero or unique.",
    ),
    _inference_only("for_loop", 1488, "Write the turns one after another, as a Python loop does."),
    _inference_only("cond", 1538, "Compute both and choose with torch.where."),
)

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
    """Facts by group and subject."""

    def __init__(self, facts: Sequence[Fact] = FACTS) -> None:
        self._facts: Mapping[Tuple[str, str], List[Fact]]
        by: Dict[Tuple[str, str], List[Fact]] = collections.defaultdict(list)
        for fact in facts:
            by[_TOGETHER.get(fact.group, fact.group), fact.subject].append(fact)
        self._facts = by

    def of(self, group: str, subject: str, thing: object = None) -> List[Fact]:
        """Return the facts about a subject that hold for a call, a module or a tensor."""
        facts = self._facts.get((group, subject), [])
        return [fact for fact in facts if fact.applies(thing)]

    def knows(self, group: str, subject: str) -> bool:
        """Return True if there is any fact about a subject."""
        return bool(self._facts.get((group, subject)))


def unknown_operator(name: str) -> Fact:
    """Make the fact about an operator that has no row."""
    return Fact(
        "operators",
        name,
        name,
        UNKNOWN,
        "nothing in the table says that PopTorch has it; a graph with an operator that it has no "
        "handler for is refused when it is compiled",
        (guide("supported_ops", 8), Line("poptorch/source/ErrorOnUnsupportedAten.cpp", 30)),
        "Write it with operators that are in the table.",
    )
