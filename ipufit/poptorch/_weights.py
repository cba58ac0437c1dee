"""Which side has the newer weights: the device that trains, the host, a device that only reads."""

from __future__ import annotations

import itertools
from typing import Dict, Iterable, Optional, Protocol

__all__ = ["WeightFollower", "WeightSource", "WeightSync"]

# One count for all: a version never comes back, whichever executor made it.
_versions = itertools.count(1)


class WeightSource(Protocol):
    """What the user's model calls back: a training executor, or a stand-in in a test."""

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Read the weights back if the device has newer ones; whether it had."""
        ...

    def destroy(self) -> None:
        """Free the device and unwrap the model."""
        ...


class WeightSync:
    """The weights of one training executor.

    Attributes:
        dirty: the device trained since the host's weights were last equal to its own.
        version: of the host's weights; another number after each reading.
        first_version: the one before any reading.
    """

    def __init__(self) -> None:
        self.dirty = False
        self.version = self.first_version = next(_versions)

    def trained(self) -> None:
        """The device has changed its weights."""
        self.dirty = True

    def pulled(self) -> None:
        """The host is about to get the device's weights: what it does in between is no access."""
        self.dirty = False
        self.version = next(_versions)

    def pushed(self) -> None:
        """The device is about to get the host's weights; what it had trained is gone."""
        self.dirty = False


class WeightFollower:
    """What an inference executor remembers of the host's weights."""

    def __init__(self) -> None:
        self._seen: Optional[Dict[WeightSync, int]] = None

    def uploaded(self, syncs: Iterable[WeightSync]) -> None:
        """The device has got the host's weights as they are now."""
        self._seen = {sync: sync.version for sync in syncs}

    def is_behind(self, syncs: Iterable[WeightSync]) -> bool:
        """Whether the host's weights were read back from a training device since the upload.

        A change on the host alone does not count: ``copyWeightsToDevice`` is for that.

        Args:
            syncs: of the training executors that share weights now, after each has been asked for
                what it has newer. One that was destroyed since is still looked at.
        """
        if self._seen is None:
            return False
        for sync in syncs:
            self._seen.setdefault(sync, sync.first_version)
        return any(sync.version != seen for sync, seen in self._seen.items())
