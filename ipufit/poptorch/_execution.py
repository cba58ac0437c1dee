"""One call of a compiled model: every micro-batch in stream order, and which results come back.

A call holds ``D`` device iterations of ``A`` accumulation steps on ``R`` replicas. Sample ``i`` of
micro-batch ``(d, a, g)``, of a group ``g`` of replicas that read the same input, stands at
``((d * A + a) * G + g) * mb + i`` of the combined batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.poptorch._activations import returning
from ipufit.poptorch._anchors import Anchored
from ipufit.poptorch._counters import Counters
from ipufit.poptorch._device import Device
from ipufit.poptorch._floating_point import Checked
from ipufit.poptorch._group import Group
from ipufit.poptorch._half import half_computed, makes_half
from ipufit.poptorch._recorded import Recorded
from ipufit.poptorch.enums import OutputMode
from ipufit.utils.random_streams import isolated, micro_batch_key, seed_generators

__all__ = ["Execution", "Shape"]

_HOST = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Shape:
    """How many micro-batches a call has, and whose results come back.

    Attributes:
        iterations: device iterations, weight updates when training.
        accumulation: micro-batches of a replica for one update.
        replicas: copies of the model.
        input_group: for each replica, the group whose input it reads.
        output_mode: Default stands for nothing here.
        period: of EveryN, in device iterations.
    """

    iterations: int
    accumulation: int
    replicas: int
    input_group: Tuple[int, ...]
    output_mode: OutputMode
    period: int = 1

    @property
    def groups(self) -> int:
        """Number of groups of replicas that read the same input."""
        return max(self.input_group) + 1

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a combined batch."""
        return self.iterations * self.accumulation * self.groups

    @property
    def last(self) -> Tuple[int, int]:
        """Iteration and accumulation step of each replica's last micro-batch."""
        return self.iterations - 1, self.accumulation - 1

    def places(self) -> Iterator[Tuple[int, int, int]]:
        """(iteration, accumulation step, replica) in stream order."""
        for iteration in range(self.iterations):
            for step in range(self.accumulation):
                for replica in range(self.replicas):
                    yield iteration, step, replica

    def input_place(self, iteration: int, step: int, replica: int) -> int:
        """Which micro-batch of the combined batch this one reads."""
        return (iteration * self.accumulation + step) * self.groups + self.input_group[replica]

    def returned(self, iteration: int, step: int) -> bool:
        """Whether the results of these micro-batches come back one by one."""
        if self.output_mode == OutputMode.All:
            return True
        if self.output_mode == OutputMode.EveryN:
            return (iteration + 1) % self.period == 0
        return self.output_mode == OutputMode.Final and (iteration, step) == self.last


class _Results:
    """What comes back of the results of the micro-batches."""

    def __init__(self, shape: Shape, count: int) -> None:
        self._shape = shape
        self._kept: List[List[Tensor]] = [[] for _ in range(count)]
        self._sums: Dict[int, List[Tensor]] = {}

    def add(self, place: Tuple[int, int, int], results: Sequence[Tensor]) -> bool:
        """Take the results of one micro-batch; whether something comes back now."""
        iteration, step, replica = place
        if self._shape.output_mode == OutputMode.Sum:
            known = self._sums.get(replica)
            if known is None:
                self._sums[replica] = [result.clone() for result in results]
            else:
                self._sums[replica] = [a + b for a, b in zip(known, results)]
            return (iteration, step) == self._shape.last
        if not self._shape.returned(iteration, step):
            return False
        for kept, result in zip(self._kept, results):
            kept.append(result.clone())
        return True

    def joined(self) -> List[Tensor]:
        """One tensor per output: several micro-batches stand along the first dimension."""
        if self._sums:
            self._kept = [list(each) for each in zip(*(self._sums[r] for r in sorted(self._sums)))]
        return [_join(tensors) for tensors in self._kept]


def _join(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors)) if tensors[0].dim() else torch.stack(list(tensors))


