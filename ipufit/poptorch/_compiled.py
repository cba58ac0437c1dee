"""A compiled model: its program, the device's memory, how a call runs, and what can be asked."""

from __future__ import annotations

import contextlib
import datetime
from collections import OrderedDict
from typing import (
    Any,
    Callable,
    ClassVar,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    Type,
)

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ipufit.poptorch._arguments import Arguments
from ipufit.poptorch._device import Device, Group, ReplicaGrouping, group_of
from ipufit.poptorch._execution import AnchoredTensors, CallShape, Counters, MicroBatchRunner
from ipufit.poptorch._logging import error, logger
from ipufit.poptorch._loss_scale import ScalingSettings
from ipufit.poptorch._placement import place_on_ipus
from ipufit.poptorch._precision import check_input, keeps_float64, narrowed, narrowed_output
from ipufit.poptorch._program_files import through_cache
from ipufit.poptorch._recording import RecordedProgram, record
from ipufit.poptorch.enums import OutputMode, ReductionType
from ipufit.poptorch.options import Options

_Hook = Callable[[], Any]

# In order of registration.
_before: OrderedDict[int, _Hook] = OrderedDict()
_after: OrderedDict[int, _Hook] = OrderedDict()


def registerPreCompileHook(hook: _Hook) -> RemovableHandle:
    """Call a function without arguments before any model is compiled.

    Returns:
        A handle whose ``remove()`` takes it back.
    Raises:
        RuntimeError: it can't be called.
    """
    return _register(_before, hook, "Pre-compile")


def registerPostCompileHook(hook: _Hook) -> RemovableHandle:
    """Call a function without arguments after any compilation, also after one that failed.

    Returns:
        A handle whose ``remove()`` takes it back.
    Raises:
        RuntimeError: it can't be called.
    """
    return _register(_after, hook, "Post-compile")


def _register(hooks: OrderedDict[int, _Hook], hook: _Hook, which: str) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(
            f"{which} hook must be callable, got {hook!r}. Pass a function without arguments."
        )
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@contextlib.contextmanager
def compile_hooks() -> Iterator[None]:
    """Call the hooks before and after a compilation."""
    try:
        _call(_before)
        yield
    finally:
        _call(_after)


def _call(hooks: OrderedDict[int, _Hook]) -> None:
    # A copy: a hook may remove itself.
    for hook in list(hooks.values()):
        hook()


def latency(starts: Sequence[float], ends: Sequence[float]) -> Latency:
    """Return smallest, largest and mean seconds between two events; zeros without one of them.

    Args:
        starts: when the one happened; a multiple of the number of ends.
        ends: when the other one did.
    """
    if not starts or not ends:
        return 0.0, 0.0, 0.0
    # Several inputs may go into one output.
    share = len(starts) // len(ends)
    took = [end - min(starts[i * share : (i + 1) * share]) for i, end in enumerate(ends)]
    return min(took), max(took), sum(took) / len(took)


class _Substitution(Protocol):
    """Object of a registered class, made for one recording."""

    def replace(self) -> object:
        """Replace something, as the recording begins."""

    def restore(self) -> object:
        """Restore it, as the recording ends."""


class _OverwriteContextManager:
    """Lets every registered substitution replace something while a model is recorded.

    A substitution is a class whose objects have the methods ``replace`` and ``restore``.
    """

    _subsitution_manager_types: ClassVar[List[Type[_Substitution]]] = []

    def __init__(self) -> None:
        self.substitution_managers = [kind() for kind in self._subsitution_manager_types]
        self._restoring = contextlib.ExitStack()

    def __enter__(self) -> _OverwriteContextManager:
        with contextlib.ExitStack() as restoring:
            for manager in self.substitution_managers:
                manager.replace()
                restoring.callback(manager.restore)
            # All have replaced something; if one fails, those before it restore it here.
            self._restoring = restoring.pop_all()
        return self

    def __exit__(self, exc_type: object, value: object, traceback: object) -> None:
        self._restoring.close()

    @classmethod
    def registerSubsitutionManager(cls, type: Type[_Substitution]) -> None:
        """Use an object of this class in every recording.

        Args:
            type: called without arguments; its objects have the methods ``replace``, called as a
                recording begins, and ``restore``, called as it ends.
        """
        if type not in cls._subsitution_manager_types:
            cls._subsitution_manager_types.append(type)


