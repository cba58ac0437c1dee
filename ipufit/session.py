"""What ``compile`` fixed, and the one place that decides which program has the device."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ipufit import loop, tree
from ipufit.callbacks import CallbackList
from ipufit.data.batches import Unpacker
from ipufit.data.feed import Feed
from ipufit.data.source import Source
from ipufit.errors import ConfigurationError, DataError, IpufitError, MetricError, PlanError
from ipufit.interrupts import deferred
from ipufit.logged import joined_rules
from ipufit.loop import Job
from ipufit.losses import Loss
from ipufit.meter import Meter, metric_target
from ipufit.metrics import MetricSet
from ipufit.modes import evaluating
from ipufit.names import check_log_name
from ipufit.plan import Plan
from ipufit.program import Engine, MicroBatch, Mode, Prepared, Program, ProgramSpec
from ipufit.randomness import draw_seed, isolated
from ipufit.recipe import Recipe

__all__ = ["Session", "Validation"]


class Session:
    """The life of a model between two calls of ``compile``.

    Args:
        module: the user's module.
        optimizer: torch's optimizer over its parameters; None to evaluate and predict only.
        loss: normal form.
        metrics: normal form; copied for every use.
        engine: builds the programs.
        recipe: how an update is made.
        auto_round_ipus: whether IPUs may be rounded up.
        run_eagerly: whether programs run the module itself.
        options: settings of the engine's own, by the argument of ``compile``.

    Attributes:
        updates: weight updates done so far.
        last_plan, sample: batch algebra and shapes of the last ``fit``, or None.
        is_retired: whether the model has been compiled anew or closed.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optional[torch.optim.Optimizer],
        loss: Loss,
        metrics: MetricSet,
        engine: Engine,
        recipe: Recipe,
        auto_round_ipus: bool = False,
        run_eagerly: bool = False,
        options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        self._options = options or {}
        self.module = module
        self.engine = engine
        self.loss = loss
        self.metrics = metrics
        self.updates = 0
        self.last_plan: Optional[Plan] = None
        self.sample: Optional[MicroBatch] = None
        self.is_retired = False
        self._runs = self._swaps = 0
        self._seed: Optional[int] = None
        self._optimizer = optimizer
        self.recipe = recipe
        self.auto_round_ipus = auto_round_ipus
        self.run_eagerly = run_eagerly
        self._training: Optional[Program] = None
        self._left_out = self._outside_optimizer()

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The torch optimizer, with the state of the running program if there is one."""
        if self._training is not None:
            self._training.publish()
        return self._optimizer

    @property
    def is_training(self) -> bool:
        """Whether a training program has the weights."""
        return self._training is not None

    def seed(self) -> int:
        """One seed for all single updates until the next ``compile``."""
        if self._seed is None:
            self._seed = draw_seed()
        return self._seed

    def weights_version(self) -> object:
        """Another value after any change of the parameters, by whomever."""
        program = self._training
        updates = self.updates if program is None else program.updates
        in_place = [p._version for p in self.module.parameters() if not p.is_inference()]
        return updates, program, self._runs, self._swaps, in_place

    def swap_averages(self) -> None:
        """Exchange weights and their moving averages.

        Raises:
            ConfigurationError: there are none, or no program that keeps them.
        """
        if self.recipe.averaging is None or self._training is None:
            has_none = self.recipe.averaging is None
            missing = "use_ema=True in compile" if has_none else "a running fit"
            raise ConfigurationError(
                f"swap_ema_weights exchanges weights and their moving averages, which needs "
                f"{missing}. Call it from a callback of a model compiled with use_ema=True."
            )
        self._training.swap_averages()
        self._swaps += 1

    def plan(
        self,
        source: Source,
        ipus: Optional[int],
        device_iterations: int,
        gradient_accumulation: int,
        training: bool,
        fixed_updates: Optional[int] = None,
    ) -> Plan:
        """Check the batch algebra; a batch size that only the first batch tells counts as 1."""
        passes = training and fixed_updates is not None
        plan = Plan.make(
            micro_batch_size=source.micro_batch_size or 1,
            ipus=ipus,
            device_iterations=device_iterations,
            gradient_accumulation=gradient_accumulation,
            samples=None if passes else source.samples,
            dropped=source.dropped,
            training=training,
            auto_round_ipus=self.auto_round_ipus,
            fixed_updates=fixed_updates,
        )
        if passes and fixed_updates is not None and source.samples and not source.smallest:
            # No batch is smaller than others, so all epochs have the same number of samples.
            plan = dataclasses.replace(plan, samples=fixed_updates * plan.update_size)
        return plan

    def start(
        self,
        source: Source,
        plan: Plan,
        mode: Mode,
        seed: int,
        domain: str,
        epoch: int = 0,
        wants_outputs: bool = False,
        cut_every: Sequence[int] = (),
        prefetch: int = 0,
    ) -> Job:
        """Build and prepare a program for a loader; every fault shows before any work.

        Args:
            source: the data.
            plan: its batch algebra.
            mode: train, evaluate or predict.
            seed: of all random numbers.
            domain: keeps them apart from those of other jobs.
            epoch: the first one.
            cut_every: an execution ends wherever the count of this job's updates is a multiple of
                one of these.
            prefetch: executions to prepare ahead.

        Raises:
            DataError: the loader's first batch can't be fed, or ``predict`` can't join the outputs.
            CaptureError: the module can't be recorded.
            LossError: the loss can't be trained on.
            MetricError: the metrics don't fit the outputs and targets.
        """
        if mode is Mode.TRAIN:
            self.recipe.output_mode.check(plan.device_iterations)
        feed = Feed(source, mode, self.loss.in_module, seed, domain, cut_every, prefetch)
        try:
            with feed.watched():
                first = feed.peek(epoch, plan)
                return self._prepared(feed, first, source, plan, mode, seed, domain, wants_outputs)
        except BaseException:
            feed.close()
            raise

    def _prepared(
        self,
        feed: Feed,
        first: MicroBatch,
        source: Source,
        plan: Plan,
        mode: Mode,
        seed: int,
        domain: str,
        wants_outputs: bool,
    ) -> Job:
        _check_call(self.module, first, self.loss, source)
        plan = dataclasses.replace(plan, micro_batch_size=feed.micro_batch_size or first.size)
        metrics = MetricSet() if mode is Mode.PREDICT else self.metrics.fresh()
        spec = self._spec(plan, mode, seed, domain, bool(metrics) or wants_outputs)
        program = self.engine.build(spec)
        if mode is Mode.TRAIN:
            self._training = program
        try:
            # An interrupt in the middle of a recording could leave torch recording for good.
            with deferred():
                prepared = program.prepare(first)
            if metrics:
                self._probe(metrics, prepared.outputs, first)
            if mode is Mode.PREDICT:
                loop.check_rows(prepared.outputs, first.size)
            with deferred():
                tail = _prepare_tail(program, plan, first, source)
            for name in joined_rules(prepared.rules, tail.rules if tail is not None else {}):
                check_log_name(name, metrics.names)
        except BaseException:
            self.finish(program)
            raise
        settings = self.recipe.settings if mode is Mode.TRAIN else ()
        meter = Meter(metrics, plan, self.loss, prepared.rules, settings)
        return Job(program, feed, plan, meter, first)

    def _spec(
        self, plan: Plan, mode: Mode, seed: int, domain: str, has_metrics: bool
    ) -> ProgramSpec:
        with_loss = mode is not Mode.PREDICT or self.loss.in_module
        return ProgramSpec(
            module=self.module,
            loss=self.loss if with_loss else None,
            optimizer=self._optimizer if mode is Mode.TRAIN else None,
            plan=plan,
            mode=mode,
            want_outputs=has_metrics or mode is Mode.PREDICT,
            seed=seed,
            domain=domain,
            first_update=self.updates,
            recipe=self.recipe,
            run_eagerly=self.run_eagerly,
            options=self._options.get(
                "training_options" if mode is Mode.TRAIN else "inference_options"
            ),
        )

    def _probe(self, metrics: MetricSet, outputs: Any, first: MicroBatch) -> None:
        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.is_floating_point() or leaf.is_complex():
                return torch.rand(leaf.shape, dtype=leaf.dtype, device="cpu")
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")

        target = metric_target(first.clone(), self.loss)
        if target is None:
            raise MetricError(
                f"the metrics {', '.join(metrics.names)} need a target, but the module computes "
                "its own loss and the batch has no last argument, 'labels' or 'target' to take for "
                "it. Leave the metrics out, or compute the loss outside the module."
            )
        with isolated(torch.device("cpu")):
            sample_weight = first.clone().unpack()[3]
            metrics.probe(tree.map_leaves(fill, outputs), target, first.size, sample_weight)

    def explain(self) -> str:
        """How the program of this session runs, in one or two lines."""
        names = [p.device for p in self.module.parameters()]
        device = str(names[0]) if names else "cpu"
        how = "the module itself, eagerly" if self.run_eagerly else "one recorded program"
        optimizer = type(self._optimizer).__name__ if self._optimizer else "no optimizer"
        text = (
            f"Runs {how} on the {self.engine.name} engine, device {device}, with "
            f"{optimizer}; gradients reduced by {self.recipe.gradient_reduction}."
        )
        more = [f"{name}={value!r}" for name, value in self.recipe.describe().items()]
        text += f"\nCompiled with {', '.join(more)}." if more else ""
        explain = getattr(self.engine, "explain", None)
        return "\n".join([text, *(explain(self.recipe) if explain is not None else ())])

    def retire(self) -> None:
        """The model has been compiled anew, or closed: let go of what the engine keeps."""
        self.is_retired = True
        close = getattr(self.engine, "close", None)
        if close is not None:
            close()

    def buffers(self) -> List[torch.Tensor]:
        """All buffers of the module and the loss."""
        modules = [self.module, *([self.loss.module] if self.loss.module is not None else [])]
        return [buffer for module in modules for buffer in module.buffers()]

    def finish(self, program: Program) -> None:
        """Give the device back, and keep the count of updates; safe twice."""
        with deferred():
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
            with job.feed.watched():
                yield job
        finally:
            try:
                job.feed.close()
            finally:
                self.finish(job.program)

    def _outside_optimizer(self) -> List[str]:
        """Names of the trainable parameters that the optimizer has not."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        owned = {id(p) for group in groups for p in group["params"]}
        named = self.module.named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) not in owned]

    def warn_of_changes(self) -> None:
        """Say so if a parameter became trainable after ``compile`` made the optimizer."""
        late = [name for name in self._outside_optimizer() if name not in self._left_out]
        if late:
            warnings.warn(
                f"{', '.join(late[:5])}{', ...' if len(late) > 5 else ''} became trainable after "
                "compile made the optimizer, so fit leaves it as it is. Call compile again to "
                "train it.",
                UserWarning,
                stacklevel=4,
            )


