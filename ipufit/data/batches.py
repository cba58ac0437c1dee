"""From a raw batch to a checked micro-batch, and from micro-batches to executions."""

from __future__ import annotations

import dataclasses
import operator
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ipufit.core.batch import BatchParts, CombinedBatch, MicroBatch, Mode, RawBatch, part_name
from ipufit.core.plan import Plan
from ipufit.data.casting import Casting, Casts
from ipufit.data.fields import BatchForm, refuse_listed
from ipufit.data.in_memory import ReadAhead, RowBlock, as_tensor, is_table, unequal_sizes
from ipufit.data.sharding import GlobalBatchIndex, layout_of
from ipufit.data.source import DataAdapter
from ipufit.data.weights import check_weight, ones_like
from ipufit.errors import DataError
from ipufit.utils import tree


class BatchValidator:
    """Turns the loader's batches into micro-batches, and refuses what the program could not take.

    Args:
        source: where the batches come from, for messages.
        mode: train, evaluate or predict.
        form: in which module and loss take batches.
        casting: chooses dtypes by the first batch; None leaves all as they are.

    Attributes:
        micro_batch_size: of the loader, or that of the first batch that was read.
    """

    def __init__(
        self, source: DataAdapter, mode: Mode, form: BatchForm, casting: Optional[Casting] = None
    ) -> None:
        self._source = source
        self._mode = mode
        self._form = form
        self._casting = casting
        # As they came, before their dtypes are changed: the very first batch, and the last one.
        self._first: Optional[MicroBatch] = None
        self._last: Optional[MicroBatch] = None
        # Names of the tensors of the first batch, and the dtypes in which batches come, by what
        # they were; and those for batches like the last one.
        self._names: List[str] = []
        self._casts: Dict[object, Casts] = {}
        self._last_casts: Casts = ()
        self._announces = False
        # Of picked rows that make a batch like the last: their structure, and how many are used.
        self._picked: Optional[tree.Structure] = None
        self._used = 0
        self.micro_batch_size = source.micro_batch_size

    def each(self, raw: object, index: int) -> List[MicroBatch]:
        """The micro-batches of what the source yields at once, which begins with ``index``.

        Those of a source that may overwrite them are copies.

        Raises:
            DataError: as from a call.
        """
        if not isinstance(raw, RowBlock):
            self._picked = None
            micro_batch = self(raw, index)
            return [micro_batch.clone() if self._source.reuses_memory else micro_batch]
        last, used = self._last, raw.leaves[: self._used]
        if last is not None and raw.structure == self._picked:
            # Then none of the batches needs a closer look.
            pairs = zip(used, last.leaves)
            if all(a.shape[1:] == b.shape and a.dtype == b.dtype for a, b in pairs):
                return MicroBatch.unstack(cast(used, self._last_casts), last.structure)
        return [
            self._picked_one(leaves, raw.structure, index + i)
            for i, leaves in enumerate(raw.each())
        ]

    def _picked_one(
        self, leaves: Sequence[Tensor], structure: tree.Structure, index: int
    ) -> MicroBatch:
        batch = self._unpacked(tree.unflatten(leaves, structure), index)
        used = leaves[: len(batch.leaves)]
        same = not is_weighted(batch) and not batch.extras
        same = same and all(map(operator.is_, used, batch.leaves))
        self._picked, self._used = (structure if same else None), len(used)
        return self._in_dtypes(batch)

    def __call__(self, raw: object, index: int) -> MicroBatch:
        """The micro-batch for the loader's batch number ``index`` of this epoch.

        Raises:
            DataError: it is not what the module and loss take, or has more samples than the
                loader's ``batch_size``.
        """
        return self._in_dtypes(self._unpacked(raw, index))

    def recast(self) -> Optional[MicroBatch]:
        """The first micro-batch with whole numbers in another dtype, in which all others come then.

        Returns:
            None where there is no other way.
        """
        first = self._first
        if self._casting is None or first is None:
            return None
        ways = self._casting.ways(first)
        others = ways[ways.index(self._casts[first.kinds]) + 1 :]
        if not others:
            return None
        self._casts, self._last, self._last_casts = {first.kinds: others[0]}, first, others[0]
        return self._in_dtypes(first)

    def accept_dtypes(self, announce: bool) -> None:
        """Keep the dtypes of the first batch, which the program runs with.

        Args:
            announce: whether to warn of those that differ from the user's.
        """
        first = self._first
        if self._casting is None or first is None:
            return
        casts = self._casts[first.kinds]
        self._casting.choose(first, casts)
        self._announces = announce
        if announce:
            self._casting.announce(self._source.role, first, self._names, casts)

    def _in_dtypes(self, batch: MicroBatch) -> MicroBatch:
        leaves = cast(batch.leaves, self._last_casts)
        if leaves is batch.leaves:
            return batch
        return dataclasses.replace(batch, leaves=tuple(leaves))

    def _unpacked(self, raw: RawBatch, index: int) -> MicroBatch:
        where = f"{self._source.role}, batch {index}"
        has_parts = tree.is_sequence(raw) and not self._form.own_loss
        if has_parts and any(map(is_table, raw)):
            raw = [_without_lists(part, where) for part in raw]
        parts, extras = self._form.split(raw, self._mode, where)
        call = self._weighted(parts, index)
        if self._form.loss_fields is not None and self._mode is not Mode.PREDICT:
            call = self._form.for_loss(raw, call)
        leaves, structure = tree.flatten(call)
        is_list = self._first is None and isinstance(self._source.loader, (list, tuple))
        if is_list and not self._form.own_loss:
            refuse_listed(call[:2], parts[2], self._source.role, "dicts")
        last = self._last
        if last is not None and _is_like(last, leaves, structure):
            return MicroBatch(tuple(leaves), structure, last.size, extras)
        where = f"{where}: "
        pairs, _ = tree.flatten_with_paths(call, where)
        named = [(part_name(path), _leaf(part_name(path), leaf)) for path, leaf in pairs]
        # Steps of the user's own may take parts of several sizes, of which the first one counts.
        counted = named[:1] if self._form.own_loss == "whole" else named
        size = _size(counted, call, where)
        batch = MicroBatch(tuple(leaf for _, leaf in named), structure, size, extras)
        first = self._first
        if first is not None and is_weighted(first) and not is_weighted(batch):
            weight = ones_like(first.unpack()[3], size)
            batch = MicroBatch.of(*batch.unpack()[:3], size, weight, extras)
        self._compare(batch, [name for name, _ in named], index)
        self._last = batch
        return batch

    def _weighted(self, call: BatchParts, index: int) -> BatchParts:
        """With weights that are known to be good: the batch's own, or those of its classes."""
        args, kwargs, target, weight = call
        by_class = self._source.class_weights
        where = f"{self._source.role}, batch {index}: "
        if weight is None and by_class is None:
            return call
        if by_class is None:
            return args, kwargs, target, check_weight(weight, f"{where}sample_weight")
        if weight is not None:
            raise DataError(
                f"{where}a batch can't have its own sample_weight together with class_weight. "
                "Leave one out, or multiply them in the dataset."
            )
        floating = None if self._casting is None else self._casting.floating()
        return args, kwargs, target, by_class.of(target, f"{where}target", floating)

    def _compare(self, batch: MicroBatch, names: List[str], index: int) -> None:
        where = f"{self._source.role}, batch {index}: "
        if self.micro_batch_size is None:
            self.micro_batch_size = batch.size
        names = [name[len(where) :] for name in names]
        first = self._first
        if first is None:
            first, self._names = batch, names
            self._first = batch
        if self._form.sums_weights and is_weighted(batch) and not is_weighted(first):
            raise DataError(
                f"{where}if the loss is divided by the sum of weights, all batches must have a "
                "sample_weight or none, but this is the first one that has. Yield (inputs, "
                "target, sample_weight) every time; a weight of 1 changes nothing."
                + self._source.origin()
            )
        casting, kinds = self._casting, batch.kinds
        if casting is not None and kinds not in self._casts:
            if batch is first:
                casts = casting.ways(batch)[0]
            else:
                casts = casting.casts_like(first, self._casts[first.kinds], batch)
            self._casts[kinds] = casts
            if self._announces:
                casting.announce(self._source.role, batch, names, casts)
        self._last_casts = self._casts.get(kinds, ())
        most = self._source.micro_batch_size
        if most is not None and batch.size > most:
            raise DataError(
                f"{where}a batch may have at most as many samples as the DataLoader's "
                f"batch_size, {most}, got {batch.size}. If collate_fn makes several rows from "
                "one sample, let it put them along another dimension, or pass your own object "
                "whose __iter__ reads the DataLoader." + self._source.origin()
            )


