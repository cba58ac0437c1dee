"""Record a Python function once as a graph of ATen operators, or say where and why that fails.

The function runs on fake tensors: no value is computed, no buffer changes, no random number is
drawn.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
import types
from typing import Any, Callable, Dict, Iterator, NoReturn, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

from ipufit.errors import CaptureError
from ipufit.tracing.recording import NEEDS_VALUES, LeftBehindError, OpRecorder, make_graph
from ipufit.tracing.recurrent import SecondGradientError, time_steps, whole_recurrent_layers
from ipufit.tracing.unread_values import reads_classes, without_values
from ipufit.tracing.user_lines import TORCH_PATH, Frame, frame_of, source_line, user_frame
from ipufit.utils.console import PACKAGE, is_fault_of_ours
from ipufit.utils.random_operators import draw_on_host, draws
from ipufit.utils.random_streams import LOCK
from ipufit.utils.state import replaced

_TORCH_MODULES = os.path.join(TORCH_PATH, "nn") + os.sep
_TORCH_AUTOGRAD = os.path.join(TORCH_PATH, "autograd") + os.sep
_TORCH_PACKING = os.path.join(_TORCH_MODULES, "utils", "rnn.py")
_TORCH_RECURRENT = os.path.join(_TORCH_MODULES, "modules", "rnn.py")

# Kind of the error about layers that torch overlooks, which nothing trains.
UNREGISTERED = "unregistered"

_EAGERLY = "To run this module as it is, without capture, use compile(..., run_eagerly=True)."


def describe_frame(frame: Optional[Frame]) -> str:
    """A line of the user's with its text, as the end of a sentence; empty where there is none."""
    if frame is None:
        return ""
    file, line, function = frame
    source = source_line(file, line)
    return f", at {file}:{line} in {function}{f': `{source}`' if source else ''}"


def capture_error(
    what: str,
    instead: str,
    frame: Optional[Frame],
    cause: Optional[str] = None,
    kind: str = "capture",
    runs_eagerly: bool = True,
) -> CaptureError:
    """The error about something that can't be recorded.

    Args:
        what: is wrong, without a full stop.
        instead: sentences that say what to write.
        frame: the user's line; None where nobody knows it.
        cause: "value" or "shape" where the program would have to know a tensor's values.
        kind: as :class:`ipufit.analysis.check.Finding` has it.
        runs_eagerly: whether the module could run without a recording, as it is.
    """
    advice = _EAGERLY if runs_eagerly else ""
    file, line, function = frame or (None, None, None)
    return CaptureError(
        f"{what}{describe_frame(frame)}. {instead}",
        file,
        line,
        cause,
        advice,
        function=function,
        kind=kind,
        what=what,
        cure=instead,
    )


def may_run_eagerly(error: BaseException) -> bool:
    """Tell whether a module may still run itself where its recording ended with this error."""
    if isinstance(error, CaptureError):
        # Random numbers of which the error does not advise it are no better when not recorded.
        is_advised = error.kind != "random" or str(error) != error.brief
        return error.kind != UNREGISTERED and is_advised
    # It came from torch or from the user's code: from no check, and by no fault of ours.
    return not is_fault_of_ours(error)


# What the user's line looks like tells which of several causes it was; torch's error is the same.
_NUMBER = re.compile(r"\.item\(|\.tolist\(|(?<!\.)\b(int|float|complex|range|round)\(")
_BRANCH = re.compile(
    r"\b(if|elif|while|assert|and|or|not|in)\b|(?<!\.)\b(bool|any|all|min|max|sorted)\("
)
_ONE_HOT = re.compile(r"\bone_hot\(")


_BEFORE_VALUES = "but the program is recorded once, before there are values"

