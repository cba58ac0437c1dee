"""The device's memory: weights, buffers and optimizer state, apart from the user's module."""

from __future__ import annotations

import functools
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    TypeVar,
    cast,
)

import torch
from torch import Tensor

from ipufit.poptorch._replica_grouping import ReplicaGrouping
from ipufit.poptorch.enums import VariableRetrievalMode

__all__ = ["Device", "Updates", "outside_inference_mode"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_inference_mode(function: _Function) -> _Function:
    """Run a function outside of inference mode, so that its tensors can be changed later."""

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> Any:
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return cast(_Function, called)


class Updates(Protocol):
    """Interface of an optimizer that updates weights on the device."""

    def apply(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the tensors of these names once, in place."""
        ...

    def accumulator(self, weight: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a weight of this dtype are added up."""
        ...

    def observe(self, large: Tensor) -> None:
        """Record how many elements of a micro-batch's gradients are large."""
        ...


def narrowed(tensor: Tensor, wide: bool) -> Tensor:
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
        self._parts: Dict[str, List[Tensor]] = {}
        for name, tensor in parameters.items():
            self._parts[name] = self._cut(name, tensor)
        for name, tensor in buffers.items():
            self._parts[name] = [narrowed(tensor, wide)]
        self.updates: Optional[Updates] = None

    def separate(self, names: Sequence[str]) -> None:
        """Give each replica a copy of these buffers, because the program changes them."""
        for name in names:
            self._parts[name] = [self._parts[name][0].clone() for _ in range(self._replicas)]

    def _cut(self, name: str, tensor: Tensor) -> List[Tensor]:
        grouping = self._groupings.get(name)
        if grouping is None:
            return [narrowed(tensor, self._wide)]
        grouping.check(name, tensor, self._replicas)
        return [narrowed(part, self._wide) for part in tensor]

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

    def accumulator(self, weight: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a weight of this dtype are added up."""
        return weight if self.updates is None else self.updates.accumulator(weight)

    def observe(self, large: Tensor) -> None:
        """Record how many elements of a micro-batch's gradients are large."""
        if self.updates is not None:
            self.updates.observe(large)

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the weights once."""
        if self.updates is not None:
            self.updates.apply(gradients)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy floating-point tensors to the host; all others are constants of the program."""
        with torch.no_grad():
            for name, host in into.items():
                if host.is_floating_point():
                    host.copy_(self._stacked(name))

    def _stacked(self, name: str) -> Tensor:
        parts = self._parts[name]
        grouping = self._groupings.get(name)
        if grouping is None:
            return parts[0]
        if grouping.retrieval == VariableRetrievalMode.AllReplicas:
            return torch.stack([parts[self.group_of(name, r)] for r in range(self._replicas)])
        return torch.stack(parts)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy floating-point tensors from the host; all others are part of the program."""
        self.writes += 1
        with torch.no_grad():
            for name, host in values.items():
                if not host.is_floating_point():
                    continue
                new: Sequence[Any] = self._cut(name, host) if name in self._groupings else [host]
                for i, part in enumerate(self._parts[name]):
                    part.copy_(new[i] if len(new) > 1 else new[0])
