"""Interception of ``fit`` while a script runs, by a function that looks at what it would train."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, TextIO

from ipufit.callbacks.history import History
from ipufit.core.batch import MicroBatch, Mode
from ipufit.data.adapters import DataArguments, get_data_adapter
from ipufit.data.batches import BatchValidator
from ipufit.errors import DataError, IpufitError
from ipufit.training.arguments import FitConfig
from ipufit.training.fit_data import FitRequest
from ipufit.training.model import Model
from ipufit.training.session import Session
from ipufit.utils.random_streams import isolated

__all__ = ["UNREADABLE", "Look", "check_fit_arguments", "first_micro_batch", "intercept_fit"]

UNREADABLE = 2

# Called in the place of fit with the model, its session, the arguments by name, and who calls.
Look = Callable[[Model, Session, Mapping[str, Any], FrameType], None]


class _EnoughError(BaseException):
    """Ends the script; no ``except Exception`` of its own holds it up.

    Args:
        fault: of what the script asked ``fit`` for; None where there is none.
    """

    def __init__(self, fault: Optional[IpufitError] = None) -> None:
        super().__init__(fault)
        self.fault = fault


def intercept_fit(
    execute: Callable[[], None],
    look: Look,
    verb: str,
    every: bool = False,
    printing_to: Optional[TextIO] = None,
    in_one_line: bool = False,
) -> Optional[int]:
    """Run a script with ``Model.fit`` replaced.

    Args:
        execute: runs it.
        look: what is done instead.
        verb: name of the command, for messages.
        every: go on after the first ``fit``, which then returns an empty history.
        printing_to: where the script prints; None: as it does.
        in_one_line: tell an error of ours in ``look`` without its traceback. One that the script
            meets by itself keeps its own, which says where.

    Returns:
        The exit status of a script that failed or fits no model; None where all went well.
    """
    calls = [0]
    out = sys.stdout if printing_to is None else printing_to
    try:
        replaced = _fit_replaced(_ending(look, in_one_line), every, calls)
        with replaced, contextlib.redirect_stdout(out):
            execute()
    except _EnoughError as enough:
        if enough.fault is not None:
            sys.stderr.write(f"ipufit {verb}: {enough.fault}\n")
            return UNREADABLE
    except SystemExit:
        pass
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.write(f"ipufit {verb}: the script failed, so that the {verb} is not complete.\n")
        return UNREADABLE
    if not calls[0]:
        sys.stderr.write(
            f"ipufit {verb}: the script must call fit of an ipufit.Model, but did not. Pass the "
            "arguments with which it trains.\n"
        )
        return UNREADABLE
    return None


def _ending(look: Look, in_one_line: bool) -> Look:
    """Wrap a function so that, if wished, an error of ours ends the script."""
    if not in_one_line:
        return look

    def looking(
        model: Model, session: Session, arguments: Mapping[str, object], caller: FrameType
    ) -> None:
        try:
            look(model, session, arguments, caller)
        except IpufitError as fault:
            raise _EnoughError(fault) from fault

    return looking


@contextlib.contextmanager
def _fit_replaced(look: Look, every: bool, calls: List[int]) -> Iterator[None]:
    original: Any = Model.fit
    signature = inspect.signature(original)

    def fit(self: Model, *args: Any, **kwargs: Any) -> History:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            original(self, *args, **kwargs)  # which says what was meant
            raise
        bound.apply_defaults()
        look(self, self._trainable("fit"), bound.arguments, sys._getframe(1))
        calls[0] += 1
        if not every:
            raise _EnoughError
        self.history = History()
        return self.history

    Model.fit = fit  # type: ignore[method-assign]
    try:
        yield
    finally:
        Model.fit = original  # type: ignore[method-assign]


def check_fit_arguments(
    session: Session, arguments: Mapping[str, object], **instead: object
) -> FitConfig:
    """Check the arguments of ``fit``, without files that it would write.

    Args:
        session: of the model.
        arguments: its arguments by name.
        instead: arguments in the place of these.
    """
    names = [field.name for field in dataclasses.fields(FitRequest) if field.name != "data"]
    writes: Dict[str, Any] = {"checkpoint": None, "callbacks": ()}
    values = {**{name: arguments[name] for name in names}, **writes, **instead}
    return FitConfig.check(session, FitRequest(_data_of(arguments), **values))


def _data_of(arguments: Mapping[str, Any]) -> DataArguments:
    names = ("x", "y", "sample_weight", "class_weight", "batch_size", "shuffle")
    return DataArguments("training data", *(arguments[name] for name in names))


def first_micro_batch(session: Session, arguments: Mapping[str, Any]) -> MicroBatch:
    """Read the first micro-batch of the training data.

    Args:
        session: of the model.
        arguments: its arguments by name.

    Raises:
        DataError: there is none, or it can't be fed.
    """
    own_loss = session.loss.in_module
    source = get_data_adapter(_data_of(arguments), Mode.TRAIN, own_loss)
    with isolated():
        batch = next(iter(source.loader), None)
    if batch is None:
        raise DataError(
            "training data must yield at least one batch, but it is empty. Check the dataset's "
            "length and the sampler."
        )
    return BatchValidator(source, Mode.TRAIN, own_loss, session.casting)(batch, 0)
