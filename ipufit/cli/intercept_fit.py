"""Interception of ``fit`` while a script runs, by a function that looks at what it would train."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, TypeVar

from ipufit.callbacks.history import History
from ipufit.core.batch import MicroBatch, Mode
from ipufit.data.adapters import DataArguments, get_data_adapter
from ipufit.errors import IpufitError
from ipufit.training.arguments import FitConfig
from ipufit.training.fit_data import FitRequest
from ipufit.training.model import Model
from ipufit.training.session import Session
from ipufit.utils.random_streams import isolated

__all__ = ["UNREADABLE", "Look", "check_fit_arguments", "first_micro_batch", "intercept_fit"]

UNREADABLE = 2

T = TypeVar("T")
# Called in the place of fit with the model, its session, the arguments by name, and who calls.
Look = Callable[[Model, Session, Mapping[str, Any], FrameType], T]


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
    look: Look[T],
    show: Callable[[List[T]], Tuple[int, str]],
    verb: str,
    as_json: bool,
    every: bool = False,
    in_one_line: bool = False,
) -> int:
    """Run a script with ``Model.fit`` replaced, and print what came of it.

    Args:
        execute: runs it.
        look: what is done instead; it returns what it found out.
        show: makes the exit status and the text to print of all that was found out.
        verb: name of the command, for messages.
        as_json: the text is JSON; what the script prints goes to stderr.
        every: go on after the first ``fit``, which then returns an empty history.
        in_one_line: tell an error of ours in ``look`` without its traceback. One that the script
            meets by itself keeps its own, which says where.

    Returns:
        The exit status; 2 of a script that failed or fits no model.
    """
    results: List[T] = []

    def looking(
        model: Model, session: Session, arguments: Mapping[str, object], caller: FrameType
    ) -> None:
        try:
            # A script may catch what ends it, and go on to another fit.
            if every or not results:
                results.append(look(model, session, arguments, caller))
        except IpufitError as fault:
            if not in_one_line:
                raise
            raise _EnoughError(fault) from fault

    out = sys.stderr if as_json else sys.stdout
    try:
        with _fit_replaced(looking, every), contextlib.redirect_stdout(out):
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
    if not results:
        sys.stderr.write(
            f"ipufit {verb}: the script must call fit of an ipufit.Model, but did not. Pass the "
            "arguments with which it trains.\n"
        )
        return UNREADABLE
    status, text = show(results)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return status


@contextlib.contextmanager
def _fit_replaced(look: Look[None], every: bool) -> Iterator[None]:
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
        raise source.no_batches(0)
    return session.unpack(source, Mode.TRAIN, batch)
