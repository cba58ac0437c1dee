"""Optimizers that torch.optim lacks: LAMB, and Muon for versions without it."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, Literal, Optional, Tuple, Union, overload

import torch
from torch import Tensor

from ipufit.errors import OptimizerError

# Settings of a parameter group, or the state of a parameter, by name.
Settings = Dict[str, Any]


def _settings(arguments: Settings) -> Settings:
    """Select the settings among the arguments of an optimizer."""
    others = ("self", "params", "__class__")
    return {name: value for name, value in arguments.items() if name not in others}


class LAMB(torch.optim.Optimizer):
    r"""Layer-wise adaptive moments: Adam whose update is scaled to each tensor's own norm.

    You et al. 2020, "Large Batch Optimization for Deep Learning", arXiv 1904.00962, Algorithm 2;
    names and defaults of the arguments are those of ``poptorch.optim.LAMB``. Per parameter tensor x
    with gradient g at its t-th update, all norms Euclidean::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g ** 2
        m_hat = m / (1 - beta1 ** t),  v_hat = v / (1 - beta2 ** t)      (bias_correction)
        r = m_hat / (sqrt(v_hat) + eps)
        u = r + weight_decay * x
        x = x - lr * phi(||x||) / ||u|| * u,    phi(z) = min(z, max_weight_norm)

    The paper leaves open what the ratio ``phi(||x||) / ||u||`` is when a norm is zero; here it is
    1, so that a bias that starts at zero can move.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate.
        betas: decay of the averages of the gradient and of its square, each in [0, 1).
        eps: added to the root of the squared average.
        weight_decay: decay of the weights, part of the scaled update.
        bias_correction: divide the averages by ``1 - beta ** t``, as the paper does.
        max_weight_norm: limit of phi; None for phi(z) = z.

    State per parameter: ``step`` (0-dim float32), ``exp_avg`` and ``exp_avg_sq`` (the parameter's
    shape and dtype).

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        bias_correction: bool = True,
        max_weight_norm: Optional[float] = 65500.0,
    ) -> None:
        """Start with no state; it is made at a parameter's first update."""
        super().__init__(params, _settings(locals()))

    def add_param_group(self, param_group: Settings) -> None:
        """Add a group, as torch does, once its values are known to be in range.

        Args:
            param_group: its "params", and settings of its own by name.

        Raises:
            ValueError: an argument of the group is outside its range.
        """
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: Settings) -> None:
        """Take over state as torch does: a counter that is a number becomes a tensor."""
        super().__setstate__(state)
        for parameter_state in self.state.values():
            if "step" in parameter_state and not isinstance(parameter_state["step"], Tensor):
                parameter_state["step"] = torch.tensor(
                    float(parameter_state["step"]), dtype=torch.float32
                )

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the loss again and returns it, as for every optimizer of torch.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        return lamb_step(self, closure)


def _check_group(group: Settings) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise ValueError(f"LAMB needs {name} >= 0, got {group[name]}.")
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]) or len(group["betas"]) != 2:
        raise ValueError(f"LAMB needs two betas in [0, 1), got {group['betas']}. Try (0.9, 0.999).")
    limit = group["max_weight_norm"]
    if limit is not None and not limit > 0.0:
        raise ValueError(f"LAMB needs max_weight_norm > 0, got {limit}. Pass None for no limit.")


def lamb_step(
    optimizer: torch.optim.Optimizer, closure: Optional[Callable[[], float]], **settings: object
) -> Optional[float]:
    """Update every parameter of an optimizer that has a gradient.

    Args:
        optimizer: has the hyper-parameters in its groups, and the state.
        closure: evaluates the loss again and returns it, as for every optimizer of torch.
        settings: those that are in no group.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    loss = None if closure is None else torch.enable_grad()(closure)()
    for param_group in optimizer.param_groups:
        group = {**param_group, **settings}
        for param in group["params"]:
            if param.grad is not None:
                _update(param, param.grad, optimizer.state[param], group)
    return loss


def _update(param: Tensor, grad: Tensor, state: Settings, group: Settings) -> None:
    """Algorithm 2 for one tensor."""
    if grad.is_sparse:
        raise RuntimeError(
            "LAMB needs dense gradients, got a sparse one. Build the Embedding with sparse=False."
        )
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    beta1, beta2 = group["betas"]
    state["step"] += 1
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if param.is_complex():
        # Real and imaginary parts are numbers of their own, as in torch's Adam.
        param, grad, first, second = map(torch.view_as_real, (param, grad, first, second))
    first = first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second = second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if group["bias_correction"]:
        # Powers of Python floats: in the float32 of the counter, 1 - beta ** t has 1e-4 of error at
        # the start for beta = 0.999.
        updates = state["step"].item()
        first = first / (1 - beta1**updates)
        second = second / (1 - beta2**updates)
    direction = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * param
    # The norm of a half-precision tensor overflows at 65504 and loses its small elements.
    wide = torch.promote_types(param.dtype, torch.float32)
    weight_norm = torch.linalg.vector_norm(param, dtype=wide)
    direction_norm = torch.linalg.vector_norm(direction, dtype=wide)
    scaled = weight_norm
    if group["max_weight_norm"] is not None:
        scaled = weight_norm.clamp(max=group["max_weight_norm"])
    # Chosen on the device: a Python branch on a norm would wait for it.
    usable = (weight_norm > 0) & (direction_norm > 0)
    ratio = torch.where(usable, scaled / direction_norm, torch.ones_like(weight_norm))
    param.sub_(direction * (ratio * group["lr"]))


_COEFFICIENTS = (3.4445, -4.775, 2.0315)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024), equal to ``torch.optim.Muon``, for versions of torch without it.

    Args:
        params: matrices.
        lr: learning rate.
        weight_decay: decoupled, as in AdamW.
        momentum: of the running mean of gradients.
        nesterov: whether the momentum is Nesterov's.
        ns_coefficients: of the polynomial of the Newton-Schulz iteration.
        eps: added to the norm that an update is divided by.
        ns_steps: of that iteration.
        adjust_lr_fn: how the rate depends on the shape of a matrix: "original" (None), or
            "match_rms_adamw", which works with learning rates of AdamW.

    Raises:
        OptimizerError: a parameter is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Union[float, Tensor] = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Optional[Literal["original", "match_rms_adamw"]] = None,
    ) -> None:
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise OptimizerError(
                "adjust_lr_fn of Muon must be None, 'original' or 'match_rms_adamw', got "
                f"{adjust_lr_fn!r}."
            )
        super().__init__(params, _settings(locals()))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise OptimizerError(
                        "Muon trains matrices, got a parameter of shape "
                        f"{tuple(parameter.shape)}. Pass optimizer='muon', which trains the others "
                        "with AdamW."
                    )

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:  # type: ignore[override]
        """Make an update.

        Args:
            closure: computes the loss again, before it.

        Returns:
            What it returns.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: Dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer, momentum = state["momentum_buffer"], group["momentum"]
        buffer.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = _orthogonal(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = parameter.shape
        scale = math.sqrt(max(1, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-(group["lr"] * scale))


def _orthogonal(matrix: Tensor, numbers: Tuple[float, ...], steps: int, eps: float) -> Tensor:
    """Bring the singular values of a matrix near to one, in bfloat16."""
    a, b, c = numbers
    x = matrix.bfloat16()
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x
