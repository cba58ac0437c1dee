"""Executions that are written down behind the loop are those that were."""

import pytest

from ipufit.report.rows import COLUMNS, ExecutionTable, columns_of
from ipufit.utils.phase_timer import PHASES

WIDTH = len(COLUMNS) - len(PHASES)


def numbers(place):
    """Of an execution, up to the phases: one execution, four samples."""
    row = {name: float(place) for name in COLUMNS[:WIDTH]}
    return [*{**row, "executions": 1.0, "samples": 4.0}.values()]


@pytest.mark.parametrize("count", [1, 5, 37])
def test_rows_that_are_added_later_are_those_that_are_added_at_once(count):
    """Also where they are joined, and seen in between."""
    later, at_once = ExecutionTable(8), ExecutionTable(8)
    for place in range(count):
        if place % 5 == 0:
            # What an epoch does at its end belongs to no execution.
            later.count_from([1000.0 * place] * len(PHASES))
            passed = [1000.0 * place] * len(PHASES)
        passed = [value + index for index, value in enumerate(passed)]
        later.add_later(numbers(place), passed)
        at_once.add([*numbers(place), *map(float, range(len(PHASES)))])
        if place % 4 == 0:
            assert later.flat == at_once.flat
    later.close()
    at_once.close()
    assert (len(later), later.halvings, later.each) == (
        len(at_once),
        at_once.halvings,
        at_once.each,
    )
    assert columns_of(later.flat) == columns_of(at_once.flat)
    assert sum(columns_of(later.flat)["executions"]) == count
