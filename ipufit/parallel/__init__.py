"""Models too large for one IPU's memory: layers in parts, and values that are computed again."""

from ipufit.parallel.serialization import Serialization
from ipufit.parallel.serializing import serialize, to_dense

__all__ = ["Serialization", "serialize", "to_dense"]
