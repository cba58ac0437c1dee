"""Metrics under Keras' names that need more than sums over elements: torchmetrics computes them.

Which of torchmetrics' objects it is follows from the first micro-batch: class indices as target
make it one of several classes, a target of the prediction's shape one of yes and no, as in Keras.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from typing import Any, ClassVar, Dict, Literal, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.objective_arguments import describe_tensor, fit_indices
from ipufit.errors import MetricError, unfit
from ipufit.metrics.kinds import Metric, TorchMetricAdapter
from ipufit.metrics.values import IGNORED_CLASS, cosine, same_shape, takes_indices, tensors_of
from ipufit.utils.error_collector import at_least, at_least_or_none, one_of

MetricTask = Literal["binary", "multiclass", "multilabel"]
MetricAverage = Literal["macro", "micro", "weighted"]


class MetricForm(NamedTuple):
    """Task of a metric and how many values it is over.

    Attributes:
        task: "binary", "multiclass", "multilabel" or "regression".
        size: classes, labels or outputs.
    """

    task: str
    size: int


class TaskMetric:
    """Base of the metrics that one of torchmetrics' objects computes.

    Attributes:
        name: under which it is logged.
    """

    name: ClassVar[str]

    def form_of(self, shown: str, prediction: Tensor, target: Tensor) -> MetricForm:
        """Say what the metric is computed of for such a micro-batch.

        Raises:
            MetricError: it can't be computed of it.
        """
        raise NotImplementedError

    def arrange(
        self, shown: str, form: MetricForm, prediction: Tensor, target: Tensor
    ) -> Tuple[Tensor, Tensor]:
        """Bring a micro-batch into the shapes that the object takes.

        Raises:
            MetricError: values are no probabilities where they must be.
        """
        raise NotImplementedError

    def build(self, form: MetricForm) -> Any:
        """Make the object of torchmetrics."""
        raise NotImplementedError


def _torchmetrics(part: str, name: str) -> Any:
    """Import a class, which nobody needs who has no such metric."""
    return getattr(importlib.import_module(f"torchmetrics.{part}"), name)


@dataclasses.dataclass(frozen=True)
class Classification(TaskMetric):
    """Base of the metrics of classes and labels.

    Args:
        task: "binary", "multiclass" or "multilabel"; None reads it from the first micro-batch:
            class indices as target are "multiclass", a target of the prediction's shape is
            "binary" over all elements.
        num_classes: classes, or labels of "multilabel"; None is the size of the prediction's
            dimension 1.
        average: over classes or labels: "macro", which is the default, "micro" or "weighted".
        from_logits: whether the prediction is logits, not probabilities.

    Raises:
        ConfigurationError: an argument can't work.
    """

    task: Optional[MetricTask] = None
    num_classes: Optional[int] = None
    average: Optional[MetricAverage] = None
    from_logits: bool = False

    # The end of the names of torchmetrics' classes, after "Binary" and the like.
    _kind: ClassVar[str]
    _needs_probabilities: ClassVar[bool] = False
    # Whether several columns, where prediction and target have one shape, are one class each.
    _columns_are_classes: ClassVar[bool] = False
    _averages: ClassVar[object] = MetricAverage

    def __post_init__(self) -> None:
        kind = type(self).__name__
        one_of(f"task of {kind}", self.task, (None, MetricTask))
        one_of(f"average of {kind}", self.average, (None, self._averages))
        one_of(f"from_logits of {kind}", self.from_logits, (True, False))
        advice = "Leave it out to take the size of the prediction's dimension 1."
        at_least_or_none(f"num_classes of {kind}", self.num_classes, 2, advice)

    def _idle(self, task: str) -> Sequence[str]:
        """Name the arguments that mean nothing for a task."""
        return ("average", "num_classes") if task == "binary" else ()

    def form_of(self, shown: str, prediction: Tensor, target: Tensor) -> MetricForm:
        """Read task and number of classes from prediction and target."""
        target = fit_indices(prediction, target)
        if takes_indices(prediction, target):
            task = self.task or "multiclass"
        else:
            same_shape(shown, prediction, target)
            are_classes = self._columns_are_classes and math.prod(prediction.shape[1:2]) != 1
            task = self.task or ("multiclass" if are_classes else "binary")
        size = prediction.shape[1] if prediction.dim() > 1 and task != "binary" else 1
        is_sized = task == "binary" or (size > 1 and self.num_classes in (None, size))
        is_possible = takes_indices(prediction, target) is False or task == "multiclass"
        if not (is_sized and is_possible):
            wanted = "" if self.num_classes is None else f" of {self.num_classes}"
            raise MetricError(
                f"metric {shown!r} for task={task!r} needs a prediction of shape (batch, classes, "
                f"...){wanted} and targets to match, got prediction of "
                f"{describe_tensor(prediction)} and target of {describe_tensor(target)}. Pass "
                f"another task or num_classes to ipufit.metrics.{type(self).__name__}."
            )
        for name in self._idle(task):
            if getattr(self, name) is not None:
                raise MetricError(
                    f"{name} of ipufit.metrics.{type(self).__name__} has no effect for "
                    f"task={task!r}, which follows from prediction and target, got "
                    f"{getattr(self, name)!r}. Leave it out, or pass another task."
                )
        return MetricForm(task, size)

    def arrange(
        self, shown: str, form: MetricForm, prediction: Tensor, target: Tensor
    ) -> Tuple[Tensor, Tensor]:
        """Flatten what is binary, and make class indices of one-hot targets."""
        # Half precision has few operators on the host.
        prediction = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        target = fit_indices(prediction, target)
        is_index = takes_indices(prediction, target)
        if not is_index:
            target = same_shape(shown, prediction, target)
        if form.task == "multiclass":
            if self._needs_probabilities:
                prediction = self._probabilities(shown, prediction, form)
            return prediction, target.long() if is_index else target.argmax(1)
        prediction, target = self._probabilities(shown, prediction, form), (target > 0.5).long()
        if form.task == "binary":
            return prediction.reshape(-1), target.reshape(-1)
        return prediction, target

    def _probabilities(self, shown: str, prediction: Tensor, form: MetricForm) -> Tensor:
        if self.from_logits:
            return prediction.softmax(1) if form.task == "multiclass" else prediction.sigmoid()
        if ((prediction < 0) | (prediction > 1)).any():
            raise MetricError(
                f"metric {shown!r} needs probabilities between 0 and 1, got values from "
                f"{float(prediction.min()):.3g} to {float(prediction.max()):.3g}. For logits, use "
                f"ipufit.metrics.{type(self).__name__}(from_logits=True)."
            )
        return prediction

    def _options(self, form: MetricForm) -> Dict[str, object]:
        """Return the arguments that are the metric's own."""
        return {}

    def build(self, form: MetricForm) -> Any:
        """Make the object of torchmetrics for this task."""
        options = self._options(form)
        if form.task == "multiclass":
            options["ignore_index"] = IGNORED_CLASS
        if form.task != "binary":
            options["average"] = self.average or "macro"
            options["num_classes" if form.task == "multiclass" else "num_labels"] = form.size
        return _torchmetrics("classification", f"{form.task.title()}{self._kind}")(**options)


