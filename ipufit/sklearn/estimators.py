"""Classifier and regressor of scikit-learn around a torch module."""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, Literal, Mapping, Optional, Sequence, Union

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from torch import Tensor

from ipufit.callbacks import Callback
from ipufit.core import EngineName, Verbose
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError, unfit
from ipufit.losses.resolve import resolve_loss
from ipufit.sklearn.base import Array, Estimator


@dataclasses.dataclass(frozen=True)
class _Head:
    """How a classifier's outputs are read.

    Attributes:
        is_binary: whether one output stands for the second of two classes, and the target is 0 or 1
            in floating point; else there is one output for each class, and the target its index.
        to_probabilities: of the outputs; None where the loss does not say what they are.
    """

    is_binary: bool
    to_probabilities: Optional[Callable[[Tensor], Tensor]]


# By the loss: its name here, the function's in torch.nn.functional, and the module's class.
_HEADS: Dict[str, _Head] = {
    **dict.fromkeys(("cross_entropy", "CrossEntropyLoss"), _Head(False, torch.nn.Softmax(1))),
    **dict.fromkeys(("nll", "nll_loss", "NLLLoss"), _Head(False, torch.exp)),
    **dict.fromkeys(
        ("bce_with_logits", "binary_cross_entropy_with_logits", "BCEWithLogitsLoss"),
        _Head(True, torch.sigmoid),
    ),
    **dict.fromkeys(
        ("bce", "binary_cross_entropy", "BCELoss"), _Head(True, lambda outputs: outputs)
    ),
}


class IpufitClassifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A torch module as a classifier of scikit-learn.

    It also has the methods of scikit-learn's classifiers: ``score`` is the accuracy.

    Args:
        module: a class or a function that makes the module, with ``module__`` parameters as its
            arguments; parameters called ``n_features`` (columns of X) and ``n_outputs`` (number of
            classes) are set from the data. Or a module, of which every ``fit`` trains a copy. It
            returns one tensor (samples, n_outputs).
        loss: as for ``Model.compile``. With "bce_with_logits" or "bce" the module has one output,
            for the second of two classes; with others one output for each class.
        optimizer: a name, a class or a callable of parameters; ``optimizer__`` parameters, such as
            ``optimizer__lr``, are its settings.
        metrics: as for ``Model.compile``; targets are indices into ``classes_``.
        batch_size: samples of a micro-batch.
        epochs: of ``fit``; ``partial_fit`` has one.
        ipus: total number of IPUs, as for ``Model.fit``.
        device_iterations: weight updates per execution.
        gradient_accumulation: micro-batches that a replica sums before an update.
        callbacks: for each fit, which uses copies of them; afterwards the copies are in
            ``callbacks_``.
        validation_fraction: share of the samples of each class that is held out and evaluated after
            every epoch; 0 for none.
        class_weight: how much samples count, by label; with "balanced", all classes count the same.
        predict_nonlinearity: function that turns the module's outputs, a tensor (samples,
            n_outputs) in float64, into probabilities; "auto" depends on the loss: softmax of
            logits, sigmoid for one output, exp for "nll".
        dtype: of all computations, "float32" or "float64": the module, floating-point data and
            integers in X are converted to it. None converts nothing.
        engine: as for ``ipufit.Model``.
        device: as for ``ipufit.Model``.
        random_state: seed for the initial weights, the order of samples, dropout and the choice of
            held-out samples: an integer, a NumPy RandomState, or None for NumPy's global one.
        verbose: as for ``Model.fit``.
        settings: with prefixes: ``module__``, ``optimizer__``, and ``compile__`` and ``fit__`` for
            all other arguments of ``Model.compile`` and ``Model.fit``.

    Attributes:
        classes_: labels, sorted.
        n_features_in_: columns of X.
        feature_names_in_: their names, if X has any.
        module_: the trained module.
        history_: the :class:`ipufit.History` of the last fit.
        n_iter_: number of trained epochs.
        callbacks_: the copies of ``callbacks`` from the last fit.
    """

    def __init__(
        self,
        module: object = None,
        *,
        loss: object = "cross_entropy",
        optimizer: object = "adam",
        metrics: object = None,
        batch_size: int = 32,
        epochs: int = 10,
        ipus: Optional[int] = None,
        device_iterations: Optional[int] = None,
        gradient_accumulation: Optional[int] = None,
        callbacks: Union[Callback, Sequence[Callback], None] = None,
        validation_fraction: float = 0.0,
        class_weight: Union[Mapping[object, float], str, None] = None,
        predict_nonlinearity: Union[Callable[[Tensor], Tensor], Literal["auto"]] = "auto",
        dtype: Optional[Literal["float32", "float64"]] = "float32",
        engine: Union[EngineName, Callable[[], Engine]] = "auto",
        device: Union[str, torch.device, None] = None,
        random_state: Union[int, np.random.RandomState, None] = None,
        verbose: Verbose = 0,
        **settings: object,
    ) -> None:
        values = locals()
        of_base = {name: values[name] for name in Estimator._get_param_names()}
        of_base.update(settings)
        super().__init__(**of_base)
        self.class_weight = class_weight
        self.predict_nonlinearity = predict_nonlinearity

    def fit(self, X: object, y: object, sample_weight: object = None) -> IpufitClassifier:
        """Train a new module on samples and their labels.

        Args:
            X: shape (samples, features, ...).
            y: labels, shape (samples,).
            sample_weight: how much each sample counts; a weight of two counts as two copies.

        Returns:
            The estimator itself.

        Raises:
            ValueError: data or parameters that can't work; ipufit's errors are subclasses.
        """
        samples, labels = self._check(X, y, True)
        check_classification_targets(labels)
        self._begin(samples, unique_labels(labels))
        self._learn(samples, labels, sample_weight, self.epochs)
        return self

    def partial_fit(
        self,
        X: object,
        y: object,
        classes: object = None,
        sample_weight: object = None,
    ) -> IpufitClassifier:
        """Train one more epoch, with this data.

        Args:
            X: as for ``fit``.
            y: as for ``fit``.
            classes: all labels that may occur; required in the first call.
            sample_weight: as for ``fit``.

        Returns:
            The estimator itself.

        Raises:
            ValueError: data or parameters that can't work, or unknown labels.
        """
        is_first = "module_" not in vars(self)
        samples, labels = self._check(X, y, is_first)
        check_classification_targets(labels)
        if is_first:
            if classes is None:
                raise ValueError(
                    "the first partial_fit needs all classes, got classes=None. Pass classes=, an "
                    "array of all labels."
                )
            self._begin(samples, unique_labels(classes))
        elif classes is not None and not np.array_equal(unique_labels(classes), self.classes_):
            raise ValueError(
                f"classes must be those of the first partial_fit, {self.classes_}, got {classes}. "
                "Leave them out, or train a new estimator."
            )
        self._refuse_going_on()
        self._learn(samples, labels, sample_weight, 1)
        return self

    def predict_proba(self, X: object) -> Array:
        """Return the probability of each class, in float64.

        Args:
            X: as for ``fit``.

        Returns:
            Shape (samples, classes), columns as in ``classes_``.

        Raises:
            ConfigurationError: ``predict_nonlinearity`` is "auto", but the loss does not determine
                it.
        """
        outputs = self._outputs(X)
        if self._nonlinearity is None:
            raise ConfigurationError(
                "predict_nonlinearity must turn the module's outputs into probabilities, because "
                f"the loss {self.loss!r} does not say how, got 'auto'. Pass a function of a "
                "tensor, such as torch.sigmoid."
            )
        probabilities = self._probabilities(outputs)
        if self._head.is_binary:
            probabilities = np.hstack([1 - probabilities, probabilities])
        return probabilities

    def predict(self, X: object) -> Array:
        """Return the most probable class of each sample.

        Args:
            X: as for ``fit``.

        Returns:
            Labels, shape (samples,).
        """
        outputs = self._outputs(X)
        if self._head.is_binary:
            places = (self._probabilities(outputs)[:, 0] > 0.5).astype(int)
        elif callable(self.predict_nonlinearity):
            places = self._probabilities(outputs).argmax(1)
        else:
            places = outputs.argmax(1)
        labels: Array = self.classes_[places]
        return labels

    @property
    def _head(self) -> _Head:
        # One output for each class where the loss is unknown.
        return _HEADS.get(resolve_loss(self.loss).name, _Head(False, None))

    @property
    def _nonlinearity(self) -> Optional[Callable[[Tensor], Tensor]]:
        setting = self.predict_nonlinearity
        if callable(setting):
            return setting
        if setting != "auto":
            needed = "'auto' or a function of a tensor"
            raise unfit("predict_nonlinearity", needed, setting, "Pass for example torch.sigmoid.")
        return self._head.to_probabilities

    def _probabilities(self, outputs: Array) -> Array:
        assert self._nonlinearity is not None
        # In float64, so that they add up to one in it.
        probabilities: Array = self._nonlinearity(torch.from_numpy(outputs).double()).numpy()
        return probabilities

    def _begin(self, x: Array, classes: Array) -> None:
        """Take labels over, and make a module for them.

        Raises:
            ValueError: fewer than two, or more where there is one output.
        """
        if len(classes) < 2:
            raise ValueError(
                f"y must have at least two classes, got one class: {classes.tolist()[0]!r}. Pass "
                "samples of another one."
            )
        if self._head.is_binary and len(classes) > 2:
            raise ValueError(
                f"loss {self.loss!r} is for two classes, got {len(classes)}. Only binary "
                "classification is supported with it; use loss='cross_entropy'."
            )
        self.classes_: Array = classes
        self._start(x, 1 if self._head.is_binary else len(classes))

    def _learn(self, x: Array, y: Array, sample_weight: object, epochs: int) -> None:
        """Train the module for some epochs on labels."""
        unknown = ~np.isin(y, self.classes_)
        if unknown.any():
            raise ValueError(
                f"y must hold labels of classes_, {self.classes_}, got "
                f"{y[unknown].tolist()[0]!r}. Name all labels in the first partial_fit."
            )
        places = np.searchsorted(self.classes_, y)
        weight = self._weights(sample_weight, x)
        if self.class_weight is not None:
            by_class = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            weight = (1 if weight is None else weight) * by_class[places].astype(
                self._dtype or np.float32
            )
        target = places.astype(np.int64)
        if self._head.is_binary:
            target = places.astype(self._dtype or np.float32)[:, None]
        self._train(x, target, weight, epochs, places)


class IpufitRegressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """A torch module as a regressor of scikit-learn.

    It also has the methods of scikit-learn's regressors: ``score`` is the share of the variance
    that is explained.

    Args:
        module: a class or a function that makes the module, with ``module__`` parameters as its
            arguments; parameters called ``n_features`` (columns of X) and ``n_outputs`` (columns of
            y) are set from the data. Or a module, of which every ``fit`` trains a copy. It returns
            one tensor (samples, n_outputs).
        loss: as for ``Model.compile``; prediction and target have shape (samples, n_outputs).
        optimizer: a name, a class or a callable of parameters; ``optimizer__`` parameters, such as
            ``optimizer__lr``, are its settings.
        metrics: as for ``Model.compile``.
        batch_size: samples of a micro-batch.
        epochs: of ``fit``; ``partial_fit`` has one.
        ipus: total number of IPUs, as for ``Model.fit``.
        device_iterations: weight updates per execution.
        gradient_accumulation: micro-batches that a replica sums before an update.
        callbacks: for each fit, which uses copies of them; afterwards the copies are in
            ``callbacks_``.
        validation_fraction: share of the samples that is held out and evaluated after every epoch;
            0 for none.
        dtype: of all computations and predictions, "float32" or "float64": the module, X and y are
            converted to it, also from integers. None converts nothing.
        engine: as for ``ipufit.Model``.
        device: as for ``ipufit.Model``.
        random_state: seed for the initial weights, the order of samples, dropout and the choice of
            held-out samples: an integer, a NumPy RandomState, or None for NumPy's global one.
        verbose: as for ``Model.fit``.
        settings: with prefixes: ``module__``, ``optimizer__``, and ``compile__`` and ``fit__`` for
            all other arguments of ``Model.compile`` and ``Model.fit``.

    Attributes:
        n_features_in_: columns of X.
        feature_names_in_: their names, if X has any.
        module_: the trained module.
        history_: the :class:`ipufit.History` of the last fit.
        n_iter_: number of trained epochs.
        callbacks_: the copies of ``callbacks`` from the last fit.
    """

    def fit(self, X: object, y: object, sample_weight: object = None) -> IpufitRegressor:
        """Train a new module on samples and their values.

        Args:
            X: shape (samples, features, ...).
            y: values, shape (samples,) or (samples, n_outputs).
            sample_weight: how much each sample counts; a weight of two counts as two copies.

        Returns:
            The estimator itself.

        Raises:
            ValueError: data or parameters that can't work; ipufit's errors are subclasses.
        """
        samples, targets = self._check(X, y, True, multi_output=True, y_numeric=True)
        self._begin(samples, targets)
        self._learn(samples, targets, sample_weight, self.epochs)
        return self

    def partial_fit(
        self,
        X: object,
        y: object,
        sample_weight: object = None,
    ) -> IpufitRegressor:
        """Train one more epoch, with this data.

        Args:
            X: as for ``fit``.
            y: as for ``fit``.
            sample_weight: as for ``fit``.

        Returns:
            The estimator itself.

        Raises:
            ValueError: data or parameters that can't work, or another number of columns in y.
        """
        is_first = "module_" not in vars(self)
        samples, targets = self._check(X, y, is_first, multi_output=True, y_numeric=True)
        if is_first:
            self._begin(samples, targets)
        elif _columns(targets) != self._n_outputs:
            raise ValueError(
                f"y must have {self._n_outputs} columns, as in the first partial_fit, got shape "
                f"{targets.shape}. Train a new estimator for other targets."
            )
        self._refuse_going_on()
        self._learn(samples, targets, sample_weight, 1)
        return self

    def predict(self, X: object) -> Array:
        """Return predictions in the dtype of the computation.

        Args:
            X: as for ``fit``.

        Returns:
            Values in the shape of ``y`` in ``fit``: (samples,) or (samples, n_outputs).
        """
        outputs = self._outputs(X)
        return outputs[:, 0] if self._is_single else outputs

    def _begin(self, x: Array, y: Array) -> None:
        """Make a module for these targets."""
        self._is_single = y.ndim == 1
        self._start(x, _columns(y))

    def _learn(self, x: Array, y: Array, sample_weight: object, epochs: int) -> None:
        """Train the module for some epochs on numbers."""
        columns = y[:, None] if y.ndim == 1 else y
        target = columns if self._dtype is None else np.asarray(columns, self._dtype)
        self._train(x, target, self._weights(sample_weight, x), epochs)

    def __sklearn_tags__(self) -> object:
        """Return the tags, by which targets may have columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _more_tags(self) -> Dict[str, bool]:  # the same for scikit-learn before 1.6
        return {"multioutput": True}


def _columns(y: Array) -> int:
    """Return how many numbers there are for each sample."""
    return 1 if y.ndim == 1 else int(y.shape[1])
