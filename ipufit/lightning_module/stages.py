"""A stage of a LightningModule: its loaders, and its hooks between executions."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ipufit.callbacks import Callback
from ipufit.callbacks.callback import Logs
from ipufit.errors import ConfigurationError
from ipufit.lightning_module.inspection import is_data_module, overrides, refuse_data_hooks
from ipufit.lightning_module.logging import attached, hook_log, no_log
from ipufit.lightning_module.module_metrics import ModuleMetrics
from ipufit.lightning_module.trainer_proxy import FitTrainerProxy
from ipufit.optim.schedules.schedule import TorchSchedule
from ipufit.optim.several import members_of
from ipufit.processes import current

_LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


class _Nothing(IterableDataset[object]):
    def __iter__(self) -> Iterator[object]:
        return iter(())


# Stands for a loader that is not there yet: nothing is known of its batches.
_ANY_LOADER = DataLoader(_Nothing(), batch_size=None)


class Loaders(NamedTuple):
    """Data of a stage: loaders of a module or data module, or what the user passed.

    Attributes:
        owner: a LightningDataModule, a LightningModule with loaders, or None: ``x`` is the data.
        x: the data itself, where there is no owner.
        stage: "fit", "validate", "test" or "predict".
    """

    owner: object
    x: object
    stage: str

    def before_setup(self) -> Loaders:
        """Return what is known of the data before ``setup``: the user's, or only that it loads."""
        return self if self.owner is None else self._replace(owner=None, x=_ANY_LOADER)

    def main(self) -> object:
        """Return the data that the stage reads.

        Raises:
            ConfigurationError: several loaders, or none.
        """
        return self.x if self.owner is None else self._call_method(_LOADERS[self.stage])

    def held_out(self) -> object:
        """Return the data that ``fit`` validates on; None for none."""
        name = _LOADERS["validate"]
        if self.x is _ANY_LOADER:
            return self.x
        if self.owner is None or not overrides(self.owner, name):
            return None
        loader = self._call_method(name)
        return None if isinstance(loader, (list, tuple)) and not loader else loader

    def _call_method(self, name: str) -> object:
        where = f"{type(self.owner).__name__}.{name}"
        if not overrides(self.owner, name):
            raise ConfigurationError(
                f"{where} must return a loader, but it does not exist. Define it, or pass data."
            )
        loaders = getattr(self.owner, name)()
        if isinstance(loaders, (list, tuple)) and len(loaders) == 1:
            return loaders[0]
        is_combined = type(loaders).__name__ == "CombinedLoader" or isinstance(loaders, Mapping)
        if is_combined or (isinstance(loaders, (list, tuple)) and loaders):
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
            raise ConfigurationError("x and datamodule both define the data. Pass one of them.")
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
            f"there is no data: neither x nor datamodule was passed, and {type(module).__name__} "
            f"has no {name}. Pass one of them."
        )
    return Loaders(module, None, stage)


@contextlib.contextmanager
def set_up(module: nn.Module, loaders: Loaders, stage: str, facts: object) -> Iterator[None]:
    """Call ``prepare_data`` in the first process alone, ``setup``, and afterwards ``teardown``.

    A LightningDataModule also gets what ends the stage early, in ``on_exception``.

    Args:
        module: the LightningModule.
        loaders: the data.
        stage: as Lightning calls it.
        facts: what ``self.trainer`` is while they run.
    """
    owners: List[Any] = [module] if loaders.owner in (None, module) else [loaders.owner, module]

    def prepare() -> None:
        for owner in owners:
            if hasattr(owner, "prepare_data"):
                owner.prepare_data()

    try:
        with attached(module, facts, no_log("setup")):
            current().run_on_rank_zero(prepare)
            for owner in owners:
                owner.setup(stage=stage)
            if hasattr(module, "configure_model"):
                owners[-1].configure_model()
        try:
            yield
        finally:
            with attached(module, facts, no_log("teardown")):
                for owner in owners:
                    owner.teardown(stage=stage)
    except BaseException as error:
        if is_data_module(owners[0]) and overrides(owners[0], "on_exception"):
            owners[0].on_exception(error)
        raise


