"""Snapshots of what Python code can change besides tensors of the program."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import Tensor

from ipufit.analysis.check.value_owners import (
    CONTAINERS,
    DEEP,
    PLAIN,
    OwnedName,
    ValueOwner,
    owners_of,
)
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.generators import (
    Generators,
    generator_state,
    hashable,
    same_state,
    set_generator,
)
from ipufit.tracing.grad_step import ModuleWithLoss

__all__ = ["Change", "PythonSnapshot", "same_values"]

# Items of a container that are looked at.
_MOST = 1000


@dataclasses.dataclass(frozen=True)
class Change:
    """Change of a value that a run has made.

    Attributes:
        place: where.
        how: "set", "grown", "written" (a tensor in place) or "drawn" (a generator).
        before, after: values.
    """

    place: OwnedName
    how: str
    before: Any
    after: Any


def same_values(one: Tensor, other: Tensor) -> bool:
    """Compare the values of two tensors of one shape; nan equals nan."""
    if one.shape != other.shape or one.layout is not torch.strided:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


class PythonSnapshot:
    """Values of attributes, globals and generators at one time.

    Args:
        step: the module with its loss.
    """

    def __init__(self, step: ModuleWithLoss) -> None:
        self._saved: List[Tuple[ValueOwner, Dict[str, Any]]] = []
        self._contents: Dict[int, Tuple[OwnedName, Any, Any]] = {}
        self._tensors: Dict[int, Tuple[OwnedName, Tensor, int, Tensor]] = {}
        self._generators: Dict[int, Tuple[OwnedName, Any, Any]] = {}
        for owner in owners_of(step):
            names = owner.namespace()
            self._saved.append((owner, names))
            for name, value in names.items():
                self._keep(owner.place(name), value, DEEP)
        self.interpreter = Generators()

    def _keep(self, place: OwnedName, value: object, depth: int) -> None:
        if isinstance(value, Tensor):
            if place.kind != "members" and not value.is_meta:
                self._tensors[id(value)] = (place, value, value._version, value.detach().clone())
        elif isinstance(value, CONTAINERS):
            if id(value) not in self._contents:
                self._contents[id(value)] = (place, value, _copied(value))
                inner = list(value.values()) if isinstance(value, dict) else list(value)
                for item in inner if depth and len(inner) <= _MOST else ():
                    self._keep(place, item, depth - 1)
        else:
            state = generator_state(value)
            if state is not None:
                self._generators[id(value)] = (place, value, state)

    def titles(self) -> Dict[int, str]:
        """Return, by storage, where tensors lie that are no state of the module."""
        return {storage_id(tensor): place.title for place, tensor, _, _ in self._tensors.values()}

    def changes(self) -> List[Change]:
        """List the values that have changed, without those of torch's own modules."""
        changes: List[Change] = []
        for owner, before in self._saved:
            now = owner.namespace()
            for name in (*before, *(name for name in now if name not in before)):
                old, new = before.get(name, _NOTHING), now.get(name, _NOTHING)
                place = owner.place(name)
                if place.kind == "members" or (place.is_torchs and name != "training"):
                    continue
                if old is not new and not _equal(old, new):
                    changes.append(Change(place, "set", old, new))
        for place, container, copy in self._contents.values():
            if not place.is_torchs and not _equal(copy, container):
                changes.append(Change(place, "grown", copy, container))
        for place, tensor, version, value in self._tensors.values():
            if not place.is_torchs and not same_values(tensor, value):
                changes.append(Change(place, "written", version, tensor._version))
        for place, generator, state in self._generators.values():
            if not same_state(generator_state(generator), state):
                changes.append(Change(place, "drawn", generator, generator))
        return changes

    def restore(self) -> None:
        """Set all attributes, globals and generators to the values that they had."""
        for _, tensor, _, value in self._tensors.values():
            if not same_values(tensor, value):
                with torch.no_grad():
                    tensor.copy_(value)
        for _, container, copy in self._contents.values():
            _refill(container, copy)
        for owner, before in self._saved:
            now = owner.namespace()
            for name in now:
                if name not in before:
                    owner.remove(name)
            for name, value in before.items():
                if now.get(name, _NOTHING) is not value:
                    owner.assign(name, value)
        self.restore_generators()

    def restore_generators(self) -> None:
        """Restore generators alone."""
        for _, generator, state in self._generators.values():
            set_generator(generator, state)
        self.interpreter.restore()

    def probe(self, change: Change) -> Callable[[], Any]:
        """Return a function whose result differs once a change has happened."""
        place = change.place
        owner = next(o for o, _ in self._saved if o.object is place.owner and o.kind == place.kind)

        def look() -> Any:
            value = owner.namespace().get(place.name, _NOTHING)
            if change.how == "drawn":
                return hashable(generator_state(value))
            if isinstance(value, PLAIN):
                return (type(value), repr(value))
            version = value._version if isinstance(value, Tensor) else None
            return (id(value), version, _content(value))

        return look


_NOTHING = object()


def _content(value: object) -> Any:
    """Return a value that differs after any change of a container; None for other values."""
    if not isinstance(value, CONTAINERS):
        return None
    if len(value) > _MOST:
        return len(value)
    items = [part for item in value.items() for part in item] if isinstance(value, dict) else value
    return [repr(item) if isinstance(item, PLAIN) else id(item) for item in items]


def _copied(value: Any) -> Any:
    """Copy a container, shallowly, to a plain one: classes of users may hold more."""
    if isinstance(value, dict):
        return dict(value)
    return set(value) if isinstance(value, set) else list(value)


def _refill(container: Any, copy: Any) -> None:
    if isinstance(container, dict):
        if dict(container) is not copy and not _identical(list(container.items()), copy.items()):
            container.clear()
            container.update(copy)
    elif isinstance(container, set):
        if container != copy:
            container.clear()
            container.update(copy)
    elif not _identical(container, copy):
        container.clear()
        container.extend(copy)


def _identical(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    for a, b in zip(one, other):
        same = a is b or (isinstance(a, tuple) and all(x is y for x, y in zip(a, b)))
        if not same:
            return False
    return True


def _equal(old: object, new: object) -> bool:
    """Compare as a program does: plain values by value, others by identity."""
    if old is new:
        return True
    if isinstance(old, PLAIN) and isinstance(new, PLAIN):
        return type(old) is type(new) and repr(old) == repr(new)
    if isinstance(old, dict) and isinstance(new, dict):
        return list(old) == list(new) and all(_equal(old[key], new[key]) for key in old)
    if isinstance(old, set) and isinstance(new, set):
        return old == new
    sequences = (list, tuple, collections.deque)
    if isinstance(old, sequences) and isinstance(new, sequences):
        return len(old) == len(new) and all(map(_equal, old, new))
    return False
