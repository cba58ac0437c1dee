"""Cutting layers of a module into parts, and putting them together again."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import AbstractSet, Any, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ipufit.errors import ConfigurationError, UnknownNameError, unfit
from ipufit.partition.serialization import (
    WHOLE,
    CutWeight,
    Parts,
    Serialized,
    SerializedEmbedding,
    SerializedLinear,
    SerializedLookup,
    SplitProjection,
    parts_of,
    serialized_layers,
)
from ipufit.utils.error_collector import ErrorCollector

_DENSE = (nn.Embedding, nn.Linear)


@dataclasses.dataclass(frozen=True)
class _Work:
    """A layer that is to be cut, and into which parts.

    Attributes:
        name, layer: as in the module.
        parts: into what.
        inference: into what in inference.
        by_config: whether a configuration says so.
        cuts_weight: whether the weight becomes several parameters.
    """

    name: str
    layer: nn.Module
    parts: Parts
    inference: Parts = WHOLE
    by_config: bool = False
    cuts_weight: bool = False

    @property
    def is_whole(self) -> bool:
        """True if nothing is cut."""
        return self.parts.is_whole and self.inference.is_whole


def serialize(
    module: nn.Module,
    layers: Mapping[str, object],
    inference_layers: Optional[Mapping[str, object]] = None,
) -> nn.Module:
    """Let embeddings and linear layers compute in parts, one after another, as IPUs need it.

    Results stay the same up to rounding, ``state_dict`` keeps its names and shapes, and layers that
    share a weight still do: they are divided in the same way.

    The table of an ``nn.Embedding`` is divided into parts. An ``nn.Linear`` with a factor keeps its
    weight and multiplies in parts; with splits per IPU, or if it shares the weight of a divided
    embedding, it becomes several smaller layers.

    Create the optimizer afterwards: a divided weight is several parameters, divided as in training;
    inference joins them or divides them further. Without IPUs, the parts are computed one after
    another.

    Args:
        module: changed in place. A layer that is already divided is divided again.
        layers: for the name of each layer: a factor, a list with the number of parts on each IPU,
            or a :class:`Serialization`. A factor of 1 leaves a layer whole.
        inference_layers: the same for a module in eval mode, in which a layer that is not named is
            whole; None is as in training. A layer that is only named here is whole in training.

    Returns:
        The module.

    Raises:
        UnknownNameError: an unknown layer; suggests the nearest name.
        ConfigurationError: a layer of another kind, a number of parts that does not divide it, or
            anything else that can't work; with every fault. Nothing was changed.
    """
    _apply(module, _checked(module, layers, inference_layers))
    return module


def to_dense(module: nn.Module) -> nn.Module:
    """Join the parts of all serialised layers, with the current weights.

    Each layer gets its class and its original parameter back, so an optimizer made before
    :func:`serialize` can be used again.

    Args:
        module: the argument of :func:`serialize`; changed in place.

    Returns:
        The module.
    """
    for layer in serialized_layers(module):
        _join(layer)
    return module


def ipus_of(module: nn.Module, training: bool = True) -> int:
    """Number of IPUs that the parts of serialised layers need; 0 where none has a place."""
    placed = (layer.parts_in(training).per_ipu or () for layer in serialized_layers(module))
    return max(map(len, placed), default=0)


def ipus_with_parts(module: nn.Module) -> AbstractSet[int]:
    """The IPUs of a replica on which parts of serialised layers lie."""
    return {0, *(ipu for layer in serialized_layers(module) for ipu in layer.parts.ipus)}


def has_placed_parts(module: nn.Module) -> bool:
    """Say whether a serialised layer has parts on IPUs of their own, in training or inference."""
    return bool(ipus_of(module) or ipus_of(module, training=False))


def describe_cuts(module: nn.Module) -> List[str]:
    """A sentence about the layers that are serialised; none where none is."""
    cuts = [
        f"{name or 'the module itself'} ({layer.cuts()})"
        for name, layer in module.named_modules()
        if isinstance(layer, Serialized)
    ]
    return [f"Layers in parts: {', '.join(cuts)}."] if cuts else []


def can_be_serialized(layer: nn.Module, kind: type) -> bool:
    """True of an embedding, or a linear layer, of a class that can be cut."""
    return type(layer) is kind or (isinstance(layer, Serialized) and isinstance(layer, kind))


@contextlib.contextmanager
def serialize_while_checking(
    module: nn.Module,
    layers: Optional[Mapping[str, object]],
    inference_layers: Optional[Mapping[str, object]],
    faults: ErrorCollector,
    by_config: bool = False,
) -> Iterator[None]:
    """Serialise, and take it back if anything in the block turns out not to work.

    Args:
        module: to be changed.
        layers: as for ``serialize``; None leaves those of training as they are.
        inference_layers: as there.
        faults: to which what can't work is added.
        by_config: whether a configuration takes part: what an earlier one cut is put together.
    """
    before = _present(module)
    undone = [w.layer for w in before if w.by_config] if by_config else []
    if layers is None and inference_layers is None and not undone:
        yield
        return
    with faults.collect():
        for layer in undone:
            _join(layer)
        if layers is not None or inference_layers is not None:
            _apply(module, _checked(module, layers, inference_layers, by_config))
    try:
        yield
    except BaseException:
        to_dense(module)
        _apply(module, before)
        raise


def _present(module: nn.Module) -> List[_Work]:
    """List the cuts that the module has at present."""
    return [
        _Work(
            name=layer.title,
            layer=layer,
            parts=layer.parts,
            inference=layer.inference_parts,
            by_config=layer.by_config,
            cuts_weight=isinstance(layer, CutWeight),
        )
        for layer in serialized_layers(module)
    ]


def _checked(
    module: nn.Module, layers: object, inference_layers: object, by_config: bool = False
) -> List[_Work]:
    """All layers that are to be cut, with what becomes of them in training and inference."""
    faults = ErrorCollector()
    training: Dict[int, _Work] = {}
    inference: Optional[Dict[int, _Work]] = None
    with faults.collect():
        training = {} if layers is None else _side(module, layers)
    with faults.collect():
        try:
            inference = None if inference_layers is None else _side(module, inference_layers)
        except UnknownNameError:
            raise
        except ConfigurationError as error:
            lines = str(error).splitlines()
            raise ConfigurationError(
                "\n".join(f"For inference, {line}" for line in lines)
            ) from None
    faults.raise_all()
    inference = training if inference is None else inference
    # Without a word on training its cuts stay, also of what shares a weight with what is named.
    present = {id(work.layer): work for work in _present(module)} if layers is None else {}
    works = [work for key, work in present.items() if key not in inference]
    for key, named in {**inference, **training}.items():
        work = training.get(key)
        if work is None:
            work = present.get(key) or _Work(named.name, named.layer, WHOLE)
        cut = inference.get(key)
        cut_parts = WHOLE if cut is None else cut.parts
        works.append(dataclasses.replace(work, inference=cut_parts, by_config=by_config))
    return works


def _side(module: nn.Module, layers: object) -> Dict[int, _Work]:
    """By layer, how all are cut that have to be so in training, or in inference."""
    if not isinstance(layers, Mapping):
        needed = "a dict from names of layers to numbers of parts"
        raise unfit("serialized layers", needed, layers, "Write for example {'embed': 4}.")
    faults = ErrorCollector()
    works: List[_Work] = []
    for name, setting in layers.items():
        with faults.collect():
            parts = parts_of(name, setting)
            layer = _layer(module, name)
            _check_layer(name, layer, parts)
            works.append(_Work(name, layer, parts, cuts_weight=_cuts_weight(layer, parts)))
    faults.raise_all()
    return _with_partners(module, works)


def _cuts_weight(layer: nn.Module, parts: Parts) -> bool:
    in_parts = isinstance(layer, nn.Embedding) and parts.count > 1
    return in_parts or parts.per_ipu is not None


def _layer(module: nn.Module, name: object) -> nn.Module:
    modules: Dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    if not isinstance(name, str) or name not in modules:
        fitting = [key for key, part in modules.items() if _fits(part) and key]
        raise UnknownNameError("layer", str(name), fitting)
    return modules[name]


def _fits(layer: nn.Module) -> bool:
    return any(can_be_serialized(layer, kind) for kind in _DENSE)


def _check_layer(name: str, layer: nn.Module, parts: Parts) -> None:
    if not _fits(layer):
        raise ConfigurationError(
            f"only nn.Embedding and nn.Linear can be serialised, but {name!r} is "
            f"{type(layer).__name__}. Name the embedding or linear layer inside it."
        )
    if _cuts_weight(layer, parts) and not isinstance(_weight(layer), nn.Parameter):
        raise ConfigurationError(
            f"the weight of a serialized layer must be a parameter, but {f'{name}.weight'!r} is "
            "computed from others, as by weight_norm, spectral_norm or pruning. Remove that "
            "first, for example with torch.nn.utils.remove_weight_norm(layer)."
        )
    if isinstance(layer, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise ConfigurationError(
                    f"an embedding with {option}={getattr(layer, option)} can't be serialised, as "
                    f"{name!r} has: it needs the whole table at once. Build it without that."
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


def _with_partners(module: nn.Module, works: List[_Work]) -> Dict[int, _Work]:
    """All that has to be cut so that what shares a weight goes on sharing it."""
    named = {id(work.layer): work for work in works}
    partners: Dict[int, _Work] = {}
    faults = ErrorCollector()
    for first in works:
        if not first.cuts_weight:
            partners.setdefault(id(first.layer), first)
            continue
        for name, layer in shared_with(module, first.layer):
            with faults.collect():
                twin = named.get(id(layer))
                partners[id(layer)] = _like(first, name, layer, twin)
    faults.raise_all()
    return partners


def _weight(layer: nn.Module) -> nn.Parameter:
    """Find the weight that the layer has while it is dense."""
    weight: nn.Parameter = layer.dense[0] if isinstance(layer, CutWeight) else layer.weight  # type: ignore[assignment]
    return weight


def shared_with(module: nn.Module, layer: nn.Module) -> List[Tuple[str, nn.Module]]:
    """All modules with the weight of a layer, itself included."""
    weight = _weight(layer)
    return [
        (name, part)
        for name, part in module.named_modules()
        if part is layer
        or (isinstance(part, CutWeight) and part.dense[0] is weight)
        or any(parameter is weight for parameter in part._parameters.values())
    ]


def _like(first: _Work, name: str, layer: nn.Module, twin: Optional[_Work]) -> _Work:
    """Cut a layer that shares the weight in the same way.

    Raises:
        ConfigurationError: it is of another kind, or was asked to be cut in another way.
    """
    if twin is first:
        return first
    if not _fits(layer) or (isinstance(layer, nn.Embedding) and first.parts.dim):
        raise ConfigurationError(
            f"{first.name!r} shares its weight with {name!r}, a {type(layer).__name__}, which "
            f"can't be cut in the same way ({first.parts.describe()}). Leave the layer whole, or "
            "untie the two."
        )
    if twin is not None and (twin.parts.count, twin.parts.dim) != (
        first.parts.count,
        first.parts.dim,
    ):
        raise ConfigurationError(
            f"{first.name!r} and {name!r} share a weight and must be cut in the same way, got "
            f"{first.parts.describe()} and {twin.parts.describe()}. Name only one: the other "
            "follows."
        )
    if twin is not None and twin.parts.per_ipu not in (None, first.parts.per_ipu):
        raise ConfigurationError(
            f"{first.name!r} and {name!r} share a weight, and each part of it is on one IPU, got "
            f"{first.parts.describe()} and {twin.parts.describe()}. Name only one: the other "
            "follows."
        )
    return _Work(name, layer, first.parts, cuts_weight=True)


def _apply(module: nn.Module, works: List[_Work]) -> None:
    for work in works:
        for _, layer in shared_with(module, work.layer):
            if isinstance(layer, Serialized):
                _join(layer)
    pieces: Dict[int, List[nn.Parameter]] = {}
    for work in works:
        if not work.is_whole:
            _cut(work, pieces)
    for work in works:
        if isinstance(work.layer, CutWeight):
            # The memory of the whole is let go of, as it lives on in its parts.
            work.layer.dense[0].data = work.layer.dense[0].data.new_empty(0)


def _cut(work: _Work, pieces: Dict[int, List[nn.Parameter]]) -> None:
    layer: Any = work.layer
    is_embedding = isinstance(layer, nn.Embedding)
    if not work.cuts_weight:
        layer.__class__ = SerializedLookup if is_embedding else SerializedLinear
    else:
        dense = layer.weight
        if id(dense) not in pieces:
            pieces[id(dense)] = [
                nn.Parameter(chunk.clone(), requires_grad=dense.requires_grad)
                for chunk in dense.detach().chunk(work.parts.count, work.parts.dim)
            ]
        del layer.weight
        layer.__class__ = SerializedEmbedding if is_embedding else SplitProjection
        layer.dense, layer.dim = (dense,), work.parts.dim
        others = dict(layer._parameters)
        layer._parameters.clear()
        for part, piece in enumerate(pieces[id(dense)]):
            layer.register_parameter(f"weight_{part}", piece)
        layer._parameters.update(others)
    layer.parts, layer.inference_parts = work.parts, work.inference
    layer.title, layer.by_config = work.name, work.by_config


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
    del layer.parts, layer.inference_parts, layer.title, layer.by_config
