"""poptorch.fps and poptorch.nearest."""

import pytest
import torch

from ipufit import poptorch
from tests.poptorch.recording import record


def farthest(points, count, start):
    """Written down from the definition."""
    chosen = [start]
    while len(chosen) < count:
        best, place = -1.0, -1
        for i in range(len(points)):
            if i in chosen:
                continue
            near = min(float((points[i] - points[j]).square().sum()) for j in chosen)
            if near > best:
                best, place = near, i
        chosen.append(place)
    return chosen


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("ptr", [[0, 12], [0, 5, 12], [0, 5, 6, 12]])
def test_each_next_point_is_the_farthest(ptr, ratio):
    points = torch.randn(12, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    recorded = record(lambda p: poptorch.fps(p, ptr, ratio), torch.zeros_like(points))
    (got,) = recorded(points)
    expected = []
    for first, end in zip(ptr, ptr[1:]):
        count = -int(-(end - first) * ratio // 1)
        expected += [first + i for i in farthest(points[first:end], count, 0)]
    assert got.tolist() == expected
    assert poptorch.fps(points, ptr, ratio).tolist() == expected


def test_points_in_one_place_are_chosen_once_each():
    assert poptorch.fps(torch.zeros(4, 2), [0, 4], 1.0).tolist() == [0, 1, 2, 3]


def test_the_number_of_points_is_rounded_in_single_precision():
    """30 points at 0.1 are 3 in single precision, which is the device's, and 4 in double."""
    assert len(poptorch.fps(torch.randn(30, 1), [0, 30], 0.1)) == 3


def test_a_random_start_is_drawn_at_every_run_and_within_each_range():
    points = torch.arange(20.0)[:, None]
    recorded = record(lambda p: poptorch.fps(p, [0, 4, 20], 0.05, True), points)
    torch.manual_seed(1)
    starts = [recorded(points)[0].tolist() for _ in range(60)]
    assert {first for first, _ in starts} == {0, 1, 2, 3}
    assert {second for _, second in starts} <= set(range(4, 20))
    assert len({second for _, second in starts}) > 8
    torch.manual_seed(1)
    assert recorded(points)[0].tolist() == starts[0]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((1, [0, 2]), "`fps` must take a torch.tensor input. <class 'int'> is not supported."),
        (
            (torch.zeros(2, 1), (0, 2)),
            "`ptr` must be a list of integers. Got <class 'tuple'>: the number of points chosen "
            "is fixed when the model is compiled.",
        ),
        (
            (torch.zeros(2, 1), [0]),
            "`ptr` must contain at least 2 elements. Got [0]; for one range write [0, len(src)].",
        ),
        (
            (torch.zeros(2, 1), [0, 2], 1),
            "`ratio` must be of float type. <class 'int'> is not supported.",
        ),
        (
            (torch.zeros(2, 1), [0, 2], 0.5, 1),
            "`random_start` must be of bool type. <class 'int'> is not supported.",
        ),
        (
            (torch.zeros(2, 1), [0, 3]),
            "`ptr` must rise from at least 0 to at most the number of points, 2, got [0, 3].",
        ),
        ((torch.zeros(2, 1), [0, 2], 1.5), "`ratio` must be more than 0 and at most 1, got 1.5."),
    ],
)
def test_wrong_arguments_of_fps_are_refused(args, text):
    with pytest.raises(poptorch.Error) as failure:
        poptorch.fps(*args)
    assert failure.value.message == text


def closest(x, y, batch_x, batch_y):
    rows = []
    for i, point in enumerate(x):
        found = [
            (float((point - other).square().sum()), j)
            for j, other in enumerate(y)
            if batch_x[i] == batch_y[j]
        ]
        rows.append(min(found)[1])
    return rows


@pytest.mark.parametrize("features", [None, 1, 4])
@pytest.mark.parametrize("batches", ["none", "lists", "tensors", "mixed", "only y"])
def test_each_row_finds_the_nearest_of_its_batch(features, batches):
    generator = torch.Generator().manual_seed(5)
    shape = [] if features is None else [features]
    x = torch.randn(7, *shape, generator=generator, dtype=torch.float64)
    y = torch.randn(6, *shape, generator=generator, dtype=torch.float64)
    batch_x, batch_y = [0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2]
    given = {
        "none": (None, None),
        "lists": (batch_x, batch_y),
        "tensors": (torch.tensor(batch_x), torch.tensor(batch_y)),
        "mixed": (batch_x, torch.tensor(batch_y)),
        "only y": (None, [0, 0, 0, 0, 1, 1]),
    }[batches]
    recorded = record(
        lambda x, y: poptorch.nearest(x, y, *given), torch.zeros_like(x), torch.zeros_like(y)
    )
    if batches == "none":
        batch_x, batch_y = [0] * 7, [0] * 6
    elif batches == "only y":
        batch_x, batch_y = [0] * 7, given[1]
    expected = closest(x, y, batch_x, batch_y)
    assert recorded(x, y)[0].tolist() == expected
    assert poptorch.nearest(x, y, *given).tolist() == expected


def test_batches_may_be_inputs_of_the_model():
    x, y = torch.tensor([0.0, 9.0]), torch.tensor([8.0, 1.0])
    one, other = torch.tensor([0, 1]), torch.tensor([0, 0])
    recorded = record(poptorch.nearest, x, y, other, other)
    assert recorded(x, y, other, other)[0].tolist() == [1, 0]
    assert recorded(x, y, one, one)[0].tolist() == [0, 1]


def test_near_neighbours_far_from_the_origin_are_told_apart():
    """By a matrix product all of these distances would be lost to rounding."""
    y = torch.tensor([[4096.0], [4096.5], [4097.0]])
    assert poptorch.nearest(y + 0.125, y).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            (1, torch.zeros(2)),
            "`nearest` must take a torch.tensor `x` input. <class 'int'> is not supported.",
        ),
        (
            (torch.zeros(2), None),
            "`nearest` must take a torch.tensor `y` input. <class 'NoneType'> is not supported.",
        ),
        (
            (torch.zeros(2), torch.zeros(2, 1, 1)),
            "Inputs `x` and `y` should be max 2D tensors, while `x` has 1 dims and `y` has 3 "
            "dims. Flatten the features.",
        ),
        (
            (torch.zeros(2, 2), torch.zeros(2, 3)),
            "Inputs shapes inconsistent x.shape[1]=2 vs. y.shape[1]=3. Give points of the same "
            "number of features.",
        ),
        (
            (torch.zeros(2), torch.zeros(2), (0, 0)),
            "`batch_x` and `batch_y` must be torch.Tensors or lists while `batch_x` is of type "
            "<class 'tuple'> and `batch_y` is of type <class 'NoneType'>.",
        ),
        (
            (torch.zeros(2), torch.zeros(2), [0, 0, 0], [0, 0]),
            "`batch_x` must have one number for each row of `x`: expected 2, got 3.",
        ),
        (
            (torch.zeros(2), torch.zeros(2), [0, 0], [1, 0]),
            "'batch_y' is not sorted. Sort the rows of `y` by batch.",
        ),
        (
            (torch.zeros(2), torch.zeros(2), [0, 3], [0, 0]),
            "Some batch indices occur in 'batch_x' that do not occur in 'batch_y': [3]. Give each "
            "sample at least one row of `y`.",
        ),
    ],
)
def test_wrong_arguments_of_nearest_are_refused(args, text):
    with pytest.raises(poptorch.Error) as failure:
        poptorch.nearest(*args)
    assert failure.value.message == text
