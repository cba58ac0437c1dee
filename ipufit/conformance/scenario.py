"""Scenarios: a run of a small model, and its expected results, by losses and rules written out."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

State = Dict[str, Tensor]
# Of the constructor of an optimizer.
Arguments = Mapping[str, Any]
Rule = Callable[[Tensor, Tensor, State, int, Arguments], Any]


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
    "kl div": lambda ops, out, y: F.kl_div(F.log_softmax(out, 1), F.softmax(y, 1), reduction="sum"),
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

# Made of losses that are reduced: on an IPU each of these has one element, and so has their sum.
_OF_LOSSES = ("identity of two",)
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
            weight -= _RULES[self.name](weight, gradient * factor, state, t, dict(self.arguments))


def _sgd(w: Tensor, g: Tensor, state: State, t: int, a: Arguments) -> Any:
    momentum = a.get("momentum", 0.0)
    g = g + a.get("weight_decay", 0.0) * w
    if not momentum:
        return a["lr"] * g
    state["v"] = v = momentum * state.get("v", torch.zeros_like(g)) + g
    return a["lr"] * (g + momentum * v if a.get("nesterov") else v)


def _moving_averages(g: Tensor, state: State, t: int, a: Arguments) -> Tuple[Tensor, Tensor]:
    """Return the two bias-corrected moving averages."""
    b1, b2 = a.get("betas", (0.9, 0.999))
    state["m"] = m = b1 * state.get("m", torch.zeros_like(g)) + (1 - b1) * g
    state["v"] = v = b2 * state.get("v", torch.zeros_like(g)) + (1 - b2) * g * g
    return m / (1 - b1**t), v / (1 - b2**t)


def _adam(w: Tensor, g: Tensor, state: State, t: int, a: Arguments) -> Any:
    m, v = _moving_averages(g + a.get("weight_decay", 0.0) * w, state, t, a)
    return a["lr"] * m / (v.sqrt() + a.get("eps", 1e-8))


def _adamw(w: Tensor, g: Tensor, state: State, t: int, a: Arguments) -> Any:
    m, v = _moving_averages(g, state, t, a)
    return a["lr"] * (m / (v.sqrt() + a.get("eps", 1e-8)) + a.get("weight_decay", 0.01) * w)


def _lamb(w: Tensor, g: Tensor, state: State, t: int, a: Arguments) -> Any:
    m, v = _moving_averages(g, state, t, a)
    x = m / (v.sqrt() + a.get("eps", 1e-8)) + a.get("weight_decay", 0.01) * w
    of_weight = min(float(w.norm()), a.get("max_weight_norm", 65500.0))
    of_step = float(x.norm())
    return a["lr"] * (of_weight / of_step if of_weight and of_step else 1.0) * x


def _rmsprop(w: Tensor, g: Tensor, state: State, t: int, a: Arguments) -> Any:
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


_RULES: Dict[str, Rule] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adamw,
    "LAMB": _lamb,
    "RMSprop": _rmsprop,
}


_FEATURES, _HIDDEN, _OUTPUTS = 3, 4, 2


class Net(nn.Module):
    """Two layers, each of which may be put on an IPU of its own.

    Args:
        scenario: chooses the loss, and whether there is a BatchNorm between them.
        operators: has ``identity_loss``.
        part: the context in which layer 0 or 1 is run.
    """

    def __init__(
        self,
        scenario: Scenario,
        operators: object = PlainOperators,
        part: Callable[[int], ContextManager[object]] = lambda index: contextlib.nullcontext(),
    ) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, _HIDDEN)
        self.norm = nn.BatchNorm1d(_HIDDEN) if scenario.norm else nn.Identity()
        self.second = nn.Linear(_HIDDEN, _OUTPUTS)
        self.loss, self.operators, self.part = LOSSES[scenario.loss], operators, part
        for index, parameter in enumerate(self.parameters()):
            # Values that repeat nowhere, of the size that a fresh layer has.
            steps = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter)
            parameter.data = 0.6 * torch.sin(1.7 * steps + index + 1)

    def forward(self, x: Tensor, y: Optional[Tensor] = None) -> Any:
        """Return the prediction; with a target, the loss beside it."""
        with self.part(0):
            h = torch.tanh(self.norm(self.first(x)))
        with self.part(1):
            out = self.second(h)
            return out if y is None else (out, self.loss(self.operators, out, y))


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A run of a small model.

    Attributes:
        training: whether weights are updated.
        iterations, accumulation, replicas: micro-batches of a call.
        mode, period: which of their results come back; names of ``poptorch.OutputMode``.
        reduction: of gradients over accumulation and replicas, "Mean" or "Sum".
        loss: a name of ``LOSSES``.
        optimizer: how weights are updated.
        norm: whether the net has a BatchNorm, whose statistics change.
        strategy: "pipelined", "sharded", "parallel phased" or "serial phased" over two parts; ""
            leaves the net in one.
        mean_strategy: a name of ``poptorch.MeanReductionStrategy``.
        input_group: "Consecutive" or "Orthogonal", and how many replicas read the same input.
        calls: how often the model is called.
        micro_batch: samples that a replica sees at once.
        compared: which of what is returned is looked at.
    """

    training: bool = True
    iterations: int = 1
    accumulation: int = 1
    replicas: int = 1
    mode: str = "All"
    period: int = 1
    reduction: str = "Mean"
    loss: str = "mse"
    optimizer: OptimizerSpec = dataclasses.field(default_factory=OptimizerSpec)
    norm: bool = False
    strategy: str = ""
    mean_strategy: str = "Post"
    input_group: Tuple[str, int] = ("Consecutive", 1)
    calls: int = 2
    micro_batch: int = 2
    compared: Tuple[str, ...] = ("out", "loss", "losses")

    @property
    def groups(self) -> int:
        """Number of groups of replicas that read the same input."""
        return self.replicas // self.input_group[1]

    @property
    def samples(self) -> int:
        """Number of samples in a call."""
        return self.iterations * self.accumulation * self.groups * self.micro_batch

    def data(self) -> List[Tuple[Tensor, Tensor]]:
        """Return inputs and target of every call, in float64; no two samples are alike."""
        count = self.calls * self.samples
        steps = torch.arange(count * _FEATURES, dtype=torch.float64).view(count, _FEATURES)
        x = torch.sin(0.83 * steps * (1 + 0.01 * steps))
        y = torch.cos(1.31 * steps[:, :_OUTPUTS])
        if self.loss in CLASSES:
            y = (torch.arange(count) * 7 // 3) % _OUTPUTS
        return list(zip(torch.split(x, self.samples), torch.split(y, self.samples)))


@dataclasses.dataclass
class Observed:
    """Results of a scenario, observed or expected.

    Attributes:
        calls: for every call, tensors by name: "out", "loss" as the mode returns them, and "losses"
            of every micro-batch.
        weights: parameters after the last call.
        buffers: buffers after the last call, of each replica.
    """

    calls: List[Dict[str, Tensor]]
    weights: Dict[str, Tensor]
    buffers: List[Dict[str, Tensor]]


Results = Dict[Tuple[int, int, int], Tuple[Tensor, Tensor]]


def expected(scenario: Scenario) -> Observed:
    """Compute the expected results, one micro-batch after the other."""
    net = Net(scenario).double()
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    start = {name: b.detach().clone() for name, b in net.named_buffers()}
    buffers = [copy.deepcopy(start) for _ in range(scenario.replicas)]
    states: List[Dict[str, Tensor]] = [{} for _ in weights]
    calls, updates = [], 0
    for x, y in scenario.data():
        results: Results = {}
        for d in range(scenario.iterations):
            total = {name: torch.zeros_like(w) for name, w in weights.items()}
            for a in range(scenario.accumulation):
                for r in range(scenario.replicas):
                    at = _start(scenario, d, a, r)
                    rows = slice(at, at + scenario.micro_batch)
                    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
                    out, loss = functional_call(net, {**leaves, **buffers[r]}, (x[rows], y[rows]))
                    results[d, a, r] = (out.detach(), loss.detach())
                    gradients = torch.autograd.grad(loss.sum(), list(leaves.values()))
                    for name, gradient in zip(leaves, gradients):
                        total[name] += gradient
            if not scenario.training:
                continue
            updates += 1
            count = scenario.accumulation * scenario.replicas
            divisor = count if scenario.reduction == "Mean" else 1
            reduced = [total[name] / divisor for name in weights]
            scenario.optimizer.step(list(weights.values()), reduced, states, updates)
        calls.append(_returned(scenario, results))
    return Observed(calls, weights, buffers)


def _start(scenario: Scenario, d: int, a: int, r: int) -> int:
    """Return the position in the combined batch at which a micro-batch begins."""
    kind, size = scenario.input_group
    group = r // size if kind == "Consecutive" else r % scenario.groups
    return ((d * scenario.accumulation + a) * scenario.groups + group) * scenario.micro_batch


def _returned(scenario: Scenario, results: Results) -> Dict[str, Tensor]:
    """Return the outputs and losses of one call, as the output mode returns them."""
    last = (scenario.iterations - 1, scenario.accumulation - 1)
    places = sorted(results)
    mode = {"Default": "Final" if scenario.training else "All"}.get(scenario.mode, scenario.mode)
    if mode == "EveryN":
        places = [place for place in places if (place[0] + 1) % scenario.period == 0]
    if mode == "Final":
        places = [place for place in places if place[:2] == last]
    returned = {"losses": torch.stack([results[place][1] for place in sorted(results)])}
    for index, name in enumerate(("out", "loss")):
        values = [results[place][index] for place in places]
        if mode == "Sum":
            of_replica = [
                [results[place][index] for place in places if place[2] == r]
                for r in range(scenario.replicas)
            ]
            values = [torch.stack(each).sum(0) for each in of_replica]
        returned[name] = values[0] if len(values) == 1 else torch.stack(values)
        if index == 0 and len(values) > 1:
            returned[name] = returned[name].flatten(0, 1)
    if scenario.loss in _OF_LOSSES:
        returned["loss"] = returned["loss"].reshape(-1)
    return returned
