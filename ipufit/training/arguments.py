"""The arguments of ``fit``, ``evaluate`` and ``predict``, checked together before anything runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

import torch

from ipufit.callbacks import Callback
from ipufit.callbacks.callback_list import checked
from ipufit.checkpoint.settings import Checkpoint, resolve_checkpoint
from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data.adapters import get_data_adapter
from ipufit.data.settings import validation_epochs
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError, unfit
from ipufit.report.settings import Report, refuse_report, refuse_reports, split_reports
from ipufit.training import fit_data
from ipufit.training.session import JobSpec, Session
from ipufit.utils.console import VerboseLevel, resolve_verbose
from ipufit.utils.error_collector import ErrorCollector, at_least, at_least_or_none, whole_number
from ipufit.utils.random_streams import Seeds

if TYPE_CHECKING:
    from ipufit.checkpoint.training_state import RestoredState


@dataclasses.dataclass(frozen=True)
class InferenceConfig(JobSpec):
    """Checked arguments of ``evaluate`` or ``predict``: the job that they ask for.

    Attributes:
        callbacks: a list.
        level: how much to print: 0, 1, 2 or "rich".
        padding_value: of outputs of several shapes; None for a list of rows.
    """

    callbacks: Sequence[Callback] = ()
    level: VerboseLevel = 0
    padding_value: Optional[float] = None

    @staticmethod
    def check(
        session: Session, mode: Mode, request: fit_data.InferenceRequest, faults: ErrorCollector
    ) -> InferenceConfig:
        """Raise all faults at once, with those known before, or return the arguments."""
        source = plan = None
        steps, prefetch = None, 0
        with faults.collect():
            source = get_data_adapter(request.data, mode, session.loss.own_loss(mode))
        with faults.collect():
            steps = at_least_or_none("steps", request.steps, 1)
        with faults.collect():
            data = source or DataAdapter([], request.data.role)
            work = (request.ipus, request.device_iterations)
            plan = fit_data.inference_plan(session, data, steps, "steps", *work)
        callbacks, seed, level = _common(session, faults, request, mode)
        with faults.collect():
            prefetch = fit_data.resolve_prefetch(request.prefetch, source, session)
        value = request.padding_value
        with faults.collect():
            if value is not None and type(value) not in (int, float):
                raise unfit("padding_value", "a number or None", value, "Pass for example 0.0.")
        faults.raise_all()
        assert source is not None
        assert plan is not None
        return InferenceConfig(
            source,
            plan,
            mode,
            seed or 0,
            mode.value,
            prefetch=prefetch,
            callbacks=callbacks,
            level=level,
            padding_value=value,
        )


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """Checked arguments of ``fit``.

    Attributes:
        source: the training data.
        plan: its batch algebra.
        held_out: a validation, but for its seed and epoch; None for no validation.
        validation_epochs: indices of the epochs after which it is evaluated.
        epochs: indices of the epochs; of a run that goes on, of those that are left.
        callbacks: a list.
        asked_seed: given, or of the run that goes on; None to draw one.
        level: how much to print: 0, 1, 2 or "rich".
        prefetch: executions to prepare ahead.
        notes: what else History should say of the run.
        checkpoint: where and when checkpoints are written, and what to go on from; or None.
        report: where a report is written; None for none.
        restarts: how often the device has failed so far.
        restored: the checkpoint to go on from; None to begin.
        seed: drawn, if none was given.
    """

    source: DataAdapter
    plan: Plan
    held_out: Optional[JobSpec]
    validation_epochs: List[int]
    epochs: range
    callbacks: List[Callback]
    asked_seed: Optional[int]
    level: VerboseLevel
    prefetch: int
    notes: Dict[str, object]
    checkpoint: Optional[Checkpoint]
    report: Optional[Report] = None
    restarts: int = 0
    restored: Optional[RestoredState] = None
    seed: int = 0

    @staticmethod
    def check(session: Session, request: fit_data.FitRequest) -> FitConfig:
        """Raise all faults at once, or return the arguments."""
        faults = ErrorCollector(of_call=True)
        with faults.collect():
            if torch.is_inference_mode_enabled():
                raise ConfigurationError(
                    "fit needs gradients, which torch.inference_mode() disables. Call it outside "
                    "of that block; evaluate and predict do not need the block."
                )
        epochs = range(1)
        with faults.collect():
            epochs = _epochs(request.epochs)
        data = fit_data.FitData(session, request, faults)
        loading = data.loading
        data.open()
        data.limit()
        plan = data.plan()
        callbacks, seed, level = _common(session, faults, request, Mode.TRAIN)
        inference = data.inference_plan()
        due: List[int] = []
        with faults.collect():
            data.refuse_unused()
            due = validation_epochs(data.validation, epochs)
        passes = request.steps_per_epoch is not None
        prefetch = fit_data.resolve_prefetch(loading.prefetch, data.source, session, passes)
        held_prefetch = fit_data.resolve_prefetch(loading.prefetch, data.held_out, session)
        checkpoint = None
        with faults.collect():
            checkpoint = resolve_checkpoint(request.checkpoint)
            if checkpoint is not None:
                _check_checkpoint(session, checkpoint)
        report = None
        with faults.collect():
            callbacks, report = split_reports(callbacks)
            if report is not None and not loading.fast_dev_run:
                refuse_report(report, resumes=bool(checkpoint and checkpoint.resume))
        faults.raise_all()
        assert data.source is not None
        assert plan is not None
        held_out = None
        if data.held_out is not None and inference is not None:
            held_out = JobSpec(
                data.held_out, inference, Mode.EVALUATE, 0, "validation", prefetch=held_prefetch
            )
        notes = data.notes
        if loading.fast_dev_run:
            left_out = [callback for callback in callbacks if callback.writes_files]
            callbacks = [c for c in callbacks if c not in left_out]
            notes["fast_dev_run"] = int(loading.fast_dev_run)
            notes["left_out_callbacks"] = [type(callback).__name__ for callback in left_out]
            notes["left_out_callbacks"] += [] if checkpoint is None else ["checkpoint"]
            notes["left_out_callbacks"] += [] if report is None else ["report"]
            checkpoint = report = None
            epochs = epochs[:1]
            due = [*epochs]
        if checkpoint is not None and checkpoint.max_restarts and plan.fixed_updates is None:
            # Whatever goes on reads the data anew.
            data.source.check_epochs(2)
        if held_out is not None:
            held_out.source.check_epochs(len(due))
        return FitConfig(
            source=data.source,
            plan=plan,
            held_out=held_out,
            validation_epochs=due,
            epochs=epochs,
            callbacks=callbacks,
            asked_seed=seed,
            level=level,
            prefetch=prefetch,
            notes=notes,
            checkpoint=checkpoint,
            report=report,
        )

    def going_on_from(self, restored: Optional[RestoredState]) -> FitConfig:
        """Return these arguments for a run that goes on from a checkpoint or, from None, begins.

        Raises:
            ConfigurationError: the checkpoint is of a run with other arguments.
            DataError: the data can't be read so often.
        """
        seed, epochs = self.asked_seed, self.epochs
        if restored is not None:
            seed = _seed_of(restored, seed)
            epochs = _epochs_left(restored, epochs)
        if self.plan.fixed_updates is None:
            self.source.check_epochs(len(epochs))
        return dataclasses.replace(self, restored=restored, asked_seed=seed, epochs=epochs)

    def again(self, restored: Optional[RestoredState]) -> FitConfig:
        """Return these arguments for another try after the device failed, from a checkpoint."""
        if restored is None:
            return self
        epochs = range(restored.run["first_epoch"], self.epochs.stop)
        epochs = _epochs_left(restored, epochs)
        restarts = self.restarts + 1
        return dataclasses.replace(self, restored=restored, epochs=epochs, restarts=restarts)


def _check_checkpoint(session: Session, checkpoint: Checkpoint) -> None:
    """Check what a Checkpoint can't know by itself."""
    faults = ErrorCollector()
    if checkpoint.resume_changes is not None:
        # Imported here: few runs change anything.
        from ipufit.checkpoint.configuration import resolve_resume_changes

        with faults.collect():
            resolve_resume_changes(checkpoint.resume_changes, session.groups)
    with faults.collect():
        if checkpoint.max_restarts:
            instead = "Leave it out, and let the launcher restart: torchrun --max-restarts."
            session.processes.require_single(f"max_restarts={checkpoint.max_restarts}", instead)
    faults.raise_all()


