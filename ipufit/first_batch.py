"""What is tried out with the first micro-batch, so that every fault shows before any work."""

from __future__ import annotations

import inspect
from typing import Any, Optional

import torch
from torch import nn

from ipufit import tree
from ipufit.data.source import Source
from ipufit.errors import DataError, MetricError, PlanError
from ipufit.losses import Loss
from ipufit.meter import metric_target
from ipufit.metrics import MetricSet
from ipufit.plan import Plan
from ipufit.program import MicroBatch, Prepared, Program
from ipufit.randomness import isolated

__all__ = ["check_call", "prepare_tail", "probe"]


def check_call(module: nn.Module, first: MicroBatch, loss: Loss, source: Source) -> None:
    """Hold the batch against the signature of forward, before torch's own error for it.

    Raises:
        DataError: forward can't be called with it.
    """
    args, kwargs, _, _ = first.unpack()
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [*(["1 input"] if len(args) == 1 else [f"{len(args)} inputs"] if args else [])]
        given += [f"{name}=" for name in kwargs]
        cure = "Bring the batch into the form that forward takes."
        if loss.in_module:
            cure = (
                "With loss=None every part of the batch goes to forward: pass loss= to compile, or "
                "let forward take the target and return (outputs, loss)."
            )
        raise DataError(
            f"{source.role}: {type(module).__name__}.forward{signature} can't take a batch of "
            f"{', '.join(given)}: {error}. {cure}"
        ) from error


def probe(metrics: MetricSet, outputs: Any, first: MicroBatch, loss: Loss) -> None:
    """Try the metrics on random numbers in the form of the outputs.

    Raises:
        MetricError: they can't take them, or there is no target.
    """

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.rand(leaf.shape, dtype=leaf.dtype, device="cpu")
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")

    target, sample_weight = metric_target(first.clone(), loss)
    if target is None:
        raise MetricError(
            f"the metrics {', '.join(metrics.names)} need a target, but the module computes "
            "its own loss and the batch has no last argument, 'labels' or 'target' to take for "
            "it. Leave the metrics out, or compute the loss outside the module."
        )
    with isolated(torch.device("cpu")):
        metrics.probe(tree.map_leaves(fill, outputs), target, first.size, sample_weight)


def prepare_tail(
    program: Program, plan: Plan, first: MicroBatch, source: Source
) -> Optional[Prepared]:
    """Build for a smaller last micro-batch too, so that a module that can't take it fails now.

    Returns:
        What was recorded for it; None where no micro-batch is smaller.

    Raises:
        DataError: the module can't take it.
    """
    size = plan.tail.last_micro_batch_size if plan.tail else first.size
    if plan.training and plan.fixed_updates is not None:
        size = source.smallest or first.size
    if size >= first.size:
        return None
    try:
        return program.prepare(first.cut(size))
    except PlanError:
        raise
    except Exception as error:
        raise DataError(
            f"the module must take every micro-batch of the {source.role}, but fails with the last "
            f"one of an epoch, which is smaller, {_n(size)} instead of {first.size}: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}. Choose "
            "another batch_size, or drop_last=True in the loader."
        ) from error


def _n(samples: int) -> str:
    return "1 sample" if samples == 1 else f"{samples} samples"
