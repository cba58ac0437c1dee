"""The optimizer of a training executor: the user's object, and the device's half of it."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set

import torch
from torch import Tensor

from ipufit.poptorch._compiled import Compiled
from ipufit.poptorch._logging import logger
from ipufit.poptorch._loss_scale import AutomaticLossScale, ScalingSettings
from ipufit.poptorch._optimizer import CompiledOptimizer
from ipufit.poptorch._optimizer_rules import Factors
from ipufit.poptorch._optimizer_settings import (
    OPTIMIZERS,
    OptimizerKind,
    OptimizerSettings,
    class_of,
    kind_of,
    settings_of,
)
from ipufit.poptorch._wrapping import HostWeights
from ipufit.poptorch.enums import MeanReductionStrategy, ReductionType
from ipufit.poptorch.optim import DEVICE, AdamW, DeviceState, StateSync
from ipufit.poptorch.options import Options

# What every optimizer has, in one version of torch or another.
_TORCHS = {
    "defaults",
    "state",
    "param_groups",
    "variable_attrs",
    "_state_dict",
    "_sync",
    "ipu_state_is_dirty",
    "host_state_is_dirty",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}


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
        allowed = front_end_class._child_only if front_end_class else ()
        attributes = [name for name in optimizer.__dict__ if name not in allowed]
        self._find("optimizer attribute", attributes, self._own)
        self._find("default group variable", optimizer.defaults, self._grouped)
        for index, group in enumerate(optimizer.param_groups):
            self._find(f"group {index} attribute", group, self._grouped)
        self._has_first = True

    def _look_at_values(self, optimizer: torch.optim.Optimizer) -> None:
        if any(group.get("maximize") for group in optimizer.param_groups):
            self._say(
                "maximize=True is ignored: the device minimises the loss. Negate the loss instead.",
                warn=True,
            )
        if class_of(optimizer) is AdamW and not getattr(optimizer, "bias_correction", True):
            self._say(
                "bias_correction=False is ignored: the device corrects the bias of AdamW in any "
                "case. LAMB honours it.",
                warn=True,
            )

    def _find(self, kind: str, attributes: Iterable[str], present: Set[str]) -> None:
        new = [name for name in attributes if name not in present]
        if not self._has_first:
            present.update(new)
        elif new:
            self._say(
                f"Ignoring unexpected {kind} {new}: it was not there when the model got its first "
                "optimizer. Options.relaxOptimizerAttributesChecks() makes this a debug message."
            )

    def _say(self, text: str, warn: bool = False) -> None:
        if text not in self._reported:
            self._reported.add(text)
            (logger.warning if warn else self._log)(text)


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


# For each such parameter, the names of its copies.
Copies = Mapping[str, Sequence[str]]


def merge_parts(state: DeviceState, copies: Copies) -> DeviceState:
    """Stack the state of a parameter's copies along a new first dimension, as the parameter has it.

    Hyper-parameters are equal for all copies, so that one of them is returned.
    """
    return {kind: _merge(state[kind] or {}, copies, kind == "ipu_state") for kind in DEVICE}


def _merge(values: Mapping[str, Tensor], copies: Copies, every: bool) -> Dict[str, Tensor]:
    result = dict(values)
    for whole, parts in copies.items():
        for prefix in _prefixes(result, parts[0]):
            tensors = [result.pop(prefix + part) for part in parts]
            result[prefix + whole] = torch.stack(tensors) if every else tensors[0]
    return result


def split_parts(state: DeviceState, copies: Copies) -> DeviceState:
    """Split the result of :func:`merge_parts` into the state of each copy."""
    return {kind: _split(state.get(kind) or {}, copies, kind == "ipu_state") for kind in DEVICE}


def _split(values: Mapping[str, Tensor], copies: Copies, every: bool) -> Dict[str, Tensor]:
    result = dict(values)
    for whole, parts in copies.items():
        for prefix in _prefixes(result, whole):
            value = result.pop(prefix + whole)
            for place, part in enumerate(parts):
                result[prefix + part] = value[place] if every else value
    return result


def _prefixes(values: Mapping[str, Tensor], parameter: str) -> List[str]:
    """Return what the names of a parameter's values begin with."""
    return [name[: -len(parameter)] for name in values if name.endswith(f"___{parameter}")]


def _nothing() -> None:
    """Exchange no weights, because there is no program."""


