"""Context managers of a model's forward: blocks, name scopes, and combined convolutions."""

from __future__ import annotations

import builtins
import functools
from typing import Any, Callable, Dict, List, Optional, Sequence, TypeVar, Union

import torch

from ipufit.partition.own_blocks import BLOCK_CLASSES, EnteredBlocks, recordings
from ipufit.poptorch import enums
from ipufit.poptorch._logging import error
from ipufit.poptorch._tracing import graph_so_far, tracing

T = TypeVar("T")


def _active_blocks() -> List[EnteredBlocks]:
    """Return the blocks of the compilation, if there is one, and those of all recordings."""
    trace = tracing()
    return [*([] if trace is None else [trace.blocks]), *recordings()]


class Block(torch.nn.Module):
    """A part of the model that has a name and may have an IPU; a context manager.

    ``with poptorch.Block("Encoder", ipu_id=0): ...`` Outside of a model that is being compiled
    it does nothing, and no value ever depends on it.

    Args:
        user_id: the name by which strategies know it; the same name is the same block. Without
            one it is numbered.
        ipu_id: which IPU of the replica it runs on.
    """

    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        super().__init__()
        self._user_id = user_id
        self._ipu_id = ipu_id

    @staticmethod
    def useAutoId() -> None:
        """Number the blocks without a name from "0" on; call it first in ``forward``."""
        for blocks in _active_blocks():
            blocks.use_auto_id()

    @staticmethod
    def start(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        """Begin a block that goes on until another one begins."""
        _begin(user_id, ipu_id)

    def __enter__(self) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __exit__(self, type: object, value: object, traceback: object) -> None:
        for blocks in _active_blocks():
            blocks.leave()


BLOCK_CLASSES.append(Block)


def _begin(
    user_id: Optional[str], ipu_id: Optional[int], owner: Optional[object] = None
) -> Optional[str]:
    """Start a block and return its name, which stays the name of an unnamed block.

    Where nothing is compiled no number is given for good, so that recordings number by the owner.
    """
    trace = tracing()
    if trace is not None:
        if user_id is None:
            user_id = trace.blocks.next_auto_id()
        trace.blocks.enter(user_id, ipu_id)
    for recording in recordings():
        name = user_id
        if name is None and owner is not None:
            name = recording.number_of(owner)
        recording.enter(name, ipu_id)
    return user_id


class _BlockHook:
    """Begins a block before a module's forward."""

    def __init__(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module: torch.nn.Module, input: object) -> None:
        self._user_id = _begin(self._user_id, self._ipu_id, self)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


class LegacyBeginBlockFn(torch.nn.Module):
    """A callable that starts a block at each call; :func:`BeginBlock` wraps functions in it."""

    def __init__(
        self,
        layer_to_call: Callable[..., object],
        user_id: Optional[str] = None,
        ipu_id: Optional[int] = None,
    ) -> None:
        super().__init__()
        self._layer_to_call = layer_to_call
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, *input: object, **kwargs: object) -> Any:
        """Start the block and call the function."""
        self._user_id = _begin(self._user_id, self._ipu_id, self)
        return self._layer_to_call(*input, **kwargs)


