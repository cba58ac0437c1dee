"""Encoder of values as JSON and tensors, and its decoder, which runs no code that a file names.

A JSON object is always a tag with its content: ``{"tuple": [...]}``. Only classes that the program
has already imported are looked up, and none of their code is called.
"""

from __future__ import annotations

import collections
import enum
import math
import re
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ipufit.poptorch._errors import error

__all__ = ["Decoder", "Encoder", "InvalidContent", "class_path", "imported_class"]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DEVICES = ("cpu", "cuda", "meta")
_ENUMS = "ipufit.poptorch.enums"
_NAMED_IN_TORCH = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


class InvalidContent(ValueError):
    """The content of a file is malformed, or not supported."""


def class_path(kind: type) -> str:
    """Return module and qualified name of a class, as ``"package.module:Class.Inner"``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def imported_class(path: object, base: type) -> Optional[type]:
    """Return an already imported subclass of ``base`` by its path, or None if there is none."""
    if not isinstance(path, str) or path.count(":") != 1:
        raise InvalidContent(f"{path!r} is not the name of a class")
    module, _, name = path.partition(":")
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        # vars and not getattr: an attribute may be computed.
        target = vars(target).get(part) if isinstance(target, (type, type(sys))) else None
    return target if isinstance(target, type) and issubclass(target, base) else None


class Encoder:
    """Encodes values as JSON, with their tensors beside it.

    Attributes:
        tensors: the tensors that the JSON refers to, by name.
        handlers: encoders of further types: (type, tag, function that returns JSON).
    """

    def __init__(self) -> None:
        self.tensors: Dict[str, Tensor] = {}
        self.handlers: List[Tuple[type, str, Callable[[Any], Any]]] = []
        # The tensors are kept: a number of one that is gone could come again.
        self._numbered: Dict[int, Tuple[str, Tensor]] = {}

    def encode(self, value: object) -> Any:
        """Encode a value as JSON.

        Raises:
            Error: a file can't hold a value of this type.
        """
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        for kind, tag, handler in self.handlers:
            if isinstance(value, kind):
                return {tag: handler(value)}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple, dict)):
            return self._container(value)
        return self._atom(value)

    def _tensor(self, tensor: Tensor) -> Any:
        if tensor.device.type == "meta":
            return {"shape": [self.encode(tensor.dtype), list(tensor.shape)]}
        if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_quantized:
            raise error(
                f"a file holds dense tensors of real numbers, got one of {tensor.dtype} and "
                f"{tensor.layout}. Convert it before you save."
            )
        if id(tensor) not in self._numbered:
            name = f"t{len(self._numbered)}"
            self._numbered[id(tensor)] = (name, tensor)
            # A copy: safetensors refuses tensors that share memory.
            dense = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            self.tensors[name] = dense
        name, _ = self._numbered[id(tensor)]
        if isinstance(tensor, nn.Parameter):
            return {"parameter": [name, tensor.requires_grad]}
        return {"tensor": name}

    def _container(self, value: Any) -> Any:
        kind = type(value)
        if kind is list or (isinstance(value, list) and kind.__module__.startswith("torch.fx")):
            return [self.encode(item) for item in value]
        if isinstance(value, dict):
            items = [[self.encode(key), self.encode(item)] for key, item in value.items()]
            if kind is dict or kind.__module__.startswith("torch.fx"):
                return {"dict": items}
            return {"mapping": [class_path(kind), items]}
        if kind is tuple:
            return {"tuple": [self.encode(item) for item in value]}
        if kind is torch.Size:
            return {"size": list(value)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            parts = [self.encode(item) for item in value]
            return {"namedtuple": [class_path(kind), list(value._fields), parts]}
        raise self._refusal(value)

    def _atom(self, value: object) -> Any:
        if isinstance(value, enum.Enum) and type(value).__module__ == _ENUMS:
            return {"enum": [type(value).__name__, value.name]}
        for tag, kind in _NAMED_IN_TORCH.items():
            if isinstance(value, kind):
                return {tag: str(value).rpartition(".")[2]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, complex):
            return {"complex": [self.encode(value.real), self.encode(value.imag)]}
        if isinstance(value, slice):
            return {"slice": [self.encode(part) for part in (value.start, value.stop, value.step)]}
        raise self._refusal(value)

    def _refusal(self, value: object) -> Exception:
        return error(
            f"a file can't hold a value of type {class_path(type(value)).replace(':', '.')}: it "
            "holds tensors, numbers, texts, None, and lists, tuples and dicts of them. Use one of "
            "these instead."
        )


class Decoder:
    """Decodes the JSON of an ``Encoder``; every name in it is checked.

    Attributes:
        handlers: decoders of further tags, functions of the JSON.
    """

    def __init__(self, tensors: Dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._parameters: Dict[str, nn.Parameter] = {}
        self.handlers: Dict[str, Callable[[Any], Any]] = {}

    def decode(self, data: object) -> Any:
        """Decode a value from JSON.

        Raises:
            InvalidContent: no value is written like this.
        """
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict) or len(data) != 1:
            raise InvalidContent("a value must have exactly one tag")
        ((tag, content),) = data.items()
        if tag in self.handlers:
            return self.handlers[tag](content)
        method = getattr(self, f"_read_{tag}", None) if _IDENTIFIER.match(tag) else None
        if method is None and tag not in _NAMED_IN_TORCH:
            raise InvalidContent(f"{tag!r} is not a kind of value")
        try:
            return self._named_in_torch(tag, content) if method is None else method(content)
        except (InvalidContent, RecursionError):
            raise
        except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as reason:
            raise InvalidContent(f"a value of kind {tag!r} is malformed: {reason}") from reason

    def _named_in_torch(self, tag: str, name: Any) -> Any:
        value = vars(torch).get(name)
        if not isinstance(value, _NAMED_IN_TORCH[tag]):
            raise InvalidContent(f"{name!r} is not a {tag}")
        return value

    def _read_float(self, text: object) -> float:
        if text not in ("inf", "-inf", "nan"):
            raise InvalidContent(f"{text!r} is not a number")
        return float(text)

    def _read_complex(self, parts: Any) -> complex:
        real, imaginary = (self.decode(part) for part in parts)
        return complex(real, imaginary)

    def _read_tuple(self, items: object) -> Tuple[Any, ...]:
        return tuple([self.decode(item) for item in _list(items)])

    def _read_size(self, items: object) -> torch.Size:
        return torch.Size(_whole_numbers(items))

    def _read_slice(self, parts: Any) -> slice:
        start, stop, step = (self.decode(part) for part in parts)
        return slice(start, stop, step)

    def _read_device(self, text: object) -> torch.device:
        if not isinstance(text, str) or text.partition(":")[0] not in _DEVICES:
            raise InvalidContent(f"{text!r} is not a device")
        return torch.device(text)

    def _read_enum(self, names: Any) -> Any:
        kind, name = names
        enum_class = imported_class(f"{_ENUMS}:{kind}", enum.Enum)
        if enum_class is None or name not in enum_class.__members__:  # type: ignore[attr-defined]
            raise InvalidContent(f"{kind}.{name} is not an option")
        return enum_class.__members__[name]  # type: ignore[attr-defined]

    def _read_shape(self, parts: Any) -> Tensor:
        dtype, shape = parts
        kind = self.decode(dtype)
        if not isinstance(kind, torch.dtype):
            raise InvalidContent(f"{dtype!r} is not a dtype")
        return torch.empty(_whole_numbers(shape), dtype=kind, device="meta")

    def _read_tensor(self, name: object) -> Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise InvalidContent(f"it holds no tensor {name!r}")
        return self._tensors[name]

    def _read_parameter(self, parts: Any) -> nn.Parameter:
        name, requires_grad = parts
        if name not in self._parameters:
            self._parameters[name] = nn.Parameter(self._read_tensor(name), bool(requires_grad))
        return self._parameters[name]

    def _items(self, items: object) -> Dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in _list(items)}

    def _read_dict(self, items: object) -> Dict[Any, Any]:
        return self._items(items)

    def _read_mapping(self, parts: Any) -> Any:
        path, items = parts
        kind = imported_class(path, dict)
        if kind is None:
            raise InvalidContent(
                f"it has a dict of type {path!r}, which is not imported: import it first"
            )
        # The methods of the built-in class: those of the named one are not called.
        base: Any = collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict
        result = base.__new__(kind)
        for key, item in self._items(items).items():
            base.__setitem__(result, key, item)
        return result

    def _read_namedtuple(self, parts: Any) -> Any:
        path, fields, items = parts
        if not all(isinstance(text, str) and _IDENTIFIER.match(text) for text in fields):
            raise InvalidContent(f"{fields!r} are not the names of fields")
        values = [self.decode(item) for item in _list(items)]
        if len(values) != len(fields):
            raise InvalidContent(f"a {path!r} has {len(fields)} fields")
        kind: Any = imported_class(path, tuple)
        if kind is None or getattr(kind, "_fields", None) != tuple(fields):
            name = path.rpartition(":")[2].rpartition(".")[2]
            kind = collections.namedtuple(name, fields)  # type: ignore[misc,no-redef]
        # The method of the built-in class: that of the named one is not called.
        return tuple.__new__(kind, values)


def _list(value: object) -> List[Any]:
    if not isinstance(value, list):
        raise InvalidContent("a list was expected")
    return value


def _whole_numbers(value: Any) -> List[int]:
    for number in _list(value):
        if type(number) is not int or number < 0:
            raise InvalidContent(f"{number!r} is not a size")
    return list(value)
