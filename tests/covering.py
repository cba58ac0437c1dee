"""Which points of a grid stand for all of it: a covering array."""

import collections
import itertools

# A parameter of more values is no side of a grid, but a list of cases: its ends count.
LONGEST_SIDE = 6


def sides(points):
    """Number the values of each parameter, in the order in which they are met.

    pytest's own numbers are those of the points, another one in each.

    Args:
        points: the value of each parameter by its name, of each point of a test; what is one
            object in several points is one value.
    """
    numbers = collections.defaultdict(dict)
    return [
        {name: numbers[name].setdefault(id(value), len(numbers[name])) for name, value in p.items()}
        for p in points
    ]


def cover(points, pairs=True):
    """Choose points among which every value of every side is met, and every two of them.

    Greedy, and the same in every run: the next point is the one that meets most of what has not
    been met yet; of several, the first. Names that change together are one side.

    Args:
        points: the values of each point by the name of its side, in the order of the grid. A side
            of more than LONGEST_SIDE values is a list of cases, of which the first point's and the
            last point's count.
        pairs: where three or more sides meet, every value of a side also meets every value of each
            other one that it meets in the grid. Of two sides that would be every point.

    Returns:
        The places of the chosen points, in order.
    """
    columns = {tuple(point[name] for point in points): name for name in reversed(list(points[0]))}
    points = [{name: point[name] for name in columns.values()} for point in points]
    counts = collections.Counter(name for name, _ in set().union(*(p.items() for p in points)))
    ends = {*points[0].items(), *points[-1].items()}
    wide = pairs and len(counts) > 2
    wanted = []
    for point in points:
        values = [
            (name, value)
            for name, value in point.items()
            if counts[name] <= LONGEST_SIDE or (name, value) in ends
        ]
        wanted.append({frozenset((value,)) for value in values})
        if wide:
            wanted[-1].update(map(frozenset, itertools.combinations(values, 2)))
    left = set().union(*wanted)
    chosen = set()
    while left:
        place = max(range(len(points)), key=lambda place: len(wanted[place] & left))
        chosen.add(place)
        left -= wanted[place]
    return sorted(chosen) or [0]
