"""Registration of operators that a recorded graph calls at run time."""

from __future__ import annotations

from typing import Any, Callable

import torch

__all__ = ["define"]

NAMESPACE = "ipufit_poptorch"

# Lives as long as the process: its operators would go with it.
_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Register an operator and return it.

    It has no gradient: call it in a ``torch.autograd.Function``, or under ``torch.no_grad``.

    Args:
        schema: ``name(Tensor x, ...) -> Tensor``; the results alias nothing.
        run: computes, on any device.
        shapes: returns empty results of the right shape and dtype, for recording.
    """
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, shapes, "Meta")
    return getattr(getattr(torch.ops, NAMESPACE), name).default
