"""``Model`` and its ways: compile, fit, evaluate, predict, and the ``Trainer`` of all of them.

Nothing here asks which engine runs a program. Users import from ``ipufit`` itself.
"""

from typing import Any, Callable, List

__all__ = ["makers_of_lightning_models"]

# The function that Model.from_lightning calls. The room of LightningModules lies above this one,
# which can't import it, so the package adds it.
makers_of_lightning_models: List[Callable[..., Any]] = []
