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
from ipufit.training.sanity_check import require_one_loss, wrap_batch_errors
from ipufit.training.session import Session
from ipufit.training.summary import check_options, sample_for, sample_of, summarize
from ipufit.utils.console import fold, preformatted, terminal_size
from ipufit.utils.error_collector import ErrorCollector
from ipufit.utils.names import with_hints
from ipufit.utils.state import device_of

if TYPE_CHECKING:
    from ipufit.analysis.check import CheckReport
    from ipufit.analysis.compare.invariance_report import InvarianceReport
    from ipufit.engines.ipu.preflight import PreflightReport
    from ipufit.planner.partition_plan import PartitionPlan
    from ipufit.tracing.comparison import Comparison


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
        """Print what ``fit`` would do with these arguments, without running anything.

        Args:
            x: as for ``fit``; None explains the last ``fit``.
            y: as for ``fit``, and checked in the same way; it does not change the plan.
            batch_size: as for ``fit``.
            steps_per_epoch: as for ``fit``.
            ipus: as for ``fit``.
            device_iterations: as for ``fit``.
            gradient_accumulation: as for ``fit``.
            loading: as for ``fit``.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: neither data nor an earlier ``fit``; or, as for ``fit``, arguments
                that can't work; with every fault.
            PlanError: the numbers of the plan are not possible; with every fault.
            DataError: data that can't be read.
        """
        arguments = dict(locals())
        faults = ErrorCollector(of_call=True)
        session = self._compiled("explain")
        plan = session.last_plan
        if x is not None:
            data = DataArguments("training data", x, y, batch_size=batch_size)
            plan = plan_of_fit(session, FitRequest.of(data, arguments), faults)
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
        columns, _ = terminal_size(sys.stdout)
        print(fold(f"{plan.explain(columns or 100)}\n{session.explain()}", columns))

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

        It works before ``compile`` too; after ``fit``, it includes the plan and how it ran. See
        docs/history-and-summary.md.

        Args:
            x: a batch of inputs as ``predict`` takes it, a tuple ``(inputs, target)``, or a loader,
                whose first batch is read. Only its shapes and dtypes matter: no value is computed,
                no buffer changes and no random number is drawn. None takes those of the last
                ``fit``; without a ``fit``, output shapes are unknown.
            line_length: length of the longest line, at least 60; wider cells are broken into lines.
                None sets no limit.
            depth: levels of layers to show; parameters of deeper layers count in the last level
                shown. None shows all.
            expand_nested: False shows one level, like ``depth=1``.
            print_fn: called once with the whole text, as in Keras; None prints it.

        Raises:
            ConfigurationError: an option that can't work.
            DataError: the batch can't be used.
        """
        check_options(line_length, depth, expand_nested, print_fn)
        self._ready()
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
        """Estimate training on IPUs: memory, FLOPs and time of every stage.

        One micro-batch goes through module, loss and backward pass as tensors without values;
        nothing is changed. If neither the arguments nor ``compile`` divide the module, the plan
        finds a division: the smallest power of two of stages that fits in memory, with the slowest
        stage as fast as possible; ``compile(parallel=plan)`` uses it. See docs/planner.md.

        Args:
            x: a micro-batch: inputs as for ``predict``; a tuple or list of inputs and target, to
                include the loss; or a loader, whose first batch is read. Only shapes and dtypes
                matter. None takes those of the last ``fit``.
            ipus: as for ``fit``; a division uses at most so many.
            gradient_accumulation: as for ``fit``; None is the smallest that fills the pipeline.
            ipus_per_replica: find a division into so many stages.
            stages: as for :class:`ipufit.Parallel`; None is the setting of ``compile``; "auto"
                finds them.
            layers_per_ipu: as for :class:`ipufit.Parallel`.
            layers: as for :class:`ipufit.Parallel`.
            strategy: "pipelined" or "sharded"; None is the setting of ``compile``.
            schedule: of a pipeline: "grouped", as in PopTorch, "interleaved" or "sequential".
            recompute: which activations are kept, while the others are computed again: with True,
                the inputs of the stages, and the outputs of the layers in
                ``Memory(recompute=...)``; names choose other layers; False keeps everything. None
                is as compiled: True in a pipeline, where PopTorch recomputes by itself, otherwise
                False.
            ipu_memory: bytes of an IPU that may be used; None is all of 1,472 tiles x 624 KiB.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: neither a batch nor an earlier ``fit``, or arguments that can't
                work; ``PartitionError`` and ``PlanError`` are subclasses.
            DataError: the batch can't be used.
            CaptureError: the module can't be recorded.
        """
        from ipufit.planner.plan_partition import plan_partition

        session = self._compiled("plan")
        require_one_loss(session.loss, "plan")
        request = PartitionRequest(stages, layers_per_ipu, layers, strategy, ipus_per_replica)
        work = (ipus, gradient_accumulation, schedule, recompute, ipu_memory)
        read_sample = functools.partial(sample_for, session, x, "plan")
        estimator = session.plan_estimator
        return plan_partition(session.divided, estimator, read_sample, request, *work)

    def preflight(self, x: Any = None) -> PreflightReport:
        """List what to change in the model before it can run on an IPU through PopTorch 3.4.

        One micro-batch goes through module and loss as tensors without values; nothing is changed.
        Operators, layers, loss, optimizer, settings and types are compared with PopTorch's
        published source and documentation. Nothing was verified on an IPU; anything that these
        sources do not mention is reported as unknown. See docs/preflight.md.

        Args:
            x: a micro-batch: inputs as for ``predict``; a tuple or list of inputs and target, to
                include the loss; or a loader, whose first batch is read. Only shapes and dtypes
                matter. None takes those of the last ``fit``.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: neither a batch nor an earlier ``fit``.
            DataError: the batch can't be used, or module or loss can't take it.
        """
        session = self._compiled("preflight")
        require_one_loss(session.loss, "preflight")
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
        """Compare the recorded training program with the module itself, value by value.

        One micro-batch runs through the graph of ``fit`` and through the module, with the same
        weights, buffers, data, random numbers and precision. Every operator of both passes, every
        module's output, the loss, the gradients and the buffers are compared; then what runs in
        place of the graph, such as other kernels, but not compiled updates. Nothing of the model
        changes. See docs/diagnosis.md.

        Args:
            sample: a micro-batch as ``train_on_batch`` takes it, ``(inputs, target)``, or a loader,
                whose first batch is read.
            reference: "eager"; or "float64", the same in double precision, which shows where the
                program loses most precision.
            rtol: accepted difference of a tensor, relative to its largest magnitude; None depends
                on its dtype: 1e-10 in float64, 1e-4 in float32, 0.01 in float16, 0.05 in bfloat16.
                Integers must be equal; NaN equals NaN.
            atol: accepted absolute difference in addition; None is 1e-14, 1e-7, 1e-4 and 1e-3.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: inside ``fit``, arguments that can't work, no recorded program, or
                an engine whose programs can't be inspected.
            DataError: the batch can't be used.
            CaptureError: the module can't be recorded.
        """
        from ipufit.analysis.compare.comparisons import compare

        return compare(self._trainable("compare"), sample, reference, (rtol, atol))

    def check_invariance(
        self, sample: Any, *, rtol: Optional[float] = None, atol: Optional[float] = None
    ) -> InvarianceReport:
        """Test whether weights depend on how the samples of an update are divided.

        Copies of module, loss and optimizer make four updates of the sample with several batch
        sizes, gradient accumulations, replicas and device iterations, eagerly and, if possible, in
        float64, to exclude rounding. Causes are found by repeating each module with a part of its
        rows. Several processes are not tested: they have the numbers of as many replicas. Nothing
        of the model changes. See docs/diagnosis.md.

        Args:
            sample: the samples of one update, as ``train_on_batch`` takes them, 4 or more with
                divisors, such as 8 or 12; or a loader, whose first batch is read.
            rtol: accepted difference of weights and losses, relative to their largest magnitude;
                None is 1e-7 in float64, otherwise that of the dtype, as for :meth:`compare`.
            atol: accepted absolute difference in addition.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: inside ``fit``, arguments that can't work, or a module that can't be
                copied.
            DataError: the batch can't be used, or has only one sample.
        """
        from ipufit.analysis.compare.comparisons import check_invariance

        session = self._trainable("check_invariance")
        return check_invariance(session, engine_maker("embedded"), sample, (rtol, atol))

    def check(self, x: Any = None) -> CheckReport:
        """Find code of this module that would behave differently in a recorded program.

        A program is recorded once and then repeated, so Python code in ``forward`` and in the loss
        runs only once: a counter stays constant, and a branch is always the same. The micro-batch
        goes through module, loss and backward pass a few times, in train mode and in eval mode,
        without values and, if something is wrong, with values, on copies. The runs are compared
        with each other. Weights, buffers, optimizer, generators, attributes and modes do not
        change, and output of forward is not shown.

        It works before ``compile`` too, without a loss: gradients are then those of all outputs.
        See docs/check.md.

        Args:
            x: a micro-batch: inputs as for ``predict``; a tuple or list of inputs and target, to
                include the loss; or a loader, whose first batch is read. None uses random numbers
                in the shapes of the last ``fit``, and zeros for inputs of whole numbers, such as
                class indices.

        Returns:
            The findings, each with file, line and what to write instead; a report without findings
            is empty and false.

        Raises:
            ConfigurationError: neither a batch nor an earlier ``fit``.
            DataError: the batch can't be used, or the module can't take it.
        """
        from ipufit.analysis.check.check import checked

        self._ready()
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

    def _ready(self) -> None:
        """Make a session that can be made without compile; most models have none."""

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
