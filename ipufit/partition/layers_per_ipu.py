"""``layers_per_ipu``: repeated layers, so many on each IPU.

An IPU can't read the memory of another. So what shares the weight of an embedding, as the last
layer of a language model does, runs where the embedding is: in a further stage on that IPU.
"""

from __future__ import annotations

import dataclasses
from typing import AbstractSet, Any, Dict, Iterator, List, Sequence, Set, Tuple, Type, Union

from torch import nn

from ipufit.errors import PartitionError, UnknownNameError, shown
from ipufit.partition.cut_layers import has_placed_parts, ipus_with_parts
from ipufit.partition.partition import AFTER, first_called, is_called
from ipufit.partition.request import PartitionRequest, count_of
from ipufit.utils.error_collector import as_list, whole_number


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
    name: str, part: nn.Module, kinds: Tuple[Type[nn.Module], ...], visited: Set[int]
) -> List[Stack]:
    inside: List[Stack] = []
    for key, child in part.named_children():
        if id(child) not in visited:
            visited.add(id(child))
            inside += _stacks_in(f"{name}.{key}" if name else key, child, kinds, visited)
    blocks = list(part.children())
    if not isinstance(part, kinds) or not _are_alike(blocks) or not all(map(is_called, blocks)):
        return inside
    longest = max((len(stack.layers) for stack in inside), default=0)
    layers = tuple(f"{name}.{key}" if name else key for key, _ in part.named_children())
    return inside if longest > len(blocks) else [Stack(name, layers, type(blocks[0]))]


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    """True if there are several, of one class (of one make-up where the class says nothing)."""
    containers = (nn.Sequential, nn.ModuleList)
    makeups = {(type(b), *map(type, b if isinstance(b, containers) else ())) for b in blocks}
    return len(blocks) > 1 and len(makeups) == 1 and any(list(b.parameters()) for b in blocks)


