"""Losses and optimizers of scenarios, with the optimizers' rules written out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Dict, List, Mapping, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CLASSES", "LOSSES", "OptimizerSpec", "PlainOperators"]

State = Dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, State, int, Mapping[str, Any]], Any]


class PlainOperators:
    """Operators of PopTorch, for modules that run without it."""

    @staticmethod
    def identity_loss(x: Tensor, reduction: str) -> Tensor:
        """Return the reduced value, without a mark."""
        if reduction == "none":
            return x
        return x.mean() if reduction == "mean" else x.sum()


# Given the operators, the prediction and the target.
LOSSES: Dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "mse": lambda ops, out, y: F.mse_loss(out, y),
    "mse sum": lambda ops, out, y: F.mse_loss(out, y, reduction="sum"),
    "l1": lambda ops, out, y: F.l1_loss(out, y),
    "l1 sum": lambda ops, out, y: F.l1_loss(out, y, reduction="sum"),
    "smooth l1": lambda ops, out, y: F.smooth_l1_loss(out, y),
    "bce": lambda ops, out, y: F.binary_cross_entropy(torch.sigmoid(out), torch.sigmoid(y)),
    "bce with logits": lambda ops, out, y: F.binary_cross_entropy_with_logits(
        out, torch.sigmoid(y)
    ),
    "kl div": lambda ops, out, y: F.kl_div(
        F.log_softmax(out, 1), F.softmax(y, 1), reduction="batchmean"
    ),
    "poisson nll": lambda ops, out, y: F.poisson_nll_loss(out, torch.sigmoid(y)),
    "hinge embedding": lambda ops, out, y: F.hinge_embedding_loss(out, torch.sign(y)),
    "soft margin": lambda ops, out, y: F.soft_margin_loss(out, torch.sign(y)),
    "cross entropy": lambda ops, out, y: F.cross_entropy(out, y),
    "cross entropy sum": lambda ops, out, y: F.cross_entropy(out, y, reduction="sum"),
    "nll": lambda ops, out, y: F.nll_loss(F.log_softmax(out, 1), y),
    "identity mean": lambda ops, out, y: ops.identity_loss((out - y) ** 4, reduction="mean"),
    "identity sum": lambda ops, out, y: ops.identity_loss((out - y) ** 4, reduction="sum"),
    "identity of two": lambda ops, out, y: ops.identity_loss(
        F.mse_loss(out, y) + 3 * F.l1_loss(out, y), reduction="none"
    ),
}

# Those whose target is a class.
CLASSES = ("cross entropy", "cross entropy sum", "nll")


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer by its name and arguments.

    Attributes:
        home: the package that has its class, "torch" or "poptorch".
        name: name of the class.
        arguments: arguments of its constructor, besides the parameters.
    """

    home: str = "torch"
    name: str = "SGD"
    arguments: Tuple[Tuple[str, Any], ...] = (("lr", 0.1),)

    @classmethod
    def of(cls, home: str, name: str, **arguments: object) -> OptimizerSpec:
        """Return the specification of an optimizer with these arguments."""
        return cls(home, name, tuple(arguments.items()))

    @property
    def max_grad_norm(self) -> float:
        """Bound on the norm of all gradients together."""
        return float(dict(self.arguments).get("max_grad_norm", math.inf))

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments)
        return f"{self.home}.optim.{self.name}({arguments})"

    def step(
        self, weights: List[Tensor], gradients: List[Tensor], states: List[State], t: int
    ) -> None:
        """Apply update number ``t``, counted from 1, in place."""
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
        # As torch.nn.utils.clip_grad_norm_ does it.
        factor = min(1.0, self.max_grad_norm / (norm + 1e-6))
        for weight, gradient, state in zip(weights, gradients, states):
            weight -= RULES[self.name](weight, gradient * factor, state, t, dict(self.arguments))


def _sgd(w: Tensor, g: Tensor, state: State, t: int, a: Mapping[str, Any]) -> Any:
    momentum = a.get("momentum", 0.0)
    g = g + a.get("weight_decay", 0.0) * w
    if not momentum:
        return a["lr"] * g
    state["v"] = v = momentum * state.get("v", torch.zeros_like(g)) + g
    return a["lr"] * (g + momentum * v if a.get("nesterov") else v)


def _moments(g: Tensor, state: State, t: int, a: Mapping[str, Any]) -> Tuple[Tensor, Tensor]:
    """Return the two bias-corrected moving averages."""
    b1, b2 = a.get("betas", (0.9, 0.999))
    state["m"] = m = b1 * state.get("m", torch.zeros_like(g)) + (1 - b1) * g
    state["v"] = v = b2 * state.get("v", torch.zeros_like(g)) + (1 - b2) * g * g
    return m / (1 - b1**t), v / (1 - b2**t)


def _adam(w: Tensor, g: Tensor, state: State, t: int, a: Mapping[str, Any]) -> Any:
    m, v = _moments(g + a.get("weight_decay", 0.0) * w, state, t, a)
    return a["lr"] * m / (v.sqrt() + a.get("eps", 1e-8))


def _adamw(w: Tensor, g: Tensor, state: State, t: int, a: Mapping[str, Any]) -> Any:
    m, v = _moments(g, state, t, a)
    return a["lr"] * (m / (v.sqrt() + a.get("eps", 1e-8)) + a.get("weight_decay", 0.01) * w)


def _lamb(w: Tensor, g: Tensor, state: State, t: int, a: Mapping[str, Any]) -> Any:
    m, v = _moments(g, state, t, a)
    x = m / (v.sqrt() + a.get("eps", 1e-8)) + a.get("weight_decay", 0.01) * w
    of_weight = min(float(w.norm()), a.get("max_weight_norm", 65500.0))
    of_step = float(x.norm())
    return a["lr"] * (of_weight / of_step if of_weight and of_step else 1.0) * x


def _rmsprop(w: Tensor, g: Tensor, state: State, t: int, a: Mapping[str, Any]) -> Any:
    tf, alpha, eps = a.get("use_tf_variant", False), a.get("alpha", 0.99), a.get("eps", 1e-8)
    g = g + a.get("weight_decay", 0.0) * w
    start = torch.ones_like(g) if tf else torch.zeros_like(g)
    state["v"] = v = alpha * state.get("v", start) + (1 - alpha) * g * g
    if a.get("centered"):
        state["m"] = m = alpha * state.get("m", torch.zeros_like(g)) + (1 - alpha) * g
        v = v - m * m
    x = g / ((v + eps).sqrt() if tf else v.sqrt() + eps)
    if not a.get("momentum"):
        return a["lr"] * x
    inner, outer = (a["lr"], 1.0) if tf else (1.0, a["lr"])
    state["b"] = b = a["momentum"] * state.get("b", torch.zeros_like(g)) + inner * x
    return outer * b


RULES: Dict[str, Rule] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adamw,
    "LAMB": _lamb,
    "RMSprop": _rmsprop,
}
