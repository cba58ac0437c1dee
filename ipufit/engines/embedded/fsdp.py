"""Weights of which each process has a part, and whole ones only while they are at work (ZeRO 3).

Parameters lie in pieces, as FSDP's "full shard" has them. A recorded micro-batch gathers a piece
before its first use and the update leaves each process its part. The module keeps parameters of its
own, in host memory: what it held when they were divided, until :meth:`ShardedWeights.publish`
brings them up to date.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor, fx

from ipufit.core.train_config import Clip
from ipufit.engines.embedded.flat_optimizer import RuleOptimizer
from ipufit.engines.embedded.passes.collective_hooks import FILL, SUM, Event, insert_weight_hooks
from ipufit.engines.embedded.passes.simplify import call_directly, simplify
from ipufit.engines.embedded.zero import ShardedOptimizer
from ipufit.errors import CaptureError
from ipufit.optim.several import NamedParameters
from ipufit.processes import Processes
from ipufit.processes.connection import PendingWork
from ipufit.processes.group import PendingReduceScatter, as_bytes, part_of, start_all_gather
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage

T = TypeVar("T", bound=Tensor)

# The pieces together are about so many times one of them.
_PIECES = 16


def pieces_of(named: Sequence[Tuple[str, T]]) -> List[List[Tuple[str, T]]]:
    """Neighbours share a piece until it is large enough; those of one module always do.

    Args:
        named: parameters, by names as torch makes them.
    """
    enough = sum(parameter.numel() for _, parameter in named) / _PIECES
    pieces: List[List[Tuple[str, T]]] = []
    filled, owner = math.inf, ""
    for name, parameter in named:
        before, owner = owner, name.rpartition(".")[0]
        if filled >= enough and (owner != before or not pieces):
            pieces.append([])
            filled = 0
        pieces[-1].append((name, parameter))
        filled += parameter.numel()
    return pieces


@dataclasses.dataclass
class Piece:
    """Parameters that come and go together.

    Attributes:
        block: how they lie.
        cuts: process p has the elements from ``cuts[p]`` up to ``cuts[p + 1]``.
        flat: whole; without memory but for a while.
        local: what this process has of it.
        views: the parameters in ``flat``.
        is_there: whether ``flat`` has memory.
    """

    block: FlatBlock
    cuts: Sequence[int]
    flat: Tensor
    local: Tensor
    views: Dict[str, Tensor]
    is_there: bool = False

    @staticmethod
    def of(
        block: FlatBlock, cuts: Sequence[int], processes: Processes, device: torch.device
    ) -> Piece:
        """The piece with the values of its parameters, wherever these are."""
        flat = _whole(block).to(device)
        part = part_of(processes, flat, cuts).clone()
        # A copy of what `gather` returned may be a view of the parameter, whose memory is not ours.
        flat = torch.empty_like(flat)
        views = {slot.name: slot.view(flat) for slot in block.slots}
        piece = Piece(block, cuts, flat, part, views)
        piece.free()
        return piece

    def make_room(self) -> None:
        """Memory for the whole."""
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self.is_there = True

    def free(self) -> None:
        """Let go of it."""
        self.flat.untyped_storage().resize_(0)
        self.is_there = False


def _whole(block: FlatBlock) -> Tensor:
    return block.gather({slot.name: slot.parameter.detach() for slot in block.slots})


class ShardedWeights(FlatStorage):
    """All parameters of a module, in parts.

    As host of a graph with meetings it has a method for each kind of event. One gathering and one
    sum are under way while the graph goes on.

    Args:
        blocks: the pieces; those that get gradients first.
        cuts: of each piece.
        trained: how many get gradients.
        processes: all of them, which do everything here at the same time.
        device: where the parts are.
        dtype: of sums of gradients; None for their own.

    Attributes:
        blocks, flats: of the pieces that get gradients: the layout, and this process's parts.
        views: all parameters by name as a graph takes them, with memory only between events.
        form: all that a program over the parts depends on.
        device: as given.
        events: of every graph that trains; empty before one is known.
        factor: what a gradient is multiplied with before it is added; None for what its loss is a
            mean over.
    """

    def __init__(
        self,
        blocks: Sequence[FlatBlock],
        cuts: Sequence[Sequence[int]],
        trained: int,
        processes: Processes,
        device: torch.device,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        self._processes = processes
        self._dtype = dtype
        self.device = device
        self.indices = {}
        self._home = {slot.name: slot.parameter for block in blocks for slot in block.slots}
        self.pieces: List[Piece] = []
        with torch.no_grad():
            for block, block_cuts in zip(blocks, cuts):
                self.pieces.append(Piece.of(block, block_cuts, processes, device))
                # One after another: the device never holds much more than the whole.
                for slot in block.slots if device.type != "cpu" else ():
                    slot.parameter.data = slot.parameter.data.cpu()
        self.blocks = list(blocks[:trained])
        self.flats = [piece.local for piece in self.pieces[:trained]]
        self.views = {name: view for piece in self.pieces for name, view in piece.views.items()}
        self.form: Tuple[object, ...] = tuple(
            (
                b.group,
                tuple((s.start, s.stop) for s in b.slots),
                p.local.dtype,
                device,
                tuple(p.cuts),
            )
            for b, p in zip(self.blocks, self.pieces)
        )
        self.events: Sequence[Event] = ()
        self.factor: Optional[float] = 1.0
        self._events: Sequence[Event] = ()
        self._place = 0
        self._coming: Dict[int, PendingWork] = {}
        self._sum: Optional[PendingReduceScatter] = None
        self._seen = self._signature()

    @contextlib.contextmanager
    def at_work(self, events: Sequence[Event]) -> Iterator[None]:
        """A graph with these events runs."""
        self._events, self._place = events, 0
        yield
        self._end_sum()
        assert self._place == len(events)

    def idle(self, events: Sequence[Event]) -> List[Tensor]:
        """Do what the others need while they compute a micro-batch, and this process has none.

        Returns:
            This process's part of the gradients' sums, by piece.
        """
        sums: Dict[int, Tensor] = {}
        with self.at_work(events):
            for what, number in events:
                if what == SUM:
                    sums[number] = self.sum(number)
                else:
                    getattr(self, what)(number)
        return [sums[number] for number in sorted(sums)]

    def fill(self, number: int) -> None:
        """A piece is whole from here on; the next one is on its way."""
        self._place += 1
        works = self._coming.pop(number, None) or self._gather(number)
        following = next((each for what, each in self._events[self._place :] if what == FILL), None)
        if following is not None and not self.pieces[following].is_there:
            self._coming[following] = self._gather(following)
        works.wait()

    def free(self, number: int) -> None:
        """Nobody reads the piece any more."""
        self._place += 1
        self.pieces[number].free()

    def _gather(self, number: int) -> PendingWork:
        piece, works = self.pieces[number], self._processes.pending_work()
        piece.make_room()
        part_of(self._processes, piece.flat, piece.cuts).copy_(piece.local)
        start_all_gather(works, piece.flat, piece.cuts)
        return works

    def sum(
        self, number: int, numbers: Optional[Tensor] = None, gradient: Optional[Tensor] = None
    ) -> Tensor:
        """This process's part of a gradient's sum over all processes.

        Args:
            number: of the piece.
            numbers: the loss and, if it counts something, what it is a mean over.
            gradient: flat, of the whole piece; None where this process has none.
        Returns:
            A tensor that has its values when the graph has run.
        """
        self._place += 1
        self._end_sum()
        piece = self.pieces[number]
        kind = self._dtype or piece.local.dtype
        if gradient is None or numbers is None:
            gradient = torch.zeros(piece.flat.shape, dtype=kind, device=self.device)
        elif self.factor is None:
            gradient = gradient.to(kind).mul_(numbers[1])
        else:
            gradient = gradient.to(kind)
            gradient = gradient if self.factor == 1 else gradient.mul_(self.factor)
        self._sum = PendingReduceScatter(self._processes, gradient, piece.cuts)
        return self._sum.result

    def _end_sum(self) -> None:
        if self._sum is not None:
            self._sum.end()
            self._sum = None

    def publish(self) -> None:
        """Bring the module's parameters up to date, in all processes."""
        with torch.no_grad():
            for number, piece in enumerate(self.pieces):
                self._gather(number).wait()
                for name, view in piece.views.items():
                    self._home[name].data.copy_(view)
                piece.free()
        self.note()

    def is_changed(self) -> bool:
        """Tell whether the module has other values than the parts, here."""
        with torch.no_grad():
            return not all(
                as_bytes(part_of(self._processes, _whole(piece.block), piece.cuts)).equal(
                    as_bytes(piece.local.cpu())
                )
                for piece in self.pieces
            )

    def note(self) -> None:
        """Remember that the module holds what the parts hold."""
        self._seen = self._signature()

    def was_touched(self) -> bool:
        """Tell whether the module's parameters were changed since the last publication."""
        return self._signature() != self._seen

    def _signature(self) -> List[Tuple[int, int]]:
        return [(each.data_ptr(), each._version) for each in self._home.values()]

    def release(self) -> None:
        """The module's parameters are where they were, with the values that they have."""
        self.blocks, self.flats, self.views, self.pieces = [], [], {}, []
        for parameter in self._home.values():
            if parameter.device != self.device:
                parameter.data = parameter.data.to(self.device)
        self._home = {}