def cast(leaves: Sequence[Tensor], casts: Casts) -> Sequence[Tensor]:
    """Bring tensors to other dtypes; without any, returns the sequence itself."""
    if not any(casts):
        return leaves
    return [leaf if dtype is None else leaf.to(dtype) for leaf, dtype in zip(leaves, casts)]


def _is_like(last: MicroBatch, leaves: List[tree.Leaf], structure: tree.Structure) -> bool:
    """True if a batch needs no closer look: the usual case, found out quickly."""
    return structure == last.structure and all(
        type(now) is type(before) is Tensor
        and now.shape == before.shape
        and now.dtype == before.dtype
        and now.dim() > 0
        and not now.requires_grad
        for now, before in zip(leaves, last.leaves)
    )


def _without_lists(part: tree.Tree, name: str) -> tree.Tree:
    """A tensor for a list of numbers; any other list is for a module that runs itself."""
    try:
        return as_tensor(part, name) if tree.is_sequence(part) else part
    except DataError:
        return part


def _leaf(name: str, leaf: object) -> tree.Leaf:
    """A leaf as a tensor; what no tensor can be made of as it is, for a module that runs itself."""
    leaf = as_tensor(leaf, name)
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        raise DataError(
            f"{name} must not require grad, but it does: gradients stop at the program's inputs. "
            "Pass tensor.detach()."
        )
    return leaf


