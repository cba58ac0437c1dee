"""Several losses at once: each output has its own, and their weighted sum is optimised."""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, List, Literal, Mapping, Optional, Sequence, Tuple, Union

from torch import Tensor, nn

from ipufit.core.objective_arguments import as_weights, total
from ipufit.core.outputs import Key, children, describe_value, label, pick
from ipufit.errors import LossError
from ipufit.losses.call import several_targets
from ipufit.losses.loss import Loss
from ipufit.losses.rules import Doubt, LabelRange, LossFacts, LossTerm, TargetKind, hide_padding
from ipufit.utils import tree

_OUTPUTS, _TARGET, _WEIGHT = "the module's outputs", "the target", "sample_weight"


@dataclasses.dataclass(frozen=True)
class OutputLoss:
    """The loss of one output.

    Attributes:
        key: the output's name or position.
        loss: normal form of one loss.
        weight: what it is multiplied with in the sum.
    """

    key: Key
    loss: Loss
    weight: float

    @property
    def name(self) -> str:
        """The name under which the loss of the output is logged."""
        return f"{label(self.key)}_loss"


@dataclasses.dataclass(frozen=True, eq=False)
class SeveralLosses(Loss):
    """Losses by name or position of the module's outputs.

    Attributes:
        parts: one for each output that is trained.
        positions: of losses by position, the number of outputs, those without a loss included.
    """

    parts: Tuple[OutputLoss, ...] = ()
    positions: Optional[int] = None

    @property
    def functions(self) -> Tuple[Callable[..., object], ...]:
        """Functions and objects of the user's that the losses call; modules left out."""
        return tuple(function for part in self.parts for function in part.loss.functions)

    @property
    def part_names(self) -> Tuple[str, ...]:
        """The keys of ``LossTerm.parts``."""
        return tuple(part.name for part in self.parts)

    @property
    def outputs(self) -> Union[Tuple[str, ...], int, None]:
        """Names of the outputs that have a loss, or the number of outputs."""
        if self.positions is not None:
            return self.positions
        return tuple(str(part.key) for part in self.parts)

    @property
    def field_names(self) -> Optional[Tuple[str, ...]]:
        """Names of fields that losses of arguments by name may take; None without such a loss."""
        names = [part.loss.field_names for part in self.parts if part.loss.field_names is not None]
        return tuple(name for each in names for name in each) if names else None

    @property
    def target_name(self) -> Optional[Tuple[str, ...]]:
        """Names of the fields that are the targets of the outputs, beside a loss of names."""
        if self.field_names is None:
            return None
        return tuple(str(part.key) for part in self.parts if part.loss.field_names is None)

    def target_of(self, target: object) -> object:
        """Return the targets by output, of what the losses compare outputs with."""
        return target if self.field_names is None else several_targets(target)

    def labels(self, target: object, key: Optional[Key]) -> tree.Tree:
        """Return the class indices of an output in what the losses compare outputs with."""
        for part in self.parts:
            if part.key == key and part.loss.field_names is not None:
                return part.loss.labels(target, None)
        return super().labels(self.target_of(target), key)

    def target_kinds(self, target: object) -> List[Optional[TargetKind]]:
        """Return the kind of each target tensor's values; None where no rule of a loss says it."""
        kinds: Dict[int, Optional[TargetKind]] = {}
        by_output = self.target_of(target)
        for part in self.parts:
            if part.loss.field_names is not None:
                whole = zip(tree.flatten(target)[0], part.loss.target_kinds(target))
                kinds.update((id(leaf), kind) for leaf, kind in whole if kind is not None)
            elif part.key in children(by_output):
                inner = tree.flatten(pick(by_output, part.key, _TARGET, LossError))[0]
                kinds.update(zip(map(id, inner), part.loss.target_kinds(inner)))
        return [kinds.get(id(leaf)) for leaf in tree.flatten(target)[0]]

    def __call__(
        self, prediction: object, target: object, sample_weight: object = None
    ) -> LossTerm:
        """The weighted sum for one micro-batch.

        Args:
            prediction: what the module returned: a mapping, named tuple or dataclass for losses by
                name, a tuple or list for losses by position.
            target: the same form.
            sample_weight: one tensor for all, or in that form, None for an output without weights.

        Raises:
            LossError: an output, target or weight is missing, or the lengths differ, or one of the
                losses can't take its output.
        """
        self._check_forms(prediction, self.target_of(target), sample_weight)
        terms = [
            part.loss(*self._arguments(part, prediction, target), _weight_of(sample_weight, part))
            for part in self.parts
        ]
        return self._sum(terms, self._count(sample_weight))

    def without_padding(
        self, prediction: object, target: object, sample_weight: object, valid: Tensor
    ) -> Optional[LossTerm]:
        """The weighted sum for a micro-batch of which only some samples count."""
        terms: List[LossTerm] = []
        for part in self.parts:
            arguments = self._arguments(part, prediction, target)
            term = part.loss.without_padding(*arguments, _weight_of(sample_weight, part), valid)
            if term is None:
                return None
            terms.append(term)
        if isinstance(sample_weight, Tensor):
            sample_weight = hide_padding(as_weights(sample_weight, LossError), valid)
        return self._sum(terms, self._count(sample_weight))

    def _arguments(
        self, part: OutputLoss, prediction: object, target: object
    ) -> Tuple[object, object]:
        """Return the output and the target of a part, or all where it goes by names."""
        if part.loss.field_names is not None:
            return prediction, target
        return (
            pick(prediction, part.key, _OUTPUTS, LossError),
            pick(self.target_of(target), part.key, _TARGET, LossError),
        )

    def _sum(self, terms: Sequence[LossTerm], count: Optional[Tensor]) -> LossTerm:
        value: Optional[Tensor] = None
        means = {}
        for part, term in zip(self.parts, terms):
            means[part.name] = term.value.detach()
            share = term.value if part.weight == 1.0 else term.value * part.weight
            value = share if value is None else value + share
        assert value is not None, "there is at least one part"
        return LossTerm(value, count, means)

    def facts(self, prediction: object, target: object, value: Optional[Tensor]) -> LossFacts:
        """Say what a micro-batch shows of the losses, label ranges with the key of their target."""
        labels: List[LabelRange] = []
        doubts: List[Doubt] = []
        for part in self.parts:
            facts = part.loss.facts(*self._arguments(part, prediction, target), value)
            labels += [dataclasses.replace(each, key=part.key) for each in facts.labels]
            doubts += facts.doubts
        return LossFacts(tuple(labels), tuple(doubts))

    def _check_forms(self, prediction: object, target: object, sample_weight: object) -> None:
        if isinstance(target, Tensor):
            raise LossError(
                f"the target must have one part for each of the {len(self.parts)} losses, got one "
                f"tensor of shape {tuple(target.shape)}. Return {self._form()} from the dataset."
            )
        if self.positions is not None:
            for role, value in (
                (_OUTPUTS, prediction),
                (_TARGET, target),
                (_WEIGHT, sample_weight),
            ):
                if isinstance(value, (tuple, list)) and len(value) != self.positions:
                    raise LossError(
                        f"{role} must have one element for each of the {self.positions} losses, "
                        f"got {describe_value(value)}. Pass None as the loss of an output that is "
                        "not trained."
                    )
        elif children(sample_weight):
            there = children(prediction)
            unknown = [key for key in children(sample_weight) if key not in there]
            if unknown:
                raise LossError(
                    f"sample_weight must go by the names of outputs, got {unknown[0]!r}, but the "
                    f"outputs are {describe_value(prediction)}. Use these names, or one tensor for "
                    "all."
                )

    def _form(self) -> str:
        if self.positions is not None:
            return f"a tuple of {self.positions}"
        return "{" + ", ".join(f"{part.key!r}: ..." for part in self.parts) + "}"

    def _count(self, sample_weight: object) -> Optional[Tensor]:
        """How much weight the micro-batch has, where the mean is one over weights."""
        if sample_weight is None or self.sample_weight_reduction == "sum_over_batch_size":
            return None
        if not isinstance(sample_weight, Tensor):
            raise LossError(
                "sample_weight must be one tensor for all outputs with several losses and "
                f"sample_weights='mean_with_sample_weight', got {describe_value(sample_weight)}: "
                "with separate weights, each loss would have a separate count. Pass one tensor, or "
                "use 'sum_over_batch_size'."
            )
        if self.normalize == "micro_batches":
            return None
        return total(as_weights(sample_weight, LossError))


