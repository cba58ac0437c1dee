"""Cutting layers of a module into parts, and putting them together again."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ipufit.errors import ConfigurationError, UnknownNameError
from ipufit.faults import Faults
from ipufit.parallel.serialization import Parts, parts_of
from ipufit.parallel.serialized import (
    CutWeight,
    Serialized,
    SerializedEmbedding,
    SerializedLinear,
    SplitProjection,
)

__all__ = ["ipus_of", "serialize", "serialized_while_checked", "to_dense"]

_DENSE = (nn.Embedding, nn.Linear)


@dataclasses.dataclass(frozen=True)
class _Work:
    """One layer that is to be cut.

    Attributes:
        name, layer: as in the module.
        parts: into what.
        cuts_weight: whether the weight becomes several parameters.
    """

    name: str
    layer: nn.Module
    parts: Parts
    cuts_weight: bool

    @property
    def dim(self) -> int:
        """The dimension of the weight that is cut."""
        return 1 if self.parts.mode == "reducing_dim" else 0


def serialize(module: nn.Module, layers: Mapping[str, Any]) -> nn.Module:
    """Let embeddings and linear layers compute in parts, one after another, to need less memory.

    What they compute stays the same up to rounding, ``state_dict`` keeps its names and shapes, and
    layers that share a weight go on sharing it: where one is cut, the others are cut alike.

    An ``nn.Embedding`` is looked up part by part of its table. An ``nn.Linear`` with a factor keeps
    its one weight and multiplies in parts; with splits per IPU, or where it shares the weight of
    an embedding that is cut, it becomes several smaller ones.

    Make an optimizer of the module's parameters afterwards: a weight that is cut is several
    parameters. On several IPUs the parts are where ``splits_per_ipu`` says; elsewhere they are
    computed one after another all the same.

    Args:
        module: changed in place. A layer that is serialised already is cut anew.
        layers: by the name of each layer: a factor, a list with the number of parts on each IPU,
            or a :class:`Serialization`. A factor of 1 leaves a layer whole.

    Returns:
        The module.

    Raises:
        UnknownNameError: no such layer; with the nearest name.
        ConfigurationError: a layer of another kind, a number of parts that does not divide it, or
            anything else that can't work; with every fault. Nothing was changed.
    """
    _apply(module, _checked(module, layers))
    return module


def to_dense(module: nn.Module) -> nn.Module:
    """Put all serialised layers together again, with the present weights.

    Each gets its class and its weight back: the very parameter that it had, so that an optimizer
    made before :func:`serialize` fits again.

    Args:
        module: the one that was given to :func:`serialize`; changed in place.

    Returns:
        The module.
    """
    for layer in module.modules():
        if isinstance(layer, Serialized):
            _join(layer)
    return module


def ipus_of(module: nn.Module) -> int:
    """How many IPUs the parts of serialised layers ask for; 0 where none has a place."""
    placed = [
        layer.parts.per_ipu
        for layer in module.modules()
        if isinstance(layer, Serialized) and layer.parts.per_ipu is not None
    ]
    return max((len(splits) for splits in placed), default=0)


@contextlib.contextmanager
def serialized_while_checked(
    module: nn.Module, layers: Optional[Mapping[str, Any]], faults: Faults
) -> Iterator[None]:
    """Serialise, and take it back if anything in the block turns out not to work."""
    if layers is None:
        yield
        return
    before = {
        name: layer.parts for name, layer in module.named_modules() if isinstance(layer, Serialized)
    }
    with faults.collected():
        _apply(module, _checked(module, layers))
    try:
        yield
    except BaseException:
        to_dense(module)
        _apply(module, _works(module, before))
        raise


def _checked(module: nn.Module, layers: Any) -> List[_Work]:
    if not isinstance(layers, Mapping):
        raise ConfigurationError(
            "serialized layers must be given as a dict from the name of a layer to its number of "
            f"parts, got {layers!r}. Write for example {{'embed': 4}}."
        )
    faults = Faults()
    works: List[_Work] = []
    for name, given in layers.items():
        with faults.collected():
            parts = parts_of(name, given)
            layer = _layer(module, name)
            _check_layer(name, layer, parts)
            works.append(_Work(name, layer, parts, _cuts_weight(layer, parts)))
    faults.raise_all()
    return _with_partners(module, works)


def _works(module: nn.Module, layers: Mapping[str, Parts]) -> List[_Work]:
    """What made the module what it was."""
    found = []
    for name, parts in layers.items():
        layer = module.get_submodule(name)
        found.append(_Work(name, layer, parts, _cuts_weight(layer, parts)))
    return _with_partners(module, found)


def _cuts_weight(layer: nn.Module, parts: Parts) -> bool:
    return isinstance(layer, nn.Embedding) or parts.per_ipu is not None


def _layer(module: nn.Module, name: Any) -> nn.Module:
    known: Dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    if not isinstance(name, str) or name not in known:
        fitting = (*_DENSE, SerializedEmbedding, SerializedLinear, SplitProjection)
        layers = [key for key, part in known.items() if type(part) in fitting and key]
        raise UnknownNameError("layer", str(name), layers)
    return known[name]


def _check_layer(name: str, layer: nn.Module, parts: Parts) -> None:
    if type(layer) not in _DENSE and not isinstance(layer, Serialized):
        raise ConfigurationError(
            f"only nn.Embedding and nn.Linear can be serialised, but {name!r} is "
            f"{type(layer).__name__}. Name the embedding or linear layer inside of it."
        )
    if isinstance(layer, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise ConfigurationError(
                    f"an embedding with {option}={getattr(layer, option)} can't be serialised, as "
                    f"{name!r} has: it needs the whole table at once. Build it without."
                )
        if parts.mode != "output_channels":
            raise ConfigurationError(
                f"mode={parts.mode!r} is for linear layers, but {name!r} is an embedding, which "
                "is cut by its rows. Leave the mode out."
            )
        _check_divides(name, "num_embeddings", layer.num_embeddings, parts)
    elif parts.mode == "output_channels":
        _check_divides(name, "out_features", int(layer.out_features), parts)  # type: ignore[arg-type]
    elif parts.mode == "reducing_dim":
        _check_divides(name, "in_features", int(layer.in_features), parts)  # type: ignore[arg-type]


def _check_divides(name: str, attribute: str, size: int, parts: Parts) -> None:
    if size % parts.count:
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - parts.count))[:2])
        raise ConfigurationError(
            f"{attribute} of {name!r} ({size}) must be a multiple of its parts, got "
            f"{parts.describe()}. Try {' or '.join(map(str, near))} parts."
        )


def _with_partners(module: nn.Module, works: List[_Work]) -> List[_Work]:
    """All that has to be cut so that what shares a weight goes on sharing it."""
    named = {id(work.layer): work for work in works}
    found: Dict[int, _Work] = {}
    faults = Faults()
    for first in works:
        if not first.cuts_weight:
            found.setdefault(id(first.layer), first)
            continue
        for name, layer in _sharing(module, first.layer):
            with faults.collected():
                own = named.get(id(layer))
                found[id(layer)] = _like(first, name, layer, own)
    faults.raise_all()
    return list(found.values())


def _weight(layer: nn.Module) -> nn.Parameter:
    """What the layer's weight is while it is dense."""
    weight: nn.Parameter = layer.dense[0] if isinstance(layer, CutWeight) else layer.weight  # type: ignore[assignment]
    return weight


