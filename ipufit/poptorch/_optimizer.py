"""The optimizer of a compiled program: weight updates, and the state they need."""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.train_config import Clip
from ipufit.engines.embedded.flat_optimizer import apply_rules
from ipufit.engines.embedded.gradient_transform import clipped
from ipufit.optim.rules import OptimizerRule
from ipufit.poptorch import _optimizer_rules
from ipufit.poptorch._logging import error, logger
from ipufit.poptorch._loss_scale import FINAL_SCALE, UPDATE_FACTOR, AutomaticLossScale
from ipufit.poptorch._optimizer_settings import OptimizerSettings, Value, check_replacement
from ipufit.poptorch.optim import DeviceState
from ipufit.tracing.capture import capture
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage


@dataclasses.dataclass
class _WeightState:
    """One weight with its hyper-parameters and optimizer state.

    Attributes:
        name: name of the parameter.
        group: index of its parameter group.
        weight: the device's tensor.
        updates: number of updates so far.
        numbers: hyper-parameters by name.
        state: state tensors by torch's names.
    """

    name: str
    group: int
    weight: Tensor
    updates: float
    numbers: Dict[str, float]
    state: Dict[str, Tensor]


@dataclasses.dataclass
class _UpdateBucket:
    """Weights that are contiguous in memory and updated with the same numbers."""

    members: List[_WeightState]
    block: FlatBlock
    rule: OptimizerRule
    state: Dict[str, Tensor]


def _differ(members: Sequence[_WeightState]) -> bool:
    """Return True if weights can't be updated with the same numbers any more."""
    first = members[0]
    return any(m.updates != first.updates or m.numbers != first.numbers for m in members)


