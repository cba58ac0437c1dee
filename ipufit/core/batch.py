"""Micro-batches, the combined batch of an execution, and each process's part of it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import itertools
from types import MappingProxyType
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor

from ipufit.core.plan import Plan
from ipufit.utils import tree

T = TypeVar("T")
# A batch as a loader yields it, before it is looked at.
RawBatch = Any
# Positional and keyword arguments of the module, the target, and the samples' weights.
BatchParts = Tuple[Tuple[tree.Tree, ...], Dict[str, tree.Tree], tree.Tree, tree.Tree]


class Mode(enum.Enum):
    """Purpose of a program: to train, evaluate or predict."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"


def copy_leaf(leaf: tree.Leaf) -> tree.Leaf:
    """Copy a tensor, or another object of a batch, into memory of its own."""
    return leaf.clone() if hasattr(leaf, "clone") else copy.deepcopy(leaf)


def part_name(path: str) -> str:
    """A path inside (args, kwargs, target, sample_weight) as the user knows it.

    Args:
        path: with what is said of the whole batch before it.
    """
    head, colon, inside = path.rpartition(": ")
    words = ("input ", "input ", "target", "sample_weight")
    for prefix, word in zip(("[0]", "[1]", "[2]", "[3]"), words):
        if inside.startswith(prefix):
            return f"{head}{colon}{word}{inside[len(prefix) :]}"
    return path


