"""Models over several IPUs: which part is on which, layers in parts, values computed again."""

from typing import TYPE_CHECKING

from ipufit.on_use import on_use

if TYPE_CHECKING:
    from ipufit.parallel.serialization import Serialization
    from ipufit.parallel.serializing import serialize, to_dense
else:
    __getattr__, __dir__ = on_use(
        __name__,
        {
            "Serialization": "ipufit.parallel.serialization",
            "serialize": "ipufit.parallel.serializing",
            "to_dense": "ipufit.parallel.serializing",
        },
    )

__all__ = ["Serialization", "serialize", "to_dense"]
