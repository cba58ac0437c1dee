"""How many weight updates a fit has made, for callbacks that go by them."""

from __future__ import annotations

from typing import Dict, Mapping, Optional

__all__ = ["UpdateCount"]


class UpdateCount:
    """Counts from the start of ``fit``; hooks tell of updates within their epoch only.

    Attributes:
        epoch: index of the present epoch.
        done: updates since ``fit`` began.
    """

    def __init__(self) -> None:
        self.epoch = self.done = self._before = 0

    def state_dict(self) -> Dict[str, int]:
        """Return the count, for a checkpoint."""
        return {"epoch": self.epoch, "done": self.done, "before": self._before}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.epoch, self.done = int(state["epoch"]), int(state["done"])
        self._before = int(state["before"])

    def begin_epoch(self, epoch: int) -> None:
        """Add the updates so far to those of earlier epochs."""
        self.epoch, self._before = epoch, self.done

    def end_execution(self, batch: int, every: Optional[int]) -> bool:
        """Count up to this update of the epoch.

        Returns:
            Whether a multiple of ``every`` has been reached; never where that is None.
        """
        before, self.done = self.done, self._before + batch + 1
        return every is not None and self.done // every > before // every
