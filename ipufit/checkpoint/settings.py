"""Settings of checkpoints: the argument ``checkpoint`` of ``fit``, and its checks."""

from __future__ import annotations

import dataclasses
import os
from typing import Collection, Dict, Optional, Union

from ipufit.core import Direction
from ipufit.errors import ConfigurationError, unfit
from ipufit.utils.error_collector import ErrorCollector, SettingsRepr, at_least, folder_of, one_of

Path = Union[str, "os.PathLike[str]"]


@dataclasses.dataclass(frozen=True, repr=False)
class Checkpoint(SettingsRepr):
    """Where and when ``fit`` saves everything that it needs to resume exactly.

    A checkpoint is written at the end of every epoch, after its callbacks, and after SIGINT or
    SIGTERM. Each checkpoint is a folder, which is complete or absent. ``fit(checkpoint=...)`` takes
    it; it is frozen. See docs/checkpoints.md.

    Args:
        folder: for the checkpoints of one run; created if it is missing. None, which needs a path
            as ``resume``, writes no checkpoints.
        every_updates: also write a checkpoint after every so many weight updates, counted from the
            start of ``fit``; an execution ends there.
        keep: how many of the latest checkpoints are kept, in addition to the best one.
        monitor: name of the epoch's value that determines the best checkpoint; None keeps no best
            one.
        mode: "min", "max", or "auto", as the metric declares; an error if it declares nothing.
        resume: "auto" continues from the latest checkpoint in the folder, at the exact update, or
            starts a new run if there is none; a path continues from that checkpoint. Model, data
            and arguments must be those of the run that wrote it.
        resume_changes: names of settings that may differ from that run, such as {"lr"}; the new
            value is used from the first update on. ``History.params`` lists the changes.
        max_restarts: how many times training restarts by itself from the last checkpoint, if a
            device fails that can be used again after "IPU_RESET".

    Raises:
        ConfigurationError: arguments that can't work, alone or together; with every fault.
    """

    folder: Optional[Path] = None
    every_updates: Optional[int] = None
    keep: int = 2
    monitor: Optional[str] = None
    mode: Direction = "auto"
    resume: Optional[Path] = None
    resume_changes: Union[str, Collection[str], None] = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        faults = ErrorCollector()
        with faults.collect():
            if self.every_updates is not None:
                at_least("every_updates of Checkpoint", self.every_updates, 1, " or None")
        with faults.collect():
            at_least("keep of Checkpoint", self.keep, 1)
        with faults.collect():
            if self.monitor is not None and not (isinstance(self.monitor, str) and self.monitor):
                needed = "the name of a value, such as 'val_loss', or None"
                raise unfit("monitor of Checkpoint", needed, self.monitor)
        with faults.collect():
            one_of("mode of Checkpoint", self.mode, Direction)
        with faults.collect():
            at_least("max_restarts", self.max_restarts, 0)
        paths: Dict[str, Optional[str]] = {"folder": None, "resume": None}
        with faults.collect():
            paths["resume"] = _resolve_resume(self.resume)
        with faults.collect():
            if self.folder is not None or not self.resume:
                paths["folder"] = folder_of("folder of Checkpoint", self.folder)
            else:
                self._check_without_folder()
        with faults.collect():
            self._check_changes()
        faults.raise_all()
        for name, path in paths.items():
            object.__setattr__(self, name, path)

    def _check_without_folder(self) -> None:
        """Refuse what needs a folder to write into."""
        if self.resume == "auto":
            raise ConfigurationError(
                "resume='auto' looks for the latest checkpoint in the folder of Checkpoint, but no "
                "folder is set. Pass Checkpoint('runs/1', resume='auto'), or the path of one "
                "checkpoint as resume."
            )
        if self.max_restarts:
            raise ConfigurationError(
                f"max_restarts={self.max_restarts} continues from the last checkpoint after a "
                "device failure, but Checkpoint has no folder to write to. Pass "
                "Checkpoint('runs/1', ...)."
            )
        names = [name for name in ("every_updates", "monitor") if getattr(self, name) is not None]
        if names:
            raise ConfigurationError(
                f"{' and '.join(names)} of Checkpoint set what is written to its folder, but it "
                "has no folder. Pass Checkpoint('runs/1', ...), or leave them out."
            )

    def _check_changes(self) -> None:
        """Refuse ``resume_changes`` that are no names, or of a run that goes on from nothing."""
        names = () if self.resume_changes is None else self.resume_changes
        is_collection = isinstance(names, (str, list, tuple, set, frozenset))
        if not is_collection or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(
                "resume_changes must name settings that may differ from the checkpoint, such as "
                f"{{'lr'}}, got {names!r}. Leave it out if nothing may differ."
            )
        if names and not self.resume:
            raise ConfigurationError(
                "resume_changes says what may differ from the checkpoint, but resume is not "
                "set. Pass resume='auto' too, or leave it out."
            )


def resolve_checkpoint(checkpoint: object) -> Optional[Checkpoint]:
    """Bring the argument ``checkpoint`` of ``fit`` into one form.

    Raises:
        ConfigurationError: it is neither a path nor a Checkpoint.
    """
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return checkpoint
    if isinstance(checkpoint, type):
        raise ConfigurationError(
            "checkpoint must be a path or an object, got the class Checkpoint. Pass "
            "Checkpoint('runs/1')."
        )
    return Checkpoint(folder_of("checkpoint", checkpoint))


def _resolve_resume(resume: object) -> Optional[str]:
    """None, "auto", or the path of one checkpoint."""
    if resume is None or resume is False:
        return None
    if isinstance(resume, bool):
        raise ConfigurationError(
            "resume must be 'auto', the path of a checkpoint or None, got True. Use 'auto', "
            "which starts a new run if there is no checkpoint yet."
        )
    return folder_of("resume", resume)
