"""The user's module while a device trains it: a look at its weights brings them up to date first.

The object stays the user's own. Its class, and the classes of its parameters and buffers, are
exchanged for subclasses that call the training executor back.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import types
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Type

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ipufit.poptorch._errors import error
from ipufit.poptorch._plain import as_plain, reduced_as_plain
from ipufit.poptorch._weights import WeightSource, WeightSync

__all__ = [
    "check_not_wrapped",
    "host_tensors",
    "isWrapped",
    "quietly",
    "syncs_of",
    "unwrap",
    "wrap",
    "write_host_tensors",
]


class _Link:
    """From a wrapped object to its executor, which it does not keep alive."""

    def __init__(self, source: WeightSource, sync: WeightSync) -> None:
        self.source = weakref.ref(source)
        self.sync = sync
        self.model: Optional[weakref.ref[nn.Module]] = None
        self.tensors: List[weakref.ref[Tensor]] = []


class _Quiet(threading.local):
    depth = 0


_quiet = _Quiet()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Inside, host weights are read and written as they are, without asking the device."""
    _quiet.depth += 1
    try:
        yield
    finally:
        _quiet.depth -= 1


def _pull(links: Tuple[_Link, ...]) -> bool:
    if _quiet.depth:
        return False
    changed = False
    with quietly():
        for link in links:
            source = link.source()
            if source is not None:
                changed |= source.copyWeightsToHostIfNeeded()
    return changed


class _Wrapped:
    """What wrapped objects have in common; the class attributes are those of one wrapping."""

    _poptorch_plain: Type[Any]
    _poptorch_links: Tuple[_Link, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As of the plain class, so that a file can be read without this package."""
        _pull(self._poptorch_links)
        with quietly():
            return reduced_as_plain(self, self._poptorch_plain, protocol)

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        """A plain copy: the executor's weights are not its own."""
        _pull(self._poptorch_links)
        with as_plain(self, self._poptorch_plain), quietly():
            return copy.deepcopy(self, memo)


class _WrappedTensor(_Wrapped):
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Tuple[Type[Any], ...],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        """Every function of torch and every attribute of a tensor comes by here."""
        for kind in types:
            if issubclass(kind, _WrappedTensor):
                _pull(kind._poptorch_links)
        own = cls._poptorch_plain.__torch_function__
        if own in _PLAIN_FUNCTIONS:
            # What comes out is a plain tensor, and an in-place function returns this very one.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]

    def __repr__(self, **kwargs: Any) -> str:
        """As of the plain class."""
        _pull(self._poptorch_links)
        with as_plain(self, self._poptorch_plain), quietly():
            return repr(self)


# A bound method is made anew at each access, and is equal to the one before.
_PLAIN_FUNCTIONS = (Tensor.__torch_function__, nn.Parameter.__torch_function__)


class _WrappedModel(_Wrapped, nn.Module):
    def copyWeightsToHostIfNeeded(self) -> bool:
        """Read the weights back if the device has newer ones; whether it had."""
        return _pull(type(self)._poptorch_links)

    def destroy(self) -> None:
        """Free the device and make this a plain module again, which can be wrapped anew."""
        source = type(self)._poptorch_links[0].source()
        if source is not None:
            source.destroy()
        else:  # the executor is gone
            unwrap(self)

    def __getattribute__(self, name: str) -> Any:
        if name in ("_buffers", "_parameters", "forward"):
            _pull(type(self)._poptorch_links)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, Tensor):
            _pull(type(self)._poptorch_links)
        return value

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """As of the plain class, with plain tensors that share the host's memory."""
        _pull(type(self)._poptorch_links)
        with quietly():
            state = super().state_dict(
                *args, destination=destination, prefix=prefix, keep_vars=keep_vars
            )
            plain: Dict[int, Any] = {}
            for name, value in state.items():
                if isinstance(value, _WrappedTensor):
                    # One tensor of two names stays one.
                    state[name] = plain.setdefault(id(value), copy.copy(value))
        return state

    def __copy__(self) -> nn.Module:
        """A shallow copy with the same parameters is wrapped too."""
        wrapped = type(self)
        with as_plain(self, self._poptorch_plain):
            result: nn.Module = copy.copy(self)
        result.__class__ = wrapped
        return result


