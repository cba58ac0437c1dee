"""Report of a Trainer's training, as ``fit`` writes it for ``ipufit.Report``."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional

from ipufit.callbacks.epoch_metrics import EpochMetrics
from ipufit.callbacks.history import History
from ipufit.callbacks.running_fit import Measurement
from ipufit.core.batch import CombinedBatch, MicroBatch
from ipufit.core.logged_values import LogRule
from ipufit.core.plan import Plan
from ipufit.engines.program import ExecutionResult, Program
from ipufit.metrics import MetricSet
from ipufit.report.recorder import recorded
from ipufit.report.settings import Report
from ipufit.training.fit import describe_run
from ipufit.training.session import Session
from ipufit.training.summary import stripped
from ipufit.utils.phase_timer import NoClock

__all__ = ["TrainingReport"]


class TrainingReport:
    """Tells the recorder of a report what a Trainer's training does.

    Args:
        session: of the run.
        report: where to.
        epochs: that the Trainer is to make, -1 for any number.
        updates: that it is to make, or None where nobody knows.

    Raises:
        ConfigurationError: the folder can't be written.
    """

    def __init__(
        self, session: Session, report: Report, epochs: Optional[int], updates: Optional[int]
    ) -> None:
        self._session = session
        self._epochs, self._updates = epochs, updates
        self._history = History()
        self._context = recorded(session, report, None)
        self._recorder = self._context.__enter__()
        self._meter: Optional[EpochMetrics] = None
        self._epoch: Optional[int] = None

    @property
    def clock(self) -> NoClock:
        """The clock that counts the seconds of the run by phase."""
        return self._recorder.clock

    def begin(
        self, program: Program, plan: Plan, first: MicroBatch, rules: Mapping[str, LogRule]
    ) -> None:
        """Begin the report when the program is prepared.

        Args:
            program: of the training.
            plan: of its executions.
            first: a micro-batch.
            rules: how it logs values, by name.
        """
        session = self._session
        session.last_plan, session.sample = plan, stripped(first)
        meter = self._meter = EpochMetrics(
            MetricSet(), plan, session.loss, rules, session.config.settings
        )
        self._history.params = {
            "epochs": self._epochs,
            "updates": plan.updates_per_epoch,
            "samples": plan.samples,
            "directions": meter.directions,
            **describe_run(session, plan, session.seed()),
            "trainer": True,
        }
        self._recorder.begin(Measurement(program, plan, meter, first), self._history, self._updates)

    def begin_epoch(self, epoch: int) -> None:
        """Forget the values of the epoch before, and begin to time executions."""
        assert self._meter is not None
        self._meter.reset()
        self._epoch = epoch
        self._recorder.begin_executions(epoch)

    def add(self, batch: CombinedBatch, anchors: ExecutionResult) -> None:
        """Add an execution that has ended."""
        assert self._meter is not None
        self.clock.turn("metrics")
        self._meter.add(batch, anchors)
        self.clock.turn("callbacks")
        assert self._epoch is not None
        self._recorder.end_execution(self._epoch, [])

    def end_executions(self) -> None:
        """End the executions of an epoch as a validation begins."""
        if self._meter is not None:
            self._recorder.end_executions()

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        """Write down the values of an epoch.

        Args:
            metrics: ``callback_metrics`` of the Trainer.
        """
        if self._epoch is None:
            return
        assert self._meter is not None
        self._recorder.end_executions()
        values: Dict[str, float] = {name: value.item() for name, value in metrics.items()}
        epoch, self._epoch = self._epoch, None
        logs = {**values, "loss": self._meter.values()["loss"]}
        self._history.append(epoch, logs)
        self._recorder.end_epoch(epoch, logs)

    def end(self, error: Optional[BaseException]) -> None:
        """End the run and make the page.

        Args:
            error: that ended it; None where it came to its end.
        """
        kind = None if error is None else type(error)
        trace = None if error is None else error.__traceback__
        self._context.__exit__(kind, error, trace)
