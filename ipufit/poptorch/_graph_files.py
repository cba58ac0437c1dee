"""Recorded programs as JSON: a list of nodes with operators by name."""

from __future__ import annotations

import keyword
import operator
import re
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from ipufit.poptorch._codec import Decoder, Encoder, InvalidContent
from ipufit.poptorch._errors import error

__all__ = ["CALL_CPU", "graph_from_json", "graph_to_json", "reads_graphs", "writes_graphs"]

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
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def _is_name(text: object) -> bool:
    """Return True for a text that may be a name in the source that fx generates."""
    return isinstance(text, str) and bool(_IDENTIFIER.match(text)) and not keyword.iskeyword(text)


def graph_to_json(graph: fx.GraphModule) -> Tuple[Dict[str, Any], Dict[str, Tensor]]:
    """Convert a recorded program to JSON and the tensors that the JSON refers to.

    Raises:
        Error: the program calls something that a file can't name.
    """
    encoder = Encoder()
    writes_graphs(encoder)
    content = encoder.encode(graph)
    return content["graph"], encoder.tensors


def graph_from_json(content: Dict[str, Any], tensors: Dict[str, Tensor]) -> fx.GraphModule:
    """Read a program from JSON.

    Raises:
        InvalidContent: it is none.
    """
    decoder = Decoder(tensors)
    reads_graphs(decoder)
    result: fx.GraphModule = decoder.decode({"graph": content})
    return result


def writes_graphs(encoder: Encoder) -> None:
    """Register handlers for programs and their nodes with an encoder."""

    def graph(module: fx.GraphModule) -> Any:
        nodes = []
        attributes: Dict[str, Any] = {}
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


def _node_to_json(node: fx.Node, encoder: Encoder) -> Dict[str, Any]:
    entry: Dict[str, Any] = {"op": node.op, "name": node.name}
    if node.op == "call_function":
        entry["target"] = _function_name(node.target)
    elif node.op == "get_attr":
        entry["target"] = node.target
    elif node.op not in ("placeholder", "output"):
        raise error(
            f"the recorded program holds a node of kind {node.op!r} ({node.target}), which a file "
            "can't hold. Save the module's state_dict() instead."
        )
    if node.op in ("call_function", "output"):
        entry["args"] = [encoder.encode(item) for item in node.args]
        entry["kwargs"] = [[name, encoder.encode(item)] for name, item in node.kwargs.items()]
    return entry


def _attribute(module: nn.Module, name: str) -> Any:
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
            for entry in _entries(content, "nodes"):
                _add_node(result, root, entry, decoder, open_graphs[-1])
            result.lint()
        except (InvalidContent, RecursionError):
            raise
        except (RuntimeError, TypeError, ValueError) as reason:
            raise InvalidContent(f"it holds no sound program: {reason}") from reason
        finally:
            open_graphs.pop()
        if not result.nodes or next(iter(reversed(result.nodes))).op != "output":
            raise InvalidContent("a program has no output")
        return fx.GraphModule(root, result)

    decoder.handlers["graph"] = graph
    decoder.handlers["node"] = node


def _entries(content: object, key: str) -> List[Any]:
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise InvalidContent(f"a program has no {key}")
    return entries


def _pairs(content: object, key: str) -> List[Tuple[Any, Any]]:
    entries = _entries(content, key)
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
