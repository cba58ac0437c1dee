"""Facts about types and sizes of tensors."""

from __future__ import annotations

import dataclasses
from typing import Tuple

import torch
from torch import Tensor

from ipufit.engines.ipu.preflight.report import (
    LIMITED,
    SUPPORTED,
    UNSUPPORTED,
    Fact,
    Line,
    dispatcher,
    guide,
)

__all__ = ["CHANGED", "TENSORS", "DeviceTensor", "dtype_name"]

# The subject of what is said of buffers that forward changes.
CHANGED = "changed"


@dataclasses.dataclass(frozen=True)
class DeviceTensor:
    """A tensor that goes to the device.

    Attributes:
        tensor: of which only type and shape matter.
        in_module: whether it is a weight or a buffer, not a part of the batch.
    """

    tensor: Tensor
    in_module: bool


def _inputs(line: int) -> Line:
    return Line("poptorch/source/PoplarExecutable.cpp", line)


# By type: the line that takes it as it is.
_TAKEN = {"uint8": 52, "int8": 56, "float32": 60, "float16": 64, "int16": 68, "int32": 72}
_TAKEN["bool"] = 76


def _taken(name: str) -> Fact:
    says = "the device has it"
    return Fact("dtypes", name, name, SUPPORTED, says, (_inputs(_TAKEN[name]),))


def _narrowed(name: str, says: str, cure: str, *places: Line) -> Fact:
    """Make a fact about a part of the batch."""
    return Fact(
        "dtypes", name, name, LIMITED, says, places, cure, lambda tensor: not tensor.in_module
    )


def _refused(name: str, place: Line) -> Fact:
    """Make a fact about a weight or a buffer."""
    return Fact(
        "dtypes",
        f"{name} in the module",
        name,
        UNSUPPORTED,
        "a device computes in float16 and float32, and weights would lose digits",
        (guide("overview", 971), place),
        "Convert the module with module.float() or module.half().",
        lambda tensor: bool(tensor.in_module),
    )


TENSORS: Tuple[Fact, ...] = (
    *(_taken(name) for name in _TAKEN),
    Fact(
        "dtypes",
        "int64",
        "int64",
        LIMITED,
        "it becomes int32: larger numbers don't fit",
        (Line("poptorch/source/Utils.cpp", 145), _inputs(80)),
    ),
    _narrowed("float64", "it becomes float32", "", _inputs(90)),
    _narrowed("bfloat16", "it becomes float16 or float32", "Pass float32.", _inputs(91)),
    _refused("float64", Line("poptorch/source/Utils.cpp", 143)),
    _refused(
        "bfloat16",
        Line("poptorch/source/type_and_constant_canonicalization/CastUnsupportedInputs.cpp", 23),
    ),
    *(
        Fact(
            "dtypes",
            name,
            name,
            UNSUPPORTED,
            "the device has no complex numbers",
            (_inputs(101),),
            "Keep real and imaginary part in tensors of their own.",
        )
        for name in ("complex64", "complex128")
    ),
    Fact(
        "dtypes",
        "a buffer of integers that changes",
        CHANGED,
        UNSUPPORTED,
        "weights and buffers that are not floating point are constants",
        (Line("poptorch/source/dispatch_tracer/dispatchers/JitDispatch.cpp", 113),),
        "Make it a buffer of float32.",
        lambda dtype: not dtype.is_floating_point,
    ),
    Fact(
        "dtypes",
        "a buffer that changes",
        CHANGED,
        LIMITED,
        "buffers are not kept alike between replicas: each has values of its own",
        (guide("overview", 1028), Line("poptorch/source/InplaceOps.cpp", 229)),
        "",
        lambda dtype: bool(dtype.is_floating_point),
    ),
    Fact(
        "dtypes",
        "no elements",
        "*",
        UNSUPPORTED,
        "tensors without elements are not supported",
        (dispatcher("Tensor.cpp", 303),),
        "Leave the empty tensor out.",
        lambda tensor: tensor.tensor.numel() == 0,
    ),
)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as "float32"."""
    return str(dtype).replace("torch.", "")
