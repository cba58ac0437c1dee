"""What forward sees of the device while it is recorded."""

import pytest
import torch
from torch import nn

from ipufit import poptorch


def run(function, *tensors):
    """Through an inference model."""

    class Model(nn.Module):
        def forward(self, *given):
            return function(*given)

    return poptorch.inferenceModel(Model())(*tensors)


def test_an_input_reads_as_on_the_device_and_a_tensor_from_outside_does_not():
    seen = []
    outside = torch.ones(2)

    def forward(x):
        seen.extend([x.device, (x + 1).device, torch.zeros(2).device, outside.device])
        return x * 1

    run(forward, torch.ones(2))
    ipu = torch.device("ipu", 0)
    assert seen == [ipu, ipu, ipu, torch.device("cpu")]
    assert torch.ones(2).device == torch.device("cpu")


def test_a_tensor_from_outside_can_be_moved_to_where_an_input_is():
    outside = torch.tensor([1.0, 2.0])

    def forward(x):
        moved = outside.to(x.device)
        return x + moved, moved.device == x.device

    result, moved = run(forward, torch.tensor([10.0, 20.0]))
    assert result.tolist() == [11.0, 22.0]
    assert moved


@pytest.mark.parametrize(
    "move",
    [
        lambda outside, x: outside.to(x),
        lambda outside, x: outside.to(tensor=x),
        lambda outside, x: outside.type_as(x),
        lambda outside, x: outside.to("ipu", torch.float32),
    ],
)
def test_a_tensor_from_outside_can_be_made_like_an_input(move):
    outside = torch.tensor([1, 2])
    assert run(lambda x: x + move(outside, x), torch.tensor([0.5, 0.5])).tolist() == [1.5, 2.5]


def test_a_tensor_from_outside_that_was_not_moved_is_refused():
    outside = torch.ones(2)
    with pytest.raises(poptorch.Error) as failure:
        run(lambda x: x + outside.to(torch.float32), torch.ones(2))
    assert failure.value.message == (
        "Expected an IPU tensor but got tensor(device=cpu, shape=[2], dtype=Float). Move a "
        'constant explicitly, with tensor.to("ipu"), make it a buffer of the module, or pass it '
        "as an input; reach a parameter through the module."
    )


def test_what_was_moved_can_be_changed_and_begins_anew_at_every_call():
    outside = torch.zeros(2)

    def forward(x):
        moved = outside.to("ipu")
        moved += x
        return moved

    class Model(nn.Module):
        def forward(self, x):
            return forward(x)

    model = poptorch.inferenceModel(Model())
    assert model(torch.ones(2)).tolist() == [1.0, 1.0]
    assert model(torch.ones(2)).tolist() == [1.0, 1.0]
    assert outside.tolist() == [0.0, 0.0]


def test_creation_takes_the_device_of_an_input():
    made = run(lambda x: x + torch.arange(3, device=x.device), torch.ones(3))
    assert made.tolist() == [1.0, 2.0, 3.0]


def test_a_parameter_is_one_while_forward_is_recorded():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([2.0]))
            self.register_buffer("b", torch.tensor([5.0]))

        def forward(self, x):
            kinds.append((isinstance(self.w, nn.Parameter), isinstance(self.b, nn.Parameter)))
            return x * self.get_parameter("w") + self.get_buffer("b")

    kinds = []
    assert poptorch.inferenceModel(Model())(torch.tensor([3.0])).tolist() == [11.0]
    assert kinds == [(True, False)]


def test_numbers_between_two_bounds_are_drawn_as_torch_draws_them():
    """The operator's name is a Python keyword, which the text of a graph can't hold."""

    class Model(nn.Module):
        def forward(self, x):
            return (x * 1).random_(-3, 4)

    x = torch.zeros(500)
    options = poptorch.Options().randomSeed(3)
    drawn = poptorch.inferenceModel(Model(), options)(x)
    assert sorted(set(drawn.tolist())) == [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]
    assert torch.equal(poptorch.inferenceModel(Model(), options)(x), drawn)


def test_wrong_arguments_are_refused_in_torchs_own_words():
    def forward(x):
        return x.scatter(0, x.long(), x, None)

    with pytest.raises(TypeError) as plain:
        forward(torch.ones(2))
    with pytest.raises(TypeError) as recorded:
        run(forward, torch.ones(2))
    assert str(recorded.value) == str(plain.value)
    assert "(int, Tensor, Tensor, NoneType)" in str(plain.value)
