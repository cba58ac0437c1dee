"""Costs of a part of a module on an IPU: memory, FLOPs and time."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn

from ipufit.errors import PartitionError, brief_error
from ipufit.planner.measure import CallTrace, Segment
from ipufit.planner.pipeline_schedule import PipelineSchedule, in_flight

# In-Processor memory of an IPU, of both generations that PopTorch 3.4 knows.
TILES, TILE_MEMORY = 1472, 624 * 1024
IPU_MEMORY = TILES * TILE_MEMORY


@dataclasses.dataclass(frozen=True)
class StageCost:
    """Memory and work of one stage; sizes are bytes, on one IPU of one replica.

    :attr:`ipufit.PartitionPlan.costs` has one for every stage.

    Attributes:
        name: of the module that begins the stage.
        parameters: number of values in the parameters that it uses.
        weight_bytes: parameters and buffers.
        gradient_bytes: one accumulator per trained parameter.
        optimizer_bytes: the optimizer's state.
        activation_bytes: what autograd keeps of one micro-batch.
        input_bytes: inputs of one micro-batch, from other stages and from the batch.
        checkpoint_bytes: outputs, of one micro-batch, of layers from which recomputation starts.
        recomputed_bytes: the most activations that recomputation computes at a time.
        recomputed_clocks: time of the forward pass up to the last such output.
        forward_flops: of the forward pass of one micro-batch.
        backward_flops: of its backward pass.
        forward_clocks: a measure of the time of the forward pass of one micro-batch.
        backward_clocks: a measure of the time of its backward pass.
    """

    name: str
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    input_bytes: int
    checkpoint_bytes: int
    recomputed_bytes: int
    forward_flops: int
    backward_flops: int
    forward_clocks: float
    backward_clocks: float
    recomputed_clocks: float

    def activations(self, micro_batches: int, recompute: bool = False) -> int:
        """Bytes of activations.

        Recomputation keeps only inputs and checkpoints, and computes the rest of one micro-batch
        again, from one of them to the next. With a single micro-batch in flight, nothing is
        recomputed after the last checkpoint, and nothing at all if there is none. If nothing is
        kept, as before the first trained weight, nothing is recomputed.

        Args:
            micro_batches: how many are in flight.
            recompute: whether activations are recomputed.
        """
        if not self.activation_bytes:
            return 0
        if not recompute or (micro_batches == 1 and not self.checkpoint_bytes):
            return micro_batches * self.activation_bytes
        return micro_batches * (self.input_bytes + self.checkpoint_bytes) + self.recomputed_bytes

    def backward(self, micro_batches: int, recompute: bool = False) -> float:
        """Clocks of the backward pass, including a recomputed forward pass.

        Args:
            micro_batches: how many are in flight.
            recompute: whether activations are recomputed.
        """
        again = self.forward_clocks if micro_batches > 1 else self.recomputed_clocks
        return self.backward_clocks + (again if recompute and self.activation_bytes else 0.0)

    def memory(self, stage: int, stages: int, schedule: PipelineSchedule, recompute: bool) -> int:
        """Bytes of the stage with all that it keeps.

        Args:
            stage: its number, from 0.
            stages: how many there are.
            schedule: of the pipeline.
            recompute: whether activations are recomputed.
        """
        fixed = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
        return fixed + self.activations(in_flight(schedule, stage, stages), recompute)


def memory_of(costs: Sequence[StageCost], schedule: PipelineSchedule, recompute: bool) -> List[int]:
    """Bytes that each stage needs."""
    return [c.memory(stage, len(costs), schedule, recompute) for stage, c in enumerate(costs)]


def by_ipu(sizes: Sequence[int], places: Sequence[int]) -> List[int]:
    """Add up sizes of stages for each IPU.

    Args:
        sizes: by every stage.
        places: the IPU of each; none where each has one of its own.
    """
    if not places:
        return list(sizes)
    totals = [0] * (1 + max(places))
    for ipu, one in zip(places, sizes):
        totals[ipu] += one
    return totals


def times_of(
    costs: Sequence[StageCost], schedule: str, recompute: bool
) -> Tuple[List[float], List[float]]:
    """Clocks of every stage's forward and backward passes."""
    backward = [
        cost.backward(in_flight(schedule, stage, len(costs)), recompute)
        for stage, cost in enumerate(costs)
    ]
    return [cost.forward_clocks for cost in costs], backward


