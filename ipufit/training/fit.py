"""Fit, evaluate and predict with checked arguments: one job, its callbacks, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

from ipufit.callbacks import Callback, CallbackList
from ipufit.callbacks.callback_list import CallbackObserver, Observer
from ipufit.callbacks.history import History
from ipufit.callbacks.running_fit import CallbackModel
from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data.adapters import DataArguments
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError, RecoverableDeviceError
from ipufit.processes import Processes
from ipufit.training import loop
from ipufit.training.arguments import FitArguments, InferenceArguments
from ipufit.training.execution_sync import refuse_other_order
from ipufit.training.fit_data import FitRequest
from ipufit.training.loop import Job
from ipufit.training.rank_consistency import sync_inference_config, sync_run_config
from ipufit.training.session import Session
from ipufit.training.summary import stripped
from ipufit.training.validation import ValidationRunner
from ipufit.utils.console import say_dev_run, warn_user
from ipufit.utils.phase_timer import NO_CLOCK
from ipufit.utils.state import eval_mode, train_mode

if TYPE_CHECKING:
    from ipufit.checkpoint.manager import CheckpointManager
    from ipufit.report.recorder import Recorder

__all__ = ["describe_run", "fit", "infer", "stream"]

_END = object()

# What lets a device run again, and is done here: a new program attaches to it.
_HERE = "IPU_RESET"

# Updates of a schedule that are tried before the first one; more would take noticeable time.
_CHECKED_UPDATES = 10_000


def fit(model: CallbackModel, session: Session, request: FitRequest) -> History:
    """Check everything, and train; the history is the model's too, also when this does not return.

    A device that can be used again gets another chance, where that was asked for.
    """
    processes = session.processes
    session.casting.start_call()
    with processes.propagate_errors():
        arguments = processes.run_on_all_ranks(lambda: FitArguments.check(session, request))
        with contextlib.ExitStack() as stack:
            if arguments.checkpoint is not None:
                # Imported here, as below: many runs keep no checkpoints.
                from ipufit.checkpoint.store import locked

                folder = arguments.checkpoint.folder if processes.is_rank_zero else None
                processes.run_on_all_ranks(lambda: folder and stack.enter_context(locked(folder)))
            return _fit_again(model, session, sync_run_config(session, arguments))


def _fit_again(model: CallbackModel, session: Session, arguments: FitArguments) -> History:
    session.warn_of_changes()
    checkpoint = arguments.checkpoint
    restarts = 0 if checkpoint is None else checkpoint.max_restarts
    for restart in range(1, restarts + 1):
        try:
            return _train(model, session, arguments)
        except RecoverableDeviceError as error:
            if error.action != _HERE:
                raise
            from ipufit.checkpoint.manager import find

            assert checkpoint is not None
            arguments = arguments.again(find(dataclasses.replace(checkpoint, resume="auto")))
            assert arguments.restored is not None
            warn_user(
                f"restart {restart} of {restarts}, from update {arguments.restored.done}: {error}",
            )
    return _train(model, session, arguments)


def _train(model: CallbackModel, session: Session, arguments: FitArguments) -> History:
    with contextlib.ExitStack() as stack:
        recorder: Optional[Recorder] = None
        # Of several processes the first one writes down what they do.
        if arguments.report is not None and session.processes.is_rank_zero:
            # Imported here: few runs are written down.
            from ipufit.report.recorder import recorded

            goes_on_from = None if arguments.restored is None else arguments.restored.done
            recorder = stack.enter_context(recorded(session, arguments.report, goes_on_from))
        model.stop_training = False
        model.outputs = []
        histories = [callback for callback in arguments.callbacks if isinstance(callback, History)]
        model.history = histories[0] if histories else History()
        validation = None
        if arguments.held_out is not None:
            held_out, inference, held_prefetch = arguments.held_out
            validation = ValidationRunner(
                session, held_out, inference, arguments.seed, held_prefetch
            )
        stack.enter_context(train_mode(model.module, session.loss.module))
        _prefer(session, arguments)
        job = session.start_on_all_ranks(
            arguments.source,
            arguments.plan,
            Mode.TRAIN,
            arguments.seed,
            "train",
            arguments.epochs.start,
            wants_outputs=any(callback.wants_outputs for callback in arguments.callbacks),
            cut_every=_cuts(arguments),
            prefetch=arguments.prefetch,
            profile_folder=None if arguments.report is None else arguments.report.popvision,
        )
        with session.running(job):
            run = {"first_update": job.program.updates, "first_epoch": arguments.epochs.start}
            session.processes.run_on_all_ranks(lambda: _check(session, job, arguments, validation))
            # Those that prefetch may be further on; all have looked at the first update.
            refuse_other_order(session.processes.gather(job.feed.order, "order of samples"))
            _expect(job, arguments)
            session.last_plan, session.sample = job.plan, stripped(job.first)
            callbacks = _callbacks(
                model, session, arguments, job, Mode.TRAIN, arguments.epochs.stop, validation
            )
            about = {name: value for name, value in callbacks.params.items() if name != "resumes"}
            model.history.params = {
                **about,
                **describe_run(session, job.plan, arguments.seed, arguments.source.dropped),
                "prefetch": arguments.prefetch,
                **arguments.notes,
            }
            if arguments.level and session.processes.is_rank_zero:
                say_dev_run(arguments.notes, validation is not None)
            if arguments.restored is not None:
                model.history.params["resumed"] = arguments.restored.described
            observers: List[Observer] = [CallbackObserver(callbacks)]
            if session.processes.is_distributed:
                may_stop = any(map(_may_stop, arguments.callbacks))
                observers.append(_StopAgreement(model, session.processes, may_stop))
            manager = None
            if arguments.checkpoint is not None:
                manager = _checkpoint_manager(model, session, arguments, callbacks, run)
                observers.append(manager)
                run = manager.run
            clock = NO_CLOCK
            if recorder is not None:
                recorder.begin(job, model.history, _updates_to_come(job, arguments))
                observers.append(recorder)
                clock = recorder.clock
            fit = loop.Fit(
                job,
                observers,
                model.history,
                functools.partial(validation.run, callbacks) if validation is not None else None,
                lambda: model.stop_training,
                session.config.schedule,
                arguments.validation_epochs.__contains__,
                clock=clock,
            )
            if validation is not None:
                fit.named = functools.partial(validation.named, trained=job.meter.names)
            is_within_epoch = arguments.restored is not None and arguments.restored.in_epoch
            try:
                with contextlib.nullcontext() if manager is None else manager.listening():
                    callbacks.check_monitors()
                    fit.run(arguments.epochs, is_within_epoch)
            finally:
                model.history.params["updates_done"] = job.program.updates - run["first_update"]
                model.history.params["capture_seconds"] = model.capture_seconds
                model.history.params["jit"] = _way(session)
    return model.history


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

    def end_execution(self, epoch: int, outputs: List[Any]) -> None:
        """Agree in the middle of an epoch, where callbacks may ask there."""
        if self._within_epochs:
            self._agree()

    def end_epoch(self, epoch: int, logs: Dict[str, float]) -> None:
        """Agree after the callbacks of an epoch."""
        self._agree()

    def _agree(self) -> None:
        wishes = self._processes.gather(bool(self._model.stop_training), "stop")
        self._model.stop_training = any(wishes)


def _checkpoint_manager(
    model: CallbackModel,
    session: Session,
    arguments: FitArguments,
    callbacks: CallbackList,
    run: Dict[str, Any],
) -> CheckpointManager:
    from ipufit.checkpoint import configuration, manager

    assert arguments.checkpoint is not None
    return manager.CheckpointManager(
        model,
        session,
        arguments.checkpoint,
        arguments.restored,
        arguments.restarts,
        configuration.RunData(
            arguments.source,
            None if arguments.held_out is None else arguments.held_out[0],
            arguments.plan.fixed_updates,
        ),
        callbacks,
        arguments.callbacks,
        run,
    )


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
        "jit": _way(session),
        "engine": session.engine.name,
        "seed": seed,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation": plan.gradient_accumulation,
        "replicas": plan.replicas,
        "device_iterations": plan.device_iterations,
        "ipus": plan.ipus,
        "dropped_samples": dropped,
    }


def _cuts(arguments: FitArguments) -> List[int]:
    """An execution ends wherever the count of updates is a multiple of one of these."""
    cuts = [callback.every_updates for callback in arguments.callbacks]
    cuts += [] if arguments.checkpoint is None else [arguments.checkpoint.every_updates]
    return [every for every in cuts if every]


def _prefer(session: Session, arguments: FitArguments) -> None:
    """Load the kernel choices that the engine measured before the run was interrupted."""
    if arguments.restored is not None:
        session.engine.prefer(arguments.restored.choices(session.processes) or {})


def _expect(job: Job, arguments: FitArguments) -> None:
    """Tell the program how much is to come, if that is known."""
    updates = _updates_to_come(job, arguments)
    if updates is not None:
        job.program.expect(updates)


def _updates_to_come(job: Job, arguments: FitArguments) -> Optional[int]:
    """In all epochs, from the beginning of the first one; None if nobody knows."""
    updates = _updates_per_epoch(job.plan, arguments.source)
    return None if updates is None else updates * len(arguments.epochs)


def _way(session: Session) -> str:
    """How the program ran: with jit="auto", what was chosen."""
    return session.engine.way or session.config.jit


def _updates_per_epoch(plan: Plan, source: DataAdapter) -> Optional[int]:
    """From the plan, else from the number of batches, else unknown."""
    if plan.updates_per_epoch is not None:
        return plan.updates_per_epoch
    if source.micro_batches is None:
        return None
    return -(-source.micro_batches // plan.micro_batches_per_update)


def _check(
    session: Session, job: Job, arguments: FitArguments, validation: Optional[ValidationRunner]
) -> None:
    """Find out now what would fail at the end of an epoch, or in the middle of one."""
    if validation is not None:
        validation.check(job.first)
    schedule = session.config.schedule
    updates = _updates_per_epoch(job.plan, arguments.source)
    if schedule is not None and updates is not None:
        coming = min(updates * len(arguments.epochs), _CHECKED_UPDATES)
        schedule.check(coming, _accumulation_steps(job.plan, arguments.source, updates))


def _accumulation_steps(plan: Plan, source: DataAdapter, updates: int) -> List[int]:
    """Return the accumulation steps of the updates of an epoch; a short last one has fewer."""
    most = plan.gradient_accumulation
    micro_batches = plan.micro_batches_per_epoch or source.micro_batches
    if micro_batches is None:
        return [most] * updates
    rest = micro_batches - (updates - 1) * plan.micro_batches_per_update
    return [most] * (updates - 1) + [min(most, -(-rest // plan.all_replicas))]


def infer(
    model: CallbackModel,
    session: Session,
    mode: Mode,
    data: DataArguments,
    how: Tuple[Any, ...],
    run: Callable[[Job, CallbackList], Any],
) -> Any:
    """Check everything, and evaluate or predict."""
    with session.processes.propagate_errors():
        arguments = _checked(session, mode, data, how)
        with eval_mode(model.module, session.loss.module):
            job = _inference_job(session, arguments, mode)
            with session.running(job):
                callbacks = _callbacks(model, session, arguments, job, mode)
                try:
                    return run(job, callbacks)
                finally:
                    callbacks.call("close")


def _checked(
    session: Session, mode: Mode, data: DataArguments, how: Tuple[Any, ...]
) -> InferenceArguments:
    session.casting.start_call()
    arguments = session.processes.run_on_all_ranks(
        lambda: InferenceArguments.check(session, mode, data, *how)
    )
    sync_inference_config(session, arguments, mode)
    return arguments


def stream(
    model: CallbackModel, session: Session, data: DataArguments, how: Tuple[Any, ...]
) -> Iterator[Any]:
    """Check everything, and predict piece by piece, as it is asked for."""
    with session.processes.propagate_errors():
        return _stream(model, session, _checked(session, Mode.PREDICT, data, how))


def _stream(model: CallbackModel, session: Session, arguments: InferenceArguments) -> Iterator[Any]:
    """Between two pieces the module is in the mode of its owner."""
    modules = (model.module, session.loss.module)
    with eval_mode(*modules):
        job = _inference_job(session, arguments, Mode.PREDICT)
    weights = session.weights_version()
    with session.running(job):
        callbacks = _callbacks(model, session, arguments, job, Mode.PREDICT)
        pieces = loop.predictions(job, callbacks)
        try:
            while True:
                if session.is_retired or session.weights_version() != weights:
                    raise ConfigurationError(
                        "predict_iter must be read to its end before the model gets other weights "
                        "or is compiled again or closed, but that happened in between. Start "
                        "another one."
                    )
                with eval_mode(*modules):
                    piece = [next(pieces, _END)]
                if piece[0] is _END:
                    return
                # Not kept here while the next one is computed.
                yield piece.pop()
        finally:
            pieces.close()
            callbacks.call("close")


def _inference_job(session: Session, arguments: InferenceArguments, mode: Mode) -> Job:
    return session.start_on_all_ranks(
        arguments.source,
        arguments.plan,
        mode,
        arguments.seed,
        mode.value,
        prefetch=arguments.prefetch,
    )


def _may_stop(callback: Callback) -> bool:
    """Return True if a callback may ask for the end of training in the middle of an epoch."""
    hook = type(callback).on_train_batch_end
    return hook is not Callback.on_train_batch_end and not callback.only_reports


def _callbacks(
    model: CallbackModel,
    session: Session,
    arguments: Union[FitArguments, InferenceArguments],
    job: Job,
    mode: Mode,
    epochs: int = 1,
    validation: Optional[ValidationRunner] = None,
) -> CallbackList:
    """The user's, then History, then the progress bar, as in Keras; one of the user's is enough."""
    is_first = session.processes.is_rank_zero
    users = [callback for callback in arguments.callbacks if is_first or not callback.only_reports]
    metrics = [] if mode is Mode.PREDICT else [*job.meter.names, *job.meter.settings]
    directions = {name: way for name, way in job.meter.directions.items() if name in metrics}
    added: List[Callback] = []
    if isinstance(arguments, FitArguments):
        if validation is not None:
            metrics += validation.names(job.meter.names)
            directions.update(validation.directions(job.meter.names, directions))
        if model.history not in arguments.callbacks:
            added.append(model.history)
    if arguments.level and is_first:
        # Imported here: nobody needs it who sees nothing.
        from ipufit.callbacks.progbar_logger import ProgbarLogger

        if not any(isinstance(callback, ProgbarLogger) for callback in arguments.callbacks):
            added.append(ProgbarLogger(arguments.level))
    params = {
        "epochs": epochs,
        "verbose": arguments.level,
        "updates": _updates_per_epoch(job.plan, arguments.source),
        "samples": job.plan.samples,
        "resumes": isinstance(arguments, FitArguments) and arguments.restored is not None,
        "metrics": metrics,
        "directions": directions,
        "adds": sorted({name for callback in arguments.callbacks for name in callback.adds or ()}),
    }
    return CallbackList([*users, *added], model, params)
