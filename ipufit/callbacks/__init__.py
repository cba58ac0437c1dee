"""Hooks into training, under Keras' names and with its timing.

docs/callbacks.md shows them at work.
"""

from ipufit.utils.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
