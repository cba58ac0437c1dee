"""Wrap the user's module while a device trains it, so that reading a weight fetches it first.

The object stays the user's own. Its class, and the classes of its parameters and buffers, are
replaced by subclasses that call the training executor back.
"""

from __future__ import annotations

import weakref
from typing import Dict, List, Mapping, Optional, Tuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ipufit.poptorch._errors import error
from ipufit.poptorch._weights import WeightSource, WeightSync
from ipufit.poptorch._wrapped import (
    ExecutorLink,
    WrappedModel,
    WrappedTensor,
    isWrapped,
    links_of,
    living,
    pull,
    quietly,
    set_links,
    subclass,
    tensors_of,
    unwrap,
)

__all__ = [
    "check_not_wrapped",
    "host_tensors",
    "syncs_of",
    "wrap",
    "write_host_tensors",
]


def check_not_wrapped(model: nn.Module) -> None:
    """Refuse a second training executor while the first one lives.

    Raises:
        RuntimeError: the module is wrapped.
    """
    if isWrapped(model) and type(model)._poptorch_links[0].source() is not None:  # type: ignore[attr-defined]
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on "
            "the model to unwrap before wrapping again."
        )


def wrap(model: nn.Module, source: WeightSource, sync: WeightSync) -> None:
    """Make the module, its parameters and its buffers call ``source`` back when they are read.

    Called again for the same source, it takes in the tensors that were put in since.

    Raises:
        RuntimeError: another executor has wrapped the module.
        Error: a buffer is of a subclass of Tensor, or a parameter has no shape yet.
    """
    link = _link_of(model, source)
    if link is None:
        check_not_wrapped(model)
        if isWrapped(model):
            unwrap(model)
        link = ExecutorLink(source, sync)
    with quietly():
        parameters: List[Tuple[str, Tensor]] = list(model.named_parameters())
        buffers = list(model.named_buffers())
    for name, tensor in parameters:
        _check_parameter(name, tensor)
    for name, tensor in buffers:
        _check_buffer(name, tensor, link)
    for _, tensor in [*parameters, *buffers]:
        _wrap_tensor(tensor, link)
    if not isWrapped(model):
        plain = type(model)
        link.model = weakref.ref(model)
        model.__class__ = subclass(f"Poptorch{plain.__name__}", WrappedModel, plain, (link,))


def _link_of(model: nn.Module, source: WeightSource) -> Optional[ExecutorLink]:
    return next((link for link in links_of(model) if link.source() is source), None)


def _check_parameter(name: str, parameter: Tensor) -> None:
    if is_lazy(parameter):
        raise error(
            f"the tensor {name!r} of the model has no shape yet. Call the model once with an "
            "example before you wrap it."
        )


def _check_buffer(name: str, buffer: Tensor, link: ExecutorLink) -> None:
    _check_parameter(name, buffer)
    kind = type(buffer)
    if kind is Tensor:
        return
    if issubclass(kind, WrappedTensor) and kind._poptorch_plain is Tensor:
        if link in kind._poptorch_links or not living(kind._poptorch_links):
            return
        raise error(
            f"All buffers must be an instance of torch.Tensor, but the buffer {name!r} belongs to "
            "another poptorch.trainingModel. Call destroy() on that one first."
        )
    raise error(
        f"All buffers must be an instance of torch.Tensor (Got {kind} for {name!r}). Register a "
        "plain tensor, for example with .as_subclass(torch.Tensor)."
    )


def _wrap_tensor(tensor: Tensor, link: ExecutorLink) -> None:
    kind = type(tensor)
    links: Tuple[ExecutorLink, ...] = ()
    if issubclass(kind, WrappedTensor):
        links = kind._poptorch_links
        if link in links:
            return
        with quietly():
            tensor.__class__ = kind._poptorch_plain
    # A parameter may be in several models that are trained: each is asked.
    set_links(tensor, (*living(links), link))
    link.tensors.append(weakref.ref(tensor))


def syncs_of(model: nn.Module) -> List[WeightSync]:
    """Return the weight syncs of the training executors that share weights with a module.

    The module need not be wrapped itself. Each executor reads newer weights back first.
    """
    links_by_sync: Dict[WeightSync, ExecutorLink] = {}
    for value in [model, *(tensor for _, tensor in tensors_of(model))]:
        if isWrapped(value):
            links_by_sync.update({link.sync: link for link in type(value)._poptorch_links})  # type: ignore[attr-defined]
    pull(tuple(links_by_sync.values()))
    return list(links_by_sync)


def host_tensors(model: nn.Module) -> Dict[str, Tensor]:
    """Return plain tensors that share the memory of parameters and buffers, by name.

    A tensor with several names is returned under the first.
    """
    with quietly():
        return {name: tensor.detach() for name, tensor in tensors_of(model)}


def write_host_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write into parameters and buffers in place, without asking the device.

    Raises:
        Error: the module has no tensor of a name, or one of another shape.
    """
    host = host_tensors(model)
    for name, value in values.items():
        target = host.get(name)
        if target is None or target.shape != value.shape:
            what = "none" if target is None else f"one of shape {list(target.shape)}"
            raise error(
                f"the device's tensor {name!r} of shape {list(value.shape)} goes back into the "
                f"model, which has {what}. Parameters and buffers may only change in place while "
                "the model is compiled: call destroy() on it before you replace one."
            )
        target.copy_(value)
