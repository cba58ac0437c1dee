"""Attributes of objects and contents of their containers, put back after a recording."""

from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from torch import nn

from ipufit.utils.state import ValueSnapshot

CONTAINERS = {
    "list": [1, 2],
    "dict": {"a": 1},
    "set": {1, 2},
    "ordered": OrderedDict(a=1),
    "default": defaultdict(int, a=1),
    "deque": deque([1, 2], maxlen=2),
}


class Holder(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self._value = value


def fill(container):
    """Put a tensor in; where there is room for no more, in the place of something."""
    if isinstance(container, dict):
        container["a"] = torch.ones(1)
    elif isinstance(container, set):
        container.pop()
        container.add(torch.ones(1))
    else:
        container[0] = torch.ones(1)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_of_the_same_length_is_told_and_put_back(name):
    value = CONTAINERS[name].copy()
    owner = Holder(value)
    snapshot = ValueSnapshot([owner])
    assert snapshot.changed() == []
    fill(value)
    assert snapshot.changed() == ["Holder._value"]
    snapshot.restore()
    assert owner._value is value
    assert value == CONTAINERS[name]
    assert snapshot.changed() == []


def test_bound_anew_new_and_gone_are_told_and_put_back():
    owner = Holder(3)
    owner.gone = "gone"
    snapshot = ValueSnapshot([owner])
    owner._value, owner.new = 4, 5
    del owner.gone
    assert snapshot.changed() == ["Holder._value", "Holder.gone", "Holder.new"]
    snapshot.restore()
    assert (owner._value, owner.gone, hasattr(owner, "new")) == (3, "gone", False)


def test_parameters_modules_and_hooks_are_put_back_in_silence():
    """A hook that stays, where the attribute that notes it does not, is registered twice."""
    owner = Holder(3)
    weight = owner.layer.weight
    snapshot = ValueSnapshot([*owner.modules()])
    owner.layer._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))
    owner.other = nn.Linear(1, 1)
    owner.register_forward_hook(lambda *_: None)
    assert snapshot.changed() == []
    snapshot.restore()
    assert owner.layer.weight is weight
    assert [*owner._modules] == ["layer"]
    assert not owner._forward_hooks
