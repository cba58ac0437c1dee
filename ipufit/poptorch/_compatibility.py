"""Check that a program from a file is compatible with the model that loads it."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from torch import Tensor

from ipufit.poptorch._errors import error
from ipufit.poptorch._files import Path
from ipufit.poptorch._loss_scale import ScalingSettings
from ipufit.poptorch._replica_grouping import ReplicaGrouping
from ipufit.poptorch._saving import Saved
from ipufit.poptorch.options import Options

__all__ = ["check_fits", "check_state"]


# Of the options, those that a program is compiled for, by the setter.
_COMPILED_FOR = {
    "broadcast_buffers": "broadcastBuffers",
    "device_iterations": "deviceIterations",
    "input_cgt": "inputReplicaGrouping",
    "input_group_size": "inputReplicaGrouping",
    "output_mode": "outputMode",
    "output_return_period": "outputMode",
    "replication_factor": "replicationFactor",
}


_COMPILED_FOR_IN_TRAINING = {
    "accumulation_and_replication_reduction_type": "accumulationAndReplicationReductionType",
    "gradient_accumulation": "gradientAccumulation",
}


def check_fits(
    saved: Saved,
    filename: Path,
    training: bool,
    options: Options,
    groupings: Mapping[str, ReplicaGrouping],
) -> None:
    """Refuse a program that was compiled for another kind of model, or other options.

    Args:
        saved: content of the file.
        filename: path of the file, for messages.
        training, options, groupings: those of the executor.

    Raises:
        Error: what differs, and how.
    """
    if saved.recorded.trace.training != training:
        theirs, ours = ("inference", "training") if training else ("training", "inference")
        raise error(
            f"{filename} holds a program for {theirs}, and this model is for {ours}. Wrap the "
            f"module with poptorch.{theirs}Model."
        )
    differing = _differing(saved.options, options, training)
    if differing:
        raise error(
            f"{filename} was compiled with other options than these of the model: "
            f"{'; '.join(differing)}. Set them alike, or compile the model anew."
        )
    if dict(saved.groupings) != dict(groupings):
        raise error(
            f"{filename} was compiled with replicaGrouping of "
            f"{', '.join(sorted(saved.groupings)) or 'no parameter'}, and the model has it for "
            f"{', '.join(sorted(groupings)) or 'none'}. Set it alike before loadExecutable()."
        )


def _differing(saved: Options, current: Options, training: bool) -> List[str]:
    texts = []
    groups: List[Any] = [(saved, current, _COMPILED_FOR)]
    if training:
        groups.append((saved.Training, current.Training, _COMPILED_FOR_IN_TRAINING))
    for theirs, ours, names in groups:
        for name, setter in names.items():
            left, right = getattr(theirs, name), getattr(ours, name)
            if left != right:
                texts.append(f"{setter} was {left!r}, and is {right!r}")
    if training:
        scalings = [ScalingSettings.of(options._Popart.options) for options in (saved, current)]
        if scalings[0] != scalings[1]:
            texts.append(f"automatic loss scaling was {scalings[0]}, and is {scalings[1]}")
    return texts


def check_state(
    saved: Saved, filename: Path, state: Mapping[str, Tensor], trained: Sequence[Sequence[str]]
) -> None:
    """Refuse a program that was compiled for other weights.

    Args:
        saved: content of the file.
        filename: path of the file, for messages.
        state: the device's parameters and buffers by name.
        trained: names of the parameters of the executor's optimizer.

    Raises:
        Error: what differs, and how.
    """

    def shown(tensors: Mapping[str, Tensor]) -> Dict[str, str]:
        return {
            name: f"{str(t.dtype).partition('.')[2]}{list(t.shape)}" for name, t in tensors.items()
        }

    expected, got = shown(saved.state), shown(state)
    # The program takes them in this order.
    if list(expected.items()) != list(got.items()):
        texts = [
            f"{name}: {expected.get(name, 'none')}, here {got.get(name, 'none')}"
            for name in sorted({*expected, *got})
            if expected.get(name) != got.get(name)
        ]
        raise error(
            f"{filename} was compiled for a model with other parameters and buffers: "
            f"{'; '.join(texts) or 'their order'}. Build the model as it was when it was saved."
        )
    missing = sorted(
        set(saved.recorded.with_gradient) - {name for group in trained for name in group}
    )
    if missing:
        raise error(
            f"{filename} trains {', '.join(missing)}, which the optimizer has not, or which has "
            "requires_grad=False. Build the optimizer as it was when the model was saved."
        )
