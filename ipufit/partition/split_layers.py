"""Layers whose parts lie on several IPUs, held against the IPUs of a replica."""

from __future__ import annotations

from typing import AbstractSet

from torch import nn

from ipufit.errors import PartitionError
from ipufit.partition.cut_layers import ipus_of
from ipufit.partition.serialized_layers import Serialized

__all__ = ["check_splits", "ipus_with_parts"]


def check_splits(module: nn.Module, strategy: str, ipus: int, is_training: bool) -> None:
    """Refuse layers whose parts lie on other IPUs than a replica has, or on too many."""
    wanted = ipus_of(module, is_training)
    if wanted and wanted != ipus:
        raise _misplaced(module, wanted, ipus, is_training)
    if wanted and "phased" in strategy:
        raise PartitionError(
            f"splits_per_ipu put parts of one layer on several IPUs, which phases can't have, but "
            f"the strategy is {strategy!r}. Use a factor, or another strategy."
        )
    if not is_training:
        _check_places(module)


def _misplaced(module: nn.Module, wanted: int, ipus: int, is_training: bool) -> PartitionError:
    by_config = any(getattr(layer, "by_config", False) for layer in module.modules())
    if is_training:
        cure = "Divide the module with stages, or pass ipus_per_replica="
        cure = f"{cure}{wanted}." if not by_config else f"Set IPUConfig.ipus_per_replica={wanted}."
        return PartitionError(
            "splits_per_ipu of serialised layers must have a number for each IPU of a replica, got "
            f"{wanted} and a replica has {ipus}. {cure}"
        )
    divide = "divide the module there as in training."
    cure = divide if not by_config else f"set IPUConfig.inference_ipus_per_replica={wanted}."
    return PartitionError(
        "splits_per_ipu of layers serialised in inference must have a number for each IPU of a "
        f"replica there, got {wanted} and a replica has {ipus}. Say with "
        f"inference_serialized_layers how they are cut in inference, or {cure}"
    )


def _check_places(module: nn.Module) -> None:
    """Refuse a parameter that inference, which has those of training, needs on several IPUs."""
    for layer in module.modules():
        places = layer.places(training=False) if isinstance(layer, Serialized) else {}
        for name, ipus in places.items():
            if len(ipus) > 1:
                assert isinstance(layer, Serialized)
                before, parts = layer.parts.describe(), layer.inference_parts
                kind = "embedding" if isinstance(layer, nn.Embedding) else "projection"
                cure = "splits_per_ipu in serialized_layers"
                if layer.by_config:
                    cure = f"IPUConfig.serialized_{kind}_splits_per_ipu or {cure}"
                raise PartitionError(
                    f"a parameter must be on one IPU, but in inference {layer.title!r} is cut by "
                    f"{parts.describe()}, which needs its {name!r} on IPUs "
                    f"{', '.join(map(str, ipus))}; the parameters are those of training, "
                    f"{before}. Cut it into {parts.count} parts in training too, by {cure}."
                )


def ipus_with_parts(module: nn.Module) -> AbstractSet[int]:
    """The IPUs of a replica on which parts of serialised layers lie."""
    layers = (part for part in module.modules() if isinstance(part, Serialized))
    return {0, *(ipu for layer in layers for ipu in layer.parts.ipus)}
