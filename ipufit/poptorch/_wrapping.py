"""Wrap the user's module while a device trains it, so that reading a weight fetches it first.

The object stays the user's own. Its class, and the classes of its parameters and buffers, are
replaced by subclasses that call the training executor back; versions say who has newer weights.
:class:`HostWeights` transfers parameters and buffers to the device and back.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import itertools
import threading
import types
import weakref
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    MutableMapping,
    Optional,
    Protocol,
    Sequence,
    SupportsIndex,
    Tuple,
    Type,
    Union,
)

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ipufit.poptorch._device import Device
from ipufit.poptorch._logging import error, logger


@contextlib.contextmanager
def as_plain(value: object, plain: Type[object]) -> Iterator[None]:
    """Give an object its original class back inside the block.

    Args:
        value: the object, whose class was exchanged.
        plain: its original class.
    """
    exchanged = type(value)
    value.__class__ = plain
    try:
        yield
    finally:
        value.__class__ = exchanged


def reduced_as_plain(
    value: object, plain: type, protocol: SupportsIndex
) -> Union[str, Tuple[Any, ...]]:
    """Return ``__reduce_ex__`` of the original class, so that unpickling gives a plain object."""
    with as_plain(value, plain):
        reduced: Union[str, Tuple[Any, ...]] = value.__reduce_ex__(protocol)
    if isinstance(reduced, str):
        return reduced
    function, args, *rest = reduced
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Pickle insists that the class under this name is the object's own.
        if args[1:]:
            function, args = functools.partial(args[0].__new__, *args), ()
        else:
            function = copyreg._reconstructor  # type: ignore[attr-defined]
            args = (args[0], object, None)
    return (function, args, *rest)


# One count for all: a version never comes back, whichever executor made it.
_versions = itertools.count(1)


class WeightSource(Protocol):
    """Interface through which the user's model asks a training executor for newer weights."""

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Read the weights back if the device has newer ones, and return True in that case."""

    def destroy(self) -> None:
        """Free the device and unwrap the model."""


def _nobody() -> None:
    """Replace the reference to an executor in copies, which have none."""


class ExecutorLink:
    """Weak link from wrapped objects to their executor, and who of both has newer weights.

    Attributes:
        source: returns the executor, or None if it is gone.
        tensors: returns of each tensor that was wrapped for it.
        dirty: the device trained since the host's weights were last equal to its own.
        version: number of the host's weights, which changes with each reading.
        first_version: the number before any reading.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source: Callable[[], Optional[WeightSource]] = weakref.ref(source)
        self.tensors: List[weakref.ref[Tensor]] = []
        self.dirty = False
        self.version = self.first_version = next(_versions)

    def __getstate__(self) -> Dict[str, Any]:
        """Return the state without the executor, because nobody owns the weights of a copy."""
        return {**vars(self), "source": _nobody, "tensors": []}

    def pulled(self) -> None:
        """Record that the host is about to get the device's weights: reading them is no access."""
        self.dirty = False
        self.version = next(_versions)


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

    def __reduce_ex__(self, protocol: SupportsIndex) -> Union[str, Tuple[Any, ...]]:
        """Pickle as the plain class, so that a file can be read without this package."""
        pull(self._poptorch_links)
        with quietly():
            return reduced_as_plain(self, self._poptorch_plain, protocol)

    def __deepcopy__(self, memo: Dict[int, object]) -> object:
        """Return a plain copy, because a copy does not share the executor's weights."""
        pull(self._poptorch_links)
        with as_plain(self, self._poptorch_plain), quietly():
            return copy.deepcopy(self, memo)


class WrappedTensor(_Wrapped):
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Tuple[type, ...],
        args: Tuple[object, ...] = (),
        kwargs: Optional[Dict[str, object]] = None,
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

    def __repr__(self, **kwargs: object) -> str:
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
            plain: Dict[int, object] = {}
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


