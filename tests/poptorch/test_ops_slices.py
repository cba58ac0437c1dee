"""poptorch.dynamic_slice, dynamic_update, and x[a:b] with tensors for a and b."""

import itertools

import pytest
import torch

from ipufit import poptorch
from tests.poptorch.recording import record

X = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)


def at(*values):
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("dim", "size", "step"),
    [(0, 1, 1), (0, 2, 1), (1, 3, 2), (2, 4, 3), (-1, 2, 1), (2, 1, 5), (-3, 2, 2)],
)
def test_a_slice_starts_where_the_tensor_says(dim, size, step):
    def model(x, start):
        return poptorch.dynamic_slice(x, dim, start, size, step)

    # Compiled with another start, one that is out of range: no value may be looked at.
    recorded = record(model, torch.zeros_like(X), at(50))
    length = X.shape[dim]
    for start in range(length):
        wanted = [(start + i) % length for i in range(0, size, step)]
        expected = X.index_select(dim, torch.tensor(wanted))
        assert torch.equal(recorded(X, at(start))[0], expected)
        if start + size <= length:
            assert torch.equal(model(X, at(start)), expected)


def test_the_start_of_a_slice_wraps_around_the_dimension():
    x = torch.arange(6.0)
    recorded = record(lambda x, s: poptorch.dynamic_slice(x, 0, s, 3, 1), x, at(0))
    for start in (-8, -1, 5, 6, 100):
        expected = [float((start + i) % 6) for i in range(3)]
        assert recorded(x, at(start))[0].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_start_is_one_whole_number_of_any_shape(dtype, shape):
    start = torch.full(shape, 1, dtype=dtype)
    recorded = record(lambda x, s: poptorch.dynamic_slice(x, 2, s, 2, 1), X, start)
    assert torch.equal(recorded(X, start)[0], X[:, :, 1:3])
    assert torch.equal(poptorch.dynamic_slice(X, 2, start, 2, 1), X[:, :, 1:3])


@pytest.mark.few
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_an_update_writes_into_a_copy(dim):
    for size in range(1, X.shape[dim] + 1):
        shape = list(X.shape)
        shape[dim] = size
        src = -1 - torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)

        def model(x, src, start, size=size):
            return poptorch.dynamic_update(x, src, dim, start, size)

        recorded = record(model, torch.zeros_like(X), torch.zeros_like(src), at(77))
        for start in range(X.shape[dim]):
            places = torch.tensor([(start + i) % X.shape[dim] for i in range(size)])
            expected = X.clone().index_copy_(dim, places, src)
            assert torch.equal(recorded(X, src, at(start))[0], expected)
            if start + size <= X.shape[dim]:
                before = X.clone()
                assert torch.equal(model(X, src, at(start)), expected)
                assert torch.equal(X, before)


def test_slices_and_updates_have_gradients():
    def step(x, src, start):
        x, src = x.detach().requires_grad_(), src.detach().requires_grad_()
        taken = poptorch.dynamic_slice(x, 0, start, 2, 1)
        written = poptorch.dynamic_update(x, src, 0, start, 2)
        loss = (taken**3).sum() + (written**2).sum()
        return torch.autograd.grad(loss, [x, src])

    x, src = torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.tensor([5.0, 6.0]).double()
    got = record(step, x, src, at(0), training=True)(x, src, at(1))
    expected = [torch.tensor([2.0, 12.0, 27.0, 8.0]).double(), torch.tensor([10.0, 12.0]).double()]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


BOUNDS = [
    (lambda s: (s, s + 4), 4),
    (lambda s: (s - 4, s), 4),
    (lambda s: (s + 3 - 10 + 3, s - 6 + 4), 2),
    (lambda s: (s.to(torch.int32), s.to(torch.int32) + 1), 1),
    (lambda s: (s, 2 + s), 2),
    (lambda s: (s, torch.add(s, 2, alpha=2)), 4),
    (lambda s: (s, s + torch.tensor(2)), 2),
    (lambda s: (s.reshape(()), s.clone() + 2), 2),
    (lambda s: (s[0], s[0]), None),
]


@pytest.mark.parametrize(("bounds", "size"), BOUNDS[:-1])
@pytest.mark.parametrize("step", [1, 2, None])
def test_bounds_may_be_tensors_whose_difference_is_known(bounds, size, step):
    def model(x, s):
        start, stop = bounds(s)
        return x[start:stop:step]

    x = torch.arange(8.0)
    recorded = record(model, x, at(0))
    for s in range(8):
        start, stop = (int(bound) for bound in bounds(at(s)))
        assert stop - start == size
        expected = [float(i % 8) for i in range(start, stop, step or 1)]
        assert recorded(x, at(s))[0].tolist() == expected


