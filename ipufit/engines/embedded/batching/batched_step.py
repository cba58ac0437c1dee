"""The functions that are recorded on the way to a batched step, and the step that updates run."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.batch import MicroBatch
from ipufit.core.logged_values import Entries, collecting
from ipufit.core.outputs import drop_ignored_outputs
from ipufit.core.precision import with_inputs_in
from ipufit.engines.embedded.batching.batch_dim import BatchDim, RefusalError, State
from ipufit.engines.embedded.passes.select_kernels import Lowered
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.losses import LossTerm
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.grad_step import MicroBatchStep, ModuleWithLoss, OutputShape, ReportedScalars
from ipufit.tracing.recording import mark_backward_pass
from ipufit.utils import tree
from ipufit.utils.state import call_with


class _Net(ModuleWithLoss):
    """The user's module alone, with the names that it has beside its loss."""

    def forward(self, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        """The module's outputs, as far as they are handed back."""
        return drop_ignored_outputs(self.net, self.net(*args, **kwargs))


class Forward:
    """Forward of a module as a function of state and inputs.

    Args:
        micro: what is recorded for a micro-batch of the module.

    Attributes:
        outputs: how the tensors become the module's outputs, after a call.
        has_logged: whether the module reported a value.
    """

    def __init__(self, micro: MicroBatchStep) -> None:
        self._micro = micro
        self._net = _Net(micro.step.net, micro.step.loss)
        self.outputs = OutputShape(None)
        self.has_logged = False

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        """Run forward, and return the tensors among the outputs."""
        structures, begin = self._micro.structure.children, len(self._micro.names)
        places = structures[0].leaves + begin
        args = tree.unflatten(tensors[begin:places], structures[0])
        kwargs = tree.unflatten(tensors[places:], structures[1])
        with torch.enable_grad(), collecting() as entries:
            outputs = call_with(self._net, self._micro.state_of(tensors), (args, kwargs))
        self.has_logged = bool(entries)
        self.outputs = OutputShape(outputs)
        tensors_out = [tensor.detach() for tensor in self.outputs.tensors]
        self.outputs.forget()
        return tensors_out


class Replayed(ModuleWithLoss):
    """The user's loss behind a recording of the user's module.

    Args:
        step: module and loss.
        forward: the recording.
        outputs: how its results become the module's outputs.
    """

    def __init__(self, step: ModuleWithLoss, forward: fx.GraphModule, outputs: OutputShape) -> None:
        super().__init__(step.net, step.loss)
        # In a tuple it is no part of this module.
        self._recording = (forward,)
        self._outputs = outputs

    def forward(
        self, batch: Sequence[object], tensors: Mapping[str, Tensor], with_loss: bool
    ) -> Tuple[tree.Tree, tree.Tree]:
        """Outputs and loss of a micro-batch."""
        args, kwargs, target, sample_weight = batch
        leaves = [*tree.flatten(args)[0], *tree.flatten(kwargs)[0]]
        outputs = self._outputs.rebuild(self.run(tensors, leaves))
        return outputs, self.loss_of(outputs, target, sample_weight)

    def run(self, tensors: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> List[Tensor]:
        """Run the recording."""
        return list(self._recording[0](*tensors.values(), *leaves))

    def loss_of(self, outputs: object, target: object, sample_weight: object) -> LossTerm:
        """Compute the loss of one micro-batch."""
        assert self.loss is not None
        return self.loss(outputs, target, sample_weight)


# Of one micro-batch: its outputs, its loss, and what the loss has logged.
_Found = Tuple[tree.Tree, LossTerm, Entries]


class _Chunks(Replayed):
    """Forward once, and the loss of each micro-batch."""

    def forward(  # type: ignore[override]
        self,
        leaves: Sequence[Tensor],
        others: Sequence[Tuple[tree.Tree, tree.Tree]],
        target: Optional[Tensor],
        tensors: Mapping[str, Tensor],
        along: Sequence[State],
        samples: int,
    ) -> Tuple[List[_Found], Optional[Tensor]]:
        """Run forward and losses; the losses are one tensor where that is possible.

        Args:
            leaves: forward's, of all micro-batches in one.
            others: target and weights of each.
            target: that of all in one, where there is such a tensor, and no weights.
            tensors: weights and other state.
            along: where the samples are in each result of forward.
            samples: of each micro-batch.
        """
        results = self.run(tensors, leaves)
        parts = [
            torch.split(result, samples * state.inner, state.dim)
            if isinstance(state, BatchDim)
            else (result,) * len(others)
            for result, state in zip(results, along)
        ]
        outputs = [
            self._outputs.rebuild([part[place] for part in parts]) for place in range(len(others))
        ]
        values = None
        if target is not None and list(along) == [BatchDim(0)]:
            prediction = self._outputs.rebuild(results)
            assert self.loss is not None
            values = self.loss.of_micro_batches(prediction, target, len(others))
        if values is not None:
            terms = [LossTerm(value) for value in values.unbind()]
            return [(each, term, {}) for each, term in zip(outputs, terms)], values
        batch_results = []
        for each, (target, sample_weight) in zip(outputs, others):
            with collecting() as entries:
                term = self.loss_of(each, target, sample_weight)
            batch_results.append((each, term, entries))
        return batch_results, None


class BatchedGradStep:
    """Several micro-batches at once: forward on all samples, the loss on each micro-batch.

    Called with (trained weights, other state, what :meth:`arguments` makes of the micro-batches),
    it returns ``[numbers, *outputs of the first micro-batch, ..., *flat gradients]``. The numbers
    have a row for each micro-batch; the gradients are the sum over the micro-batches of that of
    each loss, times its count where it has one, or times a factor that is known before.

    Args:
        micro: what is recorded for a full micro-batch.
        example: such a micro-batch.
        forward: recorded for all samples.
        outputs: how its results become the module's outputs.
        along: where the samples are in each result.
        count: how many micro-batches there are.
        early: a factor for losses that have no count.

    Attributes:
        reported: what the numbers of each micro-batch are.
        factor: the one that was used, once it has run.
    """

    def __init__(
        self,
        micro: MicroBatchStep,
        example: MicroBatch,
        forward: fx.GraphModule,
        outputs: OutputShape,
        along: Sequence[State],
        count: int,
        early: float,
    ) -> None:
        self._micro = micro
        self._chunks = _Chunks(micro.step, forward, outputs)
        self._along = list(along)
        self._example = example
        self._count = count
        # Leaves with a row for each sample, which come in one tensor.
        self._rows = [i for i, leaf in enumerate(example.leaves) if _has_rows(leaf, example.size)]
        self.reported: List[ReportedScalars] = []
        self._early = early
        self.factor = 1.0

    def arguments(self, batches: Sequence[MicroBatch]) -> List[Tensor]:
        """The leaves of all micro-batches; each in one tensor where it has rows."""
        rows = dict(zip(self._rows, MicroBatch.concat_leaves(batches, self._rows)))
        leaves: List[Tensor] = []
        for i in range(len(self._example.leaves)):
            leaves += [rows[i]] if i in rows else [batch.leaves[i] for batch in batches]
        return leaves

    def _parts(self, leaves: Sequence[Tensor]) -> List[Sequence[Tensor]]:
        """Split the leaves of the larger batch into those of its micro-batches."""
        source = iter(leaves)
        parts: List[Sequence[Tensor]] = []
        for i in range(len(self._example.leaves)):
            if i in self._rows:
                parts.append(torch.split(next(source), self._example.size))
            else:
                parts.append([next(source) for _ in range(self._count)])
        return parts

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        """Run the recording of forward, the losses, and autograd, on these tensors."""
        state = self._micro.state_of(tensors)
        batch_leaves = tensors[len(state) :]
        forward_count = self._micro.forward_leaves
        with torch.enable_grad():
            others = []
            for batch in zip(*self._parts(batch_leaves)):
                _, _, target, weight = tree.unflatten(batch, self._example.structure)
                others.append(self._cast(target, weight))
            # Of forward's leaves each is one tensor, or nothing would have been merged.
            leaves = list(self._cast(list(batch_leaves[:forward_count]), None)[0])
            whole = self._cast(batch_leaves[forward_count], None)[0] if self._is_plain else None
            arguments = (leaves, others, whole, state, self._along, self._example.size)
            terms, values = call_with(self._chunks, state, arguments)
            if values is not None:
                numbers, shares = values.detach(), [torch.full_like(values, self._early)]
                self.factor = self._early
                self.reported = [ReportedScalars()] * self._count
            else:
                kinds = [ReportedScalars.of(term, entries) for _, term, entries in terms]
                numbers = torch.stack([each for _, each in kinds])
                self.reported = [kind for kind, _ in kinds]
                counted = any(term.count is not None for _, term, _ in terms)
                self.factor = 1.0 if counted else self._early
                shares = [_share(term, self.factor) for _, term, _ in terms]
            losses = [term.value for _, term, _ in terms] if values is None else [values]
            gradients = self._gradients(losses, shares, state)
        outputs: List[Tensor] = []
        if self._micro.want_outputs:
            storages = {storage_id(tensor) for tensor in tensors} - {0}
            for each, _, _ in terms:
                for tensor in OutputShape(each).tensors:
                    shared = storage_id(tensor) in storages
                    outputs.append(tensor.detach().clone() if shared else tensor.detach())
        return [numbers, *outputs, *gradients]

    @property
    def _is_plain(self) -> bool:
        """Tell whether the loss gets one tensor, a row for each sample, and no weights."""
        target, weight = self._example.structure.children[2:]
        is_tensor = target.kind is None and self._micro.forward_leaves in self._rows
        return is_tensor and not weight.leaves

    def _cast(self, value: object, weight: object) -> Tuple[tree.Tree, tree.Tree]:
        """In the precision's type, but for the weights of samples."""
        cast = with_inputs_in(self._micro.precision, (value, None, None, weight))
        return cast[0], cast[3]

    def _gradients(
        self, losses: Sequence[Tensor], shares: Sequence[Tensor], state: Dict[str, Tensor]
    ) -> List[Tensor]:
        micro, trained = self._micro, self._micro.trained
        weights = [state[name] for name in trained]
        with mark_backward_pass():
            gradients = torch.autograd.grad(losses, weights, shares, allow_unused=True)
        by_name = {
            name: gradient for name, gradient in zip(trained, gradients) if gradient is not None
        }
        if set(by_name) != set(micro.with_gradient):
            raise RefusalError("a gradient reaches other parameters")
        return [block.gather(by_name) for block in micro.blocks]


def _has_rows(leaf: Tensor, size: int) -> bool:
    return leaf.dim() > 0 and leaf.shape[0] == size


def _share(term: LossTerm, early: float) -> Tensor:
    """The factor of a loss in the sum over micro-batches."""
    if term.count is None:
        return torch.full_like(term.value, early)
    return term.count.to(term.value.dtype)


@dataclasses.dataclass(frozen=True)
class BatchedStep:
    """A recording of several micro-batches in one, ready to run.

    Attributes:
        run: takes weights, other state and what the step makes of the leaves.
        step: what was recorded.
        base: what is recorded for one of its micro-batches.
        count: how many it takes.
        blocks: how many flat gradients it returns.
        reads: names of the buffers that it reads, of which it takes those of one replica.
        factor: what its gradients are multiplied with.
        lowered: how it runs.
    """

    run: Callable[..., List[Tensor]]
    step: BatchedGradStep
    base: TracedStep
    count: int
    blocks: int
    reads: Tuple[str, ...]
    factor: float
    lowered: Lowered

    def takes(self, recorded: Sequence[TracedStep]) -> bool:
        """Tell whether an update of micro-batches traced like this can be made of it."""
        whole = bool(recorded) and not len(recorded) % self.count
        return whole and all(each is self.base for each in recorded)

    def __call__(
        self, state: Sequence[Tensor], batches: Sequence[MicroBatch]
    ) -> Tuple[Tensor, List[Tensor], List[Tensor]]:
        """Run on as many micro-batches as it takes.

        Returns:
            A row of numbers for each; the outputs of the first, the second, and so on, none where
            nobody wants them; and the sum of their gradients, each times its count if it has one, a
            flat tensor per block.
        """
        numbers, *rest = self.run(*state, *self.step.arguments(batches))
        return numbers, rest[: -self.blocks], rest[-self.blocks :]
