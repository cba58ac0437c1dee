"""A classifier."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Mapping, Optional, Union

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from torch import Tensor

from ipufit.errors import ConfigurationError
from ipufit.losses.resolve import resolve_loss
from ipufit.sklearn.estimator import Estimator

__all__ = ["IpufitClassifier"]


@dataclasses.dataclass(frozen=True)
class Head:
    """How a classifier's outputs are read.

    Attributes:
        is_binary: whether one output stands for the second of two classes, and the target is 0 or 1
            in floating point; else there is one output for each class, and the target its index.
        to_probabilities: of the outputs; None where the loss does not say what they are.
    """

    is_binary: bool
    to_probabilities: Optional[Callable[[Tensor], Tensor]]


def _softmax(outputs: Tensor) -> Tensor:
    return torch.softmax(outputs, 1)


def _as_they_are(outputs: Tensor) -> Tensor:
    return outputs


_CLASSES = Head(False, _softmax)
_LOGARITHMS = Head(False, torch.exp)
_LOGITS = Head(True, torch.sigmoid)
_PROBABILITIES = Head(True, _as_they_are)
_HEADS: Dict[str, Head] = {
    "cross_entropy": _CLASSES,
    "CrossEntropyLoss": _CLASSES,
    "nll": _LOGARITHMS,
    "nll_loss": _LOGARITHMS,
    "NLLLoss": _LOGARITHMS,
    "bce_with_logits": _LOGITS,
    "binary_cross_entropy_with_logits": _LOGITS,
    "BCEWithLogitsLoss": _LOGITS,
    "bce": _PROBABILITIES,
    "binary_cross_entropy": _PROBABILITIES,
    "BCELoss": _PROBABILITIES,
}


def head_of(loss: object) -> Head:
    """By the loss, in any form that ``compile`` takes; one output for each class where unknown."""
    return _HEADS.get(resolve_loss(loss).name, Head(False, None))


class IpufitClassifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A torch module as a classifier of scikit-learn.

    Args:
        module: a class or a function that makes the module, with ``module__`` parameters as its
            arguments; where it has parameters called ``n_features`` (columns of X) and
            ``n_outputs`` (number of classes), the data says them. Or a module, of which every
            ``fit`` trains a copy. It returns one tensor (samples, n_outputs).
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
        callbacks: of each fit; copies are told what happens, and are ``callbacks_`` then.
        validation_fraction: share of the samples, of each class alike, that is held out and
            evaluated after every epoch; 0 for none.
        class_weight: how much samples count, by label; "balanced" for all classes alike.
        predict_nonlinearity: what makes probabilities of the module's outputs, a tensor (samples,
            n_outputs) in float64; "auto" is what the loss says: softmax of logits, sigmoid for one
            output, exp for "nll".
        dtype: in which all is computed, "float32" or "float64": the module and floating-point data
            are brought to it, integers in X too. None leaves module and data as they are.
        engine: as for ``ipufit.Model``.
        device: as for ``ipufit.Model``.
        random_state: of the initial weights, the order of samples, dropout and the part held out:
            an integer, a NumPy RandomState, or None for NumPy's own.
        verbose: as for ``Model.fit``.
        settings: with prefixes: ``module__``, ``optimizer__``, and ``compile__`` and ``fit__`` for
            all other arguments of ``Model.compile`` and ``Model.fit``.

    Attributes:
        classes_: labels, sorted.
        n_features_in_: columns of X.
        feature_names_in_: their names, where X had any.
        module_: the trained module.
        model_: the :class:`ipufit.Model` around it.
        history_: the :class:`ipufit.History` of the last fit.
        n_iter_: epochs that were made.
        callbacks_: the copies of ``callbacks`` that the last fit told what happened.
    """

    def __init__(
        self,
        module: Any = None,
        *,
        loss: Any = "cross_entropy",
        optimizer: Any = "adam",
        metrics: Any = None,
        batch_size: int = 32,
        epochs: int = 10,
        ipus: Optional[int] = None,
        device_iterations: Optional[int] = None,
        gradient_accumulation: Optional[int] = None,
        callbacks: Any = None,
        validation_fraction: float = 0.0,
        class_weight: Union[Mapping[Any, float], str, None] = None,
        predict_nonlinearity: Union[Callable[[Tensor], Tensor], str] = "auto",
        dtype: Optional[str] = "float32",
        engine: Any = "auto",
        device: Any = None,
        random_state: Any = None,
        verbose: Any = 0,
        **settings: Any,
    ) -> None:
        super().__init__(
            module,
            loss,
            optimizer,
            metrics,
            batch_size,
            epochs,
            ipus,
            device_iterations,
            gradient_accumulation,
            callbacks,
            validation_fraction,
            dtype,
            engine,
            device,
            random_state,
            verbose,
            settings,
        )
        self.class_weight = class_weight
        self.predict_nonlinearity = predict_nonlinearity

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> IpufitClassifier:
        """Train a new module on samples and their labels.

        Args:
            X: shape (samples, features, ...).
            y: labels, shape (samples,).
            sample_weight: how much each sample counts; two is a sample that is there twice.

        Returns:
            The estimator itself.

        Raises:
            ValueError: data or parameters that can't work; those of ipufit are one too.
        """
        X, y = self._check(X, y, True)
        check_classification_targets(y)
        self._begin(X, unique_labels(y))
        self._learn(X, y, sample_weight, self.epochs)
        return self

    def partial_fit(
        self,
        X: object,
        y: object,
        classes: Any = None,
        sample_weight: object = None,
    ) -> IpufitClassifier:
        """Train for one epoch more, on this data.

        Args:
            X: as for ``fit``.
            y: as for ``fit``.
            classes: all labels that will come; needed in the first call.
            sample_weight: as for ``fit``.

        Returns:
            The estimator itself.

        Raises:
            ValueError: data or parameters that can't work, or labels that were not announced.
        """
        is_first = "module_" not in vars(self)
        X, y = self._check(X, y, is_first)
        check_classification_targets(y)
        if is_first:
            if classes is None:
                raise ValueError(
                    "the first partial_fit must know all classes, got classes=None. Pass classes=, "
                    "an array of all labels that will come."
                )
            self._begin(X, unique_labels(classes))
        elif classes is not None and not np.array_equal(unique_labels(classes), self.classes_):
            raise ValueError(
                f"classes must be those of the first partial_fit, {self.classes_}, got {classes}. "
                "Leave them out, or train a new estimator."
            )
        self._refuse_going_on()
        self._learn(X, y, sample_weight, 1)
        return self

    def predict_proba(self, X: object) -> Any:
        """The probability of each class, in float64.

        Args:
            X: as for ``fit``.

        Returns:
            Shape (samples, classes), columns as in ``classes_``.

        Raises:
            ConfigurationError: ``predict_nonlinearity`` is "auto", and the loss does not say what
                the outputs are.
        """
        outputs = self._outputs(X)
        if self._nonlinearity is None:
            raise ConfigurationError(
                "predict_nonlinearity must say what makes probabilities of the module's outputs, "
                f"since the loss {self.loss!r} does not, got 'auto'. Pass a function of a tensor, "
                "such as torch.sigmoid."
            )
        probabilities = self._probabilities(outputs)
        if self._head.is_binary:
            probabilities = np.hstack([1 - probabilities, probabilities])
        return probabilities

    def predict(self, X: Any) -> Any:
        """The most probable class of each sample.

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
        return self.classes_[places]

    @property
    def _head(self) -> Any:
        return head_of(self.loss)

    @property
    def _nonlinearity(self) -> Optional[Callable[[Tensor], Tensor]]:
        setting = self.predict_nonlinearity
        if not callable(setting) and setting != "auto":
            raise ConfigurationError(
                f"predict_nonlinearity must be 'auto' or a function of a tensor, got {setting!r}. "
                "Pass for example torch.sigmoid."
            )
        function: Optional[Callable[[Tensor], Tensor]]
        function = setting if callable(setting) else self._head.to_probabilities
        return function

    def _probabilities(self, outputs: object) -> Any:
        assert self._nonlinearity is not None
        # In float64, so that they add up to one in it.
        return self._nonlinearity(torch.from_numpy(outputs).double()).numpy()

    def _begin(self, x: Any, classes: Any) -> None:
        """Take labels over, and make a module for them.

        Raises:
            ValueError: fewer than two, or more where there is one output.
        """
        if len(classes) < 2:
            raise ValueError(
                "y must have two classes at least, got one class: "
                f"{classes.tolist()[0]!r}. Pass samples of another."
            )
        if self._head.is_binary and len(classes) > 2:
            raise ValueError(
                f"loss {self.loss!r} is for two classes, got {len(classes)}. Only binary "
                "classification is supported with it; use loss='cross_entropy'."
            )
        self.classes_ = classes
        self._start(x, 1 if self._head.is_binary else len(classes))

    def _learn(self, x: Any, y: Any, sample_weight: Any, epochs: int) -> None:
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
