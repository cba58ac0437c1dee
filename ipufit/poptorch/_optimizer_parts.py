"""The weights of an optimizer on a device, side by side where the same numbers update them."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, List, Sequence, Tuple

from torch import Tensor

from ipufit.engines.embedded.rules import Rule
from ipufit.engines.embedded.storage import Block, FlatStorage

__all__ = ["Member", "Part", "differ", "lay_out"]


@dataclasses.dataclass
class Member:
    """One weight.

    Attributes:
        name: the parameter's.
        group: index of its group.
        weight: the device's tensor.
        updates: how many there were.
        numbers: its hyper-parameters.
        state: its state tensors by torch's names.
    """

    name: str
    group: int
    weight: Tensor
    updates: float
    numbers: Dict[str, float]
    state: Dict[str, Tensor]


@dataclasses.dataclass
class Part:
    """Weights that lie side by side and are updated with the same numbers."""

    members: List[Member]
    block: Block
    rule: Rule
    state: Dict[str, Tensor]


def lay_out(members: Sequence[Member], rules: Sequence[Rule]) -> Tuple[FlatStorage, List[Part]]:
    """Put side by side what is updated with the same numbers; the memory of all of it moves.

    Args:
        members: the weights.
        rules: that of each group.
    """
    alike: Dict[Tuple[object, ...], List[Member]] = {}
    for member in members:
        weight, numbers = member.weight, tuple(member.numbers.values())
        # NaN, which may have been written, is not equal to itself.
        same = tuple("nan" if math.isnan(number) else number for number in numbers)
        key = (member.group, member.updates, weight.dtype, weight.device, same)
        alike.setdefault(key, []).append(member)
    blocks = [
        Block.of([(m.name, m.weight) for m in own], own[0].group, own[0].updates)
        for own in alike.values()
    ]
    storage = FlatStorage(blocks)
    parts: List[Part] = []
    for own, block in zip(alike.values(), storage.blocks):
        rule = rules[block.group]
        state = {
            name: block.gather({member.name: member.state[name] for member in own})
            for name in rule.tensors
        }
        for member, slot in zip(own, block.slots):
            member.state = {name: slot.view(whole) for name, whole in state.items()}
        parts.append(Part(own, block, rule, state))
    return storage, parts


def differ(members: Sequence[Member]) -> bool:
    """Whether they can't be updated with the same numbers any more."""
    first = members[0]
    return any(m.updates != first.updates or m.numbers != first.numbers for m in members)
