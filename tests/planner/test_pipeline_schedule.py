"""Timelines of a pipeline: closed forms, dependencies, and what is in flight."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit.planner.pipeline_schedule import SCHEDULES, in_flight, least_accumulation, simulate

pytestmark = pytest.mark.both_engines

TIMES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("ga", [1, 2, 5, 15, 64])
def test_equal_stages_are_busy_as_the_closed_forms_say(stages, ga):
    """A forward and a backward pass of the same time; S - 1 steps to fill and to empty."""
    ones = [1.0] * stages
    shares = {name: simulate(name, ones, ones, ga).utilisation for name in SCHEDULES}
    assert shares["interleaved"] == pytest.approx(ga / (ga + stages - 1), rel=1e-12)
    assert shares["sequential"] == pytest.approx(1 / stages, rel=1e-12)
    # Steps in which a stage has only one of the two passes take half the time.
    total = simulate("grouped", ones, ones, ga).total
    alone = sum(
        1
        for step in range(ga + 2 * (stages - 1))
        if not any(
            0 <= step - s < ga and 0 <= step - 2 * (stages - 1) + s < ga for s in range(stages)
        )
    )
    assert total == 2 * (ga + 2 * (stages - 1)) - alone


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(stages=st.integers(1, 12), ga=st.integers(1, 40), time=st.floats(1e-6, 1e6))
def test_an_update_of_equal_stages_takes_what_the_closed_form_says(schedule, stages, ga, time):
    """Whatever a pass takes: each micro-batch two passes, and S - 1 of them to fill and to empty.

    In a grouped schedule the last stage has both passes in each of ga steps; in the S - 1 steps
    before and in those after, no stage has more than one.
    """
    line = simulate(schedule, [time] * stages, [time] * stages, ga)
    passes = 2 * ga * stages if schedule == "sequential" else 2 * (ga + stages - 1)
    assert line.total == pytest.approx(passes * time, rel=1e-9)
    assert line.utilisation == pytest.approx(2 * ga / passes, rel=1e-9)
    busy = sum(task.end - task.begin for task in line.tasks)
    assert busy == pytest.approx(2 * ga * stages * time, rel=1e-9)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_without_a_backward_pass_the_bubble_is_that_of_filling(stages):
    """As in inference: (S - 1) / (ga + S - 1)."""
    found = simulate("grouped", [1.0] * stages, [0.0] * stages, 6).utilisation
    assert 1 - found == pytest.approx((stages - 1) / (6 + stages - 1), rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(times=TIMES, ga=st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_no_task_begins_before_what_it_needs(schedule, times, ga):
    """A forward pass needs that of the stage before, a backward pass that of the stage after."""
    forward, backward = (list(map(float, side)) for side in zip(*times))
    line = simulate(schedule, forward, backward, ga)
    done = {(t.stage, t.micro_batch, t.is_backward): t for t in line.tasks}
    assert len(done) == len(line.tasks) == 2 * ga * len(times)
    for (stage, micro_batch, is_backward), task in done.items():
        needs = []
        if is_backward:
            needs.append((stage, micro_batch, False))
            if stage + 1 < len(times):
                needs.append((stage + 1, micro_batch, True))
        elif stage:
            needs.append((stage - 1, micro_batch, False))
        assert all(done[need].end <= task.begin for need in needs)
    for stage in range(len(times)):
        own = [t for t in line.tasks if t.stage == stage]
        assert all(a.end <= b.begin for a, b in zip(own, own[1:]))
    assert line.total == max(t.end for t in line.tasks)
    assert 0 < line.utilisation <= 1 + 1e-12


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_what_is_in_flight_is_what_the_timeline_shows(schedule, stages):
    """Begun forward, and not through backward yet, at its most."""
    line = simulate(schedule, [1.0] * stages, [1.0] * stages, 4 * stages)
    for stage in range(stages):
        own = [t for t in line.tasks if t.stage == stage]
        moments = [t.begin for t in own]
        begun = {t.micro_batch: t.begin for t in own if not t.is_backward}
        ended = {t.micro_batch: t.end for t in own if t.is_backward}
        most = max(sum(begun[m] <= now < ended[m] for m in begun) for now in moments)
        assert in_flight(schedule, stage, stages) == most


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(times=TIMES, wish=st.floats(0.01, 1.0))
@settings(deadline=None, max_examples=60)
def test_the_least_accumulation_is_the_first_that_reaches_the_wish(schedule, times, wish):
    """Held against trying one after the other."""
    forward, backward = (list(map(float, side)) for side in zip(*times))
    least, limit = least_accumulation(schedule, forward, backward, wish)
    start = 1 if schedule == "sequential" else 2 * len(times) - 1
    if least is None:
        assert limit <= wish
        assert simulate(schedule, forward, backward, 300).utilisation < wish
    elif least < 300:
        shares = [
            simulate(schedule, forward, backward, ga).utilisation for ga in (least - 1, least)
        ]
        assert shares[1] >= wish * (1 - 1e-9)
        assert least == start or shares[0] < wish
