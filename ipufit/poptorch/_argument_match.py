"""Compare the arguments of a later call with those that a program was compiled for."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, NoReturn, Sequence, Set

from torch import Tensor

from ipufit.poptorch._errors import error
from ipufit.poptorch._parsers import flattenTensorStructure, parser_of

__all__ = ["ADVICE", "compare", "compare_keys"]


ADVICE = (
    " The model is compiled for the arguments of its first call. To compile it for these, call "
    "destroy() on it and call it again, or wrap the module in a new inferenceModel() or "
    "trainingModel()."
)


def _mismatch(what: str, name: str, expected: Any, got: Any) -> NoReturn:
    raise error(f"{what} mismatch for {name}: expected {expected} but got {got}.{ADVICE}")


def _type_name(value: Any) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"


def compare(name: str, compiled: Any, actual: Any, differing: Set[str]) -> None:
    """Raise at the first difference between a compiled argument and that of a later call.

    A list whose tensors match but whose other items changed raises nothing: its name is added to
    ``differing``.
    """
    if isinstance(compiled, Tensor) and isinstance(actual, Tensor):
        if compiled.dtype != actual.dtype:
            _mismatch("Data type", name, compiled.dtype, actual.dtype)
        if compiled.shape != actual.shape:
            _mismatch("Shape", name, compiled.shape, actual.shape)
        return
    if type(compiled) is not type(actual):
        _mismatch("Type", name, _type_name(compiled), _type_name(actual))
    if parser_of(compiled) is not None:
        _compare_tensors(name, compiled, actual, differing)
    elif isinstance(compiled, dict):
        compare_keys(name, compiled, actual)
        for key, item in compiled.items():
            compare(f"{name}[{key}]", item, actual[key], differing)
    elif isinstance(compiled, tuple):
        _compare_items(name, compiled, actual, differing)
    elif isinstance(compiled, list) and flattenTensorStructure(compiled):
        _compare_tensors(name, compiled, actual, differing)
        if _differ(list(_constants(compiled)), list(_constants(actual))):
            differing.add(name)
    elif _differ(compiled, actual):
        _mismatch("Value", name, compiled, actual)


def _compare_items(
    name: str, compiled: Sequence[Any], actual: Sequence[Any], differing: Set[str]
) -> None:
    if len(compiled) != len(actual):
        raise error(
            f"Length mismatch for {name}: expected {len(compiled)} elements but got {len(actual)}."
            f"{ADVICE}"
        )
    for i, item in enumerate(compiled):
        compare(f"{name}[{i}]", item, actual[i], differing)


def _compare_tensors(name: str, compiled: Any, actual: Any, differing: Set[str]) -> None:
    """Compare only the tensors of two lists, or of two values with a custom parser, in order."""
    _compare_items(
        name, flattenTensorStructure(compiled), flattenTensorStructure(actual), differing
    )


def compare_keys(name: str, compiled: Mapping[Any, Any], actual: Mapping[Any, Any]) -> None:
    """Refuse keyword arguments or dict entries that were added or left out since compilation."""
    details = []
    for what, keys in [
        ("Unexpected", actual.keys() - compiled.keys()),
        ("Missing", compiled.keys() - actual.keys()),
    ]:
        if keys:
            details.append(f"{what} arguments: {', '.join(sorted(map(str, keys)))}")
    if details:
        raise error(f"Keys mismatch for {name}: {'. '.join(details)}.{ADVICE}")


def _constants(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers that are neither tensors nor values with a parser."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _constants(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _constants(item)
    elif not isinstance(value, Tensor) and parser_of(value) is None:
        yield value


def _differ(compiled: Any, actual: Any) -> bool:
    if compiled is actual:
        return False
    if isinstance(compiled, float) and isinstance(actual, float) and compiled != compiled:
        return actual == actual  # a nan is like another nan
    different = compiled != actual
    try:
        return bool(different)
    except (ValueError, RuntimeError):  # arrays compare element by element
        return bool(different.any())
