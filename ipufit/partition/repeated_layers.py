"""Finding the repeated layers of a module, which ``layers_per_ipu`` counts."""

from __future__ import annotations

import dataclasses
from typing import List, Sequence, Set, Tuple, Type, Union

from torch import nn

from ipufit.errors import PartitionError, UnknownNameError
from ipufit.partition.stage_names import first_called, is_called

__all__ = ["Stack", "repeated_layers", "stacks_of"]


@dataclasses.dataclass(frozen=True)
class Stack:
    """A ModuleList or Sequential of alike blocks.

    Attributes:
        name: as in ``named_modules``; empty for the module itself.
        layers: names of its blocks, in their order.
        kind: class of the blocks.
    """

    name: str
    layers: Tuple[str, ...]
    kind: type


def stacks_of(module: nn.Module) -> List[Stack]:
    """All stacks that are in no block of another, in the order of definition.

    Of two that are nested it is the longer one, and of equally long ones the outer one.
    """
    return _stacks_in("", module, (nn.ModuleList, nn.Sequential), set())


def _stacks_in(
    name: str, part: nn.Module, kinds: Tuple[Type[nn.Module], ...], seen: Set[int]
) -> List[Stack]:
    inside: List[Stack] = []
    for key, child in part.named_children():
        if id(child) not in seen:
            seen.add(id(child))
            inside += _stacks_in(f"{name}.{key}" if name else key, child, kinds, seen)
    blocks = list(part.children())
    if not isinstance(part, kinds) or not _are_alike(blocks) or not all(map(is_called, blocks)):
        return inside
    longest = max((len(stack.layers) for stack in inside), default=0)
    return inside if longest > len(blocks) else [_stack(name, part)]


def _stack(name: str, part: nn.Module) -> Stack:
    layers = tuple(f"{name}.{key}" if name else key for key, _ in part.named_children())
    return Stack(name, layers, type(next(part.children())))


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    """True if there are several, of one class (of one make-up where the class says nothing)."""
    makeups = {_makeup(block) for block in blocks}
    return len(blocks) > 1 and len(makeups) == 1 and any(list(b.parameters()) for b in blocks)


def _makeup(block: nn.Module) -> Tuple[type, ...]:
    if isinstance(block, (nn.Sequential, nn.ModuleList)):
        return (type(block), *(type(child) for child in block))
    return (type(block),)


def repeated_layers(
    module: nn.Module,
    named: Union[str, Sequence[str], None],
    argument: str = "layers_per_ipu",
) -> Tuple[str, ...]:
    """Names of the layers that ``layers_per_ipu`` counts, in the order of definition.

    Found by structure they are those of the longest stack, of the stacks with blocks of the same
    class, and of a decoder beside an encoder or the reverse.

    Args:
        module: the user's.
        named: what holds them, or several such names; None to find them.
        argument: what counts them.

    Raises:
        PartitionError: there are none, or what names them is no name.
        UnknownNameError: a name that the module has not.
    """
    if named is not None:
        names = [named] if isinstance(named, str) else named
        good = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        if not good or not names:
            raise PartitionError(
                "layers must name what holds the layers, as a string or a list of strings, got "
                f"{named!r}. Write for example layers='encoder.layers'."
            )
        return tuple(layer for name in names for layer in _layers_in(module, name))
    stacks = stacks_of(module) or _stacks_in("", module, (nn.ModuleDict,), set())
    if not stacks:
        raise PartitionError(
            f"{argument} counts the blocks of a ModuleList or Sequential of alike blocks, but "
            f"{type(module).__name__} has none. Name what holds them with layers='...', use "
            "stages={'name of a module': number of its stage}, or pass ipus_per_replica, for a "
            "module with blocks of its own."
        )
    longest = max(stacks, key=lambda stack: len(stack.layers))
    chosen = [s for s in stacks if s.kind is longest.kind or _are_twins(s.name, longest.name)]
    return tuple(layer for stack in chosen for layer in stack.layers)


def _are_twins(one: str, other: str) -> bool:
    """True if one is of the encoder and the other of the decoder."""
    for a, b in (("encoder", "decoder"), ("decoder", "encoder")):
        if a in one and one.replace(a, b) == other:
            return True
    return False


def _layers_in(module: nn.Module, name: str) -> Tuple[str, ...]:
    known = dict(module.named_modules())
    if name not in known:
        raise UnknownNameError("module in layers", name, [n for n in known if n], shown=5)
    children = [key for key, _ in known[name].named_children()]
    if not children:
        raise PartitionError(
            f"layers must name modules that hold layers, but {name!r} holds none. Name the "
            "ModuleList or Sequential."
        )
    found = [f"{name}.{key}" if name else key for key in children]
    for layer in found:
        if not is_called(known[layer]):
            raise PartitionError(
                f"layers must name modules that hold layers, but {layer!r} in {name!r} only holds "
                f"others, such as {first_called(known[layer], layer)!r}. Name it instead: "
                f"layers={[path for path in found if not is_called(known[path])]!r}."
            )
    return tuple(found)
