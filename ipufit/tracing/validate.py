"""Modules that no program can be recorded of, refused with a reason.

A module may hold parameters where torch overlooks them, tensors that share memory without being
one tensor, or a forward that replaces a tensor, of which the program would read the old one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch, part_name
from ipufit.errors import CaptureError, ConfigurationError, OptimizerError
from ipufit.tracing.flat_storage import extent, storage_id
from ipufit.utils import tree
from ipufit.utils.state import device_of, eval_mode, train_mode

# File, line, function.
Line = Tuple[str, int, str]

# Containers of Python, and what torch has in their place: for layers, and for parameters.
_CONTAINERS = (
    ((list, tuple, set, frozenset), "nn.ModuleList", "nn.ParameterList"),
    ((dict,), "nn.ModuleDict", "nn.ParameterDict"),
)


@dataclasses.dataclass(frozen=True)
class _Unregistered:
    """An attribute of a module whose tensors torch does not find among its parameters.

    Attributes:
        name: of the attribute, from the user's module on.
        owner: class of the module that has it.
        kind: class of the value.
        content: "layers" or "parameters".
        instead: class of torch's that registers such things.
        tensor: one of them.
    """

    name: str
    owner: str
    kind: str
    content: str
    instead: str
    tensor: Tensor

    @property
    def text(self) -> str:
        """Say why torch does not find the parameters, as part of a sentence."""
        return (
            f"{self.name!r} of {self.owner} holds {self.content} in a plain {self.kind}, where "
            "torch finds no parameters"
        )

    @property
    def cure(self) -> str:
        """Say how ``__init__`` should assign the attribute instead, as a sentence."""
        attribute = self.name.rpartition(".")[2]
        value = "value" if self.kind == "Tensor" else f"self.{attribute}"
        return f"Write self.{attribute} = {self.instead}({value}) in __init__."


def find_unregistered(module: nn.Module, trainable: bool = True) -> Dict[int, _Unregistered]:
    """Tensors in attributes of a module's parts that are no parameters of it, by identity.

    Args:
        module: the user's module.
        trainable: only parameters of layers, and tensors that require gradients.

    Returns:
        For each of them the attribute that holds it, perhaps in a list, tuple, set or dict.
    """
    registered = {id(p) for p in module.parameters()}
    result: Dict[int, _Unregistered] = {}
    for prefix, part in module.named_modules():
        for attribute, value in vars(part).items():
            # Recurrent layers of torch's have a list of their own parameters, or what stands for
            # them. Hooks of torch.nn.utils compute ``weight`` from ``weight_orig`` for each call.
            skipped = attribute in ("_parameters", "_buffers", "_modules", "_flat_weights")
            if skipped or f"{attribute}_orig" in part._parameters:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            for tensor, content in _tensors_in(value, trainable):
                if id(tensor) in registered or id(tensor) in result:
                    continue
                kind, instead = _registering(value, content)
                result[id(tensor)] = _Unregistered(
                    name, type(part).__name__, kind, content, instead, tensor
                )
    return result


def refuse_unregistered(module: nn.Module) -> None:
    """Make sure that a module with nothing to train has no layers where torch overlooks them.

    Raises:
        OptimizerError: it has some.
    """
    for attribute in find_unregistered(module).values():
        raise OptimizerError(
            f"the module has no trainable parameter: {attribute.text}. {attribute.cure}"
        )


def _tensors_in(value: object, trainable: bool) -> Iterator[Tuple[Tensor, str]]:
    """Tensors of a plain container, perhaps only those to train, and what of it they are."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, nn.Module):
                yield from ((parameter, "layers") for parameter in each.parameters())
            else:
                yield from _tensors_in(each, trainable)
    elif isinstance(value, Tensor) and (not trainable or (value.is_leaf and value.requires_grad)):
        yield value, "parameters"


def _registering(value: object, content: str) -> Tuple[str, str]:
    """A word for a container, and what torch has in its place."""
    for kinds, for_layers, for_parameters in _CONTAINERS:
        if isinstance(value, kinds):
            return type(value).__name__, for_layers if content == "layers" else for_parameters
    return "Tensor", "nn.Parameter"


def refuse_unready(module: nn.Module, may_be_lazy: bool = False) -> None:
    """Make sure that all parameters of a module can be trained, in whichever way it runs.

    Args:
        module: the user's module.
        may_be_lazy: whether :func:`initialize` may still give parameters a shape.

    Raises:
        ConfigurationError: a parameter has no shape or no data yet.
    """
    for part in module.modules():
        for parameter_name, parameter in part.named_parameters(recurse=False):
            if nn.parameter.is_lazy(parameter):
                if may_be_lazy:
                    continue
                raise ConfigurationError(
                    f"every parameter must have a shape, but {parameter_name!r} of "
                    f"{type(part).__name__} gets its shape in the first forward. Call the module "
                    "once on an example before ipufit.Model(module)."
                )
            if parameter.is_meta:
                raise ConfigurationError(
                    f"every parameter must have data, but {parameter_name!r} of "
                    f"{type(part).__name__} is on the device 'meta'. Use "
                    "module.to_empty(device=...) and load weights first."
                )


