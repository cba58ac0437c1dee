"""How much one call of a compiled program does, and what of it is padding.

No sample is left out and none counts twice. Padding never makes an update of its own: momentum and
weight decay would move on.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch
from ipufit.core.logged_values import collecting
from ipufit.core.plan import Plan
from ipufit.core.precision import with_inputs_in
from ipufit.core.train_config import Precision
from ipufit.engines.program import ProgramSpec
from ipufit.errors import DataError
from ipufit.losses import Loss
from ipufit.utils import tree
from ipufit.utils.random_streams import isolated, seed_generators


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a call.

    Attributes:
        iterations: device iterations: weight updates when training.
        accumulation: micro-batches that a replica sums before an update.
        replicas: copies of the model.
        micro_batch: samples in a micro-batch.
        padding: what of a call may be padding: "none"; "micro-batches", whole ones, for which the
            program takes a coefficient; or "samples" as well, for which it takes their validity.
    """

    iterations: int
    accumulation: int
    replicas: int
    micro_batch: int
    padding: str = "none"

    @staticmethod
    def of(plan: Plan) -> Size:
        """The size of a full execution."""
        return Size(
            plan.device_iterations, plan.gradient_accumulation, plan.replicas, plan.micro_batch_size
        )

    @property
    def per_update(self) -> int:
        """Micro-batches of one update or device iteration."""
        return self.accumulation * self.replicas

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one call."""
        return self.iterations * self.per_update


def refuse_other_shapes(
    batches: Sequence[MicroBatch], example: Optional[MicroBatch], rule: str
) -> None:
    """Make sure that micro-batches have the shapes of an example, but for the number of samples.

    Args:
        batches: of an execution.
        example: whatever the programs were compiled for; None where there is nothing to compare.
        rule: why that is so, as the beginning of the message.

    Raises:
        DataError: one has other shapes.
    """
    if example is None:
        return
    for batch in batches:
        if batch.form != example.form:
            came, before = (
                ", ".join(str(tuple(leaf.shape)) for leaf in each.tensors)
                for each in (batch, example)
            )
            raise DataError(
                f"{rule}, but after tensors of shape {before} some of shape {came} came. Pad them "
                "to one shape in collate_fn, or use engine='embedded'."
            )


def padding_needed(sizes: Sequence[int], plan: Plan) -> str:
    """Return the padding that makes a full update of micro-batches of these sizes.

    Returns:
        "none", "micro-batches" or "samples", as in :class:`Size`.
    """
    if any(each != plan.micro_batch_size for each in sizes):
        return "samples"
    return "none" if len(sizes) == plan.micro_batches_per_update else "micro-batches"


def filled(
    update: Sequence[MicroBatch], size: Size, example: MicroBatch
) -> Tuple[List[MicroBatch], List[int]]:
    """Full micro-batches for a full update, and how many samples of each count.

    The padding repeats samples: like these they give finite numbers, which count zero times.

    Args:
        update: micro-batches of this process; of several, one may have none.
        size: of the program.
        example: what is repeated where there is none.
    """
    batch = [padded(each, size.micro_batch) for each in update]
    sizes = [each.size for each in update]
    missing = size.per_update - len(batch)
    repeated = batch[-1] if batch else padded(example, size.micro_batch)
    return batch + [repeated] * missing, sizes + [0] * missing


def padded(batch: MicroBatch, size: int) -> MicroBatch:
    """A micro-batch of this size, in which samples repeat.

    Raises:
        DataError: its tensors are not divided by samples.
    """
    if batch.size == size:
        return batch
    if not batch.has_rows:
        raise DataError(
            "on IPUs a smaller micro-batch is filled up with samples, so each tensor must have one "
            f"row per sample, but one of {batch.size} instead of {size} samples came, such as a "
            "list of images, that has not. Use drop_last=True in the loader, or engine='embedded'."
        )
    return _repeated(batch, batch.size, size)


def _repeated(batch: MicroBatch, rows: int, size: int) -> MicroBatch:
    """Make a micro-batch of this size of the first rows, over and over."""
    places = torch.arange(size) % rows
    leaves = tuple(leaf[places.to(leaf.device)] if leaf.dim() else leaf for leaf in batch.leaves)
    return MicroBatch(leaves, batch.structure, size)


def samples_stand_apart(spec: ProgramSpec, example: MicroBatch) -> bool:
    """Tell whether the loss of some samples is the same whatever samples stand beside them.

    Tried out with the module itself on the host, on copies: the outputs for the first half of the
    samples must not change by a bit when the others do. A module that carries something from batch
    to batch or logs values, a loss of one number, or anything that fails, does not pass.
    """
    half = example.size // 2
    if not half or spec.loss is None or spec.loss.in_module:
        return False
    try:
        with torch.no_grad(), isolated():
            net, loss = copy.deepcopy((spec.module, spec.loss))
            return _stand_apart(net, loss, spec.config.precision, example, half)
    except Exception:  # also the user's module's own, which may want the device
        return False


def _stand_apart(
    net: nn.Module, loss: Loss, precision: Precision, example: MicroBatch, half: int
) -> bool:
    results: List[Tuple[List[Tensor], Any]] = []
    other = _repeated(example, half, example.size)
    if all(torch.equal(a, b) for a, b in zip(example.leaves, other.leaves)):
        return False
    for batch in (example, other):
        seed_generators(0)
        unpacked = with_inputs_in(precision, batch.clone().unpack())
        args, kwargs, target, sample_weight = unpacked
        with collecting() as entries:
            outputs = net(*args, **kwargs)
            valid = (torch.arange(batch.size) < half).to(torch.float32)
            term = loss.without_padding(outputs, target, sample_weight, valid)
        if entries or term is None:
            return False
        tensors = [t for t in tree.flatten(outputs)[0] if isinstance(t, Tensor)]
        if any(not t.dim() or t.shape[0] != batch.size for t in tensors):
            return False
        results.append(([t[:half] for t in tensors], term.value))
    (first, one), (second, two) = results
    same = all(torch.equal(a, b) for a, b in zip(first, second))
    return same and bool(torch.isfinite(one)) and torch.equal(one, two)