class ModuleHooks(Callback):
    """Calls ``on_fit_start``, ``on_train_epoch_end`` and their like.

    In them ``self.trainer`` has what is known of the run, and at the ends of epochs ``self.log``
    puts values beside those of the epoch. Metric objects have the state of the hook's own step; of
    several processes, at the ends of epochs, that of all.

    Args:
        module: the LightningModule.
        metrics: its metric objects.
        stage: "validation", "test" or "predict": whose hooks an evaluation or a prediction calls.
        facts: what ``self.trainer`` has besides.
    """

    def __init__(
        self, module: nn.Module, metrics: ModuleMetrics, stage: str, facts: Mapping[str, object]
    ) -> None:
        super().__init__()
        self._module = module
        self._metrics = metrics
        self._stage = stage
        self._epoch = 0
        self._seen: Dict[str, float] = {}
        self._training = False
        self._validating = False
        ends = ("on_train_epoch_end", "on_validation_epoch_end")
        self.adds = None if any(overrides(module, name) for name in ends) else ()
        self._facts = FitTrainerProxy(
            {
                **facts,
                "current_epoch": lambda: self._epoch,
                "global_step": lambda: self.model._session.present_updates,
                "callback_metrics": lambda: _as_tensors(self._seen),
                "training": lambda: self._training and not self._validating,
                "validating": lambda: self._validating and stage == "validation",
                "testing": lambda: stage == "test",
                "predicting": lambda: stage == "predict",
                "sanity_checking": False,
                "is_global_zero": lambda: self._process().is_rank_zero,
                "global_rank": lambda: self._process().process_id,
                "world_size": lambda: self._process().num_processes,
                "lightning_module": module,
                "should_stop": lambda: bool(self.model.stop_training),
                "optimizers": self._optimizers,
            },
            setters={"should_stop": self._stop},
        )

    def _stop(self, value: object) -> None:
        self.model.stop_training = bool(value)

    def _optimizers(self) -> List[torch.optim.Optimizer]:
        return [*filter(None, members_of(self.model.optimizer).values())]

    def _one_or_all(self, use_pl_optimizer: bool = True) -> object:
        optimizers = self._optimizers()
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def _scheduler(self) -> object:
        schedule = self.model._session.config.schedule
        return schedule.scheduler if isinstance(schedule, TorchSchedule) else None

    def _process(self) -> Any:
        return self.model._session.processes

    def _call(
        self, names: Iterable[str], role: str = "train", values: Optional[Dict[str, float]] = None
    ) -> None:
        """Call those of these hooks that exist; at the end of an epoch, with its values."""
        processes = None if values is None else self._process()
        log = None if values is None else hook_log(values, self._metrics.computed)
        methods = {"optimizers": self._one_or_all, "lr_schedulers": self._scheduler}
        for name in names:
            if overrides(self._module, name):
                shown = self._metrics.shown(role, processes)
                with shown, attached(self._module, self._facts, log or no_log(name), methods):
                    getattr(self._module, name)()

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Call the module's on_fit_start and on_train_start."""
        self._training = True
        self._call(("on_fit_start", "on_train_start"))

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Call the module's on_train_epoch_start."""
        self._epoch = epoch
        self._call(("on_train_epoch_start",))

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Call the module's on_train_epoch_end, whose logged values enter the history."""
        assert isinstance(logs, dict)
        self._seen = {**self._seen, **logs}
        self._call(("on_train_epoch_end",), values=logs)

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """Call the module's on_train_end and on_fit_end."""
        self._call(("on_train_end", "on_fit_end"))
        self._training = False

    def on_test_begin(self, logs: Optional[Logs] = None) -> None:
        """Call the hooks at the start of a validation or test."""
        self._validating = True
        names = (f"on_{self._stage}_start", f"on_{self._stage}_epoch_start")
        self._call(names, self._stage)

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """Call the hooks at the end of a validation or test."""
        assert isinstance(logs, dict)
        self._seen = {**self._seen, **logs}
        self._call((f"on_{self._stage}_epoch_end",), self._stage, logs)
        self._call((f"on_{self._stage}_end",), self._stage)
        self._validating = False

    def on_predict_begin(self, logs: Optional[Logs] = None) -> None:
        """Call the module's on_predict_start and on_predict_epoch_start."""
        self._call(("on_predict_start", "on_predict_epoch_start"), "predict")

    def on_predict_end(self, logs: Optional[Logs] = None) -> None:
        """Call the module's on_predict_epoch_end and on_predict_end."""
        self._call(("on_predict_epoch_end", "on_predict_end"), "predict")


def _as_tensors(values: Dict[str, float]) -> Dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
