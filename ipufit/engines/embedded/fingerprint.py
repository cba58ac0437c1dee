"""What a recording depends on besides tensors: the Python values that were frozen into it."""

from __future__ import annotations

from typing import Any, List, Tuple

from torch import Tensor, nn

__all__ = ["fingerprint"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MEMBERS = frozenset({"_parameters", "_buffers", "_modules"})
_DEPTH = 6


def fingerprint(module: nn.Module) -> Tuple[Tuple[Any, ...], Tuple[object, ...]]:
    """The attributes of a module and all below it, such as a dropout's rate or train mode.

    Hooks on parameters count too.

    Numbers and strings count by value, also in containers; a tensor that is no buffer by its
    version; anything else by identity.

    Returns:
        A hashable value that changes when one of them does, and the objects that must be kept alive
        so that no other one takes over their identity.
    """
    held: List[object] = []
    parts = []
    for name, part in module.named_modules():
        own = {key: value for key, value in vars(part).items() if key not in _MEMBERS}
        parts.append((name, type(part), _freeze(own, _DEPTH, held)))
    for name, parameter in module.named_parameters():
        hooks = (parameter._backward_hooks or {}).values()
        parts.append((name, type(parameter), tuple(_freeze(hook, 0, held) for hook in hooks)))
    return tuple(parts), tuple(held)


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
    return (id(value), value._version if isinstance(value, Tensor) else 0)
