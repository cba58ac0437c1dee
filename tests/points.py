"""Which points of a test stand for the others, where they are known by name or values."""

import pytest


def only(chosen, points):
    """The points, of which all but those of these names are long.

    Args:
        chosen: their ids; or where they have none, the value of each, or a tuple of several.
        points: each a pytest.param, a tuple of values, or one value.
    """
    found, names = [], []
    for point in points:
        if not hasattr(point, "marks"):
            point = pytest.param(*(point if isinstance(point, tuple) else (point,)))
        values = point.values if len(point.values) > 1 else point.values[0]
        found.append(point)
        names.append(values if point.id is None else point.id)
    missing = set(chosen) - set(names)
    assert not missing, missing
    return [
        point
        if name in chosen
        else pytest.param(*point.values, id=point.id, marks=[*point.marks, pytest.mark.long])
        for name, point in zip(names, found)
    ]
