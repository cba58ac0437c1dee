"""Models compiled and run within modes of the caller's."""

import gc

import pytest
import torch
from torch import nn

from ipufit import poptorch


class Line(nn.Module):
    """A line through a weight, and a count of its calls."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return poptorch.identity_loss((x * self.weight).sum(), reduction="sum")


@pytest.mark.parametrize("first", [True, False])
def test_a_training_model_trains_within_inference_mode_and_after_it(first):
    """Nothing that it keeps is a tensor of inference mode, which could not be changed later."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    executor = poptorch.trainingModel(model, optimizer=optimizer)
    losses = []
    for within in (first, not first, first):
        with torch.inference_mode(within):
            losses.append(executor(torch.ones(2)).item())
    # The gradient is 2; momentum makes steps of 1, 1.5 and 1.75.
    assert losses == [4.0, 2.0, -1.0]
    assert model.weight.item() == 2 - 1 - 1.5 - 1.75
    assert model.calls.item() == 3


def test_an_input_made_in_inference_mode_can_be_changed_in_place():
    class Add(nn.Module):
        def forward(self, x):
            x += 1
            return x * 2

    with torch.inference_mode():
        x = torch.tensor([3.0])
    assert poptorch.inferenceModel(Add())(x).tolist() == [8.0]
    assert x.tolist() == [4.0]


def test_inputs_made_in_inference_mode_are_inputs():
    class Double(nn.Module):
        def forward(self, x):
            return x[torch.arange(1, device=x.device)] * 2

    model = poptorch.inferenceModel(Double())
    with torch.inference_mode():
        x = torch.tensor([3.0, 4.0])
        assert model(x).tolist() == [6.0]
    assert model(x).tolist() == [6.0]


@pytest.mark.long
def test_a_model_that_goes_while_another_is_recorded_brings_its_weights_back():
    """The garbage collector may come at any time; the other program has nothing of it."""
    gone = Line()
    executors = [poptorch.trainingModel(gone, optimizer=torch.optim.SGD(gone.parameters(), lr=0.5))]
    executors[0](torch.ones(1))

    class Other(nn.Module):
        def forward(self, x):
            x = x + 1
            executors.clear()
            gc.collect()
            return x * 2

    other = poptorch.inferenceModel(Other())
    assert other(torch.ones(1)).item() == 4.0
    assert gone.weight.item() == 1.5
    nodes = other._executable.recorded.graph.graph.nodes
    assert sum(node.op == "call_function" for node in nodes) == 2
