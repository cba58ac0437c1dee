"""The device's memory: weights and buffers of all replicas, those of other processes included."""

from __future__ import annotations

import hashlib
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ipufit.poptorch._logging import error
from ipufit.poptorch._optimizer import CompiledOptimizer
from ipufit.poptorch.enums import CommGroupType, VariableRetrievalMode
from ipufit.poptorch.options import Options
from ipufit.processes import Processes, current


def group_of(replica: int, kind: CommGroupType, size: int, replicas: int) -> int:
    """Return the group of a replica.

    Args:
        replica: its number.
        kind: which replicas are a group.
        size: replicas in a group.
        replicas: all of them.
    """
    if kind == CommGroupType.Orthogonal:
        return replica % (replicas // size)
    return replica // size


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
        return group_of(replica, self.kind, self.size(replicas), replicas)

    def check(self, name: str, tensor: Tensor, replicas: int) -> None:
        """Refuse a parameter that can't be grouped like this on this number of replicas.

        Raises:
            Error: the parameter has no dimension for the groups, or one of another size; groups
                do not divide the replicas.
        """
        size = self.size(replicas)
        if tensor.dim() == 0:
            count = "number of groups" if replicas % size else replicas // size
            raise error(
                "Scalars cannot be passed as per-replica weight tensor values: the first dimension "
                f"of a parameter with a replicaGrouping counts the groups, but {name!r} has none. "
                f"Make it a tensor of shape [{count}]."
            )
        if replicas % size:
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
        if self.retrieval == VariableRetrievalMode.AllReplicas and groups != replicas:
            raise error(
                f"VariableRetrievalMode.AllReplicas reads {replicas} values of {name!r} back, and "
                f"the parameter holds {groups}, one for each group. Use OnePerGroup, or "
                "CommGroupType.NoGrouping."
            )


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
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: Tuple[object, ...] = (),
        kwargs: Optional[Dict[str, object]] = None,
    ) -> Any:
        """Functions of torch work on the parameter itself."""
        return func(*_unproxied(args), **_unproxied(kwargs or {}))


def _unproxied(value: object) -> Any:
    return tree_map(
        lambda v: v.__dict__["_parameter"] if isinstance(v, ParameterProxy) else v, value
    )


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


def _narrowed(tensor: Tensor, wide: bool) -> Tensor:
    """Return a copy as the device stores it: a device has no float64."""
    dtype = torch.float32 if tensor.dtype == torch.float64 and not wide else tensor.dtype
    return tensor.detach().to(dtype, copy=True)


