"""Parameters with different values for groups of replicas."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple

from torch import Tensor, nn

from ipufit.poptorch._errors import error
from ipufit.poptorch.enums import CommGroupType, VariableRetrievalMode

__all__ = ["ParameterProxy", "ReplicaGrouping"]


class ReplicaGrouping(NamedTuple):
    """Grouping of replicas that share one value of a parameter.

    Attributes:
        kind: which replicas form a group.
        shards: replicas in a group; ignored for All (one group) and NoGrouping (groups of one).
        retrieval: which values are read back.
    """

    kind: CommGroupType
    shards: int
    retrieval: VariableRetrievalMode

    def size(self, replicas: int) -> int:
        """Return the number of replicas in a group."""
        if self.kind == CommGroupType.All:
            return replicas
        return 1 if self.kind == CommGroupType.NoGrouping else self.shards

    def groups(self, replicas: int) -> int:
        """Return the number of groups: the first dimension of the host's tensor."""
        return replicas // self.size(replicas)

    def group_of(self, replica: int, replicas: int) -> int:
        """Return the group of a replica, as a row of the host's tensor."""
        if self.kind == CommGroupType.Orthogonal:
            return replica % self.groups(replicas)
        return replica // self.size(replicas)

    def members(self, group: int, replicas: int) -> List[int]:
        """Return the replicas of a group; the first one's value is read back as the group's."""
        return [r for r in range(replicas) if self.group_of(r, replicas) == group]

    def rows(self, replicas: int) -> int:
        """Return the first dimension of the tensor that is read back."""
        if self.retrieval == VariableRetrievalMode.AllReplicas:
            return replicas
        return self.groups(replicas)

    def check(self, name: str, tensor: Tensor, replicas: int) -> None:
        """Refuse a parameter that can't be grouped like this on this number of replicas.

        Raises:
            Error: the parameter has no dimension for the groups, or one of another size; groups
                do not divide the replicas.
        """
        if tensor.dim() == 0:
            raise error(
                "Scalars cannot be passed as per-replica weight tensor values: the first dimension "
                f"of a parameter with a replicaGrouping counts the groups, but {name!r} has none. "
                f"Make it a tensor of shape [{self._groups_or(replicas)}]."
            )
        size = self.size(replicas)
        if size > replicas or replicas % size:
            raise error(
                f"replicaGrouping of {name!r} makes groups of {size} replicas, which must divide "
                f"the replicationFactor ({replicas}). Choose a divisor."
            )
        groups = self.groups(replicas)
        if tensor.shape[0] != groups:
            raise error(
                f"the first dimension of {name!r} must be the number of groups that its "
                f"replicaGrouping makes of {replicas} replicas ({groups}), got shape "
                f"{list(tensor.shape)}. Stack one value for each group."
            )
        if self.rows(replicas) != groups:
            raise error(
                f"VariableRetrievalMode.AllReplicas reads {replicas} values of {name!r} back, and "
                f"the parameter holds {groups}, one for each group. Use OnePerGroup, or "
                "CommGroupType.NoGrouping."
            )

    def _groups_or(self, replicas: int) -> Any:
        size = self.size(replicas)
        return replicas // size if size and not replicas % size else "number of groups"


def grouping(
    comm_group_type: CommGroupType, shards: int, variable_retrieval_mode: VariableRetrievalMode
) -> ReplicaGrouping:
    """Return a grouping, checked as far as it can be without the options.

    Raises:
        Error: a value is of another enum, or a group would have no replica.
    """
    try:
        kind = CommGroupType(comm_group_type)
        retrieval = VariableRetrievalMode(variable_retrieval_mode)
    except ValueError as reason:
        raise error(
            f"replicaGrouping expects a CommGroupType, a number and a VariableRetrievalMode: "
            f"{reason}. Use, for example, replicaGrouping(CommGroupType.Consecutive, 2, "
            "VariableRetrievalMode.OnePerGroup)."
        ) from reason
    if isinstance(shards, bool) or not isinstance(shards, int):
        raise error(
            "the second argument of replicaGrouping is the number of replicas in a group, a whole "
            f"number, got {shards!r}."
        )
    if kind in (CommGroupType.Consecutive, CommGroupType.Orthogonal) and shards < 1:
        raise error(
            f"replicaGrouping({kind}, {shards}, ...): a group has at least 1 replica. Pass the "
            "number of replicas in a group."
        )
    return ReplicaGrouping(kind, shards, retrieval)


class ParameterProxy:
    """A top-level parameter as an executor's attribute, with its method ``replicaGrouping``.

    The grouping is the executor's, so that a training and an inference executor of one module can
    group it differently.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, groupings: Dict[str, ReplicaGrouping]
    ) -> None:
        self.__dict__.update(_name=name, _parameter=parameter, _groupings=groupings)

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Let groups of replicas have different values, before the model is compiled.

        The parameter's first dimension is the number of groups; forward sees it without that.

        Args:
            comm_group_type: which replicas form a group.
            shards: replicas in a group, for Consecutive and Orthogonal.
            variable_retrieval_mode: read back one value for each group, or for each replica.
        Raises:
            Error: one of them is of another type, or out of range.
        """
        self.__dict__["_groupings"][self.__dict__["_name"]] = grouping(
            comm_group_type, shards, variable_retrieval_mode
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_parameter"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_parameter"], name, value)

    def __repr__(self) -> str:
        return repr(self.__dict__["_parameter"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of torch work on the parameter itself."""
        return func(*_unproxied(args), **_unproxied(kwargs or {}))


def _unproxied(value: object) -> Any:
    if isinstance(value, ParameterProxy):
        return value.__dict__["_parameter"]
    if isinstance(value, dict):
        return {key: _unproxied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_make"):
        return type(value)([_unproxied(item) for item in value])
    return value


def _operator(name: str) -> Any:
    def call(self: ParameterProxy, *args: object) -> Any:
        return getattr(self.__dict__["_parameter"], name)(*_unproxied(args))

    call.__name__ = name
    return call


# Python looks these up on the type.
for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__floordiv__", "__mod__", "__pow__", "__rpow__", "__matmul__"),
    *("__rmatmul__", "__neg__", "__abs__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__"),
    *("__ge__", "__getitem__", "__setitem__", "__len__", "__iter__", "__bool__", "__float__"),
    *("__int__", "__array__", "__hash__", "__contains__", "__format__"),
):
    setattr(ParameterProxy, _name, _operator(_name))