@pytest.mark.long
def test_slices_with_tensor_bounds_mix_with_other_indices():
    cases = [
        lambda x, s: x[:, s : s + 1],
        lambda x, s: x[..., s : s + 2],
        lambda x, s: x[1, ..., s : s + 2],
        lambda x, s: x[s : s + 1, None, :, s : s + 2],
        lambda x, s: x[:1, s : s + 3, 2],
        lambda x, s: x[torch.tensor([0, 1]), s : s + 1],
        lambda x, s: x[s : s + 1][0, s : s + 1],
    ]
    for position, case in enumerate(cases):
        recorded = record(case, torch.zeros_like(X), at(9))
        for s in (0, 1):
            if position == 4 and s:
                continue
            torch.testing.assert_close(
                recorded(X, at(s))[0], case(X, s), rtol=0, atol=0, msg=f"case {position}"
            )


def test_bounds_of_the_host_make_an_ordinary_slice():
    """Their sizes need not divide the dimension, and nothing wraps."""
    start, one = torch.tensor([1]), torch.tensor(1)
    cases = [
        lambda x: x[:, start : start + 7 : 2],
        lambda x: x[start - 1 :, one : one + 1],
        lambda x: x[:start, ..., one + 1 :],
    ]
    for position, case in enumerate(cases):
        (got,) = record(case, torch.zeros_like(X))(X)
        assert torch.equal(got, case(X)), position


NOT_CONSTANT = (
    "The size of the sliced tensor must be a constant for each execution of the model when "
    "running on the IPU. {} Compute the end from the start by adding a Python number, or use "
    "poptorch.dynamic_slice."
)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (
            lambda s: slice(s, 3),
            NOT_CONSTANT.format("Only one of start and end changes from run to run."),
        ),
        (
            lambda s: slice(None, s),
            NOT_CONSTANT.format("Only one of start and end changes from run to run."),
        ),
        (
            lambda s: slice(s, s * 2),
            NOT_CONSTANT.format("Start and end are not computed from the same tensor by sums."),
        ),
        (
            lambda s: slice(s, (s + 1.0).int()),
            NOT_CONSTANT.format(
                "In this case, there is a float added to the slice indices meaning it may change "
                "between runs."
            ),
        ),
        (
            lambda s: slice(s, s),
            "The start and end of a slice must be different. Got a slice of size 0; make it at "
            "least 1.",
        ),
        (
            lambda s: slice(s, s - 2),
            "Taking a slice of a tensor with the end less than the start is not supported. Got a "
            "slice of size -2; make it at least 1.",
        ),
        (
            lambda s: slice(s, s + 3),
            "The size of the slice (3) must be a factor of the slicing dimension (8). Choose "
            "another size, or pad the tensor.",
        ),
        (
            lambda s: slice(s, s + 2, -1),
            "Slicing step must be at least 1, got -1. Reverse a slice with torch.flip.",
        ),
        (
            lambda s: slice(s, s + 2, s),
            "Slicing step must be a constant, got a tensor. Give a Python int of at least 1.",
        ),
    ],
)
def test_bounds_that_do_not_give_a_size_are_refused(index, text):
    with pytest.raises(poptorch.Error) as failure:
        record(lambda x, s: x[index(s)], torch.arange(8.0), at(1))
    assert failure.value.message == text


@pytest.mark.parametrize(
    ("size", "step", "text"),
    [
        (
            0,
            1,
            "The start and end of a slice must be different. Got a slice of size 0; make it at "
            "least 1.",
        ),
        (
            -2,
            1,
            "Taking a slice of a tensor with the end less than the start is not supported. Got a "
            "slice of size -2; make it at least 1.",
        ),
        (2, 0, "Slicing step must be at least 1, got 0. Reverse a slice with torch.flip."),
        (
            7,
            1,
            "The size of the slice (7) must be a factor of the slicing dimension (8). Choose "
            "another size, or pad the tensor.",
        ),
    ],
)
def test_sizes_that_a_device_can_not_slice_are_refused_when_compiling(size, step, text):
    x = torch.arange(8.0)
    with pytest.raises(poptorch.Error) as failure:
        record(lambda x, s: poptorch.dynamic_slice(x, 0, s, size, step), x, at(1))
    assert failure.value.message == text
    if step:
        # Outside of a model it slices as torch does.
        expected = x[1 : 1 + size : step] if size > -2 else x[1:-1]
        assert torch.equal(poptorch.dynamic_slice(x, 0, at(1), size, step), expected)


