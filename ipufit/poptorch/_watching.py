"""Modes that intercept torch's functions and operators while forward is recorded."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit.poptorch._logging import error
from ipufit.poptorch._operators.routing import call
from ipufit.poptorch._precision import record_half
from ipufit.poptorch._tracing import Trace, tensors_in, written_tensors
from ipufit.tracing.flat_storage import storage_id
from ipufit.utils.state import replaced


class _KeptValues:
    """Preserves what autograd saves while forward is recorded, also if it is overwritten.

    A device's program has no changes in place: each makes a new value, and what was computed from
    the old one stays differentiable. torch refuses such a backward instead.
    """

    def __init__(self) -> None:
        # Each tensor in a list of its own, so that it can be replaced.
        self._of: Dict[int, List[List[Tensor]]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the tensors that autograd saves inside the block."""
        with saved_tensors_hooks(self._pack, lambda saved: saved[0]):
            yield

    def _pack(self, tensor: Tensor) -> List[Tensor]:
        saved = [tensor]
        self._of.setdefault(storage_id(tensor), []).append(saved)
        return saved

    def before_change(self, tensor: Tensor) -> None:
        """Copy the saved tensors in this memory, which is about to be written to."""
        for saved in self._of.pop(storage_id(tensor), ()):
            saved[0] = saved[0].clone()


_HOST = torch.device("cpu")
_IPU = torch.device("ipu", 0)

# They move a tensor to where another one is.
_LIKE_ANOTHER = (Tensor.to, Tensor.type_as)


def _is_device(value: object) -> bool:
    """Return True if this names the device that the model runs on."""
    if isinstance(value, torch.device):
        return value.type == "ipu"
    return isinstance(value, str) and value.partition(":")[0] == "ipu"


def _on_device(value: object, wide: bool) -> object:
    """Convert an argument that names the IPU or float64 to what the engine computes with."""
    if _is_device(value):
        return _HOST
    return torch.float32 if value is torch.float64 and not wide else value


