"""One call of a compiled model: every micro-batch in stream order, and which results come back.

A call holds ``D`` device iterations of ``A`` accumulation steps on ``R`` replicas. Sample ``i`` of
micro-batch ``(d, a, g)``, of a group ``g`` of replicas that read the same input, stands at
``((d * A + a) * G + g) * mb + i`` of the combined batch.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.engines.embedded.traced_step import computing
from ipufit.poptorch._device import Device, Group
from ipufit.poptorch._logging import error
from ipufit.poptorch._precision import FloatCheck, half_computed, makes_half, trap_overflow
from ipufit.poptorch._recording import MicroBatchResults, RecordedProgram
from ipufit.poptorch._tracing import returning
from ipufit.poptorch.enums import OutputMode
from ipufit.tracing.interpreter import InstrumentedInterpreter
from ipufit.utils.random_streams import micro_batch_key, seed_generators

# By event: for every tensor, the time of every micro-batch, in seconds.
Times = Dict[str, List[List[float]]]

_EVENTS = ("input", "input_complete", "output", "output_complete")


class Counters:
    """Times of the last call, in seconds since an arbitrary moment.

    Attributes:
        enabled: off where no data moves.
    """

    def __init__(self) -> None:
        self.enabled = True
        self.begin(0, 0)

    def begin(self, inputs: int, outputs: int) -> None:
        """Start a call with this many tensors."""
        # All tensors of a micro-batch are there at once.
        self._tensors = (inputs, inputs, outputs, outputs)
        self._times: Dict[str, List[float]] = {event: [] for event in _EVENTS}

    def record(self, kind: str, begun: float, complete: float) -> None:
        """Record when inputs of a micro-batch were requested, or outputs ready, and when there.

        Args:
            kind: "input" or "output".
        """
        if self.enabled:
            self._times[kind].append(begun)
            self._times[f"{kind}_complete"].append(complete)

    def times(self) -> Times:
        """Return copies of the times by event; ``[[]]`` where there is no tensor."""
        counts = zip(_EVENTS, self._tensors)
        return {event: [list(self._times[event]) for _ in range(n)] or [[]] for event, n in counts}


_GRADIENT, _UPDATED = "Gradient___", "UpdatedVar___"


class AnchoredTensors:
    """Finds tensors under the names that PopTorch gives them.

    Inputs, parameters, gradients, updated parameters and the optimizer's settings have PopTorch's
    names. Activations are named after torch's operators, where PopART has others.

    Args:
        names: names of the anchored tensors.
        recorded: the program.
        inputs: its number of inputs.
        device: its tensors, and its numbers of the optimizer.
    """

    def __init__(
        self, names: Sequence[str], recorded: RecordedProgram, inputs: int, device: Device
    ) -> None:
        self.names = list(names)
        self._recorded = recorded
        self._inputs = ["input" if i == 0 else f"input/{i}" for i in range(inputs)]
        self._device = device

    def check(self) -> None:
        """Refuse a name that the program does not have.

        Raises:
            Error: the name, and where to find those there are.
        """
        available_names = self.available_names()
        for name in self.names:
            if name not in available_names:
                raise error(
                    f"no tensor of the program is called {name!r}. This engine knows those that "
                    "getTensorNames() lists, where operators have torch's names, not PopART's."
                )

    def available_names(self) -> List[str]:
        """Return every name that can be anchored."""
        with_gradient = self._recorded.with_gradient
        return [
            *self._inputs,
            *self._device.names,
            *(["loss"] if self._recorded.trace.training else []),
            *(f"{_GRADIENT}{name}" for name in with_gradient),
            *(f"{_UPDATED}{name}" for name in with_gradient),
            *self._device.settings(),
            *self._recorded.activations,
        ]

    def activations(self) -> List[str]:
        """Return the anchored names that are results of operators inside forward."""
        return [name for name in dict.fromkeys(self.names) if name in self._recorded.activations]

    def read(
        self, replica: int, leaves: Sequence[Tensor], returned: MicroBatchResults
    ) -> Dict[str, Tensor]:
        """Return copies of the anchored tensors that a micro-batch has before the update."""
        if not self.names:
            return {}
        tensors = dict(zip(self._inputs, leaves))
        tensors.update(zip(self._device.names, self._device.state(replica)))
        tensors.update((f"{_GRADIENT}{n}", g) for n, g in returned.gradients.items())
        if returned.loss is not None:
            tensors["loss"] = returned.loss
        tensors.update(
            (name, torch.tensor(value)) for name, value in self._device.settings().items()
        )
        return {name: tensors[name].clone() for name in self.names if name in tensors}

    def complete(self, replica: int, values: Mapping[str, Tensor]) -> List[Tensor]:
        """Return the anchored tensors in order, with parameters as they are after the update."""
        updated = {
            f"{_UPDATED}{name}": tensor
            for name, tensor in zip(self._device.names, self._device.state(replica))
        }
        return [values[n] if n in values else updated[n] for n in self.names]


@dataclasses.dataclass(frozen=True)
class CallShape:
    """Number of micro-batches in a call, and which of their results come back.

    Attributes:
        iterations: device iterations, weight updates when training.
        accumulation: micro-batches of a replica for one update.
        replicas: copies of the model.
        input_group: for each replica, the group whose input it reads.
        output_mode: any mode but Default, which is resolved before.
        period: the period of EveryN, in device iterations.
        input_group_size: replicas that read the same input.
    """

    iterations: int
    accumulation: int
    replicas: int
    input_group: Tuple[int, ...]
    output_mode: OutputMode
    period: int = 1
    input_group_size: int = 1

    @property
    def groups(self) -> int:
        """Number of groups of replicas that read the same input."""
        return max(self.input_group) + 1

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a combined batch."""
        return self.iterations * self.accumulation * self.groups

    def check(self, tensor: Tensor, name: str) -> int:
        """Return the micro-batch size of an input; a 0-dim tensor counts as a batch of 1.

        Args:
            name: what the input is called in a message.
        Raises:
            AssertionError: its dimension 0 does not divide evenly.
        """
        size = tensor.shape[0] if tensor.dim() else 1
        # Not always that of micro-batches: the number of replicas may be set after their groups.
        groups = self.replicas // self.input_group_size
        factor = self.iterations * self.accumulation * groups
        if factor < 1 or size % factor:
            raise AssertionError(
                f"Invalid batch dimension: in the input {name} of shape {list(tensor.shape)}, the "
                f"batch dimension ({size}) must be a multiple of "
                f"Options.deviceIterations({self.iterations}) * "
                f"(Options.replicationFactor({self.replicas}) / "
                f"Options.inputReplicaGrouping.input_group_size({self.input_group_size})) * "
                f"Options.Training.gradientAccumulation({self.accumulation}) = "
                f"{factor}, {_advice(size, factor)}"
            )
        return size // factor

    def first(self, tensor: Tensor, name: str) -> Tensor:
        """Return the first micro-batch of an input as a view, with which forward is recorded."""
        size = self.check(tensor, name)
        return tensor.narrow(0, 0, size) if tensor.dim() else tensor

    @property
    def last(self) -> Tuple[int, int]:
        """Iteration and accumulation step of each replica's last micro-batch."""
        return self.iterations - 1, self.accumulation - 1

    def places(self) -> Iterator[Tuple[int, int, int]]:
        """Yield (iteration, accumulation step, replica) in stream order."""
        for iteration in range(self.iterations):
            for step in range(self.accumulation):
                for replica in range(self.replicas):
                    yield iteration, step, replica

    def input_place(self, iteration: int, step: int, replica: int) -> int:
        """Return the position in the combined batch of the micro-batch that a replica reads."""
        return (iteration * self.accumulation + step) * self.groups + self.input_group[replica]

    def returned(self, iteration: int, step: int) -> bool:
        """Return True if the results of these micro-batches come back one by one."""
        if self.output_mode == OutputMode.All:
            return True
        if self.output_mode == OutputMode.EveryN:
            return (iteration + 1) % self.period == 0
        return self.output_mode == OutputMode.Final and (iteration, step) == self.last


