"""Optimizers with what a device adds: scaled losses, types of accumulators, and its state.

Their ``step`` is torch's own and for the host. On a device, the executor runs the update from the
settings. An argument that is passed explicitly may change after compilation, with
:meth:`~ipufit.poptorch.PoplarExecutor.setOptimizer`; one that is left out is a constant of the
program. ``variable_attrs`` changes which is which.

All of them take ``loss_scaling``, by which the loss is multiplied before the backward pass and the
gradient divided after it, and the dtypes, float16 or float32, in which gradients and the state are
kept. ``maximize``, ``foreach``, ``capturable``, ``differentiable`` and ``fused`` are torch's and do
nothing on a device; ``amsgrad`` must be left out.
"""

from __future__ import annotations

import math
from typing import Any, Callable, ClassVar, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor

from ipufit.optim.lamb import lamb_update
from ipufit.poptorch._logging import logger
from ipufit.poptorch._optimizer_base import Optimizer, VariableAttributes, explicit_arguments

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes", "logger"]

_MOMENTS: Dict[str, Any] = {
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}


def _torchs(explicit: Dict[str, Any], device_only: Iterable[str]) -> Dict[str, Any]:
    """Return the explicit arguments that torch's constructor accepts."""
    return {name: value for name, value in explicit.items() if name not in device_only}


