"""Hooks and substitutions that the user has registered for every compilation."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any, Callable, ClassVar, Iterator, List, Type

from torch.utils.hooks import RemovableHandle

__all__ = [
    "_OverwriteContextManager",
    "compile_hooks",
    "registerPostCompileHook",
    "registerPreCompileHook",
]

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
    """Call the hooks before and after a compilation."""
    try:
        _call(_before)
        yield
    finally:
        _call(_after)


def _call(hooks: OrderedDict[int, _Hook]) -> None:
    # A copy: a hook may remove itself.
    for hook in list(hooks.values()):
        hook()


class _OverwriteContextManager:
    """Lets every registered substitution replace something while a model is recorded.

    A substitution is a class whose objects have the methods ``replace`` and ``restore``.
    """

    _subsitution_manager_types: ClassVar[List[Type[Any]]] = []

    def __init__(self) -> None:
        self.substitution_managers: List[Any] = [kind() for kind in self._subsitution_manager_types]
        self._restoring = contextlib.ExitStack()

    def __enter__(self) -> _OverwriteContextManager:
        with contextlib.ExitStack() as restoring:
            for manager in self.substitution_managers:
                manager.replace()
                restoring.callback(manager.restore)
            # All have replaced something; if one fails, those before it restore it here.
            self._restoring = restoring.pop_all()
        return self

    def __exit__(self, exc_type: object, value: object, traceback: object) -> None:
        self._restoring.close()

    @classmethod
    def registerSubsitutionManager(cls, type: Type[Any]) -> None:
        """Use an object of this class in every recording.

        Args:
            type: called without arguments; its objects have the methods ``replace``, called as a
                recording begins, and ``restore``, called as it ends.
        """
        if type not in cls._subsitution_manager_types:
            cls._subsitution_manager_types.append(type)