def links_of(value: object) -> Tuple[ExecutorLink, ...]:
    """Return the links to the executors that have wrapped an object; empty of a plain one."""
    return type(value)._poptorch_links if isinstance(value, _Wrapped) else ()


def isWrapped(value: object) -> bool:
    """Return True for a module, parameter or buffer that a training executor has wrapped."""
    return isinstance(value, _Wrapped)


def living(links: Tuple[ExecutorLink, ...]) -> Tuple[ExecutorLink, ...]:
    return tuple(link for link in links if link.source() is not None)


def set_links(tensor: Tensor, links: Tuple[ExecutorLink, ...]) -> None:
    """Wrap a tensor for these executors and no others; without any it is plain."""
    if isinstance(tensor, WrappedTensor):
        with quietly():
            tensor.__class__ = type(tensor)._poptorch_plain
    if not links:
        return
    plain = type(tensor)
    name = "PoptorchParameter" if isinstance(tensor, nn.Parameter) else "PoptorchBuffer"
    tensor.__class__ = subclass(name, WrappedTensor, plain, links)


_classes: weakref.WeakValueDictionary[Tuple[object, ...], type] = weakref.WeakValueDictionary()


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
                if tensor is not None and link in links_of(tensor):
                    set_links(tensor, tuple(each for each in links_of(tensor) if each is not link))
        if links and isWrapped(model):
            model.__class__ = type(model)._poptorch_plain  # type: ignore[attr-defined]


def tensors_of(model: nn.Module) -> List[Tuple[str, Tensor]]:
    with quietly():
        return [*model.named_parameters(), *model.named_buffers()]


# The wrapped class of each object that is plain for a while.
_set_aside: MutableMapping[object, Type[_Wrapped]] = WeakIdKeyDictionary()


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


def check_not_wrapped(model: nn.Module) -> None:
    """Refuse a second training executor while the first one lives.

    Raises:
        RuntimeError: the module is wrapped.
    """
    if living(links_of(model)[:1]):
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on "
            "the model to unwrap before wrapping again."
        )


def wrap(model: nn.Module, link: ExecutorLink) -> None:
    """Make the module, its parameters and its buffers call the executor back when they are read.

    Called again for the same link, it takes in the tensors that were put in since.

    Raises:
        RuntimeError: another executor has wrapped the module.
        Error: a buffer is of a subclass of Tensor, or a parameter has no shape yet.
    """
    if link not in links_of(model):
        check_not_wrapped(model)
        if isWrapped(model):
            unwrap(model)
    with quietly():
        parameters: List[Tuple[str, Tensor]] = list(model.named_parameters())
        buffers = list(model.named_buffers())
    for name, tensor in parameters:
        _check_parameter(name, tensor)
    for name, tensor in buffers:
        _check_buffer(name, tensor, link)
    for _, tensor in [*parameters, *buffers]:
        links = links_of(tensor)
        if link not in links:
            # A parameter may be in several models that are trained: each is asked.
            set_links(tensor, (*living(links), link))
            link.tensors.append(weakref.ref(tensor))
    if not isWrapped(model):
        plain = type(model)
        model.__class__ = subclass(f"Poptorch{plain.__name__}", WrappedModel, plain, (link,))


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


def sharing_links(model: nn.Module) -> List[ExecutorLink]:
    """Return the links to the training executors that share weights with a module.

    The module need not be wrapped itself. Each executor reads newer weights back first.
    """
    links: Dict[ExecutorLink, None] = {}
    for value in [model, *(tensor for _, tensor in tensors_of(model))]:
        links.update(dict.fromkeys(links_of(value)))
    pull(tuple(links))
    return list(links)


def host_tensors(model: nn.Module) -> Dict[str, Tensor]:
    """Return plain tensors that share the memory of parameters and buffers, by name.

    A tensor with several names is returned under the first.
    """
    with quietly():
        return {name: tensor.detach() for name, tensor in tensors_of(model)}


