"""Dtypes in which batches are fed: those that module and loss compute in."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch
from ipufit.core.objective_arguments import dtype_name
from ipufit.core.train_config import Precision
from ipufit.losses import Loss
from ipufit.utils import tree
from ipufit.utils.console import warn_user

# For each tensor of a batch the dtype to bring it to; None to leave it as it is.
Casts = Tuple[Optional[torch.dtype], ...]

_LABELS = ("labels", "label", "targets", "target", "y")


class Casting:
    """Chooses the dtypes of batches, as Keras does: by the weights, and by what the loss takes.

    Floating-point inputs come in the dtype of the module's parameters, if all have the same one.
    Targets of a loss over classes come as int64, those of other losses of torch in floating point;
    float64 is narrowed wherever the module computes in less. A program that does not run with
    whole numbers as they are is tried once more with them in another dtype.

    Args:
        module: the user's; its parameters are looked at for every batch that is asked about.
        loss: normal form.
        precision: where it says in what dtype inputs and targets come, the program sees to that.
    """

    def __init__(self, module: nn.Module, loss: Loss, precision: Precision) -> None:
        self._module = module
        self._loss = loss
        self._is_set = precision.inputs is not None
        self._chosen: Dict[Tuple[torch.dtype, ...], int] = {}
        self._announced: Set[str] = set()
        self._changes: Dict[str, str] = {}

    def ways(self, batch: MicroBatch) -> List[Casts]:
        """The casts to try for batches like this one, in this order.

        The first one costs nothing that would run without; :meth:`choose` makes another the first.
        """
        start = self._chosen.get(_dtypes(batch), 0)
        return list(dict.fromkeys(self._levels(batch)))[start:]

    def casts_like(self, first: MicroBatch, casts: Casts, batch: MicroBatch) -> Casts:
        """The casts for a batch of other dtypes than the first, whose whole numbers go as there.

        Args:
            first: the first batch.
            casts: what is done with it.
            batch: another one.
        """
        level, levels = self._levels(first).index(casts), self._levels(batch)
        return levels[min(level, len(levels) - 1)]

    def _levels(self, batch: MicroBatch) -> List[Casts]:
        """The casts at each level of :meth:`_casts`; a single one where nothing is cast."""
        if self._loss.in_module == "whole" or len(batch.tensors) < len(batch.leaves):
            return [(None,) * len(batch.leaves)]
        return [self._casts(batch, level) for level in range(3)]

    def choose(self, batch: MicroBatch, casts: Casts) -> None:
        """Begin with these casts from now on, which such a batch runs with."""
        self._chosen.setdefault(_dtypes(batch), 0)
        self._chosen[_dtypes(batch)] += self.ways(batch).index(casts)

    def announce(self, role: str, batch: MicroBatch, names: Sequence[str], casts: Casts) -> None:
        """Warn that tensors come in another dtype, once for each way in which they do.

        Targets that are bools are no reason: nothing is lost, and what they become is larger.

        Args:
            role: what the data is for.
            batch: as it came.
            names: of its tensors.
            casts: what is done to them.
        """
        changes: Dict[str, bool] = {}
        for name, leaf, cast in zip(names, batch.leaves, casts):
            if cast is not None:
                dtypes = f"from {dtype_name(leaf.dtype)} to {dtype_name(cast)}"
                is_work = leaf.dtype != torch.bool or not name.startswith("target")
                changes[f"{name} {dtypes}{_unscaled(name, leaf)}"] = is_work
        self._changes[role] = ", ".join(changes)
        text = ", ".join(filter(changes.get, changes))
        if not text or text in self._announced:
            return
        self._announced.add(text)
        warn_user(
            f"{role} has other dtypes than module and loss compute in, so every batch is "
            f"converted: {text}. Convert the data once beforehand to save that work."
        )

    def describe(self) -> List[str]:
        """Say how data for each role comes in other dtypes, a line for each that last did."""
        lines = (f"{role} is converted: {text}." for role, text in self._changes.items() if text)
        return [f"{line[0].upper()}{line[1:]}" for line in lines]

    def _casts(self, batch: MicroBatch, level: int) -> Casts:
        """Choose the dtype to which each tensor of a batch is cast.

        Args:
            batch: as it came.
            level: from 1 on, other whole numbers that may be class indices become int64;
                from 2 on, whole numbers that go into forward become floating point.
        """
        floating = self.floating()
        # Losses are computed in float32 at least.
        wide = floating and torch.promote_types(floating, torch.float32)
        args, kwargs, target, weight = batch.unpack()
        own_labels = self._own_labels(args, kwargs)
        casts: List[Optional[torch.dtype]] = []
        for leaf in tree.flatten((args, kwargs))[0]:
            may_be_label = level and self._loss.in_module and _is_whole(leaf)
            # A number beside tensors takes part in their dtype, as in torch.
            if (leaf.is_floating_point() and leaf.dim()) or (
                level > 1 and not leaf.is_complex() and id(leaf) not in own_labels
            ):
                casts.append(floating)
            else:
                casts.append(torch.int64 if may_be_label else None)
        for leaf, kind in zip(tree.flatten(target)[0], self._loss.target_kinds(target)):
            if leaf.dtype == torch.float64 and not (kind == "indices" and leaf.dim() < 2):
                casts.append(wide)
            elif kind == "values":
                casts.append(None if leaf.is_floating_point() or leaf.is_complex() else wide)
            else:
                is_class = kind == "indices"
                is_label = (is_class or level > 0) and _is_whole(leaf, or_bool=is_class)
                casts.append(torch.int64 if is_label else None)
        # Weights of samples stay: they are no part of what the module computes.
        casts += [None] * len(tree.flatten(weight)[0])
        pairs = zip(batch.leaves, casts)
        return tuple(
            None if cast == leaf.dtype or (self._is_set and leaf.is_floating_point()) else cast
            for leaf, cast in pairs
        )

    def floating(self) -> Optional[torch.dtype]:
        """The dtype of all parameters; None where they have several, or there are none."""
        parameters = self._module.parameters()
        dtypes = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
        return dtypes.pop() if len(dtypes) == 1 else None

    def _own_labels(self, args: Sequence[object], kwargs: Any) -> Set[int]:
        """Return the ids of tensors that are targets of a module that computes its own loss."""
        if not self._loss.in_module:
            return set()
        labels = [kwargs[name] for name in _LABELS if name in kwargs]
        labels += args[1:][-1:]
        return set(map(id, tree.flatten(labels)[0]))


def _dtypes(batch: MicroBatch) -> Tuple[torch.dtype, ...]:
    return tuple(leaf.dtype for leaf in batch.tensors)


def _is_whole(leaf: Tensor, or_bool: bool = False) -> bool:
    """Say whether a tensor holds integers, or bools."""
    is_whole = not leaf.is_floating_point() and not leaf.is_complex()
    return is_whole and (or_bool or leaf.dtype != torch.bool)


def _unscaled(name: str, leaf: Tensor) -> str:
    """Return a remark that pictures of uint8 are not scaled; for other tensors an empty text."""
    is_picture = leaf.dtype == torch.uint8 and name.startswith("input")
    return " (the same values, not divided by 255)" if is_picture else ""