def _weight_of(sample_weight: object, part: OutputLoss) -> object:
    """The weights of one output; None where none are given for it."""
    if sample_weight is None or isinstance(sample_weight, Tensor):
        return sample_weight
    is_by_name = isinstance(part.key, str) and isinstance(sample_weight, Mapping)
    if is_by_name and part.key not in children(sample_weight):
        return None
    return pick(sample_weight, part.key, _WEIGHT, LossError)


def shared_reduction(parts: Sequence[OutputLoss]) -> Literal["mean", "sum"]:
    """Return the reduction that all have.

    Raises:
        LossError: they differ.
    """
    kinds = {part.loss.reduction for part in parts}
    if len(kinds) > 1:
        each = ", ".join(f"{label(part.key)} {part.loss.reduction!r}" for part in parts)
        raise LossError(
            f"several losses must all be means or all be sums, got {each}. Otherwise their ratio "
            "would depend on the size of the micro-batch; use one reduction."
        )
    return parts[0].loss.reduction


def joined_module(parts: Sequence[OutputLoss]) -> Optional[nn.Module]:
    """One module that owns those of the parts, so that all their parameters are trained."""
    modules: List[Tuple[Key, nn.Module]] = [
        (part.key, part.loss.module) for part in parts if part.loss.module is not None
    ]
    if not modules:
        return None
    container = nn.Module()
    for place, (key, module) in enumerate(modules):
        name = label(key)
        # torch wants a name without dots that is no attribute yet.
        if "." in name or hasattr(container, name):
            name = f"output_{place}"
        container.add_module(name, module)
    return container
