"""Recurrent layers as one operator each, as torch computes them.

torch writes ``torch.lstm``, ``torch.gru`` and ``torch.rnn_*`` with operators for every time step,
or with those of oneDNN or cuDNN, which a recording without values can't call. Here a whole layer is
``ipufit::recurrent``, and its gradient ``ipufit::recurrent_backward``. Both run torch's code, so
that they have its bits: forward runs under autograd, and backward follows the graph that this
makes. Between them it hangs on a tensor, the reserve, as cuDNN calls what its own operators keep.
With dropout between its sub-layers, each of these is an operator.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ipufit.core.precision import autocast_state
from ipufit.utils.random_streams import LOCK
from ipufit.utils.state import recurrent_on_gpu, replaced

# What torch may use: attributes as of ``replaced``.
_Kernels = Sequence[Tuple[object, str, object]]
# Names of torch's functions, with how many rows of the weights a hidden unit has.
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
# Parameters of those functions, for padded sequences, in torch's order.
ARGUMENTS = (
    "input",
    "hx",
    "params",
    "has_biases",
    "num_layers",
    "dropout",
    "train",
    "bidirectional",
    "batch_first",
)
KINDS = tuple(_GATES)
_ORIGINALS: Dict[str, Callable[..., Tuple[Tensor, ...]]] = {
    kind: getattr(torch, kind) for kind in KINDS
}
# Torch's layers look their functions up in the second one.
_OWNERS: Sequence[Any] = (torch, torch._VF)
# A schema has no type for lists of these.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_KEYS = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
_MARK = "ipufit_reserve"


class _Steps:
    """A switch: record layers time step by time step. The lock of recordings guards it."""

    wanted = False


@contextlib.contextmanager
def time_steps() -> Iterator[None]:
    """Within it recurrent layers are recorded as the operators of their time steps."""
    with LOCK, replaced((_Steps, "wanted", True)):
        yield


class SecondGradientError(Exception):
    """A gradient of a gradient is asked for, which only the operators of the time steps have."""


class _Layer(NamedTuple):
    """The arguments of the operator but for its tensors, in its order.

    Attributes:
        states: how many of the tensors, behind the input, are initial states.
        kind: torch's name of the function.
        has_biases, num_layers, train, bidirectional: as torch has them.
        drops: whether dropout follows in a larger layer, where cuDNN does not compute it either.
        autocast: number of the dtype in ``_DTYPES`` that autocast computes in; None without it.
        dtypes: numbers of the results' dtypes.
    """

    states: int
    kind: str
    has_biases: bool
    num_layers: int
    drops: bool
    train: bool
    bidirectional: bool
    autocast: Optional[int]
    dtypes: List[int]

    @property
    def directions(self) -> int:
        """Number of directions in which the sequence is read, 1 or 2."""
        return 2 if self.bidirectional else 1


def _layer_shapes(
    tensors: Sequence[Tensor], states: int, kind: str, has_biases: bool, bidirectional: bool
) -> Iterator[Tuple[int, ...]]:
    """The shapes that the parameters have, in torch's order.

    Args:
        tensors: input (time, batch, features), initial states and parameters.
        states: how many initial states there are.
        kind: a key of ``_GATES``.
        has_biases, bidirectional: as torch has them.
    """
    hidden = tensors[states].shape[2]
    rows, projected = _GATES[kind] * hidden, tensors[1].shape[2]
    directions = 2 if bidirectional else 1
    for number in range(tensors[1].shape[0]):
        is_first = number < directions
        yield rows, tensors[0].shape[2] if is_first else directions * projected
        yield rows, projected
        if has_biases:
            yield (rows,)
            yield (rows,)
        if projected != hidden:
            yield projected, hidden


def _call(layer: _Layer, tensors: Sequence[Tensor]) -> List[Tensor]:
    """Torch's function on these tensors."""
    behind = 1 + layer.states
    hx = tensors[1:behind] if layer.kind == "lstm" else tensors[1]
    with contextlib.ExitStack() as entered:
        if layer.autocast is not None:
            device, dtype = tensors[0].device.type, _DTYPES[layer.autocast]
            entered.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        if tensors[0].device.type == "cuda":
            entered.enter_context(recurrent_on_gpu(not layer.drops))
        results: Tuple[Tensor, ...] = _ORIGINALS[layer.kind](
            tensors[0],
            hx,
            tensors[behind:],
            layer.has_biases,
            layer.num_layers,
            0.0,
            layer.train,
            layer.bidirectional,
            False,
        )
    return list(results)


