"""Base class of the optimizers in ``optim``: variable hyper-parameters and state on the device."""

from __future__ import annotations

from typing import Any, Callable, ClassVar, Dict, List, Mapping, Optional

import torch
from torch import Tensor

from ipufit.poptorch._logging import logger

__all__ = ["DeviceState", "Optimizer", "StateSync", "VariableAttributes", "explicit_arguments"]

# Tensors by their names on the device, under "ipu_state" and "ipu_param".
DeviceState = Mapping[str, Optional[Mapping[str, Tensor]]]

_DEVICE = ("ipu_state", "ipu_param")


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

    _child_vars: ClassVar[List[str]] = []
    _child_only: ClassVar[List[str]] = []
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
        torch_state = {key: value for key, value in state.items() if key not in _DEVICE}
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
        self._state_dict = {
            key: None if state[key] is None else dict(state[key]) for key in _DEVICE
        }
        self.ipu_state_is_dirty = True
        self.host_state_is_dirty = False

    def has_state(self) -> bool:
        """Return True if the host has state of a device."""
        return all(self._state_dict.get(key) is not None for key in _DEVICE)

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

    def _settle(self, explicit: Mapping[str, object], **defaults: object) -> None:
        """Set the global settings, and mark the arguments that were passed explicitly as variable.

        Raises:
            AssertionError: a type of accumulator that is neither float16 nor float32.
        """
        for name, default in defaults.items():
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
    tensors, numbers = (len(state[key] or ()) for key in _DEVICE)
    return f"{tensors} state tensors, {numbers} numbers"


def explicit_arguments(arguments: Mapping[str, object]) -> Dict[str, Any]:
    """Return a constructor's arguments that are not None, from its ``locals()``."""
    return {
        name: value
        for name, value in arguments.items()
        if value is not None and name not in ("self", "__class__")
    }


def _check_state(state: Mapping[str, object]) -> None:
    if not state:
        raise RuntimeError(
            "Cannot load optimizer state dictionary because it is empty. Pass what state_dict() of "
            "an optimizer of poptorch.optim gave."
        )
    if not all(key in state for key in _DEVICE):
        raise RuntimeError(
            "Only IPU optimizer states can be loaded onto the IPU. This one has no "
            "'ipu_state' and 'ipu_param', as that of an optimizer of torch.optim; pass what "
            "state_dict() of an optimizer of poptorch.optim gave."
        )
