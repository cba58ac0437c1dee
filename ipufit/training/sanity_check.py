"""Trials with the first micro-batch, and reasons why module or loss can't take it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from typing import Callable, Iterator, Optional, Sequence, Tuple

import torch
from torch import nn

from ipufit.callbacks.epoch_metrics import metric_fields, metric_target
from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.plan import Plan
from ipufit.core.train_config import Precision
from ipufit.data.batches import cast
from ipufit.data.casting import Casting
from ipufit.data.source import DataAdapter
from ipufit.data.weights import ClassWeights
from ipufit.engines.program import Prepared, Program
from ipufit.errors import (
    ConfigurationError,
    DataError,
    DeviceError,
    IpufitError,
    MetricError,
    NonFiniteLossError,
    PlanError,
    brief_error,
)
from ipufit.losses import LabelRange, Loss, check_labels, outside_classes
from ipufit.metrics.metric_set import MetricSet, random_like
from ipufit.utils import tree
from ipufit.utils.console import is_fault_of_ours, warn_user
from ipufit.utils.interrupts import defer_signals
from ipufit.utils.random_streams import isolated
from ipufit.utils.state import eval_mode, train_mode


@dataclasses.dataclass
class FailureExplainer:
    """Names the layer, the line or the label because of which a micro-batch can't be computed.

    Attributes:
        module: the user's module.
        loss: normal form; None where there is none.
        mode: in which module and loss run.
        precision: in which the module computes.
        role: of the data, such as "training data".
        is_apart: whether the module is on a GPU or another device, whose faults show late.
        is_shared: whether other processes have parts of the data, so that batches have no numbers.
        labels: class indices that the loss takes, as far as they are known.
        origin: names the place in the user's code where batches are made.
        has_warned: whether it has warned of a loss that is not finite.
    """

    module: nn.Module
    loss: Optional[Loss]
    mode: Mode
    precision: Precision
    role: str
    is_apart: bool = False
    is_shared: bool = False
    labels: Tuple[LabelRange, ...] = ()
    origin: Callable[[], str] = str
    has_warned: bool = False

    @contextlib.contextmanager
    def explained(self, batches: Sequence[MicroBatch], first: Optional[int] = 0) -> Iterator[None]:
        """Raise what the block raises as an error of ours, if more is known than it says itself.

        Args:
            batches: that the block computes, or prepares for.
            first: number of the first of them in its epoch; None where nobody knows.

        Raises:
            DataError: a layer or an operator can't take one of them, or a label is no class.
            LossError: the loss can't take it.
            CaptureError: it meets a layer that the module does not register.
        """
        try:
            yield
        except Exception as error:
            self.raise_explained(error, batches, first)
            raise

    def raise_explained(
        self, error: Exception, batches: Sequence[MicroBatch], first: Optional[int] = 0
    ) -> None:
        """Raise an error of ours in place of the other one, if more is known than that says."""
        fault = self.explain(error, batches, first)
        if isinstance(fault, DataError) and fault.what and first:
            # The first batch of the epoch was looked at before: this one is unlike it.
            fault = DataError(f"{fault}{self.origin()}", what=fault.what, cure=fault.cure)
        if fault is not None:
            raise fault from error

    def explain(
        self, error: Exception, batches: Sequence[MicroBatch], first: Optional[int] = 0
    ) -> Optional[IpufitError]:
        """The error that says why, to be raised from the other one; None if that says it."""
        if isinstance(error, IpufitError) and type(error) is not DeviceError:
            return None
        # Imported here: few runs fail.
        from ipufit.tracing.failed_call import explain

        try:
            self.check_labels(batches, first)
        except DataError as fault:
            return fault
        loss = self.loss
        for index, batch in enumerate(batches if isinstance(error, TypeError) else ()):
            try:
                check_call(self.module, batch, loss, self._where(first, index))
            except DataError as fault:
                return fault
        if loss is not None and self.mode is Mode.PREDICT and not loss.in_module:
            loss = None
        # The block may have put back the modes in which its error came up.
        mode = train_mode if self.mode is Mode.TRAIN else eval_mode
        with mode(self.module, loss.module if loss is not None else None):
            where = functools.partial(self._where, first)
            return explain(error, self.module, loss, self.precision, batches, where)

    def examine(
        self,
        losses: torch.Tensor,
        batches: Sequence[MicroBatch],
        first: int = 0,
        place: Optional[Callable[[NonFiniteLossError], object]] = None,
    ) -> None:
        """Warn of the first loss of an evaluation that is not finite, and say where it began.

        Args:
            losses: of the micro-batches, of those of all processes where there are several.
            batches: the micro-batches.
            first: number of the first of them.
            place: adds to an error which samples of the data it is about; None for the only batch.
        """
        if self.has_warned or losses.isfinite().all():
            return
        self.has_warned = True
        # Imported here: few losses are not finite.
        from ipufit.tracing.failed_call import find_nonfinite

        lost = int(losses.isfinite().logical_not().nonzero()[0])
        which, origin = "one", None
        cause = "Look for a log or division of zero, or non-finite data or weights."
        if not self.is_shared:
            which = f"that of batch {first + lost}"
            origin = find_nonfinite(self.module, self.loss, self.precision, batches[lost])
        if origin is not None:
            offset = sum(batch.size for batch in batches[:lost])
            number = first + lost
            origin = dataclasses.replace(origin, micro_batch=number, micro_batches=0, offset=offset)
            cause = origin.describe()
        value = losses[lost].item()
        text = f"the loss of the {self.role} must be finite, but it is {value}. {cause}"
        if place is not None:
            text = (
                f"the loss must be finite for every batch of the {self.role}, but {which} is "
                f"{value}, and so is the mean. {cause}"
            )
        error = NonFiniteLossError(text, None, value, origin)
        if place is not None:
            place(error)
        warn_user(str(error))

    def check_labels(self, batches: Sequence[MicroBatch], first: Optional[int] = 0) -> None:
        """Compare the labels of micro-batches with the classes of the prediction.

        Raises:
            DataError: one is no class.
        """
        for labels in self.labels:
            targets = []
            for batch in batches:
                assert self.loss is not None, "labels are those of a loss"
                _, _, target, weight = batch.unpack()
                # What a weight of zero hides may be anything.
                if labels.ignore_index is not None or weight is None:
                    targets.append(self.loss.labels(target, labels.key))
            # All at once where all are right, as they nearly always are.
            indices = torch.cat([torch.empty(0), *map(torch.flatten, targets)]).long()
            if not outside_classes(indices, labels.classes, labels.ignore_index).any():
                continue
            for index, target in enumerate(targets):
                where = self._where(first, index)
                check_labels(labels.name, target, labels.classes, labels.ignore_index, where)

    def _where(self, first: Optional[int], index: int) -> str:
        if first is None or self.is_shared:
            return f"{self.role}: "
        return f"{self.role}, batch {first + index}: "


def check_call(module: nn.Module, batch: MicroBatch, loss: Optional[Loss], where: str) -> None:
    """Hold a batch against the signature of forward, before torch's own error for it.

    Args:
        module: the user's module.
        batch: a micro-batch.
        loss: normal form; None where there is none.
        where: beginning of the message: what the data is for.

    Raises:
        DataError: forward can't be called with it.
    """
    args, kwargs, _, _ = batch.unpack()
    if loss is not None and loss.differentiates:
        # Steps of the user's own call the module, with whatever they like.
        return
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [*(["1 input"] if len(args) == 1 else [f"{len(args)} inputs"] if args else [])]
        given += [f"{name}=" for name in kwargs]
        cure = "Yield batches in the form that forward takes."
        if loss is not None and loss.in_module:
            cure = (
                "With loss=None every part of the batch goes to forward: pass loss= to compile, or "
                "let forward take the target and return (outputs, loss)."
            )
        raise DataError(
            f"{where}{type(module).__name__}.forward{signature} can't take a batch of "
            f"{', '.join(given)}: {error}. {cure}"
        ) from error


def runs_with_list(module: nn.Module, casting: Casting, samples: Sequence[tree.Leaf]) -> bool:
    """Try, on tensors without values, whether forward runs with a list as its only input."""
    # Imported here, as below: few inputs can be read in two ways.
    from ipufit.tracing.layers import can_run

    batch = MicroBatch.of((samples,), {}, None, 1)
    ways = (tuple(cast(batch.leaves, casts)) for casts in casting.ways(batch))
    return any(can_run(module, dataclasses.replace(batch, leaves=way)) for way in ways)


def check_class_weights(
    weights: ClassWeights, module: nn.Module, first: MicroBatch, loss: Loss
) -> None:
    """Make sure that the weights are for classes that the module's outputs have.

    Raises:
        ConfigurationError: they name others.
    """
    from ipufit.tracing.layers import outputs_of

    outputs = outputs_of(module, first)
    if not isinstance(outputs, torch.Tensor) or outputs.dim() == 0:
        return
    width = outputs.shape[1] if outputs.dim() > 1 else 1
    if width == 1 and not (loss.rule and loss.rule.is_binary):
        # A number for each sample may stand for any class.
        return
    classes = max(2, width)
    others = sorted(index for index in weights.by_class if index >= classes)
    if others:
        shape = ", ".join(["batch", *map(str, outputs.shape[1:])])
        raise ConfigurationError(
            f"class_weight must name classes that the outputs have, 0 to {classes - 1} for outputs "
            f"of shape ({shape}), got {', '.join(map(str, others))}. Remove the other keys, or "
            "give the module an output for each class."
        )


def probe(metrics: MetricSet, outputs: object, first: MicroBatch, loss: Loss) -> None:
    """Try the metrics on random numbers in the form of the outputs.

    Raises:
        MetricError: they can't take them, or there is no target.
    """
    target, sample_weight = metric_target(first.clone(), loss)
    if loss.differentiates and outputs is None:
        raise MetricError(
            f"the metrics {', '.join(metrics.names)} need what the step computes, but it returns "
            "none. Return it as 'outputs', together with the loss."
        )
    if target is None and loss.differentiates:
        raise MetricError(
            f"the metrics {', '.join(metrics.names)} need a target, but the batch has no second "
            "part, 'labels' or 'target'. Name the field: compile(..., targets='label')."
        )
    if target is None:
        raise MetricError(
            f"the metrics {', '.join(metrics.names)} need a target, but the module computes "
            "its own loss and the batch has no last argument, 'labels' or 'target' to take for "
            "it. Leave the metrics out, or compute the loss outside the module."
        )
    with isolated():
        numbers = tree.map_leaves(random_like, outputs)
        fields = metric_fields(first, target) if metrics.takes_fields else {}
        metrics.probe(numbers, target, first.size, sample_weight, fields)


def prepare_tail(
    program: Program,
    plan: Plan,
    first: MicroBatch,
    source: DataAdapter,
    explainer: FailureExplainer,
) -> Optional[Prepared]:
    """Build for a smaller last micro-batch too, so that a module that can't take it fails now.

    Returns:
        What was recorded for it; None where no micro-batch is smaller.

    Raises:
        DataError: the module can't take it.
    """
    size = plan.tail.last_micro_batch_size if plan.tail else first.size
    if plan.training and plan.fixed_updates is not None:
        size = source.smallest or first.size
    if size >= first.size or not first.has_rows:
        return None
    last = first.head(size)
    try:
        return program.prepare(last)
    except PlanError:
        raise
    except Exception as error:
        fault = explainer.explain(error, [last], None)
        reason = brief_error(error)
        if isinstance(fault, DataError) and fault.what:
            reason = fault.what[len(f"{source.role}: ") :]
        samples = "1 sample" if size == 1 else f"{size} samples"
        raise DataError(
            f"the module must take every micro-batch of the {source.role}, but fails with the last "
            f"one of an epoch, which is smaller ({samples} instead of {first.size}): {reason}. "
            "Choose another batch_size, or drop_last=True in the loader."
        ) from error


@contextlib.contextmanager
def wrap_batch_errors(explainer: FailureExplainer, sample: MicroBatch) -> Iterator[None]:
    """Raise what module or loss raise in the block as an error about the batch.

    Args:
        explainer: names the layer or line, as it does for ``fit``; its role is the method that
            needs the batch.
        sample: the batch.

    Raises:
        DataError, LossError, CaptureError: they can't take it.
    """
    # What a signal's handler raises is no fault of the batch.
    with defer_signals(interrupts=False, handlers=True):
        try:
            with explainer.explained([sample], None):
                yield
        except Exception as error:
            if isinstance(error, IpufitError) or is_fault_of_ours(error):
                raise
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in sample.tensors)
            raise DataError(
                f"{explainer.role} must be able to run module and loss on the batch, whose "
                f"tensors have shape {shapes}, but that fails: {brief_error(error)}. Pass a batch "
                "in the form that fit takes."
            ) from error


def require_one_loss(loss: Loss, what: str) -> None:
    """Refuse what works on a program with one loss.

    Raises:
        ConfigurationError: the updates have several in turn.
    """
    if loss.turns:
        raise ConfigurationError(
            f"{what} works with one loss, but the updates have several in turn. Compile only one "
            "TrainStep for it."
        )
