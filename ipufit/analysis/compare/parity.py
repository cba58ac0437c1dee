"""Comparison of the recorded program with the module, for ``Model.compare``."""

from __future__ import annotations

from typing import Any, Tuple

from ipufit.analysis.tuner.trials import Trial
from ipufit.core.batch import Mode
from ipufit.core.compile_arguments import GRAPH, INDUCTOR
from ipufit.data.adapters import DataArguments, get_data_adapter
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError
from ipufit.tracing.comparison import Comparison, Tolerance
from ipufit.training.session import Session, require_single_process
from ipufit.training.summary import batch_of
from ipufit.utils.error_collector import ErrorCollector, one_of
from ipufit.utils.interrupts import defer_sigint

__all__ = ["REFERENCES", "compare"]

REFERENCES = ("eager", "float64")


def compare(
    session: Session, sample: object, reference: Any, tolerances: Tuple[Any, Any]
) -> Comparison:
    """Run one micro-batch through the program and through the reference; all is put back.

    Args:
        session: of the model.
        sample: a batch, or a loader, whose first one is taken.
        reference: one of REFERENCES.
        tolerances: relative and absolute; None for those of the dtype.

    Raises:
        ConfigurationError: arguments that can't work, or an engine whose programs can't be looked
            into.
        DataError: the batch can't be fed.
    """
    require_single_process(
        session, "compare", "Compare in one process: each runs the same program."
    )
    faults, tolerance = ErrorCollector(), Tolerance(*tolerances)
    with faults.collect():
        one_of("reference", reference, REFERENCES)
    with faults.collect():
        tolerance.check()
    faults.raise_all()
    beside = _beside(session)
    batch = batch_of(sample, session.loss.in_module, "compare")
    source = get_data_adapter(DataArguments("sample", [batch]), Mode.TRAIN, session.loss.in_module)
    plan = session.plan(source, None, 1, 1, training=True)
    # A compiled update tells nothing of its operators, and would be compiled only for this.
    jit = GRAPH if session.config.jit == INDUCTOR else None
    trial = Trial(session, lambda: beside, jit)
    with trial.running(source, plan, 0, lambda _: None) as job, defer_sigint():
        return job.program.compare(job.first, reference, tolerance)


def _beside(session: Session) -> Engine:
    beside = session.engine.beside()
    if beside is None:
        raise ConfigurationError(
            "compare runs the recorded program operator by operator, which needs "
            f"engine='embedded', got engine {session.engine.name!r}. Make the model with "
            "ipufit.Model(module, engine='embedded')."
        )
    return beside
