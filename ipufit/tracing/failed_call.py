"""Why a module or a loss can't take a micro-batch: which layer or line, what it needs, what came.

It also finds why the loss of an evaluation is not finite. Nothing here runs before that, or before
a call has failed. The traceback has the layers that were called, with their arguments; where it has
none, or values matter, the micro-batch runs once more, eagerly and on copies, and nothing of that
is left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import inspect
import math
import os
import re
import traceback
import warnings
from typing import Any, Callable, Dict, NamedTuple, Optional, Pattern, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ipufit.core.batch import MicroBatch
from ipufit.core.objective_arguments import describe, describe_tensor, dtype_name
from ipufit.core.train_config import Precision
from ipufit.errors import CaptureError, DataError, DeviceError, IpufitError, NonFiniteValue
from ipufit.losses import Loss, check_labels
from ipufit.losses.named import check_torch_loss
from ipufit.tracing.capture import describe_frame
from ipufit.tracing.find_nonfinite import NonFiniteSearch
from ipufit.tracing.grad_step import GradStep, ModuleWithLoss
from ipufit.tracing.interpreter import Listener, OperatorCall, watch_functions, watch_operators
from ipufit.tracing.ipu_only import for_this_engine
from ipufit.tracing.source_map import SourceTracker
from ipufit.tracing.user_lines import TORCH_PATH, Frame, frame_of
from ipufit.tracing.validate import find_unregistered
from ipufit.utils.console import PACKAGE
from ipufit.utils.state import fork_rng

_FUNCTIONAL = os.path.join(TORCH_PATH, "nn", "functional.py")
_RAISES = {dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in dis.opmap}


class _Mismatch(NamedTuple):
    """A layer's need, its cure, and what came where that is not the whole input."""

    needs: str
    cure: str
    got: str = ""


@dataclasses.dataclass(frozen=True)
class _Failure:
    """The innermost call of a module that an exception came out of.

    Attributes:
        error: the exception.
        module: that was called; None outside of any.
        name: its name in the user's module, "" of that itself; None where it is no part of it.
        args, kwargs: of the call.
        functional: function of ``torch.nn.functional`` with its local variables, if one failed.
        frame: the user's line.
        operator: the call of a function of torch's that failed, where it was watched.
    """

    error: Exception
    module: Optional[nn.Module]
    name: Optional[str]
    args: Tuple[object, ...]
    kwargs: Dict[str, object]
    functional: Optional[Tuple[str, Dict[str, Any]]]
    frame: Optional[Frame]
    operator: Optional[OperatorCall] = None

    @property
    def text(self) -> str:
        """First line of torch's message."""
        return str(self.error).partition("\n")[0]

    @property
    def where(self) -> str:
        """The user's line, as part of a sentence; empty where there is none."""
        is_torchs = self.frame is not None and self.frame[0].startswith(TORCH_PATH)
        return "" if is_torchs else describe_frame(self.frame)

    @property
    def layer(self) -> str:
        """Name of the module that failed, and its class."""
        shown = repr(self.module)
        if "\n" in shown or len(shown) > 100:
            shown = type(self.module).__name__
        if self.name is None:
            return f"{shown}, which is not a registered submodule,"
        return f"layer {self.name!r}, {shown}," if self.name else f"the module, {shown},"


