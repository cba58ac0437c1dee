"""Settings of the data of ``fit``: what ``loading`` and ``validation_data`` take, checked."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Collection, List, Optional, Union

from ipufit.errors import ConfigurationError, shown, unfit
from ipufit.utils import error_collector
from ipufit.utils.error_collector import ErrorCollector, SettingsRepr, at_least, at_least_or_none


@dataclasses.dataclass(frozen=True, repr=False)
class Loading(SettingsRepr):
    """How much of the data ``fit`` reads, and how far ahead; the names are Lightning's.

    ``fit(loading=...)`` takes it; it is frozen. See docs/data.md.

    Args:
        limit_train_batches: largest number of batches in an epoch, or a fraction of them as a
            float; every epoch starts at the beginning of the data.
        limit_val_batches: the same for validation; 0 for no validation.
        overfit_batches: train only on the first batches (a count, or a fraction as a float), the
            same in every epoch and unshuffled, kept in memory; validation, if there is any, uses
            them too.
        fast_dev_run: a short trial of everything: one epoch with so many executions (True for one)
            of training and of validation, without callbacks that write files.
        prefetch: executions that a thread prepares ahead; 0 for none. None is 1 if none of your
            code reads the data in this process (a DataLoader with workers, memory-mapped arrays,
            and, unless the model is on the CPU, tensors, arrays and a DataLoader over a
            TensorDataset), otherwise 0. Changes that a callback makes to the data take effect so
            many executions later.

    Raises:
        ConfigurationError: an argument can't work, or not beside another one; all of them.
    """

    limit_train_batches: Union[int, float, None] = None
    limit_val_batches: Union[int, float, None] = None
    overfit_batches: Union[int, float, None] = None
    fast_dev_run: Union[bool, int] = False
    prefetch: Optional[int] = None

    def __post_init__(self) -> None:
        faults = ErrorCollector()
        limits = {"limit_train_batches": 1, "limit_val_batches": 0, "overfit_batches": 1}
        for name, least in limits.items():
            with faults.collect():
                _check_limit(name, getattr(self, name), least)
        with faults.collect():
            overfits = self.overfit_batches is not None
            if overfits and self.limit_train_batches is not None:
                raise rivals(["limit_train_batches", "overfit_batches"], "an epoch")
            if overfits and self.limit_val_batches is not None:
                raise rivals(["limit_val_batches", "overfit_batches"], "a validation")
        with faults.collect():
            if not isinstance(self.fast_dev_run, bool):
                also = " executions, True or False"
                at_least("fast_dev_run", self.fast_dev_run, 1, also)
        with faults.collect():
            at_least_or_none("prefetch", self.prefetch, 0)
        faults.raise_all()


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Validation(SettingsRepr):
    """Data that ``fit`` evaluates after its epochs, with settings.

    ``fit(validation_data=...)`` takes it; it is frozen. See docs/data.md.

    Args:
        data: ``(x, y)`` or ``(x, y, sample_weight)`` of tensors and arrays, as a tuple or list, or
            any other form of ``x`` of ``fit``. None is for use with ``validation_split``.
        steps: device iterations of a validation, each of which starts at the beginning of the data.
            None is all of the data.
        batch_size: for data that has no batches; None is that of ``fit``.
        freq: validate every so many epochs, or after the epochs of this collection, counted from 1.
        ipus: total number of IPUs for validation; None is the number of ``compile(config=...)``, or
            that of ``fit``.
        device_iterations: forward passes per execution of the validation; None is the number of the
            config, or that of ``fit``.

    Raises:
        ConfigurationError: arguments that can't work; with every fault.
    """

    data: object = None
    steps: Optional[int] = None
    batch_size: Optional[int] = None
    freq: Union[int, Collection[int]] = 1
    ipus: Optional[int] = None
    device_iterations: Optional[int] = None

    def __post_init__(self) -> None:
        faults = ErrorCollector()
        for name in ("steps", "batch_size"):
            with faults.collect():
                at_least_or_none(f"{name} of Validation", getattr(self, name), 1)
        with faults.collect():
            epochs = error_collector.as_list(self.freq)
            if epochs is None:
                freq = at_least("freq of Validation", self.freq, 1, " or a collection of epochs")
                object.__setattr__(self, "freq", freq)
            for epoch in epochs or ():
                at_least("an epoch in freq of Validation", epoch, 1)
        faults.raise_all()


def validation_epochs(validation: Validation, epochs: range) -> List[int]:
    """Return the indices of the epochs, of those of a run, after which there is a validation.

    Raises:
        ConfigurationError: ``freq`` names no epoch of this run, or more epochs than it has.
    """
    freq = validation.freq
    if isinstance(freq, Collection):
        due = [epoch for epoch in epochs if epoch + 1 in freq]
        if not due:
            raise ConfigurationError(
                f"freq of Validation must name an epoch from {epochs.start + 1} to {epochs.stop}, "
                f"counted from 1, got {shown(freq)}."
            )
        return due
    if freq > epochs.stop:
        needed = f"at most {epochs.stop}, the number of the last epoch"
        raise unfit("freq of Validation", needed, freq)
    # Of a run in several calls of fit, some have no validation.
    return [epoch for epoch in epochs if (epoch + 1) % freq == 0]


def resolve_loading(loading: object) -> Loading:
    """Bring the argument ``loading`` of ``fit`` into its one form.

    Raises:
        ConfigurationError: it is no Loading.
    """
    if loading is None or isinstance(loading, Loading):
        return loading or Loading()
    advice = "Write for example Loading(limit_train_batches=10)."
    raise unfit("loading", "an ipufit.Loading object or None", loading, advice)


def resolve_validation(data: object) -> Validation:
    """Bring the argument ``validation_data`` of ``fit`` into one form.

    Raises:
        ConfigurationError: it is the class Validation.
    """
    if data is Validation:
        raise ConfigurationError(
            "validation_data must be data or an object, got the class Validation. Pass "
            "Validation((x_val, y_val))."
        )
    return data if isinstance(data, Validation) else Validation(data)


def rivals(names: List[str], what: str) -> ConfigurationError:
    """Make the error for arguments of which each one says how much of the data is read."""
    return ConfigurationError(
        f"{' and '.join(names)} all set how much of the data {what} reads. Pass one of them."
    )


def _check_limit(name: str, value: Any, least: int) -> None:
    """Raise unless a limit is None, a count, or a fraction as a float."""
    is_integer = isinstance(value, numbers.Integral)
    if value is None or (is_integer and not isinstance(value, bool) and int(value) >= least):
        return
    if is_integer or not isinstance(value, numbers.Real) or not 0 < float(value) <= 1:
        needed = f"a number of batches, an integer of at least {least}, or a fraction of the epoch"
        raise unfit(name, f"{needed}, a float above 0 and up to 1.0", value)
