"""The seam between the training loop and the engines: a spec goes in, a program comes out.

Nothing above this seam asks which engine is running, and nothing below it knows of epochs,
callbacks or metrics.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.batch import CombinedBatch, MicroBatch, Mode
from ipufit.core.logged_values import LogRule
from ipufit.core.plan import Plan
from ipufit.core.train_config import TrainConfig
from ipufit.losses import LabelRange, Loss
from ipufit.partition.partition import Partition
from ipufit.processes import ALONE, Processes

__all__ = ["Engine", "ExecutionResult", "Prepared", "Program", "ProgramSpec", "TrainState"]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Facts about a program's results that are known before it runs.

    Attributes:
        outputs: the module's outputs, as tensors without data (device "meta").
        rules: names that the module and the loss log, and how the values are reduced.
        labels: class indices that the loss takes as target.
    """

    outputs: Any
    rules: Mapping[str, LogRule] = dataclasses.field(default_factory=dict)
    labels: Tuple[LabelRange, ...] = ()


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

    @property
    def run_eagerly(self) -> bool:
        """True where the user's module itself runs, without capture."""
        return self.config.run_eagerly

    @property
    def divides_weights(self) -> bool:
        """True where each of several processes has a part of the weights."""
        return self.config.shard_weights and self.processes.is_distributed


class Program(Protocol):
    """A whole training, evaluation or prediction step, ready to run.

    A training program may have more: ``expect(updates)``, called before the first execution with
    the number of updates that ``fit`` is to make; and ``stage(batch)``, called from any thread with
    a batch that is to run later: what it returns is run in its place; and ``share_buffers()``,
    called in all processes at the same time, after which the module's buffers are in each those of
    the first replica of all; and ``gather_optimizer()``, called likewise, which makes the state of
    the spec's optimizer whole where it lies in parts. An engine may have that one too, for the time
    between programs. ``gather_weights()``, called likewise, brings the module's weights up to date
    where they lie in parts. ``compare(batch, reference, tolerance)`` holds what is recorded for a
    micro-batch against the module itself. ``popvision`` is the folder of the profile that it writes
    for PopVision, or None. ``profile(batch)`` times the operators of a micro-batch,
    as :mod:`ipufit.report.files` says; nothing is trained by it.
    """

    @property
    def updates(self) -> int:
        """Weight updates done since ``compile``, skipped ones included."""
        ...

    def prepare(self, example: MicroBatch) -> Prepared:
        """Build for micro-batches like ``example`` without computing anything on its values.

        Called again, it takes over what has been changed in the module or the optimizer since.
        """
        ...

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution.

        Raises:
            NonFiniteLossError: when training; the state is that before the update named in it.
        """
        ...

    def read_state(self) -> TrainState:
        """Device to host: copies of weights, buffers, optimizer state and counters."""
        ...

    def write_state(self, state: TrainState) -> None:
        """Host to device."""
        ...

    def publish(self) -> None:
        """Bring the state of the spec's optimizer up to date, for whoever reads it."""
        ...

    def swap_averages(self) -> None:
        """Exchange the trained weights and their moving averages; called again, back."""
        ...

    def adopt_averages(self) -> None:
        """Make the averages the weights, at the end of training; without averages, nothing."""
        ...

    def close(self) -> None:
        """Hand weights and optimizer state back to the user, free the device; safe twice."""
        ...


class Engine(Protocol):
    """Builds programs. One engine belongs to one compiled model and may keep what it has recorded.

    It may have more: ``check(module, optimizer, loss, config, options, partitions)``, which refuses
    at ``compile`` what it can't do; ``explain(config, options)``, sentences on what is particular
    to it; ``way``, the value of ``jit`` by which training runs; ``takes_options``, true if
    ``training_options`` mean something to it; ``options_of(config)``, those that an IPUConfig asks
    for, by the argument of ``compile``; ``computes_on_host(module)``, whether its programs take the
    time of this computer's own cores; ``choices()`` and ``prefer(choices)``, what it has measured,
    by name, so that a run that goes on computes alike; ``beside()``, an engine for a trial that
    runs the very programs that this one has recorded, and whose programs have ``compare``;
    ``clock``, which it tells what its time goes to, and which is set for the time of a ``fit``; and
    ``close()``, called when the model is compiled anew or closed.

    Attributes:
        name: for reports.
        seconds: time spent on recording so far, in seconds.
    """

    name: str
    seconds: float

    def build(self, spec: ProgramSpec) -> Program:
        """A program for the spec; a training program owns the weights until it is closed."""
        ...
