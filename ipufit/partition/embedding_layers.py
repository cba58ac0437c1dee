"""Which layers are the embedding and the projection of a configuration, which names none."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from torch import nn

from ipufit.errors import ConfigurationError
from ipufit.partition.cut_layers import can_be_serialized, shared_with
from ipufit.partition.layers_per_ipu import stacks_of
from ipufit.partition.serialization import parts_of

KINDS: Dict[str, type] = {"embedding": nn.Embedding, "projection": nn.Linear}

# The name of an argument, and what it says of layers.
Named = Tuple[str, Optional[Mapping[str, object]]]
# The name of a parameter, and into what it cuts the layer, or None.
Cut = Tuple[str, object]


def meant_layer(module: nn.Module, kind: str, named: Sequence[Named], cuts: Sequence[Cut]) -> str:
    """The name of the layer that a configuration cuts.

    It is the one that an argument of ``compile`` names with the same number; else one that an
    argument names and that the configuration cuts elsewhere alone; else the embedding with most
    rows, or the linear layer that shares its weight, or the one with most outputs of those that are
    in no stack of repeated layers.

    Args:
        module: the user's module.
        kind: one of ``KINDS``.
        named: the arguments, for training and inference.
        cuts: what the configuration says, in the same order.

    Raises:
        ConfigurationError: there is none, or an argument says another number.
    """
    fitting = _fitting(module, kind)
    meant: Dict[str, None] = {}
    others: Dict[str, None] = {}
    for (argument, layers), (option, cut) in zip(named, cuts):
        mine = {name: setting for name, setting in (layers or {}).items() if name in fitting}
        others.update(dict.fromkeys(mine))
        if cut is None or not mine:
            continue
        alike = [
            name for name, setting in mine.items() if _places(name, setting) == _places(name, cut)
        ]
        if not alike:
            name, setting = next(iter(mine.items()))
            raise ConfigurationError(
                f"{argument} must agree with {option}, which says {cut}, got {setting!r} for "
                f"{name!r}. Leave one out."
            )
        meant.update(dict.fromkeys(alike))
    for names in (meant, others):
        if len(names) > 1:
            option = ", ".join(option for option, cut in cuts if cut is not None)
            raise ConfigurationError(
                f"{option} must mean one {kind}, got {' and '.join(map(repr, names))} from "
                "Memory.serialize. Leave it out of the config, and set all of them in "
                "Memory.serialize."
            )
        if names:
            return next(iter(names))
    option = next(option for option, cut in cuts if cut is not None)
    return _chosen(module, kind, fitting, option)


def check_ties(module: nn.Module, meant: Mapping[str, Tuple[str, Sequence[Cut]]]) -> None:
    """Refuse two numbers for one weight.

    Args:
        module: the user's module.
        meant: by kind, the name of the layer, and what the configuration says.

    Raises:
        ConfigurationError: embedding and projection share a weight and are cut into other numbers.
    """
    if len(meant) < len(KINDS):
        return
    (one, its), (other, others) = (meant[kind] for kind in KINDS)
    shared = [id(layer) for _, layer in shared_with(module, module.get_submodule(one))]
    if id(module.get_submodule(other)) not in shared:
        return
    for (option, cut), (other_name, other_cut) in zip(its, others):
        both = cut is not None and other_cut is not None
        if both and _places(one, cut)[0] != _places(other, other_cut)[0]:
            raise ConfigurationError(
                f"{option} and {other_name} must give the same number of parts, because {one!r} "
                f"and {other!r} share a weight, got {cut} and {other_cut}. Leave one out: the "
                "other layer follows."
            )


def _places(name: str, setting: object) -> Tuple[int, Optional[Tuple[int, ...]]]:
    parts = parts_of(name, setting)
    return parts.count, parts.per_ipu


def _fitting(module: nn.Module, kind: str) -> Dict[str, nn.Module]:
    return {n: m for n, m in module.named_modules() if can_be_serialized(m, KINDS[kind])}


def _chosen(module: nn.Module, kind: str, fitting: Dict[str, nn.Module], option: str) -> str:
    layer, owner = KINDS[kind].__name__, type(module).__name__
    if not fitting:
        raise ConfigurationError(
            f"{option} cuts an nn.{layer}, but {owner} has none that can be cut. Leave it out."
        )
    if kind == "embedding":
        return _largest(fitting, "num_embeddings")
    stacks = [stack.name for stack in stacks_of(module)]
    outside = {
        name: part
        for name, part in fitting.items()
        if not any(not stack or name.startswith(f"{stack}.") for stack in stacks)
    }
    if not outside:
        example = next(reversed(fitting))
        raise ConfigurationError(
            f"{option} cuts the output projection, an nn.Linear outside of the repeated layers, "
            f"but {owner} has linear layers only in {_listed(stacks)}. Name the right one, with "
            f"the same number, such as memory=ipufit.Memory(serialize={{{example!r}: ...}})."
        )
    tables = _fitting(module, "embedding")
    if tables:
        shared = shared_with(module, tables[_largest(tables, "num_embeddings")])
        tied = [name for name, _ in shared if name in outside]
        if tied:
            return tied[0]
    return _largest(outside, "out_features")


def _largest(layers: Dict[str, nn.Module], size: str) -> str:
    return max(layers, key=lambda name: int(getattr(layers[name], size)))


def _listed(stacks: List[str]) -> str:
    return ", ".join(repr(stack) if stack else "the module itself" for stack in stacks)
