"""The normal form of a loss, and how one micro-batch becomes one number."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any, Callable, List, Literal, Mapping, Optional, Sequence, Tuple, Union

from torch import Tensor, nn

from ipufit.core import Normalize, SampleWeightReduction
from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.objective_arguments import (
    PREDICTION_FIRST,
    ArgumentOrder,
    as_weights,
    describe,
    total,
)
from ipufit.core.outputs import Key, pick
from ipufit.errors import LossError
from ipufit.losses import named, rules
from ipufit.utils import tree

# Fields of a batch that go into forward: one, by position; several, by name; or by parameter.
InputNames = Union[str, Tuple[str, ...], Mapping[str, str], None]
# Fields of a batch that are the target: one, or several as a dict.
TargetNames = Union[str, Tuple[str, ...], None]
# Whether a module computes its own loss; "whole" where it takes a batch as one argument.
OwnLoss = Union[bool, Literal["whole"]]


class WholeBatch:
    """Value of ``loss`` for a module that computes its own, and takes a batch as one argument."""


WHOLE_BATCH = WholeBatch()


def find_loss(result: object) -> Optional[Tuple[Any, Tensor]]:
    """Outputs and loss of a module that computes its own; None when the result holds no loss."""
    fields = getattr(result, "_fields", ()) if isinstance(result, tuple) else ()
    if isinstance(result, (tuple, list)):
        # A named tuple says which one is the loss: taking the last of (loss, accuracy) would train
        # on the accuracy.
        place = fields.index("loss") if "loss" in fields else len(result) - 1
        if len(result) < 2:
            return None
        loss = result[place]
        rest = tuple(result[:place]) + tuple(result[place + 1 :])
        outputs: Any = rest[0] if len(rest) == 1 else rest
    elif isinstance(result, Mapping):
        loss = result.get("loss")
        outputs = {key: value for key, value in result.items() if key != "loss"}
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        names = [field.name for field in dataclasses.fields(result)]
        loss = getattr(result, "loss", None)
        outputs = {name: getattr(result, name) for name in names if name != "loss"}
    else:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return outputs, loss


def own_loss_advice(result: object) -> str:
    """Advise, in a sentence or two, what to do about a result without a loss."""
    advice = "Return (outputs, loss) from forward, or pass loss= to compile."
    if isinstance(result, Mapping) and type(result) is not dict:
        # As models of the transformers library return, which compute a loss from labels alone.
        return (
            "If forward computes the loss from labels, put them into the batch under the name of "
            f"its parameter, such as 'labels'. {advice}"
        )
    first = result[0] if isinstance(result, tuple) and len(result) > 1 else None
    if isinstance(first, Tensor) and not first.dim() and first.is_floating_point():
        return (
            f"{advice} The first looks like the loss, which must be last: models of the "
            "transformers library return it by name with config.return_dict = True."
        )
    return advice


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A loss in normal form: a module, a function, or the user's own module itself.

    Attributes:
        name: for messages and logs; of an alias, the name it stands for.
        module: the user's loss module, which may own parameters and buffers, or None.
        function: a function of prediction and target, or None.
        reduction: "mean" or "sum", how the loss joins the samples of a micro-batch.
        in_module: True for ``loss=None``: the user's module returns ``(outputs, loss)``; use
            :meth:`split`. "whole" where it also takes every batch as one argument.
        normalize: what micro-batches are weighted with: their "samples", their "tokens" (the
            elements that count in the loss), or nothing ("micro_batches").
        sample_weight_reduction: what a sum weighted with sample weights is divided by: the number
            of elements, or the sum of their weights.
        takes_weight: whether it has a parameter called ``sample_weight``.
        order: in which module or function take prediction and target.
        inputs: which fields of a batch go into forward; None for those whose names it takes.
        targets: which fields of a batch are the target; None for the one that forward leaves.
    """

    name: str
    module: Optional[nn.Module] = None
    function: Optional[Callable[..., object]] = None
    reduction: Literal["mean", "sum"] = "mean"
    in_module: OwnLoss = False
    normalize: Normalize = "samples"
    sample_weight_reduction: SampleWeightReduction = "sum_over_batch_size"
    takes_weight: bool = False
    order: ArgumentOrder = PREDICTION_FIRST
    inputs: InputNames = None
    targets: TargetNames = None

    @property
    def functions(self) -> Tuple[Callable[..., object], ...]:
        """Functions and objects of the user's that the loss calls; modules left out."""
        return () if self.function is None else (self.function,)

    # Whether it may compute gradients itself, also in an evaluation.
    differentiates = False

    @property
    def turns(self) -> Tuple[Turn, ...]:
        """Losses that an update computes one after another; () of a loss that is computed once."""
        return ()

    def examine(self, module: nn.Module, first: MicroBatch) -> None:
        """See, before a program is built that trains, what its first micro-batch shows."""

    @property
    def description(self) -> str:
        """Words of a sentence for the loss, with its name."""
        return f"the loss {self.name!r}"

    def moved(self, names: Sequence[str], index: Optional[int] = None) -> List[str]:
        """Choose, of these names of parameters, those that the loss moves.

        Args:
            names: those that the optimizer has.
            index: of several losses that are computed at once; None for all of them.
        """
        return list(names)

    @property
    def field_names(self) -> Optional[Tuple[str, ...]]:
        """Names of fields of a batch that a loss of arguments by name may take; None of others."""
        return None

    @property
    def target_name(self) -> TargetNames:
        """Name of the field that such a loss takes as its target; None where nothing says it."""
        return None

    def target_of(self, target: object) -> object:
        """Return the target that metrics get, of what the loss compares outputs with."""
        return target

    def labels(self, target: object, key: Optional[Key]) -> tree.Tree:
        """Return the class indices in what the loss compares outputs with.

        Args:
            target: of a micro-batch.
            key: of a :class:`LabelRange`.
        """
        return target if key is None else pick(target, key, "the target", LossError)

    def own_loss(self, mode: Mode) -> OwnLoss:
        """Tell whether batches hold only what the user's code takes, in a mode."""
        return self.in_module

    def call(
        self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call what makes of a batch the outputs, or what :meth:`split` takes apart.

        Args:
            module: the user's module.
            args, kwargs: of a batch.
        """
        return module(*args, **kwargs)

    @property
    def part_names(self) -> Tuple[str, ...]:
        """The keys of ``LossTerm.parts``; () of one loss."""
        return ()

    @property
    def outputs(self) -> Union[Tuple[str, ...], int, None]:
        """Names of the outputs that several losses go by, or their number; None of one loss."""
        return None

    def __call__(
        self, prediction: object, target: object, sample_weight: object = None
    ) -> rules.LossTerm:
        """Return the loss of one micro-batch.

        Args:
            prediction: what the user's module returned; a named loss takes one tensor.
            target: the micro-batch's target; a named loss takes one tensor.
            sample_weight: how much each sample counts, shape (batch,), (batch, 1) or more leading
                dimensions of the loss before its reduction; None when all count the same.

        Raises:
            LossError: a named loss can't take these shapes or dtypes, the value is no scalar and
                not one per sample, or the weights or the tokens can't be told apart.
        """
        call, target = self._accept(prediction, target)
        if not isinstance(self.function, named.Named):
            self._refuse_broadcast(prediction, target)
        weight = None if sample_weight is None else as_weights(sample_weight, LossError)
        if self.takes_weight:
            return self._own_weighting(call, prediction, target, weight)
        if weight is not None or self.normalize == "tokens":
            elements = self._elements(call, prediction, target, weight)
            if elements is not None:
                return self._join(elements, weight)
        result = self.order.call(call, prediction, target)
        elements = self._per_sample(result, target, prediction)
        if elements is not None:
            return self._join(elements, weight)
        return self._scalar(result, weight)

    def _refuse_broadcast(self, prediction: object, target: object) -> None:
        """Hold one of torch's losses over single values, of which it only warns, to one shape."""
        if not (isinstance(prediction, Tensor) and isinstance(target, Tensor)):
            return
        if prediction.shape != target.shape:
            rule = self.rule
            if rule is not None and rule.layout == "values":
                named.refuse_broadcast(self.name, prediction, target)

    def facts(self, prediction: object, target: object, value: Optional[Tensor]) -> rules.LossFacts:
        """Say what a micro-batch shows of the loss; nothing where these are not one tensor each.

        Args:
            prediction, target: as for the loss; for doubts, the prediction has its graph of
                autograd, else only their shapes and dtypes matter.
            value: of the loss; None where nothing is learned, of which there are no doubts.
        """
        if not isinstance(prediction, Tensor) or not isinstance(target, Tensor):
            return rules.LossFacts()
        rule = self.rule
        labels: Tuple[rules.LabelRange, ...] = ()
        is_index = not (target.is_floating_point() or target.is_complex())
        if rule is not None and rule.is_binary:
            labels = (rules.LabelRange(self.name, None, 2, None),)
        elif rule is not None and rule.layout == "classes" and is_index and prediction.dim():
            classes = prediction.shape[min(1, prediction.dim() - 1)]
            labels = (rules.LabelRange(self.name, None, classes, rule.ignore_index),)
        if value is None:
            return rules.LossFacts(labels)
        if rule is None:
            doubts = named.broadcast_doubts(self.description, prediction, target, value)
        else:
            doubts = named.range_doubts(self.name, rule.kind, prediction)
        return rules.LossFacts(labels, tuple(doubts))

    @property
    def _call(self) -> Optional[Callable[..., object]]:
        """The module or function that computes the loss, without the checks of a named one."""
        call = self.module if self.module is not None else self.function
        return call.function if isinstance(call, named.Named) else call

    @property
    def rule(self) -> Optional[rules.TorchRule]:
        """The rule of a loss of torch's; None of any other."""
        return None if self._call is None else rules.torch_rule(self._call)

    def _accept(self, prediction: object, target: object) -> Tuple[Callable[..., object], object]:
        """Return what to call with these arguments, and the target in the shape that it takes.

        Raises:
            LossError: a named loss can't take them.
        """
        call, rule = self._call, self.rule
        assert call is not None, "with loss=None the module computes the loss; use split"
        if rule is not None and isinstance(prediction, Tensor) and isinstance(target, Tensor):
            target = rule.fit_target(prediction, target)
        if isinstance(self.function, named.Named):
            self.function.accept(prediction, target)
        return call, target

    def target_kinds(self, target: object) -> List[Optional[rules.TargetKind]]:
        """Return the kind of each target tensor's values; None where only the user's code knows."""
        rule = self.rule
        kind = None if rule is None else rule.target_kind
        return [kind] * len(tree.flatten(target)[0])

    @property
    def _where(self) -> str:
        return f"loss {self.name!r}"

    @property
    def _by_weight(self) -> bool:
        return self.sample_weight_reduction == "mean_with_sample_weight"

    def _elements(
        self,
        call: Callable[..., object],
        prediction: object,
        target: object,
        weight: Optional[Tensor],
    ) -> Optional[rules.Elements]:
        """The loss of each element, of one that can be asked for it without its reduction."""
        rule = rules.torch_rule(call)
        if rule is not None:
            if isinstance(prediction, Tensor) and isinstance(target, Tensor):
                return rule.elements(prediction, target, weight)
            return None
        # Which elements a mean with an ignore_index of one's own leaves out, nobody else can know.
        if not isinstance(getattr(call, "reduction", None), str) or hasattr(call, "ignore_index"):
            return None
        if not isinstance(call, nn.Module):
            return None
        values = self.order.call(functools.partial(rules.unreduced, call), prediction, target)
        elements = self._per_sample(values, target, prediction)
        if elements is None:
            raise LossError(
                f"{self._where} must give one value per sample with reduction='none', which sample "
                f"weights and normalize='tokens' need, got {describe(values)}. Let forward respect "
                "self.reduction, or take sample_weight as a third argument."
            )
        return elements.by_sample() if call.reduction == "batchmean" else elements

    def without_padding(
        self, prediction: object, target: object, sample_weight: object, valid: Tensor
    ) -> Optional[rules.LossTerm]:
        """Compute the loss of a micro-batch of which only some samples count; the rest is padding.

        Args:
            prediction, target, sample_weight: as for the loss.
            valid: shape (batch,), 1 for samples that count and 0 for padding.

        Returns:
            The loss, zero where no sample counts; None of one that can't be told sample by sample.
        """
        weight = None if sample_weight is None else as_weights(sample_weight, LossError)
        hidden = valid if weight is None else rules.hide_padding(weight, valid)
        elements = self._separate(prediction, target, hidden)
        return None if elements is None else self._join(elements, hidden, valid)

    def of_micro_batches(self, prediction: object, target: object, count: int) -> Optional[Tensor]:
        """Compute the loss of each of several micro-batches of one size at once.

        Args:
            prediction, target: of all, one after another along the first dimension.
            count: how many there are.

        Returns:
            A value for each, shape (micro-batches,), differentiable: what the loss itself gives for
            them one by one. None of a loss that is not known to be a mean or sum over elements,
            and where it must be asked for counts.
        """
        are_tensors = isinstance(prediction, Tensor) and isinstance(target, Tensor)
        if self.takes_weight or self.normalize == "tokens" or not are_tensors:
            return None
        assert isinstance(prediction, Tensor)
        assert isinstance(target, Tensor)
        rule = self.rule
        if rule is None or not (prediction.dim() and target.dim()):
            return None
        is_reduced = rule.reduction in ("mean", "sum", "batchmean")
        if not is_reduced or not rule.is_by_rows(prediction, target):
            return None
        if isinstance(self.function, named.Named):
            self.function.accept(prediction, target)
        elements = rule.elements(prediction, target, None)
        values = elements.values.reshape(count, -1)
        if rule.reduction == "sum":
            return values.sum(1)
        if isinstance(elements.shares, Tensor):
            return values.sum(1) / elements.shares.reshape(count, -1).sum(1)
        if rule.reduction == "batchmean":
            return values.sum(1) / (elements.values.shape[0] // count)
        return values.mean(1)

    def _separate(
        self, prediction: object, target: object, weight: Tensor
    ) -> Optional[rules.Elements]:
        """The loss of each element; None of a loss that only tells one number for all of them.

        Args:
            prediction, target: as for the loss.
            weight: of the samples; where it is zero, inf and nan do not matter.
        """
        if self.in_module or self.takes_weight:
            return None
        call, target = self._accept(prediction, target)
        try:
            elements = self._elements(call, prediction, target, weight)
        except LossError:
            return None
        if elements is None:
            values = self.order.call(call, prediction, target)
            elements = self._per_sample(values, target, prediction)
        return elements

    def _per_sample(
        self, result: object, target: object, prediction: object
    ) -> Optional[rules.Elements]:
        """Take the result of a callable if it is a tensor with one row for each sample."""
        if not isinstance(result, Tensor) or not result.dim() or not result.is_floating_point():
            return None
        leaves = tree.flatten((target, prediction))[0]
        rows = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        return rules.Elements(result) if rows and result.shape[0] == rows[0] else None

    def _join(
        self, elements: rules.Elements, weight: Optional[Tensor], valid: Optional[Tensor] = None
    ) -> rules.LossTerm:
        """One number of many, and its count.

        Args:
            elements: all of them.
            weight: of the samples; where some are padding, ``valid`` or zero there.
            valid: shape (batch,), 1 for samples that count and 0 for padding; None: all count.
        """
        if self.reduction == "sum":
            value = elements.weighted_sum(weight, self._where)
            return rules.LossTerm(value.to(elements.values.dtype))
        if weight is None and self.normalize != "tokens":
            # Only a callable's own values come here without any need of a count.
            return rules.LossTerm(elements.values.mean())
        by_weight = weight is not valid and self._by_weight
        counted = self.normalize == "tokens" or by_weight
        may_be_empty = counted or valid is not None
        divisor = weight if by_weight else valid
        value, size = elements.mean(weight, divisor, may_be_empty, self._where)
        with_count = counted and self.normalize != "micro_batches"
        return rules.LossTerm(value, size if with_count else None)

    def _own_weighting(
        self,
        call: Callable[..., object],
        prediction: object,
        target: object,
        weight: Optional[Tensor],
    ) -> rules.LossTerm:
        """Make the term of a loss that gets the weights itself, and returns one number."""
        result = self.order.call(call, prediction, target, sample_weight=weight)
        if self.normalize == "tokens":
            return self._counted(result)
        value = named.check_loss_value(result, self._where)
        if weight is None or not self._by_weight:
            return rules.LossTerm(value)
        count = total(weight)
        value = rules.nothing_counts(value, count)
        return rules.LossTerm(value, None if self.normalize == "micro_batches" else count)

    def _scalar(self, result: object, weight: Optional[Tensor]) -> rules.LossTerm:
        if weight is not None:
            raise LossError(
                f"{self._where} must give one value per sample to be weighted with sample_weight, "
                f"got {describe(result)}. Return the values before their mean, shape (batch,), or "
                "take sample_weight as a third argument."
            )
        if self.normalize == "tokens":
            return self._counted(result)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
            raise LossError(
                f"{self._where} must return one number, or with normalize='tokens' (mean, count), "
                f"got {describe(result)}. Return only the mean, or compile with "
                "normalize='tokens'."
            )
        return rules.LossTerm(named.check_loss_value(result, self._where))

    def _counted(self, result: object) -> rules.LossTerm:
        """Make the term of a callable's (mean, count)."""
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise LossError(
                f"{self._where} must return the number of tokens of its mean with "
                f"normalize='tokens', got {describe(result)}. Return (mean, count), or one value "
                "for each token, shape (batch, ...)."
            )
        return self._with_count(result[0], result[1], self._where)

    def _with_count(self, loss: object, count: object, where: str) -> rules.LossTerm:
        value = named.check_loss_value(loss, where)
        if isinstance(count, numbers.Real) and not isinstance(count, bool):
            number = rules.constant(float(count), value)
        elif isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
            number = count.detach().reshape(()).double()
        else:
            raise LossError(
                f"{where} must give its count as one number, got {describe(count)}. Return the "
                "number of tokens, such as (target != -100).sum()."
            )
        return rules.LossTerm(rules.nothing_counts(value, number), number)

    def split(self, result: object) -> Tuple[Any, rules.LossTerm]:
        """Take apart what a module that computes its own loss returned.

        Args:
            result: a tuple or list whose last element is the loss; a named tuple or dataclass with
                a field, or a mapping with a key, called ``loss``, wherever it stands. With
                ``normalize="tokens"``, a mapping or dataclass with ``loss_count`` as well.

        Returns:
            The outputs and the loss. ``(a, loss)`` gives ``a``, ``(a, b, loss)`` gives the tuple
            ``(a, b)``; a mapping or a dataclass gives a plain dict without ``loss``.

        Raises:
            LossError: there is no loss in the result, or no count where one is needed.
        """
        assert self.in_module, "only a module that computes its own loss returns one"
        outputs_and_loss = find_loss(result)
        if outputs_and_loss is None:
            raise LossError(
                "with loss=None the module must return (outputs, loss), the loss a tensor of one "
                f"number, got {describe(result)}. {own_loss_advice(result)}"
            )
        outputs, loss = outputs_and_loss
        where = "the module's own loss"
        if self.normalize != "tokens":
            return outputs, rules.LossTerm(named.check_loss_value(loss, where))
        if not isinstance(outputs, Mapping) or "loss_count" not in outputs:
            raise LossError(
                "with loss=None and normalize='tokens' the module must return a mapping or "
                f"dataclass with loss and loss_count, got {describe(result)}. Add loss_count, the "
                "number of tokens of the mean, or pass loss= to compile."
            )
        rest = {key: value for key, value in outputs.items() if key != "loss_count"}
        return rest, self._with_count(loss, outputs["loss_count"], where)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One of the losses that make an update, in their order.

    Attributes:
        loss: what is computed and what it moves.
        every: it is made in one update of so many, the last of each.
        repeat: how often it is made in one update.
        step: which of the user's steps it belongs to, whose turns see the same random numbers.
    """

    loss: Loss
    every: int
    repeat: int
    step: int

    def describe(self) -> str:
        """Say in a line what is computed, how often, and what it moves."""
        when = "each update" if self.every == 1 else f"one update of {self.every}"
        times = f", {self.repeat} times" if self.repeat > 1 else ""
        return f"In {when}{times}: {self.loss.description}."

    def is_due(self, update: int) -> bool:
        """Tell whether it is made in an update, counted from 0."""
        return (update + 1) % self.every == 0
