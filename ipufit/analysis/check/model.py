"""What ``Model.check`` does with its argument and what ``compile`` left."""

from __future__ import annotations

import types
from typing import Any, Optional

import torch
from torch import nn

from ipufit.analysis.check.check import check
from ipufit.analysis.check.report import CheckReport
from ipufit.core.batch import MicroBatch
from ipufit.core.train_config import Precision
from ipufit.data.source import Source
from ipufit.partition.partition import NOT_DIVIDED
from ipufit.tracing.user_lines import users_frame
from ipufit.training.sample_batch import no_batch
from ipufit.training.sanity_check import check_call
from ipufit.training.session import Session
from ipufit.training.summary import sample_of

__all__ = ["checked", "checked_sample"]


def checked(
    module: nn.Module, session: Optional[Session], x: Any, frame: Optional[types.FrameType]
) -> CheckReport:
    """Check a module on a batch.

    Args:
        module: the user's.
        session: None before ``compile``.
        x: a batch or a loader; None for the shapes of the last ``fit``.
        frame: of the caller.

    Raises:
        ConfigurationError: neither a batch nor an earlier ``fit``.
        DataError: the batch can't be fed.
    """
    own_loss = session is not None and session.loss.in_module
    if x is not None:
        casting = None if session is None else session.casting
        sample = sample_of(x, own_loss, "check", True, casting)
    elif session is not None and session.sample is not None:
        leaves = tuple(_random(leaf) for leaf in session.sample.leaves)
        sample = MicroBatch(leaves, session.sample.structure, session.sample.size)
    else:
        raise no_batch("check")
    return checked_sample(module, session, sample, frame)


def checked_sample(
    module: nn.Module,
    session: Optional[Session],
    sample: MicroBatch,
    frame: Optional[types.FrameType],
) -> CheckReport:
    """The same of a micro-batch that has been read already."""
    loss = session.loss if session is not None else None
    if loss is not None:
        check_call(module, sample, loss, Source([], "check"))
        if not loss.in_module and sample.unpack()[2] is None:
            loss = None
    precision = session.config.precision if session is not None else Precision()
    optimizer = session.optimizer if session is not None else None
    caller = users_frame(frame, everywhere=True)
    partitions = session.partitions if session is not None else NOT_DIVIDED
    return check(module, loss, sample, precision, optimizer, caller, partitions)


def _random(leaf: torch.Tensor) -> torch.Tensor:
    """Values for a tensor of which only the shape is known."""
    if leaf.is_floating_point() or leaf.is_complex():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(leaf.shape, dtype=torch.float32, generator=generator).to(leaf.dtype)
    return torch.zeros(leaf.shape, dtype=leaf.dtype)
