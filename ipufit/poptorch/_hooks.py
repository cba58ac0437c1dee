"""Functions of the user's that are called before and after every compilation."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any, Callable, Iterator

from torch.utils.hooks import RemovableHandle

__all__ = ["compile_hooks", "registerPostCompileHook", "registerPreCompileHook"]

_Hook = Callable[[], Any]

# In order of registration.
_before: OrderedDict[int, _Hook] = OrderedDict()
_after: OrderedDict[int, _Hook] = OrderedDict()


def registerPreCompileHook(hook: _Hook) -> RemovableHandle:
    """Call a function without arguments before any model is compiled.

    Returns:
        A handle whose ``remove()`` takes it back.
    Raises:
        RuntimeError: it can't be called.
    """
    return _register(_before, hook, "Pre-compile")


def registerPostCompileHook(hook: _Hook) -> RemovableHandle:
    """Call a function without arguments after any compilation, also after one that failed.

    Returns:
        A handle whose ``remove()`` takes it back.
    Raises:
        RuntimeError: it can't be called.
    """
    return _register(_after, hook, "Post-compile")


def _register(hooks: OrderedDict[int, _Hook], hook: _Hook, which: str) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(
            f"{which} hook must be callable, got {hook!r}. Pass a function without arguments."
        )
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@contextlib.contextmanager
def compile_hooks() -> Iterator[None]:
    """Around a compilation: the hooks are called as it begins and as it ends."""
    try:
        _call(_before)
        yield
    finally:
        _call(_after)


def _call(hooks: OrderedDict[int, _Hook]) -> None:
    # A copy: a hook may remove itself.
    for hook in list(hooks.values()):
        hook()
