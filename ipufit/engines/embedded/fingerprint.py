"""What a recording depends on besides tensors: the Python values that were frozen into it."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Iterator, List, Optional, Tuple

from torch import Tensor, nn

from ipufit.losses import Loss

__all__ = ["called_objects", "fingerprint"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MEMBERS = frozenset({"_parameters", "_buffers", "_modules"})
_DEPTH = 6


def fingerprint(module: nn.Module) -> Tuple[Tuple[Any, ...], Tuple[object, ...]]:
    """The attributes of a module and all below it, such as a dropout's rate or train mode.

    Hooks on parameters count too, and the objects that the loss of a step module calls.

    Numbers and strings count by value, also in containers; a tensor that is no buffer by its
    version; anything else by identity.

    Returns:
        A hashable value that changes when one of them does, and the objects that must be kept alive
        so that no other one takes over their identity.
    """
    held: List[object] = []
    parts: List[Tuple[Any, ...]] = []
    for name, part in module.named_modules():
        own = {key: value for key, value in vars(part).items() if key not in _MEMBERS}
        parts.append((name, type(part), _freeze(own, _DEPTH, held)))
    for called in getattr(module, "called", ()):
        held.append(called)
        parts.append((id(called), _own_values(called, held)))
    for name, parameter in module.named_parameters():
        hooks = (parameter._backward_hooks or {}).values()
        parts.append((name, type(parameter), tuple(_freeze(hook, 0, held) for hook in hooks)))
    return tuple(parts), tuple(held)


def called_objects(loss: Optional[Loss]) -> Tuple[object, ...]:
    """Objects of the user's that a loss calls and that are no modules.

    Their attributes, such as the weight of a penalty, are frozen into a recording like those of a
    module.
    """
    parts = [] if loss is None else [loss, *(part.loss for part in getattr(loss, "parts", ()))]
    return tuple(owner for part in parts for owner in _owners(part.function))


def _owners(call: Any) -> Iterator[object]:
    if isinstance(call, functools.partial):
        yield from _owners(call.func)
    elif inspect.ismethod(call):
        yield from _owners(call.__self__)
    elif hasattr(call, "__dict__") and not (_is_code(call) or isinstance(call, nn.Module)):
        yield call


def _is_code(value: Any) -> bool:
    return isinstance(value, type) or inspect.isroutine(value)


def _freeze(value: Any, depth: int, held: List[object]) -> Any:
    if isinstance(value, _PLAIN):
        # 1, 1.0 and True are equal, and not the same to a program.
        return (type(value), value)
    if depth and isinstance(value, dict):
        return tuple((_freeze(k, 0, held), _freeze(v, depth - 1, held)) for k, v in value.items())
    if depth and isinstance(value, (list, tuple)):
        return (type(value), tuple(_freeze(item, depth - 1, held) for item in value))
    if depth and isinstance(value, (set, frozenset)):
        return (type(value), frozenset(_freeze(item, 0, held) for item in value))
    is_config = hasattr(value, "__dict__") and not isinstance(value, Tensor) and not callable(value)
    if depth and is_config:
        held.append(value)
        return (id(value), _freeze(vars(value), depth - 1, held))
    held.append(value)
    if isinstance(value, Tensor):
        return (id(value), value._version)
    return (id(value), _plain_attributes(value))


def _own_values(called: object, held: List[object]) -> Tuple[Any, ...]:
    """Numbers, strings and tensors; other objects may be whole experiments, and change always."""
    kinds = (*_PLAIN, Tensor, list, tuple, dict)
    own = {key: value for key, value in vars(called).items() if isinstance(value, kinds)}
    return tuple((key, _freeze(value, 1, held)) for key, value in own.items())


def _plain_attributes(value: Any) -> Tuple[Any, ...]:
    """Of an object that is called, its numbers and strings: what it holds besides may be large."""
    if isinstance(value, nn.Module) or _is_code(value):
        return ()
    own = getattr(value, "__dict__", {})
    return tuple((key, type(v), v) for key, v in own.items() if isinstance(v, _PLAIN))