@dataclasses.dataclass(frozen=True)
class Thresholded(Classification):
    """Base of the metrics that turn probabilities of yes into yes and no.

    Args:
        threshold: above which a probability means yes; 0.5 by default. Classes have none.
    """

    threshold: Optional[float] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None and not 0 < self.threshold < 1:
            needed = "between 0 and 1"
            raise unfit(f"threshold of {type(self).__name__}", needed, self.threshold, "Try 0.5.")

    @property
    def _limit(self) -> float:
        return 0.5 if self.threshold is None else self.threshold

    def _idle(self, task: str) -> Sequence[str]:
        return (*super()._idle(task), *(("threshold",) if task == "multiclass" else ()))

    def _options(self, form: MetricForm) -> Dict[str, object]:
        return {} if form.task == "multiclass" else {"threshold": self._limit}


@dataclasses.dataclass(frozen=True)
class Precision(Thresholded):
    """Share of true positives among all positive predictions.

    For class indices, it is the mean over classes; otherwise it counts all elements whose
    probability is above the threshold, as in ``keras.metrics.Precision``. The name "precision"
    stands for the defaults.

    Args:
        task: "binary", "multiclass" or "multilabel"; None reads it from the first micro-batch:
            class indices as target are "multiclass", a target of the prediction's shape is
            "binary" over all elements.
        num_classes: classes, or labels of "multilabel"; None is the size of the prediction's
            dimension 1.
        average: over classes or labels: "macro", which None means, "micro" or "weighted".
        from_logits: whether the prediction is logits. Without it, values outside of [0, 1] are
            refused where probabilities are needed.
        threshold: above which a probability of yes, or of a label, counts; None is 0.5. Classes
            have none.

    Raises:
        ConfigurationError: an argument can't work; or, in training, it has no effect for the task.
    """

    name: ClassVar[str] = "precision"
    _kind: ClassVar[str] = "Precision"


