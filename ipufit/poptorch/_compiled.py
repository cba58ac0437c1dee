"""A compiled model: the recorded program, the device's memory, and how a call runs."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor, nn

from ipufit.poptorch._arguments import Arguments
from ipufit.poptorch._device import Device, outside_inference_mode
from ipufit.poptorch._errors import error
from ipufit.poptorch._execution import AnchoredTensors, CallShape, Counters, MicroBatchRunner
from ipufit.poptorch._group import Group
from ipufit.poptorch._hooks import _OverwriteContextManager, compile_hooks
from ipufit.poptorch._logging import logger
from ipufit.poptorch._loss_scale import ScalingSettings
from ipufit.poptorch._optimizer import CompiledOptimizer
from ipufit.poptorch._placement import placed
from ipufit.poptorch._precision import check_input, keeps_float64, narrowed, narrowed_output
from ipufit.poptorch._program_files import through_cache
from ipufit.poptorch._recorded_program import RecordedProgram
from ipufit.poptorch._recording import record
from ipufit.poptorch._replica_grouping import ReplicaGrouping
from ipufit.poptorch.enums import CommGroupType, OutputMode, ReductionType
from ipufit.poptorch.options import Options

__all__ = ["BatchDivision", "Compiled"]


class BatchDivision(NamedTuple):
    """Numbers by which dimension 0 of a combined batch is divided."""

    device_iterations: int = 1
    replication_factor: int = 1
    input_group_size: int = 1
    gradient_accumulation: int = 1

    @property
    def groups(self) -> int:
        """Number of groups of replicas; all replicas of one read the same micro-batch."""
        return self.replication_factor // self.input_group_size

    @property
    def factor(self) -> int:
        """Number of micro-batches in one call."""
        return self.device_iterations * self.groups * self.gradient_accumulation

    def check(self, tensor: Tensor, name: str) -> int:
        """Return the micro-batch size of an input; a 0-dim tensor counts as a batch of 1.

        Args:
            name: what the input is called in a message.
        Raises:
            AssertionError: its dimension 0 does not divide evenly.
        """
        size = tensor.shape[0] if tensor.dim() else 1
        if self.factor < 1 or size % self.factor:
            raise AssertionError(
                f"Invalid batch dimension: in the input {name} of shape {list(tensor.shape)}, the "
                f"batch dimension ({size}) must be a multiple of "
                f"Options.deviceIterations({self.device_iterations}) * "
                f"(Options.replicationFactor({self.replication_factor}) / "
                f"Options.inputReplicaGrouping.input_group_size({self.input_group_size})) * "
                f"Options.Training.gradientAccumulation({self.gradient_accumulation}) = "
                f"{self.factor}, {self._advice(size)}"
            )
        return size // self.factor

    def _advice(self, size: int) -> str:
        if self.factor < 1:
            return "which must be at least 1. Set each of these numbers to 1 or more."
        below = size // self.factor * self.factor
        sizes = f"{below} or {below + self.factor}" if below else f"{self.factor}"
        return (
            f"so that each micro-batch has the same size. Pass {sizes} samples, or use "
            "poptorch.DataLoader, which loads the right number."
        )

    def first(self, tensor: Tensor, name: str) -> Tensor:
        """Return the first micro-batch of an input as a view, with which forward is recorded."""
        size = self.check(tensor, name)
        return tensor.narrow(0, 0, size) if tensor.dim() else tensor


def shape_of(options: Options) -> CallShape:
    """Return number and order of the micro-batches of a call."""
    replicas, size = options.replication_factor, options.input_group_size
    groups = replicas // size
    if options.input_cgt == CommGroupType.Orthogonal:
        members = tuple(replica % groups for replica in range(replicas))
    else:
        members = tuple(replica // size for replica in range(replicas))
    return CallShape(
        options.device_iterations,
        options.Training.gradient_accumulation,
        replicas,
        members,
        OutputMode(options.output_mode),
        options.output_return_period,
    )


class Compiled:
    """A program on its device.

    Args:
        model: the module that is recorded.
        parameters, buffers: the module's tensors on the host, unwrapped, by name.
        options: options of the executor.
        arguments: arguments of the call that the program is compiled for.
        training: whether the program computes gradients and updates.
        groupings: replica groupings of the parameters that have one.
        trained: for each parameter group of the optimizer, names of its parameters.
        recorded: the program, where it comes from a file; the model is not recorded then.
        wide: whether float64 is preserved; by default as it is set now.

    Attributes:
        arguments: the arguments that later ones must match.
        anchors: tensors that were anchored, as they were in the last call.
        counters: times of the last call.
        placement: on which IPUs the blocks would be.
        recorded: the program.
        device: the device's memory.
        group: the processes that the program runs in.
        wide: whether float64 is preserved.
        is_synthetic: whether it runs on generated inputs, and nothing comes back.

    Raises:
        Error: the model, or an option, is not supported.
    """

    @outside_inference_mode
    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        options: Options,
        arguments: Arguments,
        training: bool,
        groupings: Mapping[str, ReplicaGrouping],
        trained: Sequence[Sequence[str]],
        recorded: Optional[RecordedProgram] = None,
        wide: Optional[bool] = None,
    ) -> None:
        self._options = options
        self._shape = shape = shape_of(options)
        self.group = Group(options, training)
        self.wide = keeps_float64() if wide is None else wide
        self.arguments = arguments.without_values()
        self.counters = Counters()
        self.is_synthetic = bool(options._Popart.options.get("syntheticDataMode", 0))
        self.counters.enabled = not self.is_synthetic
        self.device = Device(parameters, buffers, shape.replicas, groupings, self.wide)
        trainable_names = [name for group in trained for name in group]
        leaves = self._micro_batch(arguments)
        if recorded is None:
            state = self.device.example()
            scaling = ScalingSettings.of(options._Popart.options) if training else None
            with compile_hooks(), _OverwriteContextManager():
                recorded = record(
                    model,
                    state,
                    trainable_names,
                    arguments.rebuild,
                    leaves,
                    training,
                    self.wide,
                    scaling,
                    options._module_namescope_enabled,
                )
            recorded = through_cache(recorded, state, options)
        self.recorded = recorded
        entered = self.recorded.trace.blocks.entered
        self.placement = placed(options, entered, training, self.recorded.overlapped)
        self._check_buffers(buffers)
        changed = {*recorded.changed_state, *recorded.statistics}
        self.device.separate([name for name in buffers if name in changed])
        self._check_updatable(buffers)
        self._anchored = self._find_anchored(len(leaves))
        self._execution = self._make_execution()
        self.anchors: Dict[str, Tensor] = {}

    def _find_anchored(self, inputs: int) -> AnchoredTensors:
        wanted = [anchor[0] for anchor in self._options.anchored_tensors.values()]
        return AnchoredTensors(wanted, self.recorded, inputs, self.device, self._numbers)

    def _numbers(self) -> Dict[str, float]:
        updates = self.device.updates
        return updates.anchors() if isinstance(updates, CompiledOptimizer) else {}

    def check_anchors(self) -> None:
        """Refuse names of anchors that do not exist, once the optimizer's names are there.

        Raises:
            Error: the name, and where to find those there are.
        """
        self._anchored.check()
        for name, _, mode, period in self._options.anchored_tensors.values():
            # The mode that was asked for, which a device does not heed either.
            shown = "Sum" if mode == OutputMode.Sum else OutputMode(mode).name.upper()
            logger.debug("Anchored tensor %s %s/%d", name, shown, period)

    def _make_execution(self) -> MicroBatchRunner:
        options = self._options
        reduction = options.Training.accumulation_and_replication_reduction_type
        popart = options._Popart.options
        return MicroBatchRunner(
            self.recorded,
            self.device,
            self._shape,
            self.group,
            reduction == ReductionType.Mean,
            self.scale,
            self.counters,
            self._anchored,
            popart.get("enableFloatingPointChecks", False),
        )

    def _on_device(self, tensor: Tensor) -> Tensor:
        if tensor.is_inference():
            tensor = tensor.clone()
        return tensor if self.wide else narrowed(tensor)

    def _micro_batch(self, arguments: Arguments) -> List[Tensor]:
        """Return the inputs of the first micro-batch, with which the model is recorded."""
        options = self._options
        combined = BatchDivision(
            options.device_iterations,
            options.replication_factor,
            options.input_group_size,
            options.Training.gradient_accumulation,
        )
        leaves = []
        for tensor, name in zip(arguments.tensors(), arguments.tensor_names()):
            if not self.wide or not tensor.numel():
                check_input(tensor, name)
            leaves.append(self._on_device(combined.first(tensor, name)))
        return leaves

    def _check_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        several = self._shape.replicas > self._options.input_group_size
        if not several or not self._options.broadcast_buffers:
            return
        for name in self.recorded.changed_state:
            if name in buffers and buffers[name].is_floating_point():
                raise error(
                    "PopTorch does not support broadcasting buffers. If your model is able to "
                    "tolerate buffers becoming out of sync between replicas, you can disable "
                    "buffer broadcasting using poptorch.Options.broadcastBuffers(False). The "
                    f"buffer {name!r} is changed in place on {self._shape.replicas} replicas."
                )

    def _check_updatable(self, buffers: Mapping[str, Tensor]) -> None:
        for name in self._options._Popart.options.get("updatableNamedBuffers", ()):
            if name not in buffers:
                raise error(
                    f"updatableNamedBuffers names {name!r}, but the model has the buffers "
                    f"{', '.join(sorted(buffers)) or 'none'}. Name one of them."
                )

    def scale(self) -> float:
        """Return the initial gradient of the loss."""
        updates = self.device.updates
        return updates.loss_scaling if isinstance(updates, CompiledOptimizer) else 1.0

    @outside_inference_mode
    def run(self, arguments: Arguments, seed: int) -> Any:
        """Run one call.

        Args:
            arguments: arguments that match those that the program was compiled for.
            seed: seed of the first iteration's random numbers; each iteration adds one to it.
        Returns:
            The value that forward returns, each tensor holding the micro-batches that come back.
        """
        inputs = [self._on_device(tensor) for tensor in arguments.tensors(self.arguments)]
        if self.is_synthetic:
            inputs = [_made_up(tensor) for tensor in inputs]
        self._begin_together(inputs)
        changed = self.recorded.changed_inputs
        for place in changed:
            inputs[place] = inputs[place].clone()
        outputs, anchors = self._execution.run(inputs, seed)
        self.anchors = dict(zip(self._options.anchored_tensors, anchors))
        if self.is_synthetic:
            # Nothing comes back of a run on made-up data.
            outputs = [torch.zeros_like(tensor) for tensor in outputs]
        elif changed:
            callers = arguments.callers(self.arguments)
            for place in changed:
                with torch.no_grad(), torch.inference_mode(callers[place].is_inference()):
                    callers[place].copy_(inputs[place])
        if not self.wide:
            outputs = [narrowed_output(tensor) for tensor in outputs]
        return self.recorded.outputs.rebuild(outputs)

    def _begin_together(self, inputs: Sequence[Tensor]) -> None:
        shape = self._shape
        self.group.begin(
            self.device,
            device_iterations=shape.iterations,
            gradient_accumulation=shape.accumulation,
            replication_factor=shape.replicas,
            inputs=[[*tensor.shape] for tensor in inputs],
        )

    def tensor_names(self) -> List[str]:
        """Return the names that can be anchored."""
        return self._anchored.available_names()


def _made_up(tensor: Tensor) -> Tensor:
    """Return synthetic data: normally distributed, or zeros, which are valid as any index."""
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