class Validation:
    """Evaluates held-out data after each epoch of a fit, with random numbers of its own."""

    def __init__(
        self, session: Session, source: Source, plan: Plan, seed: int, prefetch: int = 0
    ) -> None:
        self._session = session
        self._source = source
        self._plan = plan
        self._seed = seed
        self._prefetch = prefetch

    def check(self, trained_on: MicroBatch) -> None:
        """Find out before training whether this data can be evaluated, without reading the loader.

        What is recorded for that is kept for the first evaluation.

        Raises:
            DataError: it is empty, can't be fed, or the module takes the training data only.
            CaptureError: the module can't be recorded in eval mode.
        """
        if self._source.micro_batches == 0:
            raise self._source.no_batches(0)
        with isolated(torch.device("cpu")):
            preview = self._source.preview()
        if not preview:
            return
        example = Unpacker(self._source, Mode.EVALUATE, self._session.loss.in_module)(preview[0], 0)
        source = Source(preview, self._source.role)
        try:
            with evaluating(self._session.module, self._session.loss.module):
                plan = dataclasses.replace(self._plan, fixed_updates=None)
                job = self._session.start(source, plan, Mode.EVALUATE, self._seed, "check")
                self._session.finish(job.program)
        except IpufitError:
            raise
        except Exception as error:
            if _form(example) == _form(trained_on):
                raise
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"
            raise DataError(
                f"the module must take the {source.role} like the training data, but it failed "
                f"with {reason}. It got {_shapes(example)}, in training {_shapes(trained_on)}. "
                "Bring both into one form in the dataset or collate_fn."
            ) from error

    def run(self, epoch: int, callbacks: CallbackList) -> Dict[str, float]:
        """Loss and metrics over all samples."""
        session = self._session
        kept = [(buffer, buffer.clone()) for buffer in session.buffers()]
        with evaluating(session.module, session.loss.module):
            job = session.start(
                self._source,
                self._plan,
                Mode.EVALUATE,
                self._seed,
                "validation",
                epoch,
                prefetch=self._prefetch,
            )
            try:
                with session.running(job):
                    return loop.evaluate(job, callbacks, epoch)
            finally:
                # A module may count in eval mode too; looking must not change training.
                for buffer, value in kept:
                    buffer.copy_(value)


