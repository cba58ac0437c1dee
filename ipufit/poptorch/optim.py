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
from typing import Any, Callable, ClassVar, Dict, Iterable, List, Mapping, Optional, Tuple, Type

import torch
from torch import Tensor

from ipufit.optim.optimizers import lamb_step
from ipufit.poptorch._logging import logger

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes", "logger"]


# Tensors by their names on the device, under "ipu_state" and "ipu_param".
DeviceState = Mapping[str, Optional[Mapping[str, Tensor]]]
DEVICE = ("ipu_state", "ipu_param")


class VariableAttributes:
    """Records which hyper-parameters may change after compilation; the others are constants.

    Args:
        variable_attributes: names of the hyper-parameters that may change.
        allowed_attributes: names of all hyper-parameters of the optimizer.
    """

    def __init__(self, variable_attributes: List[str], allowed_attributes: List[str]) -> None:
        self._variable_attributes = variable_attributes
        self._allowed_attributes = allowed_attributes

    def isConstant(self, attr: str) -> bool:
        """Return True for a constant hyper-parameter and for an unknown name."""
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Make a hyper-parameter a constant of the compiled program.

        Raises:
            AssertionError: there is no hyper-parameter of this name.
        """
        self._check(attr)
        self._variable_attributes = [a for a in self._variable_attributes if a != attr]

    def markAsVariable(self, attr: str) -> None:
        """Let a hyper-parameter change after compilation.

        Raises:
            AssertionError: there is no hyper-parameter of this name.
        """
        self._check(attr)
        if attr not in self._variable_attributes:
            self._variable_attributes.append(attr)

    def _check(self, attr: str) -> None:
        if attr not in self._allowed_attributes:
            raise AssertionError(
                f"Unknown attribute {attr}: the optimizer has no hyper-parameter of this name. "
                f"It has {', '.join(self._allowed_attributes)}."
            )


class Optimizer:
    """State of an optimizer that lives on a device, beside a class of torch.optim.

    Attributes:
        ipu_state_is_dirty: whether there is state here that the device does not have.
        host_state_is_dirty: whether the device has state that is not here.
        variable_attrs: which hyper-parameters may change after compilation.
    """

    _child_vars: ClassVar[List[str]] = ["loss_scaling"]
    # Arguments that torch's class does not have, with their defaults.
    _child_only: ClassVar[Mapping[str, object]] = {}
    _group_vars: ClassVar[List[str]] = []
    variable_attrs: VariableAttributes
    bias_correction: bool

    def __init__(self) -> None:
        self._state_dict: Dict[str, Any] = {"ipu_state": None, "ipu_param": None}
        self.ipu_state_is_dirty = False
        self.host_state_is_dirty = False
        self._sync: Optional[StateSync] = None

    def state_dict(self) -> Dict[str, Any]:
        """Return torch's state dict with the device's state under "ipu_state" and "ipu_param".

        Both are None until the optimizer has been on a device. Reads the device if it ran since.
        """
        if self._sync is not None:
            self._sync.refresh()
        return self.get_state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load what :meth:`state_dict` returned; the device gets it with the next run.

        Raises:
            RuntimeError: the dict is empty, or holds nothing of a device. Nothing has changed then.
        """
        _check_state(state)
        torch_state = {key: value for key, value in state.items() if key not in DEVICE}
        torch.optim.Optimizer.load_state_dict(self, torch_state)  # type: ignore[arg-type]
        self.set_state_dict(state)

    def get_state_dict(self) -> Dict[str, Any]:
        """Return the state dict that the host has already, without reading the device."""
        device_state = {
            key: None if value is None else dict(value) for key, value in self._state_dict.items()
        }
        return {**device_state, **torch.optim.Optimizer.state_dict(self)}  # type: ignore[arg-type]

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the entries "ipu_state" and "ipu_param" alone.

        Raises:
            RuntimeError: the dict is empty, or holds nothing of a device.
        """
        _check_state(state)
        self._state_dict = {key: None if state[key] is None else dict(state[key]) for key in DEVICE}
        self.ipu_state_is_dirty = True
        self.host_state_is_dirty = False

    def has_state(self) -> bool:
        """Return True if the host has state of a device."""
        return all(self._state_dict.get(key) is not None for key in DEVICE)

    def __getstate__(self) -> Dict[str, Any]:
        """Return everything but the link to the executor, for copies and pickles."""
        state: Dict[str, Any] = torch.optim.Optimizer.__getstate__(self)  # type: ignore[arg-type]
        names = [name for name in self._child_only if name in self.__dict__]
        state.update({name: self.__dict__[name] for name in names})
        state["variable_attrs"] = self.variable_attrs
        state["_state_dict"] = self._state_dict
        state["_sync"] = None
        state["ipu_state_is_dirty"] = self.has_state()
        state["host_state_is_dirty"] = False
        return state

    def _begin(self, arguments: Mapping[str, object]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
        """Set up the device's half, from the ``locals()`` of a constructor.

        Returns:
            The arguments that were passed explicitly, and those of them that torch's class has.
        """
        Optimizer.__init__(self)
        explicit = {k: v for k, v in arguments.items() if v is not None and k != "self"}
        return explicit, {k: v for k, v in explicit.items() if k not in self._child_only}

    def _start(self, base: Type[torch.optim.Optimizer], arguments: Mapping[str, object]) -> None:
        """Start as an optimizer of torch's, with the arguments of its own."""
        explicit, plain = self._begin(arguments)
        base.__init__(self, **plain)  # type: ignore[arg-type]
        self._settle(explicit)

    def _settle(self, explicit: Mapping[str, object]) -> None:
        """Set the global settings, and mark the arguments that were passed explicitly as variable.

        Raises:
            AssertionError: a type of accumulator that is neither float16 nor float32.
        """
        for name, default in self._child_only.items():
            if name in self._group_vars:
                continue
            value = explicit.get(name, default)
            if name.endswith("accum_type") and value not in (torch.float16, torch.float32):
                raise AssertionError(
                    "Accumulation types must be either torch.float32 or torch.float16, got "
                    f"{name}={value!r}. Pass one of the two."
                )
            setattr(self, name, value)
        allowed = [*self.defaults, *self._child_vars]  # type: ignore[attr-defined]
        self.variable_attrs = VariableAttributes(list(explicit), allowed)


