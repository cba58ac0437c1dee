"""Optimizers as arithmetic on flat tensors, equal to torch.optim number for number.

A rule changes a flat parameter tensor in place. What depends on hyper-parameters and on the number
of updates is worked out on the host in double precision, for all updates of an execution at once,
and reaches the program as 0-dim tensors: a change of learning rate needs no new program. What
decides the arithmetic (Nesterov or not, centred or not, a momentum or none) is read from the
parameter group when a rule is made. Only operators that torch 2.0.1 records as well are used: no
``_foreach_``, no ``value=`` that wants a Python number.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor

from ipufit.errors import OptimizerError
from ipufit.optim.optimizers import LAMB
from ipufit.optim.several import has_step_hooks, kinds_by_group, members_of

State = Dict[str, Tensor]
Group = Mapping[str, Any]


class OptimizerRule:
    """Update rule of one parameter group.

    A compiled update makes the rule anew, in another process: by the name of its class, which must
    be in this module, and with settings that are only true or false.

    Attributes:
        counted: whether torch keeps a "step" for every parameter. False: it keeps none, and a
            parameter has been updated before if it has a state tensor.
        by_parameter: whether what happens to an element depends on others of its parameter.
        switched: settings that decide what is computed by whether they are on.
        all_tensors: names of the state tensors that have the parameter's shape, as torch names
            them, each with the setting that must be on for it; None: none.
        tensors: names of those that the group needs.
        decay, maximize: whether weights decay, whether the gradient is climbed.
    """

    counted = True
    by_parameter = False
    switched: Tuple[str, ...] = ("weight_decay", "maximize")
    all_tensors: ClassVar[Mapping[str, Optional[str]]] = {}

    def __init__(self, group: Group) -> None:
        needed = self.all_tensors.items()
        self.tensors = tuple(name for name, on in needed if on is None or group.get(on))
        self.decay = bool(group["weight_decay"])
        self.maximize = bool(group.get("maximize"))

    @classmethod
    def switches(cls, group: Group) -> Tuple[object, ...]:
        """Settings that decide what is computed."""
        return tuple(bool(group.get(name)) for name in cls.switched)

    def coefficients(self, group: Group, step: float) -> List[float]:
        """The numbers of one update, the group's ``step``-th (from 1), for :meth:`update`."""
        raise NotImplementedError

    def update(
        self, p: Tensor, g: Tensor, state: State, c: Sequence[Tensor], segments: Sequence[slice]
    ) -> None:
        """Change ``p`` and ``state`` in place.

        Args:
            p: flat parameters.
            g: flat gradient.
            state: flat tensors by name.
            c: the coefficients, 0-dim or of a shape that broadcasts.
            segments: the part of ``p`` that each parameter has.
        """
        raise NotImplementedError


class SGDRule(OptimizerRule):
    """Update rule of torch.optim.SGD."""

    counted = False
    switched = (*OptimizerRule.switched, "momentum", "dampening", "nesterov")
    all_tensors: ClassVar[Mapping[str, Optional[str]]] = {"momentum_buffer": "momentum"}

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.dampening = bool(group["dampening"])
        self.nesterov = bool(group["nesterov"])

    def coefficients(self, group: Group, step: float) -> List[float]:
        """Return the rate, the momentum, the share of the gradient in the buffer, and the decay."""
        # The first update takes the gradient whole; dampening starts with the second. Without
        # momentum there is nothing to dampen.
        gradient_factor = 1 - group["dampening"] if step > 1 and group["momentum"] else 1
        return [group["lr"], group["momentum"], gradient_factor, group["weight_decay"]]

    def update(
        self, p: Tensor, g: Tensor, state: State, c: Sequence[Tensor], segments: Sequence[slice]
    ) -> None:
        """Move the momentum buffer, if there is one, and take a step along it."""
        lr, momentum, gradient_factor, decay = c
        if self.maximize:
            g = -g
        if self.decay:
            g = g + p * decay
        if self.tensors:
            buffer = state["momentum_buffer"]
            buffer.mul_(momentum).add_(g * gradient_factor if self.dampening else g)
            g = g + buffer * momentum if self.nesterov else buffer
        p.sub_(g * lr)


