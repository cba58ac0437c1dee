"""Errors about what is not finite: a loss; with ``detect_nan=True``, gradients and weights too."""

from __future__ import annotations

import math
from typing import Optional, Sequence, Tuple

from torch import Tensor

from ipufit.core.compile_arguments import INDUCTOR
from ipufit.core.train_config import TrainConfig
from ipufit.engines.embedded.training_state import TrainingState
from ipufit.errors import NAN_ADVICE, ConfigurationError, NonFiniteLossError, NonFiniteValue
from ipufit.processes import current
from ipufit.tracing.flat_storage import FlatBlock
from ipufit.tracing.grad_step import public_name

STATE_IS_FROM_BEFORE = "The weights, buffers and optimizer state are those from before that update."


def refuse_detection(config: TrainConfig) -> None:
    """Make sure that an update can be run again operator by operator.

    Raises:
        ConfigurationError: it can't.
    """
    if config.jit == INDUCTOR:
        raise ConfigurationError(
            "detect_nan=True inspects every update while it runs, but jit='inductor' compiles "
            "whole updates, got both. Leave one of them out."
        )
    processes = current()
    if processes.is_distributed:
        raise ConfigurationError(
            f"detect_nan=True works in one process, but this is process {processes.process_id} "
            f"of {processes.num_processes}. Leave it out, or train in one process with the same "
            "ipus=."
        )


def refuse_loss(live: TrainingState, value: float, title: str = "the loss") -> None:
    """Make sure that a loss of the coming update is a number.

    Args:
        live: the state before the update.
        value: of the loss.
        title: of the loss, for messages.

    Raises:
        NonFiniteLossError: it is not.
    """
    if math.isfinite(value):
        return
    cause = NAN_ADVICE
    if not all(bool(flat.isfinite().all()) for flat in live.storage.flats):
        cause = (
            "The weights were not finite before this update: an earlier update had a finite loss, "
            "but not a finite gradient. Look for a square root or a power at zero; with "
            "compile(detect_nan=True) the update, the layer and the samples are named."
        )
    raise NonFiniteLossError(
        f"{title} must be finite, but it became {value} in update {live.updates}. "
        f"{STATE_IS_FROM_BEFORE} {cause}",
        live.updates,
        value,
    )


def refuse_gradients(live: TrainingState, gradients: Sequence[Tensor]) -> None:
    """Make sure that the gradients of the coming update are finite.

    Raises:
        NonFiniteLossError: they are not.
    """
    name, value = first_non_finite(live.storage.blocks, gradients)
    if value is not None:
        raise NonFiniteLossError(
            f"the gradient must be finite, but that of {name!r} became {value} in update "
            f"{live.updates}. {STATE_IS_FROM_BEFORE}",
            live.updates,
            value,
        )


def refuse_weights(live: TrainingState) -> None:
    """Make sure that the weights of the update that was just applied are finite.

    Raises:
        NonFiniteLossError: they are not; it is for the caller to go back.
    """
    name, value = first_non_finite(live.storage.blocks, live.storage.flats)
    if value is not None:
        raise NonFiniteLossError(
            f"the weights must be finite, but {name!r} became {value} in update {live.updates}. "
            f"{STATE_IS_FROM_BEFORE}",
            live.updates,
            value,
            NonFiniteValue("optimizer", parameter=name),
        )


def first_non_finite(
    blocks: Sequence[FlatBlock], flats: Sequence[Tensor]
) -> Tuple[Optional[str], Optional[float]]:
    """The first parameter with a value that is not finite in flat tensors, and the value.

    Args:
        blocks: how they are laid out.
        flats: weights or gradients.
    """
    for block, flat in zip(blocks, flats):
        if bool(flat.isfinite().all()):
            continue
        for slot in block.slots:
            values = slot.view(flat)
            bad = values[~values.isfinite()]
            if bad.numel():
                return public_name(slot.name), float(bad.reshape(-1)[0])
    return None, None