class CompiledOptimizer:
    """One optimizer of a compiled training program.

    Args:
        settings: of the optimizer.
        groups: names of the parameters of each of its groups.
        parameters: the device's tensors by name, of what is trained and what the loss reaches;
            updated in place. Their memory moves: from here on they are views of longer tensors, so
            write them with ``copy_``, and make views of them only afterwards.
        factors: of how many micro-batches a gradient is made.
        automatic: the loss scaling follows the gradients.

    Attributes:
        settings: the settings in use; :meth:`set` changes them.

    Raises:
        Error: a hyper-parameter that a device can't compute with.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        groups: Sequence[Sequence[str]],
        parameters: Mapping[str, Tensor],
        factors: Optional[_optimizer_rules.Factors] = None,
        automatic: Optional[AutomaticLossScale] = None,
    ) -> None:
        settings.check()
        self.settings = settings
        self._factors = factors or _optimizer_rules.Factors()
        self._automatic = automatic
        self._scales = automatic is not None or settings.loss_scaling != Value(1.0, True)
        # The device's numbers that were written to it and are not those of the settings.
        self._written: Dict[str, float] = {}
        self._graphs: Dict[Tuple[object, ...], Callable[..., object]] = {}
        self._parts: List[_UpdateBucket] = []
        self._rules = [_optimizer_rules.rule_of(settings, group) for group in range(len(groups))]
        self._members = [
            self._member(name, group, parameters[name])
            for group, names in enumerate(groups)
            for name in names
            if name in parameters
        ]
        self._lay_out()
        self._log()

    @property
    def loss_scaling(self) -> float:
        """Factor by which the loss of the coming update is multiplied."""
        scaling = self._written.get(_optimizer_rules.LOSS_SCALING, self.settings.loss_scaling.value)
        return scaling * (1.0 if self._automatic is None else self._automatic.factor)

    def _member(self, name: str, group: int, weight: Tensor) -> _WeightState:
        numbers = self._numbers(name, group)
        state = {
            key: _optimizer_rules.initial(self.settings, key, weight, numbers)
            for key in self._rules[group].tensors
        }
        return _WeightState(name, group, weight, 0.0, numbers, state)

    def _numbers(self, name: str, group: int) -> Dict[str, float]:
        return _optimizer_rules.imported(self.settings, group, name, self._factors, self._written)

    def _log(self) -> None:
        for line in self.settings.lines():
            logger.debug(line)

    def _lay_out(self) -> None:
        """Make weights updated with the same numbers contiguous, which moves their memory."""
        alike: Dict[Tuple[object, ...], List[_WeightState]] = {}
        for member in self._members:
            weight, numbers = member.weight, tuple(member.numbers.values())
            # NaN, which may have been written, is not equal to itself.
            same = tuple("nan" if math.isnan(number) else number for number in numbers)
            key = (member.group, member.updates, weight.dtype, weight.device, same)
            alike.setdefault(key, []).append(member)
        blocks = [
            FlatBlock.of([(m.name, m.weight) for m in bucket], bucket[0].group, bucket[0].updates)
            for bucket in alike.values()
        ]
        self._storage, self._parts = FlatStorage(blocks), []
        for bucket, block in zip(alike.values(), self._storage.blocks):
            rule = self._rules[block.group]
            state = {
                name: block.gather({member.name: member.state[name] for member in bucket})
                for name in rule.tensors
            }
            for member, slot in zip(bucket, block.slots):
                member.state = {name: slot.view(whole) for name, whole in state.items()}
            self._parts.append(_UpdateBucket(bucket, block, rule, state))

    def set(self, settings: OptimizerSettings) -> None:
        """Use other settings; numbers that were written to the device are dropped.

        Raises:
            Error: the program can't go on with them, or a device can't compute with them. Nothing
                has changed then.
        """
        settings.check()
        check_replacement(self.settings, settings)
        if settings == self.settings:
            return
        for index, (old, new) in enumerate(zip(self.settings.groups, settings.groups)):
            if "nesterov" in new and old["nesterov"].value != new["nesterov"].value:
                logger.warning(
                    f"nesterov of group {index} is part of the compiled program and stays "
                    f"{bool(self._rules[index].nesterov)}. "  # type: ignore[attr-defined]
                    "Call destroy() and wrap the model again to change it."
                )
        self.settings = settings
        self._written = {}
        for member in self._members:
            member.numbers = self._numbers(member.name, member.group)
        self._log()

    def apply(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the weights once.

        Args:
            gradients: of every parameter given at the start, by name; reduced over micro-batches
                and replicas, and still multiplied by :attr:`loss_scaling`.
        """
        if not self._parts:
            return
        flats = self._storage.flats
        scaled = [part.block.gather(gradients) for part in self._parts]  # type: ignore[arg-type]
        unscaled = [self._unscaled(*each) for each in zip(self._parts, flats, scaled)]
        rows = [self._row(part, flat) for part, flat in zip(self._parts, flats)]
        states = [tensor for part in self._parts for tensor in part.state.values()]
        arguments = [*rows, *flats, *unscaled, *states]
        if self._storage.form not in self._graphs:
            self._graphs[self._storage.form] = capture(self._update, arguments)
        self._graphs[self._storage.form](*arguments)
        for member in self._members:
            member.updates += 1
        if self._automatic is not None:
            self._automatic.update()

    def observe(self, large: Tensor) -> None:
        """Record a micro-batch of the coming update.

        Args:
            large: shape (), number of elements of its gradients that are large.
        """
        if self._automatic is not None:
            self._automatic.observe(large)

    def _row(self, part: _UpdateBucket, flat: Tensor) -> Tensor:
        """Return the coefficients of a coming update."""
        first = part.members[0]
        group = _optimizer_rules.group_of(self.settings, first.numbers)
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        row = part.rule.coefficients(group, first.updates + 1)
        return torch.tensor(row, dtype=dtype, device=flat.device)

    def _unscaled(self, part: _UpdateBucket, flat: Tensor, gradient: Tensor) -> Tensor:
        """Undo the loss scaling; in half precision where small numbers are not lost."""
        wide = gradient.to(torch.promote_types(flat.dtype, torch.float32))
        factor = 1.0 if self._automatic is None else self._automatic.factor
        return wide * (part.members[0].numbers["unscaling"] / factor) if self._scales else wide

    def _update(self, *tensors: Tensor) -> List[Tensor]:
        largest = self.settings.max_grad_norm
        bound = Clip(global_norm=largest) if math.isfinite(largest) else Clip()
        blocks, rules = self._storage.blocks, [part.rule for part in self._parts]
        return apply_rules(blocks, rules, lambda g, b, _: clipped(g, b, bound), tensors)

    def state(self) -> DeviceState:
        """Return the state for :meth:`load_state`: new tensors on the host, by device names."""
        tensors: Dict[str, Tensor] = {}
        if self._automatic is not None:
            tensors[UPDATE_FACTOR] = _single(self._automatic.factor)
        for member in self._members:
            for name, tensor in self._named(member).items():
                tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            step = _optimizer_rules.step_name(self.settings.kind, member.name)
            if step is not None:
                tensors[step] = _single(member.updates)
        numbers = {name: _single(number) for name, number in self.numbers().items()}
        return {"ipu_state": tensors, "ipu_param": numbers}

    def numbers(self) -> Dict[str, float]:
        """Return the variable settings as numbers of the device, by name."""
        return {name: self._written.get(name, value) for name, value in self._exported().items()}

    def anchors(self) -> Dict[str, float]:
        """Return the numbers that can be anchored, as the coming update uses them."""
        if self._automatic is None:
            return self.numbers()
        scales = {FINAL_SCALE: self.loss_scaling, UPDATE_FACTOR: self._automatic.factor}
        return {**self.numbers(), **scales}

    def _named(self, member: _WeightState) -> Dict[str, Tensor]:
        prefixes = _optimizer_rules.PREFIXES[self.settings.kind]
        return {prefixes[key] + member.name: tensor for key, tensor in member.state.items()}

    def _exported(self) -> Dict[str, float]:
        result = {}
        for member in self._members:
            result.update(
                _optimizer_rules.exported(self.settings, member.group, member.name, self._factors)
            )
        if not self.settings.loss_scaling.constant:
            result[_optimizer_rules.LOSS_SCALING] = self.settings.loss_scaling.value
        return result

    def load_state(self, state: DeviceState) -> None:
        """Load what :meth:`state` returned, here or in another program.

        What is missing stays as it is, with a warning; what there is no place for is ignored.

        Raises:
            Error: a tensor has another shape than its place. Nothing has changed then.
        """
        tensors, numbers = state.get("ipu_state") or {}, state.get("ipu_param") or {}
        places: Dict[str, Tensor] = {}
        for member in self._members:
            places.update(self._named(member))
        for name, place in places.items():
            if name in tensors and tensors[name].shape != place.shape:
                raise error(
                    f"State {name} of the optimizer must have shape {tuple(place.shape)}, got "
                    f"{tuple(tensors[name].shape)}. Load the state of an optimizer of the same "
                    "model."
                )
        for name, place in places.items():
            if name in tensors:
                place.copy_(tensors[name])
            else:
                _warn_of_missing("state", name)
        self._load_counts(tensors)
        self._load_numbers(numbers)
        if any(_differ(part.members) for part in self._parts):
            self._lay_out()

    def _load_counts(self, tensors: Mapping[str, Tensor]) -> None:
        if self._automatic is not None:
            if UPDATE_FACTOR in tensors:
                self._automatic.factor = float(tensors[UPDATE_FACTOR])
            else:
                _warn_of_missing("state", UPDATE_FACTOR)
        for member in self._members:
            name = _optimizer_rules.step_name(self.settings.kind, member.name)
            if name is None:
                continue
            if name in tensors:
                member.updates = float(tensors[name])
            else:
                _warn_of_missing("state", name)

    def _load_numbers(self, numbers: Mapping[str, Tensor]) -> None:
        for name, current in self._exported().items():
            if name not in numbers:
                _warn_of_missing("parameter", name)
                continue
            number = float(numbers[name])
            if number == float(_single(current)):
                self._written.pop(name, None)
            else:
                self._written[name] = number
        for member in self._members:
            member.numbers = self._numbers(member.name, member.group)


def _warn_of_missing(kind: str, name: str) -> None:
    logger.warning(f"The optimizer's {kind} {name} is missing in what is loaded, and stays.")


def _single(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32)
