"""Checks of an optimizer's attributes and settings once its program is compiled."""

from __future__ import annotations

from typing import Any, List, Mapping, Set

import torch

from ipufit.poptorch import optim
from ipufit.poptorch._errors import Error, error
from ipufit.poptorch._logging import logger
from ipufit.poptorch._optimizer_settings import (
    OptimizerKind,
    OptimizerSettings,
    Values,
    class_of,
    kind_of,
)

__all__ = ["OPTIMIZERS", "AttributeTracker", "check_replacement", "select_mean_strategy"]

# What every optimizer has, in one version of torch or another.
_TORCHS = {
    "defaults",
    "state",
    "param_groups",
    "variable_attrs",
    "_sync",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}

# Optimizers that a device runs, of torch and of the front end; subclasses are others.
OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.RMSprop,
    optim.LAMB,
)


class AttributeTracker:
    """Reports attributes that appear after the first optimizer, and user-defined subclasses.

    Args:
        relax: say it only in the debug log (``Options.relaxOptimizerAttributesChecks``).
    """

    def __init__(self, relax: bool) -> None:
        self._log = logger.debug if relax else logger.warning
        self._own: Set[str] = set(_TORCHS)
        self._grouped: Set[str] = {"params", *_TORCHS}
        self._has_first = False
        self._reported: Set[str] = set()

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to be set.

        The first one may have any attributes; an attribute that only a later one has is ignored,
        and reported once.
        """
        name = type(optimizer).__name__
        if type(optimizer) not in OPTIMIZERS:
            self._say(
                f"{name} is a subclass, and is unlikely to behave as intended: Poptorch does not "
                "run Python optimizer code directly, but the device's own update. Use an optimizer "
                "of torch.optim or poptorch.optim as it is.",
                warn=True,
            )
        self._look_at_values(optimizer)
        front_end_class = class_of(optimizer)
        allowed = {
            *(front_end_class._child_only if front_end_class else ()),
            *_state_of_class(optimizer),
        }
        self._find("optimizer attribute", self._own | allowed, optimizer.__dict__, self._own)
        groups = [("default group variable", optimizer.defaults)]
        for index, group in enumerate(optimizer.param_groups):
            groups.append((f"group {index} attribute", group))
        for kind, group in groups:
            self._find(kind, self._grouped, group, self._grouped)
        self._has_first = True

    def _look_at_values(self, optimizer: torch.optim.Optimizer) -> None:
        if any(group.get("maximize") for group in optimizer.param_groups):
            self._say(
                "maximize=True is ignored: the device minimises the loss. Negate the loss instead.",
                warn=True,
            )
        if class_of(optimizer) is optim.AdamW and not getattr(optimizer, "bias_correction", True):
            self._say(
                "bias_correction=False is ignored: the device corrects the bias of AdamW in any "
                "case. LAMB honours it.",
                warn=True,
            )

    def _find(
        self, kind: str, allowed: Set[str], attributes: Mapping[str, object], into: Set[str]
    ) -> None:
        new = [name for name in attributes if name not in allowed]
        if not self._has_first:
            into.update(new)
        elif new:
            self._say(
                f"Ignoring unexpected {kind} {new}: it was not there when the model got its first "
                "optimizer. Options.relaxOptimizerAttributesChecks() makes this a debug message."
            )

    def _say(self, text: str, warn: bool = False) -> None:
        if text not in self._reported:
            self._reported.add(text)
            (logger.warning if warn else self._log)(text)


def _state_of_class(optimizer: torch.optim.Optimizer) -> List[str]:
    """Return the attributes, beside its settings, that the class gives to every optimizer."""
    names = ["_state_dict", "ipu_state_is_dirty", "host_state_is_dirty"]
    return names if isinstance(optimizer, optim.Optimizer) else []


def check_replacement(old: OptimizerSettings, new: OptimizerSettings) -> None:
    """Check that a compiled program can continue with other settings.

    Raises:
        Error: it can't; says what changed.
    """
    pair = {OptimizerKind.SGD_COMBINED, OptimizerKind.SGD_SEPARATE}
    velocity = old.has_velocity(old.defaults), new.has_velocity(new.defaults)
    if old.kind is not new.kind and not ({old.kind, new.kind} == pair and not any(velocity)):
        raise _refused(f"its type from {old.kind.value} to {new.kind.value}")
    if len(old.groups) != len(new.groups):
        raise _refused(f"the number of groups from {len(old.groups)} to {len(new.groups)}")
    for name in ("accum_type", "first", "second", "tensorflow", "max_grad_norm"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            raise _refused(f"{_NAMES.get(name, name)} from {before} to {after}")
    _compare({"loss_scaling": old.loss_scaling}, {"loss_scaling": new.loss_scaling}, "")
    _compare(old.defaults, new.defaults, " in the defaults")
    for index, (before, after) in enumerate(zip(old.groups, new.groups)):
        _compare(before, after, f" in group {index}")


_NAMES = {
    "first": "the type of the first momentum",
    "second": "the type of the second momentum",
    "tensorflow": "use_tf_variant",
}


def _compare(old: Values, new: Values, place: str) -> None:
    for name, before in old.items():
        after = new[name]
        title = "betas" if name.startswith("beta") else name
        if before.constant != after.constant:
            was, now = (("a constant", "variable"), ("variable", "a constant"))[after.constant]
            raise error(
                f"The optimizer can't change {title}{place} from {was} to {now} once the model is "
                f"compiled. {_mark(title)}"
            )
        if before.constant and before.value != after.value:
            raise error(
                f"The optimizer can't change {title}{place} from {before.value:g} to "
                f"{after.value:g} once the model is compiled: it is a constant of the program. "
                f"{_mark(title)}"
            )


def _mark(title: str) -> str:
    return (
        f'Mark it from the start: optimizer.variable_attrs.markAsVariable("{title}"), or pass it '
        "explicitly to an optimizer of poptorch.optim."
    )


def _refused(change: str) -> Error:
    return error(
        f"The optimizer can't change {change} once the model is compiled. Call destroy() and wrap "
        "the model again."
    )


def select_mean_strategy(optimizer: torch.optim.Optimizer, options: Any, compiled: bool) -> None:
    """Use running means where gradients are accumulated in float16, lest their sum overflows.

    Args:
        optimizer: the one that is about to be set.
        options: of the executor, also frozen ones.
        compiled: whether they can't change any more.

    Raises:
        ValueError: they would have to.
    """
    half = getattr(optimizer, "accum_type", None) == torch.float16
    if not half or kind_of(optimizer) is OptimizerKind.SGD_COMBINED:
        return
    present = options.Training.meanAccumulationAndReplicationReductionStrategy
    running = type(present).Running
    if present == running:
        return
    if compiled:
        raise ValueError(
            "Invalid optimizer: accum_type=torch.float16 needs "
            "meanAccumulationAndReplicationReductionStrategy to be MeanReductionStrategy.Running, "
            f"got {present}, and the model is already compiled. Set it in options.Training, or the "
            "type in the first optimizer."
        )
    options._unfreeze()
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(running)
    options._freeze()
