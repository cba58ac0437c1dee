"""Tables: what pandas and the datasets library keep data in, brought to arrays and tensors."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Tuple

import torch
from torch import Tensor

from ipufit.errors import DataError

__all__ = ["as_tensors", "frame_as_array", "frame_as_tensor", "is_frame", "is_table"]


def is_table(value: Any) -> bool:
    """Whether it is a ``datasets.Dataset``, by what it can do: the library is not imported."""
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