def _sharing(module: nn.Module, layer: nn.Module) -> List[Tuple[str, nn.Module]]:
    """All modules with the weight of a layer, itself included."""
    weight = _weight(layer)
    return [
        (name, part)
        for name, part in module.named_modules()
        if part is layer
        or (isinstance(part, CutWeight) and part.dense[0] is weight)
        or any(own is weight for own in part._parameters.values())
    ]


def _like(first: _Work, name: str, layer: nn.Module, own: Optional[_Work]) -> _Work:
    """The same cut for a layer that shares the weight.

    Raises:
        ConfigurationError: it is of another kind, or was asked to be cut in another way.
    """
    if own is first:
        return first
    tied = type(layer) in _DENSE or isinstance(layer, Serialized)
    if not tied or (isinstance(layer, nn.Embedding) and first.dim):
        raise ConfigurationError(
            f"{first.name!r} shares its weight with {name!r}, a {type(layer).__name__}, which "
            f"can't be cut along with it by {first.parts.describe()}. Leave the layer whole, or "
            "untie the two."
        )
    if own is not None and (own.parts.count, own.dim) != (first.parts.count, first.dim):
        raise ConfigurationError(
            f"{first.name!r} and {name!r} share a weight and must be cut alike, got "
            f"{first.parts.describe()} and {own.parts.describe()}. Name one of them: the other "
            "follows."
        )
    if own is not None and own.parts.per_ipu not in (None, first.parts.per_ipu):
        raise ConfigurationError(
            f"{first.name!r} and {name!r} share a weight, whose parts have one place each, got "
            f"{first.parts.describe()} and {own.parts.describe()}. Name one of them: the other "
            "follows."
        )
    return _Work(name, layer, first.parts, cuts_weight=True)


def _apply(module: nn.Module, works: List[_Work]) -> None:
    for work in works:
        for _, layer in _sharing(module, work.layer):
            if isinstance(layer, Serialized):
                _join(layer)
    pieces: Dict[int, List[nn.Parameter]] = {}
    for work in works:
        if work.parts.count > 1 or work.parts.per_ipu is not None:
            _cut(work, pieces)
    for work in works:
        if isinstance(work.layer, CutWeight):
            # The memory of the whole is let go of, as it lives on in its parts.
            work.layer.dense[0].data = work.layer.dense[0].data.new_empty(0)


def _cut(work: _Work, pieces: Dict[int, List[nn.Parameter]]) -> None:
    layer: Any = work.layer
    if not work.cuts_weight:
        layer.__class__ = SerializedLinear
    else:
        dense = layer.weight
        if id(dense) not in pieces:
            pieces[id(dense)] = [
                nn.Parameter(chunk.clone(), requires_grad=dense.requires_grad)
                for chunk in dense.detach().chunk(work.parts.count, work.dim)
            ]
        del layer.weight
        layer.__class__ = (
            SerializedEmbedding if isinstance(layer, nn.Embedding) else SplitProjection
        )
        layer.dense, layer.dim = (dense,), work.dim
        others = dict(layer._parameters)
        layer._parameters.clear()
        for part, piece in enumerate(pieces[id(dense)]):
            layer.register_parameter(f"weight_{part}", piece)
        layer._parameters.update(others)
    layer.parts, layer.title = work.parts, work.name


def _join(layer: Any) -> None:
    """Make one layer what it was."""
    if isinstance(layer, CutWeight):
        dense, pieces = layer.dense[0], layer.pieces()
        dense.data = torch.cat([piece.detach() for piece in pieces], layer.dim)
        dense.requires_grad_(pieces[0].requires_grad)
        for name in layer.piece_names():
            del layer._parameters[name]
        others = dict(layer._parameters)
        layer._parameters.clear()
        layer._parameters["weight"] = dense
        layer._parameters.update(others)
        del layer.dense, layer.dim
    layer.__class__ = nn.Embedding if isinstance(layer, nn.Embedding) else nn.Linear
    del layer.parts, layer.title
