"""Checkpoints of a whole training: folders of JSON and safetensors, complete or absent."""

from ipufit.utils.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