@contextlib.contextmanager
def _autograd(enabled: bool) -> Iterator[None]:
    """Record gradients, or not, also below the autograd of a dispatch from outside."""
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _KEYS]
    for key in _KEYS:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.set_grad_enabled(enabled):
            yield
    finally:
        for key, before in zip(_KEYS, excluded):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)


def run_forward(tensors: Sequence[Tensor], *settings: Any) -> List[Tensor]:
    """Compute the forward pass of a recurrent layer.

    Args:
        tensors: input (time, batch, features), initial states and parameters.
        settings: the fields of a layer, the places of the tensors that require gradients, by
            which torch chooses how it multiplies, and whether these are wanted.

    Returns:
        Output (time, batch, features), last states, and the reserve for the gradients.
    """
    *fields, requiring, is_wanted = settings
    layer = _Layer(*fields)
    # Weights that lie in parts are written again between the passes, with the same values.
    leaves = [tensor.data for tensor in tensors]
    for place in requiring:
        leaves[place].requires_grad_()
    with _autograd(is_wanted):
        results = _call(layer, leaves)
        # It takes the memory of one element.
        size = _reserve_size(tensors, layer, is_wanted)
        reserve = torch.zeros(1, device=tensors[0].device).expand(size)
        if is_wanted:
            reserve = _Reserve.apply(  # type: ignore[no-untyped-call]
                leaves[requiring[0]], reserve, (results, leaves)
            )
    return [*(result.detach().contiguous() for result in results), reserve]


class _Reserve(torch.autograd.Function):
    """Hangs what backward needs on a tensor, where it is safe from torch 2.0.

    That makes a new Python object of what an operator returns, without the old one's attributes.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, reserve: Tensor, tape: object) -> Tensor:
        """The reserve, whose ``grad_fn`` has the tape."""
        ctx.tape = tape
        return reserve

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        """Nobody computes with the tensor."""
        raise AssertionError


def _reserve_size(tensors: Sequence[Tensor], layer: _Layer, is_wanted: bool) -> int:
    """Estimate the float32 values that torch keeps: the gates of every time step, twice."""
    rows = sum(tensor.shape[0] for tensor in tensors[1 + layer.states :] if tensor.dim() == 2)
    time, batch, _ = tensors[0].shape
    return time * batch * rows * tensors[0].element_size() // 4 if is_wanted else 0


def _empty_forward(tensors: Sequence[Tensor], *settings: Any) -> List[Tensor]:
    """Make results of the forward pass without values, for tracing."""
    *fields, _, is_wanted = settings
    layer = _Layer(*fields)
    time, batch, _ = tensors[0].shape
    shapes: List[Tuple[int, ...]] = [(time, batch, layer.directions * tensors[1].shape[2])]
    shapes += [tuple(state.shape) for state in tensors[1 : 1 + layer.states]]
    results = [
        tensors[0].new_empty(shape, dtype=_DTYPES[dtype])
        for shape, dtype in zip(shapes, layer.dtypes)
    ]
    size = _reserve_size(tensors, layer, is_wanted)
    return [*results, tensors[0].new_empty((size,), dtype=torch.float32)]


def run_backward(
    reserve: Tensor,
    gradients: Sequence[Optional[Tensor]],
    tensors: Sequence[Tensor],
    wanted: Sequence[int],
    directions: int,
) -> List[Tensor]:
    """Compute the gradients of the tensors in the wanted places.

    Args:
        reserve: of the forward pass.
        gradients: of its results; None of one that nobody has used.
        tensors: of the forward pass.
        wanted: places among them.
        directions: 2 of a bidirectional layer; for whoever counts the work.
    """
    tape: Any = reserve.grad_fn
    results, leaves = tape.tape
    leaves = [leaves[place] for place in wanted]
    pairs = [(one, other) for one, other in zip(results, gradients) if other is not None]
    computed = torch.autograd.grad(
        [result for result, _ in pairs],
        leaves,
        [gradient for _, gradient in pairs],
        # Whoever follows a loss back twice comes here twice.
        retain_graph=True,
        allow_unused=True,
    )
    return [
        torch.zeros_like(leaf) if gradient is None else gradient.contiguous()
        for gradient, leaf in zip(computed, leaves)
    ]


def _empty_backward(
    reserve: Tensor,
    gradients: Sequence[Optional[Tensor]],
    tensors: Sequence[Tensor],
    wanted: Sequence[int],
    directions: int,
) -> List[Tensor]:
    """Make gradients without values, for tracing."""
    return [tensors[place].new_empty(tensors[place].shape) for place in wanted]


class _Gradient(torch.autograd.Function):
    """Autograd function that pairs the operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, settings: Sequence[Any], *tensors: Tensor) -> Tuple[Tensor, ...]:
        """Compute results and reserve."""
        results = _below_autograd(FORWARD, list(tensors), *settings)
        *fields, ctx.wanted, _ = settings
        ctx.directions = _Layer(*fields).directions
        ctx.set_materialize_grads(False)
        ctx.reserve = results.pop()
        vars(ctx.reserve)[_MARK] = True
        ctx.save_for_backward(*tensors, ctx.reserve)
        # What is no result for autograd must not have a history of its own.
        no_result = ctx.reserve.detach()
        ctx.mark_non_differentiable(no_result)
        return (*results, no_result)

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        """Gradients of the tensors."""
        if torch.is_grad_enabled():
            raise SecondGradientError
        # torch.utils.checkpoint has made another one; other hooks may have made a mere copy.
        *tensors, reserve = ctx.saved_tensors
        reserve = reserve if _MARK in vars(reserve) else ctx.reserve
        computed = _below_autograd(
            BACKWARD, reserve, list(gradients[:-1]), tensors, ctx.wanted, ctx.directions
        )
        by_place = dict(zip(ctx.wanted, computed))
        return (None, *(by_place.get(place) for place in range(len(tensors))))