# What is wrong, what to write, and whether the program would have to know a value or a shape; by
# the kind of finding.
_FAULTS = {
    "number": (
        f"a tensor's value was turned into a Python number, {_BEFORE_VALUES}",
        "Keep it a tensor (0-dim tensors work in arithmetic and torch.where), or compute the "
        "number before training and store it as an attribute.",
        "value",
    ),
    "branch": (
        f"Python branched on a tensor's value, {_BEFORE_VALUES}",
        "Write torch.where(condition, a, b), or multiply by a mask, so that both branches are in "
        "the program.",
        "value",
    ),
    "value": (
        f"Python needed a tensor's value, {_BEFORE_VALUES}",
        "Keep it in tensors: torch.where(condition, a, b) instead of a branch, gather or a mask "
        "instead of a slice that ends at a value.",
        "value",
    ),
    "text": (
        f"a tensor's value was formatted as a string, {_BEFORE_VALUES}",
        "Return the tensor as an output, and format it outside the module.",
        "value",
    ),
    "numpy": (
        f"a tensor was converted to NumPy, {_BEFORE_VALUES}",
        "Use the corresponding torch operator.",
        "value",
    ),
    # torch's anomaly detection reads every gradient as soon as there is one.
    "anomaly": (
        "torch.autograd.set_detect_anomaly(True) looks for NaN in the values of gradients, "
        f"{_BEFORE_VALUES}",
        "Switch it off, torch.autograd.set_detect_anomaly(False), and use compile(..., "
        "detect_nan=True), which names operator, line and samples.",
        "value",
    ),
    "shape": (
        "a shape depends on a tensor's values, but the shapes of the program are fixed when it is "
        "recorded",
        "Keep the full shape: write torch.where(mask, x, 0) instead of x[mask], topk with a fixed "
        "k instead of nonzero or unique.",
        "shape",
    ),
    "packed": (
        "a packed sequence has a shape that depends on the values of its lengths, "
        f"{_BEFORE_VALUES}",
        "Run the layer on the padded batch, and select by length from its output: "
        "output[torch.arange(len(lengths)), lengths - 1] is the last step of each sequence.",
        "shape",
    ),
    "left": (
        "a tensor was used that was stored during an earlier recording and has no values",
        "Do not store results of forward outside the module, or clear them after fit; register "
        "constants in __init__: self.register_buffer(name, value).",
        None,
    ),
    "generator": (
        "a torch.Generator was passed to an operator, which this version of torch can't record",
        "Update torch, or draw from its default generator, which fit seeds.",
        None,
    ),
    "compiled": (
        "a function or module that went through torch.compile was called, but only plain Python "
        "can be recorded",
        "Call what was passed to torch.compile: the whole training step is one program anyway, "
        "and compile(..., jit='inductor') makes torch.compile's kernels of it.",
        None,
    ),
}


def fault_error(kind: str, frame: Optional[Frame]) -> CaptureError:
    """The error about something that can't be recorded, whatever the line looks like.

    Args:
        kind: "number", "branch", "value", "text", "numpy", "shape", ...; as
            :class:`ipufit.analysis.check.Finding` has it.
        frame: the user's line; None where nobody knows it.
    """
    what, instead, cause = _FAULTS[kind]
    return capture_error(what, instead, frame, cause, kind)


def carried_error(titles: Sequence[str]) -> CaptureError:
    """The error about values that forward changes, and computes with in the next micro-batch."""
    what = ", ".join(titles) or "a tensor that is neither a parameter nor a buffer"
    return capture_error(
        f"forward changes {what}, and computes with it in the next micro-batch, but it runs only "
        "once, to be recorded",
        "To carry a value from one micro-batch to the next, register a buffer and change it in "
        "place; checkpoints have no other values.",
        None,
        kind="attribute",
    )


def value_error(frame: Optional[Frame]) -> CaptureError:
    """Python needs a tensor's value there."""
    source = source_line(frame[0], frame[1]) if frame else ""
    if _NUMBER.search(source):
        return fault_error("number", frame)
    if _BRANCH.search(source):
        return fault_error("branch", frame)
    return _one_hot_error(frame) if _ONE_HOT.search(source) else fault_error("value", frame)


def _one_hot_error(frame: Optional[Frame]) -> CaptureError:
    """Error for a one_hot that reads the classes, to count or to compare them."""
    return capture_error(
        f"one_hot read the values of its classes, {_BEFORE_VALUES}",
        "Call it as torch.nn.functional.one_hot(x, num_classes), with the number of classes.",
        frame,
        "value",
        "value",
    )


def _is_anomaly_check(frame: Optional[types.FrameType]) -> bool:
    """Tell whether an operator is the one with which torch's anomaly detection reads a gradient.

    Args:
        frame: innermost frame below the operator.
    """
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return False
    dispatching = (
        *(os.path.join(TORCH_PATH, name) for name in ("utils", "_")),
        *(os.path.join(PACKAGE, room) for room in ("tracing", "engines")),
    )
    while frame is not None and frame.f_code.co_filename.startswith(dispatching):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH_AUTOGRAD)


def _is_packing(error: BaseException) -> bool:
    """Tell whether an error came out of packing a sequence, or of a layer that got a packed one."""
    return any(
        frame.f_code.co_filename == _TORCH_PACKING
        or (
            frame.f_code.co_filename == _TORCH_RECURRENT
            and frame.f_locals.get("batch_sizes") is not None
        )
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def makes_shape(func: torch._ops.OpOverload, args: Sequence[object]) -> bool:
    """Tell whether an operator makes a shape of values: aten::index does of those of a mask."""
    if func is not torch.ops.aten.index.Tensor:
        return torch.Tag.dynamic_output_shape in func.tags
    indices = args[1] if len(args) > 1 else ()
    return isinstance(indices, (list, tuple)) and any(
        isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices
    )


# Operators of weights, whose tensors must agree on what they hold. On fake tensors torch does not
# look at that, so that only the first update would fail.
_OF_WEIGHTS = {
    getattr(torch.ops.aten, name)
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution"),
        *("native_batch_norm", "native_layer_norm", "native_group_norm"),
    )
}


