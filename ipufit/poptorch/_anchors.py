"""Tensors of a program that were asked for by name."""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.poptorch._device import Device
from ipufit.poptorch._errors import error
from ipufit.poptorch._recorded import Recorded, Returned

__all__ = ["Anchored"]

_GRADIENT, _UPDATED = "Gradient___", "UpdatedVar___"


class Anchored:
    """Finds tensors under the names that PopTorch gives them.

    Those of inputs, parameters, gradients, updated parameters and the optimizer's settings are its
    own; what lies between the operators of forward is named after torch's operators, where PopART
    has others.

    Args:
        names: those that are wanted.
        recorded: the program.
        inputs: its number of inputs.
        device: its tensors.
        settings: gives the numbers that the device has of the optimizer, by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        recorded: Recorded,
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
        """Refuse a name that this engine does not know.

        Raises:
            Error: it names it.
        """
        known = self.known()
        for name in self.names:
            if name not in known:
                raise error(
                    f"no tensor of the program is called {name!r}. This engine knows those that "
                    "getTensorNames() lists, where operators have torch's names, not PopART's."
                )

    def known(self) -> List[str]:
        """Every name that can be asked for."""
        reached = self._recorded.reached
        return [
            *self._inputs,
            *self._device.names,
            *(["loss"] if self._recorded.trace.training else []),
            *(f"{_GRADIENT}{name}" for name in reached),
            *(f"{_UPDATED}{name}" for name in reached),
            *self._settings(),
            *self._recorded.activations,
        ]

    def inner(self) -> List[str]:
        """Of the wanted names, those of what lies between the operators of forward."""
        return [name for name in dict.fromkeys(self.names) if name in self._recorded.activations]

    def of(self, replica: int, leaves: Sequence[Tensor], returned: Returned) -> Dict[str, Tensor]:
        """What a micro-batch has of the wanted tensors."""
        if not self.names:
            return {}
        found = dict(zip(self._inputs, leaves))
        found.update(zip(self._device.names, self._device.state(replica)))
        found.update((f"{_GRADIENT}{n}", g) for n, g in returned.gradients.items())
        if returned.loss is not None:
            found["loss"] = returned.loss
        found.update((name, torch.tensor(value)) for name, value in self._settings().items())
        return {name: found[name].clone() for name in self.names if name in found}

    def complete(self, replica: int, values: Mapping[str, Tensor]) -> List[Tensor]:
        """Add what is only there after the update; in the order of the names."""
        updated = {
            f"{_UPDATED}{name}": tensor
            for name, tensor in zip(self._device.names, self._device.state(replica))
        }
        return [values[n] if n in values else updated[n] for n in self.names]
