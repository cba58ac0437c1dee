"""Functions of the update as schedules, for any hyper-parameter that is a number."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, Sequence

import torch

from ipufit.errors import ConfigurationError
from ipufit.schedules import settings
from ipufit.schedules.schedule import Schedule

__all__ = ["CallableSchedule", "Part"]


@dataclasses.dataclass(frozen=True)
class Part:
    """Functions that hold for some parameter groups.

    Attributes:
        groups: their indices.
        functions: by the user's name of the hyper-parameter.
    """

    groups: Sequence[int]
    functions: Mapping[str, Callable[[int], Any]]


class CallableSchedule(Schedule):
    """Calls functions with the number of updates, or epochs, since ``compile``.

    Args:
        optimizer: whose settings they give.
        parts: the functions.
        per_update: whether they are functions of the update or of the epoch.

    Raises:
        ConfigurationError: the optimizer has no such number, or a first value is none.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parts: Sequence[Part], per_update: bool
    ) -> None:
        super().__init__(optimizer, per_update)
        self._parts = parts
        self._expected: List[Dict[settings.Target, Any]] = []
        groups, kind = settings.read(optimizer), type(optimizer).__name__
        self._targets = [
            (group, settings.target(name, groups[group], kind, group), name)
            for part in parts
            for group in part.groups
            for name in part.functions
        ]
        self._set(0)
        self._settled()

    @property
    def name(self) -> str:
        """The names of what is scheduled."""
        names = dict.fromkeys(name for part in self._parts for name in part.functions)
        return f"the schedule of {', '.join(names)}"

    @property
    def configuration(self) -> Dict[str, Any]:
        """The functions, and the groups that they hold for."""
        parts = [{"groups": each.groups, "functions": each.functions} for each in self._parts]
        return {**super().configuration, "parts": parts}

    @property
    def names(self) -> FrozenSet[str]:
        """Settings that it changes, as the groups have them."""
        return frozenset(name for _, (name, _), _ in self._targets)

    def _advance(self) -> None:
        self._set(self.updates if self._per_update else self.epochs + 1)

    def _set(self, position: int) -> None:
        # All values first: where one fails, none is set.
        values = [
            {name: self._value(name, f, position) for name, f in part.functions.items()}
            for part in self._parts
        ]
        of_group = {g: found for part, found in zip(self._parts, values) for g in part.groups}
        for group, where, name in self._targets:
            settings.write(self._optimizer.param_groups[group], where, of_group[group][name])

    def _value(self, name: str, function: Callable[[int], Any], position: int) -> float:
        value = function(position)
        found = settings.number(value)
        if found is None:
            unit = "update" if self._per_update else "epoch"
            raise ConfigurationError(
                f"the schedule of {name} must return one number, got {type(value).__name__} for "
                f"{unit} {position}, counted from 0. Return for example 0.1 * 0.99 ** {unit}."
            )
        return found

    def _present(self) -> List[Any]:
        groups = settings.read(self._optimizer)
        return [
            groups[group][name] if place is None else groups[group][name][place]
            for group, (name, place), _ in self._targets
        ]

    def _settled(self) -> None:
        self._wanted = self._present()

    def _before_row(self) -> None:
        for (group, _, name), wanted, present in zip(self._targets, self._wanted, self._present()):
            # Not equal to itself: NaN, which the check of the row reports.
            if present != wanted and wanted == wanted:
                raise ConfigurationError(
                    f"{name} is given by lr_scheduler, but it was changed from {wanted!r} to "
                    f"{present!r} in parameter group {group}. Leave it to the schedule, or compile "
                    "without one and set it in a callback."
                )

    def _keep(self) -> Callable[[], None]:
        wanted = list(self._wanted)

        def restore() -> None:
            self._wanted = list(wanted)

        return restore

    def _own_state(self) -> Any:
        return None

    def _load_own(self, state: Any) -> None:
        """Nothing: the functions depend on the position alone."""
