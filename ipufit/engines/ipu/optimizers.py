"""torch's optimizer as PopTorch's: the same settings, and its state there and back."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Type

import torch
from torch import Tensor, nn

from ipufit.core.train_config import TrainConfig
from ipufit.engines.ipu.preflight.facts import CLIPPED, SETTINGS, ParameterGroup, refused_settings
from ipufit.errors import OptimizerError
from ipufit.optim.optimizers import LAMB
from ipufit.optim.several import name_of_optimizer
from ipufit.optim.state import device_state, load_device_state, torch_state

# What PopTorch takes over, and what it has when nobody says anything.
_SETTINGS: Dict[Type[torch.optim.Optimizer], Dict[str, object]] = {
    torch.optim.SGD: {
        "lr": None,
        "momentum": 0,
        "dampening": 0,
        "weight_decay": 0,
        "nesterov": False,
    },
    torch.optim.Adam: {"lr": None, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0},
    torch.optim.AdamW: {"lr": None, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    torch.optim.RMSprop: {
        "lr": None,
        "alpha": 0.99,
        "eps": 1e-8,
        "weight_decay": 0,
        "momentum": 0,
        "centered": False,
    },
    LAMB: {
        "lr": None,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "max_weight_norm": 65500.0,
    },
}

_NO_LIMIT = float(torch.finfo(torch.float32).max)


def check_optimizer(optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
    """Make sure that a device can do what this optimizer does.

    Raises:
        OptimizerError: it can't.
    """
    kind = type(optimizer)
    if kind not in _SETTINGS:
        names = ", ".join(kind.__name__ for kind in _SETTINGS)
        raise OptimizerError(
            f"an IPU runs the updates of {names} only, got {name_of_optimizer(optimizer)}. "
            "Choose one of these, or engine='embedded'."
        )
    for index, group in enumerate(optimizer.param_groups):
        for name, fact in refused_settings(ParameterGroup(kind, group)):
            raise OptimizerError(
                f"an IPU can't run {kind.__name__} with {name}, which parameter group {index} has: "
                f"{fact.says}. Leave it out, or use engine='embedded'."
            )
    if kind is LAMB and len({group["bias_correction"] for group in optimizer.param_groups}) > 1:
        raise OptimizerError(
            "an IPU runs LAMB with one bias_correction for all parameter groups, got several. Use "
            "one value for all, or use engine='embedded'."
        )
    unbounded = SETTINGS["global_clipnorm"].applies(kind)
    if config.clip.global_norm is not None and unbounded:
        raise OptimizerError(
            f"an IPU clips the gradients of {', '.join(CLIPPED)} only, got Clip(global_norm=...) "
            f"with {kind.__name__}. Leave it out, choose one of these, or use engine='embedded'."
        )


class DeviceOptimizer:
    """An optimizer of PopTorch that does what torch's does, over the parameters of one program.

    Args:
        sdk: PopTorch.
        optimizer: torch's; its state is read and written, its ``step`` is never called.
        parameters: those that are trained, by the names that the program has for them.
        originals: the parameter of torch's optimizer for each of these names.
        config: clipping, loss scale and the type of accumulators.
        scheduled: settings that will change; all others are constants of the program where they
            have PopTorch's default.

    Attributes:
        poptorch_optimizer: takes the settings.
        waits: whether state that was handed over waits for the next run, or for the program to be
            attached anew, and with it the settings of that moment.
    """

    def __init__(
        self,
        sdk: ModuleType,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        originals: Mapping[str, nn.Parameter],
        config: TrainConfig,
        scheduled: FrozenSet[str],
    ) -> None:
        self._torchs = optimizer
        self._kind = type(optimizer)
        self._originals = dict(originals)
        self._settings = _SETTINGS[self._kind]
        self._loaded = self.waits = False
        by_id = {id(original): parameters[name] for name, original in originals.items()}
        groups = []
        for group in optimizer.param_groups:
            trained = [by_id[id(p)] for p in group["params"] if id(p) in by_id]
            groups.append({"params": trained, **self._values(group)})
        self._explicit = {
            name
            for name, default in self._settings.items()
            if name == "lr" or name in scheduled or any(group[name] != default for group in groups)
        }
        # A group without any parameter that is trained would be none to PopTorch.
        self._used = [i for i, group in enumerate(groups) if group["params"]]
        self._sent = [self._values(optimizer.param_groups[i]) for i in self._used]
        self.poptorch_optimizer = self._make(sdk, [groups[i] for i in self._used], config)

    def _make(self, sdk: ModuleType, groups: List[Dict[str, object]], config: TrainConfig) -> Any:
        kind = getattr(sdk.optim, self._kind.__name__)
        explicit_groups = [{n: g[n] for n in ("params", *sorted(self._explicit))} for g in groups]
        more = {name: groups[0][name] for name in sorted(self._explicit)}
        if self._kind is LAMB:
            more["bias_correction"] = self._torchs.param_groups[0]["bias_correction"]
        if config.clip.global_norm is not None:
            more["max_grad_norm"] = config.clip.global_norm
        if config.loss_scale is not None:
            more["loss_scaling"] = config.loss_scale.initial
        if config.accumulation_dtype is not None:
            more["accum_type"] = config.accumulation_dtype
        return kind(explicit_groups, **more)

    def _values(self, group: Mapping[str, object]) -> Dict[str, object]:
        values = {name: _plain(name, group[name]) for name in self._settings}
        if "dampening" in values and not values["momentum"]:
            # Torch leaves it aside then; a device makes the learning rate smaller.
            values["dampening"] = 0
        return values

    def changed(self, row: Sequence[Mapping[str, object]]) -> bool:
        """Take the settings of the coming updates; whether the device must be told.

        Raises:
            OptimizerError: one changed that is a constant of the program, or a momentum between
                zero and non-zero.
        """
        values = [self._values(row[i]) for i in self._used]
        if values == self._sent:
            return False
        for index, before, after in zip(self._used, self._sent, values):
            for name, value in after.items():
                if value != before[name] and name not in self._explicit:
                    raise OptimizerError(
                        f"{name} of parameter group {index} can't change during fit from "
                        f"PopTorch's default ({before[name]}) to {value}, because the default is a "
                        "constant of the program. Change it between two calls of fit, or start "
                        "with another value."
                    )
                if name == "momentum" and bool(value) != bool(before[name]):
                    raise OptimizerError(
                        f"momentum of parameter group {index} can't go from {before[name]} to "
                        f"{value} during fit on an IPU, which changes its velocities without "
                        "momentum, too, where torch leaves them as they are. Change it between two "
                        "calls of fit, or use engine='embedded'."
                    )
        for device_group, after in zip(self.poptorch_optimizer.param_groups, values):
            device_group.update(
                {name: value for name, value in after.items() if name in self._explicit}
            )
        self._sent = values
        return True

    def load(self) -> None:
        """Hand torch's state over to a compiled program; the device gets it with the next run.

        Where torch has none, that is zeros, if the device may have anything else.
        """
        state = device_state(self._torchs, self._originals, self._loaded)
        self._loaded = True
        if state:
            self.waits = True
            load_device_state(self.poptorch_optimizer, state)

    def store(self, updates: int) -> None:
        """Bring torch's state up to date, from the device if it ran since.

        Args:
            updates: made since the last time, for what torch counts and the device does not.
        """
        device_tensors: Optional[Mapping[str, Tensor]] = self.poptorch_optimizer.state_dict().get(
            "ipu_state"
        )
        if not device_tensors:
            return
        for name, original in self._originals.items():
            before = self._torchs.state.get(original, {})
            done = float(before.get("step", 0)) + updates
            state = torch_state(self._kind, name, original, device_tensors, done)
            if state:
                self._torchs.state[original].update(state)


def _plain(name: str, value: object) -> object:
    """A setting as PopTorch takes it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if name == "max_weight_norm" and value is None:
        return _NO_LIMIT
    if name == "betas" and isinstance(value, (list, tuple)):
        return tuple(_plain("beta", beta) for beta in value)
    if isinstance(value, float) and math.isinf(value):
        return _NO_LIMIT
    return value
