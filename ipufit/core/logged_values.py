"""Values that a module or a loss reports from inside the program.

While a micro-batch is recorded, :func:`log` puts tensors into a list that becomes part of the
program's results; there is no call of it when the program runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from typing import Any, Dict, Iterator, List, Literal, Mapping, Optional, Union

import torch
from torch import Tensor

from ipufit.errors import ConfigurationError
from ipufit.utils.error_collector import one_of, within
from ipufit.utils.names import check_log_name

LogReduction = Literal["mean", "sum", "max", "min", "last"]
_FLAGS = ("on_update", "counted", "exact", "is_none")


@dataclasses.dataclass(frozen=True)
class LogRule:
    """Reduction of the values that micro-batches log under one name.

    Attributes:
        reduce: "mean" (weighted with the samples), "sum", "max", "min" or "last".
        on_update: whether History keeps a value for every update as well.
        counted: whether a mean is weighted like the loss itself, which may be a mean over tokens.
        exact: whether the name is the same in validation, without "val_" before it. It may be
            "loss", and then stands for ipufit's own.
        is_none: whether it says that there is none; of "loss", in an evaluation.
    """

    reduce: str = "mean"
    on_update: bool = False
    counted: bool = False
    exact: bool = False
    is_none: bool = False


@dataclasses.dataclass
class _LoggedEntry:
    """Values that one micro-batch has logged under one name."""

    rule: LogRule
    values: List[Union[Tensor, float]]

    def reduce(self, device: torch.device) -> Tensor:
        """Reduce the values of the micro-batch to one, shape (), float64."""
        values = torch.stack([_as_tensor(value, device) for value in self.values])
        if self.rule.reduce == "last":
            return values[-1]
        reduction: Any = {
            "mean": torch.mean,
            "sum": torch.sum,
            "max": torch.amax,
            "min": torch.amin,
        }[self.rule.reduce]
        result: Tensor = reduction(values)
        return result


def _as_tensor(value: Union[Tensor, float], device: torch.device) -> Tensor:
    """In float64, in which every number of the narrower types is exact."""
    if isinstance(value, Tensor):
        return value.reshape(()).to(device, torch.float64)
    # Made on the device: a copy from the host would be one more in every micro-batch.
    return torch.full((), value, dtype=torch.float64, device=device)


Entries = Dict[str, _LoggedEntry]
_open: contextvars.ContextVar[Optional[Entries]] = contextvars.ContextVar("ipufit", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[Entries]:
    """Collect what is logged inside the block, by name in the order of first use."""
    entries: Entries = {}
    with within(_open, entries):
        yield entries


def log(name: str, value: Any, reduce: LogReduction = "mean", *, on_update: bool = False) -> None:
    """Report a value from ``forward`` or from a loss; it becomes part of the program.

    It appears in :class:`ipufit.History`, in the progress bar and in the logs of callbacks, with
    ``val_`` before the name when validating. ``predict``, a call of the module outside of ipufit,
    and the backward pass (a hook on a gradient, a second run of a checkpointed layer) ignore it. If
    a name is logged twice in one ``forward``, the values are reduced like those of micro-batches.
    See docs/logging-values.md.

    Args:
        name: key in History; it must not be a name that ipufit logs itself, such as "loss", or the
            name of a metric.
        value: a real tensor of one element, shape (), or a number. No gradient flows through it. A
            number keeps the value that it had when the program was recorded.
        reduce: over all micro-batches, replicas and updates of an epoch: "mean", in which every
            sample counts the same, "sum", "max", "min" or "last".
        on_update: keep the value of every update too, in ``History.updates``.

    Raises:
        ConfigurationError: a name, value or reduction that can't be logged, or one name with two
            reductions.

    >>> log("norm", torch.ones(3).norm())  # outside of a program: nothing to report to
    """
    _check(name, value, reduce, on_update)
    report(name, value, LogRule(reduce, on_update))


def report(name: str, value: Union[Tensor, float], rule: LogRule) -> None:
    """Put a value that is known to be good into what the program reports, if one is recorded.

    Raises:
        ConfigurationError: the name has another rule.
    """
    entries = _open.get()
    if entries is None:
        return
    entry = entries.setdefault(name, _LoggedEntry(rule, []))
    merge_rules({name: entry.rule}, {name: rule})
    # A copy: what forward does to a tensor in place later on is not what was logged.
    entry.values.append(value.detach().clone() if isinstance(value, Tensor) else float(value))


def merge_rules(
    rules: Mapping[str, LogRule], new_rules: Mapping[str, LogRule]
) -> Dict[str, LogRule]:
    """Merge two sets of logging rules.

    Raises:
        ConfigurationError: they have a name in common, and another rule for it.
    """
    for name, rule in new_rules.items():
        before = rules.get(name, rule)
        if before != rule:
            raise ConfigurationError(
                f"log must always reduce {name!r} in the same way, got {_words(before)} and "
                f"{_words(rule)}. Give the second value another name."
            )
    return {**rules, **new_rules}


def _words(rule: LogRule) -> str:
    return f"reduce={rule.reduce!r}, on_update={rule.on_update}"


def _check(name: object, value: object, reduce: object, on_update: object) -> None:
    check_log_name(name)
    one_of(f"log({name!r}): reduce", reduce, LogReduction)
    one_of(f"log({name!r}): on_update", on_update, (True, False))
    check_value(name, value)


def check_value(name: object, value: object) -> None:
    """Make sure that it is one real number.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return
        came = f"a tensor of shape {tuple(value.shape)}, dtype {value.dtype}"
    elif isinstance(value, (bool, int, float)):
        return
    else:
        came = type(value).__name__
    raise ConfigurationError(
        f"log({name!r}) takes one real number, a tensor of one element, got {came}. Reduce it, for "
        "example with .mean()."
    )


class Running:
    """The value of one name over the micro-batches so far.

    Args:
        rule: how they become one.
    """

    def __init__(self, rule: LogRule) -> None:
        self.rule = rule
        self._total = 0.0
        self._weight = 0.0
        self._value = math.nan

    def add(self, value: float, times: float, weight: float) -> None:
        """Add the value of the next micro-batch, in stream order.

        Args:
            value: what it reported.
            times: how often it counts in a mean.
            weight: by how much that makes what the mean is divided by grow.
        """
        how = self.rule.reduce
        if how == "mean":
            self._total += value * times
            self._weight += weight
        elif how == "sum":
            self._total += value
            self._weight = 1.0
        elif how == "last" or not self._weight or math.isnan(value):
            self._value, self._weight = value, 1.0
        elif not math.isnan(self._value):
            # A NaN stays: hidden, it would look as if all had been well.
            self._value = (max if how == "max" else min)(self._value, value)

    def state_dict(self) -> Dict[str, Any]:
        """The reduction so far and its rule, as a checkpoint stores them."""
        numbers = {"total": self._total, "weight": self._weight, "value": self._value}
        return {"rule": dataclasses.asdict(self.rule), **numbers}

    @staticmethod
    def of(state: Mapping[str, Any]) -> Running:
        """Make a reduction that goes on from a stored state."""
        rule = state["rule"]
        one_of("reduce", rule["reduce"], LogReduction)
        flags = {name: bool(rule.get(name)) for name in _FLAGS}
        running = Running(LogRule(rule["reduce"], **flags))
        running._total, running._weight = float(state["total"]), float(state["weight"])
        running._value = float(state["value"])
        return running

    @property
    def value(self) -> float:
        """The reduction of all values so far."""
        if self.rule.reduce in ("mean", "sum"):
            return self._total / self._weight if self._weight else math.nan
        return self._value