@dataclasses.dataclass(frozen=True)
class Recall(Thresholded):
    """Share of true positives among all positive targets; "recall" stands for the defaults.

    Otherwise it is like :class:`ipufit.metrics.Precision`.

    Args:
        task: as for :class:`ipufit.metrics.Precision`.
        num_classes: as for :class:`ipufit.metrics.Precision`.
        average: as for :class:`ipufit.metrics.Precision`.
        from_logits: as for :class:`ipufit.metrics.Precision`.
        threshold: as for :class:`ipufit.metrics.Precision`.

    Raises:
        ConfigurationError: an argument can't work; or, in training, it has no effect for the task.
    """

    name: ClassVar[str] = "recall"
    _kind: ClassVar[str] = "Recall"


@dataclasses.dataclass(frozen=True)
class F1Score(Thresholded):
    """Harmonic mean of precision and recall; with several classes, the mean over classes.

    If prediction and target have the same shape and several columns, the largest column is the
    class, as in ``keras.metrics.F1Score(average="macro")``. A class that is neither predicted nor
    in the targets is left out of a macro mean. The names "f1_score" and "f1" stand for the
    defaults.

    Args:
        task: as for :class:`ipufit.metrics.Precision`.
        num_classes: as for :class:`ipufit.metrics.Precision`.
        average: as for :class:`ipufit.metrics.Precision`.
        from_logits: as for :class:`ipufit.metrics.Precision`.
        threshold: as for :class:`ipufit.metrics.Precision`.

    Raises:
        ConfigurationError: an argument can't work; or, in training, it has no effect for the task.
    """

    name: ClassVar[str] = "f1_score"
    _kind: ClassVar[str] = "F1Score"
    _columns_are_classes: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class FBetaScore(F1Score):
    """Weighted harmonic mean of precision and recall; "fbeta_score" stands for the defaults.

    Otherwise it is like :class:`ipufit.metrics.F1Score`.

    Args:
        task: as for :class:`ipufit.metrics.Precision`.
        num_classes: as for :class:`ipufit.metrics.Precision`.
        average: as for :class:`ipufit.metrics.Precision`.
        from_logits: as for :class:`ipufit.metrics.Precision`.
        threshold: as for :class:`ipufit.metrics.Precision`.
        beta: how many times recall counts as much as precision.

    Raises:
        ConfigurationError: an argument can't work; or, in training, it has no effect for the task.
    """

    beta: float = 1.0

    name: ClassVar[str] = "fbeta_score"
    _kind: ClassVar[str] = "FBetaScore"

    def _options(self, form: MetricForm) -> Dict[str, object]:
        return {"beta": float(self.beta), **super()._options(form)}


@dataclasses.dataclass(frozen=True)
class AUC(Classification):
    """Area under the ROC curve, at evenly spaced thresholds between 0 and 1, as in Keras.

    The name "auc" stands for the defaults.

    Args:
        task: as for :class:`ipufit.metrics.Precision`.
        num_classes: as for :class:`ipufit.metrics.Precision`.
        average: over classes or labels: "macro", which None means, or "weighted".
        from_logits: as for :class:`ipufit.metrics.Precision`.
        num_thresholds: how many thresholds.

    Raises:
        ConfigurationError: an argument can't work; or, in training, it has no effect for the task.
    """

    num_thresholds: int = 200

    name: ClassVar[str] = "auc"
    _kind: ClassVar[str] = "AUROC"
    _needs_probabilities: ClassVar[bool] = True
    _averages: ClassVar[object] = Literal["macro", "weighted"]

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("num_thresholds of AUC", self.num_thresholds, 3, advice="Keras has 200.")

    def _options(self, form: MetricForm) -> Dict[str, object]:
        return {"thresholds": self.num_thresholds}


