"""Tensors of a program that the user has anchored by name."""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.poptorch._device import Device
from ipufit.poptorch._errors import error
from ipufit.poptorch._recorded_program import MicroBatchResults, RecordedProgram

__all__ = ["AnchoredTensors"]

_GRADIENT, _UPDATED = "Gradient___", "UpdatedVar___"


class AnchoredTensors:
    """Finds tensors under the names that PopTorch gives them.

    Inputs, parameters, gradients, updated parameters and the optimizer's settings have PopTorch's
    names. Activations are named after torch's operators, where PopART has others.

    Args:
        names: names of the anchored tensors.
        recorded: the program.
        inputs: its number of inputs.
        device: its tensors.
        settings: returns the numbers that the device has of the optimizer, by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        recorded: RecordedProgram,
        inputs: int,
        device: Device,
        settings: Callable[[], Mapping[str, float]],
    ) -> None:
        self.names = list(names)
        self._recorded = recorded
        self._inputs = ["input" if i == 0 else f"input/{i}" for i in range(inputs)]
        self._device = device
        self._settings = settings

    def check(self) -> None:
        """Refuse a name that the program does not have.

        Raises:
            Error: the name, and where to find those there are.
        """
        available_names = self.available_names()
        for name in self.names:
            if name not in available_names:
                raise error(
                    f"no tensor of the program is called {name!r}. This engine knows those that "
                    "getTensorNames() lists, where operators have torch's names, not PopART's."
                )

    def available_names(self) -> List[str]:
        """Return every name that can be anchored."""
        with_gradient = self._recorded.with_gradient
        return [
            *self._inputs,
            *self._device.names,
            *(["loss"] if self._recorded.trace.training else []),
            *(f"{_GRADIENT}{name}" for name in with_gradient),
            *(f"{_UPDATED}{name}" for name in with_gradient),
            *self._settings(),
            *self._recorded.activations,
        ]

    def activations(self) -> List[str]:
        """Return the anchored names that are results of operators inside forward."""
        return [name for name in dict.fromkeys(self.names) if name in self._recorded.activations]

    def read(
        self, replica: int, leaves: Sequence[Tensor], returned: MicroBatchResults
    ) -> Dict[str, Tensor]:
        """Return copies of the anchored tensors that a micro-batch has before the update."""
        if not self.names:
            return {}
        tensors = dict(zip(self._inputs, leaves))
        tensors.update(zip(self._device.names, self._device.state(replica)))
        tensors.update((f"{_GRADIENT}{n}", g) for n, g in returned.gradients.items())
        if returned.loss is not None:
            tensors["loss"] = returned.loss
        tensors.update((name, torch.tensor(value)) for name, value in self._settings().items())
        return {name: tensors[name].clone() for name in self.names if name in tensors}

    def complete(self, replica: int, values: Mapping[str, Tensor]) -> List[Tensor]:
        """Return the anchored tensors in order, with parameters as they are after the update."""
        updated = {
            f"{_UPDATED}{name}": tensor
            for name, tensor in zip(self._device.names, self._device.state(replica))
        }
        return [values[n] if n in values else updated[n] for n in self.names]
