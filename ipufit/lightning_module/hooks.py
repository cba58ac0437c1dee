"""Callback that calls the hooks of a LightningModule that lie between executions."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional

import torch

from ipufit.callbacks import Callback
from ipufit.callbacks.callback import Logs
from ipufit.lightning_module.detect import overrides
from ipufit.lightning_module.logging import Log, attached, hook_log, no_log
from ipufit.lightning_module.metrics import ModuleMetrics
from ipufit.lightning_module.trainer_proxy import FitTrainerProxy

__all__ = ["ModuleHooks"]


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
        self, module: Any, metrics: ModuleMetrics, stage: str, facts: Dict[str, Any]
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
                "global_step": lambda: self._updates(),
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
            },
            setters={"should_stop": self._stop},
        )

    def _stop(self, value: object) -> None:
        self.model.stop_training = bool(value)

    def _process(self) -> Any:
        return self.model._session.processes

    def _updates(self) -> int:
        session = self.model._session
        program = session._training
        return int(session.updates if program is None else program.updates)

    def _call(
        self, names: Iterable[str], role: str = "train", values: Optional[Dict[str, float]] = None
    ) -> None:
        """Call those of these hooks that exist; at the end of an epoch, with its values."""
        processes = None if values is None else self._process()
        log: Optional[Log] = None
        if values is not None:
            log = hook_log(values, self._metrics.computed)
        for name in names:
            if overrides(self._module, name):
                shown = self._metrics.shown(role, processes)
                with shown, attached(self._module, self._facts, log or no_log(name)):
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