_OF_CLASSES = {torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward}


def _refuse_dtypes(func: torch._ops.OpOverload, args: Sequence[object]) -> None:
    """Raise what torch's kernels raise for integers beside weights, and for short class indices.

    Raises:
        RuntimeError: the operator can't take its tensors.
    """
    if func.overloadpacket in _OF_CLASSES:
        classes = args[1]
        if isinstance(classes, Tensor) and classes.dtype not in (torch.int64, torch.uint8):
            raise RuntimeError(
                f"{func} needs class indices of dtype int64, but got {classes.dtype}"
            )
        return
    if func.overloadpacket not in _OF_WEIGHTS:
        return
    dtypes = dict.fromkeys(a.dtype for a in args if isinstance(a, Tensor))
    if len({dtype.is_floating_point or dtype.is_complex for dtype in dtypes}) > 1:
        names = " and ".join(str(dtype).replace("torch.", "") for dtype in dtypes)
        raise RuntimeError(f"{func} needs tensors of the same dtype, but got {names}")


_DEVICE = torch.ops.prim.device.default
_RANDOM_BETWEEN = getattr(torch.ops.aten.random_, "from")


# Generators of the user's that the last recording draws from, by id, each with the user's line.
OWN_DRAWS: Dict[int, Tuple[torch.Generator, Optional[Frame]]] = {}


class _ValueGuard(OpRecorder):  # type: ignore[no-untyped-call]
    """Stops at an operator that needs a tensor's value, while the user's stack still stands."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, object]] = None,
    ) -> object:
        tensor = args[0] if func is _DEVICE else None
        if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
            return tensor.fake_device
        if _Reset.generator and draws(func, args, kwargs or {}):
            raise capture_error(
                "random numbers were drawn after the generator was reset, as torch.manual_seed "
                "does, and torch.utils.checkpoint for dropout, but a recording would draw new ones",
                "Leave out the seed, or move the dropout out of the checkpointed function.",
                user_frame(sys._getframe()),
            )
        if func is _RANDOM_BETWEEN and args[2] is not None:
            # The name of this operator is a keyword, which the text of a graph can't hold.
            low, high = args[1:3]
            return torch.ops.aten.random_.to(args[0], high - low, **(kwargs or {})).add_(low)
        generator = (kwargs or {}).get("generator")
        if isinstance(generator, torch.Generator):
            OWN_DRAWS.setdefault(id(generator), (generator, user_frame(sys._getframe())))
        drawn = draw_on_host(func, args, kwargs or {}, _refuse_draw)
        if drawn is not NotImplemented:
            return drawn
        _refuse_dtypes(func, args)
        needs_values = not NEEDS_VALUES.isdisjoint(func.tags)
        if needs_values and any(isinstance(a, FakeTensor) and a.constant is None for a in args):
            if torch.Tag.data_dependent_output in func.tags:
                if _is_anomaly_check(sys._getframe()):
                    raise fault_error("anomaly", None)
                read_by = _one_hot_error if reads_classes(sys._getframe()) else value_error
                raise read_by(user_frame(sys._getframe()))
            if makes_shape(func, args):
                raise fault_error("shape", user_frame(sys._getframe()))
        if not (func._schema.is_mutable and args and type(args[0]) in (Tensor, nn.Parameter)):
            return self.run(func, args, kwargs or {})
        # It has values, and is changed by updates, not by their recording.
        with torch.utils._mode_utils.no_dispatch():
            value = args[0].detach().clone()
        result = self.run(func, args, kwargs or {})
        with torch.utils._mode_utils.no_dispatch():
            args[0].data.copy_(value)
        return result


def _refuse_draw(what: str, instead: str) -> NoReturn:
    raise capture_error(
        what, instead, user_frame(sys._getframe()), kind="random", runs_eagerly=False
    )


@contextlib.contextmanager
def recordable(rewrites: bool = True) -> Iterator[None]:
    """Torch's own layers go the ways that a recording of them goes.

    Args:
        rewrites: as for :func:`capture`.
    """
    # Distributions look at the values of their arguments.
    unchecked = (torch.distributions.Distribution, "_validate_args", False)
    # Torch 2.13 can't record oneDNN's kernel for whole recurrent layers. Only what the graph holds
    # changes: a convolution in it still runs on oneDNN.
    slow = (torch.backends.mkldnn, "enabled", False)
    with replaced(unchecked, slow, *without_values(rewrites)):
        yield


class _Reset:
    """Watches for a generator that is set back, or seeded, after the recording has begun.

    torch.utils.checkpoint and reversible layers repeat random numbers in this way. A recording
    would draw new ones instead: another mask in the backward pass.
    """

    generator = False

    @classmethod
    def noticed(cls, function: Callable[..., object]) -> Callable[..., object]:
        """Wrap a function of torch's that sets the generator, so that it is noted."""

        def call(*args: object, **kwargs: object) -> object:
            cls.generator = True
            return function(*args, **kwargs)

        return call


