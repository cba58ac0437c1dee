"""The seam between the training loop and the engines: a spec goes in, a program comes out.

Nothing above this seam asks which engine is running, and nothing below it knows of epochs,
callbacks or metrics.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import gc
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor, nn

from ipufit.core.batch import CombinedBatch, MicroBatch, Mode
from ipufit.core.compile_arguments import OFF, EagerFallback
from ipufit.core.logged_values import LogRule
from ipufit.core.objective_arguments import dtype_name
from ipufit.core.outputs import add_up
from ipufit.core.plan import Plan
from ipufit.core.train_config import TrainConfig, outputs_wanted
from ipufit.errors import DataError
from ipufit.losses import Loss, LossFacts
from ipufit.partition.partition import Partition
from ipufit.planner.divided_module import DividedModule
from ipufit.processes import ALONE, Processes
from ipufit.tracing.comparison import Comparison, Tolerance
from ipufit.tracing.validate import public_name
from ipufit.utils.interrupts import defer_signals
from ipufit.utils.phase_timer import NO_CLOCK, NoClock

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., object])
# Structure of a micro-batch, and shape, dtype and strides, where these count, of each tensor.
Form = Tuple[object, Tuple[Tuple[torch.Size, torch.dtype, Tuple[int, ...]], ...]]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Facts about a program's results that are known before it runs.

    Attributes:
        outputs: the module's outputs, as tensors without data (device "meta").
        rules: names that the module and the loss log, and how the values are reduced.
        loss: what the example shows of the loss; nothing without one.
    """

    outputs: Any
    rules: Mapping[str, LogRule] = dataclasses.field(default_factory=dict)
    loss: LossFacts = dataclasses.field(default_factory=LossFacts)


@dataclasses.dataclass(frozen=True)
class ExecutionResult:
    """The results that one execution hands back to the host.

    Attributes:
        losses: one value per micro-batch, float64, on the host. Empty when predicting. A program
            tells those of its own process; what the loop hands on has those of all.
        outputs: the module's outputs, on the host, of the micro-batches in ``places``, or one per
            replica when the configuration adds them up; empty when the spec wants none.
        places: which micro-batches of the execution, of this process, the outputs belong to.
        counts: how much each loss stands for, float64: tokens, or the weight of samples. None where
            it stands for the samples.
        logged: what each micro-batch has logged, by name.
        rules: how the logged values are reduced, by name.
        settings: what the program says of itself after the execution: "learning_rate",
            "loss_scale".
        skipped: number of updates left out because their gradient was not finite.
    """

    losses: Tensor
    outputs: List[Any]
    places: Sequence[int] = ()
    counts: Optional[Tensor] = None
    logged: Sequence[Mapping[str, float]] = ()
    rules: Mapping[str, LogRule] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    skipped: int = 0