class Costs:
    """Adds up what segments of a trace take.

    Attributes:
        trace: of one micro-batch.
        unused: names of the parameters that no operator uses.

    Args:
        trace: of one micro-batch.
        step: the user's module and that of the loss, as the trace names what they hold.
        states: bytes of the optimizer's state by the id of the parameter.
        accumulation_dtype: of the gradients; None is that of the parameter.
    """

    def __init__(
        self,
        trace: CallTrace,
        step: nn.Module,
        states: Mapping[int, int],
        accumulation_dtype: Optional[torch.dtype] = None,
    ) -> None:
        self.trace = trace
        # What parameters and buffers take, behind the segment that uses each first.
        self._states: List[Tuple[int, Dict[str, int]]] = []
        named = {**dict(step.named_parameters()), **dict(step.named_buffers())}
        first: Dict[str, int] = {}
        for number, segment in enumerate(trace.segments):
            for name in segment.state:
                first.setdefault(name, number)
        self.unused = [
            name.partition(".")[2]
            for name, tensor in named.items()
            if name not in first and isinstance(tensor, nn.Parameter)
        ]
        for name, number in first.items():
            tensor = named[name]
            is_parameter = isinstance(tensor, nn.Parameter)
            size = tensor.element_size()
            wide = torch.empty((), dtype=accumulation_dtype or tensor.dtype).element_size()
            trained = id(tensor) in states
            state = {
                "parameters": tensor.numel() if is_parameter else 0,
                "weight_bytes": tensor.numel() * size,
                "gradient_bytes": tensor.numel() * wide if trained else 0,
                "optimizer_bytes": states.get(id(tensor), 0),
            }
            self._states.append((number, state))

    def of(self, begin: int, end: int, name: str = "") -> StageCost:
        """The segments from one to before another, as one stage."""
        return next(self.ranges(begin, [end], name))

    def ranges(self, begin: int, ends: Sequence[int], name: str = "") -> Iterator[StageCost]:
        """Yield the costs up to each of several ends, in ascending order, as they are needed."""
        tensors = _Tensors(self.trace, begin)
        states = sorted((s for s in self._states if s[0] >= begin), key=lambda s: s[0])
        sums: Dict[str, Any] = dict.fromkeys(_SUMS, 0)
        at = begin
        for end in ends:
            for segment in self.trace.segments[at:end]:
                tensors.add(segment)
                sums["forward_flops"] += segment.forward.flops
                sums["backward_flops"] += segment.backward.flops
                sums["forward_clocks"] += segment.forward.clocks
                sums["backward_clocks"] += segment.backward.clocks
            at = end
            while states and states[0][0] < end:
                for key, amount in states.pop(0)[1].items():
                    sums[key] += amount
            yield StageCost(
                name=name,
                activation_bytes=tensors.saved,
                input_bytes=tensors.inputs,
                checkpoint_bytes=tensors.checkpoints,
                recomputed_bytes=max(tensors.parts),
                recomputed_clocks=tensors.clocks,
                **sums,
            )


