"""Loaders of a LightningDataModule, or of the LightningModule itself, for one stage."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Mapping, Optional

from ipufit.errors import ConfigurationError
from ipufit.lightning_module.detect import is_data_module, overrides
from ipufit.lightning_module.logging import attached, no_log
from ipufit.lightning_module.unsupported import refuse_data_hooks
from ipufit.processes import current

__all__ = ["Loaders", "loaders_for"]

_LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


class Loaders:
    """Data of a stage: loaders of a module or data module, or what the user passed.

    Args:
        owner: a LightningDataModule, a LightningModule with loaders, or None: ``x`` is the data.
        x: the data itself, where there is no owner.
        stage: "fit", "validate", "test" or "predict".

    Attributes:
        owner, x: as given.
    """

    def __init__(self, owner: Any, x: Any, stage: str) -> None:
        self.owner = owner
        self.x = x
        self._stage = stage

    def main(self) -> Any:
        """Return the data that the stage reads.

        Raises:
            ConfigurationError: several loaders, or none.
        """
        return self.x if self.owner is None else self._call_method(_LOADERS[self._stage])

    def held_out(self) -> Any:
        """Return the data that ``fit`` validates on; None for none."""
        name = _LOADERS["validate"]
        if self.owner is None or not self._has(name):
            return None
        loader = self._call_method(name)
        return None if isinstance(loader, (list, tuple)) and not loader else loader

    def _has(self, name: str) -> bool:
        base = "LightningDataModule" if is_data_module(self.owner) else "LightningModule"
        return overrides(self.owner, name, base)

    def _call_method(self, name: str) -> Any:
        where = f"{type(self.owner).__name__}.{name}"
        if not self._has(name):
            raise ConfigurationError(
                f"{where} must return a loader, but there is none. Write it, or pass data."
            )
        loaders = getattr(self.owner, name)()
        if isinstance(loaders, (list, tuple)) and len(loaders) == 1:
            return loaders[0]
        is_combined = type(loaders).__name__ == "CombinedLoader"
        if (
            is_combined
            or isinstance(loaders, Mapping)
            or (isinstance(loaders, (list, tuple)) and loaders)
        ):
            raise ConfigurationError(
                f"{where} must return one loader, got {type(loaders).__name__}. Join the datasets "
                "with torch.utils.data.ConcatDataset or StackDataset, or call evaluate once for "
                "each."
            )
        return loaders


def loaders_for(module: object, x: object, datamodule: object, stage: str) -> Loaders:
    """Choose the data that the user passed, or else the loaders of the LightningModule.

    Args:
        module: the LightningModule.
        x: data, a LightningDataModule, or None.
        datamodule: a LightningDataModule, or None.
        stage: "fit", "validate", "test" or "predict".

    Raises:
        ConfigurationError: neither or both, or hooks that are not called.
    """
    if datamodule is None and is_data_module(x):
        x, datamodule = None, x
    if datamodule is not None:
        if x is not None:
            raise ConfigurationError(
                "x and datamodule both say what the data is. Pass one of them."
            )
        if not is_data_module(datamodule):
            raise ConfigurationError(
                "datamodule must be a LightningDataModule object, got "
                f"{type(datamodule).__name__}. Pass other data as x."
            )
        refuse_data_hooks(datamodule)
        return Loaders(datamodule, None, stage)
    if x is not None:
        return Loaders(None, x, stage)
    name = _LOADERS[stage]
    if not overrides(module, name):
        raise ConfigurationError(
            f"there is no data: neither x nor datamodule came, and {type(module).__name__} has no "
            f"{name}. Pass one of them."
        )
    return Loaders(module, None, stage)


@contextlib.contextmanager
def set_up(module: Any, loaders: Loaders, stage: str, facts: object) -> Iterator[None]:
    """Call ``prepare_data`` in the first process alone, ``setup``, and afterwards ``teardown``.

    Args:
        module: the LightningModule.
        loaders: the data.
        stage: as Lightning calls it.
        facts: what ``self.trainer`` is while they run.
    """
    owners: List[Any] = [module] if loaders.owner in (None, module) else [loaders.owner, module]

    def prepare() -> Optional[bool]:
        for owner in owners:
            if hasattr(owner, "prepare_data"):
                owner.prepare_data()
        return None

    with attached(module, facts, no_log("setup")):
        current().run_on_rank_zero(prepare)
        for owner in owners:
            owner.setup(stage=stage)
        if hasattr(module, "configure_model"):
            module.configure_model()
    try:
        yield
    finally:
        with attached(module, facts, no_log("teardown")):
            for owner in owners:
                owner.teardown(stage=stage)
