"""Operators that users write: functions that run on the host, and custom operators by name."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.poptorch._logging import error
from ipufit.poptorch._tracing import Numbered, define, tensor_list, tracing, untraced
from ipufit.tracing.ipu_only import is_for_this_engine
from ipufit.tracing.unread_values import ctc_loss_and_gradient


class _CallSite:
    """A place in a recorded graph that calls a function of the host."""

    def __init__(self, caller: CPU, results: Sequence[Tensor]) -> None:
        self.caller = caller
        self.shapes = [result.shape for result in results]
        self.dtypes = [result.dtype for result in results]
        self.number = _CALLS.add(self)


_CALLS: Numbered[_CallSite] = Numbered("the function of a poptorch.CPU")


def _run(inputs: List[Tensor], call: int) -> List[Tensor]:
    site = _CALLS[call]
    device = inputs[0].device if inputs else torch.device("cpu")
    caller = site.caller
    caller.inputs = [tensor.detach().cpu().clone() for tensor in inputs]
    caller.outputs = [torch.zeros(s, dtype=d) for s, d in zip(site.shapes, site.dtypes)]
    with torch.no_grad():
        caller.execute()
    return [tensor.to(device) for tensor in caller.outputs]


def _shapes(inputs: List[Tensor], call: int) -> List[Tensor]:
    site = _CALLS[call]
    return [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(site.shapes, site.dtypes)
    ]


CALL_CPU = define("call_cpu(Tensor[] inputs, int call) -> Tensor[]", _run, _shapes)


class CPU:
    """A function, or module, that an inference model calls on the host while it runs.

    While the model is compiled it is called once with zeros, which tells the shapes of its
    results; these may not change afterwards.

    Args:
        layer_to_call: takes tensors and returns one, or a list or tuple of them. Parameters of a
            module are no longer trained.
        ID: its name.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer_to_call = layer_to_call
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)
        self._ID = ID
        self.in_shapes: Optional[List[torch.Size]] = None
        self.out_shapes: Optional[List[torch.Size]] = None
        self.inputs: List[Tensor] = []
        self.outputs: List[Tensor] = []

    def execute(self) -> None:
        """Call the function with ``inputs`` and write what it returns into ``outputs``.

        Raises:
            Error: it returned other shapes, or another number of tensors, than before.
        """
        results = _tensors(self._layer_to_call(*self.inputs), self._ID)
        got, expected = ([tuple(t.shape) for t in group] for group in (results, self.outputs))
        if got != expected:
            raise error(
                f"poptorch.CPU {self._ID!r} must return what it returned when the model was "
                f"compiled: expected shapes {expected}, got {got}. Keep shapes independent of "
                "values."
            )
        for output, result in zip(self.outputs, results):
            output.copy_(result)

    def registerPersistentData(self) -> None:
        """Set ``inputs`` and ``outputs`` to zeros of the shapes of the last call."""
        self.inputs = [torch.zeros(shape) for shape in self.in_shapes or []]
        self.outputs = [torch.zeros(shape) for shape in self.out_shapes or []]

    def __call__(self, *input: Tensor, **kwargs: object) -> Any:
        """Call the function; while a model is compiled, record a call that every run makes.

        Raises:
            Error: keyword arguments, something other than tensors, or a training model.
        """
        if kwargs:
            raise error(
                f"poptorch.CPU {self._ID!r} takes positional tensors only, got the keywords "
                f"{', '.join(sorted(kwargs))}. Pass them by position."
            )
        trace = tracing()
        if trace is None:
            return self._layer_to_call(*input)
        if trace.training:
            raise error(
                f"poptorch.CPU {self._ID!r}: CPU ops are only supported in inference graphs, but "
                "this is a training model. Compute it before the model, on its inputs."
            )
        returned = self._try(_tensors(input, self._ID, "take"))
        results = _tensors(returned, self._ID)
        self.in_shapes = [tensor.shape for tensor in input]
        self.out_shapes = [tensor.shape for tensor in results]
        call = _CallSite(self, results)
        trace.keep_alive.append(call)
        with torch.no_grad():
            outputs = CALL_CPU(list(input), call.number)
        return outputs[0] if isinstance(returned, Tensor) else outputs

    def _try(self, inputs: Sequence[Tensor]) -> object:
        """Call the function on zeros, outside of the recording."""
        # Fake tensors have no values, so only their shapes go in.
        looks = [(tensor.shape, tensor.dtype) for tensor in inputs]
        with untraced():
            zeros = [torch.zeros(shape, dtype=dtype) for shape, dtype in looks]
            with torch.no_grad():
                return self._layer_to_call(*zeros)


def _tensors(value: object, name: str, verb: str = "return") -> List[Tensor]:
    expectation = f"poptorch.CPU {name!r} must {verb} tensors"
    return tensor_list(value, expectation, "Write torch.tensor(...) around a number.")


