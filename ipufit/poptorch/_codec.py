"""Values as JSON and tensors, and back; nothing that a file names is ever run.

A JSON object is always a tag with its content: ``{"tuple": [...]}``. Only classes that the program
has already imported are looked up, and none of their code is called. A recorded program is a list
of nodes with operators by name.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import keyword
import math
import operator
import re
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from ipufit.poptorch._logging import error

__all__ = [
    "CALL_CPU",
    "Decoder",
    "Encoder",
    "InvalidContent",
    "Values",
    "class_path",
    "imported_class",
    "reads_graphs",
    "refuse_malformed",
    "writes_graphs",
]


_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DEVICES = ("cpu", "cuda", "meta")
_ENUMS = "ipufit.poptorch.enums"
_NAMED_IN_TORCH = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


# Of a file, by name: whatever an encoder takes.
Values = Dict[str, Any]

Json = Union[None, bool, int, float, str, List["Json"], Dict[str, "Json"]]


class InvalidContent(ValueError):
    """The content of a file is malformed, or not supported."""


@contextlib.contextmanager
def refuse_malformed(what: str) -> Iterator[None]:
    """Say of malformed content what it is that can't be read.

    Args:
        what: begins the text, which goes on with what was wrong.
    Raises:
        InvalidContent: in the place of any error that content of another form causes.
    """
    try:
        yield
    except InvalidContent:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as reason:
        if isinstance(reason, RecursionError):
            raise
        raise InvalidContent(f"{what}: {reason!r}") from reason


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
        self.handlers: List[Tuple[type, str, Callable[[Any], Json]]] = []
        # The tensors are kept: a number of one that is gone could come again.
        self._numbered: Dict[int, Tuple[str, Tensor]] = {}

    def encode(self, value: object) -> Json:
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

    def _tensor(self, tensor: Tensor) -> Json:
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

    def _container(self, value: Any) -> Json:
        kind = type(value)
        if kind is list or (isinstance(value, list) and kind.__module__.startswith("torch.fx")):
            return [self.encode(item) for item in value]
        if isinstance(value, dict):
            items: Json = [[self.encode(key), self.encode(item)] for key, item in value.items()]
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

    def _atom(self, value: object) -> Json:
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
        self.handlers: Dict[str, Callable[[object], object]] = {}

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
        with refuse_malformed(f"a value of kind {tag!r} is malformed"):
            return self._named_in_torch(tag, content) if method is None else method(content)

    def _named_in_torch(self, tag: str, name: object) -> object:
        value = vars(torch).get(str(name))
        if not isinstance(value, _NAMED_IN_TORCH[tag]):
            raise InvalidContent(f"{name!r} is not a {tag}")
        return value

    def _read_float(self, text: object) -> float:
        if text not in ("inf", "-inf", "nan"):
            raise InvalidContent(f"{text!r} is not a number")
        return float(text)

    def _read_complex(self, parts: object) -> complex:
        real, imaginary = (self.decode(part) for part in _list(parts))
        return complex(real, imaginary)

    def _read_tuple(self, items: object) -> Tuple[object, ...]:
        return tuple([self.decode(item) for item in _list(items)])

    def _read_size(self, items: object) -> torch.Size:
        return torch.Size(_whole_numbers(items))

    def _read_slice(self, parts: object) -> slice:
        start, stop, step = (self.decode(part) for part in _list(parts))
        return slice(start, stop, step)

    def _read_device(self, text: object) -> torch.device:
        if not isinstance(text, str) or text.partition(":")[0] not in _DEVICES:
            raise InvalidContent(f"{text!r} is not a device")
        return torch.device(text)

    def _read_enum(self, names: object) -> object:
        kind, name = _list(names)
        enum_class = imported_class(f"{_ENUMS}:{kind}", enum.Enum)
        if enum_class is None or name not in enum_class.__members__:  # type: ignore[attr-defined]
            raise InvalidContent(f"{kind}.{name} is not an option")
        return enum_class.__members__[name]  # type: ignore[attr-defined]

    def _read_shape(self, parts: object) -> Tensor:
        dtype, shape = _list(parts)
        kind = self.decode(dtype)
        if not isinstance(kind, torch.dtype):
            raise InvalidContent(f"{dtype!r} is not a dtype")
        return torch.empty(_whole_numbers(shape), dtype=kind, device="meta")

    def _read_tensor(self, name: object) -> Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise InvalidContent(f"it holds no tensor {name!r}")
        return self._tensors[name]

    def _read_parameter(self, parts: object) -> nn.Parameter:
        name, requires_grad = _list(parts)
        if name not in self._parameters:
            self._parameters[name] = nn.Parameter(self._read_tensor(name), bool(requires_grad))
        return self._parameters[name]

    def _items(self, items: object) -> Dict[Any, object]:
        return {self.decode(key): self.decode(item) for key, item in _list(items)}

    def _read_dict(self, items: object) -> Dict[object, object]:
        return self._items(items)

    def _read_mapping(self, parts: object) -> object:
        path, items = _list(parts)
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

    def _read_namedtuple(self, parts: object) -> object:
        path, fields, items = _list(parts)
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


def _whole_numbers(value: object) -> List[int]:
    for number in _list(value):
        if type(number) is not int or number < 0:
            raise InvalidContent(f"{number!r} is not a size")
    return _list(value)


_NAMESPACES = ("aten", "prims", "ipufit", "ipufit_poptorch")
# These open files, take memory as it is, or call Python: nothing that a file may ask for.
_REFUSED = {
    "_index_put_impl",
    "_index_put_impl_",
    "call_cpu",
    "from_file",
    "resize",
    "resize_",
    "set",
    "set_",
}
# A Python function of the process that recorded it.
CALL_CPU = "ipufit_poptorch::call_cpu"


def _is_name(text: object) -> bool:
    """Return True for a text that may be a name in the source that fx generates."""
    return isinstance(text, str) and bool(_IDENTIFIER.match(text)) and not keyword.iskeyword(text)


def writes_graphs(encoder: Encoder) -> None:
    """Register handlers for programs and their nodes with an encoder."""

    def graph(module: fx.GraphModule) -> Json:
        nodes: List[Json] = []
        attributes: Dict[str, object] = {}
        for node in module.graph.nodes:
            nodes.append(_node_to_json(node, encoder))
            if node.op == "get_attr":
                attributes[node.target] = _attribute(module, node.target)
        return {
            "nodes": nodes,
            "attributes": [[name, encoder.encode(value)] for name, value in attributes.items()],
        }

    encoder.handlers.append((fx.GraphModule, "graph", graph))
    encoder.handlers.append((fx.Node, "node", lambda node: node.name))


def _node_to_json(node: fx.Node, encoder: Encoder) -> Dict[str, Json]:
    entry: Dict[str, Json] = {"op": node.op, "name": node.name}
    if node.op == "call_function":
        entry["target"] = _function_name(node.target)
    elif node.op == "get_attr":
        entry["target"] = str(node.target)
    elif node.op not in ("placeholder", "output"):
        raise error(
            f"the recorded program holds a node of kind {node.op!r} ({node.target}), which a file "
            "can't hold. Save the module's state_dict() instead."
        )
    if node.op in ("call_function", "output"):
        entry["args"] = [encoder.encode(item) for item in node.args]
        entry["kwargs"] = [[name, encoder.encode(item)] for name, item in node.kwargs.items()]
    return entry


def _attribute(module: nn.Module, name: str) -> object:
    value = getattr(module, name, None)
    if not isinstance(value, (Tensor, fx.GraphModule)) or not _is_name(name):
        raise error(
            f"the recorded program reads {name!r}, which is neither a tensor nor a program. Save "
            "the module's state_dict() instead."
        )
    return value


def _function_name(target: object) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, OpOverload):
        space, _, name = target._schema.name.partition("::")
        overload = target._schema.overload_name or "default"
        if space in _NAMESPACES and name not in _REFUSED:
            return f"{space}.{name}.{overload}"
        if target._schema.name == CALL_CPU:
            raise error(
                "the recorded program calls poptorch.CPU, a Python function, which a file can't "
                "hold: nothing in a file is ever run. Compile such a model where it is used."
            )
    raise error(
        f"the recorded program calls {target}, which a file can't hold: it holds operators of "
        f"{', '.join(_NAMESPACES)}. Leave this operator out, or save the module's state_dict() "
        "instead."
    )


def _function(name: object) -> Callable[..., Any]:
    if name == "getitem":
        return operator.getitem
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) != 3 or parts[0] not in _NAMESPACES or parts[1] in _REFUSED:
        raise InvalidContent(f"{name!r} is not an operator that a program may call")
    target: Any = torch.ops
    for part in parts:
        target = getattr(target, part, None) if _IDENTIFIER.match(part) else None
    if not isinstance(target, OpOverload):
        raise InvalidContent(f"this torch ({torch.__version__}) has no operator {name!r}")
    return target


def reads_graphs(decoder: Decoder) -> None:
    """Register handlers for programs and their nodes with a decoder."""
    # The nodes so far of the program that is being read; a program may hold others.
    open_graphs: List[Dict[str, fx.Node]] = []

    def node(name: object) -> fx.Node:
        if not open_graphs or not isinstance(name, str) or name not in open_graphs[-1]:
            raise InvalidContent(f"a program uses {name!r} before it is computed")
        return open_graphs[-1][name]

    def graph(content: object) -> fx.GraphModule:
        root = nn.Module()
        for name, value in _pairs(content, "attributes"):
            decoded = decoder.decode(value)
            if not _is_name(name) or hasattr(root, name):
                raise InvalidContent(f"{name!r} can't be a name in a program")
            if isinstance(decoded, Tensor):
                root.register_buffer(name, decoded.detach())
            elif isinstance(decoded, fx.GraphModule):
                root.add_module(name, decoded)
            else:
                raise InvalidContent(f"{name!r} is neither a tensor nor a program")
        result = fx.Graph()
        open_graphs.append({})
        try:
            with refuse_malformed("it holds no sound program"):
                for entry in _entries(content, "nodes"):
                    _add_node(result, root, entry, decoder, open_graphs[-1])
                result.lint()
        finally:
            open_graphs.pop()
        if not result.nodes or next(iter(reversed(result.nodes))).op != "output":
            raise InvalidContent("a program has no output")
        return fx.GraphModule(root, result)

    decoder.handlers["graph"] = graph
    decoder.handlers["node"] = node


def _entries(content: object, key: str) -> List[object]:
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise InvalidContent(f"a program has no {key}")
    return entries


def _pairs(content: object, key: str) -> List[Tuple[Any, Any]]:
    entries: List[Any] = _entries(content, key)
    if not all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
        raise InvalidContent(f"the {key} of a program must be pairs")
    return [(name, value) for name, value in entries]


def _add_node(
    graph: fx.Graph, root: nn.Module, entry: object, decoder: Decoder, nodes: Dict[str, fx.Node]
) -> None:
    if not isinstance(entry, dict):
        raise InvalidContent("a node of a program has no kind")
    kind, name = entry.get("op"), str(entry.get("name"))
    # A name becomes part of the source of the compiled program.
    if not _is_name(name) or name in nodes:
        raise InvalidContent(f"{name!r} can't be the name of a value in a program")
    args: Tuple[Any, ...] = ()
    kwargs: Dict[str, Any] = {}
    if kind in ("call_function", "output"):
        args = tuple([decoder.decode(item) for item in _entries(entry, "args")])
        for key, value in _pairs(entry, "kwargs"):
            if not _is_name(key):
                raise InvalidContent(f"{key!r} can't be the name of an argument")
            kwargs[key] = decoder.decode(value)
    if kind == "call_function":
        target: Any = _function(entry.get("target"))
    elif kind == "get_attr":
        target = entry.get("target")
        if not isinstance(target, str) or target not in {**root._buffers, **root._modules}:
            raise InvalidContent(f"a program reads {target!r}, which it does not hold")
    elif kind in ("placeholder", "output"):
        target = name
    else:
        raise InvalidContent(f"{kind!r} is not a kind of node")
    nodes[name] = graph.create_node(kind, target, args, kwargs, name=name)