def capture(
    function: Callable[..., Sequence[Optional[Tensor]]],
    args: Sequence[Tensor],
    guard: bool = True,
    whole_layers: bool = True,
    rewrites: bool = True,
) -> fx.GraphModule:
    """Record ``function`` of tensors, returning tensors, as a graph.

    Args:
        function: called once, on fake tensors with the shapes and dtypes of ``args``. It may change
            its arguments in place; the graph then does so too.
        args: the tensors; their values are not looked at.
        guard: refuse operators that need a value. Off only where reading one is known to cost no
            synchronisation.
        whole_layers: record a recurrent layer as one operator; else as those of its time steps.
        rewrites: where torch can't record one_hot or ctc_loss, record what it comes to instead.

    Raises:
        CaptureError: the function needs a value or makes a shape of one; with the user's file and
            line.
    """

    def guarded(*tensors: Tensor) -> Sequence[Optional[Tensor]]:
        with _ValueGuard() if guard else contextlib.nullcontext():
            return function(*tensors)

    # A user's exception inside forward is theirs: it leaves as it is.
    try:
        # Of oneDNN, whether it is on is noted before it is off for the recording.
        layers = whole_recurrent_layers() if whole_layers else contextlib.nullcontext()
        ways = recordable(rewrites)
        watched = replaced(
            (_Reset, "generator", False),
            (torch, "set_rng_state", _Reset.noticed(torch.set_rng_state)),
            (torch, "manual_seed", _Reset.noticed(torch.manual_seed)),
            # New versions of torch log a line for every error on a fake tensor.
            (logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
        )
        OWN_DRAWS.clear()
        with LOCK, layers, ways, watched:
            # Detached, so that one tensor in two places is two inputs: the next batch may differ.
            inputs = list(map(Tensor.detach, args))
            graph = make_graph(guarded, inputs)
    except SecondGradientError:
        with time_steps():
            return capture(function, args, guard, whole_layers, rewrites)
    except CaptureError:
        raise
    except Exception as error:
        translated = _translate(error)
        if translated is None:
            raise
        raise translated from error
    _simplify(graph)
    return graph


def _translate(error: Exception) -> Optional[CaptureError]:
    """Say what torch means with an exception in a recording; None of one that is the user's own."""
    text, frame = str(error), frame_of(error)
    if isinstance(error, DataDependentOutputException):
        return value_error(frame)
    if isinstance(error, DynamicOutputShapeException):
        return fault_error("shape", frame)
    if isinstance(error, LeftBehindError):
        return fault_error("left", frame)
    if _is_packing(error):
        return fault_error("packed", frame)
    if text == "argument of type: <class 'torch._C.Generator'>":
        return fault_error("generator", frame)
    if text.startswith("Detected that you are using FX to symbolically trace a dynamo"):
        return fault_error("compiled", frame)
    if text.startswith(".numpy() is not supported for tensor subclasses"):
        return fault_error("numpy", frame)
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return value_error(frame)
    if "incompatible with .grad()" in text or "not compatible with .grad()" in text:
        return capture_error(
            "torch.utils.checkpoint with use_reentrant=True can't be recorded",
            "Pass use_reentrant=False.",
            frame,
        )
    if text.startswith(".tolist() is not supported") or "value out of a tracing tensor" in text:
        return value_error(frame)
    return fault_error("text", frame) if text.endswith("FakeTensor.__format__") else None


# Operators that only make a tensor: without a reader they can go. In-place operators, and batch
# normalisation, which changes its running statistics without saying so in its schema, must stay.
_REMOVABLE = {"aten::detach", "aten::empty", "aten::ones_like", "aten::t", "aten::view"}


def _simplify(graph: fx.GraphModule) -> None:
    """Drop what autograd left behind: detach means nothing where no gradient is recorded."""
    nodes = graph.graph.nodes
    for node in list(nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    for node in reversed(list(nodes)):
        if node.op != "call_function" or node.users:
            continue
        schema = getattr(node.target, "_schema", None)
        if node.target.__name__ == "getitem" or (schema and schema.name in _REMOVABLE):
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