class SGD(Optimizer, torch.optim.SGD):
    """torch.optim.SGD on a device.

    Without momentum, a constant, there is no velocity, and ``use_combined_accum`` and the types do
    nothing.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate.
        velocity_scaling: kept as a factor within the velocity; combined variant only.
        use_combined_accum: keep gradient and velocity in one tensor of the weights' dtype. Changed
            hyper-parameters come into full effect one update later.
        accum_type: dtype in which gradients are accumulated; separate variant only.
        velocity_accum_type: dtype of the velocity; separate variant only.
        max_grad_norm: bound on the norm of all gradients together; infinite if left out.

    Raises:
        AssertionError: another dtype than float16 and float32.
    """

    _child_vars: ClassVar[List[str]] = ["loss_scaling"]
    _child_only: ClassVar[List[str]] = [
        *_child_vars,
        "velocity_scaling",
        "use_combined_accum",
        "accum_type",
        "velocity_accum_type",
        "max_grad_norm",
    ]
    _group_vars: ClassVar[List[str]] = [
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "velocity_scaling",
    ]

    def __init__(
        self,
        params: Iterable[object],
        lr: float,
        momentum: Optional[float] = None,
        dampening: Optional[float] = None,
        weight_decay: Optional[float] = None,
        nesterov: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        velocity_scaling: Optional[float] = None,
        use_combined_accum: Optional[bool] = None,
        accum_type: Optional[torch.dtype] = None,
        velocity_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        explicit = explicit_arguments(locals())
        Optimizer.__init__(self)
        torch.optim.SGD.__init__(self, **_torchs(explicit, SGD._child_only))
        if use_combined_accum:
            scaling = 1.0 if velocity_scaling is None else velocity_scaling
            self.defaults["velocity_scaling"] = scaling
            for group in self.param_groups:
                group.setdefault("velocity_scaling", scaling)
        elif velocity_scaling is not None:
            logger.warning(
                f"velocity_scaling={velocity_scaling:g} is ignored without "
                "use_combined_accum=True: the separate velocity is scaled with loss_scaling. Leave "
                "it out."
            )
        self._settle(
            explicit,
            loss_scaling=1.0,
            use_combined_accum=False,
            accum_type=torch.float32,
            velocity_accum_type=torch.float32,
            max_grad_norm=math.inf,
        )


class Adam(Optimizer, torch.optim.Adam):
    """torch.optim.Adam on a device.

    Args:
        params: parameters, or dicts of parameter groups.
        accum_type: dtype in which gradients are accumulated.
        first_order_momentum_accum_type: dtype of the average of gradients.
        second_order_momentum_accum_type: dtype of the average of their squares.
        max_grad_norm: bound on the norm of all gradients together; infinite if left out.

    Raises:
        AssertionError: another dtype than float16 and float32.
    """

    _child_vars: ClassVar[List[str]] = ["loss_scaling"]
    _child_only: ClassVar[List[str]] = [*_child_vars, *_MOMENTS, "max_grad_norm"]
    _group_vars: ClassVar[List[str]] = ["lr", "betas", "eps", "weight_decay", "amsgrad"]

    def __init__(
        self,
        params: Iterable[object],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        explicit = explicit_arguments(locals())
        Optimizer.__init__(self)
        torch.optim.Adam.__init__(self, **_torchs(explicit, Adam._child_only))
        self._settle(explicit, loss_scaling=1.0, **_MOMENTS, max_grad_norm=math.inf)


class AdamW(Optimizer, torch.optim.AdamW):
    """torch.optim.AdamW on a device.

    Args:
        params: parameters, or dicts of parameter groups.
        bias_correction: does nothing: the device corrects the bias of AdamW in any case.
        accum_type: dtype in which gradients are accumulated.
        first_order_momentum_accum_type: dtype of the average of gradients.
        second_order_momentum_accum_type: dtype of the average of their squares.
        max_grad_norm: bound on the norm of all gradients together; infinite if left out.

    Raises:
        AssertionError: another dtype than float16 and float32.
    """

    _child_vars: ClassVar[List[str]] = ["loss_scaling"]
    _child_only: ClassVar[List[str]] = [*_child_vars, "bias_correction", *_MOMENTS, "max_grad_norm"]
    _group_vars: ClassVar[List[str]] = ["lr", "betas", "weight_decay", "eps", "amsgrad"]

    def __init__(
        self,
        params: Iterable[object],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        bias_correction: Optional[bool] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        explicit = explicit_arguments(locals())
        Optimizer.__init__(self)
        torch.optim.AdamW.__init__(self, **_torchs(explicit, AdamW._child_only))
        self._settle(
            explicit, loss_scaling=1.0, bias_correction=True, **_MOMENTS, max_grad_norm=math.inf
        )


class RMSprop(Optimizer, torch.optim.RMSprop):
    """torch.optim.RMSprop on a device, or TensorFlow's.

    TensorFlow's starts the average of squares at one, takes eps within the root, and the learning
    rate within the momentum.

    Args:
        params: parameters, or dicts of parameter groups.
        accum_type: dtype in which gradients are accumulated.
        first_order_momentum_accum_type: dtype of the average of squares, and of that of gradients.
        second_order_momentum_accum_type: does nothing on the device.
        use_tf_variant: TensorFlow's.

    Raises:
        AssertionError: another dtype than float16 and float32.
    """

    _child_vars: ClassVar[List[str]] = ["loss_scaling"]
    _child_only: ClassVar[List[str]] = [*_child_vars, *_MOMENTS, "use_tf_variant"]
    _group_vars: ClassVar[List[str]] = [
        "lr",
        "momentum",
        "weight_decay",
        "alpha",
        "eps",
        "centered",
    ]

    def __init__(
        self,
        params: Iterable[object],
        lr: Optional[float] = None,
        alpha: Optional[float] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        momentum: Optional[float] = None,
        centered: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        use_tf_variant: Optional[bool] = None,
    ) -> None:
        explicit = explicit_arguments(locals())
        Optimizer.__init__(self)
        torch.optim.RMSprop.__init__(self, **_torchs(explicit, RMSprop._child_only))
        self._settle(explicit, loss_scaling=1.0, **_MOMENTS, use_tf_variant=False)


class LAMB(Optimizer, torch.optim.Optimizer):
    """LAMB (You et al. 2020, arXiv 1904.00962, Algorithm 2), as :class:`ipufit.optim.LAMB`.

    Args:
        params: parameters, or dicts of parameter groups.
        bias_correction: divide the averages by ``1 - beta ** t``.
        max_weight_norm: limit of the weight's norm in the ratio; 65500 if left out.
        accum_type: dtype in which gradients are accumulated.
        first_order_momentum_accum_type: dtype of the average of gradients.
        second_order_momentum_accum_type: dtype of the average of their squares.

    Raises:
        AssertionError: another dtype than float16 and float32.
    """

    _child_vars: ClassVar[List[str]] = ["loss_scaling"]
    _child_only: ClassVar[List[str]] = [*_child_vars, "bias_correction", *_MOMENTS]
    _group_vars: ClassVar[List[str]] = ["lr", "weight_decay", "betas", "eps", "max_weight_norm"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        bias_correction: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        max_weight_norm: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
    ) -> None:
        explicit = explicit_arguments(locals())
        Optimizer.__init__(self)
        defaults = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "max_weight_norm": 65500.0,
        }
        defaults.update({name: explicit[name] for name in defaults if name in explicit})
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.max_weight_norm = defaults["max_weight_norm"]
        self._settle(explicit, loss_scaling=1.0, bias_correction=True, **_MOMENTS)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Optional[Callable[..., Any]] = None
    ) -> Optional[float]:
        """One weight update on the host, of every parameter that has a gradient.

        Args:
            closure: evaluates the loss again and returns it, as for every optimizer of torch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = {**group, "bias_correction": self.bias_correction}
            for parameter in group["params"]:
                gradient: Optional[Tensor] = parameter.grad
                if gradient is not None:
                    lamb_update(parameter, gradient, self.state[parameter], settings)
        return loss
