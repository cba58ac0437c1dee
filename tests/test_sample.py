"""Which points of a grid are run without --exhaustive."""

import itertools
import types

import pytest

from tests.conftest import LONGEST_SIDE, SAMPLE, _evenly, _with_all_values

pytestmark = pytest.mark.both_engines


class Point:
    """As much of a test's item as is looked at."""

    def __init__(self, **params):
        self.callspec = types.SimpleNamespace(params=params)


def grid(*sizes):
    sides = [[f"{side}: {value}" for value in range(size)] for side, size in enumerate(sizes)]
    names = [f"side{number}" for number in range(len(sizes))]
    return [Point(**dict(zip(names, values))) for values in itertools.product(*sides)]


@pytest.mark.parametrize("sizes", [(2, 3), (6, 6), (5, 4, 3), (2, 2, 2, 2), (6, 40), (1,)])
def test_no_value_of_a_side_is_missing(sizes):
    points = grid(*sizes)
    chosen = _with_all_values(points, _evenly(points, SAMPLE))
    assert {points[0], points[-1]} <= set(chosen)
    for number, size in enumerate(sizes):
        if size <= LONGEST_SIDE:
            values = {point.callspec.params[f"side{number}"] for point in chosen}
            assert len(values) == size


def test_of_a_list_of_cases_one_in_so_many_is_run_and_the_ends():
    points = grid(100)
    chosen = _with_all_values(points, _evenly(points, SAMPLE))
    assert [points.index(point) for point in chosen] == [*range(0, 100, SAMPLE), 99]


def test_a_test_without_parameters_is_run():
    point = object()
    assert set(_with_all_values([point], _evenly([point], SAMPLE))) == {point}
