"""oneDNN's matrix product in compiled programs, of matrices that are no constants.

TorchInductor knows the operator from weights that it packs beforehand, and refuses any other.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allow_any_weight"]


def allow_any_weight() -> None:
    """Have TorchInductor call ``mkldnn._linear_pointwise`` with whatever it is given.

    Where this torch is built without oneDNN, or TorchInductor is organised otherwise, nothing
    happens, and it says itself what it can't compile.
    """
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    try:
        from torch._inductor import ir, lowering, mkldnn_ir, mkldnn_lowerings

        kernel = mkldnn_ir.LinearUnary
        created: Any = mkldnn_ir._create_output_node
    except (ImportError, AttributeError):
        return
    if operator is None:
        return
    assert mkldnn_lowerings is not None  # registers what is replaced here

    def lower(x: Any, weight: Any, bias: Any, attr: Any, scalars: Any, algorithm: Any) -> Any:
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
        made = kernel(layout=layout, inputs=inputs, constant_args=rest)
        return ir.TensorBox.create(created(made))

    lowering.lowerings[operator.default] = lower