class Device:
    """Copies of a model's parameters and buffers.

    Args:
        parameters, buffers: the host's tensors by name.
        replicas: number of copies of the model.
        groupings: groupings of the parameters that are not the same on all replicas.
        wide: preserve float64.

    Attributes:
        names: names of all tensors.
        parameters: names of the parameters.
        writes: how often the host has written its tensors.
        updates: makes weight updates; None where there are none.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        replicas: int,
        groupings: Mapping[str, ReplicaGrouping],
        wide: bool,
    ) -> None:
        self._replicas = replicas
        self._groupings = dict(groupings)
        self._wide = wide
        self.names: Tuple[str, ...] = (*parameters, *buffers)
        self.parameters: Tuple[str, ...] = tuple(parameters)
        self.writes = 0
        tensors = {**parameters, **buffers}
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._parts = {name: self._cut(name, tensor) for name, tensor in tensors.items()}
        self.updates: Optional[CompiledOptimizer] = None

    def separate(self, names: Sequence[str]) -> None:
        """Give each replica a copy of these buffers, because the program changes them."""
        for name in names:
            self._parts[name] = [self._parts[name][0].clone() for _ in range(self._replicas)]

    def _cut(self, name: str, tensor: Tensor) -> List[Tensor]:
        grouping = self._groupings.get(name)
        if grouping is None:
            return [_narrowed(tensor, self._wide)]
        grouping.check(name, tensor, self._replicas)
        return [_narrowed(part, self._wide) for part in tensor]

    @property
    def grouped(self) -> Tuple[str, ...]:
        """Names of the parameters that replicas hold several copies of."""
        return tuple(name for name in self._groupings if len(self._parts[name]) > 1)

    def group_of(self, name: str, replica: int) -> int:
        """Return the index of a replica's copy among the copies of a tensor."""
        grouping = self._groupings.get(name)
        if grouping is not None:
            return grouping.group_of(replica, self._replicas)
        return replica if len(self._parts[name]) > 1 else 0

    def part_name(self, name: str, group: int) -> str:
        """Return the name of one copy of a tensor; the tensor's own if there is but one."""
        return name if len(self._parts[name]) == 1 else f"{name}[{group}]"

    def part_of(self, name: str, replica: int) -> str:
        """Return the name of the copy of a tensor that a replica has."""
        return self.part_name(name, self.group_of(name, replica))

    def parts(self, names: Sequence[str]) -> Dict[str, Tensor]:
        """Return every copy of these tensors by its own name."""
        return {
            self.part_name(name, group): part
            for name in names
            for group, part in enumerate(self._parts[name])
        }

    def state(self, replica: int) -> List[Tensor]:
        """Return parameters and buffers as a micro-batch on this replica reads them."""
        return [self._parts[name][self.group_of(name, replica)] for name in self.names]

    def example(self) -> Dict[str, Tensor]:
        """Return the parameters and buffers of replica 0 by name."""
        return dict(zip(self.names, self.state(0)))

    @property
    def loss_scaling(self) -> float:
        """Initial gradient of the loss."""
        return 1.0 if self.updates is None else self.updates.loss_scaling

    def settings(self) -> Dict[str, float]:
        """Return the numbers of the optimizer that can be anchored, by name."""
        return {} if self.updates is None else self.updates.anchors()

    def accumulator(self, weight: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a weight of this dtype are added up."""
        return weight if self.updates is None else self.updates.settings.accumulator(weight)

    def observe(self, large: Tensor) -> None:
        """Record how many elements of a micro-batch's gradients are large."""
        if self.updates is not None:
            self.updates.observe(large)

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the weights once."""
        if self.updates is not None:
            self.updates.apply(gradients)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy floating-point tensors to the host; all others are constants of the program.

        Raises:
            Error: the host has replaced one by another shape, or has one more.
        """
        with torch.no_grad():
            for name, host in self._floating(into).items():
                parts = self._parts[name]
                host.copy_(torch.stack(parts) if name in self._groupings else parts[0])

    def _floating(self, values: Mapping[str, Tensor]) -> Dict[str, Tensor]:
        """Return those of the host's tensors that are copied; all of them fit the device's."""
        floating = {name: host for name, host in values.items() if host.is_floating_point()}
        for name, host in floating.items():
            shape = self._shapes.get(name)
            if shape != host.shape:
                compiled = f"no tensor {name!r}"
                if shape is not None:
                    compiled = f"a tensor {name!r} of shape {list(shape)}"
                raise error(
                    f"the compiled program has {compiled}, and the model one of shape "
                    f"{list(host.shape)}. Parameters and buffers may only change in place while "
                    "the model is compiled: call destroy() on it before you replace or add one."
                )
        return floating

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy floating-point tensors from the host; all others are part of the program.

        Raises:
            Error: the host has replaced one by another shape, or has one more.
        """
        self.writes += 1
        with torch.no_grad():
            for name, host in self._floating(values).items():
                new = self._cut(name, host) if name in self._groupings else [host]
                for i, part in enumerate(self._parts[name]):
                    part.copy_(new[i] if len(new) > 1 else new[0])


class Group:
    """All processes of a run, as one of them sees them.

    Args:
        options: number of processes, and the index of this one.
        training: whether gradients are added up. Inference needs no other process.

    Attributes:
        count: number of processes whose replicas make an update.
        number: index of this process.
    """

    def __init__(self, options: Options, training: bool) -> None:
        self.count = options.Distributed.numProcesses
        self.number = options.Distributed.processId
        self._trains = training and self.count > 1
        self._processes: Optional[Processes] = None
        self._written = 0

    def check(self, device: Device) -> None:
        """Check that the environment has the same processes, without communicating.

        Raises:
            Error: it does not, or replicas have parameters of their own.
        """
        if not self._trains:
            return
        processes = current()
        if (processes.process_id, processes.num_processes) != (self.number, self.count):
            says = "nothing of other processes"
            if processes.is_distributed:
                says = f"process {processes.process_id} of {processes.num_processes}"
            raise error(
                "a training model must reach the other processes that options.Distributed speaks "
                f"of, which makes this process {self.number} of {self.count}, but the environment "
                f"says {says}. Start all of them with torchrun, mpirun or PopRun, call "
                "ipufit.distributed with the same numbers, or train alone with "
                "options.Distributed.disable()."
            )
        if device.grouped:
            raise error(
                "replicaGrouping must leave a parameter the same on all replicas where several "
                f"processes train, which ipufit.poptorch does not cut up, but {device.grouped[0]!r}"
                " has several copies. Leave replicaGrouping out, or train in one process."
            )
        self._processes = processes

    def begin(self, device: Device, **facts: object) -> None:
        """Check that all processes are about to run the same program on the same weights.

        Args:
            device: device of this process.
            facts: properties that the programs must have in common.
        Raises:
            ProcessError: another process has gone.
            Error: they are not alike; an IPU would hang, or train different models.
        """
        if not self._trains:
            return
        assert self._processes is not None, "checked when the device was taken"
        rewritten = device.writes != self._written
        reports = self._processes.gather({"fresh": rewritten, **facts})
        for name in facts:
            for process, each in enumerate(reports):
                if each[name] != reports[0][name]:
                    shown = name.replace("_", " ")
                    raise error(
                        f"all processes must run the same program, but process 0 has {shown} "
                        f"{reports[0][name]} and process {process} has {each[name]}. Give all of "
                        "them the same options, and inputs of the same shapes."
                    )
        if any(each["fresh"] for each in reports):
            self._compare_weights(device)
        self._written = device.writes

    def _compare_weights(self, device: Device) -> None:
        assert self._processes is not None
        digests: List[Dict[str, str]] = self._processes.gather(_digests(device))
        for process, each in enumerate(digests):
            for name, digest in digests[0].items():
                if each.get(name) != digest:
                    raise error(
                        "all processes must begin with the same weights, as PopTorch does not "
                        f"bring them together, but {name!r} is another in process {process} than "
                        "in process 0. Seed torch alike before the module is made, or load one "
                        "file in all of them."
                    )

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum each gradient over all processes, in place."""
        if self._trains:
            assert self._processes is not None
            self._processes.add(list(gradients.values()))

    def all_of(self, numbers: Sequence[Tensor]) -> List[Tensor]:
        """Gather scalar tensors from all processes, each of which has as many of them."""
        if not self._trains or not numbers:
            return list(numbers)
        assert self._processes is not None
        row = torch.stack(list(numbers))
        rows = self._processes.gather_rows(row, [len(numbers)] * self.count)
        return list(torch.cat(rows))

    def place(self, step: int, replica: int, replicas: int) -> int:
        """Return the position of a micro-batch of this process in an update of all processes."""
        return (step * self.count + self.number) * replicas + replica


def _digests(device: Device) -> Dict[str, str]:
    """Hash each parameter of the device, by name."""
    digests = {}
    for name, part in device.parts(device.parameters).items():
        data = part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digests[name] = hashlib.sha256(data).hexdigest()[:16]
    return digests
