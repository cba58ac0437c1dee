"""``ipufit check``: a script runs as it is, and what it would fit is checked instead."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from typing import Any, Callable, Iterator, List, TextIO

import torch

from ipufit.data.batches import Unpacker
from ipufit.data.forms import Given, open_data
from ipufit.diagnose.check_model import checked_sample
from ipufit.diagnose.check_report import CheckReport
from ipufit.errors import DataError
from ipufit.history import History
from ipufit.model import Model
from ipufit.program import MicroBatch, Mode
from ipufit.randomness import isolated
from ipufit.session import Session

__all__ = ["check_script"]

CLEAN, FOUND, UNREADABLE = 0, 1, 2


class _EnoughError(BaseException):
    """Ends the script; no ``except Exception`` of its own holds it up."""


def check_script(execute: Callable[[], None], as_json: bool, every: bool) -> int:
    """Run a script with ``Model.fit`` replaced by a check of its first micro-batch.

    Args:
        execute: runs it.
        as_json: print the findings as JSON; what the script prints goes to stderr.
        every: go on after the first ``fit``, which then returns an empty history.

    Returns:
        The exit status: 0 where nothing was found, 1 for findings, 2 where the script failed or
        fits no model.
    """
    reports: List[CheckReport] = []
    out = sys.stdout
    try:
        with _fit_replaced(reports, every), _printing_to(sys.stderr if as_json else out):
            execute()
    except (_EnoughError, SystemExit):
        pass
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.write("ipufit check: the script failed, so that the check is not complete.\n")
        return UNREADABLE
    if not reports:
        sys.stderr.write(
            "ipufit check: the script must call fit of an ipufit.Model, but did not. Pass the "
            "arguments with which it trains.\n"
        )
        return UNREADABLE
    if as_json:
        out.write(json.dumps({"reports": [report.as_dict() for report in reports]}, indent=2))
        out.write("\n")
    else:
        out.write("\n\n".join(map(str, reports)) + "\n")
    out.flush()
    return FOUND if any(reports) else CLEAN


@contextlib.contextmanager
def _printing_to(stream: TextIO) -> Iterator[None]:
    with contextlib.redirect_stdout(stream):
        yield


@contextlib.contextmanager
def _fit_replaced(reports: List[CheckReport], every: bool) -> Iterator[None]:
    original: Any = Model.fit
    signature = inspect.signature(original)

    def fit(self: Model, *args: Any, **kwargs: Any) -> History:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        session = self._trainable("fit")
        sample = _first(session, given.arguments)
        reports.append(checked_sample(self.module, session, sample, sys._getframe(1)))
        if not every:
            raise _EnoughError
        self.history = History()
        return self.history

    Model.fit = fit  # type: ignore[method-assign]
    try:
        yield
    finally:
        Model.fit = original  # type: ignore[method-assign]


def _first(session: Session, given: Any) -> MicroBatch:
    """The first micro-batch of what ``fit`` was given.

    Raises:
        DataError: there is none, or it can't be fed.
    """
    names = ("x", "y", "sample_weight", "class_weight", "batch_size", "shuffle")
    own_loss = session.loss.in_module
    source = open_data(
        Given("training data", *(given[name] for name in names)), Mode.TRAIN, own_loss
    )
    with isolated(torch.device("cpu")):
        batch = next(iter(source.loader), None)
    if batch is None:
        raise DataError(
            "training data must yield at least one batch, but it is empty. Check the dataset's "
            "length and the sampler."
        )
    return Unpacker(source, Mode.TRAIN, own_loss)(batch, 0)
