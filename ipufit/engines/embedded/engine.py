"""The embedded engine: programs in plain torch, on the device where the module lives."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional

from torch import nn

from ipufit.core.batch import Mode
from ipufit.core.compile_arguments import AUTO, CUDAGRAPH, INDUCTOR
from ipufit.core.train_config import TrainConfig
from ipufit.engines.embedded import timing
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.cuda_graphs import check_cudagraph
from ipufit.engines.embedded.inductor.requirements import refuse_missing
from ipufit.engines.embedded.non_finite import refuse_detection
from ipufit.engines.embedded.optimizer_state_location import HostMemory
from ipufit.engines.embedded.programs.inference import InferenceProgram
from ipufit.engines.embedded.programs.training import TrainingProgram
from ipufit.engines.program import Program, ProgramSpec
from ipufit.errors import ConfigurationError, OptimizerError
from ipufit.optim.several import evaluates_again, members_of
from ipufit.planner.divided_module import DividedModule
from ipufit.processes import current
from ipufit.tracing.capture import may_run_eagerly
from ipufit.tracing.ipu_only import describe_hints
from ipufit.utils.devices import check_devices
from ipufit.utils.state import device_of

_OFFLOADED = "The optimizer's state is in host memory, and on the device only during updates."
_NOT_OFFLOADED = "offload_optimizer changes nothing, because the module is in host memory itself."

_MAY_MERGE = "The backend may undo the recomputation, and then needs more memory."

_MIXED = "So it is for updates of one shape; those that mix shapes run one micro-batch at a time."
_NOT_SHARDED = "{} changes nothing in one process, where all replicas share one state."
_SHARDED = "{} in parts over {} processes; each gets {}."


class EmbeddedEngine(EngineContext):
    """Builds programs for one compiled model, and keeps what it has recorded for the next one."""

    name = "embedded"
    # The last training program, which may be closed already.
    training: Optional[TrainingProgram] = None

    def check(self, divided: DividedModule, options: Mapping[str, object]) -> None:
        """Refuse at ``compile`` what can't work.

        Args:
            divided: module, optimizer, loss and config as ``compile`` resolved them.
            options: for IPUs; without effect here.

        Raises:
            ConfigurationError: parameters without values, CUDA graphs of a module that is on no
                GPU, nothing to compile programs with, an optimizer whose state can't lie in parts,
                several turns of an update with what works on one loss, or a search for what is not
                finite where nothing can be run again operator by operator.
            OptimizerError: one that evaluates the loss again is one of several, or has several
                losses.
        """
        module, optimizer = divided.module, divided.optimizer
        loss, config = divided.loss, divided.config
        check_devices([*module.named_parameters(), *module.named_buffers()])
        turns = "losses that take turns, as TrainStep and manual optimization have them"
        came = turns if loss.turns else "a dict or list of optimizers"
        for member in () if optimizer is None else members_of(optimizer).values():
            if evaluates_again(member) and (loss.turns or member is not optimizer):
                raise OptimizerError(
                    f"{type(member).__name__} evaluates the loss again within an update, and so "
                    f"must be the only optimizer and have one loss, but got {came}. Pass it "
                    "alone, with one loss, or use another optimizer. A LightningModule returns "
                    "that loss from training_step."
                )
        if loss.turns:
            _refuse_with_turns(config)
        if config.detect_nan:
            refuse_detection(config)
        if config.shard_optimizer and optimizer is not None and current().is_distributed:
            # Imported here, as below: what few models need.
            from ipufit.engines.embedded.zero import refuse_whole

            refuse_whole(optimizer, config)
        if config.jit == CUDAGRAPH and self.tape is None:
            check_cudagraph(module)
        if config.jit == INDUCTOR:
            refuse_missing()

    def choices(self) -> Dict[str, str]:
        """Return which kernels were measured to be the fastest, for a checkpoint."""
        return timing.measured_choices()

    def prefer(self, choices: Mapping[str, str]) -> None:
        """Choose the same."""
        timing.prefer(choices)

    def computes_on_host(self, module: nn.Module) -> bool:
        """Tell whether programs of the module run on this computer's own cores."""
        return device_of(module).type == "cpu" and not self.as_device

    def can_run_eagerly(self, config: TrainConfig, error: Exception) -> bool:
        """Tell whether the module itself may run where a recording of it ended with this error."""
        # These change or divide what is recorded.
        is_changed = config.recompute or config.shard_weights
        return config.jit == AUTO and not is_changed and may_run_eagerly(error)

    def build(self, spec: ProgramSpec) -> Program:
        """A program for the spec. Recording happens when the first micro-batch of a shape comes."""
        if spec.mode is not Mode.TRAIN:
            return InferenceProgram(self, spec)
        self.training = TrainingProgram(self, spec)
        return self.training

    def beside(self) -> EmbeddedEngine:
        """Another engine that runs what this one has recorded, and remembers no training."""
        other = EmbeddedEngine()
        other.as_device, other.tape, other.libraries = self.as_device, self.tape, self.libraries
        other._traced, other._decisions = self._traced, self._decisions
        other._steps = self._steps
        return other

    def gather_optimizer(self) -> None:
        """Give torch's optimizer the whole state, if it lies in parts."""
        if self.carried.state_parts is not None:
            self.carried.state_parts.gather_optimizer({})

    @property
    def way(self) -> Optional[str]:
        """The value of ``jit`` that stands for how training runs; None before it does."""
        training = self.training
        if training is None:
            return None
        return training.way.jit or (None if training.lowered is None else training.lowered.way)

    def explain(self, config: TrainConfig, options: Mapping[str, object]) -> List[str]:
        """Describe in sentences how training runs on this engine.

        Args:
            config: how an update is made.
            options: those of an IPU; here there are none.
        """
        sentences = [describe_hints(self.hints)] if self.hints else []
        training = self.training
        if training is not None and training.lowered is not None and training.lowered.why:
            sentences.append(training.lowered.why)
        if training is not None and config.compiler is not None:
            sentences += [_MAY_MERGE] if config.recompute else []
        recordings = None if training is None else training.recordings
        shapes = [] if recordings is None else recordings.explain()
        sentences += shapes
        if training is not None and training.merging is not None:
            sentences.append(training.merging.explanation)
            if training.merging.merged is not None and shapes:
                sentences.append(_MIXED)
        if training is not None:
            sentences += training.state.updater.explain()
        if config.offload_optimizer_state:
            memory = None if training is None else training.state.placement.memory
            sentences.append(_OFFLOADED if isinstance(memory, HostMemory) else _NOT_OFFLOADED)
        if config.shard_optimizer:
            sentences.append(_sharded(config))
        overlap = self.carried.overlap
        sentences += [overlap.explain()] if overlap is not None else []
        sentences += training.way.explain() if training is not None else []
        if self.recomputed is None or not config.recompute:
            return sentences
        repeated, before, after = self.recomputed
        return [
            *sentences,
            f"The backward pass computes {repeated} operators of {len(config.recompute)} layers "
            f"again: values of a micro-batch take {_mebibytes(after)} at most, "
            f"{_mebibytes(before)} without.",
        ]


