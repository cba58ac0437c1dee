"""A regressor."""

from __future__ import annotations

from typing import Any, Dict, Optional

import numpy as np
from sklearn.base import RegressorMixin

from ipufit.sklearn.estimator import Estimator

__all__ = ["IpufitRegressor"]


class IpufitRegressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """A torch module as a regressor of scikit-learn.

    Args:
        module: a class or a function that makes the module, with ``module__`` parameters as its
            arguments; where it has parameters called ``n_features`` (columns of X) and
            ``n_outputs`` (columns of y), the data says them. Or a module, of which every ``fit``
            trains a copy. It returns one tensor (samples, n_outputs).
        loss: as for ``Model.compile``; prediction and target have shape (samples, n_outputs).
        optimizer: a name, a class or a callable of parameters; ``optimizer__`` parameters, such as
            ``optimizer__lr``, are its settings.
        metrics: as for ``Model.compile``.
        batch_size: samples of a micro-batch.
        epochs: of ``fit``; ``partial_fit`` has one.
        ipus: total number of IPUs, as for ``Model.fit``.
        device_iterations: weight updates per execution.
        gradient_accumulation: micro-batches that a replica sums before an update.
        callbacks: of each fit; copies are told what happens, and are ``callbacks_`` then.
        validation_fraction: share of the samples that is held out and evaluated after every epoch;
            0 for none.
        dtype: in which all is computed, "float32" or "float64": the module, X and y are brought to
            it, integers too, and predictions have it. None leaves module and data as they are.
        engine: as for ``ipufit.Model``.
        device: as for ``ipufit.Model``.
        random_state: of the initial weights, the order of samples, dropout and the part held out:
            an integer, a NumPy RandomState, or None for NumPy's own.
        verbose: as for ``Model.fit``.
        settings: with prefixes: ``module__``, ``optimizer__``, and ``compile__`` and ``fit__`` for
            all other arguments of ``Model.compile`` and ``Model.fit``.

    Attributes:
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
        loss: Any = "mse",
        optimizer: Any = "adam",
        metrics: Any = None,
        batch_size: int = 32,
        epochs: int = 10,
        ipus: Optional[int] = None,
        device_iterations: Optional[int] = None,
        gradient_accumulation: Optional[int] = None,
        callbacks: Any = None,
        validation_fraction: float = 0.0,
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> IpufitRegressor:
        """Train a new module on samples and their numbers.

        Args:
            X: shape (samples, features, ...).
            y: numbers, shape (samples,) or (samples, n_outputs).
            sample_weight: how much each sample counts; two is a sample that is there twice.

        Returns:
            The estimator itself.

        Raises:
            ValueError: data or parameters that can't work; those of ipufit are one too.
        """
        X, y = self._check(X, y, True, multi_output=True, y_numeric=True)
        self._begin(X, y)
        self._learn(X, y, sample_weight, self.epochs)
        return self

    def partial_fit(
        self,
        X: object,
        y: Any,
        sample_weight: object = None,
    ) -> IpufitRegressor:
        """Train for one epoch more, on this data.

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
        X, y = self._check(X, y, is_first, multi_output=True, y_numeric=True)
        if is_first:
            self._begin(X, y)
        elif _columns(y) != self._n_outputs:
            raise ValueError(
                f"y must have {self._n_outputs} columns, as in the first partial_fit, got shape "
                f"{y.shape}. Train a new estimator for other targets."
            )
        self._refuse_going_on()
        self._learn(X, y, sample_weight, 1)
        return self

    def predict(self, X: Any) -> Any:
        """Predictions in the dtype of the computation.

        Args:
            X: as for ``fit``.

        Returns:
            Shape of ``y`` in ``fit``: (samples,) or (samples, n_outputs).
        """
        outputs = self._outputs(X)
        return outputs[:, 0] if self._is_single else outputs

    def _begin(self, x: object, y: Any) -> None:
        """Make a module for these targets."""
        self._is_single = y.ndim == 1
        self._start(x, _columns(y))

    def _learn(self, x: Any, y: Any, sample_weight: Any, epochs: int) -> None:
        """Train the module for some epochs on numbers."""
        columns = y[:, None] if y.ndim == 1 else y
        target = columns if self._dtype is None else np.asarray(columns, self._dtype)
        self._train(x, target, self._weights(sample_weight, x), epochs)

    def __sklearn_tags__(self) -> Any:
        """Targets may have columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _more_tags(self) -> Dict[str, Any]:  # the same for scikit-learn before 1.6
        return {"multioutput": True}


def _columns(y: Any) -> int:
    """How many numbers there are for each sample."""
    return 1 if y.ndim == 1 else int(y.shape[1])
