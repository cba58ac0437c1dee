"""Data in memory or mapped into it: arrays, tables, DataLoaders over tensors, read row by row."""

from __future__ import annotations

import dataclasses
import math
import numbers
import threading
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from ipufit.core.batch import RawBatch
from ipufit.errors import DataError, first_line, shown
from ipufit.utils import tree
from ipufit.utils.random_streams import Seeds

# Kinds of dtypes of NumPy's.
_NUMBERS = "biufc"
# Libraries of frames, by their method that fills in what is missing.
_FRAMES = {"pandas": "fillna", "polars": "fill_null"}


@dataclasses.dataclass
class ReadAhead:
    """Number of batches that a pass over the data may read ahead.

    Attributes:
        batches: so many will be asked for before anything is done with the first of them.
    """

    batches: int = 1


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """Batches of equally many rows that were read together.

    Attributes:
        leaves: the tensors, shape (batches, rows, *features).
        structure: how they make a batch.
    """

    leaves: Sequence[Tensor]
    structure: tree.Structure

    @staticmethod
    def of(rows: Sequence[Tensor], structure: tree.Structure, size: int) -> List[RowBlock]:
        """Divide rows into batches of this size, of which the last may have fewer."""
        count, rest = divmod(len(rows[0]), size)
        whole = [leaf[: count * size].view(count, size, *leaf.shape[1:]) for leaf in rows]
        blocks = [RowBlock(whole, structure)] if count else []
        if rest:
            blocks.append(RowBlock([leaf[-rest:].unsqueeze(0) for leaf in rows], structure))
        return blocks

    def __len__(self) -> int:
        return self.leaves[0].shape[0]

    def part(self, begin: int, end: int) -> RowBlock:
        """Cut out some of the batches."""
        return dataclasses.replace(self, leaves=[leaf[begin:end] for leaf in self.leaves])

    def each(self) -> Iterator[Tuple[Tensor, ...]]:
        """Yield the tensors of each batch."""
        return zip(*map(Tensor.unbind, self.leaves))

    def batches(self) -> List[RawBatch]:
        """Make batches as the user's loader has them."""
        return [tree.unflatten(rows, self.structure) for rows in self.each()]


def batch_count(raw: object) -> int:
    """Count the batches in what a pass over the data yields at once."""
    return len(raw) if isinstance(raw, RowBlock) else 1


@dataclasses.dataclass(frozen=True)
class ArrayLoader:
    """Batches of rows. Every batch is a copy, so that it never changes once it is read.

    Attributes:
        leaves: tells the tensors and arrays with the samples along the first dimension.
        structure: of a batch.
        samples: rows of the pass.
        batch_size: rows of a batch; the last one may have fewer.
        order: draws the indices of the rows, as the pass begins; None is their own order.
    """

    leaves: Callable[[], Sequence[tree.Leaf]]
    structure: tree.Structure
    samples: int
    batch_size: int
    order: Callable[[], Optional[Tensor]]

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __iter__(self) -> Iterator[RawBatch]:
        for picked in self.picked(ReadAhead()):
            yield from picked.batches()

    def shuffled(self, key: int) -> ArrayLoader:
        """Make a loader of all rows, in the order of ``key``."""
        return dataclasses.replace(self, order=EpochOrder(self.samples, key).permutation)

    def picked(self, horizon: ReadAhead, most: Optional[int] = None) -> Iterator[RowBlock]:
        """The batches of a pass, ``most`` of them at most, as many at once as are wanted."""
        order = self.order()
        samples = self.samples if most is None else min(self.samples, most * self.batch_size)
        begin = 0
        while begin < samples:
            leaves = self.leaves()
            end = min(begin + horizon.batches * self.batch_size, samples)
            rows = slice(begin, end) if order is None else order[begin:end]
            picked = [_copy(leaf, rows) for leaf in leaves]
            yield from RowBlock.of(picked, self.structure, self.batch_size)
            # Nothing is kept of batches that are done with.
            del leaves, picked
            begin = end


def is_in_memory(leaf: object) -> bool:
    """True if rows of it can be copied without a disk or another device."""
    if isinstance(leaf, Tensor):
        return leaf.device.type == "cpu"
    while leaf is not None:
        if any(kind.__name__ == "memmap" for kind in type(leaf).__mro__):
            return False
        leaf = getattr(leaf, "base", None)
    return True