def _advice(size: int, factor: int) -> str:
    if factor < 1:
        return "which must be at least 1. Set each of these numbers to 1 or more."
    below = size // factor * factor
    sizes = f"{below} or {below + factor}" if below else f"{factor}"
    return (
        f"so that each micro-batch has the same size. Pass {sizes} samples, or use "
        "poptorch.DataLoader, which loads the right number."
    )


class _Results:
    """Collects the results of the micro-batches that come back, or their sum."""

    def __init__(self, shape: CallShape, count: int) -> None:
        self._shape = shape
        self._tensors: List[List[Tensor]] = [[] for _ in range(count)]
        self._sums: Dict[int, List[Tensor]] = {}

    def add(self, place: Tuple[int, int, int], results: Sequence[Tensor]) -> bool:
        """Add the results of a micro-batch, and return True if something is returned after it."""
        iteration, step, replica = place
        if self._shape.output_mode == OutputMode.Sum:
            partial_sum = self._sums.get(replica)
            if partial_sum is None:
                self._sums[replica] = [result.clone() for result in results]
            else:
                self._sums[replica] = [a + b for a, b in zip(partial_sum, results)]
            return (iteration, step) == self._shape.last
        if not self._shape.returned(iteration, step):
            return False
        for tensors, result in zip(self._tensors, results):
            tensors.append(result.clone())
        return True

    def concatenated(self) -> List[Tensor]:
        """Concatenate the results of all micro-batches along dimension 0, one tensor per output."""
        if self._sums:
            self._tensors = [
                list(each) for each in zip(*(self._sums[r] for r in sorted(self._sums)))
            ]
        return [_concat(tensors) for tensors in self._tensors]


