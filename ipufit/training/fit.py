"""What ``Model`` does when its arguments are known to be right: one job, its callbacks, its end."""

from __future__ import annotations

import contextlib
import functools
import warnings
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
from ipufit.training.rank_consistency import join_fit, join_inference
from ipufit.training.session import Session
from ipufit.training.summary import stripped
from ipufit.training.validation import Validation
from ipufit.utils.console import say_dev_run, stacklevel_of_user
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


def fit(model: CallbackModel, session: Session, asked: FitRequest) -> History:
    """Check everything, and train; the history is the model's too, also when this does not return.

    A device that can be used again gets another chance, where that was asked for.
    """
    processes = session.processes
    session.casting.start_call()
    with processes.propagate_errors():
        given = processes.run_on_all_ranks(lambda: FitArguments.check(session, asked))
        with contextlib.ExitStack() as stack:
            if given.checkpoint is not None:
                # Imported here, as below: many runs keep no checkpoints.
                from ipufit.checkpoint.lock import locked

                folder = given.checkpoint.folder if processes.is_rank_zero else None
                processes.run_on_all_ranks(lambda: folder and stack.enter_context(locked(folder)))
            return _fit_again(model, session, join_fit(session, given))


def _fit_again(model: CallbackModel, session: Session, given: FitArguments) -> History:
    session.warn_of_changes()
    for restart in range(1, given.max_restarts + 1):
        try:
            return _train(model, session, given)
        except RecoverableDeviceError as error:
            if error.action != _HERE:
                raise
            from ipufit.checkpoint.manager import find

            given = given.again(find(given.checkpoint, "auto"))
            assert given.found is not None
            warnings.warn(
                f"restart {restart} of {given.max_restarts}, from update {given.found.done}: "
                f"{error}",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )
    return _train(model, session, given)