def _copy(leaf: tree.Leaf, rows: Union[slice, Tensor]) -> Tensor:
    """Only these rows are read: of a memory-mapped array nothing else enters memory."""
    if isinstance(rows, Tensor) and rows.dim() > 1:
        copy = _copy(leaf, rows.reshape(-1))
        return copy.view(*rows.shape, *copy.shape[1:])
    if not isinstance(leaf, Tensor):
        return _dense(leaf[rows if isinstance(rows, slice) else rows.numpy()], copy=True)
    tensor: Tensor = leaf.detach()
    if threading.current_thread() is not threading.main_thread() and is_plain(tensor):
        return _copy_alone(tensor, rows)
    if isinstance(rows, slice):
        return tensor[rows].clone()
    return tensor.index_select(0, rows.to(tensor.device))


def is_plain(leaf: object) -> bool:
    """True of a tensor that nothing but its bytes, shape and dtype make out."""
    return (
        type(leaf) is Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and leaf.is_contiguous()
        and not leaf.requires_grad
        and not leaf.is_complex()
        and not leaf.is_quantized
        and not leaf.is_neg()
    )


def _copy_alone(leaf: Tensor, rows: Union[slice, Tensor]) -> Tensor:
    """In this thread alone, by NumPy.

    For many rows torch wakes other threads, and those that it wakes for a second thread get into
    the way of those that train: on two cores an update of a small network took 3 x the time.
    """
    import numpy

    if isinstance(rows, slice):
        rows = torch.arange(rows.start, rows.stop, device="cpu")
    copy = leaf.new_empty((len(rows), *leaf.shape[1:]))
    width = math.prod(leaf.shape[1:])
    source, target = (
        each.view(len(each), width).view(torch.uint8).numpy() for each in (leaf, copy)
    )
    numpy.take(source, rows.numpy(), 0, target, "clip")
    return copy


