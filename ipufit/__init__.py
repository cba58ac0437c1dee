"""A Keras-like fit library for PyTorch whose whole training step is one traced program.

:class:`ipufit.Model` is where to begin; see docs/quickstart.md.
"""

from typing import Any

from ipufit._version import __version__ as __version__
from ipufit.training import makers_of_lightning_models
from ipufit.utils.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    moved={
        "optimizer_state": "ipufit.optim.state",
        "parallel": "ipufit.partition",
        "schedules": "ipufit.optim.schedules",
    },
)


def _model_of_lightning(module: Any, engine: Any, device: Any) -> object:
    # Imported here, as above: few models are LightningModules.
    from ipufit.lightning_module import LightningModel

    return LightningModel(module, engine, device)


makers_of_lightning_models.append(_model_of_lightning)
