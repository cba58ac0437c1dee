"""Progress bar of a compilation, which also measures its time."""

from __future__ import annotations

import contextlib
import datetime
import sys
from typing import Any, Iterator, Optional

import tqdm

__all__ = ["ProgressBar"]


class ProgressBar:
    """Shows the progress of a compilation; called with the progress and its total.

    Attributes:
        compilation_time: from the first call to the last; None before.
    """

    def __init__(self) -> None:
        self.compilation_time: Optional[datetime.timedelta] = None
        self._start_time: Optional[datetime.datetime] = None
        self._bar: Any = None
        self._last = 0

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Show and measure the compilation inside; one that fails is not measured."""
        before = self.compilation_time
        self(0, 100)
        try:
            yield
        except BaseException:
            self._bar.close()
            self._bar = self._start_time = None
            self.compilation_time = before
            raise
        self(100, 100)

    def __call__(self, progress: int, total: int) -> None:
        if self._start_time is None:
            self._start_time = datetime.datetime.now()
            self._last = 0
            self._bar = tqdm.tqdm(
                desc="Graph compilation",
                total=total,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
                file=sys.stderr,
            )
        self._bar.update(progress - self._last)
        self._last = progress
        self.compilation_time = datetime.datetime.now() - self._start_time
        if progress >= total:
            self._bar.close()
            self._bar = self._start_time = None

    def __deepcopy__(self, memory: object) -> ProgressBar:
        """Return a new bar, because each model compiles for itself."""
        return ProgressBar()
