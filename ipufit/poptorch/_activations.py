"""Names of the tensors inside forward, under which they can be anchored.

PopART names a tensor after its operator, within the names of the modules around it; here the
operators are torch's.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ipufit.poptorch._errors import error
from ipufit.poptorch._operators.graph import node_of, tracer

__all__ = ["Activations", "returning"]


class Activations:
    """Names the results of operators: ``module/submodule/operator:0``, then ``operator:0/1``."""

    def __init__(self) -> None:
        self._scopes: List[str] = []
        self._nodes: Dict[str, fx.Node] = {}
        self._counts: Dict[str, int] = {}
        self._graph: Any = None

    @contextlib.contextmanager
    def named_by(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        """Name tensors after the modules of a model while its forward is recorded.

        Args:
            model: whose modules give their names.
            enabled: whether they do.
        """
        current = tracer()
        self._graph = None if current is None else current.graph
        names = {m: name.rpartition(".")[2] for name, m in model.named_modules() if name}
        with contextlib.ExitStack() as hooks:
            if enabled:
                # Hooks of the modules themselves would switch off torch's fused layers.
                before = register_module_forward_pre_hook(
                    lambda module, args: self.enter(names.get(module))
                )
                after = register_module_forward_hook(
                    lambda module, args, result: self.leave(names.get(module))
                )
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    def enter(self, name: Optional[str]) -> None:
        """Add a scope to the names of operators from here on; None adds nothing."""
        if name is not None:
            self._scopes.append(name)

    def leave(self, name: Optional[str]) -> None:
        """Remove the innermost scope; None removes nothing.

        Raises:
            Error: there is none.
        """
        if name is None:
            return
        if not self._scopes:
            raise error("pop_name_scope without push_name_scope. Push a name before it is popped.")
        self._scopes.pop()

    def record(self, func: Any, results: Sequence[Tensor]) -> None:
        """Name the results of an operator that has just been recorded."""
        operator = func.name().partition("::")[2].partition(".")[0]
        for place, result in enumerate(results):
            node = node_of(result)
            # What a body of a loop makes is the loop's own.
            if node is None or node.graph is not self._graph:
                continue
            name = "/".join([*self._scopes, f"{operator}:{place}"])
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            self._nodes[f"{name}/{count}" if count else name] = node

    def names_in(self, graph: fx.GraphModule) -> Dict[str, str]:
        """Map anchor names to names of the nodes that a finished graph still has."""
        there = {node.name for node in graph.graph.nodes}
        return {name: node.name for name, node in self._nodes.items() if node.name in there}


def returning(graph: fx.GraphModule, nodes: Sequence[str]) -> fx.GraphModule:
    """Return a copy of a program that returns these nodes too, as they are when computed.

    Args:
        graph: left as it is.
        nodes: their names.
    """
    if not nodes:
        return graph
    copied = fx.Graph()
    places: Dict[fx.Node, fx.Node] = {}
    returned = copied.graph_copy(graph.graph, places)
    by_name = {node.name: copy for node, copy in places.items()}
    extra = []
    for name in nodes:
        copied_node = by_name[name]
        with copied.inserting_after(copied_node):
            # Whatever is written into it later.
            extra.append(copied.call_function(torch.ops.aten.clone.default, (copied_node,)))
    copied.output([*returned, *extra])  # type: ignore[misc]
    return fx.GraphModule(graph, copied)