def _concat(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors)) if tensors[0].dim() else torch.stack(list(tensors))


@dataclasses.dataclass(eq=False)
class MicroBatchRunner:
    """Runs a recorded micro-batch as often as a call has it.

    Attributes:
        recorded: the program of one micro-batch.
        device: the device's tensors.
        shape: number of micro-batches.
        group: the processes whose replicas make an update together.
        mean: average gradients over accumulation steps and replicas instead of adding them up.
        counters: records when inputs and outputs are there.
        anchored: further tensors that come back.
        check_floats: stop at the first operator whose result is no finite number.
    """

    recorded: RecordedProgram
    device: Device
    shape: CallShape
    group: Group
    mean: bool
    counters: Counters
    anchored: AnchoredTensors
    check_floats: bool = False

    def __post_init__(self) -> None:
        self._inner = self.anchored.activations()
        recorded = self.recorded
        graph = returning(recorded.graph, [recorded.activations[name] for name in self._inner])
        self._run: Callable[..., Sequence[Tensor]] = graph
        if self.check_floats:
            self._run = InstrumentedInterpreter(graph, [FloatCheck(graph.graph)]).run
        self._half = makes_half(recorded.graph)
        self._outputs = sum(recorded.outputs.computed)

    def run(self, inputs: Sequence[Tensor], seed: int) -> List[List[Tensor]]:
        """Run all micro-batches of one call.

        Args:
            inputs: combined batches, the device's own copies; changed where forward changes them.
            seed: seed of the first iteration's random numbers; each iteration adds one to it.
        Returns:
            The computed outputs of forward, and the tensors that were anchored.
        """
        shape, recorded = self.shape, self.recorded
        results = _Results(shape, self._outputs)
        anchors = _Results(shape, len(self.anchored.names))
        total: Dict[str, Tensor] = {}
        averages: Dict[str, Tuple[Tensor, Tensor, Tensor]] = {}
        large: List[Tensor] = []
        pending: List[Tuple[Tuple[int, int, int], Mapping[str, Tensor]]] = []
        parts = [_parts(tensor, shape.micro_batches) for tensor in inputs]
        self.counters.begin(len(inputs), self._outputs)
        half = half_computed(self._half, [*inputs, *self.device.state(0)])
        traps = trap_overflow(self.check_floats)
        with computing(torch.device("cpu"), recorded.random), half, traps:
            for place in shape.places():
                started = time.perf_counter()
                leaves = [each[shape.input_place(*place)] for each in parts]
                self.counters.record("input", started, time.perf_counter())
                if recorded.random:
                    self._start_random_numbers(seed, place)
                tensors = self._micro_batch(place[2], leaves)
                count = len(tensors) - len(self._inner)
                returned, inner = recorded.returned(tensors[:count]), tensors[count:]
                ready = time.perf_counter()
                if results.add(place, returned.outputs):
                    self.counters.record("output", ready, time.perf_counter())
                if returned.large is not None:
                    large.append(returned.large)
                self._accumulate(total, place[2], returned.gradients)
                averages.update(self._averages(place[2], returned.factors))
                anchored = self.anchored.read(place[2], leaves, returned)
                pending.append((place, {**anchored, **dict(zip(self._inner, inner))}))
                if place[1:] == (shape.accumulation - 1, shape.replicas - 1):
                    self._update(total, large)
                    self._move(averages)
                    for each, values in pending:
                        anchors.add(each, self.anchored.complete(each[2], values))
                    total, large, pending = {}, [], []
        return [results.concatenated(), anchors.concatenated()]

    def _start_random_numbers(self, seed: int, place: Tuple[int, int, int]) -> None:
        """Seed the generators as ``ipufit.Model`` does for this update and micro-batch."""
        iteration, step, replica = place
        within = self.group.place(step, replica, self.shape.replicas)
        seed_generators(micro_batch_key(seed + iteration, within))

    def _micro_batch(self, replica: int, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        scale = torch.tensor(self.device.loss_scaling, dtype=torch.float64)
        return self._run(*self.device.state(replica), *leaves, scale)

    def _accumulate(
        self, total: Dict[str, Tensor], replica: int, gradients: Mapping[str, Tensor]
    ) -> None:
        """Add gradients to the sums, each to that of the copy that the replica has."""
        for name, gradient in gradients.items():
            part = self.device.part_of(name, replica)
            if part in total:
                total[part] += gradient.to(total[part].dtype)
            else:
                dtype = self.device.accumulator(gradient.dtype)
                total[part] = gradient.to(dtype, copy=True)

    def _averages(
        self, replica: int, factors: Sequence[Tensor]
    ) -> Dict[str, Tuple[Tensor, Tensor, Tensor]]:
        """Return weight, average and factor by the average's copy that the replica has."""
        state = dict(zip(self.device.names, self.device.state(replica)))
        return {
            self.device.part_of(average, replica): (state[weight], state[average], factor)
            for (weight, average), factor in zip(self.recorded.averages, factors)
        }

    def _move(self, averages: Mapping[str, Tuple[Tensor, Tensor, Tensor]]) -> None:
        """Move averages towards the weights as the update has left them."""
        for weight, average, factor in averages.values():
            old, new = factor.to(average.dtype), (1 - factor).to(average.dtype)
            average.copy_(old * average + new * weight.to(average.dtype))

    def _update(self, total: Mapping[str, Tensor], large: Sequence[Tensor]) -> None:
        if not total:
            return
        self.group.add(total)
        for each in self.group.all_of(large):
            self.device.observe(each)
        replicas = self.group.count * self.shape.replicas
        count = self.shape.accumulation * replicas if self.mean else 1
        self.device.update({part: gradient / count for part, gradient in total.items()})


def _parts(tensor: Tensor, count: int) -> List[Tensor]:
    """Return the micro-batches of a combined batch, as views of it."""
    if count == 1:
        return [tensor]
    size = tensor.shape[0] // count
    return [tensor[i * size : (i + 1) * size] for i in range(count)]
