"""The recorder, which writes a run down for its report while it goes on."""

from __future__ import annotations

import contextlib
import datetime
import math
import operator
import os
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from ipufit.callbacks.callback_list import Measurement, ObservedSession, Observer
from ipufit.callbacks.epoch_metrics import EpochMetrics
from ipufit.callbacks.history import History, values_to_json
from ipufit.errors import ConfigurationError, IpufitError
from ipufit.report import facts
from ipufit.report.advice import advised
from ipufit.report.page import write_page
from ipufit.report.rows import ExecutionTable, columns_of
from ipufit.report.run import FACTS, Run, append_rows, write_facts, write_rows
from ipufit.report.settings import Profiler, Report
from ipufit.utils.console import warn_user
from ipufit.utils.devices import memory_of_tensors
from ipufit.utils.phase_timer import NO_CLOCK, PHASES
from ipufit.utils.random_streams import LOCK
from ipufit.utils.state import device_of, fork_rng

_STATUS = "/proc/self/statm"


def _in_use(device: torch.device) -> float:
    """Bytes that tensors have on a device, or this process has in memory; nan where unknown."""
    of_tensors = memory_of_tensors(device)
    if of_tensors is not None:
        return of_tensors
    try:
        with open(_STATUS, encoding="ascii") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError, AttributeError):
        return math.nan


# After the first so many executions, those that together take less than these seconds have one row.
_FIRST, _SHORTEST = 1000, 0.005
# Seconds between two looks at memory, which are also those between two writes of rows.
_FLUSH = 0.5
# Facts grow with every epoch. They are written at the end of the first few; of later ones if as
# long has passed since the last time, and so many times as long as that took.
_FEW, _APART = 10, 100


@contextlib.contextmanager
def recorded(
    session: ObservedSession, report: Report, goes_on_from: Optional[int]
) -> Iterator[Recorder]:
    """A recorder of what the block does; the report is made at its end, however it ends.

    Args:
        session: of the model.
        report: that is asked for.
        goes_on_from: update at which a run goes on; None for one that begins.

    Raises:
        ConfigurationError: the folder can't be written.
    """
    recorder = Recorder(session, report, goes_on_from)
    try:
        with recorder.warnings.listening():
            session.engine.clock = recorder.clock
            yield recorder
    except BaseException as error:
        # What went wrong in training is what has to be seen.
        with contextlib.suppress(Exception):
            recorder.end(error)
        raise
    else:
        recorder.end(None)
    finally:
        session.engine.clock = NO_CLOCK


