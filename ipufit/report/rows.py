"""Table of bounded length for the executions of a run."""

from __future__ import annotations

import math
import operator
from array import array
from typing import Dict, List, Sequence

from ipufit.utils.phase_timer import PHASES

# Of a row: when it begins, in seconds since the run did; what it is; and its seconds by phase.
COLUMNS = (
    "begin",
    "epoch",
    "first_update",
    "executions",
    "updates",
    "samples",
    "loss",
    "learning_rate",
    "loss_scale",
    "skipped",
    "memory",
    *PHASES,
)
_AT = {name: place for place, name in enumerate(COLUMNS)}
_WIDTH = len(COLUMNS)
# Columns of which several executions in a row have the sum.
SUMS = ("executions", "updates", "samples", "skipped", *PHASES)

# A table of so many rows has every second one joined to the one before it.
MOST_ROWS = 20_000


class ExecutionTable:
    """Table with a row for every execution or, in a long run, for several in a row.

    A row of several has the sum of their numbers and seconds, the mean of their losses over
    samples, the largest memory, and the last learning rate and loss scale.

    Args:
        most: rows to hold at most, an even number.

    Attributes:
        each: executions of a full row.
        halvings: how often every second row was merged into the one before it.
    """

    def __init__(self, most: int = MOST_ROWS) -> None:
        self._flat = array("d")
        self.each = 1
        self.halvings = 0
        self._most = most
        self._open: List[float] = []
        # What came since the last look: numbers up to the phases, then seconds since the beginning.
        self._later = array("d")
        self._before: List[float] = [0.0] * len(PHASES)

    @property
    def flat(self) -> array[float]:
        """The numbers, row by row, in the order of COLUMNS; nan where there is none."""
        self._settle()
        return self._flat

    def __len__(self) -> int:
        return len(self.flat) // _WIDTH

    def count_from(self, seconds: Sequence[float]) -> None:
        """Begin the next execution at these seconds, by phase."""
        self._settle()
        self._before = list(seconds)

    def add_later(self, numbers: Sequence[float], seconds: Sequence[float]) -> None:
        """Queue an execution without delay; it is added when the table is read.

        Args:
            numbers: in the order of COLUMNS, up to the phases.
            seconds: by phase, that have passed at its end.
        """
        self._later.extend(numbers)
        self._later.extend(seconds)

    def _settle(self) -> None:
        later, self._later = self._later, array("d")
        for place in range(0, len(later), _WIDTH):
            phases, end = place + _WIDTH - len(PHASES), place + _WIDTH
            after = list(later[phases:end])
            self.add([*later[place:phases], *map(operator.sub, after, self._before)])
            self._before = after

    def add(self, row: Sequence[float]) -> None:
        """Add an execution, its values in the order of COLUMNS."""
        self._settle()
        if self.each == 1:
            self._flat.extend(row)
        else:
            self._open = _merge_rows(self._open, row) if self._open else list(row)
            if self._open[_AT["executions"]] >= self.each:
                self.close()
        if len(self._flat) // _WIDTH >= self._most:
            self._halve()

    def close(self) -> None:
        """End the last row, though executions are missing from it."""
        self._settle()
        if self._open:
            self._flat.extend(self._open)
            self._open = []

    def _halve(self) -> None:
        flat = array("d")
        for place in range(0, len(self._flat), 2 * _WIDTH):
            first = self._flat[place : place + _WIDTH]
            second = self._flat[place + _WIDTH : place + 2 * _WIDTH]
            flat.extend(_merge_rows(first, second) if second else first)
        self._flat = flat
        self.each *= 2
        self.halvings += 1

    def take(self, columns: Dict[str, List[float]], before: float) -> None:
        """Take over the rows of an earlier part of the run, up to an update."""
        rows = zip(*(columns[name] for name in COLUMNS))
        for row in rows:
            if row[_AT["first_update"]] < before:
                self._flat.extend(row)
                self.each = max(self.each, int(row[_AT["executions"]]))
        while len(self._flat) // _WIDTH >= self._most:
            self._halve()


def _merge_rows(first: Sequence[float], second: Sequence[float]) -> List[float]:
    """Merge two rows that follow each other."""
    row = list(first)
    for place in (_AT[name] for name in SUMS):
        row[place] = first[place] + second[place]
    loss, samples = _AT["loss"], _AT["samples"]
    if row[samples]:
        total = first[loss] * first[samples] + second[loss] * second[samples]
        row[loss] = total / row[samples]
    for name in ("learning_rate", "loss_scale"):
        row[_AT[name]] = second[_AT[name]]
    row[_AT["memory"]] = largest([each[_AT["memory"]] for each in (first, second)])
    return row


def largest(values: Sequence[float]) -> float:
    """Return the largest of the values that are known; nan without any."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def columns_of(flat: Sequence[float]) -> Dict[str, List[float]]:
    """Return the columns of a table by name; an unfinished last row is left out."""
    end = len(flat) - len(flat) % _WIDTH
    return {name: list(flat[place:end:_WIDTH]) for name, place in _AT.items()}
