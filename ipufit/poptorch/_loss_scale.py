"""Automatic loss scaling: a factor that follows the size of half-precision gradients."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, List, Mapping, Optional, Set

import torch
from torch import Tensor, fx

from ipufit.poptorch._logging import error
from ipufit.tracing.graph_analysis import schema_of

UPDATE_FACTOR = "lossScaleUpdateFactor"

# The factor by the optimizer's loss scaling.
FINAL_SCALE = "finalLossScale"

_PREFIX = "automaticLossScalingSettings."


class Tracked(enum.IntEnum):
    """Methods of choosing the gradients to track, as PopART numbers them."""

    All = 0
    Products = 1
    Named = 2


@dataclasses.dataclass(frozen=True)
class ScalingSettings:
    """The compiler's options ``automaticLossScalingSettings``.

    Attributes:
        edge: from which part of float16's largest number an element counts as large
            (``binEdgeLocation``).
        threshold: the part of all elements that may be large (``thresholdUpperCountProportion``).
        period: from one update that the factor changes after to the next (``updatePeriod``).
        tracked: which gradients are looked at (``gradientTensorTrackingMethod``).
    """

    edge: float = 0.125
    threshold: float = 1e-7
    period: int = 1
    tracked: Tracked = Tracked.All

    @staticmethod
    def enabled(options: Mapping[str, object]) -> bool:
        """Return True if the options turn automatic loss scaling on."""
        return bool(options.get(f"{_PREFIX}enabled", False))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Optional[ScalingSettings]:
        """Return the settings of automatic loss scaling; None if it is off.

        Args:
            options: the compiler's, by name.
        Raises:
            Error: a value that the compiler refuses.
        """
        if not cls.enabled(options):
            return None
        for name in ("binEdgeLocation", "thresholdUpperCountProportion"):
            value = options.get(_PREFIX + name, 0.0)
            if not isinstance(value, float) or not 0 <= value <= 1:
                raise error(
                    f"Out of range value for '{name}'. The current value is {value}, but it should "
                    f'be in the range [0, 1]. Set it with options._Popart.set("{_PREFIX}{name}", '
                    "value)."
                )
        method = options.get(f"{_PREFIX}gradientTensorTrackingMethod", Tracked.All)
        if method not in (Tracked.All, Tracked.Products):
            raise error(
                "gradientTensorTrackingMethod must be 0 (all gradients) or 1 (those of matrix "
                f"products and convolutions), got {int(method)}: the tensors that 2 stands for "
                "can't be named through PopTorch. Leave it out for 0."
            )
        return cls(
            float(options.get(f"{_PREFIX}binEdgeLocation", cls.edge)),
            float(options.get(f"{_PREFIX}thresholdUpperCountProportion", cls.threshold)),
            max(1, int(options.get(f"{_PREFIX}updatePeriod", cls.period))),
            Tracked(method),
        )


class AutomaticLossScale:
    """A factor that doubles after updates, and halves when many elements are large.

    No update is skipped: the factor keeps gradients within float16's range. Of every ``period``
    updates the first is observed, and changes the factor.

    Args:
        settings: thresholds and period.
        elements: number of elements that are tracked in a micro-batch.

    Attributes:
        factor: by which the optimizer's loss scaling is multiplied in the coming update.
    """

    def __init__(self, settings: Optional[ScalingSettings] = None, elements: int = 1) -> None:
        self.factor = 1.0
        self._settings = settings or ScalingSettings()
        self._elements = elements
        self._updates = 0
        self._large: Optional[Tensor] = None
        self._counted = 0

    def observe(self, large: Tensor) -> None:
        """Record a micro-batch, without synchronising.

        Args:
            large: shape (), number of elements that are large.
        """
        self._large = large if self._large is None else self._large + large
        self._counted += self._elements

    def update(self) -> None:
        """Change the factor, after the update in which it was used."""
        if self._updates % self._settings.period == 0:
            large = 0 if self._large is None else int(self._large)
            crowded = large > self._settings.threshold * self._counted
            self.factor *= 0.5 if crowded else 2.0
        self._updates += 1
        self._large, self._counted = None, 0


_LARGEST = 65504.0


_PRODUCTS = {
    "aten::addmm",
    "aten::baddbmm",
    "aten::bmm",
    "aten::convolution",
    "aten::convolution_backward",
    "aten::mm",
}


def count_large(graph: fx.GraphModule, settings: ScalingSettings, behind: int) -> int:
    """Make the graph return the number of large elements of gradients, before its gradients.

    Tracked are float16 values that the gradient of the loss flows through, and that are not views.
    A device's compiler sees the same values, except inside operators that it splits differently.

    Args:
        graph: changed in place; its last input is the scale of the loss.
        settings: the size from which an element is large, and which gradients are tracked.
        behind: how many tensors the graph returns from its gradients on.
    Returns:
        Number of elements that are tracked.
    Raises:
        Error: there is none: no gradient is in half precision.
    """
    nodes = _tracked(graph, settings.tracked)
    if not nodes:
        raise error(
            "No tracked gradient tensors of type fp16 were found. Automatic loss scaling follows "
            "gradients of half precision: call model.half(), or leave "
            "Training.setAutomaticLossScaling off."
        )
    ops = torch.ops.aten
    edge = settings.edge * _LARGEST
    total: Any = None
    for node in nodes:
        with graph.graph.inserting_before(node.next):
            # In single precision, which holds the edge. Not `>=`: what is no number is not small.
            wide = graph.graph.call_function(ops._to_copy.default, (node,), {"dtype": torch.float})
            size = graph.graph.call_function(ops.abs.default, (wide,))
            small = graph.graph.call_function(ops.lt.Scalar, (size, edge))
            large = graph.graph.call_function(ops.bitwise_not.default, (small,))
            number = graph.graph.call_function(ops.sum.default, (large,))
            if total is not None:
                number = graph.graph.call_function(ops.add.Tensor, (total, number))
            total = number
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    returned = list(output.args[0])
    returned.insert(len(returned) - behind, total)
    output.args = (returned,)
    graph.graph.lint()
    graph.recompile()
    return sum(node.meta["val"].numel() for node in nodes)


def _tracked(graph: fx.GraphModule, method: Tracked) -> List[fx.Node]:
    scale = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    # The scale and the nodes that read it first, the gradient of the loss, are not tracked.
    converted = [user for user in scale.users if user.target is torch.ops.aten._to_copy.default]
    seed = (scale, *converted, *(user for node in [scale, *converted] for user in node.users))
    below: Set[fx.Node] = set()
    tracked = []
    for node in graph.graph.nodes:
        if not below.intersection(node.all_input_nodes) and node not in seed:
            continue
        below.add(node)
        if node not in seed and _is_half(node) and node.users and _computes(node, method):
            tracked.append(node)
    return tracked


def _is_half(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16


def _computes(node: fx.Node, method: Tracked) -> bool:
    source = node
    while schema_of(source) is None and source.all_input_nodes:
        # One of several results.
        source = source.all_input_nodes[0]
    schema = schema_of(source)
    if schema is None or node.op != "call_function":
        return False
    if method == Tracked.Products:
        return schema.name in _PRODUCTS
    aliases = [result.alias_info for result in schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)
