"""Models too large for one IPU's memory: layers in parts."""

from ipufit.parallel.serialization import Serialization
from ipufit.parallel.serializing import serialize, to_dense

__all__ = ["Serialization", "serialize", "to_dense"]
