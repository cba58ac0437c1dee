"""An execution: its updates, what runs it, and its results on their one way to the host.

Tensors leave the device for the host nowhere else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Callable, Collection, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.batch import CombinedBatch, ProcessShard
from ipufit.core.outputs import accumulator_of, add_to
from ipufit.engines.embedded.flat_optimizer import Rows
from ipufit.engines.embedded.traced_step import MicroBatchCalls, TracedStep, Update, UpdateCalls
from ipufit.engines.embedded.turns import Move
from ipufit.engines.program import ExecutionResult
from ipufit.tracing.grad_step import OutputShape, ReportedScalars, unpack_reported

if TYPE_CHECKING:
    from ipufit.engines.embedded.batching import BatchedStep


@dataclasses.dataclass
class ExecutionWork:
    """The updates of one execution.

    Attributes:
        batch: the samples, which may be on their way to the device already.
        updates: micro-batches, with what is recorded for them, by update.
        rows: settings of the optimizer for each entry of ``updates``.
        shares: parts of the updates of all processes that these are; None for one process.
        is_here: whether the micro-batches are on the device.
        is_random: whether any may draw random numbers.
        merged: by what is recorded for a micro-batch, what takes several like it at once, where an
            update is made of such alone.
        compiled: by the place of an update, what makes it in one call, and adds its results to the
            others.
        runs: by the place of an update, what runs micro-batches of it instead of what is recorded
            for them.
        moves: where an update has several turns, of which each is an entry of ``updates``, what
            each entry moves; else empty.
    """

    batch: CombinedBatch
    updates: Sequence[Update]
    rows: Rows
    shares: Optional[Sequence[ProcessShard]] = None
    is_here: bool = True
    is_random: bool = True
    merged: Mapping[TracedStep, BatchedStep] = dataclasses.field(default_factory=dict)
    compiled: UpdateCalls = dataclasses.field(default_factory=dict)
    runs: MicroBatchCalls = dataclasses.field(default_factory=dict)
    moves: Sequence[Move] = ()


class UpdateWay:
    """How the updates of a training program run: as recorded, compiled, or captured."""

    def run(self, execution: ExecutionWork) -> ExecutionResult:
        """Run all updates.

        Raises:
            NonFiniteLossError: the state is that before the update named in it.
        """
        raise NotImplementedError

    @property
    def jit(self) -> Optional[str]:
        """The value of ``jit`` that stands for how updates run; None where they run as recorded."""
        return None

    def explain(self) -> List[str]:
        """Describe in sentences what is particular about how updates run."""
        return []

    def expect(self, updates: int) -> None:
        """So many updates are to come."""

    def stage(self, batch: CombinedBatch) -> CombinedBatch:
        """Start to bring a batch to the device, ahead of its execution; from any thread."""
        return batch

    def forget(self) -> None:
        """The state is somewhere else from now on."""

    def close(self) -> None:
        """Let go of everything; safe twice."""


class ExecutionOutputs:
    """Results of an execution, still on the device.

    Args:
        wanted: places of the micro-batches whose outputs come back.
        replicas: outputs are added up for each of so many; 0 keeps them apart.

    Attributes:
        numbers: what micro-batches report: the kind of each, and a tensor with a row for each, or
            without rows for one.
        outputs: what comes back of them.
        places: the micro-batches they belong to.
        finite: for each update, whether its gradient was; empty where nobody asks.
        skipped: updates left out.
    """

    def __init__(self, wanted: Collection[int] = (), replicas: int = 0) -> None:
        self.numbers: List[Tuple[Sequence[ReportedScalars], Tensor]] = []
        self.outputs: List[Tuple[OutputShape, List[Tensor]]] = []
        self.places: List[int] = []
        self.finite: List[Tensor] = []
        self.skipped = 0
        self._wanted = wanted
        self._replicas = replicas
        # Place of the next micro-batch.
        self._next = 0

    def add(
        self,
        recorded: TracedStep,
        kinds: Sequence[ReportedScalars],
        numbers: Tensor,
        outputs: List[Tensor],
        hands_out: bool = True,
    ) -> None:
        """Keep what the next micro-batches report, and of their outputs those that are wanted.

        Args:
            recorded: what runs one of them.
            kinds: what the numbers of each are.
            numbers: a row for each, or without rows for one.
            outputs: of the first, the second, and so on; empty where nobody wants any.
            hands_out: whether this is the turn of an update whose outputs come back.
        """
        self.numbers.append((kinds, numbers))
        if not hands_out:
            return
        each = len(outputs) // len(kinds)
        for index in range(len(kinds)) if self._wanted else ():
            if self._next + index in self._wanted:
                part = outputs[index * each : (index + 1) * each]
                self.add_outputs(recorded, part, self._next + index)
        self._next += len(kinds)

    def add_outputs(self, recorded: TracedStep, tensors: List[Tensor], place: int) -> None:
        """Keep the outputs of a micro-batch of this execution, or add them to its replica's sum."""
        if not self._replicas:
            # Of a module run eagerly it is that of the last call.
            self.outputs.append((recorded.micro.outputs, tensors))
            self.places.append(place)
        elif place < self._replicas:
            totals = [accumulator_of(tensor) for tensor in tensors]
            self.outputs.append((recorded.micro.outputs, totals))
        else:
            for total, tensor in zip(self.outputs[place % self._replicas][1], tensors):
                add_to(total, tensor)

    def losses(self, begin: int) -> Tensor:
        """Return the losses of all micro-batches from an entry of ``numbers`` on."""
        losses = [
            numbers.reshape(len(kinds), -1)[:, 0].to(torch.float64)
            for kinds, numbers in self.numbers[begin:]
        ]
        return torch.cat(losses) if losses else torch.empty(0, dtype=torch.float64)

    def tensors(self) -> List[Tensor]:
        """All that goes to the host."""
        flat: List[Tensor] = []
        if self.numbers:
            numbers = [tensor for _, tensor in self.numbers]
            if [tensor for tensor in numbers if tensor.dim()]:
                flat.append(torch.cat([tensor.reshape(-1) for tensor in numbers]))
            else:
                flat.append(torch.stack(numbers))
        flat += [torch.stack(self.finite)] if self.finite else []
        for _, tensors in self.outputs:
            flat += tensors
        return flat

    def forget(self) -> None:
        """Let go of the values, and keep what they were."""
        self.numbers = [(kinds, _without_values(each)) for kinds, each in self.numbers]
        self.finite = [_without_values(tensor) for tensor in self.finite]
        self.outputs = [
            (shape, [_without_values(tensor) for tensor in tensors])
            for shape, tensors in self.outputs
        ]

    def anchors(
        self, tensors: Sequence[Tensor], settings: Optional[Mapping[str, float]] = None
    ) -> Tuple[ExecutionResult, List[bool]]:
        """Make the result of an execution from :meth:`tensors` once they are on the host."""
        host = iter(tensors)
        values = next(host).to(torch.float64) if self.numbers else torch.empty(0)
        finite = next(host).tolist() if self.finite else []
        outputs = [
            shape.rebuild(list(itertools.islice(host, len(tensors))))
            for shape, tensors in self.outputs
        ]
        kinds = [kind for several, _ in self.numbers for kind in several]
        losses, counts, logged, rules = unpack_reported(kinds, values)
        return (
            ExecutionResult(
                losses, outputs, self.places, counts, logged, rules, settings or {}, self.skipped
            ),
            finite,
        )


