"""Blocks as a model opens and closes them, and modules as text that shows them."""

from __future__ import annotations

import builtins
import functools
from typing import Any, Callable, List, Optional

import torch

from ipufit.partition.entered_blocks import BLOCK_CLASSES, EnteredBlocks, recordings
from ipufit.poptorch._errors import error
from ipufit.poptorch._tracing import tracing

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "LegacyBeginBlockFn",
    "module_repr",
    "print",
    "removeBlocks",
]


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
        self, layer_to_call: Any, user_id: Optional[str] = None, ipu_id: Optional[int] = None
    ) -> None:
        super().__init__()
        self._layer_to_call = layer_to_call
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
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
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a block: a decorator. Arguments are those of :class:`Block`."""

    def decorator(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
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
