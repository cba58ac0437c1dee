"""The optimizer's state while no program has it, and each process keeps a part of every tensor."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.optim.rules import rule_for
from ipufit.optim.state import make_step_counter
from ipufit.processes import Processes
from ipufit.processes.collectives import gather_parts
from ipufit.tracing.flat_storage import FlatBlock, Slot

__all__ = ["StateParts", "StateShard", "cuts_of"]


def cuts_of(block: FlatBlock, count: int, between_parameters: bool) -> List[int]:
    """Where a block is cut into parts of about one size.

    Args:
        block: whose elements are divided.
        count: of parts.
        between_parameters: whether no parameter may be cut; parts may then be empty.
    Returns:
        Process p has the elements from the p-th number up to the next.
    """
    total = block.slots[-1].stop
    if not between_parameters:
        return [*(process * (total // count) for process in range(count)), total]
    ends = [0, *(slot.stop for slot in block.slots)]
    inner = [
        min(ends, key=lambda end: abs(end * count - total * process)) for process in range(1, count)
    ]
    return [0, *inner, total]


@dataclasses.dataclass(frozen=True)
class StateShard:
    """One process's part of the state of one parameter.

    Attributes:
        slot: the parameter, with its memory order; where it lay in its block means nothing here.
        group: index of its parameter group.
        updates: that were made to it.
        begin, end: its elements of which the state is here, in memory order; equal for none.
        tensors: flat, by torch's names.
    """

    slot: Slot
    group: int
    updates: float
    begin: int
    end: int
    tensors: Dict[str, Tensor]


class StateParts:
    """Knows the parts that no program has, and puts them together.

    Args:
        optimizer: torch's, which has no state of what is here.
        processes: all of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, processes: Processes) -> None:
        self.optimizer = optimizer
        self._processes = processes
        self._parts: Dict[str, StateShard] = {}

    def updates(self, name: str) -> float:
        """The number of updates made to a parameter of this name."""
        return self._parts[name].updates if name in self._parts else 0.0

    def keep(self, parts: Mapping[str, StateShard]) -> None:
        """Copies of them, until a program needs them."""
        for name, part in parts.items():
            tensors = {key: tensor.clone() for key, tensor in part.tensors.items()}
            self._parts[name] = dataclasses.replace(part, tensors=tensors)

    def forget(self, names: Sequence[str]) -> None:
        """They are elsewhere now."""
        for name in names:
            self._parts.pop(name, None)

    def forget_all(self) -> None:
        """There is another state, which torch's optimizer has."""
        self._parts.clear()

    def known(self, name: str) -> Mapping[str, Tensor]:
        """The part of a parameter's state that is here, flat, by torch's names."""
        return self._parts[name].tensors if name in self._parts else {}

    def align(self, needed: Mapping[str, Tuple[Slot, int, int]]) -> None:
        """Have of these parameters the parts that are needed; in all processes at the same time.

        Args:
            needed: for each name where the parameter lies now, and its first element and the one
                after the last.
        """
        names = sorted(name for name in needed if name in self._parts)
        fits = all(_fits(self._parts[name], *needed[name]) for name in names)
        if all(self._processes.gather(fits)):
            return
        for name, flats in self._whole(names, self._parts, True, False).items():
            part, (slot, begin, end) = self._parts[name], needed[name]
            whole = {key: _ordered(flat, part.slot, slot) for key, flat in flats.items()}
            self._parts[name] = dataclasses.replace(
                part,
                slot=slot,
                begin=begin,
                end=end,
                tensors={key: flat[begin:end].clone() for key, flat in whole.items()},
            )

    def _whole(
        self,
        names: Sequence[str],
        parts: Mapping[str, StateShard],
        everywhere: bool,
        on_host: bool,
    ) -> Dict[str, Dict[str, Tensor]]:
        """Flat tensors of all parts, by parameter; where they are not wanted, none."""
        all_lengths = self._processes.gather(
            [parts[name].end - parts[name].begin for name in names]
        )
        by_name: Dict[str, Dict[str, Tensor]] = {}
        for name, lengths in zip(names, zip(*all_lengths)):
            for key, tensor in sorted(parts[name].tensors.items()):
                sent = (tensor.cpu() if on_host else tensor).contiguous()
                whole = gather_parts(self._processes, sent, lengths, everywhere)
                if whole is not None:
                    by_name.setdefault(name, {})[key] = whole
        return by_name

    def collected(self, more: Mapping[str, StateShard], everywhere: bool) -> Dict[Tensor, Any]:
        """The whole state by parameter, as torch has it; in all processes at the same time.

        Args:
            more: parts that a program has.
            everywhere: whether all processes get it, where their parameters are; else process 0
                alone, on the host.
        """
        parts = {**self._parts, **more}
        names = sorted(name for name, part in parts.items() if part.updates)
        states: Dict[Tensor, Any] = {}
        flats = self._whole(names, parts, everywhere, not everywhere)
        rule = rule_for(self.optimizer)
        for name in names if everywhere or self._processes.is_rank_zero else ():
            part = parts[name]
            parameter, group = part.slot.parameter, self.optimizer.param_groups[part.group]
            state: Dict[str, Any] = {
                key: flat.to(parameter.device if everywhere else "cpu").as_strided(
                    parameter.shape, part.slot.stride
                )
                for key, flat in flats.get(name, {}).items()
            }
            states[parameter] = state
            if rule is not None and rule.counted:
                on_device = group.get("capturable") or group.get("fused")
                device = parameter.device if on_device else torch.device("cpu")
                state["step"] = make_step_counter(type(self.optimizer), part.updates, device)
        return states

    def gather_optimizer(self, more: Mapping[str, StateShard]) -> None:
        """Give torch's optimizer the whole state; in all processes at the same time.

        Args:
            more: parts that a program has.
        """
        for parameter, state in self.collected(more, True).items():
            # What is there already was gathered before, and changed since, perhaps.
            if not self.optimizer.state.get(parameter):
                self.optimizer.state[parameter].update(state)

    def state_dict(self, more: Mapping[str, StateShard]) -> Dict[str, Any]:
        """The optimizer's, of copies; whole in process 0; in all processes at the same time.

        Args:
            more: parts that a program has.
        """
        groups = self.optimizer.param_groups
        places = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        gathered = self.collected(more, False).items()
        # The next program takes over what somebody has given the optimizer.
        gathered_states = {
            places[id(p)]: state for p, state in gathered if not self.optimizer.state.get(p)
        }
        whole_dict: Dict[str, Any] = self.optimizer.state_dict()
        rest = {
            place: state
            for place, state in whole_dict["state"].items()
            if place not in gathered_states
        }
        copied = copy.deepcopy({**whole_dict, "state": rest})
        return {**copied, "state": {**copied["state"], **gathered_states}}


def _fits(part: StateShard, slot: Slot, begin: int, end: int) -> bool:
    return (part.begin, part.end, part.slot.order) == (begin, end, slot.order)


def _ordered(flat: Tensor, before: Slot, now: Slot) -> Tensor:
    """A flat tensor in another memory order."""
    if before.order == now.order:
        return flat
    shaped = flat.as_strided(before.parameter.shape, before.stride)
    moved = torch.empty_like(flat)
    moved.as_strided(now.parameter.shape, now.stride).copy_(shaped)
    return moved