def test_the_size_of_an_update_need_not_divide_the_dimension():
    x = torch.zeros(3)
    recorded = record(
        lambda x, v, s: poptorch.dynamic_update(x, v, 0, s, 2), x, torch.ones(2), at(0)
    )
    assert recorded(x, torch.ones(2), at(1))[0].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            (torch.zeros(2, 2), torch.zeros(2), 0, at(0), 1),
            "input and src tensors must have same dimensionality. (2) vs (1) Reshape src.",
        ),
        (
            (torch.zeros(2), at(1), 0, at(0), 1),
            "input and src tensor must have same dtype. (torch.float32 vs torch.int32) Convert "
            "src with src.to(input.dtype).",
        ),
        (
            (torch.zeros(4), torch.zeros(2), 0, at(0), 3),
            "dynamic_update: a slice of size 3 on dimension 0 of (4,) has shape (3,), got src of "
            "shape (2,). Give size as long as src is, and at most as long as the input is there.",
        ),
        (
            (torch.zeros(2), torch.zeros(3), 0, at(0), 3),
            "dynamic_update: a slice of size 3 on dimension 0 of (2,) has shape (3,), got src of "
            "shape (3,). Give size as long as src is, and at most as long as the input is there.",
        ),
        (
            (torch.zeros(2), torch.zeros(1), 0, at(0), 0),
            "The start and end of a slice must be different. Got a slice of size 0; make it at "
            "least 1.",
        ),
        (
            (torch.zeros(2), torch.zeros(1), 1, at(0), 1),
            "dynamic_update: the tensor has 1 dimensions, got dim 1. Give one from -1 to 0.",
        ),
    ],
)
def test_an_update_that_does_not_fit_is_refused(given, text):
    x, src, dim, start, size = given
    with pytest.raises(poptorch.Error) as failure:
        record(lambda x, v, s: poptorch.dynamic_update(x, v, dim, s, size), x, src, start)
    assert failure.value.message == text


def test_types_that_are_the_same_on_the_device_fit():
    x, src = torch.zeros(2, dtype=torch.float32), torch.ones(1, dtype=torch.float64)
    recorded = record(lambda x, v, s: poptorch.dynamic_update(x, v, 0, s, 1), x, src, at(0))
    (out,) = recorded(x, src, at(1))
    assert (out.dtype, out.tolist()) == (torch.float32, [0.0, 1.0])
    with pytest.raises(poptorch.Error, match=r"\(torch.float32 vs torch.float64\)"):
        poptorch.dynamic_update(x, src, 0, at(0), 1)


SLICE = {"tensor": X, "dim": 0, "start": at(0), "size": 1, "step": 1}
UPDATE = {"input": X, "src": X[:1], "dim": 0, "start": at(0), "size": 1}


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize(
    ("function", "given", "text"),
    [
        (
            "slice",
            {"tensor": 1},
            "dynamic_slice must take a torch.tensor input. {} is not supported.",
        ),
        ("slice", {"dim": 1.0}, "Dimension must be an integer. Got {}."),
        (
            "slice",
            {"start": 1},
            "Slice start argument to dynamic_slice must be a torch.tensor. {} is not supported. "
            "For a fixed start write x[start:start + size].",
        ),
        (
            "slice",
            {"size": 2.0},
            "Size must be an integer. Got {}: it may not change between runs.",
        ),
        (
            "slice",
            {"step": "1"},
            "Step must be an integer. Got {}: it may not change between runs.",
        ),
        (
            "slice",
            {"start": torch.ones(2)},
            "dynamic_slice: Expected integer typed start tensor of one element, got shape (2,) "
            "and torch.float32. Convert it with start.to(torch.int32).",
        ),
        (
            "slice",
            {"dim": -4},
            "dynamic_slice: the tensor has 3 dimensions, got dim -4. Give one from -3 to 2.",
        ),
        (
            "update",
            {"input": 1},
            "dynamic_update must take a torch.tensor input. {} is not supported.",
        ),
        ("update", {"dim": None}, "Dimension must be an integer. Got {}."),
        (
            "update",
            {"start": 1},
            "Slice start argument to dynamic_update must be a torch.tensor. {} is not supported. "
            "For a fixed start write into a copy of the input.",
        ),
        (
            "update",
            {"src": 1},
            "Src argument to dynamic_update must be a torch.tensor. {} is not supported.",
        ),
        (
            "update",
            {"size": None},
            "Size must be an integer. Got {}: it may not change between runs.",
        ),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(function, given, text, recording):
    defaults = SLICE if function == "slice" else UPDATE
    called = getattr(poptorch, f"dynamic_{function}")
    (wrong,) = given.values()

    def call(_):
        return called(**{**defaults, **given})

    with pytest.raises(poptorch.Error) as failure:
        record(call, torch.ones(1)) if recording else call(None)
    assert failure.value.message == text.format(type(wrong))


def test_a_slice_in_a_loop_moves_on():
    def model(x, start):
        def body(total, i):
            part = poptorch.dynamic_slice(x, 0, i, 2, 1)
            return total + part.sum() * x[i : i + 1].sum(), i + 1

        return poptorch.for_loop(4, body, [torch.zeros(1), start])

    x = torch.tensor([1.0, 2.0, 4.0, 8.0])
    out, last = record(model, x, at(0))(x, at(1))
    pairs = itertools.islice(itertools.cycle([3.0, 6.0, 12.0, 9.0]), 1, 5)
    firsts = itertools.islice(itertools.cycle([1.0, 2.0, 4.0, 8.0]), 1, 5)
    assert out.item() == sum(a * b for a, b in zip(pairs, firsts))
    assert last.item() == 5
