"""One compiled program: a combined batch goes in, the results of its micro-batches come out."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.logged_values import LogRule, merge_rules
from ipufit.core.train_config import outputs_wanted
from ipufit.engines.ipu.device import OWNER, translate_errors
from ipufit.engines.ipu.size import Size
from ipufit.engines.ipu.step import IpuStep, Traced
from ipufit.engines.program import ExecutionResult, ProgramSpec
from ipufit.errors import DataError
from ipufit.tracing.fingerprint import note_writes
from ipufit.tracing.grad_step import ReportedScalars, preserve_attributes
from ipufit.tracing.untraced_random import record_alone, refuse_draws
from ipufit.utils import tree
from ipufit.utils.console import warn_user

__all__ = ["Executable", "Result", "anchors_of", "cut_rows"]

_LARGEST = 2**31 - 1


@dataclasses.dataclass
class Result:
    """The results of one micro-batch.

    Attributes:
        numbers: what it reports, float64; empty when predicting.
        reported: what these are; a smaller micro-batch may log other values.
        outputs: the module's outputs; None when nobody wants them.
    """

    numbers: List[float]
    reported: ReportedScalars
    outputs: Any = None


class Executable:
    """A step with its executor.

    Args:
        sdk: PopTorch.
        step: what it runs.
        executor: PopTorch's.
        size: of a call.
        wide: whether float64 and int64 go through as they are, as no device lets them.
    """

    def __init__(self, sdk: Any, step: IpuStep, executor: Any, size: Size, wide: bool) -> None:
        self.step = step
        self.executor = executor
        self.size = size
        self._sdk = sdk
        self._wide = wide

    @property
    def traced(self) -> Traced:
        """The facts about the step that its compilation has shown."""
        return self.step.traced

    def compile(self, example: MicroBatch) -> None:
        """Compile for micro-batches like this one; attributes that forward sets stay as they were.

        Warns:
            UserWarning: it sets some.
        """
        batch = [example] * self.size.micro_batches
        extra = self._padding([1.0] * len(batch), [example.size] * len(batch))
        arguments = [*self._combined(batch), *extra]
        whole, step = self.step.whole(), self.step

        def record() -> fx.GraphModule:
            return record_alone(whole, example, step.trains, step.reports, step.precision)

        watched = refuse_draws(whole, record, runs_eagerly=False)
        with preserve_attributes(whole), note_writes(whole), watched, translate_errors(
            self._sdk, "compiling"
        ):
            OWNER.compile(self.executor, arguments)
        _warn_of_attributes(self.traced.attributes)

    def run(
        self,
        batch: Sequence[MicroBatch],
        seed: int,
        shares: Optional[Sequence[float]] = None,
        sizes: Optional[Sequence[int]] = None,
    ) -> List[Result]:
        """One call.

        Args:
            batch: as many micro-batches as the size says, all full.
            seed: of the first iteration's random numbers.
            shares: what the gradient of each is multiplied with, where they may be padding.
            sizes: how many samples of each count.
        """
        count = len(batch)
        assert count == self.size.micro_batches, "a program has one shape"
        extra = self._padding(shares or [1.0] * count, sizes or [self.size.micro_batch] * count)
        arguments = [*self._combined(batch), *extra]
        with translate_errors(self._sdk, "running"):
            self.executor.rng_state = [seed]
            returned = self.executor(*arguments)
        return self._results(list(returned), sizes or [self.size.micro_batch] * count)

    def _padding(self, shares: Sequence[float], sizes: Sequence[int]) -> List[Tensor]:
        dtype = torch.float64 if self._wide else torch.float32
        padding_inputs = []
        if self.size.padding != "none":
            padding_inputs.append(torch.tensor(list(shares), dtype=dtype))
        if self.size.padding == "samples":
            places = torch.arange(self.size.micro_batch)
            padding_inputs.append(torch.cat([(places < size).to(dtype) for size in sizes]))
        return padding_inputs

    def _combined(self, batch: Sequence[MicroBatch]) -> List[Tensor]:
        leaves = []
        for each in zip(*(micro_batch.leaves for micro_batch in batch)):
            whole = torch.cat(each) if each[0].dim() else torch.stack(each)
            leaves.append(self._checked(whole.detach().cpu()))
        return leaves

    def _checked(self, leaf: Tensor) -> Tensor:
        """A tensor of the batch, as long as a device holds what it holds.

        Raises:
            DataError: it does not.
        """
        if self._wide:
            return leaf
        if leaf.dtype == torch.float64:
            raise DataError(
                "an IPU computes in float32 at most, but the data is float64. NumPy makes float64 "
                "where nothing is said: convert it with array.astype('float32') or tensor.float()."
            )
        if leaf.dtype == torch.int64 and leaf.numel() and int(leaf.abs().max()) > _LARGEST:
            raise DataError(
                f"an IPU has integers of 32 bits, but the data holds {int(leaf.abs().max())}. Map "
                "such numbers to smaller ones in the dataset."
            )
        return leaf

    def _results(self, returned: List[Tensor], sizes: Sequence[int]) -> List[Result]:
        count = len(sizes)
        results = [Result([], self.traced.reported) for _ in range(count)]
        if self.step.reports:
            numbers = returned.pop(0).to(torch.float64).reshape(count, -1)
            results = [Result(row, self.traced.reported) for row in numbers.tolist()]
            if self.step.trains:
                returned.pop(0)
        if self.step.wants_outputs:
            cut = [_cut(*each, count) for each in zip(returned, self.traced.shapes)]
            for place, result in enumerate(results):
                tensors = [pieces[place] for pieces in cut]
                tensors = cut_rows(tensors, self.size.micro_batch, sizes[place])
                result.outputs = self.traced.outputs.rebuild(tensors)
        return results


def _cut(tensor: Tensor, shape: Tuple[int, ...], count: int) -> List[Tensor]:
    """The results of each micro-batch, of shape ``shape``, out of those of all."""
    if count == 1 or tuple(tensor.shape) == tuple(shape):
        # An output that the inputs do not go into comes back once.
        return [tensor.reshape(shape) for _ in range(count)]
    return [piece.reshape(shape) for piece in tensor.chunk(count)]


def cut_rows(tensors: Sequence[Tensor], rows: int, samples: int) -> List[Tensor]:
    """The first samples of outputs that have a row for each."""
    if samples == rows:
        return list(tensors)
    return [t[:samples] if t.dim() and t.shape[0] == rows else t for t in tensors]


def _warn_of_attributes(changed: Sequence[str]) -> None:
    if changed:
        warn_user(
            f"forward sets {', '.join(changed)}, but it runs once, to be traced, and "
            "the attribute keeps the value that it had. To carry a value from one micro-batch to "
            "the next, register a buffer of floating point and change it in place.",
        )


def anchors_of(
    results: Sequence[Result],
    spec: ProgramSpec,
    settings: Mapping[str, float],
) -> ExecutionResult:
    """Put the results of the micro-batches of an execution together.

    Args:
        results: of each micro-batch, in stream order.
        spec: which outputs are wanted.
        settings: what the program says of itself.
    """
    outputs, places = _outputs(results, spec)
    has_loss = spec.mode is not Mode.PREDICT
    logged: List[Dict[str, float]] = []
    rules: Dict[str, LogRule] = {}
    if any(result.reported.rules for result in results):
        logged = [_logged(result) for result in results]
        for result in results:
            rules = merge_rules(rules, result.reported.rules)
    counted = any(result.reported.counted for result in results)
    return ExecutionResult(
        torch.tensor([r.numbers[0] for r in results] if has_loss else [], dtype=torch.float64),
        outputs,
        places,
        _column(results, 1) if counted else None,
        logged,
        rules,
        dict(settings),
    )


def _logged(result: Result) -> Dict[str, float]:
    first = 2 if result.reported.counted else 1
    return dict(zip(result.reported.rules, result.numbers[first:]))


def _column(results: Sequence[Result], place: int) -> Tensor:
    return torch.tensor([result.numbers[place] for result in results], dtype=torch.float64)


def _outputs(results: Sequence[Result], spec: ProgramSpec) -> Tuple[List[Any], List[int]]:
    if not spec.want_outputs:
        return [], []
    if spec.mode is not Mode.TRAIN:
        return [result.outputs for result in results], list(range(len(results)))
    plan, wanted = spec.plan, spec.config.outputs
    if wanted.mode == "sum":
        return [
            _sum([result.outputs for result in results[replica :: plan.replicas]])
            for replica in range(min(plan.replicas, len(results)))
        ], []
    places = outputs_wanted(wanted, len(results), plan.own_micro_batches_per_update, plan.replicas)
    return [results[place].outputs for place in places], places


def _sum(outputs: Sequence[Any]) -> Any:
    """Added up; a smaller last micro-batch adds to the rows that it has."""
    leaves, structure = tree.flatten(outputs[0])
    totals = [_to_add_to(leaf) for leaf in leaves]
    for each in outputs[1:]:
        for total, leaf in zip(totals, tree.flatten(each)[0]):
            if isinstance(total, Tensor):
                rows = total[: leaf.shape[0]] if leaf.dim() else total
                rows.add_(leaf)
    return tree.unflatten(totals, structure)


def _to_add_to(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    is_number = leaf.is_floating_point() or leaf.is_complex()
    return leaf.clone() if is_number else leaf.to(torch.int64, copy=True)
