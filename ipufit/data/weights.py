"""How much each sample counts: weights in a batch, beside the arrays, or by class."""

from __future__ import annotations

import math
from typing import Dict, Mapping, Optional, Sequence

import torch
from torch import Tensor

from ipufit.core.batch import MicroBatch
from ipufit.data.in_memory import as_tensor
from ipufit.errors import DataError, unfit
from ipufit.utils import tree
from ipufit.utils.error_collector import number_in, whole_number

_CHUNK = 1 << 20


def check_weight(weight: object, name: str) -> tree.Tree:
    """Weights as floating-point tensors, every value known to be finite and not negative.

    Integers and bools become torch's default dtype; a floating dtype stays. Nested weights keep
    their structure.

    Args:
        weight: a tensor, an array, or such by output; the samples along the first dimension.
        name: with role and batch, for messages.

    Raises:
        DataError: naming the first bad one.
    """
    pairs, structure = tree.flatten_with_paths(weight, name)
    return tree.unflatten([_checked(leaf, path) for path, leaf in pairs], structure)


def _checked(leaf: tree.Leaf, name: str, first: int = 0) -> tree.Leaf:
    leaf = as_tensor(leaf, name)
    if not isinstance(leaf, Tensor):
        raise DataError(
            f"{name} must be a tensor, got {type(leaf).__name__}. Convert it in the dataset or in "
            "collate_fn."
        )
    if leaf.dim() == 0:
        raise DataError(
            f"{name} must have one weight per sample, got a single number. Leave it out, or repeat "
            "it for each sample."
        )
    if leaf.is_complex():
        raise DataError(
            f"{name} must be real, got {leaf.dtype}. Pass floating-point weights, one per sample."
        )
    if not leaf.is_floating_point():
        leaf = leaf.to(torch.get_default_dtype())
    good = leaf.isfinite() & (leaf >= 0)
    if not good.all():
        place = (~good).nonzero()[0].tolist()
        value = leaf[tuple(place)].item()
        place[0] += first
        where = place[0] if len(place) == 1 else tuple(place)
        advice = "If it is no weight, yield ((first, second), target) or a dict." * (leaf.dim() > 1)
        raise DataError(
            f"{name} must be finite and not negative, but is {value:g} at position {where}. Use "
            f"0 to leave a sample out. {advice}".rstrip()
        )
    return leaf


def refuse_bad_weights(weight: object, names: Sequence[str], role: str, training: bool) -> None:
    """Look at the weights of a whole data set, a part at a time.

    Raises:
        DataError: a bad value, with its position, or, in training, not a single one above zero.
    """
    positive = False
    for name, leaf in zip(names, tree.flatten(weight)[0]):
        for begin in range(0, leaf.shape[0], _CHUNK):
            part = _checked(leaf[begin : begin + _CHUNK], f"{role}: {name}", begin)
            positive = positive or bool((part > 0).any())
    if training and not positive:
        raise DataError(
            f"{role}: sample_weight must have a weight above zero, but all are zero, so nothing "
            "would be learned. Leave it out, or give some samples a positive weight."
        )


def refuse_zero_update(update: Sequence[MicroBatch], last_batch: int, role: str) -> None:
    """Raise where the weights of a whole update are zero.

    Args:
        update: its micro-batches.
        last_batch: index of the last of them in the epoch.
        role: what the data is for.

    Raises:
        DataError: they are.
    """
    if not any(map(has_weight, update)):
        raise zero_update(role, last_batch - len(update) + 1, last_batch)


def has_weight(micro_batch: MicroBatch) -> bool:
    """True if a sample of it counts."""
    leaves = tree.flatten(micro_batch.unpack()[3])[0]
    return not leaves or any(bool((leaf > 0).any()) for leaf in leaves)


def ones_like(weight: tree.Tree, size: int) -> tree.Tree:
    """Weights in this form with which each of so many samples counts once."""
    return tree.map_leaves(lambda leaf: leaf.new_ones(size), weight)


def zero_update(role: str, first: int, last: int) -> DataError:
    """The error for an update in which no sample counts.

    Args:
        role: what the data is for.
        first, last: the batches of the epoch that it is made of.
    """
    batches = f"batch {first}" if first == last else f"batches {first} to {last}"
    return DataError(
        f"{role}, {batches}: an update needs a sample_weight above zero, but all of its weights "
        "are zero, so nothing would be learned. Leave such samples out, or use larger or shuffled "
        "batches."
    )


class ClassWeights:
    """A weight for each class; classes that are not named weigh 1, as in Keras.

    Args:
        weights: by class index.

    Attributes:
        by_class: the weights of the classes that are named.

    Raises:
        ConfigurationError: it is no such mapping.
    """

    def __init__(self, weights: object) -> None:
        if not isinstance(weights, Mapping) or not weights:
            needed = "a dict of weights by class index, such as {0: 1.0, 1: 5.0}"
            raise unfit("class_weight", needed, weights)
        self.by_class: Dict[int, float] = {}
        for key, value in weights.items():
            index = whole_number(key)
            if index is None or index < 0:
                advice = "Count the classes from 0, as in the target."
                raise unfit("a key of class_weight", "a class index from 0", key, advice)
            needed, advice = "a number, finite and not negative", "Use 0 to leave a class out."
            words = (f"class_weight[{index}]", value, needed)
            weight = number_in(*words, lambda number: 0 <= number < math.inf, advice)
            self.by_class[index] = weight

    def of(self, target: object, name: str, dtype: Optional[torch.dtype] = None) -> Tensor:
        """Look up a weight for every sample, in torch's default dtype or a wider one.

        Args:
            target: class indices of shape (batch,) or (batch, 1), whole numbers of any dtype, or
                shape (batch, classes) with rows that sum to one.
            name: of the target, for messages.
            dtype: in which the module computes; None where that is not one dtype.

        Raises:
            DataError: it is neither.
        """
        target = as_tensor(target, name)
        classes = _classes(target)
        if classes is None:
            came = f"shape {tuple(target.shape)}" if isinstance(target, Tensor) else "several parts"
            raise DataError(
                f"{name} must hold one class per sample for class_weight: whole numbers of shape "
                f"(batch,), or one-hot rows or probabilities of shape (batch, classes), got {came}"
                f"{_dtype(target)}. Use sample_weight instead: beside y, or as the third part of a "
                "batch; of several outputs, weights for each."
            )
        wide = torch.promote_types(dtype or torch.float32, torch.get_default_dtype())
        result = torch.ones(classes.shape, dtype=wide, device=classes.device)
        for index, weight in self.by_class.items():
            result = torch.where(classes == index, torch.full_like(result, weight), result)
        return result


def _dtype(target: object) -> str:
    return f" {target.dtype} with other values" if isinstance(target, Tensor) else ""


def _classes(target: object) -> Optional[Tensor]:
    if not isinstance(target, Tensor) or target.is_complex() or target.dim() not in (1, 2):
        return None
    if target.dim() == 2 and target.shape[1] > 1:
        sums = target.sum(1)
        close = (sums - 1).abs() <= 1e-3 if target.is_floating_point() else sums == 1
        if not bool((close & (target >= 0).all(1)).all()):
            return None
        return (target.long() if target.dtype == torch.bool else target).argmax(1)
    flat = target.reshape(-1)
    if flat.is_floating_point() and not bool((flat == flat.round()).all()):
        return None
    return flat.long()
