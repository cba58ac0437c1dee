"""How one copy of a model is laid over IPUs, as a configuration says it."""

from __future__ import annotations

import dataclasses
from typing import Optional, Tuple

__all__ = ["Partition"]


@dataclasses.dataclass(frozen=True)
class Partition:
    """How one copy of the model is laid over IPUs.

    Attributes:
        ipus_per_replica: IPUs of one copy.
        layers_per_ipu: layers on each of them, -1 for an even share of the rest.
        embedding_serialization_factor, projection_serialization_factor: parts into which the layer
            is cut on one IPU; None where the splits say it.
        serialized_embedding_splits_per_ipu, serialized_projection_splits_per_ipu: parts on each
            IPU, or None.
        recompute_checkpoint_every_layer: whether activations are computed again in the backward
            pass.
    """

    ipus_per_replica: int
    layers_per_ipu: Tuple[int, ...]
    embedding_serialization_factor: Optional[int]
    serialized_embedding_splits_per_ipu: Optional[Tuple[int, ...]]
    projection_serialization_factor: Optional[int]
    serialized_projection_splits_per_ipu: Optional[Tuple[int, ...]]
    recompute_checkpoint_every_layer: bool
