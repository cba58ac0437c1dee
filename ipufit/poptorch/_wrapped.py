"""Wrapped classes of modules and tensors, which read newer weights from the device on access."""

from __future__ import annotations

import contextlib
import copy
import threading
import types
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Type

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ipufit.poptorch._unwrapped import as_plain, reduced_as_plain
from ipufit.poptorch._weights import WeightSource, WeightSync

__all__ = [
    "ExecutorLink",
    "WrappedModel",
    "WrappedTensor",
    "isWrapped",
    "links_of",
    "living",
    "pull",
    "quietly",
    "rewrapModelIfNecessary",
    "set_links",
    "subclass",
    "tensors_of",
    "unwrap",
    "unwrapModelIfNecessary",
    "unwrap_tensor",
]


class ExecutorLink:
    """Weak link from a wrapped object to its executor."""

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
    """Read and write host weights inside the block without asking the device."""
    _quiet.depth += 1
    try:
        yield
    finally:
        _quiet.depth -= 1


def pull(links: Tuple[ExecutorLink, ...]) -> bool:
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
    """Common base of wrapped classes; its class attributes belong to one wrapping."""

    _poptorch_plain: Type[Any]
    _poptorch_links: Tuple[ExecutorLink, ...]

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle as the plain class, so that a file can be read without this package."""
        pull(self._poptorch_links)
        with quietly():
            return reduced_as_plain(self, self._poptorch_plain, protocol)

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        """Return a plain copy, because a copy does not share the executor's weights."""
        pull(self._poptorch_links)
        with as_plain(self, self._poptorch_plain), quietly():
            return copy.deepcopy(self, memo)


class WrappedTensor(_Wrapped):
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Tuple[Type[Any], ...],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        """Read newer weights back before any function of torch or attribute of a tensor is used."""
        for kind in types:
            if issubclass(kind, WrappedTensor):
                pull(kind._poptorch_links)
        plain_function = cls._poptorch_plain.__torch_function__
        if plain_function in _PLAIN_FUNCTIONS:
            # What comes out is a plain tensor, and an in-place function returns this very one.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]

    def __repr__(self, **kwargs: Any) -> str:
        """Show the tensor like one of the plain class."""
        pull(self._poptorch_links)
        with as_plain(self, self._poptorch_plain), quietly():
            return repr(self)


# A bound method is made anew at each access, and is equal to the one before.
_PLAIN_FUNCTIONS = (Tensor.__torch_function__, nn.Parameter.__torch_function__)


