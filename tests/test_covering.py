"""Which points of a grid are run without --exhaustive."""

import itertools
import sys

import pytest

from tests.covering import LONGEST_SIDE, cover, sides

pytestmark = pytest.mark.both_engines


def grid(*sizes):
    sides = [range(size) for size in sizes]
    return [dict(zip("abcdef", values)) for values in itertools.product(*sides)]


def met(points, places, count):
    """Which values, or how many of them at once, are met in these points."""
    return {c for place in places for c in itertools.combinations(points[place].items(), count)}


@pytest.mark.parametrize("sizes", [(2, 3), (6, 6), (5, 4, 3), (2, 2, 2, 2), (3, 2, 1), (1,)])
def test_every_value_of_every_side_is_met(sizes):
    points = grid(*sizes)
    places = cover(points, pairs=False)
    assert met(points, places, 1) == met(points, range(len(points)), 1)
    assert len(places) == max(sizes)


@pytest.mark.parametrize(
    ("sizes", "most"), [((5, 4, 3), 22), ((2, 2, 2, 2), 6), ((4, 4, 4, 4), 32), ((3, 2, 2), 7)]
)
def test_where_three_sides_meet_so_do_every_two_values(sizes, most):
    points = grid(*sizes)
    places = cover(points)
    assert met(points, places, 2) == met(points, range(len(points)), 2)
    assert len(places) <= most


def test_points_that_a_grid_leaves_out_are_not_asked_for():
    points = [point for point in grid(3, 3, 3) if point["a"] != point["b"]]
    assert met(points, cover(points), 2) == met(points, range(len(points)), 2)


def test_of_two_sides_every_value_is_met_and_not_every_pair():
    assert len(cover(grid(5, 4))) == 5


def test_names_that_change_together_are_one_side():
    points = [{"a": a, "too": a, "b": b} for a, b in itertools.product(range(5), range(4))]
    assert len(cover(points)) == 5


def test_of_a_list_of_cases_the_ends_are_run():
    points = grid(LONGEST_SIDE + 1)
    assert cover(points) == [0, LONGEST_SIDE]
    # And as many more as the other sides need.
    assert len(cover(grid(40, 3))) == 3


def test_the_first_point_is_chosen_and_the_choice_is_always_the_same():
    points = grid(5, 4, 3)
    assert cover(points) == cover(points)
    assert cover(points)[0] == 0


def test_a_test_without_parameters_is_run():
    assert cover([{}]) == [0]


def test_a_value_is_one_object_whatever_it_equals():
    """Two dictionaries are two values, and a tensor is never compared."""
    first, second = {}, {}
    points = [{"way": way, "rate": rate} for way in (first, second) for rate in (0.5, 1)]
    assert sides(points) == [{"way": w, "rate": r} for w in (0, 1) for r in (0, 1)]


@pytest.mark.grid
@pytest.mark.parametrize("way", [{}, {"jit": "graph"}, {"run_eagerly": True}])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_pytest_runs_the_points_that_cover_chooses(size, way, request):
    """Two stacked sides were one of twelve values, whose ends alone were run."""
    test = request.node.originalname
    points = [item for item in request.session.items if item.originalname == test]
    # The oldest Python runs the first.
    chosen = 1 if sys.version_info < (3, 9) else 4
    # One alone where a point is asked for by its name.
    assert len(points) in ((12, 1) if request.config.getoption("--exhaustive") else (chosen, 1))


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("way", ["recorded", "eager", "late"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_of_sides_that_hardly_meet_every_value_is_run(kind, size, way, request):
    """As many points as the longest side has values."""
    test = request.node.originalname
    points = [item for item in request.session.items if item.originalname == test]
    chosen = 1 if sys.version_info < (3, 9) else 4
    assert len(points) in ((24, 1) if request.config.getoption("--exhaustive") else (chosen, 1))