def check_module(model: object) -> None:
    """Refuse a model that has no weights which could go to a device, as PopTorch does.

    Raises:
        AttributeError: it is a function, say.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise AttributeError(
            f"{kind!r} object has no attribute 'named_modules': a model must be a torch.nn.Module "
            f"to be compiled, got a {kind}. Call it in the forward of a module, and wrap that."
        )


class HostWeights:
    """Parameters and buffers of the user's module.

    Args:
        owner: the executor, which wrapped tensors ask.
        model: the user's module; wrapped in place when training.
        training: whether the device changes weights.
    """

    def __init__(self, owner: WeightSource, model: nn.Module, training: bool) -> None:
        # Weak: an executor goes as soon as its last user lets go of it.
        self._link = ExecutorLink(owner)
        self._model = model
        self._training = training
        # Versions of the host's weights that inference was given, by who trains them.
        self._uploaded: Dict[ExecutorLink, int] = {}
        if training:
            wrap(model, self._link)

    @property
    def is_dirty(self) -> bool:
        """True if the device has trained since its weights were last copied to the host."""
        return self._link.dirty

    def trained(self) -> None:
        """Record that the device has changed its weights."""
        self._link.dirty = True

    def parameters(self) -> Dict[str, Tensor]:
        """Return the host's parameters by name, without asking the device."""
        with quietly():
            return {name: tensor.detach() for name, tensor in self._model.named_parameters()}

    def buffers(self) -> Dict[str, Tensor]:
        """Return the host's buffers by name, without asking the device."""
        with quietly():
            return {name: tensor.detach() for name, tensor in self._model.named_buffers()}

    def trainable(self, groups: Sequence[Sequence[Tensor]]) -> List[List[str]]:
        """Return names of the optimizer's parameters that require a gradient, by group.

        Args:
            groups: the optimizer's parameters.

        Raises:
            KeyError: one of them is not the model's.
        """
        with quietly():
            names_by_pointer = {p.data_ptr(): name for name, p in self._model.named_parameters()}
            names = []
            for group in groups:
                foreign = [p for p in group if p.data_ptr() not in names_by_pointer]
                if foreign:
                    raise KeyError(
                        f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that "
                        "the model has not. Build the optimizer from model.parameters()."
                    )
                names.append([names_by_pointer[p.data_ptr()] for p in group if p.requires_grad])
            return names

    def pull(self, device: Device) -> None:
        """Copy the weights from the device to the host."""
        self._link.pulled()
        logger.debug("Writing weights from IPU to host")
        device.read(host_tensors(self._model))

    def push(self, device: Device) -> None:
        """Copy the weights from the host to the device."""
        self._link.dirty = False
        if not self._training:
            self._uploaded = {link: link.version for link in sharing_links(self._model)}
        logger.debug("Writing weights from host to IPU memory")
        device.write(host_tensors(self._model))

    def exchange(self, device: Device) -> None:
        """Copy newer weights from the device to the host, then all from the host to the device."""
        if self.is_dirty:
            logger.debug("Implicit copyWeightsToHost()")
            self.pull(device)
        self.push(device)

    def is_behind(self) -> bool:
        """Return True if weights were read back from a training device since the last upload.

        Each device that shares them is asked first for what it has newer, and one that was
        destroyed since still counts. A change on the host alone does not: ``copyWeightsToDevice``
        is for that.
        """
        for link in sharing_links(self._model):
            self._uploaded.setdefault(link, link.first_version)
        return any(link.version != version for link, version in self._uploaded.items())

    def push_buffers(self, device: Device, names: Sequence[str]) -> None:
        """Copy only these buffers from the host to the device."""
        self._link.dirty = False
        buffers = self.buffers()
        device.write({name: buffers[name] for name in names})

    def unwrap(self) -> None:
        """Restore the user's module as it was before it was wrapped."""
        if self._training:
            with torch.no_grad():
                unwrap(self._model, self._link.source())