class _Tensors:
    """Bytes of what a stage that grows keeps, and of what it gets from before it.

    Attributes:
        saved, inputs, checkpoints: of the segments so far, each storage once.
        parts: what is kept between a checkpoint and the next, without these and the inputs.
        clocks: of the forward pass up to the last checkpoint.
    """

    def __init__(self, trace: CallTrace, begin: int) -> None:
        self.saved = self.inputs = self.checkpoints = 0
        self.parts = [0]
        self.clocks = 0.0
        self._trace = trace
        self._begin = begin
        self._kept: Set[int] = set()
        self._inputs: Set[int] = set()
        # From which recomputation starts: inputs and checkpoints.
        self._starts: Set[int] = set()
        self._in_parts: List[Set[int]] = [set()]
        self._now = 0.0
        self._ended: Dict[int, float] = {}

    def add(self, segment: Segment) -> None:
        """Extend the stage by a segment."""
        sizes, born = self._trace.sizes, self._trace.born
        for key in segment.saved - self._kept:
            self._kept.add(key)
            self.saved += sizes[key]
        for key in segment.reads - self._inputs:
            if born[key] < self._begin:
                self._inputs.add(key)
                self.inputs += sizes[key]
                self._start(key)
        self._now += segment.forward.clocks
        self._ended.update(dict.fromkeys(segment.ends, self._now))
        for key in segment.resumes & self._ended.keys() - self._starts:
            self.checkpoints += sizes[key]
            self.clocks = max(self.clocks, self._ended[key])
            self._start(key)
        for key in segment.saved - self._in_parts[-1]:
            self._in_parts[-1].add(key)
            self.parts[-1] += 0 if key in self._starts else sizes[key]
        if segment.ends:
            self._in_parts.append(set())
            self.parts.append(0)

    def _start(self, key: int) -> None:
        """Recomputation starts from it, and so need not make it."""
        self._starts.add(key)
        for place, part in enumerate(self._in_parts):
            if key in part:
                self.parts[place] -= self._trace.sizes[key]


_SUMS = (
    "parameters",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "forward_flops",
    "backward_flops",
    "forward_clocks",
    "backward_clocks",
)


# Settings that want another device than the one of the trial; none of them changes the state.
_FASTER = {"foreach": None, "fused": None, "capturable": False}


def state_bytes(optimizer: torch.optim.Optimizer) -> Dict[int, int]:
    """Bytes of state by the id of the parameter, for all that require gradients.

    What the optimizer has not made yet is found out by a step on zeros of the same shape, in a copy
    that shares nothing with it.

    Raises:
        PartitionError: its step fails on zeros.
    """
    bytes_by_parameter: Dict[int, int] = {}
    bytes_by_key: Dict[Tuple[object, ...], int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            if optimizer.state.get(parameter):
                bytes_by_parameter[id(parameter)] = _size(optimizer.state[parameter])
                continue
            key = (number, parameter.shape, parameter.dtype)
            if key not in bytes_by_key:
                bytes_by_key[key] = _size(_tried(optimizer, group, parameter))
            bytes_by_parameter[id(parameter)] = bytes_by_key[key]
    return bytes_by_parameter


def _tried(
    optimizer: torch.optim.Optimizer, group: Mapping[str, object], parameter: Tensor
) -> Mapping[str, object]:
    """The state of a parameter like this after one step."""
    zeros = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))
    zeros.grad = torch.zeros_like(zeros)
    trial = object.__new__(type(optimizer))
    # A schedule may have put its own step, bound to the original, into the object.
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    hooks: Dict[str, object] = {
        name: collections.OrderedDict() for name in attributes if name.endswith("_hooks")
    }
    slower = {name: value for name, value in _FASTER.items() if name in group}
    setting = {**group, **slower, "params": [zeros]}
    state: Dict[Tensor, Dict[str, object]] = collections.defaultdict(dict)
    vars(trial).update({**attributes, **hooks, "state": state, "param_groups": [setting]})
    try:
        with torch.enable_grad():
            trial.step()
    except Exception as error:
        raise PartitionError(
            f"the optimizer state of {type(optimizer).__name__} is measured by a step on zeros, "
            f"but that fails with {brief_error(error)}. Make the plan with an optimizer that has "
            "the same state, such as 'adam'."
        ) from error
    return dict(state[zeros])


def _size(state: Mapping[str, object]) -> int:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
