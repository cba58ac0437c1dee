"""The recorded programs of a Trainer's run, and what their executions give."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import itertools
import sys
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional

import torch
from torch import Tensor

from ipufit.callbacks.callback_list import Measurement
from ipufit.callbacks.epoch_metrics import EpochMetrics
from ipufit.callbacks.history import History
from ipufit.core.batch import CombinedBatch, MicroBatch, Mode
from ipufit.core.logged_values import LogRule, Running
from ipufit.core.outputs import with_entries
from ipufit.core.plan import Plan, round_up
from ipufit.data.batches import BatchValidator
from ipufit.data.fields import BatchForm
from ipufit.data.source import DataAdapter
from ipufit.engines.program import ExecutionResult, Program
from ipufit.errors import CaptureError, ConfigurationError, PlanError
from ipufit.lightning_module.inspection import lightning_parts
from ipufit.lightning_module.model import LightningModel
from ipufit.lightning_module.trainer_proxy import replace_attributes
from ipufit.metrics.metric_set import MetricSet
from ipufit.partition.own_blocks import UncountedError
from ipufit.partition.partition import Partition
from ipufit.report.recorder import recorded
from ipufit.report.settings import Report
from ipufit.training.fit import describe_run
from ipufit.training.sanity_check import prepare_tail
from ipufit.training.session import Session
from ipufit.utils.interrupts import defer_signals
from ipufit.utils.phase_timer import NO_CLOCK, NoClock


def _package() -> str:
    """Return the name of the package that is in use already, else of the newer one."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in names:
        if sys.modules.get(name) is not None:
            return name
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return name
    raise ConfigurationError(
        "ipufit.lightning needs Lightning 2.1 or newer, which is not installed. Run pip install "
        "ipufit[lightning]."
    )


def part(name: str) -> Any:
    """Import a module of Lightning, such as "strategies"; "" is the package itself."""
    package = _package()
    return importlib.import_module(f"{package}.{name}" if name else package)


class ExecutionBatches(List[object]):
    """Batches of one execution, in order."""


