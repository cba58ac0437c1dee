"""Whose operator runs now: the module, the user's line, and which of the two passes.

Nothing here is in place while a program is recorded or runs; it is for a run that is watched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ipufit.tracing.capture import user_frame
from ipufit.tracing.grad_step import ModuleWithLoss
from ipufit.tracing.node_meta import backward_heard
from ipufit.tracing.rebinding import public_name
from ipufit.utils import tree

__all__ = ["LOSS", "ModuleCall", "Origin", "SourceTracker"]

# The name of what is computed outside of the user's module.
LOSS = "loss"


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an operator comes from.

    Attributes:
        module: name of the innermost module, "" for the user's own, "loss" for what the loss
            computes; None where nobody knows.
        kind: class of the module.
        file, line: the user's; None where there is none.
        is_backward: whether torch ran it while it followed the loss back. Module and line are then
            those of the operator whose gradient it is a part of.
    """

    module: Optional[str] = None
    kind: str = ""
    file: Optional[str] = None
    line: Optional[int] = None
    is_backward: bool = False

    @property
    def source(self) -> str:
        """The line's text, if there is a file to read it from."""
        if self.file is None or self.line is None:
            return ""
        return linecache.getline(self.file, self.line).strip()


@dataclasses.dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        name: of the module.
        kind: its class.
        outputs: tensors that it returned.
    """

    name: str
    kind: str
    outputs: Tuple[Tensor, ...]


class SourceTracker:
    """Follows a step through modules, and back.

    Args:
        step: the user's module with the loss.
        on_return: called with every call of a module when it returns.
    """

    def __init__(
        self, step: ModuleWithLoss, on_return: Callable[[ModuleCall], None] = lambda call: None
    ) -> None:
        self._names: Dict[int, Tuple[str, str]] = {}
        for name, part in step.named_modules():
            self._names[id(part)] = (_public(name), type(part).__name__)
        self._names[id(step)] = (LOSS, "")
        self._on_return = on_return
        self._stack: List[Tuple[str, str]] = []
        self._running: Optional[Origin] = None
        self._by_number: Dict[int, Origin] = {}
        self._claimed: Dict[Any, Origin] = {}
        self._nodes: List[Any] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """The step runs in the block."""
        # Hooks for all modules: one of a module's own would switch off torch's fast paths.
        handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end),
        ]
        try:
            with backward_heard(self._turn):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def now(self) -> Origin:
        """The origin of the operator that is being called, from inside of a dispatch mode."""
        if self._running is not None:
            return self._running
        module, kind = self._stack[-1] if self._stack else (LOSS, "")
        file, line = (user_frame(sys._getframe()) or (None, None, ""))[:2]
        found = Origin(module, kind, file, line)
        number = _number_of_last()
        if number is not None:
            # Of an operator that autograd leaves aside, this is the number of an earlier one.
            self._by_number.setdefault(number, found)
        return found

    def _begin(self, part: nn.Module, args: Any) -> None:
        if id(part) not in self._names:
            return
        if _number_of_last() is None and self._stack:
            name, kind = self._stack[-1]
            self._claim([t.grad_fn for t in _tensors(args)], Origin(name, kind, is_backward=True))
        self._stack.append(self._names[id(part)])

    def _end(self, part: nn.Module, args: Any, output: Any) -> None:
        if id(part) not in self._names:
            return
        name, kind = self._stack.pop()
        tensors = _tensors(output)
        if _number_of_last() is None:
            self._claim([t.grad_fn for t in tensors], Origin(name, kind, is_backward=True))
        if kind:
            self._on_return(ModuleCall(name, kind, tensors))

    def _claim(self, nodes: List[Any], origin: Origin) -> None:
        """In a torch that numbers no operators: all that no inner module has made is this one's."""
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node is None or node in self._claimed:
                continue
            self._claimed[node] = origin
            todo += [following for following, _ in node.next_functions]

    def _turn(self, objective: Optional[Tensor]) -> None:
        """The backward pass begins, or has ended."""
        self._running = None
        if objective is None:
            self._claimed, self._nodes = {}, []
            self._running = Origin()
            return
        todo: List[Any] = [objective.grad_fn]
        seen: Set[Any] = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self._tell_before(node, self._origin_of(node))
            todo += [following for following, _ in node.next_functions]
        # Python lets go of a node's wrapper, and with it of its identity, unless somebody holds it.
        self._nodes = list(seen)

    def _tell_before(self, node: Any, origin: Origin) -> None:
        def begin(gradients: Any) -> None:
            self._running = origin

        node.register_prehook(begin)

    def _origin_of(self, node: Any) -> Origin:
        if node in self._claimed:
            return self._claimed[node]
        number = getattr(node, "_sequence_nr", lambda: -1)()
        found = self._by_number.get(number)
        if found is None:
            return Origin(LOSS if number < 0 else None, is_backward=True)
        return dataclasses.replace(found, is_backward=True)


def _tensors(value: Any) -> Tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree.flatten(value)[0] if isinstance(leaf, Tensor))


def _public(name: str) -> str:
    if name == "net":
        return ""
    return LOSS if name == "loss_module" else public_name(name)


def _number_of_last() -> Optional[int]:
    """The number that autograd has given to the last operator; None where torch tells none."""
    tell = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return None if tell is None else int(tell()) - 1
