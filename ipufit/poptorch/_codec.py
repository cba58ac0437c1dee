"""Values of the stand-in's files as JSON and tensors, and back; nothing that a file names is run.

Beside what every document holds, these have parameters, shapes, sets, torch's constants, named
tuples, and recorded programs: lists of nodes with operators by name. Only classes that the program
has already imported are looked up, and none of their code is called.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import keyword
import operator
import re
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from ipufit.poptorch._logging import error
from ipufit.poptorch._operators.custom import CALL_CPU
from ipufit.utils.codec import MALFORMED, Codec, ValueType

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DEVICES = ("cpu", "cuda", "meta")
_ENUMS = "ipufit.poptorch.enums"
_NAMED_IN_TORCH = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


# Of a file, by name: whatever the codec takes.
Values = Dict[str, Any]


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
    except MALFORMED as reason:
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


def make_codec() -> Codec:
    """Return what writes the values of one file, or reads them: one object in two places stays one.

    Raises, when it is used:
        Error: a file can't hold a value of this type.
        InvalidContent: no value is written like this.
    """
    # What is written of each parameter, and the parameter that was made of what was read.
    tensors: Dict[nn.Parameter, Tensor] = {}
    parameters: Dict[Tensor, nn.Parameter] = {}

    def without_gradient(parameter: nn.Parameter) -> List[object]:
        return [tensors.setdefault(parameter, parameter.detach()), parameter.requires_grad]

    def parameter(parts: Tuple[Tensor, bool]) -> nn.Parameter:
        tensor, requires_grad = parts
        if tensor not in parameters:
            parameters[tensor] = nn.Parameter(tensor, bool(requires_grad))
        return parameters[tensor]

    by_object = ValueType(
        "parameter", lambda v: isinstance(v, nn.Parameter), without_gradient, parameter
    )
    return Codec(_refused, _rejected, (*_KINDS, by_object), shares=True)


def _refused(place: str, fault: str) -> Exception:
    return error(
        "a file holds tensors, numbers, texts, None, and lists, tuples, sets and dicts of them, "
        f"but {place} {fault}. Use one of these instead."
    )


def _rejected(place: str, fault: str) -> Exception:
    return InvalidContent(f"{place} {fault}")


def _shape(parts: Tuple[torch.dtype, Sequence[int]]) -> Tensor:
    dtype, shape = parts
    if not isinstance(dtype, torch.dtype):
        raise InvalidContent(f"{dtype!r} is not a dtype")
    return torch.empty(_size(shape), dtype=dtype, device="meta")


def _size(numbers: Sequence[int]) -> torch.Size:
    for number in numbers:
        if type(number) is not int or number < 0:
            raise InvalidContent(f"{number!r} is not a size")
    return torch.Size(numbers)


def _has_other_keys(value: object) -> bool:
    return type(value) is dict and not all(type(key) in (str, int) for key in value)


def _mapping(parts: Tuple[str, Sequence[Tuple[object, object]]]) -> object:
    path, items = parts
    kind = imported_class(path, dict)
    if kind is None:
        raise InvalidContent(
            f"it has a dict of type {path!r}, which is not imported: import it first"
        )
    # The methods of the built-in class: those of the named one are not called.
    base: Any = collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict
    result = base.__new__(kind)
    for key, item in items:
        base.__setitem__(result, key, item)
    return result


def _named_tuple(parts: Tuple[str, Sequence[str], Sequence[object]]) -> object:
    path, fields, items = parts
    if not all(isinstance(text, str) and _IDENTIFIER.match(text) for text in fields):
        raise InvalidContent(f"{fields!r} are not the names of fields")
    if len(items) != len(fields):
        raise InvalidContent(f"a {path!r} has {len(fields)} fields")
    kind: Any = imported_class(path, tuple)
    if kind is None or getattr(kind, "_fields", None) != tuple(fields):
        name = path.rpartition(":")[2].rpartition(".")[2]
        kind = collections.namedtuple(name, fields)  # type: ignore[misc,no-redef]
    # The method of the built-in class: that of the named one is not called.
    return tuple.__new__(kind, items)


def _enum_member(parts: Tuple[str, str]) -> object:
    kind, name = parts
    enum_class = imported_class(f"{_ENUMS}:{kind}", enum.Enum)
    if enum_class is None or name not in enum_class.__members__:  # type: ignore[attr-defined]
        raise InvalidContent(f"{kind}.{name} is not an option")
    return enum_class.__members__[name]  # type: ignore[attr-defined]


def _named_in_torch(tag: str, kind: type) -> ValueType:
    """Return how one of torch's constants is written: by its name."""

    def constant(name: object) -> object:
        value = vars(torch).get(str(name))
        if not isinstance(value, kind):
            raise InvalidContent(f"{name!r} is not a {tag}")
        return value

    return ValueType(
        tag, lambda v: isinstance(v, kind), lambda v: str(v).rpartition(".")[2], constant
    )


def _device(text: str) -> torch.device:
    if text.partition(":")[0] not in _DEVICES:
        raise InvalidContent(f"{text!r} is not a device")
    return torch.device(text)


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


def _is_name(text: object) -> bool:
    """Return True for a text that may be a name in the source that fx generates."""
    return isinstance(text, str) and bool(_IDENTIFIER.match(text)) and not keyword.iskeyword(text)