class Recorder(Observer):
    """Writes down the facts and executions of one ``fit``.

    Args:
        session: of the model.
        report: where to.
        goes_on_from: update at which a run goes on, with what the folder has of it before.

    Attributes:
        clock: of this run.
        warnings: counts the warnings of this run.

    Raises:
        ConfigurationError: the folder can't be written.
    """

    phase = "report"

    def __init__(
        self, session: ObservedSession, report: Report, goes_on_from: Optional[int]
    ) -> None:
        self._session = session
        self._report = report
        self._profiler = Profiler(report.profiler, report.folder)
        self.clock = self._profiler.clock
        self.warnings = facts.CapturedWarnings()
        self._rows = ExecutionTable()
        self._earlier = 0.0
        self._earlier_phases = dict.fromkeys(PHASES, 0.0)
        self._facts: Dict[str, Any] = {
            "status": "running",
            "error": "",
            "begun": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "title": type(session.module).__name__,
            "epochs": [],
        }
        try:
            os.makedirs(report.folder, exist_ok=True)
            if goes_on_from is not None:
                self._go_on(goes_on_from)
            write_rows(report.folder, self._rows.flat)
        except OSError as error:
            raise ConfigurationError(
                f"folder of Report must be writable, but {report.folder!r} is not: {error}. Pass "
                "another path."
            ) from error
        # What the clock would have shown if an earlier part of the run had ended just now.
        self._from = time.perf_counter() - self._earlier
        self._device = device_of(session.module)
        self._job: Optional[Measurement] = None
        self._history: Optional[History] = None
        self._written, self._halvings = len(self._rows.flat), self._rows.halvings
        self._flushed = self._wrote = self._writing = 0.0
        self._memory = _in_use(self._device)
        self._is_lost = False
        self._added = 0
        self._mark()

    def _go_on(self, update: int) -> None:
        """Keep what the folder has of the run that goes on, up to an update."""
        folder = self._report.folder
        if not os.path.exists(os.path.join(folder, FACTS)):
            return
        run = Run.read(folder)
        before = run.facts
        if before["title"] != self._facts["title"]:
            return
        self._rows.take(run.rows, update)
        epochs = before["epochs"]
        finished = [each for each in epochs if each["first_update"] + each["updates"] <= update]
        self._facts.update(begun=before["begun"], epochs=finished)
        self._earlier, self._earlier_phases = float(before["seconds"]), before["phases"]

    @property
    def _now(self) -> float:
        """Seconds since the run began, those of an earlier part of it included."""
        return time.perf_counter() - self._from

    def _mark(self) -> None:
        """Count time and samples from this moment on."""
        self._rows.count_from(self.clock.look())
        if self._job is not None:
            self._before = self._counted(self._job.meter)
        self._begin_row()

    def _begin_row(self) -> None:
        """Begin a row at the last reading of the clock."""
        begins = self.clock.since
        self._begins = begins - self._from
        self._due = begins + _SHORTEST if self._added >= _FIRST else -math.inf
        self._pending = 0

    def begin(self, job: Measurement, history: History, updates: Optional[int]) -> None:
        """Write down what the run is made of, when all is prepared for training.

        Args:
            job: of the training.
            history: of the run; it is looked at again at the end of each epoch.
            updates: that are to be made, if that is known.
        """
        session, self._job, self._history = self._session, job, history
        with self.clock.during("report"):
            # To look at the module is to run it, which may draw random numbers.
            with LOCK, fork_rng():
                self._facts.update(
                    layers=facts.layers(session.module, job.first),
                    plan=facts.partition(session, job.plan),
                )
            self._facts.update(
                environment=facts.environment(session, self._device),
                first_update=job.program.updates,
                total_updates=updates,
                totals=facts.totals(session.module),
                popvision=job.program.popvision,
            )
            self._write()
        self._profiler.start()

    def begin_executions(self, epoch: int) -> None:
        """Begin an epoch, or go on in the middle of one."""
        assert self._job is not None
        meter = self._job.meter
        self._mark()
        self._epoch = {
            "epoch": epoch,
            "begin": self._begins,
            "first_update": self._job.program.updates - meter.updates,
        }
        self._at_epoch = self.clock.read()
        self._executions = 0

    def end_execution(self, epoch: int, outputs: List[Any]) -> None:
        """Count an execution that is over, callbacks included."""
        self._pending += 1
        if time.perf_counter() >= self._due:
            self._add_row()
        self._profiler.step()

    def end_executions(self) -> None:
        """Add the last row of an epoch: time from here on belongs to no execution."""
        if self._pending:
            self._add_row()

    def _add_row(self) -> None:
        """Add a row for all executions since the last one."""
        assert self._job is not None
        meter, seconds = self._job.meter, self.clock.look()
        before, self._before = self._before, self._counted(meter)
        updates, samples, skipped, total, weight = map(operator.sub, self._before, before)
        mean = total / weight if weight else math.nan
        settings = meter.settings_now
        rate = settings.get("learning_rate")
        numbers = (
            self._begins,
            self._epoch["epoch"],
            self._epoch["first_update"] + before[0],
            self._pending,
            updates,
            samples,
            # Not by way of sums, so that it is the number that callbacks have seen.
            meter.last_loss if self._pending == 1 else mean,
            self._learning_rate() if rate is None else rate,
            settings.get("loss_scale", math.nan),
            skipped,
            self._memory,
        )
        self._rows.add_later(numbers, seconds)
        self._added += 1
        self._executions += self._pending
        self._begin_row()
        if self._begins - self._flushed > _FLUSH:
            self._safely(self._flush)

    def _counted(self, meter: EpochMetrics) -> Tuple[float, ...]:
        """Return the sums of this epoch: updates, samples, skipped updates, losses and weights."""
        return (meter.updates, meter.samples, meter.skipped, *meter.sums)

    def _learning_rate(self) -> float:
        """The learning rate of the first group of parameters; nan where there is none."""
        groups = self._session.groups
        return float(groups[0].get("lr", math.nan)) if groups else math.nan

    def end_epoch(self, epoch: int, logs: Dict[str, float]) -> None:
        """Write down an epoch that is over, callbacks included."""
        assert self._job is not None
        meter, seconds = self._job.meter, self.clock.read()
        spent = [after - before for after, before in zip(seconds, self._at_epoch)]
        self._facts["epochs"].append(
            {
                **self._epoch,
                "seconds": sum(spent),
                "executions": self._executions,
                "updates": meter.updates,
                "samples": meter.samples,
                "phases": dict(zip(PHASES, spent)),
            }
        )
        if "operators" not in self._facts:
            with self.clock.during("report"):
                self._facts["operators"] = self._profiled()
        is_due = self._now - self._wrote >= max(_FLUSH, _APART * self._writing)
        is_due = is_due or len(self._facts["epochs"]) <= _FEW
        self._safely(self._flush, *([self._write] if is_due else []))

    def _safely(self, *steps: Callable[[], None]) -> None:
        """Run steps that write; if the disk refuses, training goes on without its report."""
        if self._is_lost:
            return
        with self.clock.during("report"):
            try:
                for step in steps:
                    step()
            except OSError as error:
                self._is_lost = True
                warn_user(
                    f"the report in {self._report.folder!r} ends here, because it can't be written "
                    f"any more: {error}. Training continues without it.",
                )

    def _profiled(self) -> Dict[str, object]:
        """Time one micro-batch operator by operator; else say why that can't be done."""
        assert self._job is not None
        if not self._report.operators:
            return {"missing": "they were not asked for: Report(operators=False)"}
        try:
            operators = self._job.program.profile(self._job.first)
        except IpufitError as error:
            return {"missing": str(error)}
        except Exception as error:
            # Hours of training are worth more than a table.
            why = f"{type(error).__name__}: {error}"
            warn_user(
                f"the operators of the report could not be timed ({why}). Training continues, and "
                "the rest of the report is complete; Report(operators=False) does not try.",
                RuntimeWarning,
            )
            return {"missing": why}
        if operators is None:
            name = self._session.engine.name
            return {"missing": f"the {name} engine can't time single operators"}
        return operators

    def _flush(self) -> None:
        """Write the rows that are new."""
        self._flushed = self._now
        self._memory = _in_use(self._device)
        flat, folder = self._rows.flat, self._report.folder
        if self._rows.halvings != self._halvings:
            self._halvings = self._rows.halvings
            write_rows(folder, flat)
        elif len(flat) > self._written:
            append_rows(folder, flat[self._written :])
        self._written = len(flat)

    def _write(self) -> None:
        """Write the facts as they are now."""
        begun = self._now
        phases = {
            name: seconds + self._earlier_phases.get(name, 0.0)
            for name, seconds in self.clock.seconds().items()
        }
        self._facts.update(seconds=sum(phases.values()), phases=phases)
        job, history = self._job, self._history
        if job is not None and history is not None:
            explained = f"{job.plan.explain()}\n{self._session.explain()}"
            self._facts.update(
                params=dict(history.params),
                explain=explained.splitlines(),
                history=values_to_json(history),
            )
        self._facts["warnings"] = self.warnings.to_entries()
        self._facts["warnings"] += advised(self._facts, columns_of(self._rows.flat))
        write_facts(self._report.folder, self._facts)
        self._wrote = self._now
        self._writing = self._wrote - begun

    def end(self, error: Optional[BaseException]) -> None:
        """Close the report of a run that is over, and make its page.

        Args:
            error: that ended it; None where it came to its end.
        """
        self._profiler.stop()
        self._rows.close()
        if error is None:
            self._facts["status"] = "finished"
        elif isinstance(error, (KeyboardInterrupt, SystemExit)):
            self._facts["status"] = "interrupted"
        else:
            self._facts.update(status="failed", error=f"{type(error).__name__}: {error}")
        self._safely(self._flush, self._write, lambda: write_page(self._report.folder))