class Executions:
    """Loader that yields as many batches at a time as an execution takes; the last may have fewer.

    Args:
        loader: an iterable of batches.
        count: how many.
        find_clock: what is told that data is read.

    Attributes:
        loader, count: the arguments.
    """

    def __init__(
        self, loader: Any, count: int, find_clock: Callable[[], NoClock] = lambda: NO_CLOCK
    ) -> None:
        self.loader = loader
        self.count = count
        self._find_clock = find_clock

    @property
    def sampler(self) -> object:
        """The sampler of the loader, which a Trainer tells the epoch."""
        return getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return -(-len(self.loader) // self.count)

    def __iter__(self) -> Iterator[ExecutionBatches]:
        batches = iter(self.loader)
        while True:
            clock = self._find_clock()
            clock.turn("data")
            execution = ExecutionBatches(itertools.islice(batches, self.count))
            clock.turn("callbacks")
            if not execution:
                return
            yield execution


class ExecutionSize(NamedTuple):
    """Counts of replicas, device iterations and accumulation, of which an execution is made."""

    replicas: int
    device_iterations: int
    accumulation: int

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in an execution."""
        return self.replicas * self.device_iterations * self.accumulation


@dataclasses.dataclass(frozen=True)
class Done:
    """Outputs and losses of an execution.

    Attributes:
        samples: how many it had.
        loss: their mean, shape (), float64; NaN when predicting.
        logged: values by name, each as one of all samples.
        outputs: the module's, of each micro-batch, when predicting.
    """

    samples: int
    loss: Tensor
    logged: Dict[str, Tensor]
    outputs: List[object]

    @staticmethod
    def of(anchors: ExecutionResult, combined: CombinedBatch) -> Done:
        """Make one from what a program returned."""
        sizes = [micro_batch.size for micro_batch in combined.micro_batches]
        logged = {}
        for name, rule in anchors.rules.items():
            running = Running(rule)
            for values, size in zip(anchors.logged, sizes):
                if name in values:
                    running.add(values[name], size, size)
            logged[name] = torch.tensor(running.value, dtype=torch.float64)
        loss = torch.tensor(float("nan"), dtype=torch.float64)
        if len(anchors.losses) == len(sizes):
            weights = torch.tensor(sizes, dtype=torch.float64)
            loss = (anchors.losses * weights).sum() / weights.sum()
        outputs = [*map(with_entries, anchors.outputs, combined.micro_batches)]
        return Done(sum(sizes), loss, logged, outputs)


class Programs:
    """One program for each mode, from its first execution until :meth:`finish`.

    Args:
        model: of the LightningModule; compiled before the first execution.
        profile_folder: where the engine puts a profile of training; None for none.

    Attributes:
        report: is written of the training to come, if there is one.
    """

    def __init__(self, model: LightningModel, profile_folder: Optional[str] = None) -> None:
        self._model = model
        self._profile_folder = profile_folder
        self._programs: Dict[Mode, Program] = {}
        self._unpackers: Dict[Mode, BatchValidator] = {}
        self._first: Optional[MicroBatch] = None
        self._epoch = 0
        self.report: Optional[TrainingReport] = None

    @property
    def clock(self) -> NoClock:
        """Counts the seconds of a report, if there is one."""
        return NO_CLOCK if self.report is None else self.report.clock

    def run(
        self, batch: ExecutionBatches, mode: Mode, work: ExecutionSize, trainer: Any
    ) -> List[Done]:
        """The batches of an execution; of several where more came than one takes."""
        micro_batches = self._micro_batches(batch, mode)
        with words_of_strategy():
            program = self._program(mode, micro_batches[0], work, trainer)
        if mode is Mode.TRAIN and trainer.current_epoch != self._epoch:
            self._begin_epoch(program, trainer)
        done = []
        for begin in range(0, len(micro_batches), work.micro_batches):
            combined = CombinedBatch(micro_batches[begin : begin + work.micro_batches])
            report = self.report if mode is Mode.TRAIN else None
            if report is not None:
                report.clock.turn("compute")
            with self._alone():
                anchors = program.run(combined)
            if report is not None:
                report.add(combined, anchors)
            done.append(Done.of(anchors, combined))
        return done

    def _micro_batches(self, batch: ExecutionBatches, mode: Mode) -> List[MicroBatch]:
        if mode not in self._unpackers:
            source = DataAdapter([batch[0]], f"{mode.value} data")
            self._unpackers[mode] = BatchValidator(source, mode, BatchForm(own_loss="whole"))
        unpacker = self._unpackers[mode]
        return [unpacker(raw, index) for index, raw in enumerate(batch)]

    def _program(
        self, mode: Mode, first: MicroBatch, work: ExecutionSize, trainer: object
    ) -> Program:
        if mode in self._programs:
            return self._programs[mode]
        session, trains = self._model.session, mode is Mode.TRAIN
        source = _training_data(trainer) if trains else None
        session.fallback.chooser, session.fallback.advice = "IPUStrategy", _ADVICE

        def prepare() -> Program:
            try:
                return self._prepared(mode, first, work, source, trainer)
            except BaseException:
                self.finish(mode)
                raise

        may_help = functools.partial(session.engine.can_run_eagerly, session.config)
        prepared = functools.partial(
            session.fallback.prepared, mode, session.module, may_help, prepare
        )
        # What a signal raises meanwhile, such as the end of a worker, is no fault of the module.
        with defer_signals(interrupts=False, handlers=True):
            try:
                return prepared()
            except UncountedError as error:
                session.divided.follow_blocks(error, trains)
            except CaptureError as error:
                raise _in_words_of_trainer(error) from error
            return prepared()

    def _prepared(
        self,
        mode: Mode,
        first: MicroBatch,
        work: ExecutionSize,
        source: Optional[DataAdapter],
        trainer: Any,
    ) -> Program:
        session, trains = self._model.session, mode is Mode.TRAIN
        with self._alone():
            session.divided.count_stages(first, trains)
        partition = session.divided.partitions.of(trains)
        stages = 1 if partition is None else partition.ipus
        if not session.divided.auto_round_ipus:
            _check_ipus(work.replicas, stages)
        plan = Plan.make(
            micro_batch_size=first.size,
            ipus=work.replicas * stages,
            stages=stages,
            device_iterations=work.device_iterations,
            gradient_accumulation=work.accumulation,
            samples=None if source is None else source.samples,
            training=trains,
            auto_round_ipus=session.divided.auto_round_ipus,
        )
        plan = dataclasses.replace(
            plan,
            depth=0 if partition is None else partition.depth,
            pipelined=partition is not None and _is_pipeline(partition, work, trains),
        )
        folder = self._profile_folder if trains else None
        program = self._programs[mode] = session.build(
            plan, mode, session.seed(), mode.value, bool(session.metrics), folder
        )
        if trains:
            self._first, self._epoch = first, trainer.current_epoch
        with self._alone():
            prepared = program.prepare(first)
            if source is not None:
                prepare_tail(program, plan, first, source, session.explainer(mode, source.role))
            if trains and self.report is not None:
                self.report.begin(program, plan, first, prepared.rules)
                self.report.begin_epoch(self._epoch)
        return program

    def _begin_epoch(self, program: Program, trainer: Any) -> None:
        assert self._first is not None
        program.publish()
        schedule, metrics = self._model.session.config.schedule, trainer.callback_metrics
        if schedule is not None:
            schedule.end_epoch({name: value.item() for name, value in metrics.items()})
        self._epoch = trainer.current_epoch
        # Hooks may have changed the module or the optimizer.
        with self._alone():
            if self.report is not None:
                self.report.end_epoch(metrics)
            program.prepare(self._first)
            if self.report is not None:
                self.report.begin_epoch(self._epoch)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The module without the Trainer, on which no program depends, and uninterrupted."""
        detached: Dict[str, object] = {"_trainer": None, "_current_fx_name": None}
        parts = lightning_parts(self._model.lightning)
        with replace_attributes([(part, detached) for part in parts]), defer_signals():
            yield

    def publish(self) -> None:
        """Bring torch's optimizer up to date."""
        if Mode.TRAIN in self._programs:
            self._programs[Mode.TRAIN].publish()

    def begin_validation(self) -> None:
        """End the last execution of training that the report has."""
        if self.report is not None:
            self.report.end_executions()

    def end_training(self, metrics: Mapping[str, object]) -> None:
        """Let go of the training program.

        Args:
            metrics: ``callback_metrics`` of the Trainer.
        """
        if self.report is not None:
            with self._alone():
                self.report.end_epoch(metrics)
        self.finish(Mode.TRAIN)

    def end_report(self, error: Optional[BaseException]) -> None:
        """Make the page of the report, if there is one; safe twice."""
        report, self.report = self.report, None
        if report is not None:
            with self._alone():
                report.end(error)

    def finish(self, *modes: Mode) -> None:
        """Let go of the programs of these modes; safe twice."""
        for mode in modes:
            program = self._programs.pop(mode, None)
            if program is not None:
                self._model.session.finish(program)


def _check_ipus(replicas: int, stages: int) -> None:
    """Make sure that so many replicas can have their IPUs.

    Raises:
        PlanError: their number is no power of two.
    """
    if replicas * stages == round_up(replicas * stages):
        return
    fits = stages == round_up(stages)
    cure = f"devices={round_up(replicas)}, or " if fits else ""
    raise PlanError(
        [
            f"IPUs come in powers of two, but devices={replicas} asks for {replicas} "
            f"replica{'s' * (replicas > 1)} of {stages} IPU{'s' * (stages > 1)}. Pass "
            f"{cure}options with autoRoundNumIPUs(True) as training_opts and inference_opts, which "
            "reserves more IPUs and leaves the rest idle."
        ],
        {"devices": round_up(replicas)} if fits else {},
    )


_ADVICE = (
    "Trainer(accelerator='cpu') trains it in Lightning's own loop, and IPUStrategy(engine='ipu') "
    "makes it an error."
)


def _in_words_of_trainer(error: CaptureError) -> CaptureError:
    """Replace the advice that holds for :class:`ipufit.Model` alone by what a Trainer can do."""
    text = f"{error.brief} To run this module as it is, without capture, use accelerator='cpu'."
    if error.kind == "anomaly":
        text = (
            f"{error.what}. Leave detect_anomaly=True out of the Trainer, or use "
            "ipufit.Model.from_lightning with compile(detect_nan=True), which names operator, line "
            "and samples."
        )
    reworded = copy.copy(error)
    reworded.brief, reworded.args = text, (text,)
    return reworded


@contextlib.contextmanager
def words_of_strategy() -> Iterator[None]:
    """Replace arguments of ``compile`` in the advice of an error by what a Trainer's user writes.

    Raises:
        ConfigurationError: the block's, with another text.
    """
    try:
        yield
    except ConfigurationError as error:
        text = str(error)
        for argument, instead in _INSTEAD_OF_COMPILE.items():
            text = text.replace(argument, instead)
        if text != str(error):
            error.args = (text,)
        raise


# What advice says to users of compile, and what users of IPUStrategy do.
_INSTEAD_OF_COMPILE = {
    "name its IPU in an object for strategy": (
        "name its IPU in an execution strategy, such as options.setExecutionStrategy("
        "poptorch.PipelinedExecution(...)) of training_opts and inference_opts"
    ),
    "Divide the module with stages, or pass ipus_per_replica=": (
        "Begin blocks in the module with poptorch.BeginBlock(layer, ipu_id=...), so that the IPUs "
        "of a replica are "
    ),
    "or use compile(optimizer=None) to only evaluate and predict": (
        "or call trainer.validate, test or predict, which need no optimizer"
    ),
}


def _is_pipeline(partition: Partition, work: ExecutionSize, trains: bool) -> bool:
    """Tell if the stages of an execution work at the same time; log what a user should know.

    Raises:
        PlanError: there is too little work for as many stages.
    """
    stages, least = partition.stages, 2 * partition.stages - 1
    is_pipeline = partition.pipelines(trains, work.device_iterations)
    if not is_pipeline or not trains or work.accumulation >= least:
        return is_pipeline
    if work.device_iterations < stages:
        raise PlanError(
            [
                f"device_iterations of IPUStrategy must be at least {stages} for a module in "
                f"{stages} stages, got {work.device_iterations}. Pass IPUStrategy("
                f"device_iterations={stages}), or Trainer(accumulate_grad_batches={least}), which "
                "fills a pipeline."
            ],
            {"device_iterations": stages},
        )
    part("utilities").rank_zero_info(
        f"The blocks of the module make {stages} stages. A pipeline that trains is filled by "
        f"accumulate_grad_batches={least} or more; with {work.accumulation}, the stages of a "
        "micro-batch run one after the other. The numbers are the same."
    )
    return False


def _training_data(trainer: Any) -> Optional[DataAdapter]:
    """Return the training data, whose end is prepared before it comes; None if unknown."""
    loader = trainer.train_dataloader
    return DataAdapter(loader.loader, "training data") if isinstance(loader, Executions) else None


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
        session.last_plan, session.sample = plan, first.stripped()
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
        self._recorder.begin(
            Measurement(program, Mode.TRAIN, plan, meter, first), self._history, self._updates
        )

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