def _graph_parts(module: fx.GraphModule) -> Values:
    read = [node.target for node in module.graph.nodes if node.op == "get_attr"]
    return {
        "nodes": [_node_parts(node) for node in module.graph.nodes],
        "attributes": [[name, _attribute(module, name)] for name in dict.fromkeys(read)],
    }


def _node_parts(node: fx.Node) -> Values:
    entry: Values = {"op": node.op, "name": node.name}
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
        entry["args"] = _plain(list(node.args))
        entry["kwargs"] = [[name, _plain(item)] for name, item in node.kwargs.items()]
    return entry


def _plain(value: object) -> object:
    """Replace the containers that torch.fx has of its own."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(map(_plain, value)) if type(value) is tuple else value


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
        # A Python function of the process that recorded it.
        if target is CALL_CPU:
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


@dataclasses.dataclass(frozen=True)
class _NodeName:
    """Stands for a node of the program that is being read."""

    name: object


def _graph(content: Values) -> fx.GraphModule:
    root = nn.Module()
    for name, value in _pairs(content, "attributes"):
        if not _is_name(name) or hasattr(root, name):
            raise InvalidContent(f"{name!r} can't be a name in a program")
        if isinstance(value, Tensor):
            root.register_buffer(name, value.detach())
        elif isinstance(value, fx.GraphModule):
            root.add_module(name, value)
        else:
            raise InvalidContent(f"{name!r} is neither a tensor nor a program")
    result = fx.Graph()
    nodes: Dict[str, fx.Node] = {}
    for entry in _entries(content, "nodes"):
        _add_node(result, root, entry, nodes)
    result.lint()
    if not result.nodes or next(iter(reversed(result.nodes))).op != "output":
        raise InvalidContent("a program has no output")
    return fx.GraphModule(root, result)


def _entries(content: Values, key: str) -> List[Any]:
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise InvalidContent(f"a program has no {key}")
    return entries


def _pairs(content: Values, key: str) -> Sequence[Any]:
    entries = _entries(content, key)
    if not all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
        raise InvalidContent(f"the {key} of a program must be pairs")
    return entries


def _add_node(graph: fx.Graph, root: nn.Module, entry: Values, nodes: Dict[str, fx.Node]) -> None:
    def resolve_node(value: Any) -> Any:
        """Replace what stands for a node."""
        if isinstance(value, _NodeName):
            if value.name not in nodes:
                raise InvalidContent(f"a program uses {value.name!r} before it is computed")
            return nodes[str(value.name)]
        return value

    if not isinstance(entry, dict):
        raise InvalidContent("a node of a program has no kind")
    kind, name = entry.get("op"), str(entry.get("name"))
    # A name becomes part of the source of the compiled program.
    if not _is_name(name) or name in nodes:
        raise InvalidContent(f"{name!r} can't be the name of a value in a program")
    args: Any = []
    kwargs: Any = {}
    if kind in ("call_function", "output"):
        args, kwargs = _entries(entry, "args"), dict(_pairs(entry, "kwargs"))
        for key in kwargs:
            if not _is_name(key):
                raise InvalidContent(f"{key!r} can't be the name of an argument")
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
    args, kwargs = (fx.node.map_aggregate(each, resolve_node) for each in (args, kwargs))
    nodes[name] = graph.create_node(kind, target, tuple(args), kwargs, name=name)


_KINDS = (
    ValueType(
        "shape",
        lambda v: isinstance(v, Tensor) and v.is_meta,
        lambda v: [v.dtype, list(v.shape)],
        _shape,
    ),
    ValueType("size", lambda v: type(v) is torch.Size, list, _size),
    ValueType("set", lambda v: type(v) is set, list, set),
    ValueType("pairs", _has_other_keys, lambda v: [list(pair) for pair in v.items()], dict),
    ValueType(
        "mapping",
        lambda v: isinstance(v, dict) and type(v) is not dict,
        lambda v: [class_path(type(v)), [list(pair) for pair in v.items()]],
        _mapping,
    ),
    ValueType(
        "namedtuple",
        lambda v: isinstance(v, tuple) and hasattr(v, "_fields"),
        lambda v: [class_path(type(v)), list(v._fields), list(v)],
        _named_tuple,
    ),
    ValueType(
        "enum",
        lambda v: isinstance(v, enum.Enum) and type(v).__module__ == _ENUMS,
        lambda v: [type(v).__name__, v.name],
        _enum_member,
    ),
    *(_named_in_torch(tag, kind) for tag, kind in _NAMED_IN_TORCH.items()),
    ValueType("device", lambda v: isinstance(v, torch.device), str, _device),
    ValueType(
        "complex",
        lambda v: isinstance(v, complex),
        lambda v: [v.real, v.imag],
        lambda parts: complex(*parts),
    ),
    ValueType(
        "slice",
        lambda v: isinstance(v, slice),
        lambda v: [v.start, v.stop, v.step],
        lambda parts: slice(*parts),
    ),
    ValueType("node", lambda v: isinstance(v, fx.Node), lambda v: v.name, _NodeName),
    ValueType("graph", lambda v: isinstance(v, fx.GraphModule), _graph_parts, _graph),
)
