import pytest
import torch
from torch import nn

from ipufit.poptorch._device import ParameterProxy, ReplicaGrouping, grouping
from ipufit.poptorch.enums import CommGroupType, VariableRetrievalMode
from ipufit.poptorch.poptorch_core import Error

ONE_PER_GROUP = VariableRetrievalMode.OnePerGroup
ALL_REPLICAS = VariableRetrievalMode.AllReplicas


@pytest.mark.parametrize(
    ("kind", "shards", "groups"),
    [
        (CommGroupType.All, 2, [0, 0, 0, 0, 0, 0]),
        (CommGroupType.Consecutive, 2, [0, 0, 1, 1, 2, 2]),
        (CommGroupType.Orthogonal, 2, [0, 1, 2, 0, 1, 2]),
        (CommGroupType.NoGrouping, 0, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_every_replica_has_its_group(kind, shards, groups):
    made = grouping(kind, shards, ONE_PER_GROUP)
    assert [made.group_of(replica, 6) for replica in range(6)] == groups
    assert made.groups(6) == max(groups) + 1


def proxy(parameter):
    groupings = {}
    return ParameterProxy("weight", parameter, groupings), groupings


def test_a_proxy_notes_the_grouping_and_is_the_parameter_otherwise():
    parameter = nn.Parameter(torch.arange(4.0).reshape(2, 2))
    made, groupings = proxy(parameter)
    made.replicaGrouping(CommGroupType.Orthogonal, 2, ONE_PER_GROUP)
    assert groupings == {"weight": ReplicaGrouping(CommGroupType.Orthogonal, 2, ONE_PER_GROUP)}
    assert made.shape == (2, 2)
    assert torch.equal(made, parameter)
    assert torch.equal(torch.add(1, made), parameter + 1)
    assert torch.equal(torch.stack([made, made])[1], parameter)
    assert torch.equal(made + made, parameter * 2)
    assert torch.equal(1 - made, 1 - parameter)
    assert made[1, 1] == 3
    assert len(made) == 2
    assert repr(made) == repr(parameter)
    made.grad = torch.ones(2, 2)
    assert torch.equal(parameter.grad, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            (7, 2, ONE_PER_GROUP),
            "replicaGrouping expects a CommGroupType, a number and a VariableRetrievalMode: 7 is "
            "not a valid CommGroupType. Use, for example, "
            "replicaGrouping(CommGroupType.Consecutive, 2, VariableRetrievalMode.OnePerGroup).",
        ),
        (
            (CommGroupType.All, 2, 1),
            "replicaGrouping expects a CommGroupType, a number and a VariableRetrievalMode: 1 is "
            "not a valid VariableRetrievalMode. Use, for example, "
            "replicaGrouping(CommGroupType.Consecutive, 2, VariableRetrievalMode.OnePerGroup).",
        ),
        (
            (CommGroupType.All, 2.5, ONE_PER_GROUP),
            "the second argument of replicaGrouping is the number of replicas in a group, a whole "
            "number, got 2.5.",
        ),
    ],
)
def test_other_groupings_are_refused(args, text):
    made, groupings = proxy(nn.Parameter(torch.ones(2)))
    with pytest.raises(Error) as caught:
        made.replicaGrouping(*args)
    assert caught.value.message == text
    assert groupings == {}


def test_a_group_has_a_replica():
    with pytest.raises(Error, match="a group has at least 1 replica"):
        grouping(CommGroupType.Orthogonal, 0, ONE_PER_GROUP)


@pytest.mark.parametrize(
    ("kind", "shards", "retrieval", "shape", "text"),
    [
        (
            CommGroupType.Consecutive,
            2,
            ONE_PER_GROUP,
            (),
            "Scalars cannot be passed as per-replica weight tensor values: the first dimension of "
            "a parameter with a replicaGrouping counts the groups, but 'w' has none. Make it a "
            "tensor of shape [2].",
        ),
        (
            CommGroupType.Consecutive,
            3,
            ONE_PER_GROUP,
            (2,),
            "replicaGrouping of 'w' makes groups of 3 replicas, which must divide the "
            "replicationFactor (4). Choose a divisor.",
        ),
        (
            CommGroupType.Orthogonal,
            2,
            ONE_PER_GROUP,
            (4, 1),
            "the first dimension of 'w' must be the number of groups that its replicaGrouping "
            "makes of 4 replicas (2), got shape [4, 1]. Stack one value for each group.",
        ),
        (
            CommGroupType.Orthogonal,
            2,
            ALL_REPLICAS,
            (2, 1),
            "VariableRetrievalMode.AllReplicas reads 4 values of 'w' back, and the parameter holds "
            "2, one for each group. Use OnePerGroup, or CommGroupType.NoGrouping.",
        ),
    ],
)
def test_what_does_not_fit_the_replicas_is_refused(kind, shards, retrieval, shape, text):
    with pytest.raises(Error) as caught:
        grouping(kind, shards, retrieval).check("w", torch.ones(shape), 4)
    assert caught.value.message == text


def test_what_fits_passes():
    grouping(CommGroupType.Orthogonal, 2, ONE_PER_GROUP).check("w", torch.ones(2, 3), 4)
    grouping(CommGroupType.NoGrouping, 0, ALL_REPLICAS).check("w", torch.ones(4), 4)
    grouping(CommGroupType.All, 0, ONE_PER_GROUP).check("w", torch.ones(1, 3), 4)
