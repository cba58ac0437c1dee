"""The table of executions."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ipufit.report.rows import COLUMNS, ExecutionTable, columns_of
from ipufit.utils.phase_timer import PHASES

SUMS = ("executions", "updates", "samples", "skipped", *PHASES)


def row(number, samples=4.0, loss=1.0, memory=math.nan, rate=0.1):
    """The execution of this number, of two updates."""
    values = {
        "begin": 10.0 * number,
        "epoch": number // 10,
        "first_update": 2.0 * number,
        "executions": 1.0,
        "updates": 2.0,
        "samples": samples,
        "loss": loss,
        "learning_rate": rate,
        "loss_scale": math.nan,
        "skipped": 0.0,
        "memory": memory,
        **{name: float(place) for place, name in enumerate(PHASES)},
    }
    return [values[name] for name in COLUMNS]


def filled(count, most=8, **options):
    """A table after so many executions."""
    rows = ExecutionTable(most)
    for number in range(count):
        rows.add(row(number, **options))
    rows.close()
    return rows


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 15, 16, 17, 100, 1000])
def test_a_long_run_has_few_rows_and_the_same_sums(count):
    """Rows follow each other without a gap, whatever was joined."""
    rows = filled(count)
    columns = columns_of(rows.flat)
    assert len(rows) <= 8
    for name in SUMS:
        assert sum(columns[name]) == count * sum([row(0)[COLUMNS.index(name)]])
    starts, updates = columns["first_update"], columns["updates"]
    ends = [start + number for start, number in zip(starts, updates)]
    assert starts == ([0.0, *ends[:-1]] if count else [])
    assert columns["begin"] == [5 * start for start in starts]


def test_a_short_run_has_all_its_rows():
    """Nothing is joined that need not be."""
    rows = filled(7)
    assert (len(rows), rows.each, rows.halvings) == (7, 1, 0)
    assert list(rows.flat)[: len(COLUMNS)] == pytest.approx(row(0), nan_ok=True)


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-5, 5)), min_size=1, max_size=60))
def test_the_loss_of_joined_rows_is_the_mean_over_their_samples(executions):
    """Weighted by samples, so that the mean of all is the same however they were joined."""
    rows = ExecutionTable(4)
    for number, (samples, loss) in enumerate(executions):
        rows.add(row(number, samples=float(samples), loss=loss))
    rows.close()
    columns = columns_of(rows.flat)
    total = sum(loss * samples for loss, samples in zip(columns["loss"], columns["samples"]))
    expected = sum(loss * samples for samples, loss in executions)
    assert total == pytest.approx(expected, abs=1e-9)


def test_joined_rows_keep_the_largest_memory_and_the_last_rate():
    """Memory is not known for every row."""
    rows = ExecutionTable(2)
    for number, (memory, rate) in enumerate([(math.nan, 3.0), (7.0, 2.0), (5.0, 1.0)]):
        rows.add(row(number, memory=memory, rate=rate))
    rows.close()
    columns = columns_of(rows.flat)
    assert columns["memory"] == [7.0, 5.0]
    assert columns["learning_rate"] == [2.0, 1.0]
    assert all(map(math.isnan, columns["loss_scale"]))


def test_a_run_that_goes_on_keeps_the_rows_before_it():
    """What came after the checkpoint was not to be."""
    before = columns_of(filled(6).flat)
    rows = ExecutionTable(8)
    rows.take(before, before=6)
    assert columns_of(rows.flat)["first_update"] == [0.0, 2.0, 4.0]
    joined = columns_of(filled(100).flat)
    rows = ExecutionTable(8)
    rows.take(joined, before=1e9)
    assert columns_of(rows.flat)["updates"] == joined["updates"]
    assert rows.each == max(joined["executions"])


def test_a_row_that_is_being_written_is_left_out():
    """A reader may come in the middle."""
    flat = filled(3).flat
    assert columns_of(flat[:-1])["first_update"] == [0.0, 2.0]