def one_order(first: Sequence[Event], events: Sequence[Event]) -> Sequence[Event]:
    """Return the events of all graphs; those of the first one, if there was one, are the same.

    Raises:
        CaptureError: they are not, so that processes would wait for each other.
    """
    if first and events != first:
        raise CaptureError(
            "with shard='weights' all micro-batches must use the weights in the same order, but "
            "one of another size uses them in another order. Remove the branch on the batch "
            "size, or leave shard='weights' out."
        )
    return events


class ShardedStep:
    """Runs a graph, when it is known whose weights it takes.

    Args:
        recorded: stays as it is.
        inputs: names of its first inputs.
        gradients: how many of its last outputs are gradients.

    Attributes:
        events: what happens in it, in order; empty before weights are there.
    """

    def __init__(self, recorded: fx.GraphModule, inputs: Sequence[str], gradients: int) -> None:
        self._recorded = recorded
        self._inputs = inputs
        self._gradients = gradients
        self._weights: Optional[ShardedWeights] = None
        self._module: Optional[fx.GraphModule] = None
        self.events: List[Event] = []

    def take(self, weights: ShardedWeights) -> None:
        """Run with these from here on; all graphs that train with them have the same events.

        Raises:
            CaptureError: a weight is changed in place, or the order is another one.
        """
        if self._weights is weights:
            return
        module = fx.GraphModule(self._recorded, copy.deepcopy(self._recorded.graph))
        simplify(module.graph)
        names = [[slot.name for slot in piece.block.slots] for piece in weights.pieces]
        self.events = insert_weight_hooks(module, self._inputs, names, self._gradients)
        call_directly(module.graph)
        module.recompile()
        module.get_submodule("meeting").host = weights  # type: ignore[assignment]
        self._module, self._weights = module, weights
        if any(what == SUM for what, _ in self.events):
            weights.events = one_order(weights.events, self.events)

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        """One micro-batch, in all processes that have one."""
        assert self._weights is not None
        assert self._module is not None
        forward: Callable[..., List[Tensor]] = self._module.forward
        with self._weights.at_work(self.events):
            return forward(*tensors)


