"""One forward pass without values, to see into how many stages a module divides itself."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch
from ipufit.errors import CaptureError
from ipufit.losses import Loss
from ipufit.partition.partition import Partition
from ipufit.partition.stage_context import followed
from ipufit.utils import tree
from ipufit.utils.random_streams import isolated
from ipufit.utils.state import call_with, eval_mode, train_mode

__all__ = ["stages_of_blocks"]


def stages_of_blocks(
    partition: Optional[Partition],
    module: nn.Module,
    loss: Loss,
    batch: MicroBatch,
    is_training: bool,
) -> int:
    """Stages of the pipeline that the module's own blocks make, as PopTorch counts them.

    A module that goes back to an earlier IPU has more of them than IPUs.

    Args:
        partition: that leaves it to the module; None where that is thought to be on one IPU.
        module: the user's.
        loss: its normal form.
        batch: of its tensors only shape and dtype matter.
        is_training: the mode of the pass.

    Returns:
        As many as IPUs where it can't be seen: of blocks of the SDK, or if the module needs values.

    Raises:
        UncountedError: the blocks take another number of IPUs.
        PartitionError: the blocks contradict the partition.
    """
    # Imported here: the engine builds on the partition.
    from ipufit.tracing.capture import capture
    from ipufit.tracing.grad_step import ModuleWithLoss, attributes_kept

    step = ModuleWithLoss(module, loss)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    named = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    leaves = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in batch.leaves]
    found = [1 if partition is None else partition.ipus]

    def run(*tensors: Tensor) -> Tuple[Tensor, ...]:
        state = dict(zip(named, tensors))
        inputs = tree.unflatten(tensors[len(named) :], batch.structure)
        with torch.no_grad(), followed(partition, module) as own:
            call_with(step, state, (inputs, state, False))
        if own.entered():
            found[0] = own.stages()
        return ()

    values: Sequence[Tensor] = [*(tensor.detach() for tensor in named.values()), *leaves]
    mode = (train_mode if is_training else eval_mode)(module, step.loss_module)
    try:
        with isolated(device), mode, attributes_kept(step):
            capture(run, values)
    except CaptureError:
        # Whatever runs the module says what it can't do.
        pass
    return found[0]