class AdamRule(OptimizerRule):
    """torch.optim.Adam, with L2 or decoupled weight decay."""

    decoupled = False
    switched = (*OptimizerRule.switched, "amsgrad", "decoupled_weight_decay")
    all_tensors: ClassVar[Mapping[str, Optional[str]]] = {
        "exp_avg": None,
        "exp_avg_sq": None,
        "max_exp_avg_sq": "amsgrad",
    }

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.decoupled = self.decoupled or bool(group.get("decoupled_weight_decay"))

    def coefficients(self, group: Group, step: float) -> List[float]:
        """Return the moments' shares of new values, step size, root factor, eps and decay."""
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        size = group["lr"] / _unbiased(beta1, step)
        root = 1 / math.sqrt(_unbiased(beta2, step))
        shrink = 1 - group["lr"] * decay if self.decoupled else decay
        return [1 - beta1, 1 - beta2, size, root, group["eps"], shrink]

    def update(
        self, p: Tensor, g: Tensor, state: State, c: Sequence[Tensor], segments: Sequence[slice]
    ) -> None:
        """Move both moments, and divide the first by the root of the second."""
        first_share, second_share, size, root, eps, decay = c
        if self.maximize:
            g = -g
        if self.decay and self.decoupled:
            p.mul_(decay)
        elif self.decay:
            g = g + p * decay
        first, second = _moments(g, state, first_share, second_share)
        if "max_exp_avg_sq" in state:
            second = torch.maximum(state["max_exp_avg_sq"], second)
            state["max_exp_avg_sq"].copy_(second)
        denominator = second.sqrt().mul_(root).add_(eps)
        p.sub_((first * size).div_(denominator))


class AdamWRule(AdamRule):
    """Update rule of torch.optim.AdamW."""

    decoupled = True


class LAMBRule(OptimizerRule):
    """LAMB (You et al. 2020, Algorithm 2), as :class:`ipufit.optim.LAMB`."""

    by_parameter = True
    all_tensors: ClassVar[Mapping[str, Optional[str]]] = {"exp_avg": None, "exp_avg_sq": None}

    def coefficients(self, group: Group, step: float) -> List[float]:
        """Return shares of new values in the moments, corrections, eps, decay, rate and limit."""
        beta1, beta2 = group["betas"]
        root1 = root2 = 1.0
        if group["bias_correction"]:
            root1, root2 = 1 / _unbiased(beta1, step), 1 / math.sqrt(_unbiased(beta2, step))
        limit = math.inf if group["max_weight_norm"] is None else group["max_weight_norm"]
        shares, sizes = [1 - beta1, 1 - beta2], [group["weight_decay"], group["lr"], limit]
        return [*shares, root1, root2, group["eps"], *sizes]

    def update(
        self, p: Tensor, g: Tensor, state: State, c: Sequence[Tensor], segments: Sequence[slice]
    ) -> None:
        """Take Adam's step, scaled for each parameter to the norm of its weights."""
        first_share, second_share, root1, root2, eps, decay, lr, limit = c
        first, second = _moments(g, state, first_share, second_share)
        direction = (first * root1).div_(second.sqrt().mul_(root2).add_(eps))
        if self.decay:
            direction = direction + p * decay
        # The norm of a half-precision tensor overflows at 65504 and loses its small elements.
        wide = torch.promote_types(p.dtype, torch.float32)
        for segment in segments:
            weight, change = p[segment], direction[segment]
            weight_norm = torch.linalg.vector_norm(weight, dtype=wide)
            change_norm = torch.linalg.vector_norm(change, dtype=wide)
            weight_norm = torch.minimum(weight_norm, limit.to(wide))
            usable = (weight_norm > 0) & (change_norm > 0)
            ratio = torch.where(usable, weight_norm / change_norm, torch.ones_like(weight_norm))
            weight.sub_(change * (ratio * lr))


class RMSpropRule(OptimizerRule):
    """Update rule of torch.optim.RMSprop.

    Attributes:
        tensorflow: whether it is TensorFlow's: eps within the root, and the learning rate within
            the momentum.
    """

    tensorflow = False
    switched = (*OptimizerRule.switched, "momentum", "centered")
    all_tensors: ClassVar[Mapping[str, Optional[str]]] = {
        "square_avg": None,
        "momentum_buffer": "momentum",
        "grad_avg": "centered",
    }

    def coefficients(self, group: Group, step: float) -> List[float]:
        """Return the rate, the share of a new square, eps, the momentum and the decay."""
        share = 1 - group["alpha"]
        return [group["lr"], share, group["eps"], group["momentum"], group["weight_decay"]]

    def update(
        self, p: Tensor, g: Tensor, state: State, c: Sequence[Tensor], segments: Sequence[slice]
    ) -> None:
        """Divide the gradient by the root of its mean square; add momentum if there is any."""
        lr, share, eps, momentum, decay = c
        if self.maximize:
            g = -g
        if self.decay:
            g = g + p * decay
        square = state["square_avg"]
        square = _moved(square, g * g, share)
        if "grad_avg" in state:
            mean = _moved(state["grad_avg"], g, share)
            square = square - mean * mean
        step = g / ((square + eps).sqrt() if self.tensorflow else square.sqrt().add_(eps))
        if self.tensorflow:
            step = step * lr
        if "momentum_buffer" in state:
            step = state["momentum_buffer"].mul_(momentum).add_(step)
        p.sub_(step if self.tensorflow else step * lr)


