"""Stop at the operator that makes a number that is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ipufit.poptorch.poptorch_core import UnrecoverableError

__all__ = ["Checked"]


class Checked(fx.Interpreter):
    """Runs a graph and looks at every result."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=True)

    def __call__(self, *tensors: Tensor) -> Any:
        """Run it.

        Raises:
            UnrecoverableError: an operator made a NaN or an infinity.
        """
        return self.run(*tensors)

    def run_node(self, n: fx.Node) -> Any:
        """Run one operator, and look at what it made."""
        result = super().run_node(n)
        if n.op == "call_function":
            for each in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(each, Tensor) and each.is_floating_point():
                    self._look(n, each)
        return result

    def _look(self, node: fx.Node, result: Tensor) -> None:
        # What is made without being filled holds whatever was there.
        if "empty" in str(node.target) or bool(torch.isfinite(result).all()):
            return
        kind = "NaN" if bool(torch.isnan(result).any()) else "an infinity"
        raise UnrecoverableError(
            f"a floating-point exception: {node.target} made {kind}. Look at its inputs, or leave "
            "Precision.enableFloatingPointExceptions off.",
            "poplar_unrecoverable_runtime_error",
        )