def _size(named: Sequence[Tuple[str, tree.Leaf]], call: BatchParts, where: str) -> int:
    """Count the samples of a batch.

    They are what an object says, else the first dimension of all tensors. Where these differ, each
    part may have an entry for each sample instead: a list of images, of dicts of boxes.

    Raises:
        DataError: the parts of the batch disagree, or nothing says it.
    """
    sizes = [
        (name, leaf.shape[0]) for name, leaf in named if isinstance(leaf, Tensor) and leaf.dim()
    ]
    objects = [(name, leaf) for name, leaf in named if not isinstance(leaf, Tensor)]
    stated = [(name, size) for name, each in objects for size in _stated_sizes(each)]
    args, kwargs, target, weight = call
    whole = (*args, *kwargs.values(), target, weight)
    parts = [_entries(part) for part in whole if part is not None]
    has_entries = None not in parts and len(set(parts)) == 1
    differ = len({size for _, size in sizes}) != 1
    if stated:
        sizes = stated
    elif has_entries and (differ or any(map(tree.is_list_of_samples, whole))):
        assert parts[0] is not None
        return parts[0]
    elif objects and not sizes:
        # A whole graph is one sample.
        return 1
    if not sizes:
        raise DataError(
            f"{where}no tensor has a batch dimension. Every input and target needs the samples "
            "along its first dimension."
        )
    first_name, size = sizes[0]
    if len({count for _, count in sizes}) > 1:
        short = [[(name[len(where) :], e) for name, e in pairs] for pairs in (sizes, named)]
        raise unequal_sizes(short[0], short[1], where, "Check the dataset or collate_fn.")
    if size == 0:
        raise DataError(f"{first_name} has no samples. Leave empty batches out of the loader.")
    return int(size)


def _stated_sizes(value: object) -> Iterator[int]:
    """Yield what an object says of the number of its samples, if it says anything."""
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0])
        return
    for name in ("batch_size", "num_graphs"):
        size = getattr(value, name) if hasattr(value, name) else None
        if isinstance(size, int):
            yield size
            return


def _entries(part: tree.Tree) -> Optional[int]:
    """Count the entries of a list, or the rows of a tensor; None of anything else."""
    if tree.is_sequence(part) or (isinstance(part, Tensor) and part.dim()):
        return len(part)
    return None


class OneShapeUpdates:
    """Reorders micro-batches so that those of an update have one shape, for an engine that asks.

    Each waits until there are as many of its shape as an update takes.

    Args:
        plan: says how many are in an update.
        updates: so many at the beginning are left out: a run that goes on has made them.
        role: what the data is for.
    """

    def __init__(self, plan: Plan, updates: int, role: str) -> None:
        self._plan = plan
        self._skip = updates
        self._role = role
        self._waiting: Dict[object, List[MicroBatch]] = {}

    @property
    def waits(self) -> bool:
        """True if a micro-batch was read that is in no update yet."""
        return bool(self._waiting)

    def add(self, batches: Sequence[MicroBatch]) -> List[MicroBatch]:
        """Take the next micro-batches of the loader, and return those of updates that are full.

        Raises:
            DataError: an epoch is to have so many updates, which smaller ones for each shape at its
                end would be too many for.
        """
        full: List[MicroBatch] = []
        for batch in batches:
            update = self._waiting.setdefault(batch.form, [])
            update.append(batch)
            if len(update) == self._plan.micro_batches_per_update:
                full += self._unless_done(self._waiting.pop(batch.form))
        if len(self._waiting) > 1 and self._plan.fixed_updates is not None:
            raise DataError(
                f"{self._role}: all micro-batches of an update on an IPU have the same shape, "
                "and with steps_per_epoch none can wait for others of its shape, but several "
                "shapes came. Leave steps_per_epoch out, pad to one shape in collate_fn, or use "
                "engine='embedded'."
            )
        return full

    def rest(self, first: List[MicroBatch]) -> Iterator[List[MicroBatch]]:
        """Yield full updates, and the smaller ones that are left at the end of an epoch.

        Args:
            first: micro-batches of the full ones; there is a smaller one for each shape.
        """
        yield first
        while self._waiting:
            yield self._unless_done(self._waiting.pop(next(iter(self._waiting))))

    def _unless_done(self, update: List[MicroBatch]) -> List[MicroBatch]:
        is_done, self._skip = self._skip > 0, max(0, self._skip - 1)
        return [] if is_done else update


