"""Combined batches, made of the batches of a user's sampler, and what PopTorch has beside them.

Collaters of PopTorch Geometric import their helpers from a module of this name.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, List, Sequence

import torch
from torch import Tensor

from ipufit.poptorch._logging import error
from ipufit.poptorch._parsers import (
    ATTR_PREFIX,
    accessAttributes,
    flattenTensorStructure,
    getIpuTensorId,
    parser_of,
    reconstructTensorStructure,
)

__all__ = [
    "ATTR_PREFIX",
    "accessAttributes",
    "combine_batch_tensors_gen",
    "combined",
    "flattenTensorStructure",
    "getIpuTensorId",
    "reconstructTensorStructure",
]


def combine_batch_tensors_gen(tensors: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Join the tensors of several batches along dimension 0, each with those of its place.

    Args:
        tensors: for each batch, as many tensors as the first one has, in the same order.
    """
    for place in range(len(tensors[0])):
        yield torch.cat([batch[place] for batch in tensors])


def combined(batches: Iterable[object], number: int, drop_last: bool) -> Iterator[Any]:
    """Join every ``number`` consecutive batches along dimension 0.

    Args:
        batches: structures of tensors, all alike. What is no tensor is the same in all of a group.
        drop_last: whether a last group that has fewer is left out.
    Raises:
        Error: the structures differ.
    """
    group: List[object] = []
    for batch in batches:
        group.append(batch)
        if len(group) == number:
            yield _joined(group)
            group = []
    if group and not drop_last:
        yield _joined(group)


def _joined(group: List[object]) -> object:
    first = group[0]
    facts = list(_facts(first))
    if not all(_are_equal(facts, list(_facts(other))) for other in group[1:]):
        raise error(
            "the batches of one combined batch differ in something that is no tensor (a number, a "
            "string, a key, a length), and only tensors can be joined. Make it a tensor in the "
            "dataset or in collate_fn, or leave it out."
        )
    tensors = [flattenTensorStructure(batch, first) for batch in group]
    return reconstructTensorStructure(first, combine_batch_tensors_gen(tensors))


def _facts(value: object) -> Iterator[object]:
    """Yield everything in a structure but its tensors; of types with a parser only their number."""
    parser = parser_of(value)
    if parser is not None:
        yield type(value)
        yield sum(1 for _ in parser.yieldTensors(value))
    elif isinstance(value, dict):
        yield set(value)
        for key in sorted(value, key=repr):
            yield from _facts(value[key])
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for item in value:
            yield from _facts(item)
    else:
        yield Tensor if isinstance(value, Tensor) else value


def _are_equal(facts: List[object], others: List[object]) -> bool:
    try:
        return facts == others
    except Exception:  # an array has no single truth
        return False