def _seed_of(checkpoint: RestoredState, seed: Optional[int]) -> int:
    if seed is not None and seed != checkpoint.seed:
        raise ConfigurationError(
            f"seed must be that of the resumed run, {checkpoint.seed}, got {seed}. Leave it out: "
            "the checkpoint has it."
        )
    return checkpoint.seed


def _epochs_left(checkpoint: RestoredState, epochs: range) -> range:
    """The epochs of a run that its checkpoint has not finished."""
    first = checkpoint.run["first_epoch"]
    if epochs.start != first:
        epochs_to_pass = range(first, epochs.stop) if first else epochs.stop
        raise ConfigurationError(
            f"epochs must begin with the first one of the resumed run, {first}, got {epochs!r}. "
            f"Pass epochs={epochs_to_pass}: the checkpoint knows where to continue."
        )
    done = len(epochs) if checkpoint.is_over else checkpoint.epoch - first
    return epochs[done:]


def _common(
    session: Session,
    faults: ErrorCollector,
    request: fit_data.CallRequest,
    mode: Mode,
) -> Tuple[List[Callback], Optional[int], VerboseLevel]:
    callbacks: List[Callback] = []
    seed, level = None, resolve_verbose(0)
    with faults.collect():
        callbacks = checked(request.callbacks)
        if mode is not Mode.TRAIN:
            refuse_reports(callbacks, mode.value)
    with faults.collect():
        seed = None if request.seed is None else checked_seed(request.seed)
        seed = session.fixed.seed_or(seed, mode is Mode.TRAIN)
    with faults.collect():
        level = resolve_verbose(request.verbose)
    return callbacks, seed, level


def _epochs(epochs: object) -> range:
    """The indices of the epochs, of a number of them or as a range."""
    if not isinstance(epochs, range):
        return range(at_least("epochs", epochs, 1, " or a range such as range(3, 10)"))
    if epochs.step != 1 or epochs.start < 0 or not epochs:
        raise ConfigurationError(
            "epochs must be a number of epochs or a range of their indices, with at least one "
            f"epoch, no negative index and no gaps, got {epochs!r}. Pass for example range(3, 10)."
        )
    return epochs


def checked_seed(seed: object) -> int:
    """A seed as an integer.

    Raises:
        ConfigurationError: it is none.
    """
    number = whole_number(seed)
    if number is None:
        raise unfit("seed", "an integer or None", seed)
    return seed if isinstance(seed, Seeds) else number
