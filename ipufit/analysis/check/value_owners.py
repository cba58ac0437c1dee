"""Places where Python code can leave values: attributes, globals, and closures of functions."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import sys
import types
from typing import Any, Dict, Iterator, List, MutableMapping, Optional, Set

import torch
from torch import Tensor, nn

from ipufit.tracing.generators import generator_state
from ipufit.tracing.grad_step import ModuleWithLoss
from ipufit.tracing.user_lines import users_module

__all__ = ["CONTAINERS", "DEEP", "PLAIN", "OwnedName", "ValueOwner", "owners_of"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
CONTAINERS = (list, dict, set, collections.deque)
_MEMBERS = ("_parameters", "_buffers", "_modules")
# Levels of containers and of objects in objects.
DEEP = 3


@dataclasses.dataclass(frozen=True)
class OwnedName:
    """A name in the namespace of an owner.

    Attributes:
        title: for people, such as "Net.step" or "global COUNT".
        kind: "attribute", "global" or "members".
        owner: the object that has the name.
        name: the name.
        is_torchs: whether the owner is a module of torch's own.
    """

    title: str
    kind: str
    owner: Any
    name: str
    is_torchs: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class ValueOwner:
    """Something with names: an object, a class, or the globals of a file."""

    object: Any
    title: str
    kind: str = "attribute"
    is_torchs: bool = False
    mapping: Optional[MutableMapping[str, Any]] = None

    def namespace(self) -> Dict[str, Any]:
        """Return the values that are bound now, without those that do not count."""
        if self.mapping is not None:
            return {k: v for k, v in list(self.mapping.items()) if self._counts(k, v)}
        return {k: v for k, v in list(vars(self.object).items()) if self._counts(k, v)}

    def _counts(self, name: str, value: object) -> bool:
        if self.kind == "members":
            return True
        if self.kind == "global" or isinstance(self.object, type):
            return not name.startswith("__") and (
                isinstance(value, (*PLAIN, *CONTAINERS, Tensor))
                or generator_state(value) is not None
            )
        return name not in _MEMBERS

    def place(self, name: str) -> OwnedName:
        """Return the place of a name."""
        title = f"{self.title}.{name}" if self.title else name
        return OwnedName(title, self.kind, self.object, name, self.is_torchs)

    def assign(self, name: str, value: object) -> None:
        """Bind a name to a value."""
        if isinstance(self.object, type):
            setattr(self.object, name, value)
        else:
            self._names()[name] = value

    def remove(self, name: str) -> None:
        """Unbind a name."""
        if isinstance(self.object, type):
            delattr(self.object, name)
        else:
            self._names().pop(name, None)

    def _names(self) -> MutableMapping[str, Any]:
        return self.mapping if self.mapping is not None else vars(self.object)


class _Cells(Dict[str, Any]):
    """Mapping of the variables in the closure of a function."""

    def __init__(self, function: types.FunctionType) -> None:
        super().__init__()
        cells = function.__closure__ or ()
        self._cells = dict(zip(function.__code__.co_freevars, cells))

    def items(self) -> Any:
        bound = []
        for name, cell in self._cells.items():
            try:
                bound.append((name, cell.cell_contents))
            except ValueError:  # not assigned yet
                continue
        return bound

    def __setitem__(self, name: str, value: object) -> None:
        self._cells[name].cell_contents = value


def owners_of(step: ModuleWithLoss) -> Iterator[ValueOwner]:
    """Yield modules, callables of the loss, objects in them, their classes and files."""
    visited: Set[int] = set()
    functions: List[Any] = []
    objects: List[Any] = [*step.modules(), *step.called]
    functions.append(None if step.loss is None else step.loss.function)
    for part in objects:
        if part is step or id(part) in visited:
            continue
        visited.add(id(part))
        kind = type(part)
        is_torchs = kind.__module__.partition(".")[0] == "torch"
        yield ValueOwner(part, kind.__name__, is_torchs=is_torchs)
        if isinstance(part, nn.Module):
            for members in _MEMBERS:
                yield ValueOwner(part, members, "members", mapping=vars(part)[members])
        yield from _owned_objects(part, kind.__name__, visited, DEEP)
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            functions += list(vars(part).get(hooks, {}).values())
        functions += [kind.__dict__.get(name) for name in ("forward", "__call__")]
        for base in kind.__mro__:
            if users_module(base) and id(base) not in visited:
                visited.add(id(base))
                yield ValueOwner(base, base.__name__)
                yield from _file_of(base, visited)
                functions += [f for f in vars(base).values() if inspect.isfunction(f)]
    for function in functions:
        function = inspect.unwrap(function) if callable(function) else None
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and users_module(function):
            yield from _file_of(function, visited)
            if function.__closure__ and id(function) not in visited:
                visited.add(id(function))
                yield ValueOwner(function, "", "global", mapping=_Cells(function))


def _file_of(thing: object, visited: Set[int]) -> Iterator[ValueOwner]:
    module = sys.modules.get(thing.__module__)
    if module is not None and id(module) not in visited:
        visited.add(id(module))
        yield ValueOwner(module, "", "global")


def _owned_objects(part: object, title: str, visited: Set[int], depth: int) -> Iterator[ValueOwner]:
    """Yield attributes of classes of the user, such as a configuration or a state."""
    for name, value in list(vars(part).items()):
        kind = type(value)
        is_object = hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType))
        if not is_object or isinstance(value, (nn.Module, Tensor)) or callable(value):
            continue
        if users_module(kind) and id(value) not in visited and depth:
            visited.add(id(value))
            yield ValueOwner(value, f"{title}.{name}")
            yield from _owned_objects(value, f"{title}.{name}", visited, depth - 1)
