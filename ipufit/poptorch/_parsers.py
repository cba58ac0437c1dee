"""Flatten structures of tensors, and rebuild them with other tensors."""

from __future__ import annotations

import abc
import copy
import importlib.util
import itertools
import json
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Type

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ipufit.poptorch._logging import error
from ipufit.poptorch._operators.custom import attributes_lists
from ipufit.poptorch._tracing import tracing

ATTR_PREFIX = "attr:"


class ICustomArgParser(abc.ABC):
    """Splits objects of a custom type into tensors, and puts them together again.

    Both methods visit the tensors in one and the same order.
    """

    @abc.abstractmethod
    def yieldTensors(self, struct: object) -> Iterator[Tensor]:
        """Yield every tensor of the object."""

    @abc.abstractmethod
    def reconstruct(self, original_structure: object, tensor_iterator: Iterator[Tensor]) -> Any:
        """Return a new object like ``original_structure`` with the tensors of ``tensor_iterator``.

        Leave the original as it is: it stands for the arguments that the model was compiled with.
        """


_parsers: Dict[type, ICustomArgParser] = {}


def registerCustomArgParser(
    arg_data_type: Type[object], arg_parser: Optional[ICustomArgParser]
) -> None:
    """Register how arguments and outputs of a type and its subclasses are split into tensors.

    Args:
        arg_data_type: the type.
        arg_parser: takes the place of an earlier one; None removes it.
    Raises:
        Error: it is no ``ICustomArgParser``.
    """
    if arg_parser is None:
        _parsers.pop(arg_data_type, None)
        return
    if not isinstance(arg_parser, ICustomArgParser):
        raise error(
            "arg_parser must inherit from ICustomArgParser, but "
            f"registerCustomArgParser({arg_data_type.__name__}, ...) got {arg_parser!r}. Pass an "
            "instance of a subclass, or None to remove the parser."
        )
    _parsers[arg_data_type] = arg_parser


def registerGeometricCustomArgParsers() -> None:
    """Register the parsers of PyTorch Geometric's types, which ``poptorch_geometric`` brings.

    Raises:
        Error: that package is not installed, or can't be imported.
    """
    advice = (
        "registerGeometricCustomArgParsers() needs the package 'poptorch_geometric', which comes "
        "with the Poplar SDK, and 'torch_geometric'"
    )
    if importlib.util.find_spec("poptorch_geometric") is None:
        raise error(
            f"{advice}, but 'poptorch_geometric' is not installed. Register a parser for each of "
            "your types with registerCustomArgParser() instead."
        )
    try:
        types = importlib.import_module("poptorch_geometric.types")
        register = types.registerCustomArgParsers
    except (ImportError, AttributeError) as reason:
        raise error(f"{advice}, but it can't be used: {reason}.") from reason
    register()


def parser_of(value: object) -> Optional[ICustomArgParser]:
    """Return the parser of a value's type, or of the first registered type it is an instance of."""
    if not _parsers:
        return None
    parser = _parsers.get(type(value))
    if parser is not None:
        return parser
    return next((parser for kind, parser in _parsers.items() if isinstance(value, kind)), None)


def flattenTensorStructure(tensors: object, canonical_structure: object = None) -> List[Tensor]:
    """Return the tensors of lists, tuples, dicts and types with a parser, in one flat list.

    Args:
        tensors: the structure; what is no tensor in it is passed over.
        canonical_structure: one of the same form; its dicts say in which order keys come.
    """
    return list(_leaves(tensors, canonical_structure))


def _leaves(value: Any, like: Any) -> Iterator[Tensor]:
    parser = parser_of(value)
    if parser is not None:
        yield from parser.yieldTensors(value)
    elif isinstance(value, dict):
        for key in value if like is None else like:
            yield from _leaves(value[key], None if like is None else like[key])
    elif isinstance(value, (list, tuple)):
        for item, other in zip(value, itertools.repeat(None) if like is None else like):
            yield from _leaves(item, other)
    elif isinstance(value, Tensor):
        yield value