# Of a model that has no program, or no optimizer.
IDLE = StateSync(None, dict, lambda state: None)


class OptimizerLink:
    """Transfers settings and state between an optimizer and the device.

    Args:
        options: of the executor.
        optimizer: torch's, or the front end's.

    Attributes:
        optimizer: the one in use.
        sync: synchronises the optimizer's state with the device's.

    Raises:
        AssertionError: an optimizer that is not supported.
        ValueError: a setting that is not.
    """

    def __init__(self, options: Options, optimizer: torch.optim.Optimizer) -> None:
        self._options = options
        self.optimizer = optimizer
        self._exchange_weights: Callable[[], None] = _nothing
        self._tracker = AttributeTracker(options._relax_optimizer_checks)
        self._device: Optional[CompiledOptimizer] = None
        self._settings = self._read(optimizer)
        self.sync = IDLE
        self._parts: Dict[str, List[str]] = {}

    def _read(self, optimizer: torch.optim.Optimizer) -> OptimizerSettings:
        settings = settings_of(optimizer, ScalingSettings.enabled(self._options._Popart.options))
        self._tracker.look(optimizer)
        select_mean_strategy(optimizer, self._options, self._device is not None)
        return settings

    def groups(self) -> List[Sequence[Tensor]]:
        """The parameters of each group."""
        return [group["params"] for group in self.optimizer.param_groups]

    # Its tensors are changed later.
    @torch.inference_mode(False)
    def bind(self, program: Compiled, trained: Sequence[Sequence[str]], host: HostWeights) -> None:
        """Create the device's optimizer for a program that was just compiled.

        Args:
            program: just compiled.
            trained: names of the parameters that want a gradient, by group.
            host: where the weights are.
        """
        device, with_gradient = program.device, set(program.recorded.with_gradient)
        # A device takes state together with the weights.
        self._exchange_weights = functools.partial(host.exchange, device)
        groups = [
            list(device.parts([name for name in group if name in with_gradient]))
            for group in trained
        ]
        training = self._options.Training
        scaling = ScalingSettings.of(self._options._Popart.options)
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        factors = Factors(
            training.gradient_accumulation,
            self._options.replication_factor * self._options.Distributed.numProcesses,
            training.accumulation_and_replication_reduction_type == ReductionType.Mean,
            strategy == MeanReductionStrategy.Post,
        )
        self._device = CompiledOptimizer(
            self._settings,
            groups,
            device.parts(program.recorded.with_gradient),
            factors,
            None if scaling is None else AutomaticLossScale(scaling, program.recorded.counted),
        )
        device.updates = self._device
        self._parts = {name: list(device.parts([name])) for name in device.grouped}
        self.sync = self._new_sync()

    def _new_sync(self) -> StateSync:
        return StateSync(self.optimizer, self._read_state, self._write_along)

    def _read_state(self) -> DeviceState:
        assert self._device is not None
        return merge_parts(self._device.state(), self._parts)

    def _write_along(self, state: DeviceState) -> None:
        self._exchange_weights()
        self._write(state)

    def _write(self, state: DeviceState) -> None:
        assert self._device is not None
        self._device.load_state(split_parts(state, self._parts))

    def set(self, optimizer: torch.optim.Optimizer, attached: bool) -> None:
        """Take over new settings of the optimizer, or another optimizer.

        Raises:
            Error: the program can't. Nothing has changed then.
        """
        settings = self._read(optimizer)
        if optimizer is not self.optimizer:
            # What the old one goes away with are its own numbers.
            self.sync.refresh()
        if self._device is not None:
            self._device.set(settings)
        self._settings = settings
        if optimizer is not self.optimizer:
            self.sync.close()
            self.optimizer = optimizer
            if self._device is not None:
                self.sync = self._new_sync()
                self.sync.attach()
        if attached:
            self.sync.send()

    def state(self) -> DeviceState:
        """Return the device's state, with what was loaded and not yet sent."""
        assert self._device is not None
        self.sync.send()
        return self._device.state()

    def restore(self, state: DeviceState) -> None:
        """Write state to the device that is newer than the optimizer's."""
        self._write(state)
        self.sync.mark_updated()

    def release(self) -> None:
        """Give the device's state to the optimizer, because the program is being destroyed."""
        self.sync.close()
        self.sync, self._device = IDLE, None
        self._exchange_weights = _nothing
