"""Methods of Model that describe it and predict what it would do; nothing is trained."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Callable, Literal, Mapping, Optional, Sequence, Tuple, Union

from torch import nn

from ipufit.core import PipelineSchedule, Reference
from ipufit.core.batch import Mode
from ipufit.data.adapters import DataArguments
from ipufit.data.settings import Loading
from ipufit.engines.choice import engine_maker
from ipufit.errors import ConfigurationError, NotCompiledError
from ipufit.optim.several import name_of_optimizer
from ipufit.partition.request import PartitionRequest
from ipufit.training.fit_data import FitRequest, plan_of_fit
from ipufit.training.sanity_check import wrap_batch_errors
from ipufit.training.session import Session, require_one_loss
from ipufit.training.summary import check_options, sample_for, sample_of, summarize
from ipufit.utils.console import preformatted
from ipufit.utils.error_collector import ErrorCollector
from ipufit.utils.names import with_hints
from ipufit.utils.state import device_of

if TYPE_CHECKING:
    from ipufit.analysis.check import CheckReport
    from ipufit.analysis.compare.invariance_report import InvarianceReport
    from ipufit.engines.ipu.preflight import PreflightReport
    from ipufit.planner.partition_plan import PartitionPlan
    from ipufit.tracing.comparison import Comparison

__all__ = ["InspectionMixin"]


@with_hints("check", "preflight")
class InspectionMixin:
    """The methods of :class:`ipufit.Model` that look without training.

    Most programs call none of them, so what they need is imported when they are called.

    Attributes:
        module: the user's module.
    """

    module: nn.Module
    _session: Optional[Session]

    def explain(
        self,
        x: Any = None,
        y: object = None,
        batch_size: Optional[int] = None,
        *,
        steps_per_epoch: Optional[int] = None,
        ipus: Optional[int] = None,
        device_iterations: Optional[int] = None,
        gradient_accumulation: Optional[int] = None,
        loading: Optional[Loading] = None,
    ) -> None:
        """Print what ``fit`` would do with these arguments, in plain words; nothing is run.

        Args:
            x: as for ``fit``; None explains the last ``fit``.
            y: as for ``fit``, and checked like there; the plan is the same without.
            batch_size: as for ``fit``.
            steps_per_epoch: as for ``fit``.
            ipus: as for ``fit``.
            device_iterations: as for ``fit``.
            gradient_accumulation: as for ``fit``.
            loading: as for ``fit``.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: neither a loader nor an earlier ``fit``; or, as for ``fit``,
                arguments that can't work; all of them.
            PlanError: the batch algebra does not fit; with all faults.
            DataError: data that can't be read.
        """
        faults = ErrorCollector(of_call=True)
        session = self._compiled("explain")
        plan = session.last_plan
        if x is not None:
            request = FitRequest(
                DataArguments("training data", x, y, batch_size=batch_size),
                steps_per_epoch=steps_per_epoch,
                ipus=ipus,
                device_iterations=device_iterations,
                gradient_accumulation=gradient_accumulation,
                loading=loading,
            )
            plan = plan_of_fit(session, request, faults)
        elif (batch_size, steps_per_epoch, loading) != (None, None, None):
            raise ConfigurationError(
                "explain needs data for batch_size, steps_per_epoch and loading, got none. Pass "
                "explain(x, ...), or leave them out to explain the last fit."
            )
        if plan is None:
            raise ConfigurationError(
                "explain needs a loader, explain(loader, ipus=...), or an earlier fit; got neither."
            )
        faults.raise_all()
        print(f"{plan.explain()}\n{session.explain()}")

    def summary(
        self,
        x: Any = None,
        *,
        line_length: Optional[int] = None,
        depth: Optional[int] = None,
        expand_nested: bool = True,
        print_fn: Optional[Callable[[str], Any]] = None,
    ) -> None:
        """Print the layers with output shapes and parameters, the totals, and the plan.

        Works before ``compile`` too; after ``fit``, the plan and how it ran are part of it. See
        docs/history-and-summary.md.

        Args:
            x: a batch of inputs as ``predict`` takes it, a tuple ``(inputs, target)``, or a loader,
                whose first batch is read. Only its shapes and dtypes matter: no value is computed,
                no buffer changes and no random number is drawn. None takes those of the last
                ``fit``; without one, output shapes are unknown.
            line_length: longest line, at least 60; wider cells are broken into lines. None has no
                limit.
            depth: levels of layers to show; parameters of deeper ones count in the last level
                shown. None shows all.
            expand_nested: False shows one level, like ``depth=1``.
            print_fn: called once with the whole text, as in Keras; None prints it.

        Raises:
            ConfigurationError: an option that can't be honoured.
            DataError: the batch can't be fed.
        """
        check_options(line_length, depth, expand_nested, print_fn)
        session = self._session
        if session is None:
            sample, more, marks = None if x is None else sample_of(x, None), [], {}
        else:
            form = session.form(Mode.PREDICT)
            # What steps of the user's own take is nothing to call the module with.
            sample = session.sample if form.own_loss == session.loss.in_module else None
            if x is not None:
                sample = sample_of(x, form, casting=session.casting)
            more = [session.last_plan.explain()] if session.last_plan is not None else []
            more.append(session.explain())
            marks = session.divided.partitions.marks()
        levels = depth if expand_nested else 1
        text = summarize(self.module, sample, line_length, levels, more, marks)
        (print_fn or print)(text)

    def _repr_html_(self) -> str:
        """Return what ``repr`` says and the layers, one level deep, for notebooks."""
        return preformatted(f"{self!r}\n{summarize(self.module, None, None, 1, [], {})}")

    def plan(
        self,
        x: Any = None,
        *,
        ipus: Optional[int] = None,
        gradient_accumulation: Optional[int] = None,
        ipus_per_replica: Optional[int] = None,
        stages: Union[Mapping[str, Union[int, Tuple[int, int]]], str, None] = None,
        layers_per_ipu: Optional[Sequence[int]] = None,
        layers: Union[str, Sequence[str], None] = None,
        strategy: Optional[Literal["pipelined", "sharded"]] = None,
        schedule: PipelineSchedule = "grouped",
        recompute: Union[bool, str, Sequence[str], None] = None,
        ipu_memory: Optional[int] = None,
    ) -> PartitionPlan:
        """Estimate what training takes on IPUs: memory, FLOPs and time of every stage.

        One micro-batch goes through module, loss and backward pass as tensors without values;
        nothing is changed. Without a division of its own and of ``compile``, the plan finds one:
        the smallest power of two of stages that fits memory, the slowest stage as fast as it can
        be; ``compile(parallel=plan)`` takes it. See docs/planner.md.

        Args:
            x: a micro-batch: inputs as ``predict`` takes them, a tuple or list of inputs and
                target, with which the loss is counted too, or a loader, whose first batch is read.
                Only shapes and dtypes matter. None takes those of the last ``fit``.
            ipus: as for ``fit``; at most so many are looked for.
            gradient_accumulation: as for ``fit``; None is the smallest that fills the pipeline.
            ipus_per_replica: find a division into so many stages.
            stages: as for :class:`ipufit.Parallel`; None is what ``compile`` was told, "auto" to
                find them.
            layers_per_ipu: as for :class:`ipufit.Parallel`.
            layers: as for :class:`ipufit.Parallel`.
            strategy: "pipelined" or "sharded"; None is what ``compile`` was told.
            schedule: of a pipeline: "grouped", as PopTorch's, "interleaved" or "sequential".
            recompute: what is kept of activations, the rest being computed anew: True for the
                inputs of the stages, and the outputs of the layers that ``Memory(recompute=...)``
                names; other names instead of those; False keeps all. None is as compiled: True in
                a pipeline, where PopTorch does so by itself, else False.
            ipu_memory: bytes of an IPU to fill at most; None is all of 1,472 tiles x 624 KiB.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: neither a batch nor an earlier ``fit``, or arguments that can't
                work; ``PartitionError`` and ``PlanError`` are two kinds of it.
            DataError: the batch can't be fed.
            CaptureError: the module can't be recorded.
        """
        from ipufit.planner.plan_partition import plan_partition

        session = self._compiled("plan")
        require_one_loss(session, "plan")
        request = PartitionRequest(stages, layers_per_ipu, layers, strategy, ipus_per_replica)
        work = (ipus, gradient_accumulation, schedule, recompute, ipu_memory)
        read_sample = functools.partial(sample_for, session, x, "plan")
        estimator = session.plan_estimator
        return plan_partition(session.divided, estimator, read_sample, request, *work)

    def preflight(self, x: Any = None) -> PreflightReport:
        """Say what the model needs changed before it can run on an IPU through PopTorch 3.4.

        One micro-batch goes through module and loss as tensors without values; nothing is changed.
        Operators, layers, loss, optimizer, settings and types are held against facts from
        PopTorch's published source and documentation. No IPU has run any of it, and what no fact
        is about is called unknown. See docs/preflight.md.

        Args:
            x: a micro-batch: inputs as ``predict`` takes them, a tuple or list of inputs and
                target, with which the loss is looked at too, or a loader, whose first batch is
                read. Only shapes and dtypes matter. None takes those of the last ``fit``.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: neither a batch nor an earlier ``fit``.
            DataError: the batch can't be fed, or module or loss can't take it.
        """
        session = self._compiled("preflight")
        require_one_loss(session, "preflight")
        sample = sample_for(session, x, "preflight")
        mode = Mode.PREDICT if session.optimizer is None else Mode.TRAIN
        with wrap_batch_errors(session.explainer(mode, "preflight"), sample):
            return session.preflight(sample)

    def compare(
        self,
        sample: Any,
        reference: Reference = "eager",
        *,
        rtol: Optional[float] = None,
        atol: Optional[float] = None,
    ) -> Comparison:
        """Hold the recorded training program against the module itself, value by value.

        One micro-batch runs through the graph that ``fit`` runs and through the module, with the
        same weights, buffers, data, random numbers and precision; every operator of both passes,
        every module's output, the loss, the gradients and the buffers are compared, and then the
        results of what runs in the graph's place. All is put back as it was. See docs/diagnosis.md.

        Args:
            sample: a micro-batch as ``train_on_batch`` takes it, ``(inputs, target)``, or a loader,
                whose first batch is read.
            reference: "eager"; or "float64", the same in double precision, which shows where the
                program's own precision loses most.
            rtol: what a tensor may differ by, of its largest magnitude; None is that of its dtype:
                1e-10 in float64, 1e-4 in float32, 0.01 in float16, 0.05 in bfloat16. Integers must
                be equal; NaN is equal to NaN.
            atol: the same besides; None is 1e-14, 1e-7, 1e-4 and 1e-3.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: inside ``fit``, arguments that can't work, no recorded program, or
                an engine whose programs can't be looked into.
            DataError: the batch can't be fed.
            CaptureError: the module can't be recorded.
        """
        from ipufit.analysis.compare.comparisons import compare

        return compare(self._trainable("compare"), sample, reference, (rtol, atol))

    def check_invariance(
        self, sample: Any, *, rtol: Optional[float] = None, atol: Optional[float] = None
    ) -> InvarianceReport:
        """Try whether weights depend on how the samples of an update are divided.

        Copies of module, loss and optimizer make four updates of the sample with several batch
        sizes, gradient accumulations, replicas and device iterations, eagerly and in float64 where
        they can, so that rounding is no cause. What breaks it is found by repeating each module
        with a part of its rows. Several processes have the numbers of as many replicas, so these
        stand for them. Nothing of the model changes. See docs/diagnosis.md.

        Args:
            sample: the samples of one update, as ``train_on_batch`` takes them, 4 or more with
                divisors, such as 8 or 12; or a loader, whose first batch is read.
            rtol: what weights and losses may differ by, of their largest magnitude; None is 1e-7 in
                float64, else that of the dtype, as for :meth:`compare`.
            atol: the same besides.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: inside ``fit``, arguments that can't work, or a module that can't be
                copied.
            DataError: the batch can't be fed, or has one sample.
        """
        from ipufit.analysis.compare.comparisons import check_invariance

        session = self._trainable("check_invariance")
        return check_invariance(session, engine_maker("embedded"), sample, (rtol, atol))

    def check(self, x: Any = None) -> CheckReport:
        """Say what of this module a recorded program would not do as it is written.

        A program is recorded once and then repeated, so that Python code in ``forward`` and in the
        loss runs once: a counter stands still, a branch is taken for good. The micro-batch goes
        through module, loss and backward pass a few times, in train mode and in eval mode, without
        values and, where something is wrong, with them, on copies. The runs are held against each
        other. Weights, buffers, optimizer, generators, attributes and modes are left as they were,
        and what forward prints is not shown.

        Works before ``compile`` too, then without a loss: gradients are those of all outputs. See
        docs/check.md.

        Args:
            x: a micro-batch: inputs as ``predict`` takes them, a tuple or list of inputs and
                target, with which the loss is checked too, or a loader, whose first batch is read.
                None takes random numbers in the shapes of the last ``fit``; where inputs are whole
                numbers, such as class indices, zeros.

        Returns:
            The findings, each with file, line and what to write instead; empty, and false, where
            there are none.

        Raises:
            ConfigurationError: neither a batch nor an earlier ``fit``.
            DataError: the batch can't be fed, or the module can't take it.
        """
        from ipufit.analysis.check.check import checked

        return checked(self.module, self._session, x, sys._getframe(1))

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.parameters())
        parts = [f"{type(self).__name__} of {type(self.module).__name__}, {count:,} parameters"]
        session = self._session
        if session is None:
            return f"<{parts[0]}, not compiled>"
        optimizer = session.optimizer
        parts += [name_of_optimizer(optimizer) if optimizer else "no optimizer"]
        parts += [f"loss {session.loss.name}"]
        parts += [f"metrics {', '.join(session.metrics.names)}"] if session.metrics else []
        parts += [f"{session.engine.name} engine on {device_of(self.module)}"]
        return f"<{', '.join(parts)}, {session.updates:,} updates>"

    def _compiled(self, name: str) -> Session:
        if self._session is None:
            instead = "Pass loss='cross_entropy', or call" if name == "evaluate" else "Call"
            raise NotCompiledError(
                f"{name} needs a compiled model. {instead} "
                "model.compile(optimizer='adam', loss='cross_entropy') first."
            )
        return self._session

    def _trainable(self, name: str, later: str = "Call it after fit has returned.") -> Session:
        session = self._compiled(name)
        if session.is_training:
            raise ConfigurationError(
                f"{name} was called inside fit, from a callback or the data. {later}"
            )
        if session.optimizer is None:
            raise ConfigurationError(
                f"{name} needs an optimizer, but compile got none, which only evaluates and "
                "predicts. Call compile with one, such as optimizer='adam'."
            )
        return session