def _below_autograd(operator: Callable[..., List[Tensor]], *args: object) -> List[Tensor]:
    below = torch._C._AutoDispatchBelowAutograd()
    try:
        return operator(*args)
    finally:
        del below


def _with_gradient(tensors: Sequence[Tensor], *settings: object) -> List[Tensor]:
    """The operator above autograd, which knows what requires gradients, and if they are wanted."""
    requiring = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
    if requiring:  # else it may be what is recorded, when it runs
        settings = (*settings[:-2], requiring, torch.is_grad_enabled())
        if torch.is_grad_enabled():
            return list(_Gradient.apply(settings, *tensors))  # type: ignore[no-untyped-call]
    return _below_autograd(FORWARD, tensors, *settings)


# Of all operators of a recording; lives as long as the process: they would go with it.
LIBRARY: Any = torch.library.Library("ipufit", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "recurrent(Tensor[] tensors, int states, str kind, bool has_biases, int num_layers, "
    "bool drops, bool train, bool bidirectional, int? autocast, int[] dtypes, "
    "int[] requiring, bool is_wanted) -> Tensor[]"
)
LIBRARY.define(
    "recurrent_backward(Tensor reserve, Tensor?[] gradients, Tensor[] tensors, int[] wanted, "
    "int directions) -> Tensor[]"
)
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("recurrent", run_forward, _device)
    LIBRARY.impl("recurrent_backward", run_backward, _device)
LIBRARY.impl("recurrent", _empty_forward, "Meta")
LIBRARY.impl("recurrent", _with_gradient, "Autograd")
LIBRARY.impl("recurrent_backward", _empty_backward, "Meta")

FORWARD = torch.ops.ipufit.recurrent.default
BACKWARD = torch.ops.ipufit.recurrent_backward.default


@contextlib.contextmanager
def whole_recurrent_layers() -> Iterator[None]:
    """Within it torch's functions for recurrent layers are one operator each, in this thread."""
    with LOCK:
        backends = (torch.backends.mkldnn, torch.backends.cudnn)
        kernels = [(backend, "enabled", backend.enabled) for backend in backends]
        thread = threading.get_ident()
        functions = [
            (owner, kind, functools.partial(_instead, kind, kernels, thread))
            for owner in _OWNERS
            for kind in KINDS
        ]
        with replaced(*functions):
            yield


def _instead(
    kind: str, kernels: _Kernels, thread: int, /, *args: object, **kwargs: object
) -> Tuple[Tensor, ...]:
    """Stand in for a function of torch's; threads that record nothing get torch's own."""
    if thread != threading.get_ident():
        return _ORIGINALS[kind](*args, **kwargs)
    return call_whole(kind, kernels, *args, **kwargs)