def repeated_layers(
    module: nn.Module,
    named: Union[str, Sequence[str], None],
    argument: str = "layers_per_ipu",
) -> Tuple[str, ...]:
    """Names of the layers that ``layers_per_ipu`` counts, in the order of definition.

    Found by structure they are those of the longest stack, of the stacks with blocks of the same
    class, and of a decoder beside an encoder or the reverse.

    Args:
        module: the user's module.
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
                "layers must name the containers of the layers, as a string or a list of strings, "
                f"got {shown(named)}. Write for example layers='encoder.layers'."
            )
        return tuple(layer for name in names for layer in _layers_in(module, name))
    stacks = stacks_of(module) or _stacks_in("", module, (nn.ModuleDict,), set())
    if not stacks:
        raise PartitionError(
            f"{argument} counts the blocks of a ModuleList or Sequential of equal blocks, but "
            f"{type(module).__name__} has none. Name their container with layers='...', use "
            "stages={'name of a module': number of its stage}, or pass ipus_per_replica, for a "
            "module with blocks of its own."
        )
    longest = max(stacks, key=lambda stack: len(stack.layers))
    chosen = [s for s in stacks if s.kind is longest.kind or _are_twins(s.name, longest.name)]
    return tuple(layer for stack in chosen for layer in stack.layers)


def _are_twins(one: str, other: str) -> bool:
    """True if one is of the encoder and the other of the decoder."""
    ways = ("encoder", "decoder"), ("decoder", "encoder")
    return any(a in one and one.replace(a, b) == other for a, b in ways)


def _layers_in(module: nn.Module, name: str) -> Tuple[str, ...]:
    modules = dict(module.named_modules())
    if name not in modules:
        raise UnknownNameError("module in layers", name, [n for n in modules if n], shown=5)
    children = [key for key, _ in modules[name].named_children()]
    if not children:
        raise PartitionError(
            f"layers must name modules that contain layers, but {name!r} contains none. Name the "
            "ModuleList or Sequential."
        )
    layers = [f"{name}.{key}" if name else key for key in children]
    for layer in layers:
        if not is_called(modules[layer]):
            raise PartitionError(
                f"layers must name modules that contain layers, but {layer!r} in {name!r} only "
                f"contains others, such as {first_called(modules[layer], layer)!r}. Name those "
                f"instead: layers={[path for path in layers if not is_called(modules[path])]!r}."
            )
    return tuple(layers)


@dataclasses.dataclass(frozen=True)
class _Visit:
    """Change to another IPU at some point of the forward pass.

    Attributes:
        name: as in ``Partition.begins``.
        ipu: of a replica.
    """

    name: str
    ipu: int


@dataclasses.dataclass(frozen=True)
class _Holder:
    """A module outside of the layers with a parameter that another one has too.

    Attributes:
        name: of the module.
        gap: how many layers are defined before it.
        is_again: whether it is a module that was there before, by another name.
    """

    name: str
    gap: int
    is_again: bool


def _with_returns(module: nn.Module, layers: Sequence[_Visit], last: int) -> List[_Visit]:
    """Layers on their IPUs, and the modules that go back to the IPU of a weight they share.

    A weight lies where the first module runs that has it: on IPU 0 if no layer comes before, else
    with the next layer. What comes first follows from the order of definition, which is compared
    with the forward pass later. Weights that layers share stay where they are.

    Args:
        module: the user's module.
        layers: the repeated layers in their order.
        last: the IPU of what runs behind them.

    Returns:
        The visits in their order, without those that stay on the IPU of the one before; of the
        first layer always.
    """
    visits = _visits(_homes(module, layers, last), layers, last)
    names = {visit.name for visit in visits}
    # What follows one layer can't be two stages.
    return visits if len(names) == len(visits) else _visits([], layers, last)


def _visits(
    homes: Sequence[Tuple[_Holder, int]], layers: Sequence[_Visit], last: int
) -> List[_Visit]:
    """The layers, what follows them, and the holders, where the IPU is another one."""
    visits: List[_Visit] = []
    at = 0
    for gap in range(len(layers) + 1):
        after = AFTER + layers[gap - 1].name if gap else ""
        if gap == len(layers) and last != at:
            visits.append(_Visit(after, last))
            at = last
        for holder, home in homes:
            if holder.gap == gap and home != at:
                name = after if holder.is_again else holder.name
                visits.append(_Visit(name, home))
                at = home
        if gap < len(layers) and (not gap or layers[gap].ipu != at):
            visits.append(layers[gap])
            at = layers[gap].ipu
    return visits


def _homes(module: nn.Module, layers: Sequence[_Visit], last: int) -> List[Tuple[_Holder, int]]:
    """Modules that share weights, and the IPU of these; none where all are on one IPU anyway."""
    homes: Dict[str, Tuple[_Holder, int]] = {}
    is_apart = False
    # Of what comes between layers the IPU of the one before.
    stays = [0, *(layer.ipu for layer in layers[:-1]), last]
    for holders in _shared(module, [layer.name for layer in layers]):
        gap = holders[0].gap
        home = stays[gap]
        if len({stays[holder.gap] for holder in holders}) > 1:
            is_apart = True
            home = layers[gap].ipu if gap else 0
        for holder in holders:
            if homes.setdefault(holder.name, (holder, home))[1] != home:
                # It has weights of two IPUs, and nowhere can it read both.
                return []
    return list(homes.values()) if is_apart else []


def _shared(module: nn.Module, layers: Sequence[str]) -> Iterator[List[_Holder]]:
    """For each parameter that several modules outside of the layers have, these modules."""
    names: Dict[int, List[str]] = {}
    places: Dict[str, int] = {}
    first: Dict[int, str] = {}
    again = set()
    for place, (name, part) in enumerate(module.named_modules(remove_duplicate=False)):
        places[name] = place
        if first.setdefault(id(part), name) != name:
            again.add(name)
        for parameter in part._parameters.values():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(name)
    begins = [places[layer] for layer in layers if layer in places]
    if begins != sorted(begins):
        return
    for holders in names.values():
        # A module around another one only holds the parameter for it.
        inner = [
            n for n in dict.fromkeys(holders) if not any(o.startswith(f"{n}.") for o in holders)
        ]
        inside = [n for n in inner if any(f"{n}.".startswith(f"{layer}.") for layer in layers)]
        if len(inner) > 1 and not inside:
            yield [
                _Holder(n, sum(begin < places[n] for begin in begins), n in again) for n in inner
            ]


@dataclasses.dataclass(frozen=True)
class Division:
    """Stages as the arguments of ``compile`` give them.

    Attributes:
        begins: as in :class:`ipufit.partition.partition.Partition`.
        stages: how many, as far as the arguments tell.
        places: as there: the IPU of each stage, if one goes back to an earlier IPU.
    """

    begins: Tuple[Tuple[str, int], ...] = ()
    stages: int = 1
    places: Tuple[int, ...] = ()

    @staticmethod
    def along(visits: Sequence[_Visit]) -> Division:
        """A stage for every change of the IPU, from IPU 0 on."""
        begins: List[Tuple[str, int]] = []
        places = [0]
        for visit in visits:
            if visit.ipu != places[-1]:
                places.append(visit.ipu)
            begins.append((visit.name, len(places) - 1))
        returns = places != list(range(len(places)))
        return Division(tuple(begins), len(places), tuple(places) if returns else ())


def divide_layers(
    module: nn.Module, request: PartitionRequest, can_return: bool = True
) -> Division:
    """Divide repeated layers among IPUs, as ``layers_per_ipu`` counts them.

    Args:
        module: the user's module.
        request: the arguments.
        can_return: whether a stage may be on an IPU that has one before it.
    """
    argument = request.name("layers_per_ipu")
    counts = _whole_numbers(request.layers_per_ipu, argument)
    count = count_of(request.name("ipus_per_replica"), request.ipus_per_replica) or 1
    if counts == [-1] and count == 1:
        return Division()
    layers = repeated_layers(module, request.layers, argument)
    if counts == [-1]:
        # As an IPUConfig has it, which says beside it how many IPUs there are.
        if count > len(layers):
            raise PartitionError(
                f"{argument}=[-1] shares the repeated layers among the IPUs of a replica, but "
                f"ipus_per_replica={count} and the module has {len(layers)} "
                f"({_places(module, layers)}). Use fewer IPUs."
            )
        counts = [-1] * count
    cut = ipus_with_parts(module)
    shares = share_out(counts, len(layers), argument, _places(module, layers), cut)
    ipus = [ipu for ipu, share in enumerate(shares) for _ in range(share)]
    visits = [_Visit(layer, ipu) for layer, ipu in zip(layers, ipus)]
    if can_return and not has_placed_parts(module):
        return Division.along(_with_returns(module, visits, len(shares) - 1))
    # Parts of a serialised layer say themselves where they are.
    begins = [visits[sum(shares[:ipu])] for ipu, share in enumerate(shares) if share]
    end = len(shares) - 1
    if not shares[end] and end not in cut:
        begins.append(_Visit(AFTER + layers[-1], end))
    return Division(tuple((visit.name, visit.ipu) for visit in begins), 1 + end)


def _places(module: nn.Module, layers: Sequence[str]) -> str:
    """Describe the stacks that hold the layers, and how many are in each."""
    counts: Dict[str, int] = {}
    for layer in layers:
        stack = layer.rpartition(".")[0]
        counts[stack] = counts.get(stack, 0) + 1
    texts = []
    for stack, count in counts.items():
        places = len(module.get_submodule(stack)._modules)
        more = places - count
        again = f", {more} more places hold one of them again" if more else ""
        texts.append(f"{count} in {stack or 'the module itself'}{again}")
    return ", ".join(texts)


def _whole_numbers(setting: Any, argument: str) -> List[int]:
    listed = as_list(setting) or []
    numbers = [n for n in map(whole_number, listed) if n is not None and n >= -1]
    if not numbers or len(numbers) < len(listed):
        raise PartitionError(
            f"{argument} must list a number of layers for every IPU, -1 for an even share of the "
            f"rest, got {shown(setting)}. Write for example {argument}=[2, 3, -1, -1]."
        )
    return numbers


def share_out(
    counts: Sequence[int],
    total: int,
    argument: str,
    places: str,
    cut: AbstractSet[int] = frozenset((0,)),
) -> List[int]:
    """Layers on each IPU, with every -1 filled in.

    The rest goes in even shares to the wildcards; what does not divide goes to the last one.

    Args:
        counts: for each IPU; -1 for a share of the rest.
        total: layers that there are.
        argument: what the user calls the counts.
        places: where the layers are.
        cut: IPUs with parts of serialised layers, and the first: they need no layer.

    Raises:
        PartitionError: they do not add up; or an IPU would get nothing. Behind the last layer there
            may be one without any, which gets what runs after that layer.

    >>> share_out([2, 3, -1, -1], 12, "layers_per_ipu", "")
    [2, 3, 3, 4]
    """
    wildcards = [ipu for ipu, count in enumerate(counts) if count == -1]
    fixed = sum(count for count in counts if count != -1)
    layers = f"the module has {total} ({places})"
    if not wildcards and fixed != total:
        raise PartitionError(
            f"{argument} must add up to the number of repeated layers, got {fixed} and {layers}. "
            "Write -1 for one of the numbers to assign the rest, or name the layers with layers=."
        )
    left = total - fixed
    if left < len(wildcards):
        raise PartitionError(
            f"{argument} must leave a layer for every -1, but {layers}: the other IPUs take "
            f"{fixed}, and {len(wildcards)} entries of -1 share {max(left, 0)}. Use fewer IPUs or "
            "smaller numbers."
        )
    shares = list(counts)
    for ipu in wildcards:
        shares[ipu] = left // len(wildcards)
    if wildcards:
        shares[wildcards[-1]] += left % len(wildcards)
    end = max((ipu for ipu, share in enumerate(shares) if share), default=-1) + 1
    empty = [ipu for ipu, share in enumerate(shares) if not share and ipu not in cut]
    if empty and empty != [end]:
        first = empty[0] if empty[0] != end else empty[1]
        shorter = [n for ipu, n in enumerate(counts) if ipu not in empty]
        named = f"stages={{'name of a module': {first}}}"
        if argument.startswith("IPUConfig."):
            named += " of compile with layers_per_ipu=[-1] in the config"
        raise PartitionError(
            f"{argument} must give every IPU at least one layer, except the first, one after the "
            f"last layer, and those with parts of a serialised layer, got 0 for IPU {first}. Use "
            f"fewer IPUs, with {shorter}, or put other modules there with {named}."
        )
    return shares