class RuleOfModels(OptimizerRule):
    """Rule for a parameter with a row for each of several models, and settings for each of them.

    The group has the settings under "models", and among its own each that is on for some model.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._models = len(group["models"])

    def coefficients(  # type: ignore[override]
        self, group: Group, step: float
    ) -> List[List[List[float]]]:
        """The numbers of one update, for each a column with those of the models."""
        of_one = super().coefficients
        by_model = [of_one(settings, step) for settings in group["models"]]
        return [[[value] for value in values] for values in zip(*by_model)]

    def update(
        self, p: Tensor, g: Tensor, state: State, c: Sequence[Tensor], segments: Sequence[slice]
    ) -> None:
        """Change ``p`` and ``state`` in place, row by row."""
        p, g = p.view(self._models, -1), g.view(self._models, -1)
        rows = {name: tensor.view(self._models, -1) for name, tensor in state.items()}
        super().update(p, g, rows, c, segments)


def _unbiased(beta: float, step: float) -> float:
    """1 - beta ** step; NaN where state that was read back makes no sense of it."""
    return 1 - beta**step if step > 0 and 0 <= beta < 1 else math.nan


def _moved(average: Tensor, value: Tensor, share: Tensor) -> Tensor:
    """Move a running average towards a value; the average, as wide as the value.

    Args:
        average: changed in place; may be kept in a narrower dtype than the value has.
        value: what it moves to.
        share: how far.
    """
    if average.dtype == value.dtype:
        return average.lerp_(value, share.to(value.dtype))
    dtype = torch.promote_types(average.dtype, value.dtype)
    average.copy_(torch.lerp(average.to(dtype), value.to(dtype), share.to(dtype)))
    return average.to(dtype)


def _moments(g: Tensor, state: State, share1: Tensor, share2: Tensor) -> Tuple[Tensor, Tensor]:
    """Move both running moments of Adam towards the gradient and return them."""
    first = _moved(state["exp_avg"], g, share1)
    return first, _moved(state["exp_avg_sq"], g * g, share2)


_RULES: Dict[Type[torch.optim.Optimizer], Type[OptimizerRule]] = {
    torch.optim.SGD: SGDRule,
    torch.optim.Adam: AdamRule,
    torch.optim.AdamW: AdamWRule,
    torch.optim.RMSprop: RMSpropRule,
    LAMB: LAMBRule,
}


def list_rule_names() -> str:
    """Name the optimizers that have a rule, as ``compile`` takes them, for advice in errors."""
    *names, last = (optimizer.__name__.lower() for optimizer in _RULES)
    return f"{', '.join(names)} or {last}"


def rules_for(optimizer: torch.optim.Optimizer) -> List[Optional[Type[OptimizerRule]]]:
    """For each parameter group the rule for exactly its optimizer's class, or None.

    A subclass may do anything in its ``step``.

    Raises:
        OptimizerError: a group asks for what a traced update can't do.
    """
    rules: List[Optional[Type[OptimizerRule]]] = []
    for kind, group in zip(kinds_by_group(optimizer), optimizer.param_groups):
        rule = _RULES.get(group.get("kind", kind))
        if rule is not None and "models" in group:
            rule = type(f"{rule.__name__}OfModels", (RuleOfModels, rule), {})
        if rule is not None and group.get("differentiable"):
            raise OptimizerError(
                "differentiable=True keeps a graph through the update, which a traced program "
                f"can't return; got it in {kind.__name__}. Build the optimizer without it."
            )
        rules.append(rule)
    return rules


def rules_by_group(optimizer: torch.optim.Optimizer) -> List[Optional[Type[OptimizerRule]]]:
    """For each parameter group its rule; None too where hooks on ``step`` must be called."""
    rules = rules_for(optimizer)
    if has_step_hooks(optimizer):
        return [None for _ in rules]
    members = members_of(optimizer).values()
    hooked = [has_step_hooks(each) for each in members for _ in each.param_groups]
    return [None if has_hooks else rule for rule, has_hooks in zip(rules, hooked)]
