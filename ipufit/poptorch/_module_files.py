"""Encode a module as plain values, and rebuild a module of the same classes from them.

A file may only name classes, and only those that the program has imported already are used. Neither
their constructors nor any other code of theirs runs while reading; torch's own modules restore
themselves.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Dict, List, Tuple

import torch
from torch import Tensor, nn

from ipufit.poptorch._codec import Encoder, InvalidContent, class_path, imported_class
from ipufit.poptorch._errors import Error, error
from ipufit.poptorch._wrapping import isWrapped

__all__ = ["UnknownClass", "WeightsOnly", "module_from_values", "module_to_values"]

# What torch itself keeps of a module; the rest of its attributes are the user's.
_OWN = frozenset(nn.Module().__dict__)


class UnknownClass(Exception):
    """A class that a file names is not imported in this program."""


class WeightsOnly(nn.Module):
    """Replaces a module whose class is not imported, with its weights under their names.

    Args:
        path: the class, as "module:name".
    """

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.class_path = path

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Refuse the call, because the module's code is not there.

        Raises:
            Error: always.
        """
        module, _, name = self.class_path.partition(":")
        raise error(
            f"the file holds the compiled program and the weights of {name}, but not its Python "
            f"code, so that it can't be compiled again. Import {module} before poptorch.load(), "
            "or wrap a new model and load the state_dict() of this one into it."
        )


def module_to_values(model: nn.Module) -> List[Dict[str, Any]]:
    """Convert a module and its submodules to values that ``write_file`` takes.

    Raises:
        Error: it has hooks, or an attribute that a file can't hold; the message says where.
    """
    modules = list(model.modules())
    order = {id(module): number for number, module in enumerate(modules)}
    names = {id(module): name for name, module in model.named_modules()}
    return [_one(module, names[id(module)], order) for module in modules]


def _one(module: nn.Module, name: str, order: Dict[int, int]) -> Dict[str, Any]:
    kind = type(module)._poptorch_plain if isWrapped(module) else type(module)  # type: ignore[attr-defined]
    # What torch's own modules leave out of a file, they make anew.
    getstate = getattr(kind, "__getstate__", None) if _is_torchs(kind) else None
    state = module.__dict__ if getstate is None else getstate(module)
    for key, value in state.items():
        if key in _OWN and key.endswith("_hooks") and value:
            raise error(
                f"{name or 'the model'} has hooks ({key}), which a file can't hold. Remove them "
                "before you save, or save with export_model=False."
            )
    return {
        "class": class_path(kind),
        "training": module.training,
        "parameters": list(module._parameters.items()),
        "buffers": list(module._buffers.items()),
        "not_saved": sorted(module._non_persistent_buffers_set),
        "modules": [
            (key, None if child is None else order[id(child)])
            for key, child in module._modules.items()
        ],
        "attributes": [
            (key, _attribute(value, f"{name}.{key}" if name else key))
            for key, value in state.items()
            if key not in _OWN
        ],
    }


def _attribute(value: object, name: str) -> Tuple[str, Any]:
    function = getattr(value, "__name__", None)
    for place in (nn.functional, torch):
        path = f"{place.__name__}:{function}"
        if function and _functions().get(path) is value:
            return ("function", path)
    try:
        Encoder().encode(value)
    except Error as reason:
        raise error(
            f"the attribute {name} can't be saved: {reason.message} Or save with "
            "export_model=False."
        ) from reason
    return ("value", value)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


def module_from_values(values: Any) -> nn.Module:
    """Rebuild the module of ``module_to_values`` with classes that are imported in this program.

    Raises:
        UnknownClass: one is not.
        InvalidContent: no module is written like this.
    """
    try:
        modules = [_empty(entry["class"]) for entry in values]
        states = [_filled(module, entry, modules) for module, entry in zip(modules, values)]
        for module, state in zip(modules, states):
            # The method of nn.Module, but for classes of torch.
            kind: Any = type(module) if _is_torchs(type(module)) else nn.Module
            kind.__setstate__(module, {**module.__dict__, **state})
        return modules[0]
    except (UnknownClass, InvalidContent):
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as reason:
        raise InvalidContent(f"it holds no sound module: {reason}") from reason


def _empty(path: object) -> nn.Module:
    kind = imported_class(path, nn.Module)
    if kind is None:
        raise UnknownClass(path)
    module: nn.Module = object.__new__(kind)
    nn.Module.__init__(module)
    return module


def _filled(module: nn.Module, entry: Dict[str, Any], modules: List[nn.Module]) -> Dict[str, Any]:
    for name, parameter in entry["parameters"]:
        _expect(name, parameter, nn.Parameter)
        module._parameters[name] = parameter
    for name, buffer in entry["buffers"]:
        _expect(name, buffer, Tensor)
        module._buffers[name] = buffer
    for name, number in entry["modules"]:
        _expect(name, number, int)
        if number is not None and not 0 <= number < len(modules):
            raise InvalidContent(f"it has no module {number}")
        module._modules[name] = None if number is None else modules[number]
    module._non_persistent_buffers_set = set(entry["not_saved"])
    state = {"training": bool(entry["training"])}
    for name, (kind, value) in entry["attributes"]:
        if not isinstance(name, str) or name in _OWN:
            raise InvalidContent(f"{name!r} can't be an attribute of a module")
        state[name] = _function(value) if kind == "function" else value
    return state


def _expect(name: object, value: object, kind: type) -> None:
    if not isinstance(name, str) or not (value is None or isinstance(value, kind)):
        raise InvalidContent(f"{name!r} is no {kind.__name__}")


def _function(path: object) -> Any:
    function = _functions().get(path) if isinstance(path, str) else None
    if function is None:
        raise InvalidContent(f"{path!r} is not a function of torch")
    return function


@functools.lru_cache(maxsize=None)
def _functions() -> Dict[str, Any]:
    """Map paths to functions of torch that modules have as attributes, such as activations."""
    functions = {}
    for name, value in vars(nn.functional).items():
        defined_here = getattr(value, "__module__", None) == nn.functional.__name__ and callable(
            value
        )
        if defined_here or isinstance(value, types.BuiltinFunctionType):
            functions[f"{nn.functional.__name__}:{name}"] = value
    for name in dir(torch._C._VariableFunctions):
        value = vars(torch).get(name)
        if not name.startswith("_") and name != "from_file" and callable(value):
            functions[f"torch:{name}"] = value
    return functions