def initialize(module: nn.Module, batch: MicroBatch, is_training: bool) -> None:
    """Give lazy parameters of a module their shapes, by a forward on its first micro-batch.

    As at the first forward in a loop by hand, their values are drawn from torch's generator.
    Buffers stay as they are, or as they are made: a forward that counts is still to come.

    Args:
        module: the user's, which nothing happens to without a lazy part.
        batch: its first one.
        is_training: mode of the module meanwhile.

    Raises:
        ConfigurationError: a parameter has no shape afterwards either.
    """
    if not any(map(nn.parameter.is_lazy, (*module.parameters(), *module.buffers()))):
        return
    values: Dict[nn.Module, Dict[str, Tensor]] = {}

    def keep(part: nn.Module, args: object) -> None:
        buffers = part.named_buffers(recurse=False)
        values.setdefault(part, {name: buffer.clone() for name, buffer in buffers})

    args, kwargs, _, _ = batch.to(device_of(module)).unpack()
    mode = train_mode if is_training else eval_mode
    with contextlib.ExitStack() as hooks, torch.no_grad(), mode(module):
        for part in module.modules():
            # Called after the hook that initializes the part.
            hooks.enter_context(part.register_forward_pre_hook(keep))
        module(*args, **kwargs)
        for part, buffers in values.items():
            for name, value in buffers.items():
                part.get_buffer(name).copy_(value)
    refuse_unready(module)


def refuse_unrecordable(module: nn.Module, batch: MicroBatch) -> None:
    """Make sure that a module is plain Python, and a batch made of tensors.

    Raises:
        CaptureError: a part is compiled already, or another object is in the batch.
    """
    for name, part in module.named_modules():
        where = f"its part {name!r}" if name else "it"
        if isinstance(part, torch.jit.ScriptModule):
            raise CaptureError(
                f"the module must be plain Python to be recorded, but {where} is a TorchScript "
                f"module ({type(part).__name__}). Pass the module that it was scripted from, or "
                "use compile(..., run_eagerly=True)."
            )
        if type(part).__name__ == "OptimizedModule":
            raise CaptureError(
                f"the module must be plain Python to be recorded, but {where} went through "
                "torch.compile. Pass the module itself: ipufit records the whole training step. "
                "Or use compile(..., run_eagerly=True)."
            )
    for path, leaf in tree.flatten_with_paths(batch.unpack())[0]:
        if not isinstance(leaf, Tensor):
            raise CaptureError(
                f"{part_name(path)} must be a tensor to be recorded, got {type(leaf).__name__}. "
                "Yield its tensors in tuples, lists, dicts or dataclasses, choose the fields for "
                "forward with compile(..., inputs=[...]), or use compile(..., run_eagerly=True)."
            )


def public_name(name: str) -> str:
    """The user's name for the step module's ``net.name``; the loss keeps its prefix."""
    return name[len("net.") :] if name.startswith("net.") else name


