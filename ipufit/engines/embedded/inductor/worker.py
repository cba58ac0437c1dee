"""The process that compiles: reads a request from its directory, leaves a library there.

It ends when its standard input does, and takes the compilers that it has started with it.
TorchInductor knows oneDNN's matrix product from weights that it packs beforehand, and refuses any
other; here it is taught to call it with matrices that are no constants.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, Dict

import torch

from ipufit.engines.embedded.inductor.store import CALLS, LIBRARY
from ipufit.engines.embedded.passes.simplify import value_of
from ipufit.tracing import recurrent

_HALVES = (torch.float16, torch.bfloat16)
# Operators that torch computes in float32 on half precision, and TorchInductor otherwise: always,
# with a wider tensor of one number, and with numbers.
_ROUNDED_ONCE = ("addcdiv", "addcmul", "lerp", "mish_backward", "silu_backward")
_PRODUCTS, _SUMS = ("div", "mul"), ("add", "rsub", "sub")
REQUEST, ERROR = "request.json", "error.txt"
_NICENESS = 10
# Half precision is rounded after each operator, as where they run one by one.
_ROUNDS = "emulate_precision_casts"
# Bytes that two kernels must both read to become one. With few, those that both read coefficients
# of the optimizer do, and the gradients of many layers wait for each other.
_SHARED, _MUCH = "score_fusion_memory_threshold", 1024


def main(directory: str) -> int:
    """Compile the request in a directory, and leave the library there; 0 if it went well."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.nice(_NICENESS)
    place = Path(directory)
    try:
        _compile((place / REQUEST).read_text(), place)
    except BaseException as error:
        traceback.print_exc()
        (place / ERROR).write_text(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _compile(text: str, place: Path) -> None:
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    from ipufit.engines.embedded.inductor.update_spec import Request, UpdateFunction

    request = Request.of_json(text)
    torch.set_num_threads(request.threads)
    _allow_any_weight()
    examples = request.examples()
    with torch.no_grad():
        graph = make_fx(UpdateFunction(request.form), tracing_mode="fake")(*examples)
        _round_as_torch(graph.graph)
        options = _options(request.form.recomputes, graph)
        options["aot_inductor.output_path"] = str(place)
        compiled = Path(str(torch._inductor.aot_compile(graph, tuple(examples), options=options)))
    for name in (LIBRARY, CALLS):
        with contextlib.suppress(FileNotFoundError):
            compiled.with_suffix(Path(name).suffix).rename(place / name)


def _options(recomputes: bool, graph: torch.fx.GraphModule) -> Dict[str, object]:
    """Choose options of this TorchInductor for a graph."""
    options: Dict[str, object] = {_ROUNDS: True}
    if recomputes:
        options[_SHARED] = _MUCH
    if any(node.target is recurrent.FORWARD for node in graph.graph.nodes):
        # What backward needs lies in the results, too, so that nothing else may be written there.
        options.update(allow_buffer_reuse=False, inplace_buffers=False)
    return {name: on for name, on in options.items() if hasattr(torch._inductor.config, name)}


def _round_as_torch(graph: torch.fx.Graph) -> None:
    """Have operators on half precision compute in float32 and round once, as torch does it.

    TorchInductor rounds a tensor of one number, such as a rate, before a product; makes several
    operators of some, and rounds after each; and lets others read what is not rounded yet. To add
    or subtract, torch rounds numbers, but not their product.

    Args:
        graph: is changed.
    """
    aten, cast = torch.ops.aten, torch.ops.prims.convert_element_type.default
    for node in list(graph.nodes):
        value, inputs = value_of(node), node.all_input_nodes
        if value is None or value.dtype not in _HALVES or not str(node.target).startswith("aten."):
            continue
        _, name, overload = str(node.target).split(".")
        kind, numbers = name.rstrip("_"), [*node.args[1:], *node.kwargs.values()]
        is_sum = kind in _SUMS and any(isinstance(each, (int, float)) for each in numbers)
        is_product = kind in _PRODUCTS and any(
            e.meta["val"].dtype != value.dtype for e in inputs[1:]
        )
        if kind not in _ROUNDED_ONCE and not is_sum and not is_product:
            continue

        def widen(each: torch.fx.node.Argument) -> torch.fx.node.Argument:
            if isinstance(each, torch.fx.Node):
                return graph.call_function(cast, (each, torch.float32))
            # Called before the loop goes on.
            return torch.tensor(each, dtype=value.dtype).item() if is_sum else each  # noqa: B023

        with graph.inserting_before(node):
            args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), widen)
            wide = graph.call_function(getattr(getattr(aten, kind), overload), args, kwargs)
            result = graph.call_function(cast, (wide, value.dtype))
            if name != kind:
                result = graph.call_function(aten.copy_.default, (node.args[0], result))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _allow_any_weight() -> None:
    """Have TorchInductor call ``mkldnn._linear_pointwise`` with whatever it is given.

    Where this torch is built without oneDNN, or TorchInductor is organised otherwise, nothing
    happens, and it says itself what it can't compile.
    """
    try:
        from torch._inductor import ir, lowering, mkldnn_ir, mkldnn_lowerings

        operator: Any = torch.ops.mkldnn._linear_pointwise.default
        kernel = mkldnn_ir.LinearUnary
        created: Any = mkldnn_ir._create_output_node
    except (ImportError, AttributeError):
        return
    assert mkldnn_lowerings is not None  # registers what is replaced here

    def lower(
        x: Any, weight: Any, bias: Any, attr: object, scalars: object, algorithm: object
    ) -> Any:
        inputs = [kernel.require_contiguous(kernel.realize_input(x))]
        # The kernel reads its second matrix in any layout, the others it would copy.
        inputs.append(kernel.realize_input(weight))
        rest = [attr, scalars or [-1], algorithm]
        if bias is None:
            rest.insert(0, None)
        else:
            inputs.append(kernel.require_contiguous(kernel.realize_input(bias)))
        rows, columns = x.get_size()[:-1], weight.get_size()[0]
        layout = ir.FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=[*rows, columns])
        output_node = kernel(layout=layout, inputs=inputs, constant_args=rest)
        return ir.TensorBox.create(created(output_node))

    lowering.lowerings[operator] = lower
