"""Whose behaviour this is."""

__all__ = ["__version__"]

# PopTorch 3.4.0; what follows the plus is the engine, where PopTorch has its commit.
__version__ = "3.4.0+ipufit"