def on_host(tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Copies under the user's names."""
    return {public_name(name): tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def rebound(
    module: nn.Module, tensors: Mapping[str, Tensor], before: Mapping[str, int]
) -> Iterator[CaptureError]:
    """Errors, with the place, for the tensors that forward has not left where they were.

    Args:
        module: whose forward has run.
        tensors: its parameters and buffers before, by name.
        before: their storages.
    """
    now: Dict[str, Tensor] = dict(module.named_parameters())
    now.update(module.named_buffers())
    for name in sorted({*tensors, *now}):
        tensor = tensors.get(name)
        if tensor is None or now.get(name) is not tensor or storage_id(tensor) != before[name]:
            yield rebound_error(module, name, new=tensor is None)


def rebound_error(module: nn.Module, name: str, new: bool) -> CaptureError:
    """The error, with the place, about a tensor that forward has put into a module.

    Args:
        module: whose forward has run.
        name: of the parameter or buffer.
        new: whether there was none before.
    """
    path, _, attribute = name.rpartition(".")
    parts = path.split(".")
    owners = [module.get_submodule(".".join(parts[:i])) for i in range(len(parts), 0, -1)]
    place = _assignment([type(owner) for owner in owners], attribute)
    file, line, function = place or (None, None, None)
    if new:
        what = "registered"
        instead = "Register it in __init__, and change it in place in forward"
    elif attribute in owners[0]._parameters:
        what = "replaced by another tensor"
        instead = "Keep the new value under another name, or make it a buffer"
    else:
        what = "replaced by another tensor"
        instead = f"Change it in place: self.{attribute}.copy_(new_value)"
    at = f", at {file}:{line}" if file else ""
    begin, end = f"{public_name(name)!r} was {what} inside forward", "the program would never see"
    return CaptureError(
        f"{begin}{at}, and {end} the new one. {instead}.",
        file,
        line,
        function=function,
        kind="rebound",
        what=f"{begin}, and {end} the new one",
        cure=f"{instead}.",
    )


def line_of(function: Any, pattern: str = "") -> Optional[Line]:
    """Find the first line in the source of a function or class that a pattern fits.

    Args:
        function: or class; anything else has no line.
        pattern: regular expression; the empty one fits the line where it begins.
    """
    try:
        function = inspect.unwrap(function)
        file = inspect.getsourcefile(function) or ""
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return None
    for number, line in enumerate(lines, first):
        if re.search(pattern, line):
            return file, number, function.__name__
    return None


def _assignment(owners: Sequence[type], attribute: str) -> Optional[Line]:
    """The line where the user sets the attribute, or else where forward begins."""
    name = re.escape(attribute)
    setting = rf"\.{name}(\.data)?\s*=(?!=)|[\"']{name}[\"']"
    begin: Optional[Line] = None
    for owner in owners:
        for function in _methods(owner):
            place = line_of(function, setting)
            if place is not None:
                return place
            if begin is None and function.__name__ == "forward":
                begin = line_of(function)
    return begin


def _methods(owner: type) -> Iterator[Callable[..., object]]:
    """List methods of a user's class: forward, and then what it may call."""
    if owner.__module__.partition(".")[0] == "torch":
        return
    forward = inspect.unwrap(owner.forward)  # type: ignore[attr-defined]
    yield forward
    for base in owner.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, method in vars(base).items():
                if inspect.isfunction(method) and name not in ("forward", "__init__"):
                    yield inspect.unwrap(method)


def refuse_complex(trained: Sequence[str], parameters: Mapping[str, Tensor]) -> None:
    """A program of an IPU, and state that processes divide, hold real numbers alone.

    Raises:
        OptimizerError: a trained parameter is complex.
    """
    for name in trained:
        if parameters[name].is_complex():
            raise OptimizerError(
                "trained parameters must be real on an IPU and where processes divide weights or "
                f"state, but {public_name(name)!r} is {parameters[name].dtype}. Keep real and "
                "imaginary part as two parameters, and combine them with torch.complex in forward."
            )


def refuse_shared_memory(step: nn.Module, trained: Sequence[str], all_move: bool) -> List[str]:
    """The program moves trained parameters, and copies buffers: what overlaps would come apart.

    Args:
        step: module and loss; their parts may have attributes such as ``layer.weight.detach()``.
        trained: names of the trained parameters.
        all_move: whether the program can leave no parameter where it is.

    Returns:
        Names of trained parameters that must stay where they are: attributes look into them.

    Raises:
        ConfigurationError: two different parameters or buffers have elements in common, or such a
            parameter can't stay.
    """
    by_storage: Dict[int, List[Tuple[int, int, str, Tensor]]] = {}
    for name, tensor in (*step.named_parameters(), *step.named_buffers()):
        if tensor.numel() and tensor.layout is torch.strided:
            key = tensor.untyped_storage().data_ptr()
            by_storage.setdefault(key, []).append((*extent(tensor), name, tensor))
    for places in by_storage.values():
        places.sort()
        for index, (start, end, name, tensor) in enumerate(places):
            for begin, stop, second, other in places[index + 1 :]:
                if begin >= end:
                    break
                # Columns of one matrix have gaps, in which there may be another parameter.
                elements = torch.zeros(max(end, stop) - start, dtype=torch.bool)
                elements.as_strided(tensor.shape, tensor.stride()).fill_(True)
                if elements.as_strided(other.shape, other.stride(), begin - start).any():
                    raise ConfigurationError(
                        f"{public_name(name)!r} and {public_name(second)!r} share memory but are "
                        "different tensors, so the program would separate them. Tie them: b.weight "
                        "= a.weight makes them one parameter."
                    )
    staying: List[str] = []
    for attribute in find_unregistered(step, trainable=False).values():
        view = attribute.tensor
        # Others may have no memory.
        is_plain = type(view) in (Tensor, nn.Parameter) and view.layout is torch.strided
        key = view.untyped_storage().data_ptr() if is_plain else 0
        for begin, end, name, tensor in by_storage.get(key, ()):
            if name in trained:
                staying.append(name)
            if name in trained and (all_move or end - begin > tensor.numel()):
                raise ConfigurationError(
                    f"{public_name(attribute.name)!r} of {attribute.owner} shares memory with the "
                    f"parameter {public_name(name)!r}, but would not follow it in training. "
                    "Compute it in forward instead, such as self.layer.weight.detach()."
                )
    return staying