def is_datasets_table(value: object) -> bool:
    """True of a ``datasets.Dataset``, by its methods: the library is not imported."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != "datasets" or isinstance(value, dict):
        return False
    return all(hasattr(kind, name) for name in ("__getitem__", "__len__", "with_format"))


def as_tensors(value: tree.Tree) -> tree.Tree:
    """A table whose rows are tensors, as ``with_format("torch")`` has them; others as they are.

    One with a format or a transform of its own keeps it.
    """
    if is_datasets_table(value) and value.format["type"] is None:
        return value.with_format("torch")
    return value


def is_table(value: tree.Tree) -> bool:
    """Say whether an array has to be made of a value first: see :func:`as_arrays`.

    The libraries that have tables are not imported for that.
    """
    library = type(value).__module__.partition(".")[0]
    if library in _FRAMES:
        return hasattr(value, "to_numpy")
    if library == "scipy":
        return hasattr(value, "tocsr")
    depth = 0
    while tree.is_sequence(value) and value:
        parent, value, depth = value, value[0], depth + 1
        if isinstance(value, str):
            return depth == 1
        is_numpys = type(value).__module__ == "numpy" and not value.ndim
        if is_numpys or isinstance(value, (bool, int, float, complex)):
            return True
        if isinstance(parent, tuple) and depth > 1:
            return False  # a batch of parts
    return False


def as_arrays(value: tree.Tree, name: str) -> tree.Tree:
    """Make an array of every table in a structure.

    Args:
        value: a frame of pandas or polars, a sparse matrix of scipy, or a list of numbers, however
            deep; or these among tensors and arrays.
        name: of the value, with its role, for messages.

    Returns:
        The same structure; the value itself, if there is nothing to convert. A sparse matrix stays
        one, with rows that can be picked: it is made dense a batch at a time.

    Raises:
        DataError: a frame or a list that does not have a number in every place.
    """
    pairs, structure = tree.flatten_with_paths(value, name, is_table)
    if not any(is_table(leaf) for _, leaf in pairs):
        return value
    leaves = [as_array(leaf, path) if is_table(leaf) else leaf for path, leaf in pairs]
    return tree.unflatten(leaves, structure)


def as_array(table: tree.Leaf, name: str) -> tree.Leaf:
    """Make an array of one table.

    Args:
        table: as :func:`is_table` knows it.
        name: of the table, with its role, for messages.

    Raises:
        DataError: a frame or a list that does not have a number in every place.
    """
    if hasattr(table, "tocsr"):
        return table.tocsr()
    if not isinstance(table, (list, tuple)):
        return _frame_as_array(table, name)
    import numpy

    try:
        array = numpy.asarray(table)
        # Numbers of Python have the dtype that torch gives them.
        if array.dtype == numpy.float64 and torch.get_default_dtype() is torch.float32:
            array = array.astype(numpy.float32)
        return array
    except ValueError as error:
        raise DataError(
            f"{name} must have rows of equal length, got a {type(table).__name__} of rows of "
            "different lengths. Pad them, or pass batches whose rows have equal length."
        ) from error


def _frame_as_array(frame: tree.Leaf, name: str) -> tree.Leaf:
    """The numbers of a DataFrame or Series, row by row; its index is left aside.

    Args:
        frame: of pandas or polars.
        name: of the frame, with its role, for messages.

    Returns:
        A NumPy array of shape (rows, columns) or (rows,), in the dtype that holds all columns.

    Raises:
        DataError: a column holds something else than numbers, or misses one.
    """
    import numpy

    library = type(frame).__module__.partition(".")[0]
    is_polars = library == "polars"
    columns: Iterable[Tuple[object, tree.Leaf]] = [(None, frame)]
    if len(frame.shape) == 2:
        columns = zip(frame.columns, frame.get_columns()) if is_polars else frame.items()
    dtypes = []
    for label, column in columns:
        where = name if label is None else f"{name}: column {label!r}"
        if is_polars:
            is_float = column.dtype.is_float()
            present = (column.fill_nan(None) if is_float else column).drop_nulls().to_numpy()
        else:
            present = column.dropna()
        # Types of pandas' own, which know of missing values, stand beside one of NumPy's.
        dtype = present.dtype
        dtype = getattr(dtype, "numpy_dtype", getattr(dtype, "subtype", dtype))
        kind = getattr(dtype, "kind", "O")
        if kind not in "biuf":
            raise _no_numbers(where, column.dtype, kind, present)
        if len(present) < len(column):
            takes_nan = "; for a module that takes NaN, pass .to_numpy()" if kind == "f" else ""
            raise DataError(
                f"{where} must have a number in every row, but {len(column) - len(present)} of "
                f"{len(column)} are missing. Fill them, for example with .{_FRAMES[library]}(0), "
                f"or leave those rows out{takes_nan}."
            )
        dtypes.append(dtype)
    if not dtypes:
        raise DataError(f"{name} must have at least one column, got a frame without columns.")
    common = numpy.result_type(*dtypes)
    array = frame.to_numpy() if is_polars else frame.to_numpy(dtype=common)
    return numpy.asarray(array, dtype=common)


def _no_numbers(name: str, dtype: object, kind: str, values: Iterable[object]) -> DataError:
    """Make the error for data of a dtype of this kind, as NumPy has it, and what helps."""
    first = next(iter(values), None)
    came, cure = str(dtype), "Give each sample a number, or as many as all others, in one array."
    if isinstance(first, str):
        came = f"text such as {shown(str(first))} ({dtype})"
        cure = (
            "Number it, all data alike, with numbers = {text: i for i, text in "
            "enumerate(sorted(set(values)))} and [numbers[text] for text in values]; or leave the "
            "column out."
        )
    elif any(value is None for value in values):
        cure = "Fill what is missing (None), or leave those samples out."
    elif kind in "Mm":
        cure = "Convert it to numbers first: numpy.asarray(values).astype('int64')."
    elif kind == "V":
        cure = "Pass numpy.lib.recfunctions.structured_to_unstructured(values)."
    elif isinstance(first, numbers.Number):
        cure = "Convert it to one dtype: numpy.asarray(values).astype('float32')."
    return DataError(f"{name} must hold numbers, got {came}. {cure}")


def as_tensor(value: tree.Leaf, name: str) -> tree.Leaf:
    """Make a tensor of a number, or of an array or a table of numbers; anything else stays.

    Args:
        value: an array may share its memory with the tensor.
        name: of the value, with its role, for messages.

    Raises:
        DataError: a table without a number in every place, or a dtype that torch does not know.
    """
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value)
    array = as_array(value, name) if is_table(value) else value
    if isinstance(array, Tensor) or not is_array(array) or array.dtype.kind not in _NUMBERS:
        return value
    _refuse_dtype(array, name)
    return _dense(array, copy=False)


def _dense(array: tree.Leaf, copy: bool) -> Tensor:
    """A tensor of an array or a sparse matrix: writable, and in this machine's byte order.

    Args:
        array: of NumPy or scipy.
        copy: whether the tensor must have memory of its own.
    """
    if hasattr(array, "toarray"):
        array = array.toarray()
    native = array.dtype.newbyteorder("=")
    copies = copy or not array.flags.writeable
    # A base-class array: no memory map.
    return torch.as_tensor(array.astype(native, order="C", subok=False, copy=copies))


def is_array(value: object) -> bool:
    """True of a tensor, an array of NumPy's, memory-mapped ones included, or a sparse matrix."""
    library = type(value).__module__.partition(".")[0]
    return isinstance(value, Tensor) or (library in ("numpy", "scipy") and hasattr(value, "shape"))