class StateSync:
    """Synchronises the optimizer state on the host with that on the device.

    The executor makes one for every optimizer that it gets, before or after compilation, and
    reports events to it. For an optimizer of torch.optim, whose state stays on the device, all
    methods do nothing. They are called in this order:

    * :meth:`attach`, once the compiled program and the settings are on the device: after
      compilation, after attaching again, and when the optimizer replaces another one;
    * :meth:`send`, before every run;
    * :meth:`mark_updated`, after every run;
    * :meth:`refresh`, before weights are written to the device or the device is detached from;
    * :meth:`close`, before the program is destroyed, and when another optimizer replaces this one.

    Without a device (``ConnectionType.Never``) none of them is called, and the state stays None.

    Args:
        optimizer: any optimizer; it is bound to this object until :meth:`close`.
        read: returns the device's state as new tensors of the host.
        write: writes state to the device; state that is missing from its argument stays as it is
            on the device. Weights that are newer on the device are read first.
    """

    def __init__(
        self,
        optimizer: object,
        read: Callable[[], DeviceState],
        write: Callable[[DeviceState], None],
    ) -> None:
        self._optimizer = optimizer if isinstance(optimizer, Optimizer) else None
        self._read = read
        self._write = write
        self._stands = False
        if self._optimizer is not None:
            self._optimizer._sync = self

    def attach(self) -> None:
        """Write the state that the optimizer has; without any, the device starts with new state.

        A program that stands on the device once more still has its state and its numbers, which
        may be newer than what was read of them: then only what was loaded since is written.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return
        if not self._stands:
            optimizer.ipu_state_is_dirty = optimizer.has_state()
            optimizer.host_state_is_dirty = not optimizer.ipu_state_is_dirty
            self._stands = True
        self.send()

    def mark_updated(self) -> None:
        """Record that the device has changed its state."""
        if self._optimizer is not None:
            self._optimizer.host_state_is_dirty = True

    def send(self) -> None:
        """Write state that the device does not have yet."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        if optimizer.ipu_state_is_dirty and optimizer.has_state():
            self._write(optimizer._state_dict)
            logger.debug(
                "Writing optimiser state tensors from host to IPU memory: "
                f"{_counted(optimizer._state_dict)}."
            )
        optimizer.ipu_state_is_dirty = False

    def refresh(self) -> None:
        """Read the state if the device's is newer."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        if not optimizer.host_state_is_dirty:
            logger.debug("Using cached optimiser state dict: the device has not run since.")
            return
        state = self._read()
        logger.debug(f"Writing optimiser state tensors from IPU to host: {_counted(state)}.")
        optimizer.set_state_dict(state)
        optimizer.ipu_state_is_dirty = False

    def close(self) -> None:
        """Read state that is newer on the device and unbind the optimizer; safe to call twice."""
        optimizer = self._optimizer
        if optimizer is not None and optimizer._sync is self:
            self.refresh()
            optimizer._sync = None
        self._optimizer = None


def _counted(state: DeviceState) -> str:
    tensors, numbers = (len(state[key] or ()) for key in DEVICE)
    return f"{tensors} state tensors, {numbers} numbers"


def _check_state(state: Mapping[str, object]) -> None:
    if not state:
        raise RuntimeError(
            "Cannot load optimizer state dictionary because it is empty. Pass what state_dict() of "
            "an optimizer of poptorch.optim gave."
        )
    if not all(key in state for key in DEVICE):
        raise RuntimeError(
            "Only IPU optimizer states can be loaded onto the IPU. This one has no "
            "'ipu_state' and 'ipu_param', as that of an optimizer of torch.optim; pass what "
            "state_dict() of an optimizer of poptorch.optim gave."
        )


_MOMENTS: Mapping[str, object] = {
    "loss_scaling": 1.0,
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}


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

    _child_only: ClassVar[Mapping[str, object]] = {
        "loss_scaling": 1.0,
        "velocity_scaling": None,
        "use_combined_accum": False,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    }
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
        explicit, plain = self._begin(locals())
        torch.optim.SGD.__init__(self, **plain)
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
        self._settle(explicit)


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

    _child_only: ClassVar[Mapping[str, object]] = {**_MOMENTS, "max_grad_norm": math.inf}
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
        self._start(torch.optim.Adam, locals())


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

    _child_only: ClassVar[Mapping[str, object]] = {
        **_MOMENTS,
        "bias_correction": True,
        "max_grad_norm": math.inf,
    }
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
        self._start(torch.optim.AdamW, locals())


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

    _child_only: ClassVar[Mapping[str, object]] = {**_MOMENTS, "use_tf_variant": False}
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
        self._start(torch.optim.RMSprop, locals())


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

    _child_only: ClassVar[Mapping[str, object]] = {**_MOMENTS, "bias_correction": True}
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
        explicit, plain = self._begin(locals())
        defaults = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "max_weight_norm": 65500.0,
            **plain,
        }
        del defaults["params"]
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.max_weight_norm = defaults["max_weight_norm"]
        self._settle(explicit)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Optional[Callable[..., Any]] = None
    ) -> Optional[float]:
        """One weight update on the host, of every parameter that has a gradient.

        Args:
            closure: evaluates the loss again and returns it, as for every optimizer of torch.
        """
        return lamb_step(self, closure, bias_correction=self.bias_correction)
