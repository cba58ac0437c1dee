"""A LightningModule, as it is, in ipufit's recorded program. Lightning itself is not imported."""

from ipufit.lightning.module.model import LightningModel

__all__ = ["LightningModel"]
