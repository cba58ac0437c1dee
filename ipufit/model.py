"""Model: compile, fit, evaluate, predict. It checks its arguments and delegates."""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Union

import torch
from torch import nn

from ipufit import loop
from ipufit.arguments import FitArguments, InferenceArguments, one_of
from ipufit.callbacks import Callback, CallbackList, ProgbarLogger
from ipufit.data.forms import Given, open_data
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.errors import ConfigurationError, NotCompiledError
from ipufit.faults import Faults
from ipufit.fit_data import FitRequest, limited_plan
from ipufit.history import History
from ipufit.loop import Job
from ipufit.losses import resolve_loss
from ipufit.metrics import resolve_metrics
from ipufit.modes import evaluating, training
from ipufit.optimizers import resolve_optimizer
from ipufit.plan import Plan
from ipufit.program import Engine, Mode
from ipufit.recordable import refuse_unrecordable
from ipufit.session import Session, Validation, describe, updates_per_epoch
from ipufit.verbosity import say_dev_run

__all__ = ["Model"]


class Model:
    """Trains, evaluates and applies a torch module as one traced program.

    The module stays the source of truth for the weights: it holds the trained values after ``fit``,
    and current ones whenever a callback looks.

    Args:
        module: any ``torch.nn.Module``.
        engine: "auto" or "embedded", which runs in plain PyTorch; or a callable that makes an
            engine.
        device: where to run; the module is moved there. None leaves it where it is.

    Attributes:
        module: the user's module.
        history: of the last ``fit``, also one that was interrupted or failed.
        stop_training: set it to True in a callback to end ``fit`` with the present execution.

    Raises:
        ConfigurationError: the module or the engine is none.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: Union[str, Callable[[], Engine]] = "auto",
        device: Union[str, torch.device, None] = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigurationError(
                f"Model takes a torch.nn.Module object, got {module!r}. Pass an instance, such as "
                "ipufit.Model(MyNet())."
            )
        refuse_unrecordable(module)
        self.module = module if device is None else module.to(device)
        self.history = History()
        self.stop_training = False
        self._make_engine = _engine_maker(engine)
        self._session: Optional[Session] = None
        self._plan: Optional[Plan] = None

    def compile(
        self,
        optimizer: Any,
        loss: Any = None,
        metrics: Any = None,
        *,
        gradient_reduction: str = "mean",
        auto_round_ipus: bool = False,
        run_eagerly: bool = False,
    ) -> None:
        """Choose how to train. The count of updates starts anew.

        Args:
            optimizer: a name ("sgd", "adam", "adamw", "rmsprop", "lamb" or any other of
                torch.optim), an optimizer class, a configured torch optimizer over the module's
                parameters (its state is taken over), or a factory that is called with the trainable
                parameters. None makes a model that can only evaluate and predict.
            loss: a name, a module or callable ``(prediction, target)`` that returns the mean over a
                micro-batch, or None when the module returns ``(outputs, loss)`` itself.
            metrics: names, callables ``(prediction, target)`` or torchmetrics objects; one, a list,
                or a dict by name.
            gradient_reduction: over the micro-batches of an update: "mean", or "sum" of their
                means.
            auto_round_ipus: reserve the next power of two where ``ipus`` is none, and leave the
                rest idle.
            run_eagerly: run the module itself instead of a recorded program: the same numbers,
                slower, and open to a debugger.

        Raises:
            UnknownNameError: an unknown name; with the nearest known one.
            OptimizerError: the optimizer does not fit the module, or nothing is trainable.
            ConfigurationError: anything else that can't work, or several of these.
        """
        if self._session is not None and self._session.is_training:
            raise ConfigurationError(
                "compile was called inside fit, from a callback or the data. Call it when fit has "
                "returned."
            )
        faults = Faults()
        named = list(self.module.named_parameters())
        with faults.collected():
            resolved = resolve_loss(loss)
            if resolved.module is not None:
                named += [(f"loss.{name}", p) for name, p in resolved.module.named_parameters()]
        with faults.collected():
            torch_optimizer = None if optimizer is None else resolve_optimizer(optimizer, named)
        with faults.collected():
            metric_set = resolve_metrics(metrics)
        with faults.collected():
            one_of("gradient_reduction", gradient_reduction, ("mean", "sum"))
        with faults.collected():
            one_of("auto_round_ipus", auto_round_ipus, (True, False))
        with faults.collected():
            one_of("run_eagerly", run_eagerly, (True, False))
        faults.raise_all()
        engine = self._make_engine()
        if not callable(getattr(engine, "build", None)):
            raise ConfigurationError(
                f"engine must make an object with a method build(spec), got {engine!r}. Pass for "
                "example engine='embedded'."
            )
        self._session = Session(
            self.module,
            torch_optimizer,
            resolved,
            metric_set,
            engine,
            gradient_reduction,
            auto_round_ipus,
            run_eagerly,
        )

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The torch optimizer that ``compile`` made or was given, its state up to date, or None."""
        return self._compiled("optimizer").optimizer

    @property
    def capture_seconds(self) -> float:
        """Seconds spent on recording programs since ``compile``."""
        return self._session.engine.seconds if self._session else 0.0

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: Optional[int] = None,
        epochs: int = 1,
        ipus: Optional[int] = None,
        device_iterations: int = 1,
        gradient_accumulation: int = 1,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Optional[bool] = None,
        class_weight: Optional[Mapping[int, float]] = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: Optional[int] = None,
        validation_steps: Optional[int] = None,
        validation_batch_size: Optional[int] = None,
        validation_freq: Union[int, Collection[int]] = 1,
        limit_train_batches: Union[int, float, None] = None,
        limit_val_batches: Union[int, float, None] = None,
        overfit_batches: Union[int, float, None] = None,
        fast_dev_run: Union[bool, int] = False,
        prefetch: Optional[int] = None,
        inference_ipus: Optional[int] = None,
        inference_device_iterations: Optional[int] = None,
        callbacks: Union[Callback, Sequence[Callback], None] = (),
        seed: Optional[int] = None,
        verbose: Union[int, str] = "auto",
    ) -> History:
        """Train.

        Args:
            x: a tensor, a NumPy array (memory-mapped ones are read a batch at a time) or a dict,
                tuple or list of such, with one row per sample; a map-style or iterable Dataset; a
                DataLoader; or any iterable of batches ``(inputs, target)`` or ``(inputs, target,
                sample_weight)``. A loader's batch size is the micro-batch; its sampler, collate_fn,
                workers and generator are used as they are.
            y: targets beside tensors and arrays, in any structure, one row per sample.
            batch_size: of tensors, arrays and datasets: the micro-batch. None is 32.
            epochs: index of the epoch to stop before: a count when initial_epoch is 0, as in Keras.
            ipus: total number of IPUs; without stages, the number of replicas. None is one replica.
            device_iterations: weight updates per execution.
            gradient_accumulation: micro-batches that a replica sums before an update.
            validation_split: the last fraction of tensors, arrays or a map-style dataset is held
                out, before shuffling.
            validation_data: evaluated after every epoch; it never disturbs training. ``(x, y)`` or
                ``(x, y, sample_weight)`` of tensors and arrays, or any other form of ``x``.
            shuffle: tensors, arrays and map-style datasets, anew in every epoch, in an order that
                depends on seed and epoch alone. None is True for these; a loader has its own order.
            class_weight: weight of the samples by class index; other classes weigh 1. The target
                holds class indices, or rows of probabilities.
            sample_weight: how much each sample counts, beside tensors and arrays; shape (samples,)
                or more dimensions. Integers and bools become floating point.
            initial_epoch: index of the first epoch.
            steps_per_epoch: weight updates of an epoch. The next epoch goes on with the data where
                this one ends; data that runs out is read anew.
            validation_steps: device iterations of a validation; each one starts anew.
            validation_batch_size: of validation data without batches of its own; None is
                ``batch_size``.
            validation_freq: validate every so many epochs, or after the epochs of this collection,
                counted from 1.
            limit_train_batches: batches of an epoch to read at most, or a fraction of them as a
                float; every epoch starts anew.
            limit_val_batches: the same for validation; 0 for no validation.
            overfit_batches: train on the first batches alone (a count, or a fraction as a float),
                the same in every epoch and unshuffled, kept in memory; validate on them too if
                there is a validation.
            fast_dev_run: try everything: so many executions (True for one) of training and of
                validation, one epoch, without callbacks that write files.
            prefetch: executions that a thread prepares ahead; 0 for none. None is 1 where no code
                of yours reads the data in this process (tensors, arrays, a DataLoader with workers
                or over a TensorDataset), else 0. What a callback changes in the data is seen by so
                many executions later.
            inference_ipus: total number of IPUs for validation; None is ``ipus``.
            inference_device_iterations: forward passes per execution of the validation; None is
                ``device_iterations``.
            callbacks: told what happens; see :class:`ipufit.callbacks.Callback`.
            seed: of all random numbers: dropout and the like, the order of samples, and what a
                loader draws from torch's generator in this process. None draws one from that
                generator.
            verbose: 0 silent, 1 a progress bar, 2 a line per epoch; "auto" is 1 in a terminal, else
                2.

        Returns:
            The history; it is in ``self.history`` too, also when this call does not return.

        Raises:
            NotCompiledError: before ``compile``.
            PlanError: the batch algebra does not fit; with all faults.
            ConfigurationError: arguments that can't work, or not together; all of them.
            DataError: data that can't be read or fed; with batch and sample where known.
            CaptureError: the module can't be recorded; with file and line.
            NonFiniteLossError: NaN or infinity; the state is that before the update it names.
        """
        session = self._compiled("fit")
        if session.is_training:
            raise ConfigurationError(
                "fit was called inside fit, from a callback or the data. Start the second one when "
                "the first has returned."
            )
        if session.optimizer is None:
            raise ConfigurationError(
                "fit needs an optimizer, but compile(optimizer=None) made a model that can only "
                "evaluate and predict. Call compile with one, such as optimizer='adam'."
            )
        given = FitArguments.check(
            session,
            FitRequest(
                x=x,
                y=y,
                batch_size=batch_size,
                epochs=epochs,
                ipus=ipus,
                device_iterations=device_iterations,
                gradient_accumulation=gradient_accumulation,
                validation_split=validation_split,
                validation_data=validation_data,
                shuffle=shuffle,
                class_weight=class_weight,
                sample_weight=sample_weight,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size,
                validation_freq=validation_freq,
                limit_train_batches=limit_train_batches,
                limit_val_batches=limit_val_batches,
                overfit_batches=overfit_batches,
                fast_dev_run=fast_dev_run,
                prefetch=prefetch,
                inference_ipus=inference_ipus,
                inference_device_iterations=inference_device_iterations,
                callbacks=callbacks,
                seed=seed,
                verbose=verbose,
            ),
        )
        session.warn_of_changes()
        self.stop_training = False
        self.history = History()
        validation = None
        if given.held_out is not None:
            held_out, inference, held_prefetch = given.held_out
            validation = Validation(session, held_out, inference, given.seed, held_prefetch)
        with training(self.module, session.loss.module):
            job = session.start(
                given.source,
                given.plan,
                Mode.TRAIN,
                given.seed,
                "train",
                given.first_epoch,
                prefetch=given.prefetch,
            )
            with session.running(job):
                if validation is not None:
                    validation.check(job.first)
                self._plan = job.plan
                told = self._callbacks(given, job, given.last_epoch)
                self.history.params = {
                    **told.params,
                    **describe(job.plan, session.engine, given.source, given.seed),
                    "prefetch": given.prefetch,
                    **given.notes,
                }
                if given.level:
                    say_dev_run(given.notes, validation is not None)
                try:
                    loop.Fit(
                        job,
                        told,
                        self.history,
                        validation.run if validation is not None else None,
                        lambda: self.stop_training,
                        given.validation_epochs.__contains__,
                    ).run(given.first_epoch, given.last_epoch)
                finally:
                    self.history.params["capture_seconds"] = self.capture_seconds
        return self.history

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: Optional[int] = None,
        sample_weight: Any = None,
        steps: Optional[int] = None,
        prefetch: Optional[int] = None,
        ipus: Optional[int] = None,
        device_iterations: int = 1,
        callbacks: Union[Callback, Sequence[Callback], None] = (),
        seed: int = 0,
        verbose: Union[int, str] = "auto",
    ) -> Dict[str, float]:
        """Loss and metrics, exact means over all samples.

        Args:
            x: as for ``fit``; never shuffled by ipufit.
            y: as for ``fit``.
            batch_size: as for ``fit``.
            sample_weight: as for ``fit``.
            steps: device iterations to read at most, from the start; None for all.
            prefetch: as for ``fit``.
            ipus: total number of IPUs. None is one replica.
            device_iterations: forward passes per execution.
            callbacks: get the ``on_test_`` hooks.
            seed: of random numbers drawn in eval mode, if the module draws any.
            verbose: 0 silent, 1 a progress bar, 2 one line; "auto" is 1 in a terminal, else 2.

        Returns:
            "loss" and one value per metric.

        Raises:
            NotCompiledError: before ``compile``.
            PlanError: the batch algebra does not fit; with all faults.
            ConfigurationError: arguments that can't work, or not together; all of them.
            DataError: data that can't be read or fed.
        """
        session = self._compiled("evaluate")
        given = InferenceArguments.check(
            session,
            Mode.EVALUATE,
            Given("evaluation data", x, y, sample_weight, batch_size=batch_size),
            steps,
            prefetch,
            ipus,
            device_iterations,
            callbacks,
            seed,
            verbose,
        )
        values: Dict[str, float] = self._infer(session, given, Mode.EVALUATE, loop.evaluate)
        return values

    def predict(
        self,
        x: Any,
        *,
        batch_size: Optional[int] = None,
        steps: Optional[int] = None,
        prefetch: Optional[int] = None,
        ipus: Optional[int] = None,
        device_iterations: int = 1,
        callbacks: Union[Callback, Sequence[Callback], None] = (),
        seed: int = 0,
        verbose: Union[int, str] = "auto",
    ) -> Any:
        """The module's outputs for all samples, in the data's order.

        Args:
            x: as for ``fit``: inputs as a tensor, an array or a dict of such; or batches of inputs,
                of ``(inputs, target)`` or of ``(inputs, target, sample_weight)``, of which all but
                the inputs is left aside.
            batch_size: as for ``fit``.
            steps: device iterations to read at most, from the start; None for all.
            prefetch: as for ``fit``.
            ipus: total number of IPUs. None is one replica.
            device_iterations: forward passes per execution.
            callbacks: get the ``on_predict_`` hooks.
            seed: of random numbers drawn in eval mode, if the module draws any.
            verbose: as for ``evaluate``.

        Returns:
            The structure that the module returns, each tensor with one row per sample.

        Raises:
            NotCompiledError: before ``compile``.
            PlanError: the batch algebra does not fit; with all faults.
            ConfigurationError: arguments that can't work, or not together; all of them.
            DataError: data that can't be read or fed, or an output without a row per sample.
        """
        session = self._compiled("predict")
        given = InferenceArguments.check(
            session,
            Mode.PREDICT,
            Given("prediction data", x, batch_size=batch_size),
            steps,
            prefetch,
            ipus,
            device_iterations,
            callbacks,
            seed,
            verbose,
        )
        return self._infer(session, given, Mode.PREDICT, loop.predict)

    def _infer(
        self,
        session: Session,
        given: InferenceArguments,
        mode: Mode,
        run: Callable[[Job, CallbackList], Any],
    ) -> Any:
        with evaluating(self.module, session.loss.module):
            job = session.start(
                given.source, given.plan, mode, given.seed, mode.value, prefetch=given.prefetch
            )
            with session.running(job):
                return run(job, self._callbacks(given, job))

    def explain(
        self,
        x: Any = None,
        *,
        batch_size: Optional[int] = None,
        steps_per_epoch: Optional[int] = None,
        limit_train_batches: Union[int, float, None] = None,
        ipus: Optional[int] = None,
        device_iterations: int = 1,
        gradient_accumulation: int = 1,
    ) -> None:
        """Print what ``fit`` would do with these arguments, in plain words; nothing is run.

        Args:
            x: as for ``fit``; None explains the last ``fit``.
            batch_size: as for ``fit``.
            steps_per_epoch: as for ``fit``.
            limit_train_batches: as for ``fit``.
            ipus: as for ``fit``.
            device_iterations: as for ``fit``.
            gradient_accumulation: as for ``fit``.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: neither a loader nor an earlier ``fit``.
            PlanError: the batch algebra does not fit; with all faults.
        """
        session = self._compiled("explain")
        plan = self._plan
        if x is not None:
            source = open_data(
                Given("training data", x, batch_size=batch_size),
                Mode.PREDICT,
                session.loss.in_module,
            )
            plan = limited_plan(
                session,
                source,
                limit_train_batches,
                steps_per_epoch,
                (ipus, device_iterations, gradient_accumulation),
            )
        elif (batch_size, steps_per_epoch, limit_train_batches) != (None, None, None):
            raise ConfigurationError(
                "explain needs the data that batch_size, steps_per_epoch and limit_train_batches "
                "are for, got none. Pass explain(x, ...), or leave them out to explain the last "
                "fit."
            )
        if plan is None:
            raise ConfigurationError(
                "explain needs a loader, explain(loader, ipus=...), or an earlier fit; got neither."
            )
        print(plan.explain())
        print(session.explain())

    def close(self) -> None:
        """Let go of recorded programs and of the device; ``compile`` starts anew. Safe twice."""
        self._session = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compiled(self, name: str) -> Session:
        if self._session is None:
            raise NotCompiledError(
                f"{name} needs a compiled model. Call "
                "model.compile(optimizer='adam', loss='cross_entropy') first."
            )
        return self._session

    def _callbacks(
        self, given: Union[FitArguments, InferenceArguments], job: Job, epochs: int = 1
    ) -> CallbackList:
        params = {
            "epochs": epochs,
            "verbose": given.level,
            "updates": updates_per_epoch(job.plan, given.source),
            "samples": job.plan.samples,
        }
        bars: List[Callback] = [ProgbarLogger(given.level)] if given.level else []
        return CallbackList([*given.callbacks, *bars], self, params)


def _engine_maker(engine: Union[str, Callable[[], Engine]]) -> Callable[[], Engine]:
    if callable(engine):
        return engine
    if engine in ("auto", "embedded"):
        return EmbeddedEngine
    instead = "Pass for example engine='embedded'."
    if engine == "ipu":
        instead = "This version has no engine for IPUs yet."
    raise ConfigurationError(
        f"engine must be 'auto', 'embedded' or a callable that makes an engine, got {engine!r}. "
        + instead
    )
