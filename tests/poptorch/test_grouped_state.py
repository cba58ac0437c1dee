"""Optimizer state of a parameter that groups of replicas hold copies of."""

import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch._optimizer_link import merge_parts, split_parts


class Rows(nn.Module):
    """A weight of which each of four replicas has its own row."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(8.0).reshape(4, 2))
        self.b = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return poptorch.identity_loss((x * self.w + self.b).sum(), reduction="sum")


def trained(calls):
    """The optimizer, and the executor, after some calls."""
    options = poptorch.Options()
    options.replicationFactor(4)
    model = Rows()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.25)
    executor = poptorch.trainingModel(model, options, optimizer)
    executor.w.replicaGrouping(
        poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup
    )
    for _ in range(calls):
        executor(torch.arange(8.0).reshape(4, 2))
    return optimizer, executor


def test_state_has_a_first_dimension_of_the_groups_and_can_be_written_back():
    optimizer, _ = trained(2)
    state = optimizer.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state["ipu_state"].items()}
    assert shapes == {
        "Accl1___w": (4, 2),
        "Accl2___w": (4, 2),
        "Step___w": (4,),
        "Accl1___b": (2,),
        "Accl2___b": (2,),
        "Step___b": (),
    }
    assert not [name for name in state["ipu_param"] if "[" in name]
    moments = state["ipu_state"]["Accl1___w"]
    assert len({tuple(row) for row in moments.tolist()}) == 4

    other, again = trained(1)
    other.load_state_dict(state)
    again.copyWeightsToDevice()
    loaded = other.state_dict()["ipu_state"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state["ipu_state"].items())


def test_only_a_whole_name_is_that_of_a_parameter():
    copies = {"w": ["w[0]", "w[1]"]}
    state = {
        "ipu_state": {
            "Accl1___w[0]": torch.ones(2),
            "Accl1___w[1]": torch.zeros(2),
            "Accl1___down": torch.ones(3),
        },
        "ipu_param": {"lr___w[0]": torch.tensor(1.0), "lr___w[1]": torch.tensor(1.0)},
    }
    whole = merge_parts(state, copies)
    assert whole["ipu_state"]["Accl1___w"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert set(whole["ipu_state"]) == {"Accl1___w", "Accl1___down"}
    assert whole["ipu_param"] == {"lr___w": torch.tensor(1.0)}
    back = split_parts(whole, copies)
    for kind, values in state.items():
        assert set(back[kind]) == set(values)
        assert all(torch.equal(back[kind][name], value) for name, value in values.items())