def call_whole(kind: str, kernels: _Kernels, /, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """Call a function of torch's for a recurrent layer, as few operators where that can be.

    Args:
        kind: the function's name.
        kernels: what torch may use when the layer runs.
        args, kwargs: of the call.
    """
    values = {**dict(zip(ARGUMENTS, args)), **kwargs}
    if not _can_be_whole(kind, values):
        return _ORIGINALS[kind](*args, **kwargs)
    first = values["input"].transpose(0, 1) if values["batch_first"] else values["input"]
    states = values["hx"] if kind == "lstm" else (values["hx"],)
    drops = bool(values["train"] and values["num_layers"] > 1 and values["dropout"])
    autocasts, dtype = autocast_state(first.device)
    layer = _Layer(
        len(states),
        kind,
        values["has_biases"],
        1 if drops else values["num_layers"],
        drops,
        values["train"],
        values["bidirectional"],
        _DTYPES.index(dtype) if autocasts else None,
        [_DTYPES.index(first.dtype)] * (1 + len(states)),
    )
    if not drops:
        output, *last = _record(layer, [first, *states, *values["params"]], kernels)
    else:
        output, several, parts = first, [], values["num_layers"]
        count = len(values["params"]) // parts
        for number, starts in enumerate(zip(*(state.chunk(parts) for state in states))):
            if number:
                output = torch.dropout(output, values["dropout"], True)
            weights = values["params"][number * count : (number + 1) * count]
            output, *last = _record(layer, [output, *starts, *weights], kernels)
            several.append(last)
        last = [torch.cat(each) for each in zip(*several)]
    return (output.transpose(0, 1) if values["batch_first"] else output, *last)


def _record(layer: _Layer, tensors: List[Tensor], kernels: _Kernels) -> List[Tensor]:
    """Call the operator; return its output and last states."""
    if layer.autocast is not None:
        layer = layer._replace(dtypes=_tried_dtypes(layer, tensors, kernels))
    results: List[Tensor] = FORWARD(tensors, *layer, [], False)
    return results[:-1]


def _can_be_whole(kind: str, values: Dict[str, Any]) -> bool:
    """Say whether the arguments of a recurrent function fit the one operator for a whole layer.

    For other arguments torch's own function is called, which says what is wrong with them.
    """
    params, hx = values.get("params"), values.get("hx")
    # Packed sequences come with other arguments.
    if _Steps.wanted or values.keys() != set(ARGUMENTS) or not isinstance(params, (list, tuple)):
        return False
    states: List[Any] = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    tensors: List[Any] = [values["input"], *states, *params]
    if len(states) != (2 if kind == "lstm" else 1) or not all(map(_is_placed, tensors)):
        return False
    first = tensors[0]
    if not first.numel() or first.dim() != 3 or any(state.dim() != 3 for state in states):
        return False
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes <= set(_DTYPES) or (len(dtypes) > 1 and not autocast_state(first.device)[0]):
        return False
    # Transforms of functorch, and forward-mode derivatives, know the operators of time steps.
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    directions = 2 if values["bidirectional"] else 1
    batch = first.shape[0 if values["batch_first"] else 1]
    fitting = (directions * values["num_layers"], batch)
    if any(tuple(state.shape[:2]) != fitting for state in states):
        return False
    shapes = _layer_shapes(
        tensors, len(states), kind, values["has_biases"], values["bidirectional"]
    )
    return list(shapes) == [tuple(each.shape) for each in params]


def _is_placed(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type in ("cpu", "cuda")


def _tried_dtypes(layer: _Layer, tensors: Sequence[Tensor], kernels: _Kernels) -> List[int]:
    """The dtypes of the results under autocast, which differ between torch's kernels.

    Found out with zeros, on one time step of one sample.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors]
    shapes[0] = (1, 1, shapes[0][2])
    for place in range(1, 1 + layer.states):
        shapes[place] = (shapes[place][0], 1, shapes[place][2])
    drops = [(torch.backends.cudnn, "enabled", False)] if layer.drops else []
    with replaced(*kernels, *drops), _disable_current_modes(), torch.no_grad():
        zeros = [
            torch.zeros(shape, dtype=each.dtype, device=each.device)
            for shape, each in zip(shapes, tensors)
        ]
        results = _call(layer, zeros)
    return [_DTYPES.index(result.dtype) for result in results]
