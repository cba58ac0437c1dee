"""Versions of the weights on the host, a training device and inference devices."""

from __future__ import annotations

import itertools
from typing import Dict, Iterable, Optional, Protocol

__all__ = ["WeightFollower", "WeightSource", "WeightSync"]

# One count for all: a version never comes back, whichever executor made it.
_versions = itertools.count(1)


class WeightSource(Protocol):
    """Interface through which the user's model asks a training executor for newer weights."""

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Read the weights back if the device has newer ones, and return True in that case."""
        ...

    def destroy(self) -> None:
        """Free the device and unwrap the model."""
        ...


class WeightSync:
    """Synchronisation state of the weights of one training executor.

    Attributes:
        dirty: the device trained since the host's weights were last equal to its own.
        version: number of the host's weights, which changes with each reading.
        first_version: the number before any reading.
    """

    def __init__(self) -> None:
        self.dirty = False
        self.version = self.first_version = next(_versions)

    def trained(self) -> None:
        """Record that the device has changed its weights."""
        self.dirty = True

    def pulled(self) -> None:
        """Record that the host is about to get the device's weights: reading them is no access."""
        self.dirty = False
        self.version = next(_versions)

    def pushed(self) -> None:
        """Record that the host's weights are about to overwrite what the device has trained."""
        self.dirty = False


class WeightFollower:
    """Versions of the host's weights that an inference executor has uploaded."""

    def __init__(self) -> None:
        self._versions: Optional[Dict[WeightSync, int]] = None

    def uploaded(self, syncs: Iterable[WeightSync]) -> None:
        """Record that the device has got the host's weights as they are now."""
        self._versions = {sync: sync.version for sync in syncs}

    def is_behind(self, syncs: Iterable[WeightSync]) -> bool:
        """Return True if weights were read back from a training device since the upload.

        A change on the host alone does not count: ``copyWeightsToDevice`` is for that.

        Args:
            syncs: of the training executors that share weights now, after each has been asked for
                what it has newer. One that was destroyed since is still looked at.
        """
        if self._versions is None:
            return False
        for sync in syncs:
            self._versions.setdefault(sync, sync.first_version)
        return any(sync.version != version for sync, version in self._versions.items())
