"""One compiled program: a combined batch goes in, the results of its micro-batches come out."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.batch import MicroBatch
from ipufit.engines.ipu.device import OWNER
from ipufit.engines.ipu.failures import translate_errors
from ipufit.engines.ipu.size import Size
from ipufit.engines.ipu.step import IpuStep, Traced
from ipufit.errors import DataError
from ipufit.tracing.fingerprint import note_writes
from ipufit.tracing.grad_step import ReportedScalars, preserve_attributes
from ipufit.tracing.untraced_random import record_alone, refuse_draws
from ipufit.utils.console import warn_user

__all__ = ["Executable", "Result", "cut_rows"]

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
        found = []
        if self.size.padding != "none":
            found.append(torch.tensor(list(shares), dtype=dtype))
        if self.size.padding == "samples":
            places = torch.arange(self.size.micro_batch)
            found.append(torch.cat([(places < size).to(dtype) for size in sizes]))
        return found

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