class EpochOrder:
    """The indices of one epoch in an order that depends on ``key`` alone.

    Args:
        samples: how many there are.
        key: seed of a generator that nothing else uses; of several each has an order, and a sample
            is a row of each, along a dimension of its own.
    """

    def __init__(self, samples: int, key: int) -> None:
        self._samples = samples
        self._key = key

    def permutation(self) -> Tensor:
        """Draw the order of the samples, shape (samples,) or (samples, keys), int64."""
        if isinstance(self._key, Seeds):
            orders = [EpochOrder(self._samples, key).permutation() for key in self._key.each]
            return torch.stack(orders, 1)
        generator = torch.Generator(device="cpu").manual_seed(self._key)
        return torch.randperm(self._samples, generator=generator, device="cpu")

    def __iter__(self) -> Iterator[int]:
        return iter(self.permutation().tolist())

    def __len__(self) -> int:
        return self._samples


def array_loader(parts: object, names: List[str], batch_size: int, role: str) -> ArrayLoader:
    """Make a loader of the rows of tensors and arrays.

    Args:
        parts: nested tensors and arrays with the samples along the first dimension; None where a
            part is absent.
        names: how the user knows the parts, for messages; one per leaf.
        batch_size: rows of a batch; the last one may have fewer.
        role: what the data is for, for messages.

    Raises:
        DataError: a part that torch can't take, without rows, or of another length.
    """
    leaves, structure = tree.flatten(parts)
    samples = _samples(leaves, names, role)
    return ArrayLoader(lambda: leaves, structure, samples, batch_size, lambda: None)


def _samples(leaves: List[tree.Leaf], names: List[str], role: str) -> int:
    """The common length; every leaf is looked at before any is used."""
    sizes = []
    for name, leaf in zip(names, leaves):
        if leaf.ndim == 0:
            raise DataError(
                f"{role}: {name} must have the samples along its first dimension, got a scalar. "
                "Pass one row per sample; torch.stack turns a list of tensors into one tensor."
            )
        _refuse_gaps(leaf, f"{role}: {name}", name)
        if not isinstance(leaf, Tensor):
            _refuse_dtype(leaf, f"{role}: {name}")
        elif leaf.requires_grad:
            raise DataError(
                f"{role}: {name} must not require grad, but it does: gradients stop at the "
                f"program's inputs. Pass {name}.detach()."
            )
        sizes.append(int(leaf.shape[0]))
    if len(set(sizes)) > 1:
        cure = "Every part needs one row for each sample."
        if names[0] == f"{names[0].partition('[')[0]}[0]":
            cure = "A list holds one array per input; turn samples into one with numpy.stack."
        raise unequal_sizes(list(zip(names, sizes)), list(zip(names, leaves)), f"{role}: ", cure)
    if sizes[0] == 0:
        raise DataError(f"{role}: {names[0]} has no samples. Pass at least one.")
    return sizes[0]


def unequal_sizes(
    sizes: Sequence[Tuple[str, int]], named: Sequence[Tuple[str, tree.Leaf]], where: str, cure: str
) -> DataError:
    """Make the error for parts of a batch, or of all data, that have not as many samples each.

    Args:
        sizes: numbers of samples, each with the name of its part.
        named: all parts by name.
        where: begin of the message and of names.
        cure: end of the message, but where a part looks like the offsets of an EmbeddingBag.
    """
    first, size = sizes[0]
    other = next(pair for pair in sizes if pair[1] != size)
    for name, leaf in named:
        if is_array(leaf) and leaf.ndim == 1 and leaf.shape[0] > 1:
            begins = torch.as_tensor(leaf)
            grows = not begins.is_floating_point() and bool((begins[1:] > begins[:-1]).all())
            if grows and begins[0] == 0:
                cure = (
                    f"If {name} are the offsets of an EmbeddingBag, pad the bags instead: "
                    "nn.EmbeddingBag(..., padding_idx=0) takes indices of shape (batch, length)."
                )
    text = f"all parts must have the same number of samples, but {first} has {size} and {other[0]}"
    return DataError(f"{where}{text} has {other[1]}. {cure}")


def _refuse_gaps(leaf: object, where: str, name: str) -> None:
    """Refuse what does not hold every value: it could not be cut, or the gaps would be trained on.

    Raises:
        DataError: a masked array, or a sparse tensor.
    """
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            raise DataError(
                f"{where} must be dense, got a tensor of layout {leaf.layout}. Pass "
                f"{name}.to_dense(), or a DataLoader that makes dense batches."
            )
    elif type(leaf).__module__.startswith("numpy.ma"):
        raise DataError(
            f"{where} must have no masked values, got a masked array, whose hidden values would "
            f"be used for training. Pass {name}.filled(value), or leave those rows out."
        )