def _check_call(module: nn.Module, first: MicroBatch, loss: Loss, source: Source) -> None:
    """Hold the batch against the signature of forward, before torch's own error for it."""
    args, kwargs, _, _ = first.unpack()
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [*(["1 input"] if len(args) == 1 else [f"{len(args)} inputs"] if args else [])]
        given += [f"{name}=" for name in kwargs]
        cure = "Bring the batch into the form that forward takes."
        if loss.in_module:
            cure = (
                "With loss=None every part of the batch goes to forward: pass loss= to compile, or "
                "let forward take the target and return (outputs, loss)."
            )
        raise DataError(
            f"{source.role}: {type(module).__name__}.forward{signature} can't take a batch of "
            f"{', '.join(given)}: {error}. {cure}"
        ) from error


def _prepare_tail(
    program: Program, plan: Plan, first: MicroBatch, source: Source
) -> Optional[Prepared]:
    """Build for a smaller last micro-batch too, so that a module that can't take it fails now."""
    size = plan.tail.last_micro_batch_size if plan.tail else first.size
    if plan.training and plan.fixed_updates is not None:
        size = source.smallest or first.size
    if size >= first.size:
        return None
    try:
        return program.prepare(first.cut(size))
    except PlanError:
        raise
    except Exception as error:
        raise DataError(
            f"the module must take every micro-batch of the {source.role}, but fails with the last "
            f"one of an epoch, which is smaller, {_n(size)} instead of {first.size}: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}. Choose "
            "another batch_size, or drop_last=True in the loader."
        ) from error


def _n(samples: int) -> str:
    return "1 sample" if samples == 1 else f"{samples} samples"


def _form(batch: MicroBatch) -> Tuple[Any, ...]:
    return (batch.structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in batch.leaves))


def _shapes(batch: MicroBatch) -> str:
    return " and ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in batch.leaves)


def describe(
    job_plan: Plan, session: Session, source: Source, seed: Optional[int]
) -> Dict[str, Any]:
    """How a run was made, for History."""
    return {
        "gradient_reduction": session.recipe.gradient_reduction,
        **session.recipe.describe(),
        "engine": session.engine.name,
        "seed": seed,
        "micro_batch_size": job_plan.micro_batch_size,
        "gradient_accumulation": job_plan.gradient_accumulation,
        "replicas": job_plan.replicas,
        "device_iterations": job_plan.device_iterations,
        "ipus": job_plan.ipus,
        "dropped_samples": source.dropped,
    }


def updates_per_epoch(plan: Plan, source: Source) -> Optional[int]:
    """From the plan, else from the number of batches, else unknown."""
    if plan.updates_per_epoch is not None:
        return plan.updates_per_epoch
    if source.micro_batches is None:
        return None
    return -(-source.micro_batches // plan.micro_batches_per_update)
