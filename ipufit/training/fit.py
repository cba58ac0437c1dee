"""Fit, evaluate and predict with checked arguments: one job, its callbacks, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from ipufit.callbacks import Callback, CallbackList
from ipufit.callbacks.callback import overrides
from ipufit.callbacks.callback_list import CallbackModel, CallbackObserver, Observer
from ipufit.callbacks.history import History
from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data.loaders import shuffles
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError, RecoverableDeviceError
from ipufit.optim.resolve import warn_of_late
from ipufit.processes import Processes
from ipufit.tracing.user_lines import frame_of
from ipufit.training.arguments import FitConfig, InferenceConfig
from ipufit.training.execution_sync import refuse_other_order
from ipufit.training.fit_data import FitRequest, InferenceRequest, updates_per_epoch
from ipufit.training.rank_consistency import sync_inference_config, sync_run_config
from ipufit.training.session import JobSpec, Session
from ipufit.training.trainer import Job, PredictionObserver, Trainer
from ipufit.training.validation import ValidationRunner
from ipufit.utils.console import say_dev_run, warn_user
from ipufit.utils.error_collector import ErrorCollector
from ipufit.utils.interrupts import summarized_interrupt
from ipufit.utils.phase_timer import NO_CLOCK
from ipufit.utils.state import eval_mode, train_mode

if TYPE_CHECKING:
    from ipufit.checkpoint.manager import CheckpointManager
    from ipufit.report.recorder import Recorder

_END = object()

# What lets a device run again, and is done here: a new program attaches to it.
_HERE = "IPU_RESET"

_UNTRAINED = "Ctrl-C ends fit before its first update; the weights have not changed."

# Updates of a schedule that are tried before the first one; more would take noticeable time.
_CHECKED_UPDATES = 10_000


def fit(model: CallbackModel, session: Session, request: FitRequest) -> History:
    """Check everything, and train; the history is the model's too, also when this does not return.

    A device that can be used again gets another chance, where that was asked for.
    """
    processes = session.processes
    with processes.propagate_errors(), contextlib.ExitStack() as stack:
        stack.enter_context(summarized_interrupt(lambda error: _UNTRAINED))
        config = processes.run_on_all_ranks(functools.partial(FitConfig.check, session, request))
        if config.checkpoint is not None:
            # Imported here, as below: many runs keep no checkpoints.
            from ipufit.checkpoint.store import locked

            folder = config.checkpoint.folder if processes.is_rank_zero else None
            processes.run_on_all_ranks(lambda: folder and stack.enter_context(locked(folder)))
        config = sync_run_config(session, config)
        warn_of_late(session.module, session.optimizer, session.left_out)
        while True:
            try:
                return _train(model, session, config)
            except RecoverableDeviceError as error:
                config = _restart_config(config, error)


def _restart_config(config: FitConfig, error: RecoverableDeviceError) -> FitConfig:
    """Return the configuration with which ``fit`` goes on after its device has failed.

    Raises:
        RecoverableDeviceError: it can't go on here, or has done so often enough.
    """
    checkpoint = config.checkpoint
    if checkpoint is None or config.restarts >= checkpoint.max_restarts or error.action != _HERE:
        raise error
    from ipufit.checkpoint.manager import find

    config = config.again(find(dataclasses.replace(checkpoint, resume="auto")))
    assert config.restored is not None
    warn_user(
        f"restart {config.restarts} of {checkpoint.max_restarts}, from update "
        f"{config.restored.done}: {error}",
    )
    return config


def _train(model: CallbackModel, session: Session, config: FitConfig) -> History:
    with contextlib.ExitStack() as stack:
        recorder: Optional[Recorder] = None
        # Of several processes the first one writes down what they do.
        if config.report is not None and session.processes.is_rank_zero:
            # Imported here: few runs are written down.
            from ipufit.report.recorder import recorded

            goes_on_from = None if config.restored is None else config.restored.done
            recorder = stack.enter_context(recorded(session, config.report, goes_on_from))
        model.stop_training = False
        model.outputs = []
        histories = (each for each in config.callbacks if isinstance(each, History))
        model.history = next(histories, History())
        validation = None
        if config.held_out is not None:
            held_out = dataclasses.replace(config.held_out, seed=config.seed)
            validation = ValidationRunner(session, held_out)
        stack.enter_context(train_mode(model.module, session.loss.module))
        progress = stack.enter_context(_progress(session, config))
        if config.restored is not None:
            # The kernels that the run has measured to be fastest before.
            session.prefer(config.restored.choices(session.processes) or {})
        # An execution ends wherever the count of updates is a multiple of one of these.
        cuts = [callback.every_updates for callback in config.callbacks]
        cuts += [] if config.checkpoint is None else [config.checkpoint.every_updates]
        spec = JobSpec(
            config.source,
            config.plan,
            Mode.TRAIN,
            config.seed,
            "train",
            config.epochs.start,
            wants_outputs=any(callback.wants_outputs for callback in config.callbacks),
            cut_every=[*filter(None, cuts)],
            prefetch=config.prefetch,
            profile_folder=None if config.report is None else config.report.popvision,
            micro_batch_size=None
            if config.restored is None
            else config.restored.document["micro_batch_size"],
        )
        job = session.start(spec, session.processes)
        with session.running(job):
            return _run(model, session, config, job, progress, validation, recorder)


def _run(
    model: CallbackModel,
    session: Session,
    config: FitConfig,
    job: Job,
    progress: List[Callback],
    validation: Optional[ValidationRunner],
    recorder: Optional[Recorder],
) -> History:
    """Train with a job that has started, told to all observers."""
    run = {"first_update": job.program.updates, "first_epoch": config.epochs.start}
    check = functools.partial(_check, session, job, config, validation)
    session.processes.run_on_all_ranks(check)
    # Those that prefetch may be further on; all have looked at the first update.
    refuse_other_order(session.processes.gather(job.pipeline.order, "order of samples"))
    updates = updates_per_epoch(job.plan, config.source)
    if updates is not None:
        # In all epochs, from the beginning of the first one.
        updates *= len(config.epochs)
        job.program.expect(updates)
        job.end = job.program.updates + updates
    session.last_plan, session.sample = job.plan, job.first.stripped()
    callbacks = _callbacks(model, session, config, job, progress, validation)
    _describe(model.history, callbacks, session, config, job)
    if config.level and session.processes.is_rank_zero:
        say_dev_run(config.notes, validation is not None)
    observers: List[Observer] = [CallbackObserver(callbacks, job, model.history)]
    if session.processes.is_distributed:
        may_stop = any(session.processes.gather(any(map(_may_stop, config.callbacks)), "callbacks"))
        observers.append(_StopAgreement(model, session.processes, may_stop))
    checkpoints: Optional[CheckpointManager] = None
    if config.checkpoint is not None:
        from ipufit.checkpoint import configuration, manager

        held_out = None if config.held_out is None else config.held_out.source
        checkpoints = manager.CheckpointManager(
            model,
            session,
            config.checkpoint,
            config.restored,
            config.restarts,
            configuration.RunData(config.source, held_out, config.plan.fixed_updates),
            callbacks,
            config.callbacks,
            run,
        )
        observers.append(checkpoints)
        run = checkpoints.run
    if recorder is not None:
        recorder.begin(job, model.history, updates)
        observers.append(recorder)
    validate = None
    if validation is not None:
        validate = functools.partial(validation.run, callbacks, job.meter.names)
    trainer = Trainer(
        job,
        observers,
        model.history,
        validate=validate,
        validates=config.validation_epochs.__contains__,
        stopped=lambda: model.stop_training,
        schedule=session.config.schedule,
        clock=NO_CLOCK if recorder is None else recorder.clock,
    )
    is_within_epoch = config.restored is not None and config.restored.in_epoch
    try:
        with contextlib.nullcontext() if checkpoints is None else checkpoints.listening():
            callbacks.check_monitors()
            with summarized_interrupt(functools.partial(_end_of_fit, trainer, config)):
                trainer.run(config.epochs, is_within_epoch)
    finally:
        model.history.params["updates_done"] = job.program.updates - run["first_update"]
        model.history.params["capture_seconds"] = model.capture_seconds
        recordings = job.program.recordings
        model.history.params["recordings"] = 0 if recordings is None else recordings.count
        model.history.params["eager_shapes"] = 0 if recordings is None else len(recordings.eager)
        model.history.params["jit"] = _jit(session)
    return model.history


def _end_of_fit(trainer: Trainer, config: FitConfig, error: KeyboardInterrupt) -> str:
    """Say where an interrupt has ended a fit, and what is there of it."""
    meter = trainer.job.meter
    updates, finished = updates_per_epoch(trainer.job.plan, config.source), trainer.history.epoch
    done = (
        f"{meter.updates} updates" if updates is None else f"{meter.updates} of {updates} updates"
    )
    frame = frame_of(error, everywhere=True)
    where = "" if frame is None else f", in {frame[0]}:{frame[1]} ({frame[2]})"
    return (
        f"Ctrl-C ends fit in epoch {trainer.epoch + 1} of {config.epochs.stop}, after {done}"
        f"{where}; the module has the weights of that update, and model.history "
        f"{len(finished)} finished epoch{'' if len(finished) == 1 else 's'}."
    )


def _describe(
    history: History, callbacks: CallbackList, session: Session, config: FitConfig, job: Job
) -> None:
    """Write down in the history how the run is made."""
    about = {name: value for name, value in callbacks.params.items() if name != "resumes"}
    history.params = {
        **about,
        **describe_run(session, job.plan, config.seed, config.source.dropped),
        "prefetch": config.prefetch,
        **config.notes,
    }
    if config.restored is not None:
        history.params["resumed"] = config.restored.described


class _StopAgreement(Observer):
    """Ends training in all processes where a callback of one has asked for it.

    Args:
        model: has ``stop_training``.
        processes: those that train together.
        within_epochs: whether a callback may ask in the middle of an epoch.
    """

    phase = "callbacks"

    def __init__(self, model: CallbackModel, processes: Processes, within_epochs: bool) -> None:
        self._model = model
        self._processes = processes
        self._within_epochs = within_epochs

    def begin_executions(self, epoch: int) -> None:
        """Agree after the hooks that begin an epoch: it ends with its first execution."""
        self._agree()

    def end_execution(self, epoch: int, outputs: List[object]) -> None:
        """Agree in the middle of an epoch, where callbacks may ask there."""
        if self._within_epochs:
            self._agree()

    def end_epoch(self, epoch: int, logs: Dict[str, float]) -> None:
        """Agree after the callbacks of an epoch."""
        self._agree()

    def _agree(self) -> None:
        wishes = self._processes.gather(bool(self._model.stop_training), "stop")
        self._model.stop_training = any(wishes)


def describe_run(session: Session, plan: Plan, seed: int, dropped: int = 0) -> Dict[str, Any]:
    """How a run is made, for History.

    Args:
        session: of the model.
        plan: of the training.
        seed: of all random numbers.
        dropped: samples of every epoch that the loader leaves out.
    """
    return {
        **session.config.describe(),
        "jit": _jit(session),
        "engine": session.engine.name,
        "seed": seed,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation": plan.gradient_accumulation,
        "replicas": plan.replicas,
        "device_iterations": plan.device_iterations,
        "ipus": plan.ipus,
        "dropped_samples": dropped,
    }


def _jit(session: Session) -> str:
    """How the program ran: with jit="auto", what was chosen."""
    return session.engine.way or session.config.jit


def _check(
    session: Session, job: Job, config: FitConfig, validation: Optional[ValidationRunner]
) -> None:
    """Find out now what would fail at the end of an epoch, or in the middle of one."""
    if validation is not None:
        validation.check(job.first)
    schedule = session.config.schedule
    updates = updates_per_epoch(job.plan, config.source)
    if schedule is None:
        return
    restored = config.restored
    first = config.epochs.start if restored is None else restored.run["first_epoch"]
    epochs = config.epochs.stop - first
    whole = None if updates is None else updates * epochs
    schedule.begin_run(whole, epochs, is_trial="fast_dev_run" in config.notes)
    if updates is not None:
        coming = min(updates * len(config.epochs), _CHECKED_UPDATES)
        schedule.check(coming, _accumulation_steps(job.plan, config.source, updates))


def _accumulation_steps(plan: Plan, source: DataAdapter, updates: int) -> List[int]:
    """Return the accumulation steps of the updates of an epoch; a short last one has fewer."""
    most = plan.gradient_accumulation
    micro_batches = plan.micro_batches_per_epoch or source.micro_batches
    if micro_batches is None:
        return [most] * updates
    rest = micro_batches - (updates - 1) * plan.micro_batches_per_update
    return [most] * (updates - 1) + [min(most, -(-rest // plan.all_replicas))]


def evaluate(
    model: CallbackModel, session: Session, request: InferenceRequest, faults: ErrorCollector
) -> Dict[str, float]:
    """Check everything, and evaluate."""
    with _inferring(model, session, Mode.EVALUATE, request, faults) as (job, callbacks):
        return Trainer(job, [CallbackObserver(callbacks, job)]).evaluate()


def predict(
    model: CallbackModel, session: Session, request: InferenceRequest, faults: ErrorCollector
) -> Any:
    """Check everything, and predict."""
    with _inferring(model, session, Mode.PREDICT, request, faults) as (job, callbacks):
        observer = PredictionObserver(callbacks, job)
        observer.padding_value = request.padding_value
        for _ in Trainer(job, [observer]).predict():
            pass
        return observer.take()


@contextlib.contextmanager
def _inferring(
    model: CallbackModel,
    session: Session,
    mode: Mode,
    request: InferenceRequest,
    faults: ErrorCollector,
) -> Iterator[Tuple[Job, CallbackList]]:
    """Check everything, and start a job that runs as long as the block."""
    text = f"Ctrl-C ends {mode.value} before its last batch; the model has not changed."
    with session.processes.propagate_errors(), summarized_interrupt(lambda error: text):
        config = _inference_config(session, mode, request, faults)
        with eval_mode(model.module, session.loss.module), _progress(session, config) as progress:
            job = session.start(config, session.processes)
            with session.running(job):
                callbacks = _callbacks(model, session, config, job, progress)
                try:
                    yield job, callbacks
                finally:
                    callbacks.call("close")


def stream(
    model: CallbackModel, session: Session, request: InferenceRequest, faults: ErrorCollector
) -> Iterator[Any]:
    """Check everything, and predict piece by piece, as it is asked for."""
    with session.processes.propagate_errors():
        config = _inference_config(session, Mode.PREDICT, request, faults)
        return _pieces(model, session, config)


def _inference_config(
    session: Session, mode: Mode, request: InferenceRequest, faults: ErrorCollector
) -> InferenceConfig:
    check = functools.partial(InferenceConfig.check, session, mode, request, faults)
    config = session.processes.run_on_all_ranks(check)
    sync_inference_config(session, config)
    if mode is Mode.PREDICT and session.processes.is_rank_zero and shuffles(config.source.loader):
        warn_user(
            "predict returns rows in the order of the DataLoader, which shuffles: the first row is "
            "not that of the first sample. Pass a DataLoader with shuffle=False."
        )
    return config


def _pieces(model: CallbackModel, session: Session, config: InferenceConfig) -> Iterator[object]:
    """Yield the outputs of each execution; between two the module is in the mode of its owner."""
    modules = (model.module, session.loss.module)
    with eval_mode(*modules), _progress(session, config) as progress:
        job = session.start(config, session.processes)
    weights = session.weights_version()
    with session.running(job):
        callbacks = _callbacks(model, session, config, job, progress)
        observer = PredictionObserver(callbacks, job)
        observer.padding_value = config.padding_value
        executions = Trainer(job, [observer]).predict()
        try:
            while True:
                if session.is_retired or session.weights_version() != weights:
                    raise ConfigurationError(
                        "predict_iter must be read to its end before the model changes its "
                        "weights, is compiled again or is closed, but that happened. Start another "
                        "one."
                    )
                with eval_mode(*modules):
                    if next(executions, _END) is _END:
                        return
                yield observer.take()
        finally:
            executions.close()
            callbacks.call("close")


def _may_stop(callback: Callback) -> bool:
    """Return True if a callback may ask for the end of training in the middle of an epoch."""
    hooks = ("on_train_batch_begin", "on_train_batch_end")
    return not callback.only_reports and any(overrides(callback, hook) for hook in hooks)


@contextlib.contextmanager
def _progress(
    session: Session, config: Union[FitConfig, InferenceConfig]
) -> Iterator[List[Callback]]:
    """Show within the block what is recorded; the callback that shows the rest, if there is one.

    It is the user's, or one that has the verbosity of the call.
    """
    if not (config.level and session.processes.is_rank_zero):
        yield []
        return
    # Imported here: nobody needs it who sees nothing.
    from ipufit.callbacks import progbar_logger

    kind = progbar_logger.ProgbarLogger
    shown = [callback for callback in config.callbacks if isinstance(callback, kind)]
    added = [] if shown else [kind(config.level)]
    with progbar_logger.showing((shown + added)[0], session.engine):
        yield [*added]


def _callbacks(
    model: CallbackModel,
    session: Session,
    config: Union[FitConfig, InferenceConfig],
    job: Job,
    progress: Sequence[Callback],
    validation: Optional[ValidationRunner] = None,
) -> CallbackList:
    """List the user's callbacks, then a fit's History, then the progress bar, as Keras does.

    Args:
        model: that they are of.
        session: of the model.
        config: has the user's; a history among them is enough.
        job: what is run.
        progress: the bar, where the user has none.
        validation: of a fit, whose values they are told of too; None for none.
    """
    is_first = session.processes.is_rank_zero
    listed = [callback for callback in config.callbacks if is_first or not callback.only_reports]
    epochs, resumes = 1, False
    if isinstance(config, FitConfig):
        epochs, resumes = config.epochs.stop, config.restored is not None
        listed += [] if model.history in config.callbacks else [model.history]
    listed += progress
    names = [] if job.mode is Mode.PREDICT else [*job.meter.names, *job.meter.settings]
    # "min" or "max", whichever is best, where that is known.
    directions = {name: way for name, way in job.meter.directions.items() if name in names}
    if validation is not None:
        names += validation.names(job.meter.names)
        directions.update(validation.directions(job.meter.names, directions))
    params = {
        "epochs": epochs,
        "verbose": config.level,
        "updates": updates_per_epoch(job.plan, config.source),
        "samples": job.plan.samples,
        "resumes": resumes,
        "metrics": names,
        "directions": directions,
        "adds": sorted({name for callback in config.callbacks for name in callback.adds or ()}),
    }
    return CallbackList(listed, model, params)