def _train(model: CallbackModel, session: Session, given: FitArguments) -> History:
    with contextlib.ExitStack() as stack:
        recorder: Optional[Recorder] = None
        # Of several processes the first one writes down what they do.
        if given.report is not None and session.processes.is_rank_zero:
            # Imported here: few runs are written down.
            from ipufit.report.recorder import recorded

            goes_on_from = None if given.found is None else given.found.done
            recorder = stack.enter_context(recorded(session, given.report, goes_on_from))
        model.stop_training = False
        model.outputs = []
        own = [callback for callback in given.callbacks if isinstance(callback, History)]
        model.history = own[0] if own else History()
        validation = None
        if given.held_out is not None:
            held_out, inference, held_prefetch = given.held_out
            validation = Validation(session, held_out, inference, given.seed, held_prefetch)
        stack.enter_context(train_mode(model.module, session.loss.module))
        _prefer(session, given)
        job = session.start_together(
            given.source,
            given.plan,
            Mode.TRAIN,
            given.seed,
            "train",
            given.first_epoch,
            wants_outputs=any(callback.wants_outputs for callback in given.callbacks),
            cut_every=_cuts(given),
            prefetch=given.prefetch,
            profile_folder=None if given.report is None else given.report.popvision,
        )
        with session.running(job):
            run = {"first_update": job.program.updates, "first_epoch": given.first_epoch}
            session.processes.run_on_all_ranks(lambda: _check(session, job, given, validation))
            # Those that prefetch may be further on; all have looked at the first update.
            refuse_other_order(session.processes.gather(job.feed.order, "order of samples"))
            _expect(job, given)
            session.last_plan, session.sample = job.plan, stripped(job.first)
            told = _callbacks(model, session, given, job, Mode.TRAIN, given.last_epoch, validation)
            about = {name: value for name, value in told.params.items() if name != "resumes"}
            model.history.params = {
                **about,
                **describe_run(session, job.plan, given.seed, given.source.dropped),
                "prefetch": given.prefetch,
                **given.notes,
            }
            if given.level and session.processes.is_rank_zero:
                say_dev_run(given.notes, validation is not None)
            if given.found is not None:
                model.history.params["resumed"] = given.found.described
            observers: List[Observer] = [CallbackObserver(told)]
            if session.processes.is_distributed:
                may_stop = any(map(_may_stop, given.callbacks))
                observers.append(_StopAgreement(model, session.processes, may_stop))
            manager = None
            if given.checkpoint is not None or given.found is not None:
                manager = _checkpoint_manager(model, session, given, told, run)
                observers.append(manager)
                run = manager.run
            clock = NO_CLOCK
            if recorder is not None:
                recorder.begin(job, model.history, _updates_to_come(job, given))
                observers.append(recorder)
                clock = recorder.clock
            fit = loop.Fit(
                job,
                observers,
                model.history,
                functools.partial(validation.run, told) if validation is not None else None,
                lambda: model.stop_training,
                session.config.schedule,
                given.validation_epochs.__contains__,
                clock=clock,
            )
            if validation is not None:
                fit.named = functools.partial(validation.named, trained=job.meter.names)
            is_within_epoch = given.found is not None and given.found.in_epoch
            try:
                with contextlib.nullcontext() if manager is None else manager.listening():
                    told.check_monitors()
                    fit.run(given.first_epoch, given.last_epoch, is_within_epoch)
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
    given: FitArguments,
    callbacks: CallbackList,
    run: Dict[str, Any],
) -> CheckpointManager:
    from ipufit.checkpoint import configuration, manager

    changes, restarts = given.resume_changes, given.restarts
    return manager.CheckpointManager(
        model,
        session,
        given.checkpoint,
        manager.Resumption(given.found, changes, restarts, given.max_restarts),
        configuration.RunData(
            given.source,
            None if given.held_out is None else given.held_out[0],
            given.plan.fixed_updates,
        ),
        callbacks,
        given.callbacks,
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


def _cuts(given: FitArguments) -> List[int]:
    """An execution ends wherever the count of updates is a multiple of one of these."""
    cuts = [callback.every_updates for callback in given.callbacks]
    cuts += [] if given.checkpoint is None else [given.checkpoint.every_updates]
    return [every for every in cuts if every]


def _prefer(session: Session, given: FitArguments) -> None:
    """What the engine measured for the run that goes on holds for the rest of it."""
    prefer = getattr(session.engine, "prefer", None)
    if given.found is not None and prefer is not None:
        prefer(given.found.choices(session.processes) or {})


def _expect(job: Job, given: FitArguments) -> None:
    """Tell the program how much is to come, if it wants to know and that is known."""
    expect = getattr(job.program, "expect", None)
    updates = _updates_to_come(job, given)
    if expect is not None and updates is not None:
        expect(updates)


def _updates_to_come(job: Job, given: FitArguments) -> Optional[int]:
    """In all epochs, from the beginning of the first one; None if nobody knows."""
    updates = _updates_per_epoch(job.plan, given.source)
    return None if updates is None else updates * (given.last_epoch - given.first_epoch)


def _way(session: Session) -> str:
    """How the program ran: with jit="auto", what was chosen."""
    return getattr(session.engine, "way", None) or session.config.jit


def _updates_per_epoch(plan: Plan, source: DataAdapter) -> Optional[int]:
    """From the plan, else from the number of batches, else unknown."""
    if plan.updates_per_epoch is not None:
        return plan.updates_per_epoch
    if source.micro_batches is None:
        return None
    return -(-source.micro_batches // plan.micro_batches_per_update)


def _check(
    session: Session, job: Job, given: FitArguments, validation: Optional[Validation]
) -> None:
    """Find out now what would fail at the end of an epoch, or in the middle of one."""
    if validation is not None:
        validation.check(job.first)
    schedule = session.config.schedule
    updates = _updates_per_epoch(job.plan, given.source)
    if schedule is not None and updates is not None:
        coming = min(updates * (given.last_epoch - given.first_epoch), _CHECKED_UPDATES)
        schedule.check(coming, _accumulation_steps(job.plan, given.source, updates))


def _accumulation_steps(plan: Plan, source: DataAdapter, updates: int) -> List[int]:
    """Of the updates of an epoch; a short last one has fewer."""
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
        given = _checked(session, mode, data, how)
        with eval_mode(model.module, session.loss.module):
            job = _inference_job(session, given, mode)
            with session.running(job):
                told = _callbacks(model, session, given, job, mode)
                try:
                    return run(job, told)
                finally:
                    told.call("close")


def _checked(
    session: Session, mode: Mode, data: DataArguments, how: Tuple[Any, ...]
) -> InferenceArguments:
    session.casting.start_call()
    given = session.processes.run_on_all_ranks(
        lambda: InferenceArguments.check(session, mode, data, *how)
    )
    join_inference(session, given, mode)
    return given


def stream(
    model: CallbackModel, session: Session, data: DataArguments, how: Tuple[Any, ...]
) -> Iterator[Any]:
    """Check everything, and predict piece by piece, as it is asked for."""
    with session.processes.propagate_errors():
        return _stream(model, session, _checked(session, Mode.PREDICT, data, how))


def _stream(model: CallbackModel, session: Session, given: InferenceArguments) -> Iterator[Any]:
    """Between two pieces the module is in the mode of its owner."""
    modules = (model.module, session.loss.module)
    with eval_mode(*modules):
        job = _inference_job(session, given, Mode.PREDICT)
    weights = session.weights_version()
    with session.running(job):
        told = _callbacks(model, session, given, job, Mode.PREDICT)
        pieces = loop.predictions(job, told)
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
            told.call("close")


def _inference_job(session: Session, given: InferenceArguments, mode: Mode) -> Job:
    return session.start_together(
        given.source, given.plan, mode, given.seed, mode.value, prefetch=given.prefetch
    )


def _may_stop(callback: Callback) -> bool:
    """Whether it may ask for the end of training in the middle of an epoch."""
    hook = type(callback).on_train_batch_end
    return hook is not Callback.on_train_batch_end and not callback.only_reports


def _callbacks(
    model: CallbackModel,
    session: Session,
    given: Union[FitArguments, InferenceArguments],
    job: Job,
    mode: Mode,
    epochs: int = 1,
    validation: Optional[Validation] = None,
) -> CallbackList:
    """The user's, then History, then the progress bar, as in Keras; one of the user's is enough."""
    is_first = session.processes.is_rank_zero
    users = [callback for callback in given.callbacks if is_first or not callback.only_reports]
    metrics = [] if mode is Mode.PREDICT else [*job.meter.names, *job.meter.settings]
    directions = {name: way for name, way in job.meter.directions.items() if name in metrics}
    added: List[Callback] = []
    if isinstance(given, FitArguments):
        if validation is not None:
            metrics += validation.names(job.meter.names)
            directions.update(validation.directions(job.meter.names, directions))
        if model.history not in given.callbacks:
            added.append(model.history)
    if given.level and is_first:
        # Imported here: nobody needs it who sees nothing.
        from ipufit.callbacks.progbar_logger import ProgbarLogger

        if not any(isinstance(callback, ProgbarLogger) for callback in given.callbacks):
            added.append(ProgbarLogger(given.level))
    params = {
        "epochs": epochs,
        "verbose": given.level,
        "updates": _updates_per_epoch(job.plan, given.source),
        "samples": job.plan.samples,
        "resumes": isinstance(given, FitArguments) and given.found is not None,
        "metrics": metrics,
        "directions": directions,
        "adds": sorted({name for callback in given.callbacks for name in callback.adds or ()}),
    }
    return CallbackList([*users, *added], model, params)