def _move(leaf: tree.Leaf, device: torch.device) -> tree.Leaf:
    """Move a tensor to a device, or an object of a batch that can be moved."""
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    return leaf.to(device) if hasattr(leaf, "to") else leaf


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Batch of samples that one replica's forward sees at once.

    Attributes:
        leaves: its tensors, in the order of the structure; among them other objects, which only
            a module that is run eagerly takes, such as a graph of PyTorch Geometric's.
        structure: of (args, kwargs, target, sample_weight): what the module's forward is called
            with, what the loss compares outputs with (None if the module computes its own loss),
            and how much each sample counts (None if all count the same).
        size: number of samples, mostly the first dimension of every leaf that has one.
        extras: fields of the batch that the program does not take, by name, such as ids and file
            names: anything, as it came.
    """

    leaves: Tuple[Tensor, ...]
    structure: tree.Structure
    size: int
    extras: Mapping[str, object] = dataclasses.field(default_factory=dict)
    # The tensors that hold its leaves among those of others, and how many of these come before.
    _place: Optional[Tuple[Sequence[Tensor], int]] = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

    @staticmethod
    def unstack(leaves: Sequence[Tensor], structure: tree.Structure) -> List[MicroBatch]:
        """Make the micro-batches that tensors of shape (micro-batches, samples, ...) hold."""
        columns, size = map(Tensor.unbind, leaves), leaves[0].shape[1]
        micro_batches = [MicroBatch(rows, structure, size) for rows in zip(*columns)]
        for number, batch in enumerate(micro_batches):
            object.__setattr__(batch, "_place", (leaves, number))
        return micro_batches

    @staticmethod
    def concat_leaves(batches: Sequence[MicroBatch], which: Sequence[int]) -> List[Tensor]:
        """Concatenate some leaves of micro-batches of one size along the first dimension.

        No copy is made of what lies so in memory.
        """
        first = batches[0]
        if first._place is not None:
            whole, number = first._place
            if all(batch._is_at(whole, number + i) for i, batch in enumerate(batches)):
                return [whole[i][number : number + len(batches)].flatten(0, 1) for i in which]
        return [torch.cat([batch.leaves[i] for batch in batches]) for i in which]

    @property
    def kinds(self) -> Tuple[object, ...]:
        """Structure, and the dtype of each tensor, the class of any other object."""
        each = [leaf.dtype if isinstance(leaf, Tensor) else type(leaf) for leaf in self.leaves]
        return (self.structure, *each)

    @property
    def form(self) -> Tuple[object, ...]:
        """Structure, and dtype and shape of each tensor but for the number of samples."""
        tensors = [(leaf.dim(), leaf.shape[1:]) for leaf in self.tensors]
        return (*self.kinds, *tensors)

    def shares_storage_with(self, other: MicroBatch) -> bool:
        """True if both are rows of the same tensors, and so alike in all but their values."""
        place, others = self._place, other._place
        return place is not None and others is not None and place[0] is others[0]

    def _is_at(self, whole: Sequence[Tensor], number: int) -> bool:
        place = self._place
        return place is not None and place[0] is whole and place[1] == number

    @staticmethod
    def of(
        args: Tuple[object, ...],
        kwargs: Mapping[str, object],
        target: object,
        size: int,
        sample_weight: object = None,
        extras: Mapping[str, object] = MappingProxyType({}),
    ) -> MicroBatch:
        """Flatten a call of the module, its target and the samples' weights."""
        leaves, structure = tree.flatten((args, dict(kwargs), target, sample_weight))
        return MicroBatch(tuple(leaves), structure, size, extras)

    def unpack(self) -> BatchParts:
        """(args, kwargs, target, sample_weight)."""
        args, kwargs, target, sample_weight = tree.unflatten(self.leaves, self.structure)
        return args, kwargs, target, sample_weight

    @property
    def tensors(self) -> List[Tensor]:
        """The tensors among its leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def has_rows(self) -> bool:
        """True if each leaf is a tensor with a row for each sample, or one number for all.

        Pictures in a list have none, though they may have as many channels as there are samples.
        """
        args, kwargs, target, _ = self.unpack()
        for part in (*args, *kwargs.values(), target):
            # The fields that a loss takes are two dicts, of which one has no tensors.
            is_list = tree.is_list_of_samples(part) and all(map(tree.tensors, part))
            if is_list and len(part) == self.size:
                return False
        return all(
            isinstance(leaf, Tensor) and (not leaf.dim() or leaf.shape[0] == self.size)
            for leaf in self.leaves
        )

    def head(self, size: int) -> MicroBatch:
        """Cut a micro-batch that has rows down to its first samples."""
        leaves = tuple(leaf[:size] if leaf.dim() else leaf for leaf in self.leaves)
        extras = {name: _first_rows(value, self.size, size) for name, value in self.extras.items()}
        return MicroBatch(leaves, self.structure, size, extras)

    def clone(self) -> MicroBatch:
        """Copy the micro-batch into memory of its own."""
        leaves = tuple(map(copy_leaf, self.leaves))
        if not self.extras:
            return dataclasses.replace(self, leaves=leaves)
        return dataclasses.replace(self, leaves=leaves, extras=_copy_of(dict(self.extras)))

    def stripped(self) -> MicroBatch:
        """Return a micro-batch of this shape and dtype whose tensors hold no values in memory."""
        leaves = [
            torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf
            for leaf in self.leaves
        ]
        return MicroBatch(tuple(leaves), self.structure, self.size)

    def to(self, device: torch.device) -> MicroBatch:
        """Move the micro-batch to a device; returns itself if it is there already."""
        if all(isinstance(leaf, Tensor) and leaf.device == device for leaf in self.leaves):
            return self
        return dataclasses.replace(self, leaves=tuple(_move(leaf, device) for leaf in self.leaves))


def _copy_of(value: tree.Tree) -> tree.Tree:
    """Copy the numbers of a field, which a loader may write into again."""
    if type(value) in (list, tuple):
        return type(value)(map(_copy_of, value))
    if type(value) is dict:
        return {name: _copy_of(part) for name, part in value.items()}
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if type(value).__module__ == "numpy" else value


def _first_rows(value: tree.Tree, size: int, count: int) -> tree.Tree:
    """Cut a field with a value for each of ``size`` samples; any other one stays."""
    if isinstance(value, Mapping):
        return {name: _first_rows(part, size, count) for name, part in value.items()}
    is_text = isinstance(value, (str, bytes))
    try:
        has_rows = not is_text and len(value) == size
        return value[:count] if has_rows else value
    except TypeError:  # a number, a tensor of one, a set
        return value


@dataclasses.dataclass(frozen=True)
class DataCursor:
    """Position in the data, from which a checkpoint lets it go on.

    Attributes:
        number: of the pass over it.
        batches: of the pass, so far.
        generators: states of the user's generators that order it, as they were before the pass.
        own: what the data itself says, if it can go on from there; None if it can't.
    """

    number: int
    batches: int
    generators: Sequence[Tensor] = ()
    own: object = None


@dataclasses.dataclass(frozen=True)
class CombinedBatch:
    """The micro-batches of one execution in stream order: iteration, accumulation step, replica.

    The last execution of an epoch may hold fewer, and its last micro-batch may be smaller; each
    group of ``ga * R`` micro-batches is one update, and a short last group is a smaller update.

    Of several processes each holds what it computes itself, and knows how large all others are.

    Attributes:
        micro_batches: those of this process.
        place: where the data stands after them; None if nobody asks.
        layout: by update and place in it, the samples of the micro-batches of all processes, 0
            where there is none; None for one process.
        order: tells the order of the samples so far from another one; 0 where nobody can.
    """

    micro_batches: Sequence[MicroBatch]
    place: Optional[DataCursor] = None
    layout: Optional[Sequence[Sequence[int]]] = None
    order: int = 0

    @property
    def samples(self) -> int:
        """Number of samples in the execution, of all processes."""
        if self.layout is not None:
            return sum(map(sum, self.layout))
        return sum(micro_batch.size for micro_batch in self.micro_batches)

    def sizes(self, plan: Plan) -> List[List[int]]:
        """By update, the samples of the micro-batches of all processes, in stream order."""
        if self.layout is not None:
            return [[size for size in update if size] for update in self.layout]
        sizes = [micro_batch.size for micro_batch in self.micro_batches]
        group = plan.micro_batches_per_update
        return [sizes[i : i + group] for i in range(0, len(sizes), group)]

    def updates(self, plan: Plan) -> int:
        """Count the updates that the execution makes; the last one may be smaller."""
        if self.layout is not None:
            return len(self.layout)
        return -(-len(self.micro_batches) // plan.micro_batches_per_update)

    def accumulation_steps(self, plan: Plan) -> List[int]:
        """By update, how many micro-batches the replica that has most of them sums."""
        layout = self.layout if self.layout is not None else self.sizes(plan)
        last = [max(place for place, size in enumerate(u) if size) for u in layout]
        return [place // plan.all_replicas + 1 for place in last]

    def shares(self, plan: Plan) -> List[ProcessShard]:
        """Describe the part of each update that this process computes."""
        layout = self.layout if self.layout is not None else self.sizes(plan)
        return [ProcessShard.of(plan, tuple(update)) for update in layout]


@dataclasses.dataclass(frozen=True)
class ProcessShard:
    """The part of an update that one process computes.

    Attributes:
        sizes: samples of the update's micro-batches, of all processes, in stream order.
        places: where in a full update those of this process stand.
        indices: which of ``sizes`` they are.
        most: micro-batches of the process that has the most.
    """

    sizes: Tuple[int, ...]
    places: Tuple[int, ...]
    indices: Tuple[int, ...]
    most: int = 0

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(plan: Plan, sizes: Tuple[int, ...]) -> ProcessShard:
        """Make the shard of this process.

        Args:
            plan: of the update.
            sizes: by place, 0 where there is no micro-batch.
        """
        there = [place for place, size in enumerate(sizes) if size]
        indices = [i for i, place in enumerate(there) if plan.owner(place) == plan.process]
        return ProcessShard(
            tuple(sizes[place] for place in there),
            tuple(there[i] for i in indices),
            tuple(indices),
            max(counts_by_rank(sizes, plan)),
        )


def counts_by_rank(update: Sequence[int], plan: Plan, size: Optional[int] = None) -> List[int]:
    """Count the micro-batches of an update that each process has.

    Args:
        update: samples of the micro-batches of all processes, by place; 0 where there is none.
        plan: of the update.
        size: of those that count, in samples; None for all of them.
    """
    counts = [0] * plan.processes
    for place, each in enumerate(update):
        counts[plan.owner(place)] += each == size if size else each > 0
    return counts


def local_indices(shares: Sequence[ProcessShard]) -> List[int]:
    """Number the micro-batches of this process among those of all, in stream order."""
    numbers, begin = [], 0
    for share in shares:
        numbers += [begin + index for index in share.indices]
        begin += len(share.sizes)
    return numbers


def split_by_update(items: Iterable[T], shares: Sequence[ProcessShard]) -> List[List[T]]:
    """Split items, one for each of this process's micro-batches, into lists by update."""
    rest = iter(items)
    return [list(itertools.islice(rest, len(share.indices))) for share in shares]


def loss_counts(sizes: Sequence[int], micro_batch_size: int, summed: bool) -> List[int]:
    """For how many samples each micro-batch's loss stands in a mean over all of them.

    Args:
        sizes: samples in each micro-batch.
        micro_batch_size: samples in a full one.
        summed: whether a loss is a sum over the micro-batch rather than a mean. Then every sample
            counts as much as in a full micro-batch, so that a smaller last one does not change the
            scale.
    """
    return [micro_batch_size if summed else size for size in sizes]
