"""The checkpoint manager: when a running fit writes checkpoints, and how one goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from types import FrameType
from typing import ContextManager, Dict, Iterator, List, Optional, Sequence

from ipufit.callbacks import Callback, CallbackList
from ipufit.callbacks.callback import missing_value
from ipufit.callbacks.callback_list import CallbackModel, ObservedSession, Observer, RunningFit
from ipufit.callbacks.history import improves, required_direction
from ipufit.checkpoint.configuration import (
    ConfigurationChange,
    RunConfiguration,
    RunData,
    resolve_resume_changes,
)
from ipufit.checkpoint.files import Document
from ipufit.checkpoint.restore import restore
from ipufit.checkpoint.settings import Checkpoint
from ipufit.checkpoint.store import Store, name_of
from ipufit.checkpoint.training_state import RestoredState, checkpoint_contents, loop_state
from ipufit.errors import CheckpointError, ConfigurationError
from ipufit.processes import Processes, common
from ipufit.utils.codec import encode
from ipufit.utils.console import say, warn_user
from ipufit.utils.interrupts import replaced_handler


class PreemptionHandler:
    """Listens while a ``fit`` runs; a second signal ends it at once, by KeyboardInterrupt.

    A handler of the user's own stays in place, and so it does outside the main thread, where
    Python delivers no signal.

    Attributes:
        signal: the one that came, or None.
        agreed_on: the one by which all processes end, or None.
    """

    def __init__(self) -> None:
        self.signal: Optional[signal.Signals] = None
        self.agreed_on: Optional[signal.Signals] = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block a signal is noted."""
        ctrl_c = replaced_handler(signal.SIGINT, signal.default_int_handler, self._record)
        with ctrl_c, replaced_handler(signal.SIGTERM, signal.SIG_DFL, self._record):
            yield

    def _record(self, number: int, frame: Optional[FrameType]) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def agree(self, processes: Processes) -> bool:
        """Return True if a signal came to any process; then it counts for all.

        They ask at the same time. What comes later counts when they ask next.
        """
        local = None if self.signal is None else int(self.signal)
        numbers = [number for number in processes.gather(local, "signals") if number is not None]
        if numbers:
            self.agreed_on = signal.Signals(numbers[0])
        return bool(numbers)


def find(checkpoint: Checkpoint) -> Optional[RestoredState]:
    """The checkpoint that ``fit`` goes on from; None to begin.

    Raises:
        CheckpointError: it can't be read.
        ConfigurationError: there are checkpoints of an earlier run, and nobody said to resume.
    """
    store = None if checkpoint.folder is None else Store(checkpoint.folder)
    names = [] if store is None else store.names()
    resume = checkpoint.resume
    if resume is None:
        if names:
            raise ConfigurationError(
                "checkpoint must be a folder without checkpoints for a new run, but "
                f"{checkpoint.folder!r} has {len(names)}, the latest {names[-1]!r}. Pass "
                f"ipufit.Checkpoint({checkpoint.folder!r}, resume='auto') to continue from "
                "there, or another folder."
            )
        return None
    if resume != "auto":
        folder, name = os.path.split(os.path.abspath(resume))
        is_stored = store is not None and os.path.abspath(store.folder) == folder
        later = names[names.index(name) + 1 :] if is_stored and name in names else []
        if later:
            raise ConfigurationError(
                f"resume continues from {name!r}, but checkpoint={folder!r} has later ones, such "
                f"as {later[-1]!r}, which the run would overwrite. Pass another folder as "
                "checkpoint, or move the later ones away."
            )
        return RestoredState.of(Store(folder), name)
    assert store is not None
    newest, faults = store.newest()
    for fault in faults:
        warn_user(fault)
    if newest is None:
        if faults:
            raise CheckpointError(
                f"resume='auto' needs a readable checkpoint, but none of the {len(names)} in "
                f"{store.folder!r} can be read. Pass another folder to start a new run."
            )
        return None
    name, contents = newest
    for damaged in names[names.index(name) + 1 :]:
        store.set_aside(damaged)
    return RestoredState.of(store, name, contents)