class FSDPOptimizer(ShardedOptimizer):
    """Applies the rules to this process's part of every piece, and leaves it there."""

    takes_parts = True

    def layout(self, named: NamedParameters, ages: Mapping[str, float]) -> List[FlatBlock]:
        """Neighbours that are updated alike are a piece together."""
        layout = super().layout
        return [block for piece in pieces_of(named) for block in layout(piece, ages)]

    def _flats_of(self, storage: FlatStorage) -> List[Tensor]:
        return storage.flats

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update of the own parts."""
        if self._bound:
            segments: List[List[slice]] = [[] for _ in gradients]
            for index, _, _, place in self._slots():
                segments[index].append(place)
            gradients = clipped_parts(self._processes, gradients, segments, self._bound)
        RuleOptimizer.apply(self, gradients)


def clipped_parts(
    processes: Processes,
    gradients: Sequence[Tensor],
    segments: Sequence[Sequence[slice]],
    clip: Clip,
) -> List[Tensor]:
    """Parts of gradients, bounded by the norm of the whole ones.

    Args:
        processes: all of them, which call this at the same time.
        gradients: flat, one for each block.
        segments: of each, where the parameters are of which it has a part; empty for none.
        clip: a bound on a norm.
    """
    squares = [
        torch.stack([_square(gradient[segment]) for segment in each])
        for gradient, each in zip(gradients, segments)
    ]
    together = torch.cat(squares)
    if clip.global_norm is not None:
        together = together.sum().expand(1).clone()
    processes.add([together])
    largest = clip.norm if clip.global_norm is None else clip.global_norm
    assert largest is not None
    factors = (largest / (together.sqrt() + 1e-6)).clamp(max=1.0)
    if clip.global_norm is not None:
        return [gradient * factors[0].to(gradient.dtype) for gradient in gradients]
    result, rest = [], iter(factors.unbind())
    for gradient, each in zip(gradients, segments):
        bounded = gradient.clone()
        for segment, factor in zip(each, rest):
            bounded[segment] *= factor.to(gradient.dtype)
        result.append(bounded)
    return result


def _square(gradient: Tensor) -> Tensor:
    # The square of a half-precision number overflows at 256; of a float32 norm, none that matters.
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm * norm
