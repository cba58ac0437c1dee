"""Schedules of several optimizers that make an update together."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

import torch

from ipufit.errors import ConfigurationError
from ipufit.optim.schedules import settings
from ipufit.optim.schedules.schedule import Schedule, Scheduler, ScheduleSnapshot, parts
from ipufit.optim.several import MultiOptimizer, members_of, refuse_unknown_members


class MemberSchedules:
    """A schedule for each of several optimizers that make an update together, or for some.

    Args:
        schedules: by the optimizer's name; None where there is none.
        optimizers: by name, in the order of their parameter groups.

    Attributes:
        schedules: as passed, without those that are None.
    """

    def __init__(
        self,
        schedules: Mapping[str, Optional[Schedule]],
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        self.schedules: Dict[str, Schedule] = {
            name: each for name, each in schedules.items() if each is not None
        }
        self._optimizers = optimizers

    @property
    def name(self) -> str:
        """Names of the schedules."""
        return ", ".join(f"{each.name} of {name!r}" for name, each in self.schedules.items())

    @property
    def names(self) -> FrozenSet[str]:
        """Settings that one of them is known to change."""
        return frozenset(name for each in self.schedules.values() for name in each.names)

    @property
    def per_update(self) -> bool:
        """True if settings of any change with every update."""
        return any(each.per_update for each in self.schedules.values())

    @property
    def follows_values(self) -> bool:
        """True if settings of any depend on values of the run."""
        return any(each.follows_values for each in self.schedules.values())

    @property
    def configuration(self) -> Dict[str, object]:
        """Return what determines the settings of all updates."""
        return {name: each.configuration for name, each in self.schedules.items()}

    def rows(
        self, updates: int, accumulation_steps: Sequence[int] = ()
    ) -> List[List[settings.Settings]]:
        """The settings for each of the coming updates, which count as done.

        Args:
            updates: how many.
            accumulation_steps: how many batches of a replica each of them takes.

        Raises:
            ConfigurationError: a value that no update can use; everything is as before the call.
        """
        before, columns = self.snapshot(), []
        try:
            for name, optimizer in self._optimizers.items():
                if name in self.schedules:
                    columns.append(self.schedules[name].rows(updates, accumulation_steps))
                else:
                    columns.append([settings.read(optimizer)] * updates)
        except BaseException:
            self.restore(before)
            raise
        return [[group for part in parts for group in part] for parts in zip(*columns)]

    def check(self, updates: int, epoch: Sequence[int] = ()) -> None:
        """Check that all coming updates have values; nothing changes.

        Args:
            updates: how many.
            epoch: accumulation steps of the updates of an epoch; none for one without end.

        Raises:
            ConfigurationError: an update has no value.
        """
        for each in self.schedules.values():
            each.check(updates, epoch)

    def begin_run(
        self, updates: Optional[int], epochs: Optional[int], is_trial: bool = False
    ) -> None:
        """Learn how long the run is that begins, or goes on and whose state comes next.

        Args:
            updates: of the whole run; None where nobody knows.
            epochs: likewise.
            is_trial: whether it is a short one to try things out.
        """
        for each in self.schedules.values():
            each.begin_run(updates, epochs, is_trial)

    def end_epoch(self, logs: Mapping[str, float]) -> None:
        """Move on where settings change at epoch ends.

        Args:
            logs: the epoch's values.
        """
        for each in self.schedules.values():
            each.end_epoch(logs)

    def advance_to(self, updates: int, epochs: int, in_run: Tuple[int, int]) -> None:
        """Bring schedules that have not begun to where they are after so many updates and epochs.

        Args:
            updates: that have been made since ``compile``.
            epochs: that have ended since ``compile``.
            in_run: updates and epochs of the run that goes on.
        """
        for each in self.schedules.values():
            each.advance_to(updates, epochs, in_run)

    def check_present(self) -> None:
        """Check that the next update can use the current settings.

        Raises:
            ConfigurationError: it can't.
        """
        for each in self.schedules.values():
            each.check_present()

    def snapshot(self) -> Dict[str, ScheduleSnapshot]:
        """Copy everything, including the settings."""
        return {name: each.snapshot() for name, each in self.schedules.items()}

    def restore(self, snapshot: Mapping[str, ScheduleSnapshot]) -> None:
        """Go back to a snapshot, exactly.

        Args:
            snapshot: what :meth:`snapshot` returned.
        """
        for name, each in self.schedules.items():
            each.restore(snapshot[name])

    def state_dict(self) -> Dict[str, object]:
        """State of all schedules, by the optimizer's name, and the settings of all groups."""
        groups = [g for each in self._optimizers.values() for g in settings.read(each)]
        return {
            "kind": self.name,
            "updates": max(each.updates for each in self.schedules.values()),
            "epochs": max(each.epochs for each in self.schedules.values()),
            "settings": [settings.numbers_of(group) for group in groups],
            "schedules": {name: each.state_dict() for name, each in self.schedules.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, including the settings.

        Args:
            state: what :meth:`state_dict` returned.

        Raises:
            ConfigurationError: it is the state of other schedules or optimizers.
        """
        if state["kind"] != self.name:
            raise ConfigurationError(
                f"the state of schedules must be that of {self.name}, got {state['kind']}. Compile "
                "with the optimizer and the lr_scheduler that made it."
            )
        start = 0
        for name, optimizer in self._optimizers.items():
            stop = start + len(optimizer.param_groups)
            if name in self.schedules:
                own_settings = state["settings"][start:stop]
                part = {**state["schedules"][name], "settings": own_settings}
                self.schedules[name].load_state_dict(part)
            start = stop


def schedules_by_member(
    lr_scheduler: object, optimizer: torch.optim.Optimizer
) -> Optional[Dict[str, object]]:
    """Schedules of single optimizers, by their names; None for one of all of them.

    Raises:
        ConfigurationError: it is one of optimizers that there are not.
    """
    members = members_of(optimizer)
    if not isinstance(optimizer, MultiOptimizer):
        return None
    if isinstance(lr_scheduler, Mapping) and any(name in members for name in lr_scheduler):
        refuse_unknown_members("lr_scheduler", lr_scheduler, optimizer)
        return dict(lr_scheduler)
    if isinstance(lr_scheduler, Scheduler):
        lr_scheduler = [lr_scheduler]
    is_list = isinstance(lr_scheduler, (list, tuple)) and bool(lr_scheduler)
    if not is_list or not all(isinstance(each, Scheduler) for each in lr_scheduler):  # type: ignore[attr-defined]
        return None
    by_member: Dict[str, object] = {}
    for scheduler in lr_scheduler:  # type: ignore[attr-defined]
        owner = next(parts(scheduler)).optimizer
        if owner is optimizer and len(lr_scheduler) == 1:  # type: ignore[arg-type]
            return None
        name = next((name for name, each in members.items() if each is owner), None)
        if name is None or name in by_member:
            kind = type(scheduler).__name__
            came = f"one for another {type(owner).__name__}" if name is None else f"two of {name!r}"
            raise ConfigurationError(
                "a list of schedulers must have at most one for each compiled optimizer, got "
                f"{came}, {kind}. Make each with one of these optimizers."
            )
        by_member[name] = scheduler
    return by_member