def explain(
    error: Exception,
    module: nn.Module,
    loss: Optional[Loss],
    precision: Precision,
    batches: Sequence[MicroBatch],
    where: Callable[[int], str],
) -> Optional[IpufitError]:
    """Find out which layer or line can't take which micro-batch.

    Args:
        error: raised while a program was recorded for the micro-batches, or computed them.
        module: the user's.
        loss: that was computed; None where there was none.
        precision: in which the module computes.
        batches: the micro-batches.
        where: begin of the message, for the index of one of them.

    Returns:
        An error that names it, to be raised from the other one; None where nothing is known that
        the error does not say itself, as of the user's own exceptions.
    """
    origin = _origin(error)
    if origin is None or _is_users_own(origin):
        return None
    fault, step = None, ModuleWithLoss(module, loss)
    if len(batches) == 1:
        fault = _fault(_read(origin, step), step, where(0))
    if isinstance(error, DeviceError):
        # What a device refuses may run here, or fail for another reason.
        return fault
    last = _LastOperator()
    for index, batch in enumerate(() if fault is not None else batches):
        repeated = _repeat(step, precision, batch, lambda *_: watch_functions(last))
        if isinstance(repeated, IpufitError):
            return repeated
        if isinstance(repeated, Exception):
            fault = _fault(_read(repeated, step, last.call), step, where(index))
            break
    is_prediction = isinstance(fault, DataError) and loss is None and len(batches) == 1
    if is_prediction and all(isinstance(leaf, Tensor) for leaf in batches[0].leaves):
        single = dataclasses.replace(batches[0], leaves=tuple(t[None] for t in batches[0].leaves))
        if isinstance(_repeat(step, precision, single, lambda *_: contextlib.nullcontext()), list):
            return DataError(f"{fault} If x is one sample, pass x[None].")
    return fault


def find_nonfinite(
    module: nn.Module, loss: Optional[Loss], precision: Precision, batch: MicroBatch
) -> Optional[NonFiniteValue]:
    """Find what makes the loss of a micro-batch NaN or infinite; None where it is finite here.

    Args:
        module: the user's, in the mode in which it computed that.
        loss: of the module.
        precision: in which the module computes.
        batch: the micro-batch.
    """
    step = ModuleWithLoss(module, loss)
    search: Optional[NonFiniteSearch] = None

    def searching(
        sample: MicroBatch, tensors: Dict[str, Tensor]
    ) -> contextlib.AbstractContextManager[object]:
        nonlocal search
        where, block = SourceTracker(step), contextlib.ExitStack()
        search = NonFiniteSearch(where.now, sample, tensors)
        block.enter_context(where.followed())
        block.enter_context(watch_operators(search))
        return block

    numbers = _repeat(step, precision, batch, searching)
    if search is None or numbers is None or isinstance(numbers, Exception):
        return None
    return search.cause_of(numbers[0])


def _origin(error: BaseException) -> Optional[Exception]:
    """The exception that PopTorch may have passed on as one of its own; None of one of ours."""
    if type(error) is DeviceError and error.__cause__ is not None:
        error = error.__cause__
    is_ours = isinstance(error, IpufitError)
    is_memory = isinstance(error, MemoryError) or "memory" in str(error).lower()
    return error if isinstance(error, Exception) and not is_ours and not is_memory else None


def _is_users_own(error: Exception) -> bool:
    """Tell whether an exception was raised by Python code that is neither torch's nor ours."""
    entry = error.__traceback__
    if entry is None:
        return False
    while entry.tb_next is not None:
        entry = entry.tb_next
    code = entry.tb_frame.f_code
    is_ours = os.path.abspath(code.co_filename).startswith((TORCH_PATH, PACKAGE))
    return not is_ours and code.co_code[entry.tb_lasti] in _RAISES


def _read(
    error: Exception, step: ModuleWithLoss, operator: Optional[OperatorCall] = None
) -> _Failure:
    """Look through a traceback for the innermost module that was called."""
    names: Dict[int, str] = {}
    module: Optional[nn.Module] = None
    args: Tuple[object, ...] = ()
    kwargs: Dict[str, object] = {}
    functional = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, local = frame.f_code, frame.f_locals
        called = local.get("self")
        if code.co_filename == _FUNCTIONAL and functional is None:
            functional = (code.co_name, dict(local))
        if not isinstance(called, nn.Module):
            continue
        if not names and type(called) is type(step.net):
            names = {id(part): name for name, part in called.named_modules()}
        if names and code.co_name == "_call_impl":
            module, functional = called, None
            args, kwargs = tuple(local.get("args", ())), dict(local.get("kwargs", {}))
    name = None if module is None else names.get(id(module))
    return _Failure(error, module, name, args, kwargs, functional, frame_of(error), operator)


