"""Programs that PopTorch has compiled: a step with its executor, and one that trains.

A program that trains shares weights, buffers and optimizer state with the user's module, or with a
copy of it, to and from which they go through the host.
"""

from __future__ import annotations

import copy
import dataclasses
from types import ModuleType
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn

from ipufit.core.batch import MicroBatch
from ipufit.engines.external_changes import changed_shape, refuse_replaced
from ipufit.engines.ipu.optimizers import DeviceOptimizer
from ipufit.engines.ipu.sdk import OWNER, Executor, translate_errors
from ipufit.engines.ipu.size import Size
from ipufit.engines.ipu.step import IpuStep, Traced
from ipufit.engines.program import ExecutionResult, Prepared, ProgramSpec, TrainState
from ipufit.errors import DataError
from ipufit.losses import Loss
from ipufit.processes import Processes
from ipufit.tracing.grad_step import ModuleWithLoss, ReportedScalars, public_name, unpack_reported
from ipufit.tracing.untraced_random import record_alone, refuse_draws
from ipufit.utils.console import warn_user

_LARGEST = 2**31 - 1


@dataclasses.dataclass
class Result:
    """The results of one micro-batch.

    Attributes:
        numbers: what it reports, float64; empty when predicting.
        reported: what these are; a smaller micro-batch may log other values.
        outputs: the module's outputs; None when nobody wants them.
    """

    numbers: List[float]
    reported: ReportedScalars
    outputs: object = None