class _Calls(TorchFunctionMode):
    """Intercepts the calls of torch that forward makes, with their original arguments."""

    def __init__(self, trace: Trace, wide: bool) -> None:
        super().__init__()
        self._trace = trace
        self._wide = wide
        self.inside = False
        self.below = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        arguments = (*args, *kwargs.values())
        moves = any(_is_device(value) for value in arguments)
        if moves:
            self._refuse_gradients(args)
        if func in _LIKE_ANOTHER:
            others = (t for t in arguments[1:] if isinstance(t, FakeTensor))
            moves = moves or any(not self._is_host(other) for other in others)
        if not self._wide or moves:
            args = tuple(_on_device(value, self._wide) for value in args)
            kwargs = {name: _on_device(value, self._wide) for name, value in kwargs.items()}
        self.inside = True
        try:
            result = call(func, args, kwargs)
            if moves and isinstance(result, Tensor) and self._is_host(result):
                # A copy of the recording's own, as of the numbers that torch.tensor is given; of
                # what is in the recording already, torch 2.0 can't make one in this way.
                fake = isinstance(result, FakeTensor)
                lift = torch.ops.aten.lift_fresh_copy.default
                result = result.clone() if fake else lift(result)
        finally:
            self.inside = False
        if isinstance(result, FakeTensor) and not result.numel():
            raise error(
                f"Zero-sized tensors are unsupported (Got shape {list(result.shape)}). Leave out "
                "what is computed from it, or pad it."
            )
        if isinstance(result, FakeTensor) and result.dtype == torch.float64 and not self._wide:
            return result.to(torch.float32)
        return result

    def _refuse_gradients(self, args: Tuple[object, ...]) -> None:
        """Refuse to move a tensor of the host that requires a gradient."""
        for value in args[:1]:
            if isinstance(value, Tensor) and value.requires_grad and self._is_host(value):
                raise error(
                    "An input tensor to an IPU model can not have requires_grad set to True. Move "
                    "tensor.detach(), or make it a parameter of the module."
                )

    def _is_host(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) or self._trace.is_on_host(tensor)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operator."""

    def __init__(
        self, trace: Trace, calls: _Calls, constants: Sequence[Tensor], values: _KeptValues
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._calls = calls
        self._values = values
        self._constants = {id(tensor) for tensor in constants}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Tuple[object, ...] = (),
        kwargs: Optional[Dict[str, object]] = None,
    ) -> Any:
        before, self._calls.below = self._calls.below, True
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            self._calls.below = before

    def _dispatch(
        self, func: OpOverload, args: Tuple[object, ...], kwargs: Dict[str, object]
    ) -> Any:
        inputs = list(tensors_in((args, kwargs)))
        fake = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        mixes = len(inputs) > 1 and not all(self._is_host(tensor) for tensor in inputs)
        for tensor in inputs:
            # Those of the module have copies in the recording: it was reached past the module.
            is_parameter = isinstance(tensor, nn.Parameter) and not isinstance(tensor, FakeTensor)
            if is_parameter or (mixes and self._is_host(tensor)):
                self._refuse_host(tensor)
        for tensor in written_tensors(func, args, kwargs):
            self._values.before_change(tensor)
        result = record_half(func, args, kwargs)
        results = list(tensors_in(result))
        # torch.tensor is a call of torch's, torch.LongTensor is not.
        if func._schema.name.startswith("aten::lift_fresh") and not self._calls.inside:
            self._trace.made_on_host(results[0])
        if fake or any(isinstance(tensor, FakeTensor) for tensor in results):
            self._trace.blocks.on_operator()
            self._trace.activations.record(func, results)
            changed = [] if not func._schema.is_mutable else inputs[:1]
            self._trace.computed(inputs, [*results, *changed])
        return result

    def _is_host(self, tensor: Tensor) -> bool:
        if tensor.dim() == 0 or id(tensor) in self._constants:
            return False
        return not isinstance(tensor, FakeTensor) or self._trace.is_on_host(tensor)

    def _refuse_host(self, tensor: Tensor) -> None:
        """Refuse to combine a tensor of the host that is no constant with one of the device."""
        dtype = {torch.int64: "Long", torch.float32: "Float", torch.float64: "Double"}.get(
            tensor.dtype, str(tensor.dtype).replace("torch.", "").title()
        )
        raise error(
            f"Expected an IPU tensor but got tensor(device=cpu, shape={list(tensor.shape)}, "
            f'dtype={dtype}). Move a constant explicitly, with tensor.to("ipu"), make it a buffer '
            "of the module, or pass it as an input; reach a parameter through the module."
        )


def _seen_on_device(trace: Trace, calls: _Calls) -> contextlib.AbstractContextManager[None]:
    """Let tensors of the recording report the IPU as their device to forward, but not to torch.

    A tensor of the recording answers for itself: no mode is asked for its device.
    """
    original: Any = FakeTensor.device

    def device(tensor: FakeTensor) -> torch.device:
        actual: torch.device = original.fget(tensor)
        if calls.inside or calls.below or trace.is_on_host(tensor):
            return actual
        return _IPU

    return replaced((FakeTensor, "device", property(device, original.fset)))


@contextlib.contextmanager
def watched(trace: Trace, constants: Sequence[Tensor], wide: bool = False) -> Iterator[None]:
    """Intercept torch's functions and operators inside the block.

    Args:
        trace: where what is seen is noted.
        constants: tensors of the host's that the model may use as they are.
        wide: let float64 be, for comparisons; a device has none.
    """
    calls, values = _Calls(trace, wide), _KeptValues()
    saving = values.recording() if trace.training else contextlib.nullcontext()
    with _Operators(trace, calls, constants, values), calls, _seen_on_device(trace, calls), saving:
        yield