def shape_of(options: Options) -> CallShape:
    """Return number and order of the micro-batches of a call."""
    replicas, size = options.replication_factor, options.input_group_size
    kind = options.input_cgt
    members = tuple(group_of(replica, kind, size, replicas) for replica in range(replicas))
    return CallShape(
        options.device_iterations,
        options.Training.gradient_accumulation,
        replicas,
        members,
        OutputMode(options.output_mode),
        options.output_return_period,
        size,
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
        anchored: finds the tensors that are anchored.
        anchors: the anchored tensors as they were in the last call.
        counters: times of the last call.
        ipus: how many are reserved for it.
        recorded: the program.
        device: the device's memory.
        group: the processes that the program runs in.
        wide: whether float64 is preserved.
        is_synthetic: whether it runs on generated inputs, and nothing comes back.

    Raises:
        Error: the model, or an option, is not supported.
    """

    # Its tensors are changed later.
    @torch.inference_mode(False)
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
        self.ipus = place_on_ipus(options, entered, training, self.recorded.overlapped)
        self._check_buffers(buffers)
        changed = {*recorded.changed_state, *recorded.statistics}
        self.device.separate([name for name in buffers if name in changed])
        self._check_updatable(buffers)
        wanted = [anchor[0] for anchor in options.anchored_tensors.values()]
        self.anchored = AnchoredTensors(wanted, recorded, len(leaves), self.device)
        reduction = options.Training.accumulation_and_replication_reduction_type
        self._execution = MicroBatchRunner(
            recorded,
            self.device,
            shape,
            self.group,
            reduction == ReductionType.Mean,
            self.counters,
            self.anchored,
            options._Popart.options.get("enableFloatingPointChecks", False),
        )
        self.anchors: Dict[str, Tensor] = {}

    def check_anchors(self) -> None:
        """Refuse names of anchors that do not exist, once the optimizer's names are there.

        Raises:
            Error: the name, and where to find those there are.
        """
        self.anchored.check()
        for name, _, mode, period in self._options.anchored_tensors.values():
            # The mode that was asked for, which a device does not heed either.
            shown = "Sum" if mode == OutputMode.Sum else OutputMode(mode).name.upper()
            logger.debug("Anchored tensor %s %s/%d", name, shown, period)

    def _on_device(self, tensor: Tensor) -> Tensor:
        if tensor.is_inference():
            tensor = tensor.clone()
        return tensor if self.wide else narrowed(tensor)

    def _micro_batch(self, arguments: Arguments) -> List[Tensor]:
        """Return the inputs of the first micro-batch, with which the model is recorded."""
        leaves = []
        for tensor, name in zip(arguments.tensors(), arguments.tensor_names()):
            if not self.wide or not tensor.numel():
                check_input(tensor, name)
            leaves.append(self._on_device(self._shape.first(tensor, name)))
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

    @torch.inference_mode(False)
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
        shape = self._shape
        self.group.begin(
            self.device,
            device_iterations=shape.iterations,
            gradient_accumulation=shape.accumulation,
            replication_factor=shape.replicas,
            inputs=[[*tensor.shape] for tensor in inputs],
        )
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


def _made_up(tensor: Tensor) -> Tensor:
    """Return synthetic data: normally distributed, or zeros, which are valid as any index."""
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


Latency = Tuple[float, float, float]


class Inspection:
    """Read-only half of an executor.

    Attributes:
        _executable: the program; None before compiling and after ``destroy``.
        _options: options of the executor.
        _anchors: the anchored tensors of the last call, by their short names.
    """

    _executable: Optional[Compiled]
    _options: Options
    _anchors: Dict[str, Tensor]

    def compilationTime(self) -> datetime.timedelta:
        """Return how long compiling took.

        Raises:
            Error: not compiled, or the progress bar is off.
        Returns:
            Zero for a program that came out of a file.
        """
        if self._executable is None:
            raise error("Please compile the model before obtaining compilation time.")
        if not self._options._show_compilation_progress_bar:
            raise error("Please set showCompilationProgressBar option to obtain compilation time.")
        return self._options._progress_bar.compilation_time or datetime.timedelta()

    def cycleCount(self) -> int:
        """Cycles of the last run, which only hardware counts.

        Raises:
            Error: always.
        """
        if not self._options._Popart.options.get("instrumentWithHardwareCycleCounter", False):
            raise error(
                "Cycle count logging is disabled. Please set option logCycleCount to True to "
                "enable."
            )
        if self._executable is None:
            raise error("Please run the model at least once before obtaining cycle count.")
        raise error(
            "Cycles can be counted on IPU hardware only, and this model runs in plain torch. "
            "getLatency() measures seconds."
        )

    def getTensorNames(self) -> List[str]:
        """Return the names that :meth:`Options.anchorTensor` takes.

        Raises:
            AssertionError: not compiled.
        """
        if self._executable is None:
            raise AssertionError(
                "Model must be compiled before calling getTensorNames: call it with inputs, or "
                "call compile(), first."
            )
        return self._executable.anchored.available_names()

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """Return the tensor anchored under this name, as it was in the last call.

        Raises:
            AssertionError: there is none.
        """
        if short_name not in self._anchors:
            names = ", ".join(sorted(self._anchors)) or "none"
            raise AssertionError(
                f"No tensor with name {short_name} found. Anchored, and run: {names}. Ask for one "
                "with options.anchorTensor(short_name, long_name)."
            )
        return self._anchors[short_name]

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """Return when inputs and outputs of the last call were there, in seconds.

        Returns:
            By event ("input", "input_complete", "output", "output_complete"): for every tensor, the
            time of every micro-batch.
        """
        if self._executable is None:
            return Counters().times()
        return self._executable.counters.times()

    def _latency(self, start: str, end: str) -> Latency:
        times = self.getPerfCounters()
        return latency(times[start][0], times[end][0])

    def getHostIpuLatency(self) -> Latency:
        """Return smallest, largest and mean seconds from requesting inputs to having them."""
        return self._latency("input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return smallest, largest and mean seconds from having inputs to having outputs."""
        return self._latency("input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """Return smallest, largest and mean seconds from having outputs to their arrival."""
        return self._latency("output", "output_complete")

    def getLatency(self) -> Latency:
        """Return smallest, largest and mean seconds from requesting inputs to having outputs."""
        return self._latency("input", "output_complete")

    def _debugGetPopartIR(self) -> str:
        raise error(
            "There is no PopART IR: this model runs in plain torch. Only the SDK compiles one."
        )
