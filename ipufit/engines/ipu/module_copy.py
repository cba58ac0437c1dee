"""The tensors of a training program: the user's own, or those of a copy."""

from __future__ import annotations

import copy
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch
from ipufit.engines.embedded.external_changes import changed_shape, refuse_replaced
from ipufit.engines.ipu.device import OWNER, translate_errors
from ipufit.engines.ipu.executable import Executable
from ipufit.engines.ipu.optimizers import DeviceOptimizer
from ipufit.engines.ipu.size import Size
from ipufit.engines.ipu.step import Form, IpuStep
from ipufit.engines.program import ProgramSpec
from ipufit.losses import Loss
from ipufit.processes import Processes
from ipufit.tracing.grad_step import ModuleWithLoss

__all__ = ["Host", "Trained", "plain", "unwrapped"]


def plain(tensor: Tensor) -> Tensor:
    """A copy on the host that is no more than a tensor."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype)
    with torch.no_grad():
        copied.copy_(tensor)
    return copied


class Host:
    """The user's module and loss, and which of their parameters are trained.

    Args:
        spec: what is built.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        self._modules: Dict[str, Optional[nn.Module]] = {
            "net": spec.module,
            "loss_module": spec.loss.module if spec.loss is not None else None,
        }
        self._whole = ModuleWithLoss(spec.module, spec.loss)
        groups = spec.optimizer.param_groups if spec.optimizer is not None else []
        owned = {id(p) for group in groups for p in group["params"]}
        self.parameters: Dict[str, nn.Parameter] = dict(self._named("named_parameters"))
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

    def _named(self, how: str) -> List[Any]:
        ids, named = set(), []
        for prefix, module in self._modules.items():
            for name, tensor in getattr(module, how)() if module is not None else ():
                if id(tensor) not in ids:
                    ids.add(id(tensor))
                    named.append((f"{prefix}.{name}", tensor))
        return named

    def refuse_changes(self) -> None:
        """Make sure that what was there at the start is there, and as it was.

        Raises:
            ConfigurationError: a parameter or buffer was replaced, or changed its shape or dtype.
        """
        refuse_replaced(self._whole, self._at_start)
        for name, form in self._forms.items():
            if _form(self.parameters[name]) != form:
                raise changed_shape(name)

    def count(self, name: str, times: int) -> None:
        """Let a counter go on, which a device leaves alone."""
        self._counters[name].add_(times)

    def buffers(self) -> Dict[str, Tensor]:
        """The buffers as they are now."""
        return dict(self._named("named_buffers"))

    def share_buffers(self, processes: Processes) -> None:
        """Give all processes the floating-point buffers of process 0; others are counted alike."""
        floating = [buffer for buffer in self.buffers().values() if buffer.is_floating_point()]
        common = [plain(buffer) for buffer in floating]
        processes.broadcast(common)
        if not processes.is_rank_zero:
            with torch.no_grad():
                for buffer, value in zip(floating, common):
                    buffer.copy_(value)

    def tensors(self) -> Dict[str, Tensor]:
        """Parameters and buffers by the names that programs have for them."""
        return {**self.parameters, **self.buffers()}

    def versions(self) -> List[int]:
        """Other numbers after any change in place. Does not bring weights back to look."""
        return [_version(parameter) for parameter in self.parameters.values()]

    def all_versions(self) -> List[int]:
        """The versions of parameters and of buffers."""
        return [*self.versions(), *map(_version, self.buffers().values())]


class Trained:
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
        unit: runs it.
        optimizer: PopTorch's.
        copies_module: as passed.
    """

    def __init__(
        self,
        sdk: Any,
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
        step = IpuStep(sdk, net, loss, spec, Form.of(example, size.padding))
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
        self.unit = Executable(sdk, step, executor, size, wide)
        self._sdk = sdk

    @property
    def executor(self) -> Any:
        """PopTorch's."""
        return self.unit.executor

    def compile(self, example: MicroBatch) -> None:
        """Compile for micro-batches like this one."""
        self.unit.compile(example)
        self.optimizer.load()

    def load(self) -> None:
        """Take over the user's tensors and the state of torch's optimizer."""
        if self.copies_module:
            _copy(self._host.tensors(), self._tensors())
        self.optimizer.load()

    def _tensors(self) -> Dict[str, Tensor]:
        step = self.unit.step
        return {**dict(step.named_parameters()), **dict(step.named_buffers())}

    def store(self, updates: int) -> None:
        """Give all back to the user's module and torch's optimizer, and the device to others."""
        with translate_errors(self._sdk, "reading weights and optimizer state"):
            OWNER.release(self.executor)
            # What has not run has nothing to give, and the user may have changed his own since.
            if updates and self.copies_module:
                _copy(self._tensors(), self._host.tensors())
            if updates:
                self.optimizer.store(updates)

    def send(self, rows: Sequence[Dict[str, Any]]) -> None:
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
        """Let the program go; safe twice."""
        with translate_errors(self._sdk, "closing the program"):
            OWNER.release(self.executor)
            self.executor.destroy()
        # PopTorch leaves them wrapped where compiling has failed.
        for tensor, kind in self._kinds:
            if type(tensor) is not kind:
                tensor.__class__ = kind


def _version(tensor: Tensor) -> int:
    # What PopTorch wraps fetches the weights from the device when an attribute is asked for.
    return int(object.__getattribute__(tensor, "_version"))


def _form(parameter: Tensor) -> Tuple[Any, ...]:
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
