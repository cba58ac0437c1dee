"""Tensors, arrays and tables held whole: batches are cut from them, a few rows at a time."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import Tensor

from ipufit.data.rows import Rows
from ipufit.errors import DataError
from ipufit.utils import tree

__all__ = [
    "ArrayLoader",
    "EpochOrder",
    "as_tensors",
    "frame_as_array",
    "frame_as_tensor",
    "is_array",
    "is_frame",
    "is_table",
]


def is_table(value: Any) -> bool:
    """True of a ``datasets.Dataset``, by its methods: the library is not imported."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != "datasets" or isinstance(value, Mapping):
        return False
    return all(hasattr(kind, name) for name in ("__getitem__", "__len__", "with_format"))


def as_tensors(value: Any) -> Any:
    """A table whose rows are tensors, as ``with_format("torch")`` has them; others as they are.

    One with a format or a transform of its own keeps it.
    """
    if is_table(value) and value.format["type"] is None:
        return value.with_format("torch")
    return value


def is_frame(value: object) -> bool:
    """Say whether a value is a DataFrame or Series of pandas, which is not imported for that."""
    kind = type(value)
    return kind.__module__.partition(".")[0] == "pandas" and hasattr(kind, "to_numpy")


def frame_as_array(frame: Any, name: str) -> Any:
    """The numbers of a DataFrame or Series, row by row; its index is left aside.

    Args:
        frame: of pandas.
        name: of the frame, with its role, for messages.

    Returns:
        A NumPy array of shape (rows, columns) or (rows,), in the dtype that holds all columns.

    Raises:
        DataError: a column holds something else than numbers, or misses one that no integer or
            bool can stand for.
    """
    import numpy

    columns: Iterable[Tuple[Any, Any]] = frame.items() if frame.ndim == 2 else [(None, frame)]
    dtypes = []
    for label, column in columns:
        where = name if label is None else f"{name}: column {label!r}"
        dtype = column.dtype
        if getattr(dtype, "kind", "O") not in "biuf":
            raise DataError(
                f"{where} must hold numbers, got {dtype}. Turn it into numbers first, such as "
                ".astype('category').cat.codes, or leave it out."
            )
        if dtype.kind != "f" and column.isna().any():
            raise DataError(
                f"{where} must have a number in every row, but {int(column.isna().sum())} of "
                f"{len(column)} are missing. Fill them, such as .fillna(0), or leave such rows out."
            )
        # Types of pandas' own, which know of missing values, stand beside one of NumPy's.
        dtypes.append(getattr(dtype, "numpy_dtype", getattr(dtype, "subtype", dtype)))
    if not dtypes:
        raise DataError(f"{name} must have a column, got a frame without any. Pass at least one.")
    return frame.to_numpy(dtype=numpy.result_type(*dtypes))


def frame_as_tensor(frame: Any, name: str) -> Tensor:
    """A copy of the numbers of a frame, in the layout that a tensor of its rows has.

    Raises:
        DataError: as :func:`frame_as_array`.
    """
    return torch.from_numpy(frame_as_array(frame, name).copy())


def is_array(value: Any) -> bool:
    """True of a tensor or an array of NumPy's, memory-mapped ones included."""
    return isinstance(value, Tensor) or (
        type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "shape")
    )


class EpochOrder:
    """The indices of one epoch in an order that depends on ``key`` alone.

    Args:
        samples: how many there are.
        key: seed of a generator that nothing else uses.
    """

    def __init__(self, samples: int, key: int) -> None:
        self._samples = samples
        self._key = key

    def permutation(self) -> Tensor:
        """Shape (samples,), int64."""
        generator = torch.Generator(device="cpu").manual_seed(self._key)
        return torch.randperm(self._samples, generator=generator, device="cpu")

    def __iter__(self) -> Iterator[int]:
        return iter(self.permutation().tolist())

    def __len__(self) -> int:
        return self._samples


class ArrayLoader:
    """Batches of rows. Every batch is a copy, so that it never changes once it is read.

    Args:
        parts: nested tensors and arrays with the samples along the first dimension; None where a
            part is absent.
        names: how the user knows the parts, for messages; one per leaf.
        batch_size: rows of a batch; the last one may have fewer.
        role: what the data is for, for messages.

    Attributes:
        samples: number of rows.

    Raises:
        DataError: a part that torch can't take, without rows, or of another length.
    """

    def __init__(self, parts: Any, names: List[str], batch_size: int, role: str) -> None:
        self._leaves, self._structure = tree.flatten(parts)
        self.batch_size = batch_size
        self.samples = _samples(self._leaves, names, role)

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows(None))

    def rows(self, key: Optional[int]) -> Rows:
        """All rows, in the order of ``key``; None for their own."""

        def order() -> Optional[Tensor]:
            return None if key is None else EpochOrder(self.samples, key).permutation()

        return Rows(lambda: self._leaves, self._structure, self.samples, self.batch_size, order)


def _samples(leaves: List[Any], names: List[str], role: str) -> int:
    """The common length; every leaf is looked at before any is used."""
    sizes = []
    for name, leaf in zip(names, leaves):
        if leaf.ndim == 0:
            raise DataError(
                f"{role}: {name} must have the samples along its first dimension, got a scalar. "
                "Give one row per sample."
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
    for name, size in zip(names, sizes):
        if size != sizes[0]:
            raise DataError(
                f"{role}: all parts must have the same number of samples, but {names[0]} has "
                f"{sizes[0]} and {name} has {size}. Pass one row for each sample in every part."
            )
    if sizes[0] == 0:
        raise DataError(f"{role}: {names[0]} has no samples. Pass at least one.")
    return sizes[0]


def _refuse_gaps(leaf: Any, where: str, name: str) -> None:
    """Refuse what does not hold every value: it could not be cut, or the gaps would be trained on.

    Raises:
        DataError: a masked array, or a sparse tensor.
    """
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            raise DataError(
                f"{where} must be dense, got a tensor of layout {leaf.layout}. Pass "
                f"{name}.to_dense(), or a DataLoader that makes dense batches of it."
            )
    elif type(leaf).__module__.startswith("numpy.ma"):
        raise DataError(
            f"{where} must have a value everywhere, got a masked array, whose hidden values would "
            f"be trained on. Pass {name}.filled(value), or leave such rows out."
        )


def _refuse_dtype(array: Any, name: str) -> None:
    try:
        torch.from_numpy(array[:0].__array__().copy())
    except (TypeError, ValueError) as error:
        cure = "Turn it into numbers of one dtype, such as array.astype('float32')."
        if array.dtype.kind in "USOMm":
            cure = "Turn it into numbers first, such as class indices."
        raise DataError(
            f"{name} must have a dtype that torch knows, got {array.dtype}: "
            f"{str(error).partition(chr(10))[0].rstrip('.')}. {cure}"
        ) from error
