"""Custom operators compiled for an IPU: arguments are checked, but only hardware runs them."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.poptorch._errors import error
from ipufit.poptorch._tracing import tracing
from ipufit.tracing.ipu_only import is_for_this_engine

__all__ = ["attributes_lists", "custom_op"]

_LARGEST = torch.finfo(torch.float32).max

# The attributes of all custom operators so far.
attributes_lists: List[Dict[str, Any]] = []


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[Tensor],
    attributes: Optional[Dict[str, Any]] = None,
) -> List[Tensor]:
    """Call an operator that is compiled for IPUs, which only IPU hardware can run.

    ``FastGatherLastDim`` of ``poptorch.custom_ops``, which PopTorch brings along, runs here too: it
    takes the data and an index of its rank, and gives what ``torch.gather`` does on the last
    dimension.

    Args:
        inputs: its tensors.
        name: its name.
        domain: where the name belongs.
        domain_version: version of the domain.
        example_outputs: tensors like its results.
        attributes: numbers, ASCII texts, and lists or tuples of one of these types.
    Returns:
        Outside of a model that is being compiled: zeros like ``example_outputs``.
    Raises:
        ValueError: attributes of another kind.
        Error: a model with it is being compiled, or an `ipufit.Model` on the embedded engine.
    """
    if attributes is not None:
        _check_attributes(attributes)
        if not any(_same(attributes, other) for other in attributes_lists):
            attributes_lists.append(attributes)
    if tracing() is None and not is_for_this_engine():
        return [torch.zeros_like(output) for output in example_outputs]
    shipped = _SHIPPED.get((domain, name, domain_version))
    if shipped is not None:
        return shipped(inputs)
    for value in (attributes or {}).values():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            _check_range(one)
    refusal = error(
        f"poptorch.custom_op: {name!r} of {domain!r}, version {domain_version}, is code compiled "
        "for an IPU, which nothing but IPU hardware with Graphcore's SDK can run. Replace it by "
        "torch operators where the model runs elsewhere."
    )
    refusal._is_only_on_ipus = True
    raise refusal


def _fast_gather_last_dim(inputs: Sequence[Tensor]) -> List[Tensor]:
    data, index = inputs
    if data.shape[:-1] != index.shape[:-1]:
        raise error(
            "FastGatherLastDim: the index tensor must have the same dimensions as the input, "
            f"except for the last one, got {tuple(index.shape)} for {tuple(data.shape)}. Expand "
            "one of them."
        )
    return [torch.gather(data, -1, index.to(torch.int64))]


# The compiled operators that PopTorch brings along.
_SHIPPED: Dict[Tuple[str, str, int], Callable[[Sequence[Tensor]], List[Tensor]]] = {
    ("poptorch.custom_ops", "FastGatherLastDim", 1): _fast_gather_last_dim
}


def _check_attributes(attributes: Dict[str, Any]) -> None:
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"All attribute keys must be strings. Got {key!r}.")
        if not isinstance(value, (float, int, str, list, tuple)):
            raise ValueError(
                "Attribute values must be floats, ints, strings or a list/tuple of float, ints "
                f"of strings. Got {type(value).__name__} for {key!r}."
            )
        if isinstance(value, (list, tuple)):
            for element in value:
                if not isinstance(element, (float, int, str)):
                    raise ValueError(
                        "Attribute values must be floats, ints, strings or a list/tuple of "
                        f"float, ints of strings. Got a {type(value).__name__} that holds "
                        f"{type(element).__name__} for {key!r}."
                    )
                if not isinstance(element, type(value[0])):
                    raise ValueError(
                        "The types in a list/tuple attribute must all be the same. Got "
                        f"{type(value[0]).__name__} and {type(element).__name__} for {key!r}."
                    )
    for text in attributes:
        _check_ascii(text)
    for value in attributes.values():
        _check_ascii(value)


def _check_ascii(value: object) -> None:
    for text in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(text, str) and not text.isascii():
            raise ValueError(f"{text} contains non-ASCII characters. Use ASCII only.")


def _check_range(value: object) -> None:
    if isinstance(value, float) and abs(value) > _LARGEST:
        side = "high" if value > 0 else "low"
        raise error(
            f"{value:g} is too {side} for a Popart float attribute. It has to fit into float32, "
            f"whose largest is {_LARGEST:g}."
        )


def _same(one: Dict[str, Any], other: Dict[str, Any]) -> bool:
    """Compare attributes for equality, types included: [1] is not [1.0]."""
    return one == other and repr(sorted(one.items())) == repr(sorted(other.items()))