_LARGEST = torch.finfo(torch.float32).max

# The attributes of all custom operators so far.
attributes_lists: List[Dict[str, object]] = []


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[Tensor],
    attributes: Optional[Dict[str, object]] = None,
) -> List[Tensor]:
    """Call an operator that is compiled for IPUs, by what is registered for it.

    Those are what ``register_custom_op`` was called with, and at first ``FastGatherLastDim``
    of ``poptorch.custom_ops``, PopTorch's own (``torch.gather`` on the last dimension), and what
    Graphcore's published programs use of ``ai.graphcore`` (``RemapCE``, ``CopyTensor``, ``Ctc``,
    ``Nms``), ``com.acme`` (``ExpMovAvg``) and ``custom.ops`` (``LeakyRelu``).

    Args:
        inputs: its tensors.
        name: its name.
        domain: where the name belongs.
        domain_version: version of the domain.
        example_outputs: tensors like its results.
        attributes: numbers, ASCII texts, and lists or tuples of one of these types.
    Returns:
        Outside of a model that is being compiled: zeros like ``example_outputs``.
    Raises:
        ValueError: attributes of another kind.
        Error: a model with it is being compiled, or an `ipufit.Model` on the embedded engine, and
            nothing is registered for it, or what is returns something else than
            ``example_outputs``.
    """
    if attributes is not None:
        _check_attributes(attributes)
        if not any(_same(attributes, other) for other in attributes_lists):
            attributes_lists.append(attributes)
    if tracing() is None and not is_for_this_engine():
        return [torch.zeros_like(output) for output in example_outputs]
    settings = attributes or {}
    for value in settings.values():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            _check_range(one)
    function = _IMPLEMENTATIONS.get((domain, name, domain_version))
    if function is not None:
        returned = function(*inputs, **settings)
        results = [returned] if isinstance(returned, Tensor) else list(returned)
        forms, wanted = ([(tuple(t.shape), t.dtype) for t in g] for g in (results, example_outputs))
        if forms != wanted:
            raise error(
                f"poptorch.custom_op: the function that is registered for {name!r} of {domain!r} "
                f"must return tensors like example_outputs: expected {wanted}, got {forms}. "
                "Register another, or pass other example_outputs."
            )
        return results
    arguments = ", ".join([*(f"x{number}" for number in range(len(inputs))), *settings])
    version = "" if domain_version == 1 else f", version={domain_version}"
    refusal = error(
        f"poptorch.custom_op: {name!r} of {domain!r}, version {domain_version}, is code compiled "
        "for an IPU, which nothing but IPU hardware with Graphcore's SDK can run. Write what it "
        f"computes elsewhere: ipufit.poptorch.register_custom_op({name!r}, {domain!r}, "
        f"lambda {arguments}: ...{version}), which returns tensors like example_outputs."
    )
    refusal.is_only_on_ipus = True
    raise refusal


def register_custom_op(
    name: str, domain: str, function: Callable[..., object], version: int = 1
) -> None:
    """Compute a custom operator with torch where nothing can run its compiled code.

    It is then recorded and differentiated as the operators that the function calls. PopTorch of the
    SDK goes on using the compiled one.

    Args:
        name: as ``poptorch.custom_op`` is called with it.
        domain: where the name belongs.
        function: takes the inputs by position and the attributes by name, and returns a tensor or
            a sequence of them, with the shapes and dtypes of ``example_outputs``.
        version: of the domain.
    """
    _IMPLEMENTATIONS[domain, name, version] = function


def _fast_gather_last_dim(data: Tensor, index: Tensor, **settings: object) -> Tensor:
    if data.shape[:-1] != index.shape[:-1]:
        raise error(
            "FastGatherLastDim: the index tensor must have the same dimensions as the input, "
            f"except for the last one, got {tuple(index.shape)} for {tuple(data.shape)}. Expand "
            "one of them."
        )
    return torch.gather(data, -1, index.to(torch.int64))


def _itself(x: Tensor, **layout: object) -> Tensor:
    """Return the tensor: the operator changes on which tiles of an IPU it lies."""
    return x.clone()


def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    reduction: str,
    blank: int,
    **settings: object,
) -> List[Tensor]:
    """Return PopART's CTC loss, and the gradient of its sum with respect to ``log_probs``."""
    lengths = (input_lengths, target_lengths)
    return [*ctc_loss_and_gradient(log_probs, targets, *lengths, blank, reduction.lower())]


def _moving_average(weight: Tensor, average: Tensor, factor: Tensor) -> Tensor:
    """Move an average towards a weight once an update, after it; returns it as it is before."""
    trace = tracing()
    if trace is None:
        raise error(
            "ExpMovAvg moves an average after each update of a poptorch.trainingModel, and an "
            "ipufit.Model moves averages itself. Leave the operator out, and use "
            "compile(ema=ipufit.EMA(...))."
        )
    trace.averages.append((weight, average, factor.clone()))
    return average.clone()