def BeginBlock(
    layer_to_call: object, user_id: Optional[str] = None, ipu_id: Optional[int] = None
) -> Any:
    """Start a block at each call of a module; it lasts until another one starts.

    Args:
        layer_to_call: the module, which is changed in place. A callable that is none is wrapped.
        user_id: as for :class:`Block`.
        ipu_id: as for :class:`Block`.
    Returns:
        The same module.
    Raises:
        Error: a block begins with it already, or it can't be called.
    """
    if not isinstance(layer_to_call, torch.nn.Module):
        if callable(layer_to_call):
            return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
        raise error(
            f"module is not an instance of torch.nn.Module or function. Got "
            f"{type(layer_to_call).__name__}: give BeginBlock the layer that begins the block."
        )
    if any(isinstance(hook, _BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
        raise error(
            "module has already been assigned to a block. Call poptorch.removeBlocks on it first."
        )
    layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
    return layer_to_call


def removeBlocks(module: torch.nn.Module) -> None:
    """Remove the blocks that :func:`BeginBlock` added to a module and its submodules."""
    if not isinstance(module, torch.nn.Module):
        raise AssertionError(
            f"removeBlocks expects a torch.nn.Module, got {type(module).__name__}."
        )
    for part in module.modules():
        hooks = part._forward_pre_hooks
        for key in [k for k, hook in hooks.items() if isinstance(hook, _BlockHook)]:
            del hooks[key]


def BlockFunction(
    user_id: Optional[str] = None, ipu_id: Optional[int] = None
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Make a function a block: a decorator. Arguments are those of :class:`Block`."""

    def decorator(func: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(func)
        def wrapper(*args: object, **kwargs: object) -> T:
            with Block(user_id, ipu_id):
                return func(*args, **kwargs)

        return wrapper

    return decorator


def module_repr(m: torch.nn.Module) -> str:
    """Return ``repr`` of a module, with the hooks that run before a submodule in front of it."""
    extra = m.extra_repr()
    lines = extra.split("\n") if extra else []
    only_extra = len(lines) == 1 and not m._modules
    for name, part in m._modules.items():
        text = "None" if part is None else module_repr(part)
        lines.append(f"({name}): " + text.replace("\n", "\n  "))
    hooks = "".join(f"{hook!r} " for hook in m._forward_pre_hooks.values())
    inside = "\n  ".join(lines)
    if lines and not only_extra:
        inside = f"\n  {inside}\n"
    kind: str = m._get_name()  # type: ignore[no-untyped-call]
    return f"{hooks}{kind}({inside})"


def print(m: object) -> None:
    """Print a module as ``module_repr`` shows it, and anything else as Python does."""
    builtins.print(module_repr(m) if isinstance(m, torch.nn.Module) else m)


class MultiConv:
    """Combines the convolutions inside into one operator of the device."""

    def __init__(self) -> None:
        # By the setter.
        self._per_convolution: Dict[str, Optional[Sequence[object]]] = {}

    @staticmethod
    def _validatePerConvProperty(name: str, value: Any, expected_scalar_type: type) -> Any:
        if value is None:
            return value
        if isinstance(value, expected_scalar_type):
            return (value,)
        several = isinstance(value, (list, tuple)) and len(value) > 0
        if several and all(isinstance(one, expected_scalar_type) for one in value):
            return value
        raise AssertionError(
            f"Invalid {name}! Expected a {expected_scalar_type.__name__}, or a list of one for "
            f"each convolution, got {value!r}."
        )

    def availableMemoryProportions(self, value: Union[float, List[float]]) -> MultiConv:
        """Set the proportion of memory for temporary data, for each convolution or for all."""
        values = self._validatePerConvProperty("available memory proportion", value, float)
        self._per_convolution["availableMemoryProportions"] = values
        return self

    def partialsTypes(self, value: Union[torch.dtype, List[torch.dtype]]) -> MultiConv:
        """Set the type of partial sums, for each convolution or for all: float or half."""
        codes = {torch.float32: 0, torch.float16: 1}
        values = value if isinstance(value, (list, tuple)) else (value,)
        for one in values:
            if not isinstance(one, torch.dtype) or one not in codes:
                raise ValueError(
                    f"Invalid partials types. Expecting torch.float or torch.half, got {one!r}."
                )
        self._per_convolution["partialsTypes"] = [codes[one] for one in values]
        return self

    def enableConvDithering(self, value: Union[bool, List[bool]]) -> MultiConv:
        """Turn dithering on or off, for each convolution or for all."""
        values = value if isinstance(value, (list, tuple)) or value is None else (value,)
        for one in values or ():
            if not isinstance(one, bool):
                raise ValueError(f"value must be bool or list of bools, got {one!r}.")
        self._per_convolution["enableConvDithering"] = values
        return self

    def planType(self, value: enums.MultiConvPlanType) -> MultiConv:
        """Accept how the convolutions run on a device: in parallel or one after another."""
        if value is not None and not isinstance(value, enums.MultiConvPlanType):
            raise AssertionError(
                f"Invalid plan type! Expected a poptorch.MultiConvPlanType, got {value!r}."
            )
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Accept the number of tiles reserved for each convolution on a device."""
        if not isinstance(value, int):
            raise AssertionError(f"Invalid reserved tiles! Expected an int, got {value!r}.")
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        """Accept the cycle back-off, a proportion between 0 and 1."""
        if not isinstance(value, float):
            raise AssertionError(f"Invalid cycle back off! Expected a float, got {value!r}.")
        return self

    def __enter__(self) -> None:
        trace = tracing()
        if trace is None:
            return
        if trace.multi_conv is not None:
            raise error(
                "Nested poptorch.MultiConv is not supported. Close the outer one first, or put "
                "all convolutions into it."
            )
        trace.multi_conv = self, len(graph_so_far())

    def __exit__(self, type: object, value: object, traceback: object) -> None:
        trace = tracing()
        if trace is None:
            return
        (_, before), trace.multi_conv = trace.multi_conv or (None, 0), None
        if type is not None:
            return
        convolution = torch.ops.aten.convolution.default
        # A transposed one is another operator on the device.
        count = sum(n.target is convolution and not n.args[6] for n in graph_so_far()[before:])
        if not count:
            raise error(
                "Unexpected end_multi_conv: there is no convolution in this poptorch.MultiConv. "
                "Put at least one into it, or remove it."
            )
        self._check_lengths(count)

    def _check_lengths(self, count: int) -> None:
        for name, values in self._per_convolution.items():
            if values is not None and len(values) not in (1, count):
                raise error(
                    f"poptorch.MultiConv.{name} expects one value, or one for each of its "
                    f"{count} convolutions, got {len(values)}."
                )


class NameScope:
    """Prefix the names of the operators inside, which ``getTensorNames`` lists.

    Args:
        name: the prefix.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise AssertionError(f"Parameter to NameScope must be a string, got {name!r}.")
        self.name = name

    def __enter__(self) -> None:
        push_name_scope(self.name)

    def __exit__(self, type: object, value: object, traceback: object) -> None:
        pop_name_scope()


def push_name_scope(name: str) -> None:
    """Prefix the names of operators from here on, until the scope is popped."""
    trace = tracing()
    if trace is not None:
        trace.activations.enter(name)


def pop_name_scope() -> None:
    """Remove the scope of the last ``push_name_scope``.

    Raises:
        Error: there is none in the model that is being recorded.
    """
    trace = tracing()
    if trace is not None:
        trace.activations.leave("")
