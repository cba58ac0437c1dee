"""Nested batches and outputs: flatten to tensors, rebuild the same structure.

Handles tuples, named tuples, lists, mappings (a mapping class that takes no dict becomes one) and
dataclasses; None is part of the structure, everything else is a leaf, also a packed sequence. torch
has a private pytree for this, but it leaves dataclasses out on torch 2.0.1 and names no paths,
which our error messages need.
"""

from __future__ import annotations

import dataclasses

# typing's is asked in Python, this one in C.
from collections.abc import Mapping
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

# A nested value of any depth, such as a batch or the outputs of a module.
Tree = Any
# What a tree holds that is no container: tensors, most of all.
Leaf = Any


@dataclasses.dataclass(frozen=True)
class Structure:
    """The shape of a nested value without its leaves.

    Attributes:
        kind: the container's type, or None for a leaf.
        keys: positions, mapping keys or field names, in order.
        children: one structure per key.
    """

    kind: Any
    keys: Tuple[Any, ...] = ()
    children: Tuple[Structure, ...] = ()

    @property
    def is_leaf(self) -> bool:
        """True if the tree is a leaf."""
        return self.kind is None

    @property
    def is_none(self) -> bool:
        """True if the structure stands for None."""
        return self.kind is type(None)

    @property
    def leaves(self) -> int:
        """Number of leaves of a value of this structure."""
        return 1 if self.kind is None else sum(child.leaves for child in self.children)

    @property
    def is_builtin(self) -> bool:
        """True if all containers are tuples, lists and dicts, which are made again from leaves."""
        is_simple = self.kind in (None, type(None), tuple, list, dict)
        return is_simple and all(child.is_builtin for child in self.children)

    def __str__(self) -> str:
        if self.kind is None:
            return "*"
        if self.kind is type(None):
            return "None"
        inside = ", ".join(f"{key!r}: {child}" for key, child in zip(self.keys, self.children))
        return f"{self.kind.__name__}({inside})"


_LEAF = Structure(None)
_NONE = Structure(type(None))


def _children(value: Tree) -> Any:
    """Keys and values of a container, and the form of its path texts, or None for a leaf."""
    if isinstance(value, Mapping):
        keys = tuple(value)
        return keys, [value[key] for key in keys], "[{!r}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys = tuple(field.name for field in dataclasses.fields(value))
        return keys, [getattr(value, key) for key in keys], ".{}"
    # The rows of a packed sequence are no samples, and some of its tensors stay on the host.
    if isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence):
        return tuple(range(len(value))), value, "[{}]"
    return None


def _walk(
    value: Tree,
    path: str,
    out: List[Tuple[str, Leaf]],
    is_leaf: Optional[Callable[[Tree], bool]],
) -> Structure:
    if value is None:
        return _NONE
    parts = None if is_leaf is not None and is_leaf(value) else _children(value)
    if parts is None:
        out.append((path, value))
        return _LEAF
    keys, values, name = parts
    children = tuple(
        _walk(child, path + name.format(key), out, is_leaf) for key, child in zip(keys, values)
    )
    return Structure(type(value), keys, children)


def _gather(value: Tree, out: List[Leaf]) -> Structure:
    """Flatten without paths, which messages alone need."""
    if value is None:
        return _NONE
    parts = _children(value)
    if parts is None:
        out.append(value)
        return _LEAF
    keys, values, _ = parts
    return Structure(type(value), keys, tuple([_gather(child, out) for child in values]))


def flatten_with_paths(
    value: Tree, root: str = "", is_leaf: Optional[Callable[[Tree], bool]] = None
) -> Tuple[List[Tuple[str, Leaf]], Structure]:
    """Leaves with their paths (``root['ids'][0]``), and the structure to rebuild them.

    Args:
        value: nested.
        root: begin of the paths.
        is_leaf: true of containers that are not looked into; None looks into all.
    """
    out: List[Tuple[str, Leaf]] = []
    structure = _walk(value, root, out, is_leaf)
    return out, structure


def flatten(value: Tree) -> Tuple[List[Leaf], Structure]:
    """Leaves in order, and the structure to rebuild them."""
    out: List[Leaf] = []
    structure = _gather(value, out)
    return out, structure


def is_sequence(value: object) -> bool:
    """True of a tuple or list whose parts are known by position alone: of no named tuple."""
    return isinstance(value, (tuple, list)) and not hasattr(value, "_fields")


def is_list_of_samples(part: object) -> bool:
    """Tell whether an input or a target is a list of dicts or of pictures, one for each sample."""
    # Of a batch, pictures have four dimensions.
    if not isinstance(part, (tuple, list)) or not part:
        return False
    return all(
        isinstance(entry, Mapping) or (isinstance(entry, Tensor) and entry.dim() == 3)
        for entry in part
    )


def tensors(value: Tree) -> List[Tensor]:
    """Tensors among the leaves of a nested value, in order."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def unflatten(leaves: Sequence[object], structure: Structure) -> Tree:
    """The inverse of :func:`flatten`: same containers, given leaves."""
    if structure.kind is None and len(leaves) == 1:
        return leaves[0]
    source = iter(leaves)
    value = _build(source, structure)
    remaining = sum(1 for _ in source)
    assert not remaining, f"{remaining} leaves too many for {structure}"
    return value


def _build(source: Iterator[object], structure: Structure) -> Tree:
    kind = structure.kind
    if kind is None:
        return next(source)
    if kind is type(None):
        return None
    values = [_build(source, child) for child in structure.children]
    if kind is tuple:
        return tuple(values)
    if issubclass(kind, Mapping):
        pairs = dict(zip(structure.keys, values))
        try:
            return pairs if kind is dict else kind(pairs)
        except TypeError:
            return pairs
    if dataclasses.is_dataclass(kind):
        make: Any = kind
        return make(**dict(zip(structure.keys, values)))
    if issubclass(kind, tuple):
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    return kind(values)


def map_leaves(function: Callable[[Leaf], object], value: Tree) -> Tree:
    """Apply ``function`` to every leaf, keeping the structure."""
    leaves, structure = flatten(value)
    return unflatten([function(leaf) for leaf in leaves], structure)
