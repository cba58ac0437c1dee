"""Snapshots of where Python code can leave values: attributes, globals, closures, generators."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import sys
import types
from typing import Any, Callable, Dict, Iterator, List, MutableMapping, Optional, Set, Tuple

import torch
from torch import Tensor, nn

from ipufit.tracing.fingerprint import PLAIN
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.grad_step import ModuleWithLoss
from ipufit.tracing.user_lines import users_module
from ipufit.utils import random_streams
from ipufit.utils.state import MEMBERS, copied, is_of_torch, refill, same_values

_PLAIN = (*PLAIN, torch.Size, torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, collections.deque)
# Levels of containers and of objects in objects.
_DEEP = 3


@dataclasses.dataclass(frozen=True)
class _ValueOwner:
    """Something with names: an object, a class, or the globals of a file.

    Attributes:
        thing: the object that has the names.
        title: of it, for people.
        kind: of its names: "attribute", "global" or "members".
        is_torchs: whether it is a module of torch's own.
        mapping: where its names are, if not in its ``__dict__``.
    """

    thing: object
    title: str
    kind: str = "attribute"
    is_torchs: bool = False
    mapping: Optional[MutableMapping[str, object]] = None

    def namespace(self) -> Dict[str, object]:
        """Return the values that are bound now, without those that do not count."""
        return {k: v for k, v in list(self._names().items()) if self._counts(k, v)}

    def _counts(self, name: str, value: object) -> bool:
        if self.kind == "members":
            return True
        if self.kind == "global" or isinstance(self.thing, type):
            return not name.startswith("__") and (
                isinstance(value, (*_PLAIN, *_CONTAINERS, Tensor))
                or random_streams.generator_state(value) is not None
            )
        return name not in MEMBERS

    def assign(self, name: str, value: object) -> None:
        """Bind a name to a value."""
        if isinstance(self.thing, type):
            setattr(self.thing, name, value)
        else:
            self._names()[name] = value

    def remove(self, name: str) -> None:
        """Unbind a name."""
        if isinstance(self.thing, type):
            delattr(self.thing, name)
        else:
            self._names().pop(name, None)

    def _names(self) -> MutableMapping[str, object]:
        return self.mapping if self.mapping is not None else vars(self.thing)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedName:
    """A name in the namespace of an owner."""

    owner: _ValueOwner
    name: str

    @property
    def title(self) -> str:
        """The name for people, such as "Net.step" or "COUNT" of a global."""
        return f"{self.owner.title}.{self.name}" if self.owner.title else self.name


class _Cells(Dict[str, object]):
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


def _owners_of(step: ModuleWithLoss) -> Iterator[_ValueOwner]:
    """Yield modules, callables of the loss, objects in them, their classes and files."""
    visited: Set[int] = set()
    functions: List[object] = [None if step.loss is None else step.loss.function]
    for part in step.owners():
        if id(part) in visited:
            continue
        visited.add(id(part))
        kind = type(part)
        yield _ValueOwner(part, kind.__name__, is_torchs=is_of_torch(part))
        if isinstance(part, nn.Module):
            for members in MEMBERS:
                yield _ValueOwner(part, members, "members", mapping=vars(part)[members])
        yield from _owned_objects(part, kind.__name__, visited, _DEEP)
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            functions += list(vars(part).get(hooks, {}).values())
        functions += [kind.__dict__.get(name) for name in ("forward", "__call__")]
        for base in kind.__mro__:
            if users_module(base) and id(base) not in visited:
                visited.add(id(base))
                yield _ValueOwner(base, base.__name__)
                yield from _file_of(base, visited)
                functions += [f for f in vars(base).values() if inspect.isfunction(f)]
    for function in functions:
        function = inspect.unwrap(function) if callable(function) else None
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and users_module(function):
            yield from _file_of(function, visited)
            if function.__closure__ and id(function) not in visited:
                visited.add(id(function))
                yield _ValueOwner(function, "", "global", mapping=_Cells(function))


def _file_of(thing: object, visited: Set[int]) -> Iterator[_ValueOwner]:
    module = sys.modules.get(thing.__module__)
    if module is not None and id(module) not in visited:
        visited.add(id(module))
        yield _ValueOwner(module, "", "global")


def _owned_objects(
    part: object, title: str, visited: Set[int], depth: int
) -> Iterator[_ValueOwner]:
    """Yield attributes of classes of the user, such as a configuration or a state."""
    for name, value in list(vars(part).items()):
        kind = type(value)
        is_object = hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType))
        if not is_object or isinstance(value, (nn.Module, Tensor)) or callable(value):
            continue
        if users_module(kind) and id(value) not in visited and depth:
            visited.add(id(value))
            yield _ValueOwner(value, f"{title}.{name}")
            yield from _owned_objects(value, f"{title}.{name}", visited, depth - 1)


# Items of a container that are looked at.
_MOST = 1000


@dataclasses.dataclass(frozen=True)
class Change:
    """Change of a value that a run has made.

    Attributes:
        place: where.
        how: "set", "grown", "written" (a tensor in place) or "drawn" (a generator).
        value: that is there now.
    """

    place: OwnedName
    how: str
    value: object


def write_back(tensor: Tensor, values: Tensor) -> None:
    """Copy values from before into a tensor that has others now."""
    if not same_values(tensor, values):
        with torch.no_grad():
            tensor.copy_(values)


class PythonSnapshot:
    """Values of attributes, globals and generators at one time.

    Args:
        step: the module with its loss.
    """

    def __init__(self, step: ModuleWithLoss) -> None:
        self._saved: List[Tuple[_ValueOwner, Dict[str, object]]] = []
        self._contents: Dict[int, Tuple[OwnedName, object, object]] = {}
        self._tensors: Dict[int, Tuple[OwnedName, Tensor, Tensor]] = {}
        self._generators: Dict[int, Tuple[OwnedName, object, object]] = {}
        for owner in _owners_of(step):
            names = owner.namespace()
            self._saved.append((owner, names))
            for name, value in names.items():
                self._keep(OwnedName(owner, name), value, _DEEP)
        self.interpreter = random_streams.Generators()

    def _keep(self, place: OwnedName, value: object, depth: int) -> None:
        if isinstance(value, Tensor):
            if place.owner.kind != "members" and not value.is_meta:
                self._tensors[id(value)] = (place, value, value.detach().clone())
        elif isinstance(value, _CONTAINERS):
            if id(value) not in self._contents:
                self._contents[id(value)] = (place, value, copied(value))
                inner = list(value.values()) if isinstance(value, dict) else list(value)
                for item in inner if depth and len(inner) <= _MOST else ():
                    self._keep(place, item, depth - 1)
        else:
            state = random_streams.generator_state(value)
            if state is not None:
                self._generators[id(value)] = (place, value, state)

    def titles(self) -> Dict[int, str]:
        """Return, by storage, where tensors lie that are no state of the module."""
        return {storage_id(tensor): place.title for place, tensor, _ in self._tensors.values()}

    def changes(self) -> List[Change]:
        """List the values that have changed, without those of torch's own modules."""
        changes: List[Change] = []
        for owner, before in self._saved:
            now = owner.namespace()
            for name in dict.fromkeys((*before, *now)):
                old, new = before.get(name, _NOTHING), now.get(name, _NOTHING)
                if owner.kind == "members" or (owner.is_torchs and name != "training"):
                    continue
                if not _equal(old, new):
                    changes.append(Change(OwnedName(owner, name), "set", new))
        for place, container, copy in self._contents.values():
            if not place.owner.is_torchs and not _equal(copy, container):
                changes.append(Change(place, "grown", container))
        for place, tensor, value in self._tensors.values():
            if not place.owner.is_torchs and not same_values(tensor, value):
                changes.append(Change(place, "written", tensor))
        for place, generator, state in self._generators.values():
            if not random_streams.same_state(random_streams.generator_state(generator), state):
                changes.append(Change(place, "drawn", generator))
        return changes

    def restore(self) -> None:
        """Set all attributes, globals and generators to the values that they had."""
        for _, tensor, value in self._tensors.values():
            write_back(tensor, value)
        for _, container, copy in self._contents.values():
            refill(container, copy)
        for owner, before in self._saved:
            now = owner.namespace()
            for name in now:
                if name not in before:
                    owner.remove(name)
            for name, bound in before.items():
                if now.get(name, _NOTHING) is not bound:
                    owner.assign(name, bound)
        self.restore_generators()

    def restore_generators(self) -> None:
        """Restore generators alone."""
        for _, generator, state in self._generators.values():
            random_streams.set_generator(generator, state)
        self.interpreter.restore()

    def probe(self, change: Change) -> Callable[[], object]:
        """Return a function whose result differs once a change has happened."""
        place = change.place

        def look() -> object:
            value = place.owner.namespace().get(place.name, _NOTHING)
            if change.how == "drawn":
                return random_streams.hashable(random_streams.generator_state(value))
            if isinstance(value, _PLAIN):
                return (type(value), repr(value))
            version = value._version if isinstance(value, Tensor) else None
            return (id(value), version, _content(value))

        return look


_NOTHING = object()


def _content(value: object) -> object:
    """Return a value that differs after any change of a container; None for other values."""
    if not isinstance(value, _CONTAINERS):
        return None
    if len(value) > _MOST:
        return len(value)
    return [repr(item) if isinstance(item, _PLAIN) else id(item) for item in _items(value)]


def _items(container: Any) -> List[object]:
    """List what is in a container, keys and values of a dict."""
    if isinstance(container, dict):
        return [part for item in container.items() for part in item]
    return list(container)


def _equal(old: object, new: object) -> bool:
    """Compare as a program does: plain values by value, others by identity."""
    if old is new:
        return True
    if isinstance(old, _PLAIN) and isinstance(new, _PLAIN):
        return type(old) is type(new) and repr(old) == repr(new)
    if isinstance(old, dict) and isinstance(new, dict):
        return list(old) == list(new) and all(_equal(old[key], new[key]) for key in old)
    if isinstance(old, set) and isinstance(new, set):
        return old == new
    sequences = (list, tuple, collections.deque)
    if isinstance(old, sequences) and isinstance(new, sequences):
        return len(old) == len(new) and all(map(_equal, old, new))
    return False
