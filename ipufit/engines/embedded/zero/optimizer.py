"""An update of which each process makes a part, with a part of the optimizer's state (ZeRO 1).

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.1: the state is divided, weights and gradients are not.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Container, Dict, List, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor, nn

from ipufit.core.compile_arguments import CUDAGRAPH, INDUCTOR
from ipufit.core.train_config import Clip, TrainConfig
from ipufit.engines.embedded.clipping import GradientTransform, clipped
from ipufit.engines.embedded.flat_optimizer import Graphs, RuleOptimizer, refuse_step_hooks
from ipufit.engines.embedded.optimizer_state_location import StateMemory
from ipufit.engines.embedded.zero.state import StateParts, StateShard, cuts_of
from ipufit.errors import ConfigurationError
from ipufit.optim.rules import OptimizerRule, rule_for
from ipufit.processes import Processes
from ipufit.processes.collectives import all_gather_parts, part_of
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage, Slot, flatten_like, group_alike

__all__ = ["ShardedOptimizer", "needs_whole_gradient", "refuse_whole"]


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
    name = "shard_weights" if config.shard_weights else "shard_optimizer"
    if rule_for(optimizer) is None:
        raise ConfigurationError(
            f"{name}=True needs an optimizer that ipufit has as a program of its own, but "
            f"got {type(optimizer).__name__}, whose own step works on whole parameters. Use sgd, "
            f"adam, adamw, rmsprop or lamb, or leave {name} out."
        )
    if config.jit in (INDUCTOR, CUDAGRAPH):
        raise ConfigurationError(
            f"{name}=True needs a program that meets the other processes within an "
            f"update, but got jit={config.jit!r}, which has whole updates as one. Use jit='auto', "
            f"or leave {name} out."
        )
    if config.shard_weights and config.run_eagerly:
        raise ConfigurationError(
            "shard_weights=True needs a recorded program, in which weights are whole only while "
            "they are read, but got run_eagerly=True or jit='off', which runs the module itself. "
            "Leave one of them out."
        )
    if config.shard_weights and config.averaging is not None:
        raise ConfigurationError(
            "shard_weights=True keeps each weight once, in one process, but use_ema=True exchanges "
            "whole weights for their averages. Use shard_optimizer=True with it, or leave use_ema "
            "out."
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
        rule: Type[OptimizerRule],
        graphs: Graphs,
        config: TrainConfig,
        scheduled: Optional[Container[str]],
        memory: StateMemory,
        parts: StateParts,
        processes: Processes,
    ) -> None:
        refuse_step_hooks(optimizer)
        decays = scheduled is not None and "weight_decay" in scheduled
        self.takes_parts = needs_whole_gradient(config) is None
        by_norm = config.clip.global_norm is not None or config.clip.norm is not None
        # A norm is that of whole gradients, so it is bounded before the rest.
        self._bound = config.clip if by_norm else Clip()
        finish = GradientTransform(Clip() if by_norm else config.clip, config.accumulation_dtype)
        super().__init__(optimizer, rule, graphs, finish, decays, memory)
        self._parts = parts
        self._processes = processes
        self._whole = FlatStorage([])
        self.cuts: List[List[int]] = []

    def layout(self, named: Sequence[Tuple[str, nn.Parameter]]) -> List[FlatBlock]:
        """Parameters of one group, dtype, device and age stand together."""
        names = {id(parameter): name for name, parameter in named}
        live = {slot.name: block.updates for block in self._whole.blocks for slot in block.slots}

        def updates(parameter: nn.Parameter) -> float:
            name = names[id(parameter)]
            if name in live:
                return live[name]
            if self._optimizer.state.get(parameter):
                return self._steps(parameter)
            return self._parts.updates(name)

        return group_alike(self._optimizer, named, updates)

    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over this process's part of the state, of which torch's optimizer keeps nothing."""
        self._whole, self.cuts = storage, self.cuts_of(storage.blocks)
        try:
            own = {slot.name: (slot, *own) for _, slot, own in self._slots()}
            self._parts.align(own)
            super().bind(self._own(storage), run_eagerly)
        except BaseException:
            self._let_go()
            raise
        self._parts.forget(list(own))
        for slot, *_ in own.values():
            self._optimizer.state.pop(slot.parameter, None)

    def cuts_of(self, blocks: Sequence[FlatBlock]) -> List[List[int]]:
        """Where blocks are cut into parts."""
        count, by = self._processes.num_processes, self._kind.by_parameter
        return [cuts_of(block, count, by) for block in blocks]

    def _slots(self) -> List[Tuple[int, Slot, Tuple[int, int]]]:
        """Block and place of each parameter, and which of its elements this process updates."""
        me, slots = self._processes.process_id, []
        for index, (block, cuts) in enumerate(zip(self._whole.blocks, self.cuts)):
            for slot in block.slots:
                size = slot.parameter.numel()
                begin, end = (min(max(c - slot.start, 0), size) for c in cuts[me : me + 2])
                slots.append((index, slot, (begin, end)))
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

    def _load(self, block: FlatBlock, flat: Tensor, rule: OptimizerRule) -> Dict[str, Tensor]:
        index = next(i for i, own in enumerate(self._storage.blocks) if own is block)
        first = self.cuts[index][self._processes.process_id]
        state = {name: torch.zeros_like(flat) for name in rule.tensors}
        for place, slot, (begin, end) in self._slots():
            if place != index or begin == end:
                continue
            torch_state = self._optimizer.state.get(slot.parameter)
            parts = self._parts.known(slot.name)
            for name, whole in state.items():
                target = whole[slot.start + begin - first : slot.start + end - first]
                if torch_state and torch_state.get(name) is not None:
                    target.copy_(flatten_like(torch_state[name], slot.order)[begin:end])
                elif not torch_state and name in parts:
                    target.copy_(parts[name])
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

    def parts(self) -> Dict[str, StateShard]:
        """The state that is here, by parameter; views."""
        parts: Dict[str, StateShard] = {}
        for index, slot, (begin, end) in self._slots():
            first = self.cuts[index][self._processes.process_id]
            piece = slice(slot.start + begin - first, slot.start + end - first)
            tensors = {
                name: whole[piece if end > begin else slice(0)]
                for name, whole in self._states[index].items()
            }
            group = self._whole.blocks[index].group
            parts[slot.name] = StateShard(slot, group, self.counts[index], begin, end, tensors)
        return parts

    def keep(self) -> None:
        """Let the state go to where the next program finds it."""
        self._parts.keep({name: part for name, part in self.parts().items() if part.updates})
        self._let_go()

    def _let_go(self) -> None:
        self._whole, self.cuts = FlatStorage([]), []
        self.release()
