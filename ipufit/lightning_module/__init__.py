"""A LightningModule as a :class:`ipufit.Model`: its steps, optimizer, data, hooks and metrics.

Lightning is never imported here: the classes of a module tell what it is. `ipufit.lightning` builds
on this room for those who keep their Trainer.
"""

from ipufit.lightning_module.model import LightningModel

__all__ = ["LightningModel"]