def executions(
    batches: Iterable[object],
    unpack: Callable[[RawBatch, int], Sequence[MicroBatch]],
    plan: Plan,
    check_update: Optional[Callable[[Sequence[MicroBatch], int], None]],
    updates: Callable[[], int],
    horizon: ReadAhead,
    one_shape: Optional[OneShapeUpdates],
) -> Iterator[CombinedBatch]:
    """Micro-batches in the loader's order, as many to an execution as the plan says.

    Args:
        batches: what the source yields in an epoch.
        unpack: makes micro-batches of what it yields at once, and the index of the first of them.
        plan: says how many belong together. The last execution may hold fewer.
        check_update: told the weighted micro-batches of an update, and the index of their last.
        updates: how many make the next execution, asked before each.
        horizon: told how many batches the execution still wants.
        one_shape: brings them into another order; None for the loader's.
    """
    per_update = plan.micro_batches_per_update
    group: List[MicroBatch] = []
    index = 0
    horizon.batches = per_update * updates()
    for raw in batches:
        new = unpack(raw, index)
        index += len(new)
        if one_shape is not None:
            new = one_shape.add(new)
            if not new:
                continue
        horizon.batches -= len(new)
        group += new
        if check_update and is_weighted(new[-1]):
            for end in range(len(group) - len(new) + 1, len(group) + 1):
                if end % per_update == 0:
                    check_update(group[end - per_update : end], index - 1 - len(group) + end)
        del raw, new
        if not horizon.batches:
            yield CombinedBatch(group)
            group = []
            horizon.batches = per_update * updates()
    for last in [group] if one_shape is None else one_shape.rest(group):
        rest = len(last) % per_update
        if check_update and rest and is_weighted(last[-1]):
            check_update(last[-rest:], index - 1)
        if last:
            yield CombinedBatch(last)


def sharded_executions(
    batches: Iterator[object],
    unpack: Callable[[RawBatch, int], Sequence[MicroBatch]],
    plan: Plan,
    ledger: GlobalBatchIndex,
    updates: Callable[[], int],
    horizon: ReadAhead,
) -> Iterator[CombinedBatch]:
    """Yield this process's part of the executions that all processes make together.

    Args:
        batches: the own ones of an epoch.
        unpack: makes micro-batches of what it yields at once, and the index of the first of them.
        plan: says how many belong together.
        ledger: knows the sizes of all batches, once the first of an update is read.
        updates: how many make the next execution, asked before each; 0 ends the epoch.
        horizon: told how many batches the execution still wants.
    """
    most = updates()
    while most:
        begin, end = ledger.begin, ledger.begin + plan.micro_batches_per_update * most
        micro_batches = ledger.waiting
        while not ledger.is_whole:
            lacking = plan.own_before(end) - plan.own_before(begin) - len(micro_batches)
            if lacking <= 0 and ledger.total >= end:
                break
            horizon.batches = max(1, lacking)
            raw = next(batches, None)
            if raw is None:
                ledger.is_whole = True
                break
            new = unpack(raw, plan.own_before(begin) + len(micro_batches))
            micro_batches += new
            del raw, new
        end = min(end, ledger.total)
        if end == begin:
            return
        count = plan.own_before(end) - plan.own_before(begin)
        ledger.waiting = micro_batches[count:]
        layout = layout_of(plan, ledger.take(end))
        batch = CombinedBatch(micro_batches[:count], layout=layout, order=ledger.order())
        del micro_batches
        yield batch
        del batch
        most = updates()


def is_weighted(batch: MicroBatch) -> bool:
    """True if its samples count by a weight each."""
    return batch.structure.children[3].kind is not type(None)
