"""Models over several IPUs: which part is on which, layers in parts, values computed again."""

from typing import TYPE_CHECKING

from ipufit.utils.lazy_exports import on_use

if TYPE_CHECKING:
    from ipufit.partition.serialization import Serialization
    from ipufit.partition.serialize import serialize, to_dense
else:
    __getattr__, __dir__ = on_use(
        __name__,
        {
            "Serialization": "ipufit.partition.serialization",
            "serialize": "ipufit.partition.serialize",
            "to_dense": "ipufit.partition.serialize",
        },
    )

__all__ = ["Serialization", "serialize", "to_dense"]
