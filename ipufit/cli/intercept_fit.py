"""Interception of ``fit`` while a script runs, by a command that looks at what it would train."""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import inspect
import json
import sys
from types import FrameType
from typing import Any, Callable, Generic, List, Mapping, Optional, Tuple, TypeVar

from ipufit.callbacks.history import History
from ipufit.core.batch import MicroBatch, Mode
from ipufit.data.adapters import DataArguments, get_data_adapter
from ipufit.errors import IpufitError
from ipufit.training.arguments import FitConfig
from ipufit.training.fit_data import FitRequest
from ipufit.training.model import Model
from ipufit.training.session import Session
from ipufit.utils.random_streams import isolated
from ipufit.utils.state import replaced

UNREADABLE = 2

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FitCall:
    """A call of ``fit`` that was intercepted.

    Attributes:
        model: whose it is.
        session: of the model.
        arguments: by name, with their defaults.
        caller: frame of who calls.
    """

    model: Model
    session: Session
    arguments: Mapping[str, Any]
    caller: FrameType

    @property
    def _data(self) -> DataArguments:
        names = ("x", "y", "sample_weight", "class_weight", "batch_size", "shuffle")
        return DataArguments("training data", *(self.arguments[name] for name in names))

    def check_arguments(self, **instead: object) -> FitConfig:
        """Check the arguments, without files that ``fit`` would write.

        Args:
            instead: arguments in the place of these.
        """
        values = {**self.arguments, "checkpoint": None, "callbacks": (), **instead}
        return FitConfig.check(self.session, FitRequest.of(self._data, values))

    def first_micro_batch(self) -> MicroBatch:
        """Read the first micro-batch of the training data.

        Raises:
            DataError: there is none, or it can't be fed.
        """
        source = get_data_adapter(self._data, Mode.TRAIN, self.session.loss.in_module)
        with isolated():
            batch = next(iter(source.loader), None)
        if batch is None:
            raise source.no_batches(0)
        return self.session.unpack(source, Mode.TRAIN, batch)


class _EnoughError(BaseException):
    """Ends the script; no ``except Exception`` of its own holds it up.

    Args:
        fault: of what the script asked ``fit`` for; None where there is none.
    """

    def __init__(self, fault: Optional[IpufitError] = None) -> None:
        super().__init__(fault)
        self.fault = fault


class Examination(abc.ABC, Generic[T]):
    """A command that runs a script with ``Model.fit`` replaced, and prints what came of it.

    Args:
        options: of the command line, with ``command``, its name, and ``json``: the text is JSON
            then, and what the script prints goes to stderr.

    Attributes:
        every: go on after the first ``fit``, which then returns an empty history; as ``--all`` of a
            command that has it.
        in_one_line: tell an error of ours in ``look`` without its traceback. One that the script
            meets by itself keeps its own, which says where.
    """

    in_one_line = True

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.every: bool = vars(options).get("all", False)

    @abc.abstractmethod
    def look(self, call: FitCall) -> T:
        """Do what is done instead of ``fit``, and return what was found out."""

    @abc.abstractmethod
    def show(self, results: List[T]) -> Tuple[int, str, object]:
        """Make of all that was found out the exit status, the text, and plain values for JSON."""

    def run(self, execute: Callable[[], None]) -> int:
        """Run a script.

        Args:
            execute: runs it.

        Returns:
            The exit status; 2 if the script failed or never calls fit.
        """
        results: List[T] = []

        def look(call: FitCall) -> None:
            try:
                # A script may catch what ends it, and go on to another fit.
                if self.every or not results:
                    results.append(self.look(call))
            except IpufitError as fault:
                if not self.in_one_line:
                    raise
                raise _EnoughError(fault) from fault

        name = self.options.command
        out = sys.stderr if self.options.json else sys.stdout
        try:
            with _fit_replaced(look, self.every), contextlib.redirect_stdout(out):
                execute()
        except _EnoughError as enough:
            if enough.fault is not None:
                sys.stderr.write(f"ipufit {name}: {enough.fault}\n")
                return UNREADABLE
        except SystemExit:
            pass
        except Exception:
            sys.excepthook(*sys.exc_info())
            sys.stderr.write(f"ipufit {name}: the script failed, so the {name} is not complete.\n")
            return UNREADABLE
        if not results:
            sys.stderr.write(
                f"ipufit {name}: the script must call fit of an ipufit.Model, but it did not. "
                "Pass the arguments with which it trains.\n"
            )
            return UNREADABLE
        status, text, values = self.show(results)
        if self.options.json:
            text = json.dumps(values, indent=2, allow_nan=False)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        return status


def _fit_replaced(
    look: Callable[[FitCall], None], every: bool
) -> contextlib.AbstractContextManager[None]:
    original: Any = Model.fit
    signature = inspect.signature(original)

    def fit(self: Model, *args: Any, **kwargs: Any) -> History:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            original(self, *args, **kwargs)  # which says what was meant
            raise
        bound.apply_defaults()
        look(FitCall(self, self._trainable("fit"), bound.arguments, sys._getframe(1)))
        if not every:
            raise _EnoughError
        self.history = History()
        return self.history

    return replaced((Model, "fit", fit))