@dataclasses.dataclass(frozen=True)
class MeanIoU(Thresholded):
    """Mean over classes of intersection over union; yes and no are two classes.

    Classes that are neither predicted nor in the targets are left out. The names "mean_io_u" and
    "mean_iou" stand for the defaults.

    Args:
        task: as for :class:`ipufit.metrics.Precision`.
        num_classes: as for :class:`ipufit.metrics.Precision`.
        average: as for :class:`ipufit.metrics.Precision`.
        from_logits: as for :class:`ipufit.metrics.Precision`.
        threshold: as for :class:`ipufit.metrics.Precision`.

    Raises:
        ConfigurationError: an argument can't work; or, in training, it has no effect for the task.
    """

    name: ClassVar[str] = "mean_io_u"
    _columns_are_classes: ClassVar[bool] = True

    def _idle(self, task: str) -> Sequence[str]:
        # Yes and no are classes here, over which there is a mean.
        return [name for name in super()._idle(task) if name != "average"]

    def arrange(
        self, shown: str, form: MetricForm, prediction: Tensor, target: Tensor
    ) -> Tuple[Tensor, Tensor]:
        """Make class indices of all there is."""
        prediction, target = super().arrange(shown, form, prediction, target)
        if form.task == "multiclass":
            return prediction, target
        return (prediction > self._limit).long(), target

    def build(self, form: MetricForm) -> Any:
        """Make the Jaccard index of torchmetrics over the classes."""
        size = form.size if form.task == "multiclass" else 2
        kind, average = _torchmetrics("classification", "MulticlassJaccardIndex"), self.average
        return kind(num_classes=size, average=average or "macro", ignore_index=IGNORED_CLASS)


class _Regression(TaskMetric):
    """Base of the metrics of numbers, whose prediction and target have one shape."""

    def form_of(self, shown: str, prediction: Tensor, target: Tensor) -> MetricForm:
        """Count the outputs of a sample."""
        same_shape(shown, prediction, target)
        return MetricForm("regression", math.prod(prediction.shape[1:]))

    def arrange(
        self, shown: str, form: MetricForm, prediction: Tensor, target: Tensor
    ) -> Tuple[Tensor, Tensor]:
        """Make a row for each sample, or a number where there is one."""
        target = same_shape(shown, prediction, target)
        shape = (-1,) if form.size == 1 else (-1, form.size)
        return prediction.double().reshape(shape), target.double().reshape(shape)


@dataclasses.dataclass(frozen=True)
class R2Score(_Regression):
    """Share of the target's variance that the prediction explains; the mean over outputs.

    The names "r2_score" and "r2" stand for it.
    """

    name: ClassVar[str] = "r2_score"

    def build(self, form: MetricForm) -> Any:
        """Make the object of torchmetrics, whose older versions ask for the number of outputs."""
        kind = _torchmetrics("regression", "R2Score")
        takes_size = "num_outputs" in inspect.signature(kind).parameters
        metric = kind(num_outputs=form.size) if takes_size else kind()
        return metric.set_dtype(torch.float64)


@dataclasses.dataclass(frozen=True)
class PearsonCorrelation(_Regression):
    """Correlation of prediction and target.

    With several outputs, it is computed within each sample and averaged over samples, as in
    ``keras.metrics.PearsonCorrelation``; with one output, it is the correlation over all samples.
    The name "pearson_correlation" stands for it.
    """

    name: ClassVar[str] = "pearson_correlation"
    # The name of torchmetrics' class.
    _kind: ClassVar[str] = "PearsonCorrCoef"

    def arrange(
        self, shown: str, form: MetricForm, prediction: Tensor, target: Tensor
    ) -> Tuple[Tensor, Tensor]:
        """Correlate within samples where they have several outputs."""
        prediction, target = super().arrange(shown, form, prediction, target)
        if form.size == 1:
            return prediction, target
        values = self._of_rows(prediction, target)
        # Of the mean that stands for the object: values and their weights.
        return values, torch.ones_like(values)

    def _of_rows(self, prediction: Tensor, target: Tensor) -> Tensor:
        return cosine(*(row - row.mean(1, keepdim=True) for row in (prediction, target)))

    def build(self, form: MetricForm) -> Any:
        """Make the object of torchmetrics: a correlation, or a mean of correlations."""
        if form.size > 1:
            metric = _torchmetrics("aggregation", "MeanMetric")()
        else:
            metric = _torchmetrics("regression", self._kind)()
        return metric.set_dtype(torch.float64)


