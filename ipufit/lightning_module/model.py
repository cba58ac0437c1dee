"""Model of a LightningModule, with its steps, optimizer, data and hooks."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple, Union

import torch
from torch import nn

from ipufit.callbacks.callback_list import checked
from ipufit.callbacks.history import History
from ipufit.core import EngineName
from ipufit.core.batch import Mode
from ipufit.data.settings import Loading, resolve_validation
from ipufit.engines.choice import engine_maker
from ipufit.engines.program import Engine, Program, ProgramSpec
from ipufit.errors import ConfigurationError
from ipufit.lightning_module.inspection import lightning_parts, overrides, refuse_module
from ipufit.lightning_module.logging import Notes
from ipufit.lightning_module.manual import ManualLosses
from ipufit.lightning_module.module_metrics import MeasuredProgram, ModuleMetrics, StepMetrics
from ipufit.lightning_module.optimizers import configure_manual, configure_optimizer
from ipufit.lightning_module.stages import Loaders, ModuleHooks, loaders_for, set_up
from ipufit.lightning_module.steps import Steps, acting_as, steps_of
from ipufit.lightning_module.trainer_proxy import FitTrainerProxy, NotKnownYetError
from ipufit.losses.loss import WHOLE_BATCH
from ipufit.metrics.metric_set import MetricSet
from ipufit.optim.several import index_of_group
from ipufit.partition.request import Parallel, PartitionRequest
from ipufit.training.compile import pair_of_options
from ipufit.training.model import CallOptions, Evaluated, Model, StepsModel, check_device
from ipufit.training.session import Session
from ipufit.utils.error_collector import ErrorCollector
from ipufit.utils.names import with_hints

# Arguments of fit that make the count of updates another than that of the loader's batches.
_RECOUNTING = ("steps_per_epoch", "loading", "validation_split")


@with_hints()
class LightningModel(StepsModel):
    """Model that calls the steps of a LightningModule as recorded programs.

    Args:
        module: a LightningModule.
        engine: as for :class:`ipufit.Model`.
        device: as for :class:`ipufit.Model`.
        by_trainer: whether a Trainer calls the hooks between executions.

    Attributes:
        lightning: the LightningModule; ``module`` wraps it, and has its steps as forward.

    Raises:
        ConfigurationError: it does what a recorded program can't; all of it.
    """

    module: Steps

    def __init__(
        self,
        module: nn.Module,
        engine: Union[EngineName, Callable[[], Engine]] = "auto",
        device: Union[str, torch.device, None] = None,
        by_trainer: bool = False,
    ) -> None:
        faults = ErrorCollector(of_call=True)
        with faults.collect():
            engine_maker(engine)
        with faults.collect():
            check_device(device)
        with faults.collect():
            refuse_module(module, by_trainer)
        faults.raise_all()
        if device is not None:
            module.to(device)
        super().__init__(steps_of(module), engine)
        self.lightning = module
        self._metrics = ModuleMetrics(module, by_trainer)
        self._options: CallOptions = {}
        self._is_waiting, self._is_checking = True, False
        if by_trainer:
            self.module.keep_notes()

    def compile(
        self,
        optimizer: object = None,
        loss: object = None,
        loss_weights: object = None,
        metrics: object = None,
        weighted_metrics: object = None,
        run_eagerly: bool = False,
        **options: object,
    ) -> None:
        """Choose how to train; without a call, everything is as the LightningModule says.

        Args:
            optimizer: None takes what ``configure_optimizers`` returns, its schedule included.
            loss: None: the steps compute it.
            loss_weights: None, like the loss.
            metrics: None: the steps log what there is to see.
            weighted_metrics: None, like the metrics.
            run_eagerly: as for :meth:`ipufit.Model.compile`.
            options: as for :meth:`ipufit.Model.compile`.

        Raises:
            ConfigurationError: as for :meth:`ipufit.Model.compile`, or a form of optimizer and
                schedule that a program can't honour.
        """
        objectives = {"loss": loss, "loss_weights": loss_weights}
        objectives.update(metrics=metrics, weighted_metrics=weighted_metrics)
        faults = ErrorCollector()
        for name, value in objectives.items():
            with faults.collect():
                if value is not None:
                    raise ConfigurationError(
                        f"{name} must be None: the steps of a LightningModule compute the loss, "
                        f"and self.log reports values, got {value!r}. Leave it out."
                    )
        with faults.collect():
            if optimizer is None and options.get("lr_scheduler") is not None:
                raise ConfigurationError(
                    "lr_scheduler needs an optimizer, but configure_optimizers returns both. "
                    "Return the scheduler there, or pass the optimizer too."
                )
        faults.raise_all()
        options.update(optimizer=optimizer, run_eagerly=run_eagerly)
        try:
            self._make_session(options, FitTrainerProxy({}, fitting=False))
        except NotKnownYetError:
            # configure_optimizers asks for what only fit knows.
            ErrorCollector.end_checks()
            self._is_waiting = True
            self._retire(None)
        self._options = options

    def compile_to_infer(self, **options: object) -> None:
        """Compile without an optimizer, to evaluate and predict.

        Args:
            options: as for :meth:`compile`.
        """
        self._make_session(options, None)
        self._options = options

    @property
    def session(self) -> Session:
        """The settings that were compiled."""
        return self._compiled("fit")

    def _make_session(self, options: Mapping[str, Any], facts: Optional[FitTrainerProxy]) -> None:
        """Compile with what the module configures, or without an optimizer if facts is None.

        Raises:
            NotKnownYetError: ``configure_optimizers`` asks for what the facts don't tell.
        """
        options = dict(options)
        optimizer = options.pop("optimizer", None)
        loss: object = WHOLE_BATCH
        if facts is not None and not self.lightning.automatic_optimization:
            optimizer, loss = self._manual(optimizer, facts)
        elif optimizer is None and facts is not None:
            optimizer, schedule = configure_optimizer(self.lightning, facts)
            if schedule is not None:
                options["lr_scheduler"] = schedule
        super().compile(optimizer, loss, **options)
        self._is_waiting = facts is None

    def _manual(self, optimizer: object, facts: FitTrainerProxy) -> Tuple[object, ManualLosses]:
        """Return the optimizers whose steps ``training_step`` makes, and the losses of these."""
        if optimizer is not None:
            raise ConfigurationError(
                f"{type(self.lightning).__name__} makes the steps of its optimizers itself, so "
                f"optimizer must be None, got {optimizer!r}. Return it from configure_optimizers."
            )
        optimizers = configure_manual(self.lightning, facts)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        owned = map(index_of_group, optimizers)
        by_optimizer = tuple(tuple(names[p] for p in each if p in names) for each in owned)
        losses = ManualLosses("training_step", in_module="whole", names=by_optimizer)
        return (optimizers if len(optimizers) > 1 else optimizers[0]), losses

    def _fit(self, x: object, y: object, datamodule: object, options: CallOptions) -> History:
        """Train."""
        epochs = options["epochs"]
        loaders = loaders_for(self.lightning, x, datamodule, "fit")
        self._refuse_checkpoint_hooks(loaders.owner, options)
        facts = {"max_epochs": epochs.stop if isinstance(epochs, range) else epochs}
        early = self._with_validation(options, loaders.before_setup().held_out)
        self._check_first(loaders, early, lambda data: Model.fit(self, data, y, **early))
        with self._stage("fit", loaders, "validation", facts, options):
            data = loaders.main()
            options = self._with_validation(options, loaders.held_out)
            if self._is_waiting:
                counts = self._counted(data, y, options)
                with ErrorCollector.beginning_with(None):
                    self._make_session(self._options, FitTrainerProxy({**facts, **counts}))
            return Model.fit(self, data, y, **options)

    def _with_validation(
        self, options: Mapping[str, object], held_out: Callable[[], object]
    ) -> CallOptions:
        """Add the loader for validation to the options of ``fit``, if it validates on that."""
        options = dict(options)
        has_step = overrides(self.lightning, "validation_step")
        is_none = "validation_data" in options and options["validation_data"] is None
        validation = resolve_validation(options.get("validation_data"))
        if validation.data is not None or options.get("validation_split"):
            self._require("validation_step")
        elif not is_none and "validation_split" not in options and has_step:
            options["validation_data"] = dataclasses.replace(validation, data=held_out())
        return options

    def _check_first(
        self, loaders: Loaders, options: Dict[str, object], call: Callable[[object], object]
    ) -> None:
        """Raise what is wrong with the arguments of a call before ``setup`` does any work.

        Args:
            loaders: the data.
            options: of the call; what depends on the length of a loader that is not there yet is
                checked later.
            call: the call, with the data.
        """
        early = loaders.before_setup()
        loading = options.get("loading")
        if early is not loaders and isinstance(loading, Loading):
            fractions = {k: 1 for k, v in vars(loading).items() if isinstance(v, float)}
            options["loading"] = dataclasses.replace(loading, **fractions)
        session = self._session
        if session is None:
            with ErrorCollector.beginning_with(None):
                self._make_session(self._options, None)
        try:
            self._is_checking = True
            ErrorCollector.check_only(lambda: call(early.main()))
        finally:
            self._is_checking = False
            if session is None:
                self._retire(None)

    def _trainable(self, name: str, later: str = "") -> Session:
        # What makes the optimizer may need setup.
        return self._compiled(name) if self._is_checking else super()._trainable(name, later)

    def _evaluate(
        self, stage: str, x: object, y: object, datamodule: object, options: CallOptions
    ) -> Evaluated:
        """Evaluate."""
        role = "validation" if stage == "validate" else stage
        self._require(f"{role}_step")
        loaders = loaders_for(self.lightning, x, datamodule, stage)
        self._check_first(loaders, options, lambda data: Model.evaluate(self, data, y, **options))
        with self._stage(stage, loaders, role, {}, options):
            return Model.evaluate(self, loaders.main(), y, **options)

    def _predict(self, x: object, datamodule: object, options: CallOptions) -> Any:
        """Predict."""
        loaders = loaders_for(self.lightning, x, datamodule, "predict")
        self._check_first(loaders, options, lambda data: Model.predict(self, data, **options))
        with self._stage("predict", loaders, "predict", {}, options):
            return Model.predict(self, loaders.main(), **options)

    def predict_iter(  # type: ignore[override]
        self, x: object = None, batch_size: Optional[int] = None, **options: Any
    ) -> Iterator[Any]:
        """Yield the results of ``predict`` piece by piece, without the hooks of the module.

        Args:
            x: as for :meth:`ipufit.Model.predict_iter`.
            batch_size: as for ``fit``.
            options: as for :meth:`ipufit.Model.predict_iter`.
        """
        self._ready()
        with acting_as(self.module, "predict"):
            pieces = super().predict_iter(x, batch_size, **options)
        return self._in_role(pieces)

    def _in_role(self, pieces: Iterator[object]) -> Iterator[object]:
        while True:
            with acting_as(self.module, "predict"):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece

    def predict_on_batch(self, x: object) -> Any:
        """Return the result of ``predict_step`` for one batch."""
        self._ready()
        with acting_as(self.module, "predict"):
            return super().predict_on_batch(x)

    @property
    def hyperparameters(self) -> Dict[str, Any]:
        """The ``hparams`` of the LightningModule."""
        return dict(getattr(self.lightning, "hparams", {}))

    def _ready(self) -> None:
        """Compile for calls that need no optimizer, unless that was done."""
        with ErrorCollector.beginning_with(None):
            if self._session is not None:
                return
            try:
                self._make_session(self._options, FitTrainerProxy({}, fitting=False))
            except NotKnownYetError:
                self._make_session(self._options, None)

    def _compiled(self, name: str) -> Session:
        if name != "fit":
            self._ready()
        session = super()._compiled(name)
        if not session.metrics and self._metrics.find():
            session.metrics = MetricSet([StepMetrics(self._metrics, self.module)])
            session.around = self._measured
        return session

    def _measured(self, program: Program, spec: ProgramSpec) -> Program:
        """Wrap a program so that it updates the metric objects of the module."""
        if spec.mode is Mode.PREDICT:
            return program
        return MeasuredProgram(program, self._metrics, self.module.role, spec)

    def notes(self, role: str) -> Notes:
        """Return how a step has logged its values, by name, where a Trainer keeps them."""
        return (self.module.notes or {}).get(role, {})

    def logged_metrics(self, role: str) -> Dict[str, object]:
        """Return the metric objects that a step logs, by the names of their values."""
        return dict(self._metrics.logged(role))

    @contextlib.contextmanager
    def _stage(
        self,
        stage: str,
        loaders: Loaders,
        role: str,
        facts: Mapping[str, object],
        options: Dict[str, object],
    ) -> Iterator[None]:
        """Set up the module for a stage, without its old Trainer; its hooks become a callback."""
        for part in lightning_parts(self.lightning):
            vars(part)["_trainer"] = None
        proxy = FitTrainerProxy(facts)
        with set_up(self.lightning, loaders, stage, proxy), acting_as(self.module, role):
            if stage != "fit":
                self._ready()
            hooks = ModuleHooks(self.lightning, self._metrics, role, facts)
            options["callbacks"] = [hooks, *checked(options.get("callbacks", ()))]
            yield
            self._metrics.finish()

    def _require(self, step: str) -> None:
        if not overrides(self.lightning, step):
            raise ConfigurationError(
                f"{type(self.lightning).__name__} has no {step}, which this call needs. Define it."
            )

    def _refuse_checkpoint_hooks(self, data: object, options: Mapping[str, object]) -> None:
        hooks: Dict[str, object] = {"on_save_checkpoint": self.lightning}
        hooks["on_load_checkpoint"] = self.lightning
        if data not in (None, self.lightning):
            hooks.update(dict.fromkeys(("state_dict", "load_state_dict"), data))
        names = [f"{type(v).__name__}.{name}" for name, v in hooks.items() if overrides(v, name)]
        if names and options.get("checkpoint") is not None:
            raise ConfigurationError(
                f"{' and '.join(names)} can't be called: an ipufit checkpoint holds tensors of the "
                "module, and state_dict of callbacks. Keep additional values in a buffer, or in "
                "the state_dict of a callback."
            )

    def _counted(self, data: object, y: object, options: Mapping[str, Any]) -> Dict[str, object]:
        """Count batches and updates under a Trainer's names, as far as that can be done."""
        epochs = options.get("epochs", 1)
        recounts = any(options.get(name) for name in _RECOUNTING) or isinstance(epochs, range)
        if recounts or y is not None or self._recounts_replicas():
            return {}
        accumulation = options.get("gradient_accumulation") or 1
        counts: Dict[str, object] = {"accumulate_grad_batches": accumulation}
        if isinstance(data, torch.utils.data.DataLoader):
            try:
                batches = len(data)
            except TypeError:
                return counts
            updates = -(-batches // (accumulation * (options.get("ipus") or 1)))
            counts["num_training_batches"] = batches
            counts["estimated_stepping_batches"] = updates * int(epochs)
        return counts

    def _recounts_replicas(self) -> bool:
        """Look whether ``compile`` was told what makes replicas of several IPUs, or fixes them."""
        parallel = self._options.get("parallel")
        training, _ = pair_of_options(self._options.get("poptorch"))
        if isinstance(parallel, Parallel):
            request, _ = PartitionRequest.pair(parallel)
            parallel = None if request.is_empty else parallel
        told = (parallel, training, self._options.get("config"))
        return any(value is not None for value in told)
