"""The arguments of ``fit``, ``evaluate`` and ``predict``, checked together before anything runs."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Optional, Tuple, Union

import torch

from ipufit.callbacks import Callback
from ipufit.callbacks.callback_list import checked
from ipufit.checkpoint.settings import Checkpoint, resolve_checkpoint, resolve_resume
from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data.adapters import DataArguments, get_data_adapter
from ipufit.data.limits import validation_epochs
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError
from ipufit.report.settings import Report, refuse_report, resolve_report
from ipufit.training.fit_data import (
    FitData,
    FitRequest,
    inference_plan,
    refuse_unused,
    resolve_prefetch,
)
from ipufit.training.session import Session, require_single_process
from ipufit.utils.console import resolve_verbose
from ipufit.utils.error_collector import ErrorCollector, at_least

if TYPE_CHECKING:
    from ipufit.checkpoint.training_state import RestoredState

__all__ = ["FitArguments", "InferenceArguments"]


@dataclasses.dataclass(frozen=True)
class InferenceArguments:
    """Checked arguments of ``evaluate`` or ``predict``.

    Attributes:
        source: the data.
        plan: its batch algebra.
        callbacks: a list.
        seed: an integer.
        level: how much to print: 0, 1 or 2.
        prefetch: executions to prepare ahead.
    """

    source: DataAdapter
    plan: Plan
    callbacks: List[Callback]
    seed: int
    level: int
    prefetch: int

    @staticmethod
    def check(
        session: Session,
        mode: Mode,
        given: DataArguments,
        steps: Any,
        prefetch: Any,
        ipus: Any,
        device_iterations: Any,
        callbacks: Any,
        seed: Any,
        verbose: Union[int, str],
    ) -> InferenceArguments:
        """Raise all faults at once, or return the arguments."""
        faults = ErrorCollector()
        source = plan = None
        with faults.collect():
            source = get_data_adapter(given, mode, session.loss.in_module)
        with faults.collect():
            steps = None if steps is None else at_least("steps", steps, 1, " or None")
        with faults.collect():
            work = (ipus, device_iterations)
            if source is not None:
                plan = inference_plan(session, source, steps, "steps", *work)
            else:
                inference_plan(session, DataAdapter([], given.role), None, "steps", *work)
        with faults.collect():
            callbacks = checked(callbacks)
        with faults.collect():
            seed = None if seed is None else checked_seed(seed)
            seed = session.fixed.seed_or(seed, is_training=False) or 0
        with faults.collect():
            level = resolve_verbose(verbose)
        with faults.collect():
            prefetch = resolve_prefetch(prefetch, source, session)
        faults.raise_all()
        assert source is not None
        assert plan is not None
        return InferenceArguments(source, plan, callbacks, seed, level, prefetch)


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """Checked arguments of ``fit``.

    Attributes:
        source: the training data.
        plan: its batch algebra.
        held_out: the validation data, its batch algebra and prefetch, or None.
        validation_epochs: indices of the epochs after which it is evaluated.
        first_epoch, last_epoch: epochs from the first up to, not including, the last.
        callbacks: a list.
        asked_seed: given, or of the run that goes on; None to draw one.
        level: how much to print: 0, 1 or 2.
        prefetch: executions to prepare ahead.
        notes: what else History should say of the run.
        checkpoint: where and when checkpoints are written; None for none.
        resume: what to go on from, as asked for.
        resume_changes: names of what may differ from the run that goes on.
        restarts: how often the device has failed so far.
        restored: the checkpoint to go on from; None to begin.
        max_restarts: how often a device may fail.
        report: where a report is written; None for none.
        seed: drawn, if none was given.
    """

    source: DataAdapter
    plan: Plan
    held_out: Optional[Tuple[DataAdapter, Plan, int]]
    validation_epochs: List[int]
    first_epoch: int
    last_epoch: int
    callbacks: List[Callback]
    asked_seed: Optional[int]
    level: int
    prefetch: int
    notes: Dict[str, Any]
    checkpoint: Optional[Checkpoint]
    resume: Optional[str]
    resume_changes: FrozenSet[str]
    max_restarts: int
    report: Optional[Report] = None
    restarts: int = 0
    restored: Optional[RestoredState] = None
    seed: int = 0

    @staticmethod
    def check(session: Session, request: FitRequest) -> FitArguments:
        """Raise all faults at once, or return the arguments."""
        if torch.is_inference_mode_enabled():
            raise ConfigurationError(
                "fit needs gradients, which torch.inference_mode() switches off for good. Call it "
                "outside of that block; evaluate and predict need no such block."
            )
        faults = ErrorCollector()
        first, last = 0, 1
        with faults.collect():
            first, last = _epochs(request.initial_epoch, request.epochs)
        data = FitData(session, request, faults)
        data.open()
        dev_run = data.limit()
        plan = data.plan(dev_run)
        callbacks, seed, level = _common(session, faults, request)
        inference = data.inference_plan(dev_run)
        with faults.collect():
            refuse_unused(request)
        due: List[int] = []
        with faults.collect():
            due = validation_epochs(request.validation_freq, first, last)
        prefetch = held_prefetch = 0
        with faults.collect():
            passes = request.steps_per_epoch is not None
            prefetch = resolve_prefetch(request.prefetch, data.source, session, passes)
            held_prefetch = resolve_prefetch(request.prefetch, data.held_out, session)
        checkpoint = resume = None
        max_restarts = 0
        with faults.collect():
            checkpoint = resolve_checkpoint(request.checkpoint)
        with faults.collect():
            resume = resolve_resume(request.resume, checkpoint)
        resume_changes: FrozenSet[str] = frozenset()
        if request.resume_changes is not None:
            # Imported here: few runs change anything.
            from ipufit.checkpoint.configuration import resolve_resume_changes

            with faults.collect():
                resume_changes = resolve_resume_changes(
                    request.resume_changes, request.resume, session.groups
                )
        with faults.collect():
            max_restarts = _restarts(session, request.max_restarts, request.checkpoint)
        report = None
        with faults.collect():
            report = resolve_report(request.report, request.autoreport, request.autoreport_dir)
            if report is not None and not dev_run:
                refuse_report(report, resume is not None)
        faults.raise_all()
        assert data.source is not None
        assert plan is not None
        held_out = None
        if data.held_out is not None and inference is not None:
            held_out = (data.held_out, inference, held_prefetch)
        notes = data.notes
        if dev_run:
            left_out = [callback for callback in callbacks if callback.writes_files]
            callbacks = [c for c in callbacks if c not in left_out]
            notes["fast_dev_run"] = dev_run
            notes["left_out_callbacks"] = [type(callback).__name__ for callback in left_out]
            notes["left_out_callbacks"] += [] if checkpoint is None else ["checkpoint"]
            notes["left_out_callbacks"] += [] if report is None else ["report"]
            checkpoint = resume = report = None
            last, due = first + 1, [first]
        if max_restarts and plan.fixed_updates is None:
            # Whatever goes on reads the data anew.
            data.source.check_epochs(2)
        if held_out is not None:
            held_out[0].check_epochs(len(due))
        return FitArguments(
            source=data.source,
            plan=plan,
            held_out=held_out,
            validation_epochs=due,
            first_epoch=first,
            last_epoch=last,
            callbacks=callbacks,
            asked_seed=seed,
            level=level,
            prefetch=prefetch,
            notes=notes,
            checkpoint=checkpoint,
            resume=resume,
            resume_changes=resume_changes,
            max_restarts=max_restarts,
            report=report,
        )

    def going_on_from(self, restored: Optional[RestoredState]) -> FitArguments:
        """Return these arguments for a run that goes on from a checkpoint or, from None, begins.

        Raises:
            ConfigurationError: the checkpoint is of a run with other arguments.
            DataError: the data can't be read so often.
        """
        seed, first = self.asked_seed, self.first_epoch
        if restored is not None:
            seed = _seed_of(restored, seed)
            first = _first_of(restored, first, self.last_epoch)
        if self.plan.fixed_updates is None:
            self.source.check_epochs(self.last_epoch - first)
        return dataclasses.replace(self, restored=restored, asked_seed=seed, first_epoch=first)

    def again(self, restored: Optional[RestoredState]) -> FitArguments:
        """Return these arguments for another try after the device failed, from a checkpoint."""
        if restored is None:
            return self
        original = restored.run["first_epoch"]
        first = _first_of(restored, original, self.last_epoch)
        restarts = self.restarts + 1
        return dataclasses.replace(self, restored=restored, first_epoch=first, restarts=restarts)


def _restarts(session: Session, max_restarts: Any, checkpoint: Any) -> int:
    count = at_least("max_restarts", max_restarts, 0)
    if count:
        instead = "Leave it out, and let the launcher begin again: torchrun --max-restarts."
        require_single_process(session, f"max_restarts={count}", instead)
    if count and checkpoint is None:
        raise ConfigurationError(
            f"max_restarts={count} goes on from the last checkpoint when a device has failed, but "
            "checkpoint is not given. Pass checkpoint='runs/1' too."
        )
    return count


def _seed_of(checkpoint: RestoredState, seed: Optional[int]) -> int:
    if seed is not None and seed != checkpoint.seed:
        raise ConfigurationError(
            f"seed must be that of the run that goes on, {checkpoint.seed}, got {seed}. Leave it "
            "out: the checkpoint has it."
        )
    return checkpoint.seed


def _first_of(checkpoint: RestoredState, first: int, last: int) -> int:
    """The epoch to begin with."""
    if first != checkpoint.run["first_epoch"]:
        raise ConfigurationError(
            "initial_epoch must be that of the run that goes on, "
            f"{checkpoint.run['first_epoch']}, got {first}. The checkpoint has the epoch "
            "to go on with."
        )
    return last if checkpoint.is_over else min(checkpoint.epoch, last)


def _common(
    session: Session, faults: ErrorCollector, request: FitRequest
) -> Tuple[List[Callback], Optional[int], int]:
    callbacks: List[Callback] = []
    seed, level = None, 0
    with faults.collect():
        callbacks = checked(request.callbacks)
    with faults.collect():
        seed = session.fixed.seed_or(None if request.seed is None else checked_seed(request.seed))
    with faults.collect():
        level = resolve_verbose(request.verbose)
    return callbacks, seed, level


def _epochs(initial_epoch: Any, epochs: Any) -> Tuple[int, int]:
    for name, value, least in (("epochs", epochs, 1), ("initial_epoch", initial_epoch, 0)):
        at_least(name, value, least)
    if initial_epoch >= epochs:
        raise ConfigurationError(
            f"epochs is the index to stop before, so it must be more than initial_epoch "
            f"({initial_epoch}), got {epochs}. Try {initial_epoch + 1}."
        )
    return operator.index(initial_epoch), operator.index(epochs)


def checked_seed(seed: Any) -> int:
    """A seed as an integer.

    Raises:
        ConfigurationError: it is none.
    """
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ConfigurationError(f"seed must be an integer or None, got {seed!r}.")
    return operator.index(seed)
