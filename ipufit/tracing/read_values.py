"""Python values that the code of forward and loss reads from outside: globals, closures, classes.

Attributes of modules can be listed; of globals there are too many. So the code is asked: the names
in it, those in the functions and methods of the user's that it calls, and so on.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any, List, Optional, Set, Tuple

from torch import Tensor, nn

from ipufit.tracing.generators import generator_state
from ipufit.tracing.user_lines import is_users, users_module

__all__ = ["PLAIN", "CodeReader", "is_array"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)
# What is called of a module that is recorded; of a LightningModule, its steps.
_ENTRIES = ("forward", "__call__", "training_step", "validation_step", "test_step", "predict_step")
# Objects within objects, such as config.model.rate.
_DEPTH = 4


class CodeReader:
    """Values that code can read, found by the names in it.

    Args:
        step: a module; the functions that a loss of its own calls are in ``step.functions``.

    Attributes:
        values: plain values, containers of them, arrays and tensors, each behind a title for people
            such as "ALPHA" or "Config.alpha".
        generators: objects that draw random numbers, likewise.
        names: all names in the code, those of attributes included, and texts that may be some.
    """

    def __init__(self, step: nn.Module) -> None:
        self.values: List[Tuple[str, object]] = []
        self.generators: List[Tuple[str, object]] = []
        self.names: Set[str] = set()
        self._seen: Set[Tuple[int, Optional[type]]] = set()
        for kind in {type(part): None for part in step.modules()}:
            for base in kind.__mro__:
                if _is_of_users(base):
                    for entry in _ENTRIES:
                        self._read(vars(base).get(entry), kind)
        for part in step.modules():
            self._read(vars(part).get("forward"), type(part))
            for name, value in vars(part).items():
                if name in self.names and _is_code(value):
                    self._read(value)
            for hooks in ("_forward_hooks", "_forward_pre_hooks"):
                for hook in vars(part).get(hooks, {}).values():
                    self._read(hook)
        for function in getattr(step, "functions", ()):
            self._read(function)

    def _read(self, value: object, kind: Optional[type] = None) -> None:
        """Follow a function, or what stands for one.

        Args:
            value: anything; what has no code of the user's is passed over.
            kind: the class whose method it is.
        """
        if isinstance(value, functools.partial):
            for place, argument in (*enumerate(value.args), *value.keywords.items()):
                if isinstance(argument, _CONTAINERS):
                    self.values.append((f"argument {place!r} of a partial", argument))
            return self._read(value.func)
        if isinstance(value, property):
            return self._read(value.fget, kind)
        if isinstance(value, (staticmethod, classmethod)):
            return self._read(value.__func__, kind)
        if isinstance(value, types.MethodType):
            return self._read(value.__func__, type(value.__self__))
        if not isinstance(value, types.FunctionType):
            call = type(value).__dict__.get("__call__")
            if isinstance(call, types.FunctionType) and not isinstance(value, nn.Module):
                self._read(call, type(value))
            return None
        if (id(value), kind) in self._seen or not is_users(value.__code__.co_filename):
            return None
        self._seen.add((id(value), kind))
        names = _names(value.__code__)
        self.names |= names
        for name in sorted(names):
            if name in value.__globals__:
                self._note(name, value.__globals__[name], names, _DEPTH)
        self._read_own_variables(value, names)
        for name in sorted(names) if kind is not None else ():
            self._note_member(kind, name, names)
        return None

    def _read_own_variables(self, function: types.FunctionType, names: Set[str]) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if name != "__class__":
                # A wrapped function belongs to its wrapper, wherever it is defined.
                self._note(name, content, names, _DEPTH, is_inside=True)
        positional = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        defaulted = zip(positional[len(positional) - len(defaults) :], defaults)
        for name, default in (*defaulted, *(function.__kwdefaults__ or {}).items()):
            if not isinstance(default, (*PLAIN, type)):
                self._note(name, default, names, _DEPTH)

    def _note_member(self, kind: Any, name: str, names: Set[str]) -> None:
        """Note the value that ``self.name`` reads from a class of the user's."""
        for base in kind.__mro__:
            if name in vars(base) and _is_of_users(base):
                self._note(f"{kind.__name__}.{name}", vars(base)[name], names, _DEPTH, kind=kind)
                return

    def _note(
        self,
        title: str,
        value: object,
        names: Set[str],
        depth: int,
        is_inside: bool = False,
        kind: Optional[type] = None,
    ) -> None:
        if isinstance(value, (*PLAIN, *_CONTAINERS, Tensor)) or is_array(value):
            self.values.append((title, value))
        elif generator_state(value) is not None:
            self.generators.append((title, value))
        elif _is_code(value) or kind is not None:
            if is_inside or kind is not None or users_module(getattr(value, "func", value)):
                self._read(value, kind)
        elif depth and not isinstance(value, nn.Module):
            self._note_object(title, value, names, depth)

    def _note_object(self, title: str, value: object, names: Set[str], depth: int) -> None:
        """Note attributes of a class, a module or another object that the code has names for."""
        if isinstance(value, (type, types.ModuleType)) and not _is_of_users(value):
            return
        if isinstance(value, type):
            for name in sorted(names):
                self._note_member(value, name, names)
            return
        for name in sorted(names.intersection(getattr(value, "__dict__", ()))):
            self._note(f"{title}.{name}", vars(value)[name], names, depth - 1)
        if _is_of_users(type(value)):
            for name in (*sorted(names), "__call__"):
                self._note_member(type(value), name, names)


def _names(code: types.CodeType) -> Set[str]:
    """Names and texts in a function's code, and in that of functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return names


def _is_code(value: object) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, functools.partial))


def _is_of_users(value: object) -> bool:
    """Say whether a class or a module is neither torch's, ipufit's nor Python's own."""
    if isinstance(value, types.ModuleType):
        return value.__name__ == "__main__" or is_users(getattr(value, "__file__", None) or "<>")
    module = sys.modules.get(value.__module__)
    return module is not None and _is_of_users(module)


def is_array(value: object) -> bool:
    """Say whether a value is an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
