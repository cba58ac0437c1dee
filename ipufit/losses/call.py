"""Losses that take what they need by name, of the module's outputs and of the batch."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from torch import Tensor

from ipufit.core.objective_arguments import (
    ArgumentOrder,
    keyword_names,
    required_names,
    role_by_whole_name,
)
from ipufit.core.outputs import children, label
from ipufit.errors import LossError
from ipufit.losses.loss import Loss
from ipufit.losses.rules import LossFacts, LossTerm, TargetKind
from ipufit.utils import tree

# Names of what has none: the output of a module that returns one tensor, and the target of a batch
# (inputs, target).
_OUTPUT, _TARGET = "output", "target"


class Call:
    """A loss with the names of its arguments.

    Arguments come from the module's outputs (keys of a dict, fields of a dataclass or named tuple,
    attributes; ``output_0`` and so on for a tuple, ``output`` for one tensor) and from the batch:
    its fields, inputs and targets alike, or ``target`` and the names of forward's parameters for a
    batch ``(inputs, target)``. If an output and a field have the same name, the output is used.

    Args:
        loss: an ``nn.Module``, a class of modules without arguments, or a callable; it returns a
            number, or one value per sample, which are averaged.
        names: for each parameter of the loss, the name of its argument. A parameter without a
            default that is left out gets the value of its own name; if there is none, parameters
            such as ``input`` get the only output, and parameters such as ``labels`` the target.
    """

    def __init__(self, loss: object, /, **names: str) -> None:
        self.loss = loss
        self.names = names


def arguments_of(
    name: str, call: Callable[..., object], names: Mapping[str, object]
) -> Tuple[Tuple[str, str], ...]:
    """List the parameters of a loss that get an argument, each with the name of that.

    Args:
        name: of the loss, for messages.
        call: what is called.
        names: as a :class:`Call` has them.

    Raises:
        LossError: a parameter that is none, or no name.
    """
    try:
        signature = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise LossError(
            f"the arguments of loss {name!r} are matched by parameter names, but Python can't read "
            "its signature. Pass a function that calls it."
        ) from error
    parameters = keyword_names(call)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature)
    for parameter, value in names.items():
        if parameter not in parameters and not takes_any:
            raise LossError(
                f"loss {name!r} takes {', '.join(parameters)}, got {parameter!r}. Write "
                "ipufit.losses.Call(loss, parameter='name of an output or a field') with these."
            )
        if not isinstance(value, str) or not value:
            raise LossError(
                "ipufit.losses.Call takes the name of an output or of a batch field for "
                f"{parameter!r} of loss {name!r}, got {value!r}. For a constant, pass "
                "functools.partial(loss, ...)."
            )
    needed = [p for p in required_names(call) if p != "sample_weight"]
    chosen = [p for p in parameters if p in names or p in needed]
    chosen += [p for p in names if p not in parameters]
    return tuple((p, str(names.get(p, ""))) for p in chosen)


class _ByName(ArgumentOrder):
    """Order of a loss that takes all of its arguments by name, in the place of a prediction."""

    def call(
        self,
        function: Callable[..., object],
        prediction: tree.Tree,
        target: object,
        /,
        **more: object,
    ) -> tree.Tree:
        """Call the function with its arguments."""
        return function(**prediction, **more)


@dataclasses.dataclass(frozen=True, eq=False)
class CallLoss(Loss):
    """A loss of arguments by name.

    Its target is a pair: the target by name, and all fields of the batch by name, those
    that it does not take as None: see :meth:`ipufit.data.fields.BatchForm.split`.

    Attributes:
        inner: normal form of the loss of (prediction, target); of one with other parameters, of
            (arguments by name, anything of the batch).
        arguments: its parameters, each with the name of its argument, empty where only the
            parameter's own name says it.
    """

    inner: Loss = dataclasses.field(default_factory=lambda: Loss("no loss"))
    arguments: Tuple[Tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        inner = dataclasses.replace(
            self.inner,
            normalize=self.normalize,
            sample_weight_reduction=self.sample_weight_reduction,
        )
        object.__setattr__(self, "inner", inner)

    @staticmethod
    def of(inner: Loss, arguments: Sequence[Tuple[str, str]]) -> CallLoss:
        """Make the loss of its normal form, in which its own order of arguments is."""
        if len(arguments) != 2:
            inner = dataclasses.replace(inner, order=_ByName())
        return CallLoss(
            inner.name,
            inner.module,
            inner.function,
            inner.reduction,
            takes_weight=inner.takes_weight,
            inner=inner,
            arguments=tuple(arguments),
        )

    @property
    def field_names(self) -> Tuple[str, ...]:
        """Names that outputs or fields of the batch may have."""
        return tuple(name or parameter for parameter, name in self.arguments)

    @property
    def target_name(self) -> Optional[str]:
        """Name of the field that is the target by the name of the loss's parameter, if one is."""
        names = [n or p for p, n in self.arguments if role_by_whole_name(p) == "target"]
        return names[0] if len(names) == 1 else None

    def target_of(self, target: object) -> object:
        """Return the target that metrics get."""
        named, _ = _by_name(target)
        if isinstance(self.targets, tuple):
            return named or None
        return next(iter(named.values()), None)

    def __call__(
        self, prediction: object, target: object, sample_weight: object = None
    ) -> LossTerm:
        """Return the loss of one micro-batch.

        Args:
            prediction: what the user's module returned.
            target: targets and fields of the batch, by name.
            sample_weight: how much each sample counts, or None.

        Raises:
            LossError: there is no output and no field of some name, or the loss can't take them.
        """
        return self.inner(*self._pair(prediction, target), sample_weight)

    def without_padding(
        self, prediction: object, target: object, sample_weight: object, valid: Tensor
    ) -> Optional[LossTerm]:
        """Compute the loss of a micro-batch of which only some samples count."""
        pair = self._pair(prediction, target)
        return self.inner.without_padding(*pair, sample_weight, valid)

    def of_micro_batches(self, prediction: object, target: object, count: int) -> Optional[Tensor]:
        """Return None: outputs of several micro-batches are taken apart first."""
        return None

    def facts(self, prediction: object, target: object, value: Optional[Tensor]) -> LossFacts:
        """Say what a micro-batch shows of the loss."""
        return self.inner.facts(*self._pair(prediction, target), value)

    def labels(self, target: object, key: object) -> tree.Tree:
        """Return the class indices in what the loss compares outputs with, or None."""
        fields = self._fields(target)
        parameter, name = self.arguments[0 if self.inner.order.first == "target" else 1]
        return fields.get(name or parameter, self.target_of(target))

    def target_kinds(self, target: object) -> List[Optional[TargetKind]]:
        """Return the kind of each tensor's values; None where no rule of a loss says it."""
        kinds: Dict[int, Optional[TargetKind]] = {}
        if len(self.arguments) == 2:
            leaves = tree.flatten(self.labels(target, None))[0]
            kinds.update(zip(map(id, leaves), self.inner.target_kinds(leaves)))
        return [kinds.get(id(leaf)) for leaf in tree.flatten(target)[0]]

    def _pair(self, prediction: object, target: object) -> Tuple[object, object]:
        """Return the two things that the loss inside takes."""
        outputs, fields = _named_outputs(prediction), self._fields(target)
        values: Dict[str, object] = {}
        for parameter, name in self.arguments:
            values[parameter] = self._find(parameter, name, outputs, fields, target)
        of_module = set(map(id, outputs.values()))
        if outputs and of_module.isdisjoint(map(id, values.values())):
            raise LossError(
                f"loss {self.name!r} must take an output of the module, but it takes "
                f"{_listed(values)} from the batch, and the outputs are {_listed(outputs)}. Name "
                f"one: ipufit.losses.Call(loss, {next(iter(values))}={next(iter(outputs))!r})."
            )
        if len(values) == 2:
            first, second = values.values()
            return (first, second) if self.inner.order.first == "prediction" else (second, first)
        # Whichever tensor of the batch: how many samples there are.
        return values, target

    def _find(
        self,
        parameter: str,
        name: str,
        outputs: Mapping[str, object],
        fields: Mapping[str, object],
        target: object,
    ) -> object:
        """Find an argument.

        Raises:
            LossError: it is neither an output nor a field of the batch.
        """
        for values in (outputs, fields):
            if values.get(name or parameter) is not None:
                return values[name or parameter]
        role = None if name else role_by_whole_name(parameter)
        if role == "prediction" and len(outputs) == 1:
            return next(iter(outputs.values()))
        single = self.target_of(target)
        if role == "target" and single is not None and not isinstance(self.targets, tuple):
            return single
        raise LossError(
            f"loss {self.name!r} takes {parameter!r} by the name {name or parameter!r}, but the "
            f"module's outputs are {_listed(outputs)} and the fields of the batch {_listed(fields)}"
            f". Name one of these, ipufit.losses.Call(loss, {parameter}='...'), or yield a dict "
            f"with a field {name or parameter!r}."
        )

    def _fields(self, target: object) -> Mapping[str, object]:
        """Everything in the batch by name, None for what is no part of the program."""
        named, fields = _by_name(target)
        single = self.target_of(target)
        alias = {} if single is None else {_TARGET: single}
        inner = [each for each in named.values() if isinstance(each, Mapping)]
        more = {name: value for each in inner for name, value in each.items()}
        return {**alias, **fields, **more, **named}


def several_targets(target: object) -> object:
    """Return the targets of several outputs by name, of targets and fields of a batch."""
    named, _ = _by_name(target)
    # Of (inputs, targets), which have one name together.
    return named[_TARGET] if list(named) == [_TARGET] else named


def _by_name(target: tree.Tree) -> Tuple[Mapping[str, object], Mapping[str, object]]:
    """Targets, and fields of the batch; nothing where there is no target, as in predict."""
    return target if target is not None else ({}, {})


def _named_outputs(outputs: tree.Tree) -> Mapping[str, object]:
    """Outputs of a module by their names."""
    if isinstance(outputs, Mapping):
        return {str(key): value for key, value in outputs.items()}
    if tree.is_sequence(outputs):
        return {label(place): value for place, value in enumerate(outputs)}
    names = [str(name) for name in children(outputs)]
    if names:
        return {name: getattr(outputs, name) for name in names}
    if isinstance(outputs, Tensor):
        return {_OUTPUT: outputs}
    attributes = vars(outputs) if hasattr(outputs, "__dict__") else {}
    return {key: value for key, value in attributes.items() if not key.startswith("_")}


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names)) or "none"
