"""What a model may do in forward, and what is said where it may not."""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from ipufit import poptorch


class Does(nn.Module):
    """A module whose forward is a function of itself and its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("calls", torch.zeros(1))
        self.constant = torch.tensor([3.0, 4.0])

    def forward(self, *inputs):
        return self.function(self, *inputs)


def inferred(function, *inputs):
    """The results of an inference model."""
    return poptorch.inferenceModel(Does(function))(*inputs)


X = torch.tensor([1.0, -2.0])


def test_python_runs_once_and_its_numbers_are_constants():
    calls = []

    def forward(module, x):
        calls.append(poptorch.isRunningOnIpu())
        return x + len(calls)

    model = poptorch.inferenceModel(Does(forward))
    assert [model(X).tolist() for _ in range(3)] == [[2.0, -1.0]] * 3
    assert calls == [True]
    assert not poptorch.isRunningOnIpu()


def test_compiling_computes_no_value():
    """Buffers, inputs and random numbers are as before, and no index is looked up."""

    def forward(module, x, index):
        module.calls += 1
        x += torch.rand(2)
        return x[index]

    net, x = Does(forward), X.clone()
    state = torch.get_rng_state()
    model = poptorch.inferenceModel(net)
    model.compile(x, torch.tensor([7]))
    assert net.calls.item() == 0
    assert torch.equal(x, X)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.ones(2, device="ipu"),
        lambda x: torch.ones(2, device="ipu:0"),
        lambda x: torch.ones(2, device=torch.device("ipu")),
        lambda x: torch.ones(2, device=x.device),
        lambda x: torch.ones(2).to("ipu"),
        lambda x: torch.ones(2),
        lambda x: torch.tensor([1.0, 1.0]),
        lambda x: torch.LongTensor([1, 1]).to(x.device),
    ],
)
def test_tensors_are_made_on_the_device(make):
    assert inferred(lambda module, x: x + make(x), X).tolist() == [2.0, -1.0]


def test_plain_attributes_are_constants():
    assert inferred(lambda module, x: x + module.constant, X).tolist() == [4.0, 2.0]


def test_a_tensor_of_the_host_does_not_meet_one_of_the_device():
    outside = torch.tensor([1, 0])
    text = (
        "'poptorch_py_error': Expected an IPU tensor but got tensor(device=cpu, shape=[2], "
        'dtype=Long). Move a constant explicitly, with tensor.to("ipu"), make it a buffer of the '
        "module, or pass it as an input; reach a parameter through the module."
    )
    for function in (
        lambda module, x: x.index_select(0, outside),
        lambda module, x: x.index_select(0, torch.LongTensor([1, 0])),
    ):
        with pytest.raises(poptorch.Error) as caught:
            inferred(function, X)
        assert str(caught.value) == text
    moved = inferred(lambda module, x: x.index_select(0, outside.to("ipu")), X)
    assert moved.tolist() == [-2.0, 1.0]


@pytest.mark.parametrize(
    "forward",
    [
        lambda module, x: x * x.sum().item(),
        lambda module, x: x if x.sum() > 0 else -x,
        lambda module, x: x[: int(x[0])],
    ],
)
def test_values_that_python_needs_are_refused(forward):
    with pytest.raises(poptorch.Error, match="aten::item is only supported in eager mode") as got:
        inferred(forward, X)
    assert __file__ in str(got.value)
    assert "run_eagerly" not in str(got.value)


def test_shapes_that_depend_on_values_are_refused():
    with pytest.raises(
        DynamicOutputShapeException, match=r"Keep the full shape: write torch\.where"
    ):
        inferred(lambda module, x: x[x > 0], X)


def rebind(module, x):
    module.calls = module.calls + 1
    return x


def remove(module, x):
    del module.calls
    return x


@pytest.mark.parametrize(
    ("forward", "text"),
    [(rebind, "Buffer calls is reassigned within the model"), (remove, "Buffer calls is removed")],
)
def test_buffers_change_in_place_only_and_are_there_afterwards(forward, text):
    net = Does(forward)
    with pytest.raises(poptorch.Error, match=text):
        poptorch.inferenceModel(net)(X)
    assert type(net.calls) is torch.Tensor
    assert net.calls.item() == 0


def test_a_buffer_keeps_what_it_is_given_from_call_to_call():
    def count(module, x):
        module.calls += x.sum()
        return module.calls * 1

    net = Does(count)
    model = poptorch.inferenceModel(net)
    assert [model(X).item() for _ in range(3)] == [-1.0, -2.0, -3.0]
    assert net.calls.item() == 0
    model.copyWeightsToHost()
    assert net.calls.item() == -3


@pytest.mark.parametrize("kind", [dict, list, set])
def test_what_a_recording_puts_into_a_container_goes_with_it(kind):
    """It has no values, and the module goes on in plain torch; other things stay there."""

    def fill(module, x):
        y = x * 2
        if kind is dict:
            module._memo["y"], module.names["first"] = y, 1
        else:
            getattr(module._memo, "add" if kind is set else "append")(y)
        return y

    net = Does(fill)
    net._memo, net.names = kind(), {}
    poptorch.inferenceModel(net)(X)
    assert net._memo == kind()
    assert net.names == ({"first": 1} if kind is dict else {})


def test_an_input_that_is_changed_is_changed_for_the_caller():
    def double(module, x):
        x *= 2
        return x + 1

    x = torch.tensor([1, 2])
    assert inferred(double, x).tolist() == [3, 5]
    assert x.tolist() == [2, 4]
    assert x.dtype == torch.int64


def test_types_are_those_of_a_device():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    out = inferred(lambda module, x, i: (x, x.double(), i, i.sum(), x.bfloat16()), x, x.long())
    assert [t.dtype for t in out] == [
        torch.float32,
        torch.float32,
        torch.int32,
        torch.int32,
        torch.float16,
    ]


def trained(forward):
    """A training model and its first result."""
    model = poptorch.trainingModel(Does(forward))
    return model, model(X)


MSE = nn.functional.mse_loss


@pytest.mark.few
@pytest.mark.parametrize(
    "forward",
    [
        lambda module, x: MSE(module.weight * x, x),
        lambda module, x: (module.weight, MSE(module.weight * x, x) + 1),
        lambda module, x: poptorch.identity_loss((module.weight * x - x) ** 2, "mean"),
        lambda module, x: poptorch.identity_loss(MSE(module.weight * x, x) * 1, "none"),
        lambda module, x: (MSE(module.weight * x, x), MSE(x, x * 2))[0],
    ],
)
def test_the_loss_is_found_wherever_it_is(forward):
    """A loss of torch, or a marked one; arithmetic on it makes no other, unused ones are none."""
    model, _ = trained(forward)
    gradient = torch.tensor([0.0, (2 * -2 + 2) * -2.0])
    assert torch.allclose(model.model.weight, torch.tensor([1.0, 2.0]) - 0.01 * gradient)


@pytest.mark.few
@pytest.mark.parametrize(
    ("reduction", "factor"), [("sum", 1), ("mean", 1 / 6), ("batchmean", 1), ("none", 1)]
)
@pytest.mark.parametrize("is_marked", [False, True])
def test_a_divergence_over_the_batch_is_a_loss_before_it_is_divided(reduction, factor, is_marked):
    """As in PopTorch, whose loss is the operator that sums; identity_loss makes it what it says."""
    x = torch.linspace(-1, 1, 6).reshape(2, 3)

    def divergence(module, x, kind):
        shares = (module.weight[1] * x).log_softmax(1)
        return nn.functional.kl_div(shares, x.softmax(1), reduction=kind)

    def forward(module, x):
        loss = divergence(module, x, reduction)
        return poptorch.identity_loss(loss, "none") if is_marked else loss

    net = Does(forward)
    expected = divergence(net, x, "sum")
    (gradient,) = torch.autograd.grad(expected, net.weight)
    model = poptorch.trainingModel(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says what "mean" is
        value = model(x)
    if reduction == "batchmean":
        torch.testing.assert_close(value.squeeze(), expected.detach() / 2)
        factor = 1 / 2 if is_marked else 1
    torch.testing.assert_close(net.weight.detach(), Does(forward).weight - 0.01 * factor * gradient)


def test_there_must_be_a_loss_and_only_one():
    with pytest.raises(poptorch.Error) as caught:
        trained(lambda module, x: module.weight * x)
    assert str(caught.value) == (
        "'poptorch_py_error': Couldn't find a loss in graph! Training needs a loss that is "
        "returned, or that what is returned is computed from: use a loss of torch.nn, or mark "
        "your own with poptorch.identity_loss(value, reduction)."
    )
    with pytest.raises(poptorch.Error) as caught:
        trained(lambda module, x: MSE(module.weight, x) + MSE(module.weight * x, x))
    assert str(caught.value) == (
        "'poptorch_py_error': Multiple independent losses found in graph. Graph must have one "
        "final loss. Wrap final graph loss in poptorch.identity_loss. Of the 2 found, add up what "
        'is to be trained on: poptorch.identity_loss(loss1 + loss2, reduction="none").'
    )


L1 = nn.functional.l1_loss


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        # What goes into no other loss is a number, as is all that is made of it.
        (lambda a, b, x: (a, a * 2), [(), ()]),
        # A reduction inside another loss has one element, as has all that is made of it.
        (lambda a, b, x: (poptorch.identity_loss(a + b, "none"), b), [(1,), ()]),
        (lambda a, b, x: (poptorch.identity_loss(a, "sum"), (a / 2).half().detach()), [(), (1,)]),
        (lambda a, b, x: (poptorch.identity_loss(a + b, "mean"), a > b, a + x), [(), (1,), (2,)]),
        (lambda a, b, x: (MSE(poptorch.identity_loss(a + x, "sum"), b), a + b), [(), (1,)]),
        # The L1 loss reduces by itself.
        (lambda a, b, x: (poptorch.identity_loss(b, "none"), b), [(), ()]),
    ],
)
def test_reductions_within_a_loss_have_one_element(function, shapes):
    """As on an IPU, where the reduction of a flattened loss leaves a dimension."""

    def forward(module, x):
        return function(MSE(module.weight * x, x), L1(module.weight * x, x), x)

    _, results = trained(forward)
    assert [tuple(result.shape) for result in results] == shapes
    # In a model for inference no loss is taken away.
    shapes = [tuple(s for s in shape if s != 1) for shape in shapes]
    assert [tuple(result.shape) for result in inferred(forward, X)] == shapes


def test_backward_is_the_models_own():
    _, loss = trained(lambda module, x: MSE(module.weight * x, x))
    with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
        loss.backward()


@pytest.mark.long
def test_one_seed_gives_the_same_random_numbers_and_another_others():
    def forward(module, x):
        return torch.rand(4), nn.functional.dropout(torch.ones(4), training=True)

    def drawn(seed):
        opts = poptorch.Options().deviceIterations(2)
        opts.randomSeed(seed)
        model = poptorch.inferenceModel(Does(forward), opts)
        return [model(X) for _ in range(2)]

    first, again, other = drawn(3), drawn(3), drawn(4)
    assert torch.equal(first[0][0], again[0][0])
    assert torch.equal(first[1][1], again[1][1])
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0][:4], first[0][0][4:])
    assert not torch.equal(first[0][0], other[0][0])