def _run_nms(
    scores: Tensor, boxes: Tensor, threshold: float, lowest: float, count: int
) -> Sequence[Tensor]:
    results = _no_boxes(scores, boxes, threshold, lowest, count)
    places, best, corners, classes, lengths = results
    for sample, (rest, box) in enumerate(zip(scores.float(), boxes.float())):
        rest = rest.masked_fill(rest <= lowest, -math.inf)
        areas = (box[:, 2:] - box[:, :2]).prod(1)
        for number in range(count):
            place, kind = divmod(int(rest.argmax()), rest.shape[1])
            if rest[place, kind] == -math.inf:
                break
            places[sample, number], classes[sample, number] = place, kind
            best[sample, number] = scores[sample, place, kind]
            corners[sample, number] = boxes[sample, place]
            lengths[sample] += 1
            sides = torch.min(box, box[place])[:, 2:] - torch.max(box, box[place])[:, :2]
            shared = sides.clamp(min=0).prod(1)
            overlaps = shared / (areas + areas[place] - shared) > threshold
            rest[:, kind].masked_fill_(overlaps, -math.inf)
            rest[place, kind] = -math.inf
    return results


def _no_boxes(
    scores: Tensor, boxes: Tensor, threshold: float, lowest: float, count: int
) -> Sequence[Tensor]:
    shape = (len(scores), count)
    return (
        scores.new_full(shape, -1, dtype=torch.int64),
        scores.new_zeros(shape),
        boxes.new_zeros((*shape, 4)),
        scores.new_full(shape, torch.iinfo(torch.int32).max, dtype=torch.int32),
        scores.new_zeros(shape[:1], dtype=torch.int32),
    )


_NMS = define(
    "nms(Tensor scores, Tensor boxes, float threshold, float lowest, int count) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_nms,
    _no_boxes,
)


def _nms(
    scores: Tensor,
    boxes: Tensor,
    threshold: float = 0.5,
    scoreThreshold: float = -_LARGEST,
    numDetections: int = 100,
    useGather: int = 0,
) -> Sequence[Tensor]:
    """Select boxes of each class by score, none of which overlaps a better one too much.

    Returns:
        Places, scores, boxes and classes of the best ones, and how many there are.
    """
    results: Sequence[Tensor] = _NMS(
        scores.detach(), boxes.detach(), threshold, scoreThreshold, numDetections
    )
    return results


# The compiled operator that PopTorch brings along, and those of Graphcore's published programs.
_IMPLEMENTATIONS: Dict[Tuple[str, str, int], Callable[..., Any]] = {
    ("poptorch.custom_ops", "FastGatherLastDim", 1): _fast_gather_last_dim,
    ("ai.graphcore", "CopyTensor", 1): _itself,
    ("ai.graphcore", "Ctc", 1): _ctc,
    ("ai.graphcore", "Nms", 1): _nms,
    ("ai.graphcore", "RemapCE", 1): _itself,
    ("com.acme", "ExpMovAvg", 1): _moving_average,
    ("custom.ops", "LeakyRelu", 1): lambda x, alpha: torch.nn.functional.leaky_relu(x, alpha),
}


def _check_attributes(attributes: Dict[str, object]) -> None:
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"All attribute keys must be strings. Got {key!r}.")
        elements = value if isinstance(value, (list, tuple)) else [value]
        for element in elements:
            if not isinstance(element, (float, int, str)):
                holder = "" if element is value else f"a {type(value).__name__} that holds "
                raise ValueError(
                    "Attribute values must be floats, ints, strings or a list/tuple of float, ints "
                    f"of strings. Got {holder}{type(element).__name__} for {key!r}."
                )
            if not isinstance(element, type(elements[0])):
                raise ValueError(
                    "The types in a list/tuple attribute must all be the same. Got "
                    f"{type(elements[0]).__name__} and {type(element).__name__} for {key!r}."
                )
        for text in (key, *elements):
            if isinstance(text, str) and not text.isascii():
                raise ValueError(f"{text} contains non-ASCII characters. Use ASCII only.")


def _check_range(value: object) -> None:
    if isinstance(value, float) and abs(value) > _LARGEST:
        side = "high" if value > 0 else "low"
        raise error(
            f"{value:g} is too {side} for a Popart float attribute. It has to fit into float32, "
            f"whose largest is {_LARGEST:g}."
        )


def _same(one: Dict[str, object], other: Dict[str, object]) -> bool:
    """Compare attributes for equality, types included: [1] is not [1.0]."""
    return one == other and repr(sorted(one.items())) == repr(sorted(other.items()))