class Execution:
    """Runs a recorded micro-batch as often as a call has it.

    Args:
        recorded: the micro-batch.
        device: its tensors.
        shape: how many there are.
        group: the processes whose replicas make an update together.
        mean: whether gradients are averaged over accumulation steps and replicas, or added up.
        scale: what the loss's gradient starts from.
        counters: notes when inputs and outputs are there.
        anchored: further tensors that come back.
        check_floats: stop at the first operator whose result is no finite number.
    """

    def __init__(
        self,
        recorded: Recorded,
        device: Device,
        shape: Shape,
        group: Group,
        mean: bool,
        scale: Callable[[], float],
        counters: Counters,
        anchored: Anchored,
        check_floats: bool = False,
    ) -> None:
        self._recorded = recorded
        self._device = device
        self._shape = shape
        self._group = group
        self._mean = mean
        self._scale = scale
        self._counters = counters
        self._anchored = anchored
        self._inner = anchored.inner()
        graph = returning(recorded.graph, [recorded.activations[name] for name in self._inner])
        self._run: Callable[..., Sequence[Tensor]] = Checked(graph) if check_floats else graph
        self._half = makes_half(recorded.graph)
        self._outputs = sum(recorded.outputs.computed)

    def run(self, inputs: Sequence[Tensor], seed: int) -> List[List[Tensor]]:
        """One call.

        Args:
            inputs: combined batches, the device's own copies; changed where forward changes them.
            seed: of the first iteration's random numbers; the next one's is the next number.
        Returns:
            The computed outputs of forward, and the tensors that were anchored.
        """
        shape, recorded = self._shape, self._recorded
        results = _Results(shape, self._outputs)
        anchors = _Results(shape, len(self._anchored.names))
        total: Dict[Tuple[str, int], Tensor] = {}
        large: List[Tensor] = []
        pending: List[Tuple[Tuple[int, int, int], Mapping[str, Tensor]]] = []
        parts = [_parts(tensor, shape.micro_batches) for tensor in inputs]
        self._counters.begin(len(inputs), self._outputs)
        with contextlib.ExitStack() as held:
            held.enter_context(torch.no_grad())
            if recorded.random:
                held.enter_context(isolated(_HOST))
            held.enter_context(half_computed(self._half, [*inputs, *self._device.state(0)]))
            for place in shape.places():
                started = time.perf_counter()
                leaves = [each[shape.input_place(*place)] for each in parts]
                self._counters.input(started, time.perf_counter())
                if recorded.random:
                    self._start_random_numbers(seed, place)
                tensors = self._micro_batch(place[2], leaves)
                own = len(tensors) - len(self._inner)
                returned, inner = recorded.returned(tensors[:own]), tensors[own:]
                ready = time.perf_counter()
                if results.add(place, returned.outputs):
                    self._counters.output(ready, time.perf_counter())
                if returned.large is not None:
                    large.append(returned.large)
                self._accumulate(total, place[2], returned.gradients)
                found = self._anchored.of(place[2], leaves, returned)
                pending.append((place, {**found, **dict(zip(self._inner, inner))}))
                if place[1:] == (shape.accumulation - 1, shape.replicas - 1):
                    self._update(total, large)
                    for each, values in pending:
                        anchors.add(each, self._anchored.complete(each[2], values))
                    total, large, pending = {}, [], []
        return [results.joined(), anchors.joined()]

    def _start_random_numbers(self, seed: int, place: Tuple[int, int, int]) -> None:
        """Those of ``ipufit.Model`` for the same number of an update, and place in it."""
        iteration, step, replica = place
        within = self._group.place(step, replica, self._shape.replicas)
        seed_generators(micro_batch_key(seed + iteration, within), _HOST)

    def _micro_batch(self, replica: int, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        scale = torch.tensor(self._scale(), dtype=torch.float64)
        return self._run(*self._device.state(replica), *leaves, scale)

    def _accumulate(
        self, total: Dict[Tuple[str, int], Tensor], replica: int, gradients: Mapping[str, Tensor]
    ) -> None:
        for name, gradient in gradients.items():
            key = (name, self._device.group_of(name, replica))
            if key in total:
                total[key] += gradient.to(total[key].dtype)
            else:
                dtype = self._device.accumulator(gradient.dtype)
                total[key] = gradient.to(dtype, copy=True)

    def _update(self, total: Mapping[Tuple[str, int], Tensor], large: Sequence[Tensor]) -> None:
        if not total:
            return
        self._group.add(total)
        for each in self._group.all_of(large):
            self._device.observe(each)
        replicas = self._group.count * self._shape.replicas
        count = self._shape.accumulation * replicas if self._mean else 1
        self._device.update(
            {self._device.part_name(*key): gradient / count for key, gradient in total.items()}
        )


def _parts(tensor: Tensor, count: int) -> List[Tensor]:
    """The micro-batches of a combined batch, as views of it."""
    if count == 1:
        return [tensor]
    size = tensor.shape[0] // count
    return [tensor[i * size : (i + 1) * size] for i in range(count)]