def _refuse_with_turns(config: TrainConfig) -> None:
    """Refuse what needs updates with one loss.

    Raises:
        ConfigurationError: naming it.
    """
    asked_for = {
        f"jit={config.jit!r}": config.jit in (INDUCTOR, CUDAGRAPH),
        "a loss scale": config.loss_scale is not None,
        "detect_nan=True": config.detect_nan,
        "Memory(shard=...)": config.shard_optimizer,
    }
    for name, is_set in asked_for.items():
        if is_set:
            raise ConfigurationError(
                f"{name} needs updates with one loss, but several TrainSteps take turns in each "
                "update. Leave it out, or compute the losses in one TrainStep with at_once=True."
            )


def _sharded(config: TrainConfig) -> str:
    processes = current()
    if not processes.is_distributed:
        name = "shard='weights'" if config.shard_weights else "shard='optimizer'"
        return _NOT_SHARDED.format(name)
    from ipufit.engines.embedded.zero import needs_whole_gradient

    why = needs_whole_gradient(config)
    what, gets = "The optimizer's state lies", "its part of the gradients' sum"
    if config.shard_weights:
        what = "Weights and the optimizer's state lie"
        gets = f"whole weights while they are read, and {gets}"
    elif why is not None:
        gets = f"the whole sum of the gradients, which {why} needs"
    return _SHARDED.format(what, processes.num_processes, gets)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"
