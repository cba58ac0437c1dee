"""The arguments ``checkpoint`` and ``resume`` of ``fit``."""

from __future__ import annotations

import os
from typing import Any, Optional, Union

from ipufit.errors import ConfigurationError
from ipufit.utils.error_collector import at_least, folder_of, one_of

__all__ = ["Checkpoint", "resolve_checkpoint", "resolve_resume"]

Path = Union[str, "os.PathLike[str]"]


class Checkpoint:
    """Where and when ``fit`` writes down everything that it needs to go on exactly.

    A checkpoint is written at the end of every epoch, after its callbacks, and when SIGINT or
    SIGTERM asks the process to end. Each is a folder of its own, complete or not there at all.

    Args:
        folder: holds the checkpoints of one run; made if it is missing.
        every_updates: write one after every so many weight updates as well, counted from the start
            of ``fit``: executions are cut so that one ends there.
        keep: how many are kept, the latest ones; the best one besides.
        monitor: name of the value of an epoch that says which is the best; None keeps no best one.
        mode: "min", "max", or "auto": as the metric says; an error if it does not.

    Raises:
        ConfigurationError: an argument can't work.
    """

    def __init__(
        self,
        folder: Path,
        every_updates: Optional[int] = None,
        keep: int = 2,
        monitor: Optional[str] = None,
        mode: str = "auto",
    ) -> None:
        self.folder: str = folder_of("folder of Checkpoint", folder)
        if every_updates is not None:
            every_updates = at_least("every_updates of Checkpoint", every_updates, 1, " or None")
        self.every_updates = every_updates
        self.keep: int = at_least("keep of Checkpoint", keep, 1)
        if monitor is not None and not (isinstance(monitor, str) and monitor):
            raise ConfigurationError(
                "monitor of Checkpoint must be the name of a value, such as 'val_loss', or None, "
                f"got {monitor!r}."
            )
        self.monitor = monitor
        one_of("mode of Checkpoint", mode, ("auto", "min", "max"))
        self.mode = mode

    def __repr__(self) -> str:
        return f"Checkpoint({self.folder!r})"


def resolve_checkpoint(checkpoint: Any) -> Optional[Checkpoint]:
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


def resolve_resume(resume: Any, checkpoint: Optional[Checkpoint]) -> Optional[str]:
    """Resolve the argument ``resume`` of ``fit``: None, "auto", or the path of one checkpoint.

    Raises:
        ConfigurationError: it is something else, or "auto" without a folder to look into.
    """
    if resume is None or resume is False:
        return None
    if isinstance(resume, bool):
        raise ConfigurationError(
            "resume must be 'auto', the path of a checkpoint or None, got True. Use 'auto', which "
            "begins anew where there is no checkpoint yet."
        )
    found = folder_of("resume", resume)
    if found == "auto" and checkpoint is None:
        raise ConfigurationError(
            "resume='auto' looks for the latest checkpoint of a run, but checkpoint is not given. "
            "Pass checkpoint='runs/1' too, or the path of one checkpoint as resume."
        )
    return found
