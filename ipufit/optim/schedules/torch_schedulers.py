"""Schedulers of torch.optim.lr_scheduler as schedules."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ipufit.errors import ConfigurationError
from ipufit.optim.schedules.schedule import Schedule

__all__ = ["Scheduler", "TorchSchedule", "parts"]

# Where a scheduler stands, and what it shares with the optimizer.
_COUNTERS = frozenset(
    (
        *("optimizer", "base_lrs", "last_epoch", "T_cur", "T_i", "best", "num_bad_epochs"),
        *("cooldown_counter", "mode_worse", "verbose"),
    )
)

_PRIVATE = frozenset(("_milestones", "_schedule_phases", "_anneal_func_type"))

# Not one class on torch 2.0.1.
Scheduler = (LRScheduler, ReduceLROnPlateau)


def _is_configuration(name: str) -> bool:
    """Say whether an attribute of a scheduler is set in ``__init__``, and does not change."""
    return name in _PRIVATE or not (name.startswith("_") or name in _COUNTERS)


def parts(scheduler: Any) -> Iterator[Any]:
    """The scheduler and those it is made of."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from parts(inner)


class TorchSchedule(Schedule):
    """Steps a scheduler of torch as a loop written by hand would.

    Args:
        optimizer: the scheduler's.
        scheduler: ReduceLROnPlateau is given the watched value, which there is at epoch ends only.
        per_update: whether it steps after every update, or at epoch ends.
        monitor: name of the value to watch; None is "val_loss" if there is a validation, else
            "loss".
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Union[LRScheduler, ReduceLROnPlateau],
        per_update: bool,
        monitor: Optional[str] = None,
    ) -> None:
        super().__init__(optimizer, per_update)
        self._scheduler: Any = scheduler
        self._monitor = monitor

    @property
    def name(self) -> str:
        """The scheduler's class."""
        return type(self._scheduler).__name__

    @property
    def configuration(self) -> Dict[str, Any]:
        """The attributes of the scheduler and of those it is made of, but for counters."""
        own = [
            {name: value for name, value in vars(each).items() if _is_configuration(name)}
            for each in parts(self._scheduler)
        ]
        return {**super().configuration, "monitor": self._monitor, "parts": own}

    @property
    def follows_values(self) -> bool:
        """Say whether one of the schedulers waits for a value to stop getting better."""
        return any(isinstance(each, ReduceLROnPlateau) for each in parts(self._scheduler))

    def _advance(self) -> None:
        self._scheduler.step()

    def _at_epoch_end(self, logs: Mapping[str, float]) -> Callable[[], None]:
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            return self._advance
        monitor = self._monitor or ("val_loss" if "val_loss" in logs else "loss")
        if monitor not in logs:
            raise ConfigurationError(
                f"ReduceLROnPlateau must watch a value of the epoch, got monitor={monitor!r}. "
                f"There is {', '.join(logs) or 'none'}."
            )
        return functools.partial(self._scheduler.step, logs[monitor])

    def _keep(self) -> Callable[[], None]:
        kept = [(owner, _copied(vars(owner))) for owner in _owners(self._scheduler)]

        def restore() -> None:
            for owner, values in kept:
                vars(owner).clear()
                vars(owner).update(_copied(values))

        return restore

    def _own_state(self) -> Any:
        return _without_functions(_copied(self._scheduler.state_dict()))

    def _load_own(self, state: Any) -> None:
        live = [vars(part) for part in parts(self._scheduler)]
        counters = [{k: v for k, v in one.items() if isinstance(v, dict)} for one in live]
        self._scheduler.load_state_dict(copy.deepcopy(state))
        for one, before in zip(live, counters):
            for key, known in before.items():
                # JSON has strings for keys where MultiStepLR has milestones.
                if any(isinstance(name, int) for name in known):
                    one[key] = type(known)({int(name): v for name, v in one[key].items()})


def _owners(scheduler: Any) -> List[Any]:
    """Everything whose attributes change when the scheduler steps."""
    found: Dict[int, Any] = {}
    for part in parts(scheduler):
        found[id(part)] = part
        for value in vars(part).values():
            # LambdaLR and others may hold objects that are called, with attributes of their own.
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if _is_called_object(item):
                    found[id(item)] = item
    return list(found.values())


def _is_called_object(value: Any) -> bool:
    if inspect.isroutine(value) or isinstance(value, (type, nn.Module, functools.partial)):
        return False
    return callable(value) and hasattr(value, "__dict__")


def _copied(value: Any) -> Any:
    """Containers and tensors copied, everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple, set, collections.deque):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, collections.Counter):
        return copy.copy(value)  # its update would add
    if isinstance(value, dict):
        result = copy.copy(value)
        result.update({key: _copied(item) for key, item in value.items()})
        return result
    return value


def _without_functions(value: Any) -> Any:
    """Left out of a state: they come with the scheduler that loads it."""
    if isinstance(value, dict):
        return {k: _without_functions(v) for k, v in value.items() if not inspect.isroutine(v)}
    if type(value) in (list, tuple):
        items: Tuple[Any, ...] = tuple(_without_functions(item) for item in value)
        return list(items)
    return value