@dataclasses.dataclass(eq=False)
class CheckpointManager(Observer):
    """Writes the checkpoints of one ``fit``.

    Args:
        model: that is trained.
        session: of the model.
        settings: where and when to write, and what may differ from the run that goes on.
        restored: what to go on from; None to begin.
        restarts: how often the device has failed so far.
        data: of the run.
        callbacks: of the fit.
        stateful: callbacks of the user, whose state is stored.
        run: what belongs to the run as a whole; it comes back from a checkpoint.
    """

    model: CallbackModel
    session: ObservedSession
    settings: Checkpoint
    restored: Optional[RestoredState]
    restarts: int
    data: RunData
    callbacks: CallbackList
    stateful: Sequence[Callback]
    run: Document

    phase = "checkpoint"

    def __post_init__(self) -> None:
        self.run = dict(self.run)
        folder = self.settings.folder
        self._store = None if folder is None else Store(folder)
        self._processes = self.session.processes
        self._begun = RunConfiguration()
        # Which checkpoint is the best so far.
        self._best: Document = {"name": None, "value": None}
        self._signals = PreemptionHandler()
        self._direction: Optional[str] = None

    def listening(self) -> ContextManager[None]:
        """Within the block SIGINT and SIGTERM wait for the checkpoint."""
        return contextlib.nullcontext() if self._store is None else self._signals.listening()

    def _coming(self, restored: RestoredState) -> str:
        """Say what is left of a run that goes on."""
        name, epochs = restored.described["checkpoint"], self.callbacks.params["epochs"]
        if not restored.is_over and restored.epoch < epochs:
            return f"going on from checkpoint {name} with epoch {restored.epoch + 1} of {epochs}"
        end = "a callback ended this run" if restored.is_over else f"all {epochs} epochs are done"
        return f"nothing is left to train after checkpoint {name}: {end}"

    def begin_fit(self, fit: RunningFit) -> None:
        """Find out, before any work, whether everything can be written down; go on if asked to.

        Raises:
            CheckpointError: something holds what no checkpoint can hold, or ``restored`` is of
                another run.
        """
        self._fit = fit
        if self._store is not None:
            fit.pipeline.tells_place = True
            self._find_direction()
            encode(loop_state(fit, self.stateful))
        restarts = self.settings.max_restarts > 0
        self._begun = RunConfiguration.of(self.session, self.data, fit.job)
        if self.restored is None:
            if restarts:
                self._write(self.run["first_epoch"] - 1, in_epoch=False)
            return
        if self.restored.in_epoch:
            self.callbacks.call("on_epoch_begin", self.restored.epoch, {})
        changes = self._compare()
        allowed = resolve_resume_changes(self.settings.resume_changes, self.session.groups)
        begun = self._begun.begin
        restore(self.restored, fit, self.session, self.stateful, begun, changes, allowed)
        self._begun.adopt(self.restored, changes)
        if self._begun.changes or allowed:
            unchanged = sorted(allowed - {change.name for change in changes})
            resume_changes = {"changed": self._begun.changes, "unchanged": unchanged}
            fit.history.params["resume_changes"] = resume_changes
        self.run.update(self.restored.run)
        self._best = self.restored.best
        self.model.stop_training = False
        if self.callbacks.params["verbose"] and self._processes.is_rank_zero:
            say(self._coming(self.restored))
        if changes and restarts:
            # A device that fails before the next one would go on without the changes.
            document = self.restored.document
            name = f"{self.restored.name}-changed"
            self._write(document["epoch"], self.restored.in_epoch, name)

    def _compare(self) -> List[ConfigurationChange]:
        """Return the configuration's changes since the checkpoint, found by the first process."""
        checkpoint = self.restored
        assert checkpoint is not None
        if self.restarts:
            return []  # This very call has begun it.
        changes = self._processes.run_on_rank_zero(
            lambda: [dataclasses.asdict(each) for each in self._begun.changes_since(checkpoint)]
        )
        return [ConfigurationChange(**change) for change in changes]

    def _find_direction(self) -> None:
        settings = self.settings
        if settings.monitor is None:
            return
        metrics = self.callbacks.params["metrics"]
        if settings.monitor not in metrics:
            raise missing_value(settings, settings.monitor, metrics)
        directions = self.callbacks.params["directions"]
        self._direction = required_direction(settings, settings.monitor, settings.mode, directions)

    def end_execution(self, epoch: int, outputs: List[object]) -> None:
        """Write in the middle of an epoch, if it is time or the process is to end.

        Raises:
            KeyboardInterrupt, SystemExit: the process is to end.
        """
        if self._store is None or self._fit.ending():
            return
        every = self.settings.every_updates
        came = self._signals.agree(self._processes)
        if came or (every is not None and not self._done() % every):
            self._write(epoch, in_epoch=True)
            self._end_if_asked(epoch)

    def end_epoch(self, epoch: int, logs: Dict[str, float]) -> None:
        """Write after an epoch, its validation and its callbacks.

        Raises:
            KeyboardInterrupt, SystemExit: the process is to end.
        """
        if self._store is None:
            return
        name = self._name(in_epoch=False)
        monitor = self.settings.monitor
        value = None if monitor is None else logs.get(monitor)
        if value is not None:
            assert self._direction is not None, "a value that is watched has a direction"
            if improves(float(value), self._best["value"], self._direction):
                self._best = {"name": name, "value": float(value)}
        self._signals.agree(self._processes)
        self._write(epoch, in_epoch=False)
        self._end_if_asked(epoch)

    def _name(self, in_epoch: bool) -> str:
        return name_of(self._done()) + ("" if in_epoch else "-epoch")

    def _done(self) -> int:
        """Updates made since the run began, those before a restart included."""
        first: int = self.run["first_update"]
        return self._fit.job.program.updates - first

    def _write(self, epoch: int, in_epoch: bool, name: Optional[str] = None) -> None:
        assert self._store is not None
        name = name or self._name(in_epoch)
        about = {
            "stopped": self._fit.ending(),
            "run": self.run,
            "best": self._best,
            **self._begun.document(self.session),
        }
        document, tensors = checkpoint_contents(
            self._fit, self.session, self.stateful, epoch, in_epoch, about
        )
        if not self._processes.is_rank_zero:
            return
        self._store.write(name, document, tensors)
        best = self._best["name"]
        self._store.rotate(self.settings.keep, () if best is None else (best,))

    def _end_if_asked(self, epoch: int) -> None:
        """Leave as the signal wants it, if one came.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: after SIGTERM, with the exit code of a process that it has ended.
        """
        came = self._signals.agreed_on
        if came is None:
            return
        # Whoever ends first may end the others: not before it is written.
        self._processes.gather(None)
        message = (
            f"{came.name}: fit ends after update {self._done()}, in epoch {epoch + 1}, which is "
            f"saved in {self.settings.folder!r}. Call it again with Checkpoint(..., "
            "resume='auto') to continue."
        )
        # Python prints what a KeyboardInterrupt says.
        error: BaseException = KeyboardInterrupt(message)
        if came is not signal.SIGINT:
            error = SystemExit(128 + int(came))
            if self._processes.is_rank_zero:
                say(f"ipufit: {message}")
        # All processes end here.
        raise common(error)