def isWrapped(value: Any) -> bool:
    """Whether a module, parameter or buffer is one that a training executor has wrapped."""
    return isinstance(value, _Wrapped)


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
    """Make the module, its parameters and its buffers call ``source`` back when looked at.

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
        link = _Link(source, sync)
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
        model.__class__ = _subclass(f"Poptorch{plain.__name__}", _WrappedModel, plain, (link,))


def _link_of(model: nn.Module, source: WeightSource) -> Optional[_Link]:
    links: Tuple[_Link, ...] = getattr(type(model), "_poptorch_links", ())
    return next((link for link in links if link.source() is source), None)


def _tensors(model: nn.Module) -> List[Tuple[str, Tensor]]:
    with quietly():
        return [*model.named_parameters(), *model.named_buffers()]


def _check_parameter(name: str, parameter: Tensor) -> None:
    if is_lazy(parameter):
        raise error(
            f"the tensor {name!r} of the model has no shape yet. Call the model once with an "
            "example before you wrap it."
        )


def _check_buffer(name: str, buffer: Tensor, link: _Link) -> None:
    _check_parameter(name, buffer)
    kind = type(buffer)
    if kind is Tensor:
        return
    if issubclass(kind, _WrappedTensor) and kind._poptorch_plain is Tensor:
        if link in kind._poptorch_links or not _living(kind._poptorch_links):
            return
        raise error(
            f"All buffers must be an instance of torch.Tensor, but the buffer {name!r} belongs to "
            "another poptorch.trainingModel. Call destroy() on that one first."
        )
    raise error(
        f"All buffers must be an instance of torch.Tensor (Got {kind} for {name!r}). Register a "
        "plain tensor, for example with .as_subclass(torch.Tensor)."
    )


def _living(links: Tuple[_Link, ...]) -> Tuple[_Link, ...]:
    return tuple(link for link in links if link.source() is not None)


def _wrap_tensor(tensor: Tensor, link: _Link) -> None:
    kind = type(tensor)
    links: Tuple[_Link, ...] = ()
    if issubclass(kind, _WrappedTensor):
        links = kind._poptorch_links
        if link in links:
            return
        with quietly():
            tensor.__class__ = kind._poptorch_plain
    # A parameter may be in several models that are trained: each is asked.
    _set_links(tensor, (*_living(links), link))
    link.tensors.append(weakref.ref(tensor))


def _set_links(tensor: Tensor, links: Tuple[_Link, ...]) -> None:
    """Wrap a plain tensor for these executors; none leaves it plain."""
    if not links:
        return
    plain = type(tensor)
    name = "PoptorchParameter" if isinstance(tensor, nn.Parameter) else "PoptorchBuffer"
    tensor.__class__ = _subclass(name, _WrappedTensor, plain, links)


_classes: weakref.WeakValueDictionary[Tuple[Any, ...], type] = weakref.WeakValueDictionary()


def _subclass(name: str, mixin: type, plain: type, links: Tuple[_Link, ...]) -> type:
    key = (name, plain, tuple(id(link) for link in links))
    found = _classes.get(key)
    if found is not None and found._poptorch_links == links:  # type: ignore[attr-defined]
        return found
    namespace = {
        "_poptorch_plain": plain,
        "_poptorch_links": links,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
    }
    made = types.new_class(name, (mixin, plain), exec_body=lambda body: body.update(namespace))
    _classes[key] = made
    return made


def unwrap(model: nn.Module, source: Optional[WeightSource] = None) -> None:
    """Make the module, its parameters and its buffers plain again; nothing is read back.

    Args:
        source: whose wrapping goes; by default that of the module, whoever made it. Parameters
            that another executor has wrapped too stay wrapped for that one.
    """
    links: Tuple[_Link, ...] = getattr(type(model), "_poptorch_links", ())
    if source is not None:
        links = tuple(link for link in links if link.source() is source)
    with quietly():
        for link in links:
            held = [reference() for reference in link.tensors]
            for tensor in [*held, *(tensor for _, tensor in _tensors(model))]:
                if tensor is not None:
                    _unwrap_tensor(tensor, link)
        if links and isWrapped(model):
            model.__class__ = type(model)._poptorch_plain  # type: ignore[attr-defined]


def _unwrap_tensor(tensor: Tensor, link: _Link) -> None:
    kind = type(tensor)
    if issubclass(kind, _WrappedTensor) and link in kind._poptorch_links:
        tensor.__class__ = kind._poptorch_plain
        _set_links(tensor, tuple(other for other in kind._poptorch_links if other is not link))


def syncs_of(model: nn.Module) -> List[WeightSync]:
    """Of the training executors that share weights with a module, wrapped itself or not.

    Each is asked to read back what it has newer.
    """
    found: Dict[WeightSync, _Link] = {}
    for value in [model, *(tensor for _, tensor in _tensors(model))]:
        if isWrapped(value):
            found.update({link.sync: link for link in type(value)._poptorch_links})  # type: ignore[attr-defined]
    _pull(tuple(found.values()))
    return list(found)


def host_tensors(model: nn.Module) -> Dict[str, Tensor]:
    """Plain tensors that share the memory of parameters and buffers, by name, as they are now.

    A tensor of several names is there under its first.
    """
    with quietly():
        return {name: tensor.detach() for name, tensor in _tensors(model)}


def write_host_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write into parameters and buffers in place, without asking the device.

    Raises:
        Error: the module has no tensor of a name, or one of another shape.
    """
    held = host_tensors(model)
    for name, value in values.items():
        found = held.get(name)
        if found is None or found.shape != value.shape:
            what = "none" if found is None else f"one of shape {list(found.shape)}"
            raise error(
                f"the device's tensor {name!r} of shape {list(value.shape)} goes back into the "
                f"model, which has {what}. Parameters and buffers may only change in place while "
                "the model is compiled: call destroy() on it before you replace one."
            )
        found.copy_(value)
