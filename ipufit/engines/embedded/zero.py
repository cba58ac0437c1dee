"""An update of which each process makes a part, with a part of the optimizer's state (ZeRO 1).

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.1: the state is divided, weights and gradients are not.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor, nn

from ipufit.core.compile_arguments import CUDAGRAPH, INDUCTOR
from ipufit.core.train_config import Clip, TrainConfig
from ipufit.engines.embedded.flat_optimizer import Graphs, RuleOptimizer
from ipufit.engines.embedded.gradient_transform import GradientTransform, clipped
from ipufit.engines.embedded.optimizer_state_location import StateMemory
from ipufit.errors import ConfigurationError
from ipufit.optim.rules import OptimizerRule, list_rule_names, rules_for
from ipufit.optim.several import kinds_by_group, refuse_step_hooks
from ipufit.optim.state import make_step_counter
from ipufit.processes import Processes
from ipufit.processes.group import all_gather_parts, gather_parts, part_of
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage, Slot, flatten_like


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


ShardByParameter = Mapping[Tensor, StateShard]


class StateParts:
    """Knows the parts that no program has, and puts them together.

    Args:
        optimizer: torch's, which has no state of what is here.
        processes: all of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, processes: Processes) -> None:
        self.optimizer = optimizer
        self._processes = processes
        # By parameter: a callback may have given it another name, or another one its name.
        self._parts: Dict[Tensor, StateShard] = {}

    def updates(self, parameter: Tensor) -> float:
        """The number of updates made to a parameter."""
        return self._parts[parameter].updates if parameter in self._parts else 0.0

    def keep(self, parts: ShardByParameter) -> None:
        """Copies of them, until a program needs them."""
        for parameter, part in parts.items():
            tensors = {key: tensor.clone() for key, tensor in part.tensors.items()}
            self._parts[parameter] = dataclasses.replace(part, tensors=tensors)

    def forget(self, parameters: Sequence[Tensor]) -> None:
        """They are elsewhere now."""
        for parameter in parameters:
            self._parts.pop(parameter, None)

    def forget_all(self) -> None:
        """There is another state, which torch's optimizer has."""
        self._parts.clear()

    def local_state(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """The part of a parameter's state that is here, flat, by torch's names."""
        return self._parts[parameter].tensors if parameter in self._parts else {}

    def align(self, needed: Mapping[Tensor, Tuple[Slot, int, int]]) -> None:
        """Have of these parameters the parts that are needed; in all processes at the same time.

        Args:
            needed: for each parameter where it lies now, and its first element and the one after
                the last; in the same order in all processes.
        """
        parameters = [parameter for parameter in needed if parameter in self._parts]
        fits = all(_fits(self._parts[each], *needed[each]) for each in parameters)
        if all(self._processes.gather(fits)):
            return
        for parameter, flats in self._whole(parameters, self._parts, True, False).items():
            part, (slot, begin, end) = self._parts[parameter], needed[parameter]
            whole = {key: _ordered(flat, part.slot, slot) for key, flat in flats.items()}
            self._parts[parameter] = dataclasses.replace(
                part,
                slot=slot,
                begin=begin,
                end=end,
                tensors={key: flat[begin:end].clone() for key, flat in whole.items()},
            )

    def _whole(
        self,
        parameters: Sequence[Tensor],
        parts: ShardByParameter,
        everywhere: bool,
        on_host: bool,
    ) -> Dict[Tensor, Dict[str, Tensor]]:
        """Flat tensors of all parts, by parameter; where they are not wanted, none."""
        all_lengths = self._processes.gather(
            [parts[each].end - parts[each].begin for each in parameters]
        )
        flats: Dict[Tensor, Dict[str, Tensor]] = {}
        for parameter, lengths in zip(parameters, zip(*all_lengths)):
            for key, tensor in sorted(parts[parameter].tensors.items()):
                sent = (tensor.cpu() if on_host else tensor).contiguous()
                whole = gather_parts(self._processes, sent, lengths, everywhere)
                if whole is not None:
                    flats.setdefault(parameter, {})[key] = whole
        return flats

    def gather_state(self, more: ShardByParameter, everywhere: bool) -> Dict[Tensor, Any]:
        """The whole state by parameter, as torch has it; in all processes at the same time.

        Args:
            more: parts that a program has.
            everywhere: whether all processes get it, where their parameters are; else process 0
                alone, on the host.
        """
        parts = {**self._parts, **more}
        parameters = [parameter for parameter, part in parts.items() if part.updates]
        states: Dict[Tensor, object] = {}
        flats = self._whole(parameters, parts, everywhere, not everywhere)
        rules, kinds = rules_for(self.optimizer), kinds_by_group(self.optimizer)
        for parameter in parameters if everywhere or self._processes.is_rank_zero else ():
            part = parts[parameter]
            group = self.optimizer.param_groups[part.group]
            state: Dict[str, object] = {
                key: flat.to(parameter.device if everywhere else "cpu").as_strided(
                    parameter.shape, part.slot.stride
                )
                for key, flat in flats.get(parameter, {}).items()
            }
            states[parameter] = state
            rule = rules[part.group]
            if rule is not None and rule.counted:
                on_device = group.get("capturable") or group.get("fused")
                device = parameter.device if on_device else torch.device("cpu")
                state["step"] = make_step_counter(kinds[part.group], part.updates, device)
        return states

    def gather_optimizer(self, more: ShardByParameter) -> None:
        """Give torch's optimizer the whole state; in all processes at the same time.

        Args:
            more: parts that a program has.
        """
        for parameter, state in self.gather_state(more, True).items():
            # What is there already was gathered before, and changed since, perhaps.
            if not self.optimizer.state.get(parameter):
                self.optimizer.state[parameter].update(state)

    def state_dict(self, more: ShardByParameter) -> Dict[str, Any]:
        """The optimizer's, of copies; whole in process 0; in all processes at the same time.

        Args:
            more: parts that a program has.
        """
        groups = self.optimizer.param_groups
        places = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        gathered = self.gather_state(more, False).items()
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


def needs_whole_gradient(config: TrainConfig) -> Optional[str]:
    """Setting for which each process needs the whole gradient; None where a part is enough."""
    if config.clip.global_norm is not None or config.clip.norm is not None:
        return "a bound on its norm"
    if config.loss_scale is not None:
        return "a loss scale"
    return None


def refuse_whole(optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
    """Make sure that the optimizer's state, and weights if asked for, can lie in parts.

    Raises:
        ConfigurationError: its step is torch's own, or another way to run keeps it whole.
    """
    name = "shard='weights'" if config.shard_weights else "shard='optimizer'"
    own_steps = [
        kind.__name__
        for kind, rule in zip(kinds_by_group(optimizer), rules_for(optimizer))
        if rule is None
    ]
    if own_steps:
        raise ConfigurationError(
            f"{name} needs an optimizer that ipufit implements itself, but got {own_steps[0]}, "
            f"whose step works on whole parameters. Use {list_rule_names()}, or leave {name} out."
        )
    if config.optimizer_clips:
        raise ConfigurationError(
            f"{name} clips all gradients together, but got a separate clip for each optimizer. "
            "Pass one ipufit.Clip, or leave one of them out."
        )
    if config.jit in (INDUCTOR, CUDAGRAPH):
        raise ConfigurationError(
            f"{name} communicates with the other processes within an update, but got "
            f"jit={config.jit!r}, which compiles whole updates. Use jit='auto', or leave {name} "
            "out."
        )
    if config.shard_weights and config.run_eagerly:
        raise ConfigurationError(
            "shard='weights' needs a recorded program, which gathers weights only while they are "
            "read, but got run_eagerly=True, which runs the module itself. Leave one of them out."
        )
    if config.shard_weights and config.compiler is not None:
        raise ConfigurationError(
            "shard='weights' needs a recorded program, which gathers weights only while they "
            f"are read, but got jit={config.jit!r}, a backend of torch.compile, which compiles "
            "whole graphs. Use shard='optimizer', or jit='auto'."
        )
    if config.shard_weights and config.ema is not None:
        raise ConfigurationError(
            "shard='weights' keeps each weight once, in one process, but ema exchanges whole "
            "weights for their averages. Use shard='optimizer' with it, or leave ema out."
        )


class ShardedOptimizer(RuleOptimizer):
    """Applies the rules to this process's part of every flat tensor, and collects the others'.

    Attributes:
        cuts: for each block where it is cut into parts; empty before :meth:`bind`.
        takes_parts: whether :meth:`apply` gets this process's parts of the gradients; else it gets
            them whole.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rules: Sequence[Optional[Type[OptimizerRule]]],
        graphs: Graphs,
        config: TrainConfig,
        memory: StateMemory,
        parts: StateParts,
        processes: Processes,
    ) -> None:
        refuse_step_hooks(optimizer)
        self.takes_parts = needs_whole_gradient(config) is None
        by_norm = config.clip.global_norm is not None or config.clip.norm is not None
        # A norm is that of whole gradients, so it is bounded before the rest.
        self._bound = config.clip if by_norm else Clip()
        finish = GradientTransform(Clip() if by_norm else config.clip, config.accumulation_dtype)
        super().__init__(
            optimizer, rules, graphs, finish, config.schedule, memory, compiler=config.compiler
        )
        self._parts = parts
        self._processes = processes
        self._whole = FlatStorage([])
        self.cuts: List[List[int]] = []

    def _steps(self, name: str, parameter: nn.Parameter) -> float:
        if self._optimizer.state.get(parameter):
            return super()._steps(name, parameter)
        return self._parts.updates(parameter)

    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over this process's part of the state, of which torch's optimizer keeps nothing."""
        self._whole, self.cuts = storage, self.cuts_of(storage.blocks)
        try:
            slots = self._slots()
            local_slots = {slot.parameter: (slot, *bounds) for _, slot, bounds, _ in slots}
            self._parts.align(local_slots)
            super().bind(self._own(storage), run_eagerly)
        except BaseException:
            self._let_go()
            raise
        self._parts.forget(list(local_slots))
        for slot, *_ in local_slots.values():
            self._optimizer.state.pop(slot.parameter, None)

    def cuts_of(self, blocks: Sequence[FlatBlock]) -> List[List[int]]:
        """Where blocks are cut into parts."""
        count = self._processes.num_processes
        return [cuts_of(b, count, self._rule_of(b.group).by_parameter) for b in blocks]

    def _slots(self) -> List[Tuple[int, Slot, Tuple[int, int], slice]]:
        """Block and place of each parameter, which of its elements this process updates, and where.

        Where those are is told of this process's part of the block.
        """
        me, slots = self._processes.process_id, []
        for index, (block, cuts) in enumerate(zip(self._whole.blocks, self.cuts)):
            for slot in block.slots:
                size, first = slot.parameter.numel(), slot.start - cuts[me]
                begin, end = (min(max(c - slot.start, 0), size) for c in cuts[me : me + 2])
                place = slice(first + begin, first + end) if end > begin else slice(0)
                slots.append((index, slot, (begin, end), place))
        return slots

    def _own(self, storage: FlatStorage) -> FlatStorage:
        """The part that this process updates, with the parameters that are wholly in it."""
        part_storage, me = FlatStorage([]), self._processes.process_id
        part_storage.flats = self._flats_of(storage)
        for block, cuts in zip(storage.blocks, self.cuts):
            begin, end = cuts[me : me + 2]
            inside = tuple(
                dataclasses.replace(slot, start=slot.start - begin)
                for slot in block.slots
                if begin <= slot.start and slot.stop <= end
            )
            part_storage.blocks.append(dataclasses.replace(block, slots=inside))
        part_storage.form = (*storage.form, tuple(map(tuple, self.cuts)), me)
        return part_storage

    def _flats_of(self, storage: FlatStorage) -> List[Tensor]:
        return [part_of(self._processes, *each) for each in zip(storage.flats, self.cuts)]

    def _load(self, block: FlatBlock, flat: Tensor) -> Dict[str, Tensor]:
        index = next(i for i, candidate in enumerate(self._storage.blocks) if candidate is block)
        state: Dict[str, Tensor] = {}
        for number, slot, (begin, end), place in self._slots():
            torch_state = self._optimizer.state.get(slot.parameter)
            parts = self._parts.local_state(slot.parameter)
            for name in self._rule_of(block.group).all_tensors if number == index else ():
                if torch_state and torch_state.get(name) is not None:
                    part = flatten_like(torch_state[name], slot.order)[begin:end]
                elif not torch_state and name in parts:
                    part = parts[name]
                else:
                    continue
                state[name] = state[name] if name in state else torch.zeros_like(flat)
                state[name][place].copy_(part)
        return {name: self.memory.keep(whole) for name, whole in state.items()}

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update, after which all processes have all weights."""
        if not self.takes_parts:
            bounded = clipped(gradients, self._whole.blocks, self._bound)
            gradients = [part_of(self._processes, *each) for each in zip(bounded, self.cuts)]
        super().apply(gradients)
        all_gather_parts(self._processes, self._whole.flats, self.cuts)

    def export(self) -> None:
        """Nothing: torch's optimizer has whole states or none."""

    def aside(self, times: int) -> Optional[Callable[[Sequence[Tensor]], None]]:
        """Nothing: an update is one of all processes."""
        return None

    def parts(self) -> Dict[Tensor, StateShard]:
        """The state that is here; views."""
        parts: Dict[Tensor, StateShard] = {}
        for index, slot, (begin, end), place in self._slots():
            tensors = {name: whole[place] for name, whole in self._states[index].items()}
            group = self._whole.blocks[index].group
            parts[slot.parameter] = StateShard(slot, group, self.counts[index], begin, end, tensors)
        return parts

    def keep(self) -> None:
        """Let the state go to where the next program finds it."""
        self._parts.keep({each: part for each, part in self.parts().items() if part.updates})
        self._let_go()

    def _let_go(self) -> None:
        self._whole, self.cuts = FlatStorage([]), []
        self.release()
