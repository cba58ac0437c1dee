"""Check of what a recording would make of a module, by comparing several runs of it."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.analysis.check import findings
from ipufit.analysis.check.recorders import (
    OperationRecorder,
    OutputEvents,
    Reads,
    differences,
    quiet,
    same_results,
)
from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.train_config import Precision
from ipufit.errors import CaptureError, IpufitError, LossError, brief_error
from ipufit.losses import Loss, LossFacts
from ipufit.partition.partition import NOT_DIVIDED, Partitions
from ipufit.tracing.capture import capture, recordable
from ipufit.tracing.fingerprint import CodeReader
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.grad_step import GradStep, ModuleWithLoss, public_name
from ipufit.tracing.interpreter import watch_functions, watch_operators
from ipufit.tracing.ipu_only import for_this_engine, only_on_ipus
from ipufit.tracing.recurrent import SecondGradientError, time_steps, whole_recurrent_layers
from ipufit.tracing.untraced_random import reachable_generators
from ipufit.tracing.user_lines import Frame, Lines, frame_of, user_frame, users_module
from ipufit.training.sanity_check import FailureExplainer, check_call, wrap_batch_errors
from ipufit.training.session import Session
from ipufit.training.summary import no_batch, sample_of
from ipufit.utils import tree
from ipufit.utils.random_streams import Generators, isolated, seed_generators
from ipufit.utils.state import Change, ValueSnapshot, eval_mode, replaced, same_values, train_mode


@dataclasses.dataclass
class CheckRun:
    """Operations, findings and results that one run of the module under test left behind.

    Attributes:
        recorder: has recorded the program.
        error: what ended it early, or None.
        rebound: parameters and buffers that forward replaced.
        with_gradient: names of the parameters that got a gradient; None where that is unknown.
        results: the numbers, outputs, gradients and buffers of a run on values.
    """

    recorder: OperationRecorder
    error: Optional[BaseException] = None
    rebound: Sequence[CaptureError] = ()
    with_gradient: Optional[Tuple[str, ...]] = None
    results: Tuple[Tensor, ...] = ()

    @property
    def needs_values(self) -> bool:
        """True if the run ended where the value of a tensor was needed."""
        return isinstance(self.error, CaptureError) and self.error.cause is not None


class ModuleUnderTest:
    """Module with its loss and a micro-batch, to be run as often as needed.

    Args:
        explainer: module, loss and precision; its loss is None where there is none, or no target
            for it: gradients are then those of all outputs.
        sample: the micro-batch.
        owned: the parameters that the optimizer has; None for all.
        partitions: of the module over IPUs, whose rules are checked on the way.

    Attributes:
        step: module and loss.
        trained: names of the parameters that get a gradient.
        state: the tensors of both, by name, those first.
        facts: what the first run that computed the loss has shown of it; None before.
    """

    def __init__(
        self,
        explainer: FailureExplainer,
        sample: MicroBatch,
        owned: Optional[Sequence[Tensor]],
        partitions: Partitions,
    ) -> None:
        self._partitions = partitions
        self._rebound: List[CaptureError] = []
        self.facts: Optional[LossFacts] = None
        self._precision = explainer.precision
        loss = explainer.loss or Loss("outputs", function=_all_outputs)
        self.step = ModuleWithLoss(explainer.module, loss)
        self.step.forgive = self._rebound.append
        named = dict(self.step.named_parameters())
        wanted = {id(p) for p in (named.values() if owned is None else owned)}
        self.trained = [n for n, p in named.items() if p.requires_grad and id(p) in wanted]
        tensors: Dict[str, Tensor] = {**named, **dict(self.step.named_buffers())}
        self.state = {name: tensors[name] for name in self.step.state_names(self.trained)}
        self.device = next((t.device for t in tensors.values()), torch.device("cpu"))
        # Copies: one tensor in two places is two inputs of a program.
        leaves = tuple(leaf.detach().to(self.device, copy=True) for leaf in sample.leaves)
        self.sample = dataclasses.replace(sample, leaves=leaves)

    def recorded(self, titles: Dict[int, str], training: bool, rolled: bool = False) -> CheckRun:
        """Record the module: nothing is computed, and no tensor has a value.

        Args:
            titles: where the user keeps tensors that are no state.
            training: with gradients.
            rolled: of other data, the rows of the batch in another order.
        """
        leaves = self.sample.leaves
        if rolled:
            leaves = tuple(leaf.roll(1, 0) if leaf.dim() else leaf for leaf in leaves)
        state = [tensor.detach() for tensor in self.state.values()]

        def record(call: Callable[..., Sequence[Tensor]]) -> None:
            with for_this_engine():
                capture(call, [*state, *leaves])

        return self._done(titles, training, record)

    def ran(
        self,
        titles: Dict[int, str],
        training: bool,
        pristine: Mapping[str, Tensor],
        note: Optional[Callable[[CaptureError], None]] = None,
        around: Optional[contextlib.AbstractContextManager[object]] = None,
    ) -> CheckRun:
        """Run the module on copies of these tensors, with their values.

        Args:
            titles: where the user keeps tensors that are no state.
            training: with gradients.
            pristine: the values of the state.
            note: told where a value is asked for.
            around: entered for the run.
        """
        state = [pristine[name].clone() for name in self.state]
        leaves = [leaf.clone() for leaf in self.sample.leaves]
        results: List[Tensor] = []

        def execute(call: Callable[..., Sequence[Tensor]]) -> None:
            with recordable(), around or contextlib.nullcontext():
                try:
                    with whole_recurrent_layers():
                        results.extend(call(*state, *leaves))
                except SecondGradientError:
                    with time_steps():
                        results.extend(call(*state, *leaves))

        run = self._done(titles, training, execute, note or (lambda error: None))
        run.results = (*(result.detach() for result in results), *state)
        return run

    def _done(
        self,
        titles: Dict[int, str],
        training: bool,
        execute: Callable[[Callable[..., Sequence[Tensor]]], object],
        note: Optional[Callable[[CaptureError], None]] = None,
    ) -> CheckRun:
        run = CheckRun(OperationRecorder((), titles))
        self._rebound.clear()
        fixed = list(self.state)[len(self.trained) :]
        with_gradients = training and bool(self.trained)
        # Gradients need no storage of their own.
        layout = (lambda names: ()) if with_gradients else None
        partition = self._partitions.of(training)
        if partition is not None and partition.is_open:
            partition = None  # fit is yet to search for one
        micro = GradStep(
            self.step,
            self.trained,
            fixed,
            self.sample,
            True,
            True,
            layout,
            self._precision,
            partition=partition,
        )

        def call(*tensors: Tensor) -> Sequence[Tensor]:
            recorder = run.recorder = OperationRecorder(tensors, titles, note)
            with contextlib.ExitStack() as watched:
                watched.enter_context(watch_operators(recorder))
                if note is not None:
                    watched.enter_context(watch_functions(Reads(note, recorder)))
                return micro(*tensors)

        try:
            execute(call)
        except Exception as error:
            run.error = error
        self.facts = self.facts or micro.facts
        run.recorder.seal()
        run.rebound = list(self._rebound)
        if with_gradients and run.error is None:
            run.with_gradient = micro.with_gradient
        return run


def _all_outputs(prediction: object, target: object) -> Tensor:
    """Stands for a loss that depends on every output."""
    total = torch.zeros(())
    for leaf in tree.flatten(prediction)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            total = total.to(leaf.device) + leaf.float().mean()
    return total


# Where torch's generator starts in every run: only then may results be compared.
_KEY = 0x1F17


@dataclasses.dataclass
class _CheckSuite:
    """Runs a module in one mode and compares the runs.

    Args:
        tested: the module that is run.
        pristine: its state.
        collector: collects what the runs show.
        is_training: with gradients.
    """

    tested: ModuleUnderTest
    pristine: Dict[str, Tensor]
    collector: findings.Findings
    is_training: bool

    def __post_init__(self) -> None:
        self._snapshot = self._values()
        self._reachable = dict(reachable_generators(self.tested.step))
        self._generators = Generators([*self._reachable.items()])
        self._changes: List[Change] = []
        self._drawn: List[str] = []

    def run(self) -> Optional[Sequence[str]]:
        """Run the module in all the ways that find something, and collect the findings.

        Returns:
            Names of the parameters that a gradient reaches; None where that is not known.

        Raises:
            Exception: of the module's own, which can't take the batch.
        """
        try:
            return self._run()
        finally:
            self._restore()

    def _values(self) -> ValueSnapshot:
        step = self.tested.step
        return ValueSnapshot(step.owners(), CodeReader(step).places, True, users_module)

    def _titles(self) -> Dict[int, str]:
        """Return, by storage, where tensors lie that are no state of the module."""
        return {storage_id(tensor): title for title, tensor in self._snapshot.tensors()}

    def _restore(self) -> None:
        self._snapshot.restore()
        self._generators.restore()

    def _run(self) -> Optional[Sequence[str]]:
        first = self._recorded()
        self._undo()
        if first.error is None or isinstance(first.error, IpufitError):
            self._add_findings(first)
        has_values = False
        with_gradient = first.with_gradient
        foreign = only_on_ipus(first.error)
        if first.error is not None and foreign is not None:
            text, _, cure = foreign.rpartition(". ")
            self.collector.add(_unrecordable(first.error, text, cure))
            return None
        if first.error is not None and not _is_about_gradients(first.error):
            read: List[CaptureError] = []
            valued = self._valued(read)
            self._undo()
            has_values = True
            # With values, others may be reached with the next batch.
            with_gradient = None if first.needs_values else valued.with_gradient
            if not self._is_recordable(first, valued):
                return None
            if first.needs_values:
                self.collector.add(*map(findings.error_at, _after(read, first.error)))
            self._add_findings(valued)
            first = valued
        second = self._valued() if has_values else self._recorded(rolled=True)
        self._undo()
        for difference in differences(first.recorder.operations, second.recorder.operations):
            self.collector.add(findings.differs_at(difference, ()))
        if self._changes or self._drawn:
            self._follow()
        return None if self._drawn else with_gradient

    def _recorded(self, rolled: bool = False) -> CheckRun:
        seed_generators(_KEY, self.tested.device)
        with self.tested.step.forget_recording():
            run = self.tested.recorded(self._titles(), self.is_training, rolled)
            # Before what the recording has left is forgotten.
            self._changes += self._snapshot.changes()
        return run

    def _valued(
        self, read: Optional[List[CaptureError]] = None, around: Optional[Lines] = None
    ) -> CheckRun:
        seed_generators(_KEY, self.tested.device)
        note = None if read is None else read.append
        titles = self._titles()
        return self.tested.ran(titles, self.is_training, self.pristine, note, around)

    def _undo(self) -> None:
        """Set back what a run has changed, and note it."""
        self._changes += self._snapshot.changes()
        self._drawn += self._generators.drawn()
        self._restore()

    def _is_recordable(self, recorded: CheckRun, valued: CheckRun) -> bool:
        """Return False if nothing can be found out, because the module itself fails.

        Raises:
            Exception: of the module's own, which can't run on this batch in train mode.
        """
        error = valued.error
        if error is not None and not isinstance(error, IpufitError):
            if not self.is_training:
                return False
            raise error
        is_torchs = recorded.error is not None and not isinstance(recorded.error, IpufitError)
        # Older versions of torch can't record a generator.
        if recorded.error is not None and is_torchs and not valued.recorder.generators:
            text = f"the module runs, but can't be recorded: {brief_error(recorded.error)}"
            cure = "Write it with other operators, or use compile(..., run_eagerly=True)."
            self.collector.add(_unrecordable(recorded.error, text, cure))
        return True

    def _add_findings(self, run: CheckRun) -> None:
        """Add the findings of one run: what ended it, and what it came upon before."""
        self.collector.add(*map(findings.error_at, run.rebound))
        self.collector.add(*map(findings.generator_at, run.recorder.generators))
        if self.is_training:
            named = {id(p): public_name(n) for n, p in self.tested.step.named_parameters()}
            for tensor, frame in run.recorder.outside:
                self.collector.add(findings.outside_at(named.get(id(tensor)), frame))
        error = run.error
        if isinstance(error, CaptureError):
            if error.file is not None or not run.recorder.outside:
                self.collector.add(findings.error_at(error))
        elif isinstance(error, LossError) and run.recorder.operations:
            what, _, cure = str(error).partition(". ")
            kind = "unused" if "no gradient reached" in what else "capture"
            self.collector.add(findings.Finding(kind, "error", None, None, None, what, cure))
        elif isinstance(error, IpufitError):
            raise error

    def _follow(self) -> None:
        """Run without recording several times, and find the lines at which values change."""
        drawn = dict.fromkeys(self._drawn)
        probes: Dict[str, Callable[[], object]] = {c.key: c.probe for c in self._changes}
        probes.update((name, self._generators.probes[name]) for name in drawn)
        lines = Lines(probes)
        runs: List[CheckRun] = []
        by_run: List[List[Change]] = []
        before = self._snapshot
        for _ in range(3):
            runs.append(self._valued(around=lines))
            by_run.append(list(before.changes()))
            if runs[-1].error is not None and not isinstance(runs[-1].error, IpufitError):
                break
            self._generators.restore()
            before = self._values()
        repeated = by_run[1:] if len(by_run) > 1 else by_run
        again = _by_place([c for part in repeated for c in part])
        programs = [run.recorder.operations for run in runs]
        unlike = differences(*programs[1:]) if len(runs) == 3 else []
        if not unlike and len(runs) > 1 and not same_results(runs[0].results, runs[1].results):
            # What the first call alone does, such as a start from data.
            unlike = differences(*programs[:2])[:1]
            again = {**_by_place(by_run[0]), **again}
        changed = dict.fromkeys(change.title for change in again.values())
        titles = [*changed, *(n for n in drawn if n in self._reachable)]
        self.collector.add(*(findings.differs_at(difference, titles) for difference in unlike))
        for key, change in again.items():
            frames: Sequence[Optional[Frame]] = list(lines.lines.get(key, ())) or [None]
            self.collector.add(*(findings.changed_at(change, frame) for frame in frames))
        for name in drawn:
            for place in lines.lines[name] or [None]:
                if isinstance(self._reachable.get(name), torch.Generator):
                    self.collector.add(findings.generator_at(place))
                else:
                    self.collector.add(findings.drawn_at(name, place))


def _after(read: Sequence[CaptureError], first: Optional[BaseException]) -> List[CaptureError]:
    """Return the errors from the one on that ended the recording: those before were recorded.

    Packages look whether there are values, and read them only then.
    """
    assert isinstance(first, CaptureError)
    places = [(error.kind, error.file, error.line) for error in read]
    place = (first.kind, first.file, first.line)
    return list(read[places.index(place) :]) if place in places else list(read)


def _by_place(changes: Iterable[Change]) -> Dict[str, Change]:
    return {change.key: change for change in changes}


def _is_about_gradients(error: BaseException) -> bool:
    """Return True for an error that came after the end of forward."""
    return isinstance(error, LossError) or (
        isinstance(error, CaptureError) and error.cause is None and error.kind == "capture"
    )


def _unrecordable(error: BaseException, text: str, cure: str) -> findings.Finding:
    file, line, function = frame_of(error) or (None, None, None)
    return findings.Finding("capture", "error", file, line, function, text, cure)


def _run_check(
    explainer: FailureExplainer,
    sample: MicroBatch,
    session: Optional[Session],
    caller: Optional[Frame],
) -> findings.CheckReport:
    """Run the module a few times, and report what a recorded program would not repeat.

    Afterwards weights, buffers, optimizer, generators, attributes and modes are what they were.

    Args:
        explainer: module, loss and precision; its loss is None where there is none, or no target
            for it.
        sample: a micro-batch.
        session: None before ``compile``, where every parameter counts as trained.
        caller: the line that stands for what has none of its own.

    Raises:
        Exception: of the module's own, which can't take the batch.
        DataError: a label is no class.
    """
    module, loss = explainer.module, explainer.loss
    optimizer = None if session is None else session.optimizer
    owned = None
    if optimizer is not None:
        owned = [p for group in optimizer.param_groups for p in group["params"]]
    partitions = NOT_DIVIDED if session is None else session.divided.partitions
    tested = ModuleUnderTest(explainer, sample, owned, partitions)
    collector = findings.Findings(caller)
    events = OutputEvents()
    with isolated(tested.device), _put_back(tested) as pristine:
        with quiet(events):
            collector.add(*findings.mode_findings(tested.step))
            loss_module = loss.module if loss is not None else None
            with train_mode(module, loss_module):
                with_gradient = _CheckSuite(tested, pristine, collector, True).run()
            notes = replaced((collector, "note", " in eval mode"))
            with eval_mode(module, loss_module), notes:
                _CheckSuite(tested, pristine, collector, False).run()
        collector.add(*findings.untrained_findings(tested.step, tested.trained, with_gradient))
        facts = tested.facts or LossFacts()
        for doubt in facts.doubts if loss is not None else ():
            collector.add(findings.Finding("loss", "warning", None, None, None, *doubt))
    explainer.labels = facts.labels
    explainer.check_labels([sample], None)
    collector.add(*(findings.output_at(frame, how) for frame, how in events.outputs.items()))
    collector.add(*(findings.seeded_at(frame) for frame in events.seeds))
    return findings.CheckReport(type(module).__name__, collector.sorted(), loss is not None)


@contextlib.contextmanager
def _put_back(tested: ModuleUnderTest) -> Iterator[Dict[str, Tensor]]:
    """Save parameters and buffers, and restore those that the block has changed.

    Yields:
        The copies, by name.
    """
    state = tested.state
    pristine = {name: tensor.detach().clone() for name, tensor in state.items()}
    gradients = {name: tensor.grad for name, tensor in state.items() if tensor.is_leaf}
    try:
        yield pristine
    finally:
        for name, tensor in state.items():
            if not same_values(tensor, pristine[name]):
                with torch.no_grad():
                    tensor.copy_(pristine[name])
            if name in gradients and tensor.grad is not gradients[name]:
                tensor.grad = gradients[name]


def checked(
    module: nn.Module, session: Optional[Session], x: object, frame: Optional[types.FrameType]
) -> findings.CheckReport:
    """Check a module on a batch.

    Args:
        module: the user's module.
        session: None before ``compile``.
        x: a batch or a loader; None for the shapes of the last ``fit``.
        frame: of the caller.

    Raises:
        ConfigurationError: neither a batch nor an earlier ``fit``.
        DataError: the batch can't be used.
    """
    if x is not None:
        form = None if session is None else session.form(Mode.TRAIN)
        casting = None if session is None else session.casting
        sample = sample_of(x, form, "check", True, casting)
    elif session is not None and session.sample is not None:
        leaves = tuple(_random(leaf) for leaf in session.sample.leaves)
        sample = MicroBatch(leaves, session.sample.structure, session.sample.size)
    else:
        raise no_batch("check")
    return checked_sample(module, session, sample, frame)


def checked_sample(
    module: nn.Module,
    session: Optional[Session],
    sample: MicroBatch,
    frame: Optional[types.FrameType],
) -> findings.CheckReport:
    """Check a module on a micro-batch that has been read already.

    Raises:
        DataError, LossError: module or loss can't take it.
    """
    loss = session.loss if session is not None else None
    if loss is not None:
        check_call(module, sample, loss, "check: ")
        if not loss.in_module and sample.unpack()[2] is None:
            loss = None
    precision = session.config.precision if session is not None else Precision()
    caller = user_frame(frame, everywhere=True)
    explainer = FailureExplainer(module, loss, Mode.TRAIN, precision, "check")
    with wrap_batch_errors(explainer, sample):
        return _run_check(explainer, sample, session, caller)


def _random(leaf: torch.Tensor) -> torch.Tensor:
    """Make values for a tensor of which only the shape is known."""
    if leaf.is_floating_point() or leaf.is_complex():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(leaf.shape, dtype=torch.float32, generator=generator).to(leaf.dtype)
    return torch.zeros(leaf.shape, dtype=leaf.dtype)
