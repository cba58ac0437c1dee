"""Which points of a test stand for the others, where the kinds are known by name."""

import pytest


def only(chosen, points):
    """The points, of which all but those of these names are long.

    Args:
        chosen: their ids; or values, where the points are no pytest.param.
    """
    found = [point if hasattr(point, "marks") else pytest.param(point) for point in points]
    names = [point.values[0] if point.id is None else point.id for point in found]
    missing = set(chosen) - set(names)
    assert not missing, missing
    return [
        point
        if name in chosen
        else pytest.param(*point.values, id=point.id, marks=[*point.marks, pytest.mark.long])
        for name, point in zip(names, found)
    ]
