"""Models over several IPUs: which part is on which, layers in parts, values computed again."""

from ipufit.parallel.serialization import Serialization
from ipufit.parallel.serializing import serialize, to_dense

__all__ = ["Serialization", "serialize", "to_dense"]
