"""Decides whether micro-batches of an update run as larger batches, and says why not."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from typing import Callable, ContextManager, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.batch import MicroBatch
from ipufit.core.precision import autocast_state, computes_in_half, with_inputs_in
from ipufit.engines.embedded.batching.batch_dim import NOT_MAPPED, BatchDim, RefusalError, State
from ipufit.engines.embedded.batching.batched_step import (
    BatchedGradStep,
    BatchedStep,
    Forward,
    Replayed,
)
from ipufit.engines.embedded.batching.proof import prove
from ipufit.engines.embedded.passes.select_kernels import Lowered
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.engines.gradient_reduction import GradientReduction
from ipufit.engines.program import ProgramSpec
from ipufit.tracing.capture import capture
from ipufit.tracing.grad_step import GradStep, OutputShape
from ipufit.tracing.graph_analysis import GraphSignature, peak_bytes
from ipufit.tracing.validate import public_name
from ipufit.utils.random_streams import Generators
from ipufit.utils.state import same_values

# What the values of a merged batch may take; merging larger ones saves little and holds much.
MOST_BYTES = 64 * 2**20

# Lowers a function of tensors, given examples of them: what runs, and how.
Make = Callable[[BatchedGradStep, Sequence[Tensor]], Tuple[Callable[..., List[Tensor]], Lowered]]


@dataclasses.dataclass(frozen=True)
class Decision:
    """A larger batch to run, or the reason for running micro-batches one by one.

    Attributes:
        merged: what runs; None where micro-batches run one by one.
        explanation: a sentence about it.
    """

    merged: Optional[BatchedStep]
    explanation: str

    @staticmethod
    def against(total: int, reason: str) -> Decision:
        """Make the decision to run micro-batches one by one, with the reason."""
        return Decision(None, f"The {total} micro-batches of an update run one by one: {reason}.")

    def among(self, replicas: Sequence[Mapping[str, Tensor]], total: int) -> Decision:
        """Return this decision, or one by one where replicas differ in a buffer that is read.

        Args:
            replicas: buffers of each.
            total: micro-batches of an update.
        """
        reads, first = () if self.merged is None else self.merged.reads, replicas[0]
        if all(same_values(first[name], other[name]) for other in replicas[1:] for name in reads):
            return self
        return Decision.against(total, "the replicas' buffers differ")


@contextlib.contextmanager
def _python_numbers() -> Iterator[None]:
    """Python's and NumPy's random numbers go on where they were.

    Raises:
        RefusalError: forward or loss draw some.
    """
    generators = Generators()
    try:
        yield
    finally:
        drawn = generators.drawn()
        generators.restore()
    if drawn:
        raise RefusalError("forward or loss draw random numbers of Python or NumPy")


@dataclasses.dataclass(frozen=True)
class Merger:
    """Merges the micro-batches of an update, if that is proved to be the same mathematics.

    Attributes:
        spec: of the training program.
        recorded: what is recorded for a full micro-batch.
        example: such a micro-batch; what is merged holds on to it.
        state: trained parameters and all other state, in the order of their names.
    """

    spec: ProgramSpec
    recorded: TracedStep
    example: MicroBatch
    state: Sequence[Tensor]

    def decide(self, make: Make, recording: Callable[[], ContextManager[None]]) -> Decision:
        """Merge as many as memory allows, or none, with the reason.

        Args:
            make: records and lowers what runs.
            recording: entered where something is recorded.
        """
        step, total = self.recorded.micro.step, self.spec.plan.own_micro_batches_per_update
        try:
            written = self._check_request()
            with recording(), warnings.catch_warnings(), _python_numbers():
                warnings.simplefilter("ignore")
                with step.preserve_attributes():
                    merged = self._merged(total, make, written)
        except RefusalError as refusal:
            return Decision.against(total, str(refusal))
        size = merged.count * self.example.size
        how = f"one batch of {size} samples"
        if merged.count != total:
            how = f"{total // merged.count} batches of {size} samples, to bound the memory"
        return Decision(merged, f"The {total} micro-batches of an update run as {how}.")

    def _check_request(self) -> GraphSignature:
        """Refuse what needs no recording; return what the recorded micro-batch writes."""
        micro, example, config = self.recorded.micro, self.example, self.spec.config
        assert self.spec.loss is not None
        if self.spec.loss.in_module:
            raise RefusalError("the module computes its own loss, from a whole micro-batch")
        if config.loss_scale is not None:
            raise RefusalError("the loss is scaled")
        if config.accumulation_dtype is not None:
            raise RefusalError("accumulation_dtype needs a sum over micro-batches")
        if config.recompute:
            raise RefusalError("recompute saves memory, and a larger batch needs more")
        tensors = [*self.state, *example.leaves]
        if (
            computes_in_half(tensors)
            or autocast_state(tensors[0].device)[0]
            or config.precision.autocast
        ):
            raise RefusalError("half precision rounds a larger batch differently")
        for name, parameter in micro.step.named_parameters():
            if parameter._backward_hooks:
                hooked = public_name(name)
                raise RefusalError(f"a hook of {hooked!r} sees the gradient of every micro-batch")
        for leaf in example.leaves[: micro.forward_leaves]:
            if not leaf.dim() or leaf.shape[0] != example.size:
                raise RefusalError("forward takes a tensor that is not one row for each sample")
        return self._check_written()

    def _merged(self, total: int, make: Make, written: GraphSignature) -> BatchedStep:
        """Put as many micro-batches of an update into one as memory allows.

        Raises:
            RefusalError: none can be.
        """
        micro, example = self.recorded.micro, self.example
        small, outputs = self._forward(1)
        whole = self._same_program(small, outputs, written)
        count = self._count(total, peak_bytes(whole))
        large, large_outputs = self._forward(count)
        if not outputs.equals(large_outputs):
            raise RefusalError("what forward returns besides tensors depends on the batch")
        samples = (example.size, count * example.size)
        along = prove(small, large, len(micro.names), samples)
        _check_results(along)
        early = 1.0
        # Others may not merge theirs.
        if not self.spec.processes.is_distributed:
            early = GradientReduction(self.spec).early([example.size] * total)
        step = BatchedGradStep(micro, example, large, outputs, along, count, early)
        arguments = [*self.state, *step.arguments([example] * count)]
        with _explained("the loss can't be computed on parts of a larger batch"):
            run, lowered = make(step, arguments)
        reads = self._buffers_read(whole)
        blocks = len(micro.blocks)
        return BatchedStep(run, step, self.recorded, count, blocks, reads, step.factor, lowered)

    def _check_written(self) -> GraphSignature:
        assert self.recorded.graph is not None
        written = GraphSignature.of(self.recorded.graph)
        if written.drawn is not None:
            raise RefusalError(
                f"{written.drawn} draws random numbers, other ones in each micro-batch"
            )
        if written.changed is None:
            return written
        names = self.recorded.micro.names
        if written.changed < len(names):
            name = public_name(names[written.changed])
            raise RefusalError(f"{name!r} is changed by every micro-batch")
        raise RefusalError("the batch itself is changed in place")

    def _forward(self, count: int) -> Tuple[fx.GraphModule, OutputShape]:
        """The module's forward for so many micro-batches, recorded."""
        micro = self.recorded.micro
        leaves = self.example.leaves[: micro.forward_leaves]
        cast = with_inputs_in(micro.precision, (list(leaves), None, None, None))[0]
        arguments = [*self.state, *(torch.cat([leaf] * count) for leaf in cast)]
        forward = Forward(micro)
        with _explained(f"forward can't take {count * self.example.size} samples at once"):
            graph = capture(forward, arguments)
        if forward.has_logged:
            raise RefusalError("forward logs values of every micro-batch")
        return graph, forward.outputs

    def _same_program(
        self, forward: fx.GraphModule, outputs: OutputShape, written: GraphSignature
    ) -> fx.GraphModule:
        """Check that forward's operators and their derivatives are all that is traced.

        Hooks, derivatives of one's own and layers whose gradient is left out are seen by this.
        """
        micro = self.recorded.micro
        again = GradStep(
            Replayed(micro.step, forward, outputs),
            micro.trained,
            micro.fixed,
            self.example,
            True,
            micro.want_outputs,
            lambda names: micro.blocks,
            micro.precision,
        )
        with _explained("the gradient of forward is not that of its operators"):
            graph = capture(again, [*self.state, *self.example.leaves])
        if again.with_gradient != micro.with_gradient or not GraphSignature.of(graph).equals(
            written
        ):
            raise RefusalError("the gradient of forward is not that of its operators")
        return graph

    def _count(self, total: int, most: int) -> int:
        """The largest number of micro-batches that divides an update and fits into memory."""
        fitting = [n for n in range(2, total + 1) if not total % n and n * most <= MOST_BYTES]
        if not fitting:
            limit = f"{MOST_BYTES / 2**20:.3g} MiB"
            raise RefusalError(f"two of them at once would hold more than {limit} of values")
        return fitting[-1]

    def _buffers_read(self, graph: fx.GraphModule) -> Tuple[str, ...]:
        micro = self.recorded.micro
        buffers = {name for name, _ in micro.step.named_buffers()}
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        named = zip(micro.names, placeholders)
        return tuple(name for name, node in named if name in buffers and node.users)


def _check_results(along: Sequence[State]) -> None:
    """The loss gets a part of each result for each micro-batch."""
    for state in along:
        if state != NOT_MAPPED and not (isinstance(state, BatchDim) and state.outer == 1):
            raise RefusalError("an output of forward can't be cut into those of micro-batches")


@contextlib.contextmanager
def _explained(reason: str) -> Iterator[None]:
    """Turn errors that the user's code raises on a larger batch into a refusal."""
    try:
        yield
    except RefusalError:
        raise
    except Exception as error:
        raise RefusalError(reason) from error