class Executable:
    """A step with its executor.

    Args:
        sdk: PopTorch.
        step: what it runs.
        executor: PopTorch's.
        size: of a call.
        wide: whether float64 and int64 go through as they are, as no device lets them.
    """

    def __init__(
        self, sdk: ModuleType, step: IpuStep, executor: Executor, size: Size, wide: bool
    ) -> None:
        self.step = step
        self.executor = executor
        self.size = size
        self._sdk = sdk
        self._wide = wide

    @property
    def traced(self) -> Traced:
        """The facts about the step that its compilation has shown."""
        return self.step.traced

    def prepared(self, samples: int) -> Prepared:
        """Describe the results for a micro-batch with so many samples that count."""
        traced, outputs = self.traced, None
        if self.step.wants_outputs:
            tensors = _cut_rows(traced.outputs.tensors, self.size.micro_batch, samples)
            outputs = traced.outputs.rebuild(tensors)
        return Prepared(outputs, traced.reported.rules, traced.loss)

    def compile(self, example: MicroBatch) -> None:
        """Compile for micro-batches like this one; attributes that forward sets stay as they were.

        Warns:
            UserWarning: it sets some.
        """
        batch = [example] * self.size.micro_batches
        extra = self._padding([1.0] * len(batch), [example.size] * len(batch))
        arguments = [*self._combined(batch), *extra]
        whole, step = self.step.whole(), self.step

        def record() -> fx.GraphModule:
            return record_alone(whole, example, step.trains, step.reports, step.precision)

        watched = refuse_draws(whole, record, runs_eagerly=False)
        preserved = whole.preserve_attributes(notes_writes=True)
        with preserved, watched, translate_errors(self._sdk, "compiling"):
            OWNER.compile(self.executor, arguments)
        if self.traced.attributes:
            warn_user(
                f"forward sets {', '.join(self.traced.attributes)}, but it runs only once, to be "
                "traced: the loss of the same step reads the new value, but for all else the "
                "attribute keeps its present one. To carry a value from one micro-batch to the "
                "next, register a buffer of floating point and change it in place.",
            )

    def run(
        self,
        batch: Sequence[MicroBatch],
        seed: int,
        shares: Optional[Sequence[float]] = None,
        sizes: Optional[Sequence[int]] = None,
    ) -> List[Result]:
        """One call.

        Args:
            batch: as many micro-batches as the size says, all full.
            seed: of the first iteration's random numbers.
            shares: what the gradient of each is multiplied with, where they may be padding.
            sizes: how many samples of each count.
        """
        count = len(batch)
        assert count == self.size.micro_batches, "a program has one shape"
        extra = self._padding(shares or [1.0] * count, sizes or [self.size.micro_batch] * count)
        arguments = [*self._combined(batch), *extra]
        with translate_errors(self._sdk, "running"):
            self.executor.rng_state = [seed]
            returned = self.executor(*arguments)
        return self._results(list(returned), sizes or [self.size.micro_batch] * count)

    def _padding(self, shares: Sequence[float], sizes: Sequence[int]) -> List[Tensor]:
        dtype = torch.float64 if self._wide else torch.float32
        padding_inputs = []
        if self.size.padding != "none":
            padding_inputs.append(torch.tensor(list(shares), dtype=dtype))
        if self.size.padding == "samples":
            places = torch.arange(self.size.micro_batch)
            padding_inputs.append(torch.cat([(places < size).to(dtype) for size in sizes]))
        return padding_inputs

    def _combined(self, batch: Sequence[MicroBatch]) -> List[Tensor]:
        leaves = []
        for each in zip(*(micro_batch.leaves for micro_batch in batch)):
            whole = torch.cat(each) if each[0].dim() else torch.stack(each)
            leaves.append(self._checked(whole.detach().cpu()))
        return leaves

    def _checked(self, leaf: Tensor) -> Tensor:
        """A tensor of the batch, as long as a device holds what it holds.

        Raises:
            DataError: it does not.
        """
        if self._wide:
            return leaf
        if leaf.dtype == torch.float64:
            raise DataError(
                "an IPU computes in float32 at most, but the data is float64. NumPy creates "
                "float64 by default: convert it with array.astype('float32') or tensor.float()."
            )
        if leaf.dtype == torch.int64 and leaf.numel() and int(leaf.abs().max()) > _LARGEST:
            raise DataError(
                f"integers on an IPU have 32 bits, but the data contains {int(leaf.abs().max())}. "
                "Map such numbers to smaller ones in the dataset."
            )
        return leaf

    def _results(self, returned: List[Tensor], sizes: Sequence[int]) -> List[Result]:
        count = len(sizes)
        results = [Result([], self.traced.reported) for _ in range(count)]
        if self.step.reports:
            numbers = returned.pop(0).to(torch.float64).reshape(count, -1)
            results = [Result(row, self.traced.reported) for row in numbers.tolist()]
            if self.step.trains:
                returned.pop(0)
        if self.step.wants_outputs:
            cut = [_cut(*each, count) for each in zip(returned, self.traced.shapes)]
            for place, result in enumerate(results):
                tensors = [pieces[place] for pieces in cut]
                tensors = _cut_rows(tensors, self.size.micro_batch, sizes[place])
                result.outputs = self.traced.outputs.rebuild(tensors)
        return results

    def destroy(self) -> None:
        """Let the program go; safe twice."""
        with translate_errors(self._sdk, "closing a program"):
            OWNER.release(self.executor)
            self.executor.destroy()


def _cut(tensor: Tensor, shape: Tuple[int, ...], count: int) -> List[Tensor]:
    """The results of each micro-batch, of shape ``shape``, out of those of all."""
    if count == 1 or tuple(tensor.shape) == tuple(shape):
        # An output that the inputs do not go into comes back once.
        return [tensor.reshape(shape) for _ in range(count)]
    return [piece.reshape(shape) for piece in tensor.chunk(count)]


def _cut_rows(tensors: Sequence[Tensor], rows: int, samples: int) -> List[Tensor]:
    """The first samples of outputs that have a row for each."""
    if samples == rows:
        return list(tensors)
    return [t[:samples] if t.dim() and t.shape[0] == rows else t for t in tensors]


def anchors_of(
    results: Sequence[Result],
    spec: ProgramSpec,
    settings: Mapping[str, float],
) -> ExecutionResult:
    """Put the results of the micro-batches of an execution together.

    Args:
        results: of each micro-batch, in stream order.
        spec: which outputs are wanted.
        settings: what the program says of itself.
    """
    outputs, places = spec.choose_outputs([result.outputs for result in results])
    numbers = torch.tensor([n for each in results for n in each.numbers], dtype=torch.float64)
    kinds = [result.reported for result in results]
    losses, counts, logged, rules = unpack_reported(kinds, numbers)
    return ExecutionResult(losses, outputs, places, counts, logged, rules, dict(settings))


