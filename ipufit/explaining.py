"""What ``explain`` and ``summary`` say of a model, from what ``compile`` and ``fit`` left."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

from torch import nn

from ipufit.data.forms import Given, open_data
from ipufit.errors import ConfigurationError
from ipufit.fit_data import limited_plan
from ipufit.program import Mode
from ipufit.session import Session
from ipufit.summary import sample_of, summarize

__all__ = ["explained", "summarized"]


def explained(
    session: Session, x: Any, batch_size: Any, steps: Any, limit: Any, work: Tuple[Any, Any, Any]
) -> str:
    """The plan, and how the program runs.

    Args:
        session: of the model.
        x: training data; None for the plan of the last ``fit``.
        batch_size: of data without batches of its own.
        steps: ``steps_per_epoch``.
        limit: ``limit_train_batches``.
        work: ipus, device_iterations, gradient_accumulation.

    Raises:
        ConfigurationError: neither data nor an earlier ``fit``, or arguments that can't work.
    """
    plan = session.last_plan
    if x is not None:
        given = Given("training data", x, batch_size=batch_size)
        source = open_data(given, Mode.PREDICT, session.loss.in_module)
        plan = limited_plan(session, source, limit, steps, work)
    elif (batch_size, steps, limit) != (None, None, None):
        raise ConfigurationError(
            "explain needs the data that batch_size, steps_per_epoch and limit_train_batches are "
            "for, got none. Pass explain(x, ...), or leave them out to explain the last fit."
        )
    if plan is None:
        raise ConfigurationError(
            "explain needs a loader, explain(loader, ipus=...), or an earlier fit; got neither."
        )
    return f"{plan.explain()}\n{session.explain()}"


def summarized(
    module: nn.Module,
    session: Optional[Session],
    x: Any,
    line_length: Optional[int],
    depth: Optional[int],
) -> str:
    """The table of layers and, after ``compile``, the plan and how the program runs.

    Args:
        module: the user's.
        session: None before ``compile``.
        x: a batch or a loader; None for the shapes of the last ``fit``.
        line_length: longest line.
        depth: levels to show.
    """
    own_loss = session is not None and session.loss.in_module
    casting = None if session is None else session.casting
    sample = None if x is None else sample_of(x, own_loss, casting=casting)
    more: List[str] = []
    if session is not None:
        sample = session.sample if x is None else sample
        more += [session.last_plan.explain()] if session.last_plan is not None else []
        more.append(session.explain())
    marks = session.partitions.marks() if session is not None else {}
    return summarize(module, sample, line_length, depth, more, marks)