def _repeat(
    step: ModuleWithLoss,
    precision: Precision,
    sample: MicroBatch,
    watching: Callable[[MicroBatch, Dict[str, Tensor]], contextlib.AbstractContextManager[object]],
) -> Union[Sequence[Tensor], Exception, None]:
    """Run a micro-batch once, eagerly and on copies, and leave nothing of it behind.

    Args:
        step: module and loss.
        precision: in which the module computes.
        sample: the micro-batch.
        watching: a block around the run, for the copies of micro-batch and state.

    Returns:
        The reported numbers, or what module or loss raise; None of a device that has failed.
    """
    parameters, buffers = dict(step.named_parameters()), dict(step.named_buffers())
    tensors = [*parameters.values(), *buffers.values()]
    names = (list(parameters), list(buffers))
    micro = GradStep(step, *names, sample, step.loss is not None, precision=precision)
    with fork_rng(), step.preserve_attributes(), for_this_engine(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            copies = [tensor.detach().clone() for tensor in tensors]
            sample = (sample.to(tensors[0].device) if tensors else sample).clone()
        except RuntimeError:
            # A device that has failed can't be read any more.
            return None
        try:
            with torch.no_grad(), watching(sample, dict(zip(micro.names, copies))):
                return micro(*copies, *sample.leaves)
        except Exception as error:
            return error


class _LastOperator(Listener):
    """Remembers the function of torch that was called last."""

    call: Optional[OperatorCall] = None

    def before(self, call: OperatorCall) -> None:
        """Remember a function that takes tensors."""
        if call.inputs:
            self.call = call


# ---- what layers need ---------------------------------------------------------------------------


def _linear(layer: nn.Linear, x: Tensor) -> Optional[_Mismatch]:
    """Compare an input with the features of a linear layer."""
    wanted = layer.in_features
    if not x.dim() or x.shape[-1] == wanted:
        return None
    cure = f"Build it with in_features={x.shape[-1]}, or give it {wanted} features."
    if x.dim() > 2 and math.prod(x.shape[1:]) == wanted:
        cure = "Flatten its input: x.flatten(1), or nn.Flatten() before the layer."
    elif x.dim() > 2 and x.shape[1] == wanted:
        cure = f"Its {wanted} channels are in dimension 1: x.flatten(2).mean(2) has them last."
    return _Mismatch(f"{wanted} features in the last dimension", cure)


def _convolution(layer: _ConvNd, x: Tensor) -> Optional[_Mismatch]:
    """Compare an input with dimensions, channels and kernel of a convolution."""
    sizes = len(layer.kernel_size)
    wanted = layer.in_channels
    if x.dim() != sizes + 2 and (x.dim() != sizes + 1 or x.shape[0] != wanted):
        form = ", ".join(("batch", "channels", *("depth", "height", "width")[3 - sizes :]))
        cure = f"Reshape its input to ({form})."
        if x.dim() == sizes + 1 and wanted == 1:
            cure = "Give its input the dimension of the channel: x.unsqueeze(1)."
        return _Mismatch(f"{sizes + 2} dimensions, ({form})", cure)
    channels = x.shape[x.dim() - sizes - 1]
    if channels != wanted:
        cure = f"Build it with in_channels={channels}, or give it {wanted} channels."
        if x.dim() == sizes + 2 and x.shape[-1] == wanted:
            cure = f"Put the channels first: x.movedim(-1, 1) has {wanted} channels."
        return _Mismatch(f"{wanted} channels in dimension {x.dim() - sizes - 1}", cure)
    if isinstance(layer.padding, str) or layer.transposed:
        return None
    for size, kernel, padding, dilation in zip(
        x.shape[-sizes:], layer.kernel_size, layer.padding, layer.dilation
    ):
        least = dilation * (kernel - 1) + 1 - 2 * int(padding)
        if size < least:
            need = f"at least {least} values along each dimension of its kernel"
            return _Mismatch(need, "Use a smaller kernel_size, more padding, or larger inputs.")
    return None


def _batch_norm(layer: _BatchNorm, x: Tensor) -> Optional[_Mismatch]:
    """Compare an input with dimensions and features of a batch normalisation, and count values."""
    dims = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
    wanted = dims.get(type(layer), (x.dim(),))
    if x.dim() not in wanted:
        other = next((kind.__name__ for kind, each in dims.items() if x.dim() in each), None)
        cure = "Reshape its input." if other is None else f"Use nn.{other}."
        return _Mismatch(f"{' or '.join(map(str, wanted))} dimensions", cure)
    features = x.shape[1]
    if features != layer.num_features:
        cure = f"Build it with num_features={features}, or give it {layer.num_features}."
        return _Mismatch(f"{layer.num_features} features in dimension 1", cure)
    if layer.training and x.numel() == features:
        return _Mismatch(
            "more than one value per feature while it trains",
            "Choose a batch_size of at least 2 that does not leave a single sample at the end, or "
            "drop_last=True in the loader.",
        )
    return None


def _last_dimensions(layer: nn.LayerNorm, x: Tensor) -> Optional[_Mismatch]:
    """Compare an input with the shape that a layer normalises."""
    wanted = tuple(layer.normalized_shape)
    came = tuple(x.shape[-len(wanted) :])
    if came == wanted:
        return None
    cure = f"Build it with normalized_shape={came}, or give it the other shape."
    return _Mismatch(f"the shape {wanted} in its last dimensions", cure)


def _group_norm(layer: nn.GroupNorm, x: Tensor) -> Optional[_Mismatch]:
    """Compare an input with the channels of a group normalisation."""
    if x.dim() < 2 or x.shape[1] == layer.num_channels:
        return None
    cure = f"Build it with num_channels={x.shape[1]}, or give it {layer.num_channels}."
    return _Mismatch(f"{layer.num_channels} channels in dimension 1", cure)


def _recurrent(layer: Union[nn.RNNBase, nn.RNNCellBase], x: Tensor) -> Optional[_Mismatch]:
    """Compare an input with the features of a recurrent layer or cell."""
    if x.shape[-1] == layer.input_size:
        return None
    cure = f"Build it with input_size={x.shape[-1]}, or give it {layer.input_size} features."
    return _Mismatch(f"{layer.input_size} features in the last dimension", cure)


def _attention(layer: nn.MultiheadAttention, x: Tensor) -> Optional[_Mismatch]:
    """Compare a query with the features of an attention layer."""
    if x.shape[-1] == layer.embed_dim:
        return None
    cure = f"Build it with embed_dim={x.shape[-1]}, or give it {layer.embed_dim} features."
    return _Mismatch(f"a query with {layer.embed_dim} features in the last dimension", cure)


def _embedding(layer: Union[nn.Embedding, nn.EmbeddingBag], x: Tensor) -> Optional[_Mismatch]:
    """Compare indices with the rows of an embedding."""
    if x.is_floating_point() or x.is_complex():
        return _Mismatch("indices, of dtype int64", "Convert them with .long() if they are whole.")
    rows = layer.num_embeddings
    if not _has_values(x) or not x.numel():
        return None
    low, high = int(x.min()), int(x.max())
    if low >= 0 and high < rows:
        return None
    cure = f"Build it with num_embeddings={high + 1}, or map rare values to one index."
    if low < 0:
        cure = "Give padding its own index, such as padding_idx=0."
    worst = low if low < 0 else high
    place = tuple((x == worst).nonzero()[0].tolist())
    return _Mismatch(f"indices from 0 to {rows - 1}", cure, f"{worst} at {place} of its input")


_LAYERS: Tuple[Tuple[Any, Callable[[Any, Tensor], Optional[_Mismatch]]], ...] = (
    (nn.Linear, _linear),
    (_ConvNd, _convolution),
    (_BatchNorm, _batch_norm),
    ((nn.LayerNorm, getattr(nn, "RMSNorm", nn.LayerNorm)), _last_dimensions),
    (nn.GroupNorm, _group_norm),
    ((nn.RNNBase, nn.RNNCellBase), _recurrent),
    (nn.MultiheadAttention, _attention),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
)


# ---- what all layers need -----------------------------------------------------------------------


def _call_mismatch(layer: nn.Module, failure: _Failure) -> Optional[_Mismatch]:
    """Compare the arguments of a call with the parameters of a layer's forward."""
    signature = inspect.signature(layer.forward)
    try:
        signature.bind(*failure.args, **failure.kwargs)
    except TypeError:
        count = len(failure.args) + len(failure.kwargs)
        names = ", ".join(signature.parameters)
        cure = "Call it with these arguments; arguments for several layers need several calls."
        return _Mismatch(f"the arguments ({names})", cure, f"{count} of them")
    return None


def _tensor_mismatch(value: object) -> Optional[_Mismatch]:
    """Refuse several values where a layer takes one tensor."""
    if value is None or isinstance(value, (Tensor, bool, int, float)):
        return None
    cure = "Pass only the one that it needs; recurrent and attention layers return (output, state)."
    return _Mismatch("one tensor", cure, describe(value))


def _type_mismatch(layer: nn.Module, x: Tensor) -> Optional[_Mismatch]:
    """Compare device and dtype of an input with those of a layer's weights."""
    weight = next((p for p in layer.parameters() if p.is_floating_point()), None)
    if weight is None:
        return None
    if weight.device != x.device:
        cure = f"Move it there, x.to({str(weight.device)!r}), or make it with device=x.device."
        return _Mismatch(f"an input on {weight.device}, like its weights", cure, str(x.device))
    if weight.dtype == x.dtype or isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return None
    dtype = dtype_name(weight.dtype)
    if not x.is_floating_point():
        cure = f"Convert it before the layer: x.to(torch.{dtype})."
    elif x.dtype == torch.float64:
        cure = (
            "NumPy creates float64 by default: convert the data with array.astype('float32') or "
            "tensor.float(), or the module with module.double()."
        )
    else:
        cure = "Use one dtype for all layers, such as module.float(), or convert before the layer."
    return _Mismatch(f"an input of {dtype}, like its weights", cure)


# ---- rules --------------------------------------------------------------------------------------


def _fault(failure: _Failure, step: ModuleWithLoss, where: str) -> Optional[IpufitError]:
    """Find the first rule that explains the failure."""
    for rule in (_unregistered_fault, _layer_fault, _loss_fault, _operator_fault):
        fault = rule(failure, step, where)
        if fault is not None:
            return fault
    return None


def _unregistered_fault(
    failure: _Failure, step: ModuleWithLoss, where: str
) -> Optional[IpufitError]:
    """Explain a tensor that the module has not registered, and that no device holds."""
    if "IPU tensor" in failure.text:
        for attribute in find_unregistered(step.net).values():
            return CaptureError(
                f"{attribute.text}, and a device has nothing of them. {attribute.cure}"
            )
    return None


def _layer_fault(failure: _Failure, step: ModuleWithLoss, where: str) -> Optional[IpufitError]:
    """Explain an input that one of torch's layers can't take."""
    layer = failure.module
    if layer is None or not type(layer).forward.__module__.startswith("torch.nn"):
        return None
    compare = next((rule for kind, rule in _LAYERS if isinstance(layer, kind)), None)
    mismatch = _call_mismatch(layer, failure)
    x = next(iter((*failure.args, *failure.kwargs.values())), None)
    if mismatch is None and compare is not None:
        mismatch = compare(layer, x) if isinstance(x, Tensor) else _tensor_mismatch(x)
    if mismatch is None and isinstance(x, Tensor):
        mismatch = _type_mismatch(layer, x)
    if mismatch is None:
        return None
    what = f"{failure.layer} needs {mismatch.needs}, got {mismatch.got or describe_tensor(x)}"
    return _data_error(where + what + failure.where, mismatch.cure, failure)


def _loss_fault(failure: _Failure, step: ModuleWithLoss, where: str) -> Optional[IpufitError]:
    """Explain a prediction and a target that don't go together in one of torch's losses."""
    if failure.functional is None:
        return None
    name, local = failure.functional
    prediction, target = local.get("input"), local.get("target")
    if not isinstance(prediction, Tensor) or not isinstance(target, Tensor):
        return None
    # The name under which compile got it, if it is the model's own loss.
    ranges = () if step.loss is None else step.loss.facts(prediction, target, None).labels
    label_name = ranges[0].name if ranges else name
    try:
        if name == "binary_cross_entropy" and _has_values(prediction):
            _check_probabilities(label_name, prediction, where)
        if "ignore_index" in local and _has_values(target) and not target.is_floating_point():
            classes = prediction.shape[min(prediction.dim() - 1, 1)]
            check_labels(label_name, target, classes, local["ignore_index"], where)
        check_torch_loss(name, prediction, target)
    except IpufitError as fault:
        return fault
    return None


def _check_probabilities(name: str, prediction: Tensor, where: str) -> None:
    """Refuse values that are no probabilities.

    Raises:
        DataError: naming the first of them, which a missing sigmoid makes.
    """
    outside = ((prediction < 0) | (prediction > 1)).nonzero()
    if len(outside):
        place = tuple(outside[0].tolist())
        what = (
            f"{where}loss {name!r} needs probabilities from 0 to 1, got "
            f"{float(prediction[place]):.4g} in sample {place[0] if place else 0}"
        )
        cure = "Use loss='bce_with_logits', or end the module with nn.Sigmoid()."
        raise DataError(f"{what}. {cure}", what=what, cure=cure)


def _operator_fault(failure: _Failure, step: ModuleWithLoss, where: str) -> Optional[IpufitError]:
    """An operator in the user's own code got tensors that don't go together."""
    operator = failure.operator
    if not isinstance(failure.error, (RuntimeError, IndexError)) or operator is None:
        return None
    rule = next((rest for pattern, *rest in _TEXTS if pattern.search(failure.text)), None)
    if rule is None:
        return None
    needs, cure = rule
    owner = "the loss" if failure.module is None else type(failure.module).__name__
    name = str(getattr(operator.operator, "__name__", operator.operator)).strip("_")
    came = " and ".join(map(describe_tensor, operator.inputs))
    what = f"{name} in {owner} needs {needs}, got {came}"
    return _data_error(where + what + failure.where, cure, failure)


# What torch says of tensors that don't go together, and what to do.
_TEXTS: Tuple[Tuple[Pattern[str], str, str], ...] = (
    (
        re.compile("same device|expected device|Device Propagation|different devices"),
        "tensors on one device",
        "Create constants with device=x.device, or register them with register_buffer, so that "
        "they move with the module.",
    ),
    (
        re.compile("only applicable to index tensor"),
        "class indices, of dtype int64",
        "Convert them with .long() if they are whole.",
    ),
    (
        re.compile("Class values must be"),
        "class indices from 0 to num_classes - 1",
        "Number the classes from 0, or give a larger num_classes.",
    ),
    (
        re.compile("same dtype|scalar type|should be the same"),
        "tensors of one dtype",
        "Convert one of them there, for example with y.to(x.dtype).",
    ),
    (
        re.compile(
            "must match|cannot be multiplied|reduction dim|invalid for input of size|[Bb]roadcast"
            "|Dimension out of range|size mismatch|Expected size|inconsistent tensor size"
            "|dimensions|incompatible"
        ),
        "shapes that fit together",
        "Fix the shapes on that line; with compile(run_eagerly=True) a debugger can stop there.",
    ),
)


def _data_error(what: str, cure: str, failure: _Failure) -> DataError:
    """An error in three beats, with torch's own words at its end."""
    kind, text = type(failure.error).__name__, failure.text.rstrip(".")
    return DataError(f"{what}. {cure} torch says: {kind}: {text}.", what=what, cure=cure)


def _has_values(tensor: Tensor) -> bool:
    """Tell whether a tensor is more than a shape."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta
