"""Model: compile, fit, evaluate, predict. It checks its arguments and delegates."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Union

import torch
from torch import nn

from ipufit import loop
from ipufit.arguments import FitArguments, InferenceArguments, one_of
from ipufit.callbacks import Callback, CallbackList, ProgbarLogger
from ipufit.data.source import Source
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.errors import ConfigurationError, NotCompiledError
from ipufit.faults import Faults
from ipufit.history import History
from ipufit.loop import Job
from ipufit.losses import resolve_loss
from ipufit.metrics import resolve_metrics
from ipufit.modes import evaluating, training
from ipufit.optimizers import resolve_optimizer
from ipufit.plan import Plan
from ipufit.program import Engine, Mode
from ipufit.recipe import (
    LossScale,
    Recipe,
    refuse_metrics_of_sums,
    resolve_averaging,
    resolve_clip,
    resolve_dtype,
    resolve_loss_scale,
    resolve_output_mode,
    resolve_precision,
)
from ipufit.recordable import refuse_unrecordable
from ipufit.schedules import resolve_schedule
from ipufit.session import Session, Validation, describe, updates_per_epoch

__all__ = ["Model"]

Loader = Iterable[Any]


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
        outputs: what the module returned in the last training execution, for each micro-batch that
            ``output_mode`` chooses; filled for callbacks with ``wants_outputs``.

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
        self.outputs: List[Any] = []
        self._make_engine = _engine_maker(engine)
        self._session: Optional[Session] = None
        self._plan: Optional[Plan] = None

    def compile(
        self,
        optimizer: Any,
        loss: Any = None,
        metrics: Any = None,
        *,
        lr_scheduler: Any = None,
        lr_scheduler_interval: str = "update",
        clipnorm: Optional[float] = None,
        global_clipnorm: Optional[float] = None,
        clipvalue: Optional[float] = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: Optional[int] = None,
        precision: Optional[str] = None,
        loss_scale: Union[float, str, LossScale, None] = None,
        accumulation_dtype: Union[torch.dtype, str, None] = None,
        output_mode: str = "all",
        output_every: Optional[int] = None,
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
            lr_scheduler: hyper-parameters that change from update to update; see
                :func:`ipufit.schedules.resolve_schedule`.
            lr_scheduler_interval: "update" or "epoch": after what the schedule moves on.
            clipnorm: bound on the norm of each parameter's gradient, applied once, after the
                reduction over micro-batches, as torch.nn.utils.clip_grad_norm_ does. At most one
                of the three bounds.
            global_clipnorm: the same for the norm of all gradients together.
            clipvalue: bound on the magnitude of every element of the gradient.
            use_ema: keep an exponential moving average of the trained weights, which ``fit`` makes
                the weights at its end, as in Keras.
            ema_momentum: share of the old average in the new one.
            ema_overwrite_frequency: make the averages the weights after every so many updates too.
            precision: "mixed_float16" or "mixed_bfloat16" ("16-mixed", "bf16-mixed"): autocast
                around forward and loss, weights as they are. "float16", "bfloat16", "float32",
                "float64" ("16-true", ...): a module of that dtype, to which floating-point inputs
                and targets are brought. None leaves all as it is.
            loss_scale: a number, or "dynamic" or a :class:`LossScale`: the loss is multiplied with
                it before the backward pass and the gradient divided by it; an update whose
                gradient is not finite is skipped and counted. None is "dynamic" under
                "mixed_float16", else no scaling.
            accumulation_dtype: dtype in which gradients are added up over the micro-batches of an
                update; None is that of each parameter.
            output_mode: which outputs of a training execution come back, and so what metrics see:
                "all"; "final", of the last micro-batch on every replica; "every_n" device
                iterations; "sum" over the micro-batches of each replica, for callbacks.
            output_every: the n of "every_n".
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
        settings: Dict[str, Any] = {"gradient_reduction": gradient_reduction}
        with faults.collected():
            settings["clip"] = resolve_clip(clipnorm, global_clipnorm, clipvalue)
        with faults.collected():
            averaging = resolve_averaging(use_ema, ema_momentum, ema_overwrite_frequency)
            settings["averaging"] = averaging
        with faults.collected():
            settings["precision"] = resolve_precision(precision)
            settings["loss_scale"] = resolve_loss_scale(loss_scale, settings["precision"])
        with faults.collected():
            settings["accumulation_dtype"] = resolve_dtype("accumulation_dtype", accumulation_dtype)
        with faults.collected():
            settings["output_mode"] = resolve_output_mode(output_mode, output_every)
            if output_mode == "sum":
                refuse_metrics_of_sums(metrics)
        with faults.collected():
            one_of("lr_scheduler_interval", lr_scheduler_interval, ("update", "epoch"))
        with faults.collected():
            one_of("auto_round_ipus", auto_round_ipus, (True, False))
        with faults.collected():
            one_of("run_eagerly", run_eagerly, (True, False))
        faults.raise_all()
        settings["schedule"] = resolve_schedule(
            lr_scheduler, torch_optimizer, lr_scheduler_interval
        )
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
            Recipe(**settings),
            auto_round_ipus,
            run_eagerly,
        )

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The torch optimizer that ``compile`` made or was given, its state up to date, or None."""
        return self._compiled("optimizer").optimizer

    def swap_ema_weights(self) -> None:
        """Exchange the trained weights and their moving averages; called again, back.

        For callbacks during ``fit``, such as
        :class:`ipufit.callbacks.SwapEMAWeights`. Training goes on with the weights only.

        Raises:
            ConfigurationError: not inside ``fit``, or ``compile`` was not told ``use_ema=True``.
        """
        self._compiled("swap_ema_weights").swap_averages()

    @property
    def capture_seconds(self) -> float:
        """Seconds spent on recording programs since ``compile``."""
        return self._session.engine.seconds if self._session else 0.0

    def fit(
        self,
        x: Loader,
        *,
        epochs: int = 1,
        ipus: Optional[int] = None,
        device_iterations: int = 1,
        gradient_accumulation: int = 1,
        validation_data: Optional[Loader] = None,
        inference_ipus: Optional[int] = None,
        inference_device_iterations: Optional[int] = None,
        callbacks: Union[Callback, Sequence[Callback], None] = (),
        initial_epoch: int = 0,
        seed: Optional[int] = None,
        verbose: Union[int, str] = "auto",
    ) -> History:
        """Train.

        Args:
            x: a DataLoader, or any iterable of batches ``(inputs, target)``. Its batch size is the
                micro-batch; its sampler, collate_fn, workers and generator are used as they are.
            epochs: index of the epoch to stop before: a count when initial_epoch is 0, as in Keras.
            ipus: total number of IPUs; without stages, the number of replicas. None is one replica.
            device_iterations: weight updates per execution.
            gradient_accumulation: micro-batches that a replica sums before an update.
            validation_data: evaluated after every epoch; it never disturbs training.
            inference_ipus: total number of IPUs for validation; None is ``ipus``.
            inference_device_iterations: forward passes per execution of the validation; None is
                ``device_iterations``.
            callbacks: told what happens; see :class:`ipufit.callbacks.Callback`.
            initial_epoch: index of the first epoch.
            seed: of all random numbers: dropout and the like, and what the loader draws from
                torch's generator in this process. None draws one from that generator.
            verbose: 0 silent, 1 a progress bar, 2 a line per epoch; "auto" is 1 in a terminal, else
                2.

        Returns:
            The history; it is in ``self.history`` too, also when this call does not return.

        Raises:
            NotCompiledError: before ``compile``.
            PlanError: the batch algebra does not fit; with all faults.
            DataError: a batch that can't be fed.
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
            x,
            epochs,
            ipus,
            device_iterations,
            gradient_accumulation,
            validation_data,
            inference_ipus,
            inference_device_iterations,
            callbacks,
            initial_epoch,
            seed,
            verbose,
        )
        session.warn_of_changes()
        self.stop_training = False
        self.history = History()
        validation = None
        if given.held_out is not None:
            validation = Validation(session, *given.held_out, given.seed)
        with training(self.module, session.loss.module):
            job = session.start(
                given.source,
                given.plan,
                Mode.TRAIN,
                given.seed,
                "train",
                given.first_epoch,
                wants_outputs=any(callback.wants_outputs for callback in given.callbacks),
            )
            with session.running(job):
                if validation is not None:
                    validation.check(job.first)
                self._plan = job.plan
                told = self._callbacks(given, job, given.last_epoch)
                self.history.params = {
                    **told.params,
                    **describe(job.plan, session, given.source, given.seed),
                }
                try:
                    loop.Fit(
                        job,
                        told,
                        self.history,
                        validation.run if validation is not None else None,
                        lambda: self.stop_training,
                    ).run(given.first_epoch, given.last_epoch)
                finally:
                    self.history.params["capture_seconds"] = self.capture_seconds
        return self.history

    def evaluate(
        self,
        x: Loader,
        *,
        ipus: Optional[int] = None,
        device_iterations: int = 1,
        callbacks: Union[Callback, Sequence[Callback], None] = (),
        seed: int = 0,
        verbose: Union[int, str] = "auto",
    ) -> Dict[str, float]:
        """Loss and metrics, exact means over all samples.

        Args:
            x: as for ``fit``.
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
            DataError: a batch that can't be fed.
        """
        session = self._compiled("evaluate")
        given = InferenceArguments.check(
            session,
            Source(x, "evaluation data"),
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
        x: Loader,
        *,
        ipus: Optional[int] = None,
        device_iterations: int = 1,
        callbacks: Union[Callback, Sequence[Callback], None] = (),
        seed: int = 0,
        verbose: Union[int, str] = "auto",
    ) -> Any:
        """The module's outputs for all samples, in the loader's order.

        Args:
            x: batches of inputs, or of ``(inputs, target)``, whose target is left aside.
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
            DataError: a batch that can't be fed, or an output without a row per sample.
        """
        session = self._compiled("predict")
        given = InferenceArguments.check(
            session,
            Source(x, "prediction data"),
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
            job = session.start(given.source, given.plan, mode, given.seed, mode.value)
            with session.running(job):
                return run(job, self._callbacks(given, job))

    def explain(
        self,
        x: Optional[Loader] = None,
        *,
        ipus: Optional[int] = None,
        device_iterations: int = 1,
        gradient_accumulation: int = 1,
    ) -> None:
        """Print what ``fit`` would do with these arguments, in plain words; nothing is run.

        Args:
            x: the loader; None explains the last ``fit``.
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
            source = Source(x, "training data")
            plan = session.plan(source, ipus, device_iterations, gradient_accumulation, True)
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
            "samples": given.source.samples,
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
