"""``detect_nan=True``: notice what is not finite in its own update, and say where it began."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Sequence, Tuple

from torch import Tensor

from ipufit.core.jit_modes import INDUCTOR
from ipufit.core.train_config import TrainConfig
from ipufit.engines.embedded.training_state import LiveState
from ipufit.errors import ConfigurationError, NonFiniteLossError
from ipufit.processes import current
from ipufit.tracing.grad_step import public_name

if TYPE_CHECKING:
    from ipufit.engines.embedded.replay_update import Replay
    from ipufit.engines.embedded.update_runner import Update

__all__ = [
    "explained",
    "first_non_finite",
    "refuse_detection",
    "refuse_gradients",
    "refuse_weights",
]

_BEFORE = "The weights, buffers and optimizer state are those from before that update."


def refuse_detection(config: TrainConfig) -> None:
    """Make sure that an update can be run again operator by operator.

    Raises:
        ConfigurationError: it can't.
    """
    if config.jit == INDUCTOR:
        raise ConfigurationError(
            "detect_nan=True looks at every update while it is made, but jit='inductor' compiles "
            "whole updates, got both. Leave one of them out."
        )
    processes = current()
    if processes.is_distributed:
        raise ConfigurationError(
            "detect_nan=True works in one process, but this is process "
            f"{processes.process_id} of {processes.num_processes}. Leave it out, or train in one "
            "process with ipus= as large."
        )


def refuse_gradients(live: LiveState, gradients: Sequence[Tensor]) -> None:
    """Make sure that the gradients of the coming update are finite.

    Raises:
        NonFiniteLossError: they are not.
    """
    name, value = first_non_finite(live, gradients)
    if value is not None:
        raise NonFiniteLossError(
            f"the gradient must be finite, but that of {name!r} became {value} in update "
            f"{live.updates}. {_BEFORE}",
            live.updates,
            value,
        )


def refuse_weights(live: LiveState) -> None:
    """Make sure that the weights of the update that was just applied are finite.

    Raises:
        NonFiniteLossError: they are not; it is for the caller to go back.
    """
    name, value = first_non_finite(live, live.storage.flats)
    if value is not None:
        # Imported here: few runs come so far.
        from ipufit.errors import NonFiniteValue

        raise NonFiniteLossError(
            f"the weights must be finite, but {name!r} became {value} in update {live.updates}. "
            f"{_BEFORE}",
            live.updates,
            value,
            NonFiniteValue("optimizer", parameter=name),
        )


def first_non_finite(
    live: LiveState, flats: Sequence[Tensor]
) -> Tuple[Optional[str], Optional[float]]:
    """The first parameter with a value that is not finite in flat tensors, and the value.

    Args:
        live: lays them out.
        flats: weights or gradients.
    """
    for block, flat in zip(live.storage.blocks, flats):
        if bool(flat.isfinite().all()):
            continue
        for slot in block.slots:
            values = slot.view(flat)
            bad = values[~values.isfinite()]
            if bad.numel():
                return public_name(slot.name), float(bad.reshape(-1)[0])
    return None, None


def explained(
    error: NonFiniteLossError, replay: Replay, update: Update, offset: int
) -> NonFiniteLossError:
    """The same error, with where it began.

    Args:
        error: of the coming update.
        replay: from the state before it.
        update: its micro-batches.
        offset: samples of the execution before them.
    """
    found = error.found or replay.find(update, offset)
    text = f"{str(error).partition(_BEFORE)[0]}{_BEFORE} {found.describe()}"
    return NonFiniteLossError(text, error.update, error.value, found)
