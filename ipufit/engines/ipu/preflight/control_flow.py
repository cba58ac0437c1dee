"""What PopTorch does where Python needs a value: it records once, as ipufit does."""

from __future__ import annotations

from typing import Tuple

from ipufit.engines.ipu.preflight.facts import UNSUPPORTED, Fact, Place
from ipufit.engines.ipu.preflight.places import dispatcher, guide

__all__ = ["CONTROL_FLOW"]


def _inference_only(name: str, line: int, cure: str) -> Fact:
    return Fact(
        "control flow",
        f"poptorch.{name}",
        name,
        UNSUPPORTED,
        f"poptorch.{name} is for inference only",
        (Place("popart_compiler/source/Compiler.cpp", line),),
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
        (guide("intro", 110), Place("tests/index_ops_test.py", 124)),
        "Keep the full shape: torch.where(mask, x, 0) instead of x[mask], topk with a fixed k "
        "instead of nonzero or unique.",
    ),
    _inference_only("for_loop", 1488, "Write the turns one after another, as a Python loop does."),
    _inference_only("cond", 1538, "Compute both and choose with torch.where."),
)
