"""One micro-batch through module and loss, recorded at the level at which PopTorch takes operators.

PopTorch takes what torch dispatches below autograd. Operators that torch writes with others have
been taken apart by then, but for those that PopTorch registers itself. It differentiates itself, so
the backward pass is not looked at.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit.core.batch import MicroBatch
from ipufit.core.precision import with_inputs_in
from ipufit.core.train_config import Precision
from ipufit.engines.ipu.preflight.facts import WHOLE, DispatchedCall
from ipufit.errors import CaptureError
from ipufit.losses import Loss
from ipufit.losses.rules import Doubt
from ipufit.tracing.grad_step import ModuleWithLoss, capture_step
from ipufit.tracing.source_map import Origin, SourceTracker, user_name
from ipufit.utils import tree
from ipufit.utils.state import call_with, watch_modules

# What has no form but the one that changes its argument.
_ONLY_IN_PLACE = frozenset({"copy_", "normal_", "uniform_", "random_", "exponential_"})
_OTHER_NAMES = {"zero_": "zeros_like", "fill_": "full_like"}
# What newer torch, and torch on a GPU, writes where torch 2.0.1, PopTorch's own, has the second.
_OLDER_NAMES = {
    "_safe_softmax": "_softmax",
    "native_dropout": "dropout",
    "cudnn_batch_norm": "native_batch_norm",
}


def _outplace(name: str) -> str:
    """Return the name by which handlers know an operator, such as "aten::add" for "aten::add_"."""
    space, _, operator = name.partition("::")
    if operator in _OTHER_NAMES:
        operator = _OTHER_NAMES[operator]
    elif operator.endswith("_") and not operator.endswith("__") and operator not in _ONLY_IN_PLACE:
        operator = operator[:-1]
    return f"{space}::{_OLDER_NAMES.get(operator, operator)}"


def _shaped_by_poptorch(name: str, arguments: Dict[str, Any]) -> Optional[Tensor]:
    """Make the empty result of an operator whose shape torch takes from values.

    PopTorch takes it from the arguments: poptorch/source/dispatch_tracer/RegisterMetaOps.cpp.inc,
    lines 30 to 180. None for an operator that torch can run without values.
    """
    if name == "aten::ctc_loss":
        log_probs = arguments["log_probs"]
        # Without reduction, one number for each sample.
        shape = log_probs.shape[1:2] if arguments["reduction"] == 0 else ()
        return _empty(log_probs, shape, log_probs.dtype)
    if name == "aten::one_hot" and arguments["num_classes"] > 0:
        classes = arguments["self"]
        return _empty(classes, (*classes.shape, arguments["num_classes"]), classes.dtype)
    if name == "aten::bincount" and arguments["minlength"] > 0:
        weights = arguments["weights"]
        dtype = torch.int64 if weights is None else weights.dtype
        return _empty(arguments["self"], (arguments["minlength"],), dtype)
    return None


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


_IMPLICIT, _EXPLICIT = "CompositeImplicitAutograd", "CompositeExplicitAutograd"


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode below autograd that takes operators apart as far as PopTorch has them."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Optional[Dict[str, object]] = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            # What torch.tensor makes of Python numbers: its parts would leave it a real tensor.
            return func(*args, **kwargs)
        if func.namespace == "prim" or not _makes_tensors(func):
            self._recorder.looked()
            parts = _parts(func, _IMPLICIT)
            if parts is None:
                return func(*args, **kwargs)
            with self:
                return parts(*args, **kwargs)
        parts = self._parts(func)
        arguments = _bound(func, args, kwargs)
        call = self._recorder.note(func, arguments, parts is None)
        result: object = _shaped_by_poptorch(call.name, arguments)
        if result is None and parts is None:
            result = func(*args, **kwargs)
        elif result is None and parts is not None:
            with self:
                result = parts(*args, **kwargs)
        self._recorder.ran(call, result)
        return result

    def _parts(self, func: OpOverload) -> Optional[Callable[..., object]]:
        """Return the decomposition of an operator; None for one that PopTorch takes whole."""
        if func.name() in WHOLE:  # type: ignore[no-untyped-call]
            return None
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            # PopTorch's device is none of those for which torch has a kernel.
            return _attention
        implicit = _parts(func, _IMPLICIT)
        if implicit is not None:
            return implicit
        if self._recorder.knows(_outplace(func._schema.name)):
            return None
        return _parts(func, _EXPLICIT)


def _parts(func: OpOverload, kind: str) -> Optional[Callable[..., object]]:
    if func.namespace == "prim":
        return None
    name = func.name()  # type: ignore[no-untyped-call]
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, kind):
        return None
    key = getattr(torch._C.DispatchKey, kind)
    return lambda *args, **kwargs: func._op_dk(key, *args, **kwargs)


def _attention(*args: object, **kwargs: object) -> object:
    return torch.ops.aten._scaled_dot_product_attention_math.default(*args, **kwargs)[0]


def _makes_tensors(func: OpOverload) -> bool:
    return any("Tensor" in str(result.type) for result in func._schema.returns)


def _bound(
    func: OpOverload, args: Sequence[object], kwargs: Dict[str, object]
) -> Dict[str, object]:
    """Bind arguments by name, with the defaults of missing ones."""
    bound = {}
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif place < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[place]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


_CONTROL = os.path.join("poptorch", "_operators", "control.py")


class Recording:
    """Operators, modules and changes that a micro-batch went through.

    Attributes:
        calls: operators, in order.
        modules: modules that ran, with where they were called first.
        bodies: "for_loop" and "cond", of PopTorch's operators, with where they were entered.
        changed: buffers that forward changes, by name, with their type and where it does so first;
            counters of batches that nobody reads are left out.
        failure: why it ended early; None if it did not.
        failed_in: the module in which it did.
        is_loss_left_out: whether the batch had no target for a loss that needs one.
        doubts: why little can be learned of the loss, and what to do, as ``fit`` warns of it.
    """

    def __init__(self) -> None:
        self.calls: List[DispatchedCall] = []
        self.modules: Dict[nn.Module, Origin] = {}
        self.bodies: Dict[str, Origin] = {}
        self.changed: Dict[str, Tuple[torch.dtype, Origin]] = {}
        self.failure: Optional[CaptureError] = None
        self.failed_in: Optional[str] = None
        self.is_loss_left_out = False
        self.doubts: Tuple[Doubt, ...] = ()


def record(
    module: nn.Module,
    loss: Loss,
    batch: MicroBatch,
    is_training: bool,
    precision: Precision,
    knows: Callable[[str], bool],
) -> Recording:
    """Follow a micro-batch through the module and the loss, without values.

    No value is computed, no buffer changes and no random number is drawn.

    Args:
        module: the user's module.
        loss: its normal form; it is left out without a target.
        batch: of its tensors only shape and dtype matter.
        is_training: the mode of the pass.
        precision: of the inputs.
        knows: whether there are facts about an operator; of others that torch writes with more
            than one, their parts are recorded.
    """
    step = ModuleWithLoss(module, loss)
    tensors = (*step.named_parameters(), *step.named_buffers())
    wanted = {name for name, tensor in tensors if tensor.requires_grad}
    with_loss = is_training and (loss.in_module or batch.unpack()[2] is not None)
    recorder = _Recorder(step, knows)
    recorder.recording.is_loss_left_out = is_training and not with_loss

    def run(state: Dict[str, Tensor], leaves: Sequence[Tensor]) -> None:
        # Some layers of torch's take a short cut where no weight learns.
        for name, tensor in state.items():
            state[name] = tensor.detach().requires_grad_(name in wanted)
        inputs = tree.unflatten(leaves, batch.structure)
        # A weight or a buffer of integers is a constant of PopTorch's.
        moving = [t for t in state.values() if t.is_floating_point()]
        recorder.register_buffers(state)
        with recorder.watching([*moving, *leaves]), _telling_gradients(loss):
            inputs = with_inputs_in(precision, inputs)
            call_with(step, state, (inputs, state, with_loss))
        if with_loss:
            # Once more with autograd, by which the loss tells what made the prediction.
            with torch.enable_grad():
                outputs, term = call_with(step, state, (inputs, state, with_loss))
            recorder.recording.doubts = loss.facts(outputs, inputs[2], term.value).doubts

    try:
        capture_step(step, batch, run, is_training, whole_layers=False, rewrites=False)
    except CaptureError as error:
        recorder.recording.failure = error
    return recorder.recording


@contextlib.contextmanager
def _telling_gradients(loss: Loss) -> Iterator[None]:
    """Tell what a step of the user's own can't do for PopTorch, which records below autograd.

    Raises:
        CaptureError: it computes a gradient.
    """
    try:
        yield
    except RuntimeError as error:
        if not loss.differentiates or "does not require grad" not in str(error):
            raise
        raise CaptureError(
            "a gradient is computed inside the step, and PopTorch records forward and loss alone. "
            "Use engine='embedded'."
        ) from error


class _Recorder:
    """Records operators and modules.

    Attributes:
        recording: what was recorded.
    """

    def __init__(self, step: ModuleWithLoss, knows: Callable[[str], bool]) -> None:
        self.recording = Recording()
        self.knows = knows
        self._step = step
        self._buffers: Dict[int, str] = {}
        self._where = SourceTracker(step)
        self._moving: Set[int] = set()
        self._alive: List[Tensor] = []

    def register_buffers(self, state: Dict[str, Tensor]) -> None:
        """Register the buffers whose changes are recorded.

        Args:
            state: weights and buffers, by their names in the step.
        """
        from ipufit.engines.ipu.step import counts_batches

        for name, _ in self._step.named_buffers():
            if not counts_batches(self._step, name):
                self._buffers[_storage(state[name])] = name

    @contextlib.contextmanager
    def watching(self, moving: Sequence[Tensor]) -> Iterator[None]:
        """Record what runs in the block, at PopTorch's level.

        Args:
            moving: tensors whose values are not known when a model is compiled.
        """
        self._note_moving(moving)
        try:
            where, calls = self._where.followed(), watch_modules(self._on_call)
            with where, calls, _Operators(self), torch.enable_grad():
                below = torch._C._AutoDispatchBelowAutograd()
                try:
                    yield
                except CaptureError:
                    self.recording.failed_in = self._where.now().module
                    raise
                finally:
                    del below
        finally:
            self._alive.clear()

    def looked(self) -> Origin:
        """Return where an operator is about to run, and record a body of control flow.

        Also called before an operator that makes no tensor.
        """
        origin = self._where.now()
        self._note_body(sys._getframe(1), origin)
        return origin

    def note(
        self, operator: OpOverload, arguments: Dict[str, object], is_whole: bool
    ) -> DispatchedCall:
        """Record an operator that is about to run."""
        tensors = {n: set(map(_storage, tree.tensors(value))) for n, value in arguments.items()}
        constants = frozenset(n for n, each in tensors.items() if each and not each & self._moving)
        is_constant = all(name in constants for name, each in tensors.items() if each)
        is_random = torch.Tag.nondeterministic_seeded in operator.tags
        name = _outplace(operator._schema.name)
        here = self.looked()
        call = DispatchedCall(
            name,
            arguments,
            constants,
            is_constant and not is_random,
            is_whole,
            here,
        )
        self.recording.calls.append(call)
        for argument in operator._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._note_change(arguments.get(argument.name), here)
        return call

    def _note_change(self, changed: object, here: Origin) -> None:
        for tensor in tree.tensors(changed):
            name = self._buffers.get(_storage(tensor))
            if name is not None:
                self.recording.changed.setdefault(user_name(name), (tensor.dtype, here))

    def ran(self, call: DispatchedCall, result: object) -> None:
        """Follow values that are unknown at compile time into the result."""
        if not call.is_constant_result:
            self._note_moving(tree.tensors(result))

    def _note_moving(self, tensors: Sequence[Tensor]) -> None:
        # By storage: what is written into a view is in all of it. As long as a tensor lives, no
        # other has its storage.
        self._alive += tensors
        self._moving.update(_storage(tensor) for tensor in tensors)

    def _note_body(self, frame: Optional[types.FrameType], origin: Origin) -> None:
        while frame is not None:
            code = frame.f_code
            if code.co_name in ("for_loop", "cond") and code.co_filename.endswith(_CONTROL):
                self.recording.bodies.setdefault(code.co_name, origin)
            frame = frame.f_back

    def _on_call(self, part: nn.Module, args: object) -> None:
        if part not in self.recording.modules:
            self.recording.modules[part] = self._where.now()


def _storage(tensor: Tensor) -> int:
    dense = tensor.layout is torch.strided
    return int(tensor.untyped_storage()._cdata) if dense else id(tensor)
