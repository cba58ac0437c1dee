"""Turns of an update: losses computed one after another, and what of the weights each moves."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Sized, Tuple

import torch
from torch import Tensor, nn

from ipufit.engines.embedded.flat_optimizer import CompositeOptimizer, FlatOptimizer, Rows, Waiting
from ipufit.engines.embedded.gradient_transform import GradientTransform
from ipufit.engines.program import ExecutionResult, ProgramSpec
from ipufit.losses import Loss, Turn
from ipufit.optim.several import NamedParameters, index_of_group
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage
from ipufit.tracing.grad_step import ModuleWithLoss, public_name


@dataclasses.dataclass(eq=False)
class TurnState:
    """A turn in a training program: the module with its loss, and the state that it moves.

    Attributes:
        step: module and loss.
        trained: names of the parameters that it moves, in the order of the program's.
        others: names of all other parameters.
        turn: how often it is made; None for the only loss of a program.
        number: place among the turns of an update.
        hands_out: whether the program's outputs are those of this turn.
        with_gradient: names of those that a gradient may reach; empty before it is recorded.
        present: names of those that one has reached in the latest update, where they vary.
        gradient_blocks: layout of its gradients where it is another one than that of the storage.
        blocks: places in the storage of what it moves.
        parts: of the optimizer, which it moves.
        states: for each replica, what a micro-batch is computed from.
    """

    step: ModuleWithLoss
    trained: Sequence[str]
    others: Sequence[str]
    turn: Optional[Turn] = None
    number: int = 0
    hands_out: bool = True
    with_gradient: Tuple[str, ...] = ()
    present: Tuple[str, ...] = ()
    gradient_blocks: Sequence[FlatBlock] = ()
    blocks: Sequence[int] = ()
    parts: Sequence[int] = ()
    states: List[List[Tensor]] = dataclasses.field(default_factory=list)

    def cut(self, gradients: List[Tensor], blocks: Sequence[FlatBlock]) -> List[Tensor]:
        """Cut gradients that have a layout of their own to these blocks."""
        if [block.names for block in blocks] == [block.names for block in self.gradient_blocks]:
            return gradients
        views = {
            slot.name: slot.view(flat)
            for block, flat in zip(self.gradient_blocks, gradients)
            for slot in block.slots
        }
        return [block.gather(views) for block in blocks]

    def release(self) -> None:
        """Let go of the state, which is bound to nothing any more; safe twice."""
        self.states, self.blocks = [], ()


@dataclasses.dataclass(frozen=True)
class Move:
    """One weight update of one turn.

    Attributes:
        turn: of which.
        update: index of the update that it belongs to, in its execution.
        is_last: among the moves of that update.
        stream: sets its random numbers apart from those of others in the update.
        hands_out: whether outputs of the module come from it.
    """

    turn: TurnState
    update: int = 0
    is_last: bool = True
    stream: str = ""
    hands_out: bool = True


def turn_states(
    spec: ProgramSpec, step_module: Callable[[nn.Module, Loss], ModuleWithLoss]
) -> List[TurnState]:
    """Describe each turn of an update, before it is recorded.

    Args:
        spec: of the program.
        step_module: makes the module with one of the losses.
    """
    assert spec.optimizer is not None
    assert spec.loss is not None
    owned = index_of_group(spec.optimizer)
    states: List[TurnState] = []
    for turn in spec.loss.turns:
        step = step_module(spec.module, turn.loss)
        named = dict(step.named_parameters())
        moved = turn.loss.moved(
            [public_name(n) for n, p in named.items() if p.requires_grad and id(p) in owned]
        )
        trained = [name for name in named if public_name(name) in set(moved)]
        others = [name for name in named if name not in set(trained)]
        # Outputs come from the first turn that is made in every update.
        hands_out = turn.every == 1 and not any(state.hands_out for state in states)
        states.append(TurnState(step, trained, others, turn, len(states), hands_out))
    return states


def moves_of(turns: Sequence[TurnState], first_update: int, updates: int) -> List[Move]:
    """List the moves of an execution, in their order.

    Args:
        turns: of every update.
        first_update: index of the first update since ``compile``.
        updates: how many there are.
    """
    moves: List[Move] = []
    for update in range(updates):
        due: List[Move] = []
        for state in turns:
            turn = state.turn
            assert turn is not None
            if not turn.is_due(first_update + update):
                continue
            for repetition in range(turn.repeat):
                is_plain = not (turn.step or repetition)
                stream = "" if is_plain else f", step {turn.step}, repetition {repetition}"
                hands_out = state.hands_out and not repetition
                due.append(Move(state, update, False, stream, hands_out))
        moves += due[:-1] + [dataclasses.replace(move, is_last=True) for move in due[-1:]]
    return moves


def by_micro_batch(
    result: ExecutionResult, moves: Sequence[Move], updates: Sequence[Sized]
) -> ExecutionResult:
    """Bring together what the moves of an update report of each of its micro-batches.

    The loss of a micro-batch is the sum over turns, and of a turn that is repeated the mean over
    its repetitions; logged values likewise.

    Args:
        result: with losses and logged values by move, and in it by micro-batch.
        moves: of the execution.
        updates: the micro-batches of each move.
    """
    losses: List[float] = []
    logged: List[Dict[str, float]] = []
    values = iter(result.losses.tolist())
    entries = iter(result.logged or [{}] * len(result.losses))
    for _, group in itertools.groupby(zip(moves, updates), lambda pair: pair[0].update):
        pairs = list(group)
        sums = [0.0] * len(pairs[0][1])
        means: List[Dict[str, List[float]]] = [{} for _ in sums]
        for move, _ in pairs:
            assert move.turn.turn is not None
            for place in range(len(sums)):
                sums[place] += next(values) / move.turn.turn.repeat
                for name, value in next(entries).items():
                    means[place].setdefault(name, []).append(value)
        losses += sums
        logged += [{n: sum(each) / len(each) for n, each in mean.items()} for mean in means]
    return dataclasses.replace(
        result, losses=torch.tensor(losses, dtype=torch.float64), logged=logged
    )


class TurnOptimizer(CompositeOptimizer):
    """One optimizer in parts, of which each turn moves some.

    A part has the parameters that the same turns reach: a turn that no gradient of a parameter
    comes from leaves it and its state as they are, like a torch optimizer without a gradient.

    Args:
        make: makes what applies the optimizer to a part, from finished gradients; steps that are
            not recorded wait in what it gets.
        finish: makes of the accumulated gradients of a turn, of all its parts together, what the
            parts get.

    Attributes:
        finish: as passed; who asks for an update has called it.
        memory: where the state is between two updates.
        moves: of the coming execution.
    """

    def __init__(self, make: Callable[[Waiting], FlatOptimizer], finish: GradientTransform) -> None:
        self.finish = finish
        self.moves: Sequence[Move] = ()
        self._coming: Iterator[TurnState] = iter(())
        self._make = make
        self._waiting: Waiting = {}
        self._whole = make(self._waiting)
        self.memory = self._whole.memory

    def layout(self, named: NamedParameters, ages: Mapping[str, float]) -> List[FlatBlock]:
        """Divide parameters of one part into blocks that are updated alike."""
        return self._whole.layout(named, ages)

    def divide(self, sizes: Sequence[int]) -> None:
        """Learn how many blocks each part has."""
        ends = itertools.accumulate(sizes)
        self.places = [range(end - size, end) for size, end in zip(sizes, ends)]

    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over the optimizer's state and record an update of each part."""
        self.parts = [self._make(self._waiting) for _ in self.places]
        super().bind(storage, run_eagerly)

    def refresh(self, rows: Rows) -> None:
        """Work out the coefficients of the coming moves, the last ones of :attr:`moves`."""
        coming = list(zip(self.moves[len(self.moves) - len(rows) :], rows))
        self._coming = iter([move.turn for move, _ in coming])
        for index, part in enumerate(self.parts):
            part.refresh([row for move, row in coming if index in move.turn.parts])

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update of the parts of the next move, from their gradients in a row."""
        start = 0
        for part in next(self._coming).parts:
            end = start + len(self.places[part])
            self.parts[part].apply(gradients[start:end])
            start = end
        # A step that is not recorded may count its calls, and runs once.
        for (first, gradients), *others in self._waiting.values():
            first.step_with(gradients, others)
        self._waiting.clear()

    def skip(self) -> None:
        """Leave the next move out."""
        for part in next(self._coming).parts:
            self.parts[part].skip()


def parts_of(names: Sequence[str], turns: Sequence[TurnState]) -> Dict[Tuple[int, ...], List[str]]:
    """Divide names of parameters by the turns that reach them now.

    Those that none may reach are left out.

    Args:
        names: in the order of the program.
        turns: recorded, so that they know what they reach.
    """
    ever = {name for turn in turns for name in turn.with_gradient}
    sets: List[Set[str]] = [set(turn.present or turn.with_gradient) for turn in turns]
    parts: Dict[Tuple[int, ...], List[str]] = {}
    for name in filter(ever.__contains__, names):
        key = tuple(index for index, those in enumerate(sets) if name in those)
        parts.setdefault(key, []).append(name)
    return parts