def losses_of(numbers: Tensor, micro_batches: int) -> List[float]:
    """Losses of micro-batches, on the host.

    Args:
        numbers: what they report, a row for each, or without rows for one.
        micro_batches: how many there are.
    """
    if micro_batches == 1:
        return [(numbers[0] if numbers.dim() else numbers).item()]
    losses: List[float] = (numbers[:, 0] if numbers.dim() > 1 else numbers).tolist()
    return losses


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class Transfer:
    """Copies tensors to the host, all of one execution in a single copy.

    Attributes:
        count: number of copies so far; on a device that is the host, the number of hand-overs.
    """

    def __init__(self) -> None:
        self.count = 0

    def to_host(self, tensors: Sequence[Tensor]) -> List[Tensor]:
        """Copy tensors to the host, in one copy whatever their number and dtypes."""
        if not tensors:
            return []
        self.count += 1
        if tensors[0].device.type == "cpu":
            return list(tensors)
        return unpack(pack(tensors).cpu(), tensors)

    def start(self, packed: Tensor) -> Callable[[], Tensor]:
        """Begin to copy to the host what :func:`pack` made; what comes back waits for it."""
        self.count += 1
        if packed.device.type == "cpu":
            copy = packed.clone()
            return lambda: copy
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(packed.device))

        def wait() -> Tensor:
            arrived.synchronize()
            return host

        return wait


def _order(tensors: Sequence[Tensor]) -> List[int]:
    # Widest elements first, so that every tensor starts at a multiple of its element size.
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors in one flat buffer of bytes."""
    flat = [tensors[i].contiguous().reshape(-1).view(torch.uint8) for i in _order(tensors)]
    return torch.cat(flat)


def unpack(buffer: Tensor, like: Sequence[Tensor]) -> List[Tensor]:
    """Cut the buffer that :func:`pack` made of ``like`` into tensors of those shapes and dtypes."""
    result = [torch.empty(0)] * len(like)
    start = 0
    for i in _order(like):
        size = math.prod(like[i].shape) * like[i].element_size()
        result[i] = buffer[start : start + size].view(like[i].dtype).view(like[i].shape)
        start += size
    return result