def _refuse_dtype(array: tree.Leaf, name: str) -> None:
    """Refuse an array of something else than numbers that torch knows.

    Args:
        array: of NumPy or scipy; no row of it is converted.
        name: of the array, with its role, for messages.

    Raises:
        DataError: it is one.
    """
    if array.dtype.kind not in _NUMBERS:
        raise _no_numbers(name, array.dtype, array.dtype.kind, array.flat)
    try:
        _dense(array[:0] if array.ndim else array, copy=True)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name} must have a dtype that torch knows, got {array.dtype}: {first_line(error)}. "
            "Convert it, for example with array.astype('float32')."
        ) from error


def rows_in_memory(loader: Any) -> Optional[ArrayLoader]:
    """Make rows of memory that yield what a pass over a loader does, with its order and draws.

    Returns:
        The rows, or None for a loader that does anything but pick samples from tensors and stack
        them.
    """
    if isinstance(loader, ArrayLoader):
        return loader
    if not _is_plain_loader(loader) or not _draws_at_once(loader):
        return None
    dataset, picked = loader.dataset, None
    while type(dataset) is Subset:
        inner = _indices(dataset.indices, dataset.dataset)
        if inner is None:
            return None
        picked = inner if picked is None else inner[picked]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not all(map(is_plain, dataset.tensors)):
        return None
    batches = loader.batch_sampler
    samples, size = len(batches.sampler), int(batches.batch_size)

    def order() -> Optional[Tensor]:
        chosen = _draw_order(loader)
        if picked is None:
            return chosen
        return picked if chosen is None else picked[chosen]

    return ArrayLoader(
        lambda: dataset.tensors,
        tree.flatten([*dataset.tensors])[1],
        samples - samples % size if batches.drop_last else samples,
        size,
        order,
    )


def rows_at(loader: object, places: List[int]) -> List[int]:
    """Rows that come at these places of a pass over a loader, which it begins; [] if nobody knows.

    Args:
        loader: of a pass; what a dataset picks by number are its rows.
        places: of samples, from 0.
    """
    if isinstance(loader, ArrayLoader):
        order = loader.order()
    elif _is_plain_loader(loader) and _draws_at_once(loader):
        order = _draw_order(loader)
    else:
        return []
    return places if order is None else order[places].tolist()


def _is_plain_loader(loader: object) -> bool:
    """True if nobody can tell by the batches whether this process reads them, or workers do."""
    return (
        type(loader) is DataLoader
        and type(loader.batch_sampler) is BatchSampler
        and loader.collate_fn is default_collate
        and loader.worker_init_fn is None
        # Workers that stay draw from it in the first pass alone.
        and not (loader.persistent_workers and loader.generator is not None)
        and not loader.pin_memory
    )


def _draws_at_once(loader: Any) -> bool:
    """True if the indices of a pass, all of them numbers from 0, may be drawn at its beginning."""
    sampler, dataset = loader.batch_sampler.sampler, loader.dataset
    kind = type(sampler)
    if kind is SubsetRandomSampler:
        return _indices(sampler.indices, dataset) is not None
    if kind in (EpochOrder, WeightedRandomSampler):
        weights = sampler.weights if kind is WeightedRandomSampler else sampler
        return len(weights) <= len(dataset)
    if kind not in (RandomSampler, SequentialSampler) or sampler.data_source is not dataset:
        return False
    # One that draws a few at a time has a generator of its own, unless it has the user's.
    is_whole = kind is SequentialSampler or sampler.generator is None
    return is_whole or (not sampler.replacement and sampler.num_samples == len(dataset))


def _draw_order(loader: Any) -> Optional[Tensor]:
    """Draw the order of a pass over a plain loader; None for that of the samples."""
    # As torch's iterator does: a seed for workers first, then the order.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    sampler = loader.batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        return None
    if type(sampler) is EpochOrder:
        return sampler.permutation()
    return torch.tensor(list(sampler), dtype=torch.int64, device="cpu")


def _indices(indices: object, dataset: Any) -> Optional[Tensor]:
    """Bring indices of a dataset into a tensor, if they are numbers from 0."""
    if not isinstance(indices, (range, list, tuple)):
        return None
    length = len(dataset)
    if not all(type(index) is int and 0 <= index < length for index in indices):
        return None
    return torch.tensor(indices, dtype=torch.int64, device="cpu")