def _plain(tensor: Tensor) -> Tensor:
    """A copy on the host that is no more than a tensor."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype)
    with torch.no_grad():
        copied.copy_(tensor)
    return copied


class Host:
    """The user's module and loss, and which of their parameters are trained.

    Args:
        spec: what is built.

    Attributes:
        whole: the two as one module.
        parameters: of both, by the names that programs have for them.
        trained: those of them that the optimizer holds and that require gradients.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        self.whole = ModuleWithLoss(spec.module, spec.loss)
        groups = spec.optimizer.param_groups if spec.optimizer is not None else []
        owned = {id(p) for group in groups for p in group["params"]}
        self.parameters: Dict[str, nn.Parameter] = dict(self.whole.named_parameters())
        self.trained = {
            name: p for name, p in self.parameters.items() if p.requires_grad and id(p) in owned
        }
        self._at_start = self.tensors()
        self._forms = {name: _form(p) for name, p in self.parameters.items()}
        # By this way round what PopTorch wraps, they can be changed without fetching all weights.
        self._counters: Dict[str, Tensor] = {
            name: buffer.detach()
            for name, buffer in self.buffers().items()
            if not buffer.is_floating_point()
        }

    def refuse_changes(self) -> None:
        """Make sure that what was there at the start is there, and as it was.

        Raises:
            ConfigurationError: a parameter or buffer was replaced, or changed its shape or dtype.
        """
        refuse_replaced(self.whole, self._at_start)
        for name, form in self._forms.items():
            if _form(self.parameters[name]) != form:
                raise changed_shape(name)

    def count(self, name: str, times: int) -> None:
        """Let a counter go on, which a device leaves alone."""
        self._counters[name].add_(times)

    def buffers(self) -> Dict[str, Tensor]:
        """The buffers as they are now."""
        return dict(self.whole.named_buffers())

    def share_buffers(self, processes: Processes) -> None:
        """Give all processes the floating-point buffers of process 0; others are counted alike."""
        floating = [buffer for buffer in self.buffers().values() if buffer.is_floating_point()]
        common = [_plain(buffer) for buffer in floating]
        processes.broadcast(common)
        if not processes.is_rank_zero:
            with torch.no_grad():
                for buffer, value in zip(floating, common):
                    buffer.copy_(value)

    def tensors(self) -> Dict[str, Tensor]:
        """Parameters and buffers by the names that programs have for them."""
        return {**self.parameters, **self.buffers()}

    def copies(self) -> Tuple[Dict[str, Tensor], Dict[str, Tensor]]:
        """Copies of the parameters and of the buffers, by the user's names."""
        weights, buffers = (
            {public_name(name): _plain(tensor) for name, tensor in named.items()}
            for named in (self.parameters, self.buffers())
        )
        return weights, buffers

    def overwrite(self, state: TrainState) -> None:
        """Take over the weights of a state, and the buffers of its first replica, in place."""
        state.write_to(self.parameters, self.buffers())

    def versions(self) -> List[Tuple[int, int]]:
        """Other numbers after any change of values. Does not bring weights back to look."""
        return [_version(parameter) for parameter in self.parameters.values()]

    def all_versions(self) -> List[Tuple[int, int]]:
        """The versions of parameters and of buffers."""
        return [*self.versions(), *map(_version, self.buffers().values())]


