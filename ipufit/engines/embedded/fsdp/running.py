"""A recorded micro-batch that runs with weights in parts."""

from __future__ import annotations

import copy
from typing import Callable, List, Optional, Sequence

from torch import Tensor, fx

from ipufit.engines.embedded.fsdp.weights import ShardedWeights
from ipufit.engines.embedded.passes.collective_hooks import SUM, Event, insert_weight_hooks
from ipufit.engines.embedded.passes.simplify import call_directly, simplify
from ipufit.errors import CaptureError

__all__ = ["ShardedStep"]


class ShardedStep:
    """Runs a graph, when it is known whose weights it takes.

    Args:
        recorded: stays as it is.
        inputs: names of its first inputs.
        gradients: how many of its last outputs are gradients.

    Attributes:
        events: what happens in it, in order; empty before weights are there.
    """

    def __init__(self, recorded: fx.GraphModule, inputs: Sequence[str], gradients: int) -> None:
        self._recorded = recorded
        self._inputs = inputs
        self._gradients = gradients
        self._weights: Optional[ShardedWeights] = None
        self._module: Optional[fx.GraphModule] = None
        self.events: List[Event] = []

    def take(self, weights: ShardedWeights) -> None:
        """Run with these from here on; all graphs that train with them have the same events.

        Raises:
            CaptureError: a weight is changed in place, or the order is another one.
        """
        if self._weights is weights:
            return
        module = fx.GraphModule(self._recorded, copy.deepcopy(self._recorded.graph))
        simplify(module.graph)
        self.events = insert_weight_hooks(module, self._inputs, weights.names, self._gradients)
        call_directly(module.graph)
        module.recompile()
        module.get_submodule("meeting").host = weights  # type: ignore[assignment]
        self._module, self._weights = module, weights
        if any(what == SUM for what, _ in self.events):
            weights.events = weights.events or self.events
            if self.events != weights.events:
                raise CaptureError(
                    "with shard_weights=True all micro-batches must use the weights in one order, "
                    "but one of another size uses them in another. Remove the branch on the batch "
                    "size, or leave shard_weights out."
                )

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        """One micro-batch, in all processes that have one."""
        assert self._weights is not None
        assert self._module is not None
        forward: Callable[..., List[Tensor]] = self._module.forward
        with self._weights.at_work(self.events):
            return forward(*tensors)