def _every(tensor: Tensor) -> bool:
    return True


def reconstructTensorStructure(
    structure: object, values: Iterable[object], filter_fn: Callable[[Tensor], bool] = _every
) -> Any:
    """Return a copy of a structure with other tensors; everything else is copied as it is.

    Args:
        structure: as for ``flattenTensorStructure``.
        values: one for each tensor, in that order.
        filter_fn: tensors for which it is false stay, and take no value.
    Raises:
        Error: there are fewer values than tensors.
    """
    count = itertools.count()
    counted = zip(values, count)
    try:
        return _rebuilt(structure, (value for value, _ in counted), filter_fn)
    except StopIteration:
        raise error(
            f"a structure holds more tensors than there are values for it, which are {next(count)}."
            " Pass one value for each tensor; a custom parser's reconstruct() takes as many as its "
            "yieldTensors() yields."
        ) from None


def _rebuilt(value: object, values: Iterator[object], wanted: Callable[[Tensor], bool]) -> object:
    parser = parser_of(value)
    if parser is not None:
        # Its own tensors and no others: a parser may take all that its iterator holds.
        tensors: Any = iter([next(values) for _ in parser.yieldTensors(value)])
        return parser.reconstruct(value, tensors)
    if isinstance(value, dict):
        items = {key: _rebuilt(item, values, wanted) for key, item in value.items()}
        if type(value) is dict:
            return items
        # A subclass may have a constructor of its own (a defaultdict's), and attributes.
        result = copy.copy(value)
        for key, item in items.items():
            result[key] = item
        return result
    if isinstance(value, (list, tuple)):
        parts = [_rebuilt(item, values, wanted) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(parts)
        return parts if type(value) is list else type(value)(parts)
    if isinstance(value, Tensor) and wanted(value):
        return next(values)
    return value


def accessAttributes(attribute_id_str: str) -> Dict[str, Any]:
    """Return the attributes of a custom operator.

    Args:
        attribute_id_str: a JSON object, or "attr:" and the number that ``custom_op`` gave them.
    Raises:
        ValueError: it is neither, or no attributes have this number.
    """
    if not isinstance(attribute_id_str, str):
        raise ValueError(
            "Wrong type for attribute_id_str: expected a string, got "
            f"{type(attribute_id_str).__name__}."
        )
    if attribute_id_str.startswith("{"):
        parsed: Dict[str, object] = json.loads(attribute_id_str)
        return parsed
    if not attribute_id_str.startswith(ATTR_PREFIX):
        raise ValueError(
            f"Invalid attribute_id_str: expected a JSON object or {ATTR_PREFIX!r} and a number in "
            f"hexadecimal, got {attribute_id_str!r}."
        )
    number = int(attribute_id_str[len(ATTR_PREFIX) :], 16)
    if number == id(None):
        return {}
    # The number is looked up and never followed: it is text, and might point anywhere.
    for candidate in attributes_lists:
        if id(candidate) == number:
            attributes: Dict[str, object] = candidate
            return attributes
    raise ValueError(
        f"Invalid attribute_id_str: no custom_op of this process has the attributes "
        f"{attribute_id_str!r}."
    )


_ids = WeakTensorKeyDictionary()
_next_id = itertools.count(1)


def getIpuTensorId(x: Tensor) -> int:
    """Return the number of a tensor of the model, which is the same at every call.

    Raises:
        Error: no model is being recorded, so that no tensor is on a device.
    """
    if tracing() is None:
        raise error(
            "You may only call getIpuTensorId on an IPU tensor, and outside of a model's forward "
            "no tensor is one. Call it inside forward, behind isRunningOnIpu()."
        )
    if x not in _ids:
        _ids[x] = next(_next_id)
    number: int = _ids[x]
    return number
