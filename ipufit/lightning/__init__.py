"""For those who keep their Trainer: the accelerator "ipu" and IPUStrategy, for Lightning 2.

Importing this imports Lightning, and registers both names with it.
"""

from ipufit.lightning.accelerator import IPUAccelerator
from ipufit.lightning.strategy import IPUStrategy

__all__ = ["IPUAccelerator", "IPUStrategy"]
