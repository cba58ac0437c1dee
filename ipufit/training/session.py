"""Session: the settings that ``compile`` fixed, and the program that has the device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

import torch

from ipufit.callbacks.epoch_metrics import EpochMetrics
from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.compile_arguments import EagerFallback, role_of
from ipufit.core.logged_values import merge_rules
from ipufit.core.outputs import check_rows
from ipufit.core.plan import Plan
from ipufit.core.train_config import TrainConfig, check_interval
from ipufit.data.batches import BatchValidator, is_weighted
from ipufit.data.casting import Casting
from ipufit.data.fields import BatchForm
from ipufit.data.pipeline import BatchPipeline, JobSpec
from ipufit.data.source import DataAdapter
from ipufit.engines.ipu_settings import IpuSettings
from ipufit.engines.program import Engine, Program, ProgramSpec
from ipufit.errors import CaptureError, ConfigurationError, MetricError, PlanError
from ipufit.losses import Turn
from ipufit.metrics.metric_set import MetricSet
from ipufit.optim.resolve import bound_tensors, outside_optimizer, warn_of_late
from ipufit.optim.several import name_of_optimizer
from ipufit.partition.own_blocks import UncountedError
from ipufit.partition.partition import Partition
from ipufit.planner.divided_module import DividedModule
from ipufit.processes import ALONE, Processes, current
from ipufit.tracing.validate import initialize, refuse_unready
from ipufit.training import sanity_check
from ipufit.training.execution_sync import ExecutionSync
from ipufit.training.trainer import Job
from ipufit.utils.console import warn_user
from ipufit.utils.interrupts import defer_signals
from ipufit.utils.names import check_log_name
from ipufit.utils.random_streams import draw_seed, isolated
from ipufit.utils.state import device_of, version_of

if TYPE_CHECKING:
    from ipufit.engines.ipu.preflight.report import PreflightReport
    from ipufit.planner.planning import PartitionEstimator

__all__ = ["JobSpec", "Session"]


class Session:
    """The life of a model between two calls of ``compile``.

    Args:
        divided: module, loss and optimizer, how an update is made, and where the module lies on
            IPUs.
        metrics: normal form; copied for every use.
        engine: builds the programs.
        options: the engine's own settings, by the argument of ``compile``.
        fixed: arguments of later calls that ``compile`` has fixed; none by default.

    Attributes:
        divided, metrics, engine, fixed: as given.
        module, loss, config: those of the divided module.
        fallback: what of the module can't be recorded, and runs eagerly.
        casting: dtypes to which batches are brought.
        updates: weight updates done so far.
        last_plan, sample: batch algebra and shapes of the last ``fit``, or None.
        is_retired: whether the model has been compiled anew or closed.
        around: puts something around every program, which stands for it from then on.
    """

    def __init__(
        self,
        divided: DividedModule,
        metrics: MetricSet,
        engine: Engine,
        options: Optional[Mapping[str, object]] = None,
        fixed: Optional[IpuSettings] = None,
    ) -> None:
        self.divided = divided
        self.module, self.loss, self.config = divided.module, divided.loss, divided.config
        self.metrics = metrics
        self.engine = engine
        self.fixed = fixed or IpuSettings()
        self.casting = Casting(self.module, self.loss, self.config.precision)
        self._optimizer = divided.optimizer
        self._options = options or {}
        self._ipus: Dict[bool, Optional[int]] = {}
        self.updates = 0
        self.last_plan: Optional[Plan] = None
        self.sample: Optional[MicroBatch] = None
        self.is_retired = False
        self._runs = self._swaps = 0
        # Of the loss, which the user has been told of.
        self._doubts: List[object] = []
        self._seed: Optional[int] = None
        self._training: Optional[Program] = None
        self.fallback = EagerFallback()
        self._modules = [self.module, *([self.loss.module] if self.loss.module is not None else [])]
        self._bound = bound_tensors(self._modules, self._optimizer)
        self.left_out = outside_optimizer([*self.module.named_parameters()], self._optimizer)
        self.around: Callable[[Program, ProgramSpec], Program] = lambda program, spec: program

    @property
    def processes(self) -> Processes:
        """Processes that work together; of several, each has a model like this one."""
        return current()

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The torch optimizer, with the state of the running program if there is one."""
        if self._training is not None:
            self._training.publish()
        return self._optimizer

    @property
    def groups(self) -> List[Dict[str, Any]]:
        """The groups of parameters of the optimizer, with their present settings."""
        return [] if self._optimizer is None else self._optimizer.param_groups

    def gather_optimizer(self) -> Optional[torch.optim.Optimizer]:
        """Return the optimizer, whole in all processes, which call this at the same time."""
        (self._training or self.engine).gather_optimizer()
        return self.optimizer

    def enter_eval(self) -> None:
        """Put an optimizer's separate weights for evaluation into the module."""
        if self._training is not None:
            self._training.enter_eval()

    def gather_weights(self) -> None:
        """Bring the module's weights up to date, in all processes at the same time."""
        if self._training is not None:
            self._training.gather_weights()

    @property
    def is_training(self) -> bool:
        """True while a training program has the weights."""
        return self._training is not None

    def seed(self) -> int:
        """One seed for all single updates until the next ``compile``."""
        if self._seed is None:
            fixed = self.fixed.seed_or(None)
            self._seed = draw_seed() if fixed is None else fixed
        return self._seed

    @property
    def present_updates(self) -> int:
        """Weight updates done since ``compile``, also by a program that still trains."""
        return self.updates if self._training is None else self._training.updates

    def weights_version(self) -> object:
        """Another value after any change of the parameters, by whomever."""
        in_place = [version_of(parameter) for parameter in self.module.parameters()]
        return self.present_updates, self._training, self._runs, self._swaps, in_place

    def swap_averages(self) -> None:
        """Exchange weights and their moving averages.

        Raises:
            ConfigurationError: there are none, or no program that keeps them.
        """
        if self.config.ema is None or self._training is None:
            has_none = self.config.ema is None
            missing = "ema= in compile" if has_none else "a running fit"
            raise ConfigurationError(
                f"swap_ema_weights swaps weights and their moving averages, which needs {missing}. "
                "Call it in a callback of a model compiled with ema=ipufit.EMA()."
            )
        self._training.swap_averages()
        self._swaps += 1

    def resolve_work(self, source: DataAdapter, training: bool, **arguments: Any) -> Dict[str, Any]:
        """Fill in what ``compile`` has fixed of ipus, device_iterations and gradient_accumulation.

        Args:
            source: of which the module's own blocks are counted where IPUs are to be shared out.
            training: False for evaluate and predict.
            arguments: as the user has them.

        Raises:
            PlanError: an argument disagrees with what is fixed.
        """
        if arguments["ipus"] is not None or "ipus" in self.fixed.names(training):
            self.divided.count_own_ipus(functools.partial(self.example, source), training)
        return self.fixed.resolve(training, self.divided.partitions.of(training), **arguments)

    def example(self, source: DataAdapter, mode: Mode) -> Optional[MicroBatch]:
        """A micro-batch like those of a source; None where none can be made of it beforehand."""
        try:
            with isolated():
                raw = source.preview()
                return self.unpack(source, mode, raw[0]) if raw else None
        except Exception:
            return None  # whoever reads the data says what is wrong with it

    def form(self, mode: Mode) -> BatchForm:
        """Describe the batches that module and loss take in a mode."""
        loss = self.loss
        names = (loss.inputs, loss.targets, loss.field_names, loss.target_name)
        sums_weights = loss.sample_weight_reduction == "mean_with_sample_weight"
        one_target = loss.rule is not None and loss.field_names is None
        tries = functools.partial(sanity_check.runs_with_list, self.module, self.casting)
        more = (sums_weights, one_target, tries)
        return BatchForm(self.module, loss.own_loss(mode), *names, *more)

    def unpack(self, source: DataAdapter, mode: Mode, batch: object) -> MicroBatch:
        """Bring the first batch of a source into the form that a program takes.

        Args:
            source: the data.
            mode: train, evaluate or predict.
            batch: as a loader yields it.

        Raises:
            DataError: it can't be fed.
        """
        return BatchValidator(source, mode, self.form(mode), self.casting)(batch, 0)

    def plan(
        self,
        source: DataAdapter,
        ipus: Optional[int],
        device_iterations: int,
        gradient_accumulation: int,
        training: bool,
        fixed_updates: Optional[int] = None,
    ) -> Plan:
        """Check the batch algebra; a batch size that only the first batch tells counts as 1."""
        processes = self.processes
        source.share(processes.num_processes, processes.process_id)
        self._ipus[training] = ipus
        passes = training and fixed_updates is not None
        partition = self.divided.partitions.of(training)
        is_pipeline = partition is not None and partition.pipelines(training, device_iterations)
        # How many stages the module's own blocks make shows with the first micro-batch.
        is_own = partition is not None and partition.is_own
        try:
            plan = Plan.make(
                stages=partition.ipus if partition is not None else 1,
                depth=partition.depth if partition is not None else 0,
                pipelined=is_pipeline and not is_own,
                micro_batch_size=source.micro_batch_size or 1,
                ipus=ipus,
                device_iterations=device_iterations,
                gradient_accumulation=gradient_accumulation,
                samples=None if passes else source.samples,
                dropped=source.dropped,
                training=training,
                auto_round_ipus=self.divided.auto_round_ipus,
                fixed_updates=fixed_updates,
                processes=processes.num_processes,
                process=processes.process_id,
            )
        except PlanError as error:
            raise _told_of_compile(error) from error
        if is_pipeline and is_own:
            plan = dataclasses.replace(plan, pipelined=True)
        if plan.samples is None and not passes:
            plan = dataclasses.replace(plan, batches=source.micro_batches)
        if passes and fixed_updates is not None and source.samples and not source.smallest:
            # No batch is smaller than others, so all epochs have the same number of samples.
            plan = dataclasses.replace(plan, samples=fixed_updates * plan.update_size)
        return plan

    def _prepare_in_a_dtype(
        self, pipeline: BatchPipeline, first: MicroBatch, job: JobSpec, started: List[Job]
    ) -> None:
        """Start with whole numbers in the first dtype that module and loss run with."""
        explained = self.explainer(job.mode, job.source.role).explained([first])
        # What a signal raises meanwhile, such as the end of a worker, is no fault of the module.
        with pipeline.watched(), defer_signals(interrupts=False, handlers=True), explained:
            batch: Optional[MicroBatch] = first
            failure: Optional[Exception] = None
            while batch is not None:
                try:
                    prepared = self._prepare(pipeline, batch, job)
                except (CaptureError, MetricError, PlanError):
                    raise
                except Exception as error:
                    failure = failure or error
                    batch = pipeline.unpacker.recast()
                else:
                    started.append(prepared)
                    pipeline.unpacker.accept_dtypes(announce=self.processes.is_rank_zero)
                    return
            assert failure is not None
            raise failure

    def start(self, job: JobSpec, processes: Processes = ALONE) -> Job:
        """Build and prepare a program for a loader; every fault shows before any work.

        Args:
            job: what the program is for.
            processes: those that start it at the same time, if it starts in all.

        Raises:
            DataError: the loader's first batch can't be fed, or ``predict`` can't join the outputs.
            CaptureError: the module can't be recorded.
            LossError: the loss can't be trained on.
            MetricError: the metrics don't fit the outputs and targets.
            ProcessError: it fails in another process.
        """
        form = self.form(job.mode)
        pipeline = BatchPipeline(job, form, self.casting, self.engine.mixes_shapes)
        started: List[Job] = []
        try:
            first = processes.run_on_all_ranks(lambda: pipeline.peek(job.epoch, job.plan))
            # Where the loader does not say, all have the size of the first batch of process 0.
            sizes = processes.gather(pipeline.unpacker.micro_batch_size, "size of a batch")
            pipeline.unpacker.micro_batch_size = sizes[0]
            start = functools.partial(self._prepare_in_a_dtype, pipeline, first, job, started)
            processes.run_on_all_ranks(start)
            if not processes.is_distributed or not self.fallback.follow(job.mode, processes):
                return started[0]
            # They add up gradients in another way where the module itself runs.
            self.finish(started[0].program)
            return self._prepare_program(pipeline, first, job)
        except BaseException:
            pipeline.close()
            for each in started:
                self.finish(each.program)
            raise

    def _prepare(self, pipeline: BatchPipeline, first: MicroBatch, job: JobSpec) -> Job:
        training = job.mode is Mode.TRAIN
        if training:
            check_interval(self.config.outputs, job.plan.device_iterations)
        sanity_check.check_call(self.module, first, self.loss, f"{job.source.role}: ")
        if self.loss.in_module == "whole":
            refuse_unready(self.module)
        initialize(self.module, first, training)
        if training and job.source.class_weights is not None:
            sanity_check.check_class_weights(
                job.source.class_weights, self.module, first, self.loss
            )
        self.divided.divide(first, training)
        try:
            return self._prepare_program(pipeline, first, job)
        except UncountedError as error:
            self.divided.follow_blocks(error, training)
        plan = self.divided.with_counted_ipus(job.plan, self._ipus.get(training))
        return self._prepare_program(pipeline, first, dataclasses.replace(job, plan=plan))

    def _prepare_program(self, pipeline: BatchPipeline, first: MicroBatch, job: JobSpec) -> Job:
        may_help = functools.partial(self.engine.can_run_eagerly, self.config)
        prepare = functools.partial(self._prepare_once, pipeline, first, job)
        return self.fallback.prepared(job.mode, self.module, may_help, prepare)

    def _prepare_once(self, pipeline: BatchPipeline, first: MicroBatch, job: JobSpec) -> Job:
        mode = job.mode
        explainer = self.explainer(mode, job.source.role)
        explainer.origin = job.source.origin
        explainer.has_warned = not self.processes.is_rank_zero
        if mode is Mode.TRAIN:
            self.loss.examine(self.module, first)
        self.divided.count_stages(first, mode is Mode.TRAIN)
        plan = self.divided.with_stage_count(job.plan)
        size = pipeline.unpacker.micro_batch_size or first.size
        plan = dataclasses.replace(plan, micro_batch_size=size)
        metrics = MetricSet() if mode is Mode.PREDICT else self.metrics.fresh()
        metrics.check_joined(self.processes.num_processes)
        wants_outputs = bool(metrics) or job.wants_outputs
        build = functools.partial(
            self.build, plan, mode, job.seed, job.domain, wants_outputs, job.profile_folder
        )
        program = build()
        try:
            # An interrupt in the middle of a recording could leave torch recording for good.
            with defer_signals():
                prepared = program.prepare(first)
            explainer.labels = prepared.loss.labels
            for doubt in prepared.loss.doubts if self.processes.is_rank_zero else ():
                if doubt not in self._doubts:
                    self._doubts.append(doubt)
                    warn_user(". ".join(doubt))
            explainer.check_labels([first])
            if metrics:
                sanity_check.probe(metrics, prepared.outputs, first, self.loss)
            if mode is Mode.PREDICT:
                check_rows(prepared.outputs, first)
            with defer_signals():
                tail = sanity_check.prepare_tail(program, plan, first, job.source, explainer)
            rules = merge_rules(prepared.rules, tail.rules if tail is not None else {})
            for name, rule in rules.items():
                check_log_name(name, metrics.names, rule.exact)
        except BaseException:
            self.finish(program)
            raise
        settings = self.config.settings if mode is Mode.TRAIN else ()
        meter = EpochMetrics(metrics, plan, self.loss, rules, settings)
        weighted = job.source.role if mode is Mode.TRAIN and is_weighted(first) else None
        sync = ExecutionSync(self.processes, plan, job.source.is_portioned, weighted)
        renewed = functools.partial(self._renewed, build)
        more = (pipeline, sync, explainer, renewed, prepared.outputs)
        return Job(program, mode, plan, meter, first, *more)

    def _renewed(self, build: Callable[[], Program], program: Program) -> Program:
        """A program for the tensors that are there now, which may be the present one.

        Args:
            build: builds one.
            program: the present one; finished if there is another one.
        """
        bound = bound_tensors(self._modules, self._optimizer)
        if program is not self._training or bound == self._bound:
            return program
        self.finish(program)
        warn_of_late(self.module, self._optimizer, self.left_out)
        return build()

    def build(
        self,
        plan: Plan,
        mode: Mode,
        seed: int,
        domain: str,
        wants_outputs: bool,
        profile_folder: Optional[str] = None,
    ) -> Program:
        """Build the engine's program, with what goes around it; one that trains has the weights.

        Args:
            plan: of its executions.
            mode: train, evaluate or predict.
            seed: of all random numbers.
            domain: keeps them apart from those of other programs.
            wants_outputs: whether it hands out what the module returns.
            profile_folder: where the engine puts a profile that its own tools read, if it can.

        Raises:
            ConfigurationError: the engine is a user's own, and makes something else.
        """
        fixed_seed = None if mode is Mode.TRAIN else self.fixed.inference.seed
        # What a step of its own predicts is no (outputs, loss).
        with_loss = mode is not Mode.PREDICT or self.loss.in_module is True
        spec = ProgramSpec(
            module=self.module,
            loss=self.loss if with_loss else None,
            optimizer=self._optimizer if mode is Mode.TRAIN else None,
            plan=plan,
            mode=mode,
            want_outputs=wants_outputs or mode is Mode.PREDICT,
            seed=seed if fixed_seed is None else fixed_seed.value,
            domain=domain,
            first_update=self.updates,
            config=self.config,
            options=self._options.get(role_of(mode)),
            partition=self.divided.partitions.of(mode is Mode.TRAIN),
            processes=self.processes,
            profile_folder=profile_folder,
            fallback=self.fallback,
        )
        if mode is not Mode.TRAIN:
            self.enter_eval()
        spec = spec.eager if (mode, None) in self.fallback.reasons else spec
        program = self.engine.build(spec)
        if not isinstance(program, Program):
            raise ConfigurationError(
                f"{type(self.engine).__name__}.build must return an object of a class that derives "
                f"from ipufit.engines.Program, got {program!r}. Derive its class."
            )
        program = self.around(program, spec)
        if mode is Mode.TRAIN:
            self._training = program
            self._bound = bound_tensors(self._modules, self._optimizer)
        return program

    def check_engine(self, config: TrainConfig) -> None:
        """Have the engine refuse what it can't do, as ``compile`` does.

        Args:
            config: how an update is made.

        Raises:
            ConfigurationError: the engine can't run the model like this.
        """
        self.engine.check(dataclasses.replace(self.divided, config=config), self._options)

    def explainer(self, mode: Mode, role: str) -> sanity_check.FailureExplainer:
        """Says why module or loss can't take a micro-batch.

        Args:
            mode: of the program that fails.
            role: of the data.
        """
        where = (role, device_of(self.module).type != "cpu", self.processes.is_distributed)
        return sanity_check.FailureExplainer(
            self.module, self.loss, mode, self.config.precision, *where
        )

    def plan_estimator(
        self, sample: MicroBatch, partition: Optional[Partition], recompute: Sequence[str]
    ) -> PartitionEstimator:
        """Return what says how divisions of the module do, where the batch may be a user's.

        Args:
            sample: a micro-batch.
            partition: whose rules are checked on the way.
            recompute: layers from whose outputs recomputation starts.

        Raises:
            DataError, LossError, CaptureError: module or loss can't take the batch.
        """
        with sanity_check.wrap_batch_errors(self.explainer(Mode.TRAIN, "plan"), sample):
            return self.divided.estimator(sample, partition, recompute)

    def preflight(self, sample: MicroBatch) -> PreflightReport:
        """Hold the model against what PopTorch says of itself.

        Args:
            sample: a micro-batch.
        """
        from ipufit.engines.ipu.preflight.evaluate import preflight

        return preflight(self.module, self.loss, self._optimizer, self.config, sample)

    def explain(self) -> str:
        """How the program of this session runs, in one or two lines."""
        from ipufit.partition.cut_layers import describe_cuts

        is_eager = self.config.run_eagerly or self.fallback.is_whole(Mode.TRAIN)
        how = "the module itself, eagerly" if is_eager else "one recorded program"
        optimizer = name_of_optimizer(self._optimizer) if self._optimizer else "no optimizer"
        first = (
            f"Runs {how} on the {self.engine.name} engine, device {device_of(self.module)}, with "
            f"{optimizer}; gradients reduced by {self.config.gradient_reduction}."
        )
        more = ", ".join(f"{name}={value!r}" for name, value in self.config.extras().items())
        lines = [first, *[f"Compiled with {more}."] * bool(more)]
        turns = self.loss.turns or ([Turn(self.loss, 1, 1, 0)] if self.loss.differentiates else [])
        lines += [*self.fallback.describe(), *(turn.describe() for turn in turns)]
        lines += [*self.divided.partitions.describe(), *describe_cuts(self.module)]
        lines += [*self.fixed.remarks, *self.casting.describe(), *self._explain_processes()]
        return "\n".join([*lines, *self.engine.explain(self.config, self._options)])

    def _explain_processes(self) -> List[str]:
        """Which process this is, and what the processes send each other for every update."""
        processes = self.processes
        if not processes.is_distributed:
            return []
        if self._optimizer is None:
            return [processes.describe()]
        trained = [p for p in self.module.parameters() if p.requires_grad]
        size = sum(p.numel() * p.element_size() for p in trained)
        when = "micro-batch" if self.config.shard_weights else "update"
        return [
            f"{processes.describe()} In every {when} the gradients of all processes are added, "
            f"{size:,} bytes each; the timeout is {processes.timeout:g} s.",
        ]

    def retire(self) -> None:
        """The model has been compiled anew, or closed: let go of what the engine keeps."""
        self.is_retired = True
        self.engine.close()

    def choices(self) -> Optional[Dict[str, str]]:
        """Return what decides between ways that round otherwise, for a checkpoint."""
        choices = self.engine.choices()
        return None if choices is None else {**choices, **self.fallback.choices()}

    def prefer(self, choices: Mapping[str, str]) -> None:
        """Choose what another run has chosen, so that a run that goes on computes alike."""
        self.engine.prefer(self.fallback.prefer(choices))

    def buffers(self) -> List[torch.Tensor]:
        """All buffers of the module and the loss."""
        return [buffer for module in self._modules for buffer in module.buffers()]

    def finish(self, program: Program) -> None:
        """Give the device back, and keep the count of updates; safe twice."""
        with defer_signals():
            try:
                program.close()
            finally:
                if program is self._training:
                    self.updates = program.updates
                    self._runs += 1
                    self._training = None

    @contextlib.contextmanager
    def running(self, job: Job) -> Iterator[Job]:
        """The job, finished afterwards whatever happens."""
        try:
            with job.pipeline.watched():
                yield job
        finally:
            try:
                job.pipeline.close()
            finally:
                self.finish(job.program)


def _told_of_compile(error: PlanError) -> PlanError:
    """An error of the plan in the words of who called fit: rounding is an argument of compile."""
    name = "auto_round_ipus"
    faults = [
        fault.replace(f"{name}=True", f"compile(..., parallel=ipufit.Parallel({name}=True))")
        for fault in error.faults
    ]
    return PlanError(faults, {k: v for k, v in error.suggestion.items() if k != name})