class Trained(Executable):
    """A compiled training program with its module, loss and optimizer.

    Args:
        sdk: PopTorch.
        spec: what is built.
        host: the user's tensors.
        options: PopTorch's.
        size: of a call.
        example: a micro-batch of that size.
        scheduled: settings of the optimizer that will change.
        copies_module: whether it has a copy, because the user's module is in another program.
        wide: whether float64 is kept.

    Attributes:
        optimizer: PopTorch's.
        copies_module: as passed.
    """

    def __init__(
        self,
        sdk: ModuleType,
        spec: ProgramSpec,
        host: Host,
        options: Any,
        size: Size,
        example: MicroBatch,
        scheduled: FrozenSet[str],
        copies_module: bool,
        wide: bool,
    ) -> None:
        assert spec.optimizer is not None
        self._host = host
        self.copies_module = copies_module
        net: nn.Module = spec.module
        loss: Optional[Loss] = spec.loss
        if copies_module:
            net, loss = copy.deepcopy((net, loss))
        step = IpuStep(sdk, net, loss, spec, example, size.padding)
        step.original = (spec.module,) if copies_module else ()
        step.training = spec.module.training
        parameters = dict(step.named_parameters())
        # Before PopTorch gives them classes of its own.
        self._kinds = [(t, type(t)) for t in (*parameters.values(), *step.buffers())]
        self.optimizer = DeviceOptimizer(
            sdk, spec.optimizer, parameters, host.trained, spec.config, scheduled
        )
        with translate_errors(sdk, "wrapping the module"):
            executor = sdk.trainingModel(
                step, options=options, optimizer=self.optimizer.poptorch_optimizer
            )
        super().__init__(sdk, step, executor, size, wide)

    def compile(self, example: MicroBatch) -> None:
        """Compile for micro-batches like this one."""
        super().compile(example)
        self.optimizer.load()

    def load(self) -> None:
        """Take over the user's tensors and the state of torch's optimizer."""
        if self.copies_module:
            _copy(self._host.tensors(), self.step.tensors())
        self.optimizer.load()

    def store(self, updates: int) -> None:
        """Give all back to the user's module and torch's optimizer, and the device to others."""
        with translate_errors(self._sdk, "reading weights and optimizer state"):
            OWNER.release(self.executor)
            # What has not run has nothing to give, and the user may have changed his own since.
            if updates and self.copies_module:
                _copy(self.step.tensors(), self._host.tensors())
            if updates:
                self.optimizer.store(updates)

    def send(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Tell the device of the settings of the coming updates, if they are others."""
        if not self.optimizer.changed(rows):
            return
        with translate_errors(self._sdk, "changing the settings of the optimizer"):
            if self.optimizer.waits:
                # State that goes to the device with the run would bring the settings before these.
                OWNER.release(self.executor)
                self.take()
            self.executor.setOptimizer(self.optimizer.poptorch_optimizer)

    def take(self) -> bool:
        """Take the device; whether another program, or none, had it before."""
        fresh = OWNER.take(self.executor)
        if fresh:
            # Attaching brings the optimizer's state over.
            self.optimizer.waits = False
        return fresh

    def destroy(self) -> None:
        """Let the program go, and take its wrapping from the tensors; safe twice."""
        super().destroy()
        # PopTorch leaves them wrapped where compiling has failed.
        for tensor, kind in self._kinds:
            if type(tensor) is not kind:
                tensor.__class__ = kind


def _version(tensor: Tensor) -> Tuple[int, int]:
    # What PopTorch wraps fetches the weights from the device when an attribute is asked for.
    version = object.__getattribute__(tensor, "_version")
    return version, object.__getattribute__(tensor, "data_ptr")()


def _form(parameter: Tensor) -> Tuple[object, ...]:
    # As above.
    return tuple(object.__getattribute__(parameter, name) for name in ("shape", "dtype"))


def _copy(source: Dict[str, Tensor], target: Dict[str, Tensor]) -> None:
    """Copy what a device can have changed; integers are constants to it, the host counts them."""
    with torch.no_grad():
        for name, tensor in target.items():
            if tensor.is_floating_point():
                tensor.copy_(source[name])


def unwrapped(frozen: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """A fingerprint in which parameters are of the same class, whether PopTorch has them or not."""
    last = len(frozen)
    return tuple(
        (part[0], part[2]) if index < last and _is_parameter(part[1]) else part
        for index, part in enumerate(frozen)
    )


def _is_parameter(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Parameter)
