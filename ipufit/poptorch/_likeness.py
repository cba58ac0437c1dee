"""Whether later arguments are like those that a program was compiled for."""

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


def compare(name: str, compiled: Any, given: Any, differing: Set[str]) -> None:
    """Raise at the first difference; add to ``differing`` a list whose other items changed."""
    if isinstance(compiled, Tensor) and isinstance(given, Tensor):
        if compiled.dtype != given.dtype:
            _mismatch("Data type", name, compiled.dtype, given.dtype)
        if compiled.shape != given.shape:
            _mismatch("Shape", name, compiled.shape, given.shape)
        return
    if type(compiled) is not type(given):
        _mismatch("Type", name, _type_name(compiled), _type_name(given))
    if parser_of(compiled) is not None:
        _compare_tensors(name, compiled, given, differing)
    elif isinstance(compiled, dict):
        compare_keys(name, compiled, given)
        for key, item in compiled.items():
            compare(f"{name}[{key}]", item, given[key], differing)
    elif isinstance(compiled, tuple):
        _compare_items(name, compiled, given, differing)
    elif isinstance(compiled, list) and flattenTensorStructure(compiled):
        _compare_tensors(name, compiled, given, differing)
        if _differ(list(_constants(compiled)), list(_constants(given))):
            differing.add(name)
    elif _differ(compiled, given):
        _mismatch("Value", name, compiled, given)


def _compare_items(
    name: str, compiled: Sequence[Any], given: Sequence[Any], differing: Set[str]
) -> None:
    if len(compiled) != len(given):
        raise error(
            f"Length mismatch for {name}: expected {len(compiled)} elements but got {len(given)}."
            f"{ADVICE}"
        )
    for i, item in enumerate(compiled):
        compare(f"{name}[{i}]", item, given[i], differing)


def _compare_tensors(name: str, compiled: Any, given: Any, differing: Set[str]) -> None:
    """Only the tensors of both, in order: a list, or a type with a parser of its own."""
    _compare_items(name, flattenTensorStructure(compiled), flattenTensorStructure(given), differing)


def compare_keys(name: str, compiled: Mapping[Any, Any], given: Mapping[Any, Any]) -> None:
    details = []
    for what, keys in [
        ("Unexpected", given.keys() - compiled.keys()),
        ("Missing", compiled.keys() - given.keys()),
    ]:
        if keys:
            details.append(f"{what} arguments: {', '.join(sorted(map(str, keys)))}")
    if details:
        raise error(f"Keys mismatch for {name}: {'. '.join(details)}.{ADVICE}")


def _constants(value: Any) -> Iterator[Any]:
    """What is no tensor, and what holds it, in order."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _constants(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _constants(item)
    elif not isinstance(value, Tensor) and parser_of(value) is None:
        yield value


def _differ(compiled: Any, given: Any) -> bool:
    if compiled is given:
        return False
    if isinstance(compiled, float) and isinstance(given, float) and compiled != compiled:
        return given == given  # a nan is like another nan
    different = compiled != given
    try:
        return bool(different)
    except (ValueError, RuntimeError):  # arrays compare element by element
        return bool(different.any())