class WrappedModel(_Wrapped, nn.Module):
    def copyWeightsToHostIfNeeded(self) -> bool:
        """Read the weights back if the device has newer ones, and return True in that case."""
        return pull(type(self)._poptorch_links)

    def destroy(self) -> None:
        """Free the device and unwrap the module, which can then be wrapped again."""
        source = type(self)._poptorch_links[0].source()
        if source is not None:
            source.destroy()
        else:  # the executor is gone
            unwrap(self)

    def __getattribute__(self, name: str) -> Any:
        if name in ("_buffers", "_parameters", "forward"):
            pull(type(self)._poptorch_links)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, Tensor):
            pull(type(self)._poptorch_links)
        return value

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the plain class's state dict, with plain tensors that share the host's memory."""
        pull(type(self)._poptorch_links)
        with quietly():
            state = super().state_dict(
                *args, destination=destination, prefix=prefix, keep_vars=keep_vars
            )
            plain: Dict[int, Any] = {}
            for name, value in state.items():
                if isinstance(value, WrappedTensor):
                    # One tensor of two names stays one.
                    state[name] = plain.setdefault(id(value), copy.copy(value))
        return state

    def __copy__(self) -> nn.Module:
        """Return a shallow copy, which has the same parameters and is wrapped too."""
        wrapped = type(self)
        with as_plain(self, self._poptorch_plain):
            result: nn.Module = copy.copy(self)
        result.__class__ = wrapped
        return result


def links_of(model: nn.Module) -> Tuple[ExecutorLink, ...]:
    """Return the links of a module to the executors that have wrapped it; empty of a plain one."""
    return type(model)._poptorch_links if isinstance(model, WrappedModel) else ()


def isWrapped(value: object) -> bool:
    """Return True for a module, parameter or buffer that a training executor has wrapped."""
    return isinstance(value, _Wrapped)


def living(links: Tuple[ExecutorLink, ...]) -> Tuple[ExecutorLink, ...]:
    return tuple(link for link in links if link.source() is not None)


def set_links(tensor: Tensor, links: Tuple[ExecutorLink, ...]) -> None:
    """Wrap a plain tensor for these executors; without any it stays plain."""
    if not links:
        return
    plain = type(tensor)
    name = "PoptorchParameter" if isinstance(tensor, nn.Parameter) else "PoptorchBuffer"
    tensor.__class__ = subclass(name, WrappedTensor, plain, links)


_classes: weakref.WeakValueDictionary[Tuple[Any, ...], type] = weakref.WeakValueDictionary()


def subclass(name: str, mixin: type, plain: type, links: Tuple[ExecutorLink, ...]) -> type:
    key = (name, plain, tuple(id(link) for link in links))
    wrapped = _classes.get(key)
    if wrapped is not None and wrapped._poptorch_links == links:  # type: ignore[attr-defined]
        return wrapped
    namespace = {
        "_poptorch_plain": plain,
        "_poptorch_links": links,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
    }
    wrapped = types.new_class(name, (mixin, plain), exec_body=lambda body: body.update(namespace))
    _classes[key] = wrapped
    return wrapped


def unwrap_tensor(tensor: Tensor, link: ExecutorLink) -> None:
    kind = type(tensor)
    if issubclass(kind, WrappedTensor) and link in kind._poptorch_links:
        tensor.__class__ = kind._poptorch_plain
        set_links(tensor, tuple(other for other in kind._poptorch_links if other is not link))


def unwrap(model: nn.Module, source: Optional[WeightSource] = None) -> None:
    """Make the module, its parameters and its buffers plain again, without reading weights back.

    Args:
        source: whose wrapping goes; by default that of the module, whoever made it. Parameters
            that another executor has wrapped too stay wrapped for that one.
    """
    rewrapModelIfNecessary(model)
    links = links_of(model)
    if source is not None:
        links = tuple(link for link in links if link.source() is source)
    with quietly():
        for link in links:
            tensors = [reference() for reference in link.tensors]
            for tensor in [*tensors, *(tensor for _, tensor in tensors_of(model))]:
                if tensor is not None:
                    unwrap_tensor(tensor, link)
        if links and isWrapped(model):
            model.__class__ = type(model)._poptorch_plain  # type: ignore[attr-defined]


def tensors_of(model: nn.Module) -> List[Tuple[str, Tensor]]:
    with quietly():
        return [*model.named_parameters(), *model.named_buffers()]


# The wrapped class of each object that is plain for a while.
_set_aside: Any = WeakIdKeyDictionary()


def unwrapModelIfNecessary(model: nn.Module) -> None:
    """Make the module, its parameters and its buffers plain until they are wrapped again.

    They are brought up to date first. Until ``rewrapModelIfNecessary`` a look at them doesn't ask
    the device, whose newer weights only ``copyWeightsToHost`` brings.
    """
    for value in [model, *(tensor for _, tensor in tensors_of(model))]:
        if isWrapped(value):
            kind: Any = type(value)
            pull(kind._poptorch_links)
            _set_aside[value] = kind
            value.__class__ = kind._poptorch_plain


def rewrapModelIfNecessary(model: nn.Module) -> None:
    """Take ``unwrapModelIfNecessary`` back, for the executors that are still there."""
    for value in [model, *(tensor for _, tensor in tensors_of(model))]:
        kind = _set_aside.pop(value, None)
        if kind is None or type(value) is not kind._poptorch_plain:
            continue
        if living(kind._poptorch_links):
            value.__class__ = kind