@dataclasses.dataclass
class TrainState:
    """All that training has changed, on the host.

    Attributes:
        weights: parameters by name.
        buffers: buffers by name, one mapping per replica.
        optimizer: optimizer state in the form of ``torch.optim.Optimizer.state_dict()``.
        seed: the run's seed.
        updates: number of weight updates done since ``compile``; with the seed it fixes every
            random draw.
        averages: moving averages of the trained parameters by name; empty without averaging.
        loss_scale: the present factor and the updates since it last changed; None without scaling.
        schedule: state of the schedule; None without one.
    """

    weights: Dict[str, Tensor]
    buffers: List[Dict[str, Tensor]]
    optimizer: Dict[str, Any]
    seed: int
    updates: int
    averages: Dict[str, Tensor] = dataclasses.field(default_factory=dict)
    loss_scale: Optional[Tuple[float, int]] = None
    schedule: Any = None

    def write_to(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Write the weights, and the buffers of the first replica, in place.

        Args:
            parameters: those of a step module, by its names.
            buffers: likewise.
        """
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.weights[public_name(name)])
            for name, buffer in buffers.items():
                buffer.copy_(self.buffers[0][public_name(name)])


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """A description of the program that an engine is to build.

    Attributes:
        module: the user's module.
        loss: normal form of the loss; None when predicting with a compiled loss of its own.
        optimizer: torch's optimizer over the module's parameters; its hyper-parameters are read
            before every execution, its state is taken over. None unless training.
        plan: the batch algebra.
        mode: train, evaluate or predict.
        want_outputs: whether the module's outputs are anchored.
        seed: seed of every random number inside the program.
        domain: keeps this program's random numbers apart from those of other programs.
        first_update: update counter at the start.
        config: how an update is made.
        options: settings of the engine's own, as the user gave them, or None.
        partition: how the module lies on the IPUs of a replica; None for one IPU.
        processes: those that work together on every update.
        profile_folder: where an engine puts a profile that its own tools read, if it can write one;
            None for none.
        fallback: what of the model can't be recorded.
    """

    module: nn.Module
    loss: Optional[Loss]
    optimizer: Optional[torch.optim.Optimizer]
    plan: Plan
    mode: Mode
    want_outputs: bool
    seed: int
    domain: str = "train"
    first_update: int = 0
    config: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    options: Any = None
    partition: Optional[Partition] = None
    processes: Processes = ALONE
    profile_folder: Optional[str] = None
    fallback: EagerFallback = dataclasses.field(default_factory=EagerFallback)

    @property
    def run_eagerly(self) -> bool:
        """True where the user's module itself runs, without capture."""
        return self.config.run_eagerly

    @property
    def eager(self) -> ProgramSpec:
        """This program with the module itself in place of what is recorded."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, jit=OFF))

    @property
    def varies(self) -> bool:
        """True where one micro-batch may reach other parameters than another.

        Where the state lies in parts of processes, it is laid out for the first one's.
        Among recordings of several processes, all add gradients of what these have.
        """
        is_divided = self.config.shard_optimizer or self.fallback.mixes(self.mode)
        is_divided = is_divided and self.processes.is_distributed
        return self.run_eagerly and not is_divided

    @property
    def divides_weights(self) -> bool:
        """True where each of several processes has a part of the weights."""
        return self.config.shard_weights and self.processes.is_distributed

    def choose_outputs(self, outputs: Sequence[object]) -> Tuple[List[object], List[int]]:
        """Choose, of the outputs of all micro-batches of an execution, what comes back.

        Args:
            outputs: of each micro-batch of this process, in stream order.

        Returns:
            Outputs, or a sum for each replica, and the places of their micro-batches; of sums none.
        """
        if not self.want_outputs:
            return [], []
        if self.mode is not Mode.TRAIN:
            return list(outputs), list(range(len(outputs)))
        plan, wanted = self.plan, self.config.outputs
        if wanted.mode == "sum":
            replicas = range(min(plan.replicas, len(outputs)))
            return [add_up(outputs[replica :: plan.replicas]) for replica in replicas], []
        per_update = plan.own_micro_batches_per_update
        places = outputs_wanted(wanted, len(outputs), per_update, plan.replicas)
        return [outputs[place] for place in places], places


class Recordings:
    """Forms of micro-batches for which a program was recorded, or compiled.

    Args:
        most: largest number of forms.

    Attributes:
        forms: the seconds that each took, 0 where an earlier program had recorded it.
        eager: those of them that can't be recorded, and run eagerly.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.forms: Dict[Form, float] = {}
        self.eager: set[Form] = set()
        self._latest: Form = (None, ())

    @defer_signals(interrupts=False, handlers=True)
    def add(self, form: Form, engine: Engine, record: Callable[[], T]) -> T:
        """Record a form of micro-batch, which may be there already.

        Args:
            form: what sets it apart from others.
            engine: counts the seconds.
            record: does it.

        Raises:
            DataError: there are as many others already.
        """
        before = engine.seconds
        if form not in self.forms and len(self.forms) >= self._most:
            every = "; ".join(in_words([*self.forms, form]))
            raise DataError(
                "a program is recorded for each shape of batch, at most "
                f"max_recordings={self._most}, but batches of {self._most + 1} shapes came: "
                f"{every}. Pad them to fewer shapes in collate_fn, as ipufit.data.LengthBuckets "
                "does, or compile with a larger max_recordings or with run_eagerly=True."
            )
        # A recording makes so many objects that Python would look through all those of the process
        # for garbage, several times.
        collects = gc.isenabled()
        gc.disable()
        try:
            result = record()
        finally:
            if collects:
                gc.enable()
        self._latest = form
        self.forms[form] = self.forms.get(form, 0.0) + engine.seconds - before
        return result

    def add_seconds(self, seconds: float) -> None:
        """Count more seconds for the form that was the last to be added."""
        self.forms[self._latest] += seconds

    def explain(self, how: str = "recorded") -> List[str]:
        """Name them in a sentence, if there are several.

        Args:
            how: a participle for what was done.
        """
        if self.count < 2:
            return []
        forms = [form for form in self.forms if form not in self.eager]
        texts = (
            f"{text} in {self.forms[form]:.2g} s" for text, form in zip(in_words(forms), forms)
        )
        return [f"Training is {how} for {self.count} shapes of batches: {'; '.join(texts)}."]

    @property
    def count(self) -> int:
        """Number of forms for which there is a recording."""
        return len(self.forms) - len(self.eager)


def in_words(forms: Sequence[Form]) -> List[str]:
    """Write down the shapes of each form, and the dtypes where these differ."""
    differ = len({tuple(dtype for _, dtype, _ in tensors) for _, tensors in forms}) > 1
    return [
        ", ".join(
            dict.fromkeys(
                f"{tuple(shape)} {dtype_name(dtype)}" if differ else str(tuple(shape))
                for shape, dtype, _ in tensors
            )
        )
        for _, tensors in forms
    ]


class Program(abc.ABC):
    """A whole training, evaluation or prediction step, ready to run.

    Every program has the first six members; all others have defaults for programs without that
    feature.

    Attributes:
        popvision: folder of the profile that the program writes for PopVision; None for none.
        recordings: forms of micro-batches that the program was recorded for; None if it is not
            recorded.
    """

    popvision: Optional[str] = None
    recordings: Optional[Recordings] = None

    @property
    @abc.abstractmethod
    def updates(self) -> int:
        """Number of weight updates since ``compile``, including skipped ones."""

    @abc.abstractmethod
    def prepare(self, example: MicroBatch) -> Prepared:
        """Build the program for micro-batches like ``example``, without using its values.

        A second call takes changes of the module or the optimizer into account.

        Args:
            example: a micro-batch, of which only shapes and dtypes matter.
        """

    @abc.abstractmethod
    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """Run one execution.

        Args:
            batch: the micro-batches of all its updates, or of its device iterations.

        Raises:
            NonFiniteLossError: in training; the state is that before the update that the error
                names.
        """

    @abc.abstractmethod
    def read_state(self) -> TrainState:
        """Copy weights, buffers, optimizer state and counters from the device to the host."""

    @abc.abstractmethod
    def write_state(self, state: TrainState) -> None:
        """Continue from another state, which is on the host.

        Args:
            state: result of :meth:`read_state` of a program.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Return weights and optimizer state to the user, free the device. Safe to repeat."""

    def publish(self) -> None:
        """Update the state of the spec's optimizer, unless the program works on it."""

    def swap_averages(self) -> None:
        """Exchange the trained weights and their moving averages, or exchange them back."""

    def adopt_averages(self) -> None:
        """Make the moving averages the weights, at the end of training."""

    def expect(self, updates: int) -> None:
        """Get the number of updates of ``fit``, before the first execution.

        Args:
            updates: how many.
        """

    def stage(self, batch: CombinedBatch) -> CombinedBatch:
        """Move a batch that will run later to the place where it is read; called from any thread.

        Args:
            batch: of one execution.

        Returns:
            The batch to run instead of this one.
        """
        return batch

    def share_buffers(self) -> None:
        """Give the modules of all processes the buffers of the first replica.

        All processes call this at the same time.
        """

    def gather_optimizer(self) -> None:
        """Gather the state of the spec's optimizer if it is divided.

        All processes call this at the same time.
        """

    def gather_weights(self) -> None:
        """Update the module's weights if they are divided.

        All processes call this at the same time.
        """

    def enter_eval(self) -> None:
        """Put an optimizer's separate weights for evaluation into the module.

        They stay there until the next execution.
        """

    def fail(self, action: Optional[str]) -> None:
        """Raise the error of a failing device, if the program has a device.

        Args:
            action: action after which the device can run again; None if there is none.
        """

    def profile(self, batch: MicroBatch) -> Optional[Dict[str, Any]]:
        """Time the operators of a micro-batch, without training.

        Args:
            batch: the micro-batch.

        Returns:
            The values that ``ipufit/report/run.py`` describes; None if single operators can't be
            timed.
        """
        return None

    def compare(self, batch: MicroBatch, reference: str, tolerance: Tolerance) -> Comparison:
        """Compare the recorded micro-batch with the module itself, operator by operator.

        It is called on programs of an engine that another engine's
        :meth:`ipufit.engines.Engine.beside` returned.

        Args:
            batch: the micro-batch.
            reference: as for :meth:`ipufit.Model.compare`.
            tolerance: accepted difference of values.
        """
        raise NotImplementedError(f"{type(self).__name__} compares no operators")


def _handed_on(method: Method) -> Method:
    """Make a method of a :class:`ForwardingProgram` from that of a program."""

    def hand_on(self: ForwardingProgram, *args: object, **named: object) -> object:
        return getattr(self._program, method.__name__)(*args, **named)

    # Without attributes: it is not abstract.
    handing_on: Method = functools.wraps(method, updated=())(hand_on)  # type: ignore[assignment]
    return handing_on


class ForwardingProgram(Program):
    """Program that hands every call on to another one; a subclass does more in some of them.

    Args:
        program: the other one.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.popvision, self.recordings = program.popvision, program.recordings

    @property
    def updates(self) -> int:
        """Number of weight updates since ``compile``, including skipped ones."""
        return self._program.updates

    prepare = _handed_on(Program.prepare)
    run = _handed_on(Program.run)
    read_state = _handed_on(Program.read_state)
    write_state = _handed_on(Program.write_state)
    close = _handed_on(Program.close)
    publish = _handed_on(Program.publish)
    swap_averages = _handed_on(Program.swap_averages)
    adopt_averages = _handed_on(Program.adopt_averages)
    expect = _handed_on(Program.expect)
    stage = _handed_on(Program.stage)
    share_buffers = _handed_on(Program.share_buffers)
    gather_optimizer = _handed_on(Program.gather_optimizer)
    gather_weights = _handed_on(Program.gather_weights)
    enter_eval = _handed_on(Program.enter_eval)
    fail = _handed_on(Program.fail)
    profile = _handed_on(Program.profile)
    compare = _handed_on(Program.compare)


class Engine(abc.ABC):
    """Builds programs. An engine belongs to one compiled model and may keep its recordings.

    An engine needs a name and :meth:`build`; all other methods have defaults for engines without
    that feature. :class:`ipufit.testing.EagerEngine` is a short example to copy. To extend another
    engine, derive from it and wrap the result of ``build`` in an
    ``ipufit.engines.program.ForwardingProgram``.

    Attributes:
        name: for reports, errors and checkpoints; the same in all processes of a run. For an
            unknown name, the effects of an IPUConfig are those on the embedded engine.
        seconds: time spent on recording so far, in seconds.
        clock: measures parts of the engine's time; set during ``fit``.
        announce: context that is entered while the engine records or compiles; set during calls
            that show progress.
        takes_options: True if the options of ``poptorch=`` have an effect.
        mixes_shapes: False if the micro-batches of one update must have the same shapes.
        recordings: forms of micro-batches that the last training program was compiled for, if the
            engine counts them.
    """

    name: str
    seconds: float = 0.0
    clock: NoClock = NO_CLOCK
    announce: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    takes_options: bool = False
    mixes_shapes: bool = True
    recordings: Optional[Recordings] = None

    def start_recordings(self, most: int) -> Recordings:
        """Start counting the forms of micro-batches that a training program is compiled for.

        Args:
            most: largest number of forms.
        """
        self.recordings = Recordings(most)
        return self.recordings

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block as recording or compiling."""
        # Of a block within a block, the outer one counts.
        before, start = self.seconds, time.perf_counter()
        try:
            with self.clock.during("capture"):
                yield
        finally:
            self.seconds = before + time.perf_counter() - start

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Count the time of the block, and show that something is recorded or compiled."""
        with self.announce(), self.timed():
            yield

    @abc.abstractmethod
    def build(self, spec: ProgramSpec) -> Program:
        """Return a program for the spec; a training program owns the weights until it is closed.

        Args:
            spec: an ``ipufit.engines.program.ProgramSpec``: module, loss, optimizer, plan and mode.
        """

    def can_run_eagerly(self, config: TrainConfig, error: Exception) -> bool:
        """Return True if the module itself may run because its program could not be prepared.

        Args:
            config: how an update is computed, an ``ipufit.core.train_config.TrainConfig``.
            error: the error in the preparation.
        """
        return False

    def check(self, divided: DividedModule, options: Mapping[str, Any]) -> None:
        """Refuse arguments of ``compile`` that the engine does not support.

        Args:
            divided: an ``ipufit.planner.divided_module.DividedModule``: module, optimizer, loss,
                ``config`` (how an update is computed), and how the module is divided over the IPUs
                of a replica.
            options: the engine's own settings, by the argument of ``compile``.

        Raises:
            ConfigurationError: names the argument; several faults are one error.
        """

    def explain(self, config: TrainConfig, options: Mapping[str, Any]) -> List[str]:
        """Describe in sentences how training runs on this engine.

        Args:
            config: how an update is computed.
            options: as for :meth:`check`.
        """
        return []

    @property
    def way(self) -> Optional[str]:
        """Value of ``jit`` for the way in which training runs; None before it is known."""
        return None

    def options_of(self, config: Any) -> Optional[Dict[str, Any]]:
        """Return the options for an IPUConfig, by the argument of ``compile``.

        An engine without own options returns None.

        Args:
            config: an :class:`ipufit.IPUConfig`.
        """
        return None

    def computes_on_host(self, module: nn.Module) -> bool:
        """Return True if programs of the module run on this computer's CPU.

        Args:
            module: the user's module.
        """
        return False

    def choices(self) -> Optional[Dict[str, str]]:
        """Return the engine's measured choices, by name, for a checkpoint."""
        return None

    def prefer(self, choices: Mapping[str, str]) -> None:
        """Use the choices of an earlier run, so that a resumed run computes the same.

        Args:
            choices: result of :meth:`choices` in that run.
        """

    def beside(self) -> Optional[Engine]:
        """Return an engine for a trial that runs the recorded programs of this one.

        Its programs have :meth:`ipufit.engines.Program.compare`. None if there is no such engine.
        """
        return None

    def gather_optimizer(self) -> None:
        """Gather the optimizer's state between programs.

        It does what :meth:`ipufit.engines.Program.gather_optimizer` does for a program. All
        processes call this at the same time.
        """

    def close(self) -> None:
        """Release recordings: the model is compiled again or closed. Safe to repeat."""
