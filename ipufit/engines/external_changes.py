"""Changes that callbacks may have made to module or optimizer between two executions."""

from __future__ import annotations

from typing import Collection, Dict, Mapping, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.errors import ConfigurationError
from ipufit.tracing.grad_step import public_name


def refuse_replaced(step: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make sure that the module has the tensors that it had when the program was built.

    Raises:
        ConfigurationError: a parameter or buffer is another object now.
    """
    # Written out: every execution looks.
    now: Dict[str, Tensor] = dict(step.named_parameters())
    now.update(step.named_buffers())
    for name, tensor in tensors.items():
        if now.get(name) is not tensor:
            raise ConfigurationError(
                f"{public_name(name)!r} was replaced or removed within an epoch, but the program "
                "still uses the original one. Change values in place, or replace it in "
                "on_epoch_begin or on_epoch_end."
            )


def changed_shape(name: str) -> ConfigurationError:
    """The error about a parameter that can't be taken over."""
    return ConfigurationError(
        f"{public_name(name)!r} changed its shape, dtype or device during fit. Change the module "
        "between two calls of fit."
    )


class OptimizerStateVersion:
    """A mark of what torch's optimizer held when a program last brought it up to date.

    Args:
        optimizer: torch's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._held: object = None
        # Addresses of what the program itself works on: the first, and one past the last.
        self._live: Sequence[Tuple[int, int]] = ()
        self._left_out: Collection[int] = ()
        self._updates = 0

    @property
    def is_noted(self) -> bool:
        """True when the optimizer was ever brought up to date."""
        return self._held is not None

    @property
    def is_changed(self) -> bool:
        """True when the optimizer holds something else now."""
        return self._held is not None and self._signature() != self._held

    def note(
        self, updates: int, live: Sequence[Tensor] = (), left_out: Collection[int] = ()
    ) -> None:
        """It holds the state after so many updates.

        Args:
            updates: how many.
            live: what the program itself works on. Values that look into these are always up to
                date, and what is written into them the next update finds.
            left_out: identities of parameters whose state the program has nowhere else.
        """
        self._left_out = left_out
        self._live = [
            (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
            for tensor in live
        ]
        self._held, self._updates = self._signature(), updates

    def release(self) -> None:
        """Let go of what the program worked on: somebody may hold on to the program."""
        self._live = ()

    def is_ahead(self, updates: int) -> bool:
        """Tell whether the state was changed when it was new, after so many updates."""
        return self.is_changed and self._updates == updates

    def to_take_over(self, updates: int) -> bool:
        """Tell whether a callback has changed the state, after so many updates.

        Raises:
            ConfigurationError: it changed a state that was not up to date.
        """
        if self._held is None or self._signature() == self._held:
            return False
        if self._updates != updates:
            raise ConfigurationError(
                "the optimizer's state was changed during an epoch through your own reference, "
                "which holds the state of an earlier update. Use model.optimizer, which updates "
                "it, or change it at the end of an epoch."
            )
        return True

    def _signature(self) -> object:
        """Return a value that changes with the optimizer's state, but for what is live."""
        signature = {}
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items() if id(parameter) not in self._left_out else ():
                content = value
                if isinstance(value, Tensor):
                    content = value._version
                    address = value.data_ptr() if value.layout is torch.strided else 0
                    for index, (begin, end) in enumerate(self._live):
                        if begin <= address < end:
                            content = ("live", index)
                signature[id(parameter), name] = (id(value), content)
        return signature
