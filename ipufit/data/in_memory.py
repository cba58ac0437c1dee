"""Rows in place of what yields them: arrays, and DataLoaders over tensors."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from ipufit.data.arrays import ArrayLoader, EpochOrder
from ipufit.data.rows import Rows
from ipufit.utils import tree

__all__ = ["rows_in_memory"]


def rows_in_memory(loader: Any) -> Optional[Rows]:
    """Make rows of memory that yield what a pass over a loader does, with its order and draws.

    Returns:
        The rows, or None for a loader that does anything but pick samples from tensors and stack
        them.
    """
    if isinstance(loader, Rows):
        return loader
    if isinstance(loader, ArrayLoader):
        return loader.rows(None)
    if not _is_plain_loader(loader) or not _picks_each_once(loader):
        return None
    dataset, picked = loader.dataset, None
    while type(dataset) is Subset:
        inner = _indices(dataset)
        if inner is None:
            return None
        picked = inner if picked is None else inner[picked]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not all(map(_can_be_stacked, dataset.tensors)):
        return None
    samples, size = len(loader.dataset), int(loader.batch_size)

    def order() -> Optional[Tensor]:
        # As torch's iterator does: a seed for workers first, then the order.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        chosen = _order(loader.sampler)
        if picked is None:
            return chosen
        return picked if chosen is None else picked[chosen]

    return Rows(
        lambda: dataset.tensors,
        tree.flatten([*dataset.tensors])[1],
        samples - samples % size if loader.drop_last else samples,
        size,
        order,
    )


def _is_plain_loader(loader: Any) -> bool:
    return (
        type(loader) is DataLoader
        and bool(loader.batch_size)
        and type(loader.batch_sampler) is BatchSampler
        and loader.collate_fn is default_collate
        and not loader.num_workers
        and not loader.pin_memory
    )


def _picks_each_once(loader: Any) -> bool:
    """True if each sample of the dataset comes once, in an order that is drawn all at once."""
    sampler = loader.sampler
    if type(sampler) is EpochOrder:
        return len(sampler) == len(loader.dataset)
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return False
    if sampler.data_source is not loader.dataset:
        return False
    return type(sampler) is SequentialSampler or (
        not sampler.replacement and sampler.num_samples == len(loader.dataset)
    )


def _order(sampler: Any) -> Optional[Tensor]:
    if type(sampler) is SequentialSampler:
        return None
    if type(sampler) is EpochOrder:
        return sampler.permutation()
    return torch.tensor(list(sampler), dtype=torch.int64, device="cpu")


def _indices(subset: Any) -> Optional[Tensor]:
    """Read the indices of a part of a dataset, if they are numbers from 0."""
    indices, length = subset.indices, len(subset.dataset)
    if not isinstance(indices, (range, list, tuple)):
        return None
    if not all(type(index) is int and 0 <= index < length for index in indices):
        return None
    return torch.tensor(indices, dtype=torch.int64, device="cpu")


def _can_be_stacked(tensor: Any) -> bool:
    """True if picking rows gives the bits, dtype and strides that stacking the samples does."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_complex()
        and not tensor.is_quantized
        and not tensor.is_neg()
    )