@dataclasses.dataclass(frozen=True)
class ConcordanceCorrelation(PearsonCorrelation):
    """Correlation that also counts differences in mean and scale.

    With several outputs, it is the mean over samples, as in
    ``keras.metrics.ConcordanceCorrelation``; otherwise it is like
    :class:`ipufit.metrics.PearsonCorrelation`. The name "concordance_correlation" stands for it.
    """

    name: ClassVar[str] = "concordance_correlation"
    _kind: ClassVar[str] = "ConcordanceCorrCoef"

    def _of_rows(self, prediction: Tensor, target: Tensor) -> Tensor:
        means = prediction.mean(1), target.mean(1)
        spreads = prediction.var(1, unbiased=False) + target.var(1, unbiased=False)
        together = (prediction * target).mean(1) - means[0] * means[1]
        return 2 * together / (spreads + (means[0] - means[1]).square())


BY_TASK = {
    "auc": AUC,
    "concordance_correlation": ConcordanceCorrelation,
    **dict.fromkeys(("f1", "f1_score"), F1Score),
    "fbeta_score": FBetaScore,
    **dict.fromkeys(("mean_io_u", "mean_iou"), MeanIoU),
    "pearson_correlation": PearsonCorrelation,
    "precision": Precision,
    **dict.fromkeys(("r2", "r2_score"), R2Score),
    "recall": Recall,
}


class TaskMetricAdapter(Metric):
    """A metric of torchmetrics that is made when the first micro-batch says what it is of.

    Args:
        key: of the result.
        metric: says which object it is.
        shown: its name in messages.
    """

    def __init__(self, key: str, metric: TaskMetric, shown: str) -> None:
        self._key, self._metric = key, metric
        self.name = shown
        self.names = (key,)
        self._form: Optional[MetricForm] = None
        self._built: Optional[TorchMetricAdapter] = None

    def _build(self, form: MetricForm) -> TorchMetricAdapter:
        self._form = form
        self._built = TorchMetricAdapter(self._key, self._metric.build(form), self.name)
        return self._built

    def fresh(self) -> TaskMetricAdapter:
        """Clone the metric without state, sharing nothing."""
        return TaskMetricAdapter(self._key, self._metric, self.name)

    def reset(self) -> None:
        """Forget everything seen."""
        self._form = self._built = None

    @torch.no_grad()
    def update(
        self, prediction: object, target: object, size: int, weight: object, /, **fields: object
    ) -> None:
        """Add one micro-batch."""
        prediction, target = tensors_of(self.name, prediction, target)
        form = self._metric.form_of(self.name, prediction, target)
        if self._form is not None and form != self._form:
            raise MetricError(
                f"metric {self.name!r} must get the same kind of prediction and target during an "
                f"epoch, got task={form.task!r} of size {form.size} after task={self._form.task!r} "
                f"of size {self._form.size}. Convert the data to one form."
            )
        built = self._built or self._build(form)
        prediction, target = self._metric.arrange(self.name, form, prediction, target)
        built.update(prediction, target, size, None)

    def compute(self) -> Dict[str, float]:
        """The values so far; nan before the first micro-batch."""
        return {self._key: math.nan} if self._built is None else self._built.compute()

    def state_dict(self) -> Mapping[str, object]:
        """Return what the object was made for, and its state."""
        if self._form is None or self._built is None:
            return {"form": None, "state": None}
        return {"form": list(self._form), "state": self._built.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.reset()
        if state["form"] is not None:
            task, size = state["form"]
            self._build(MetricForm(str(task), int(size))).load_state_dict(state["state"])

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, object]:
        """Merge states as torchmetrics has declared them.

        Raises:
            MetricError: processes have seen different kinds of predictions and targets.
        """
        seen = [state for state in states if state["form"] is not None]
        if not seen:
            return states[0]
        forms = [state["form"] for state in seen]
        if any(form != forms[0] for form in forms):
            raise MetricError(
                f"metric {self.name!r} must get the same kind of prediction and target in all "
                f"processes, got {' and '.join(map(str, forms))}. Convert the data to one form."
            )
        task, size = seen[0]["form"]
        built = self.fresh()._build(MetricForm(str(task), int(size)))
        return {
            "form": forms[0],
            "state": built.merge_states([state["state"] for state in seen]),
        }

    def higher_is_better(self) -> Dict[str, Optional[bool]]:
        """Return that it is, by name."""
        return {self._key: True}
