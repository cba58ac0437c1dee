"""A grid search of scikit-learn whose fits run as one, where that is possible."""

from __future__ import annotations

import contextlib
import copy
import pickle
from types import FunctionType
from typing import Any, Dict, Optional, Tuple

import numpy as np
from joblib.hashing import NumpyHasher
from sklearn import model_selection
from sklearn.base import clone, is_classifier
from sklearn.utils.metaestimators import _safe_split
from torch import Tensor

from ipufit.errors import brief_error
from ipufit.search.fit_many import FitResult, fit_alike
from ipufit.sklearn.base import TAKE, Estimator
from ipufit.training.model import Model
from ipufit.utils.console import warn_user
from ipufit.utils.error_collector import within
from ipufit.utils.state import fork_rng

_NO_OTHER = "no other fit has the same data and arguments of Model.fit"


class _Hasher(NumpyHasher):  # type: ignore[misc]
    """joblib's hash, in which tensors count by their values; it takes their addresses else."""

    def save(self, value: object) -> None:
        """Add a part of what is hashed."""
        if isinstance(value, (type, FunctionType)):
            value = ("object", id(value))  # also of one that can't be found by its name
        elif isinstance(value, Tensor):
            value = (type(value), value.requires_grad, value.detach().numpy())
        super().save(value)


class _PlannedFits:
    """The fits of a search: planned, trained at the same time, and then taken one by one.

    Attributes:
        setting: parameters of the fit that is planned; None where fits train or are taken.
        reasons: why fits are not part of one program, and how many.
        trained: models that wait to be taken, by what they are found by.
    """

    def __init__(self) -> None:
        # Of those with the same arguments of Model.fit: these, and each with what it is found by.
        self._planned: Dict[str, Tuple[Dict[str, Any], Dict[str, FitResult]]] = {}
        self._shows = False
        self.setting: Optional[Dict[str, Any]] = None
        self.reasons: Dict[str, int] = {}
        self.trained: Dict[Optional[str], Model] = {}

    def take(self, estimator: Estimator, options: Dict[str, Any]) -> Optional[Model]:
        """Return the model of a fit, which is only planned as yet; None where it must train.

        Args:
            estimator: whose fit it is.
            options: arguments of ``Model.fit``.
        """
        key, model = None, estimator.model_
        reason = "parameters can't be compared with those of other fits"
        # What can't be compared with another fit's, such as a function inside of one, trains.
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            call = str(_Hasher("md5").hash(options))
            parts = (call, type(estimator), estimator.get_params(), estimator._seed)
            key = str(_Hasher("md5").hash(parts))
            reason = "random_state is None" if estimator.random_state is None else ""
        if self.setting is None:
            return self.trained.pop(key, None)
        reason = "the estimator has callbacks" if options["callbacks"] else reason
        if reason:
            self._count(reason)
        else:
            result = FitResult(self.setting, model, estimator._seed)
            self._planned.setdefault(call, (options, {}))[1][str(key)] = result
            self._shows = self._shows or bool(estimator.verbose)
        return model

    def train(self) -> None:
        """Train what is planned, as far as it can run as one; the rest is left to its own fit."""
        self.setting = None
        for options, results in self._planned.values():
            alone = [(result, _NO_OTHER) for result in results.values()]
            if len(results) > 1:
                try:
                    alone = fit_alike([*results.values()], options, self._shows)
                except Exception:
                    continue  # what is wrong shows when each is fitted itself
            reasons = {id(result): reason for result, reason in alone}
            for key, result in results.items():
                if id(result) in reasons:
                    self._count(reasons[id(result)])
                elif result.error is None:
                    self.trained[key] = result.model
        self._planned = {}

    def _count(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


class GridSearchCV(model_selection.GridSearchCV):  # type: ignore[misc]
    """scikit-learn's grid search, of which the fits of a split run as one where that is possible.

    Scores, and all else but the times of fits, are those of scikit-learn's own, up to the order of
    summation. The estimator is one of ipufit's, or a pipeline that ends with one, with an integer
    as its ``random_state``, without callbacks and weights; ``n_jobs`` is None or 1. Others are
    fitted by themselves, as by scikit-learn, with a warning that says why. See
    :func:`ipufit.fit_many` for what can run as one.

    Args:
        estimator: one of ipufit's, or what ends with one.
        param_grid: values to try, by parameter; or a list of such dicts.
        scoring, n_jobs, refit, cv, verbose, pre_dispatch: as for scikit-learn's.
        error_score, return_train_score: as for scikit-learn's.
    """

    def fit(self, X: object, y: object = None, **params: object) -> GridSearchCV:
        """Try all settings, and fit the best one on all data.

        Args:
            X, y, params: as for scikit-learn's.
        """
        fits = _PlannedFits()
        with within(TAKE, fits.take):
            # The search itself draws the same random numbers, and raises what is wrong with it.
            with fork_rng():
                try:
                    self._plan(fits, X, y, bool(params))
                except Exception as error:
                    fits.reasons[f"their data can't be split: {brief_error(error)}"] = 0
            for reason, count in fits.reasons.items():
                number = f"{count} fits" if count else "all fits"
                warn_user(
                    f"{number} of the search run by themselves, not as one program: {reason}."
                )
            super().fit(X, y, **params)
            if fits.trained:
                warn_user(
                    f"{len(fits.trained)} fits of the search were trained as one in vain: "
                    "scikit-learn fitted them with other data, seeds or parameters, or in another "
                    "thread. Pass random_state, an integer, to each step that draws random numbers."
                )
        return self

    def _plan(self, fits: _PlannedFits, x: object, y: object, has_params: bool) -> None:
        parts = [self.estimator, *self.estimator.get_params().values()]
        whole = {
            "n_jobs is not None or 1": self.n_jobs not in (None, 1),
            "its fit has other arguments than X and y": has_params,
            # Of an iterator the search itself gets the splits, in its own order.
            "cv is an iterator": hasattr(self.cv, "__next__"),
            "no part of the estimator is one of ipufit's": not any(
                isinstance(part, Estimator) for part in parts
            ),
        }
        fits.reasons = {reason: 0 for reason, holds in whole.items() if holds}
        if fits.reasons:
            return
        cv = model_selection.check_cv(
            copy.deepcopy(self.cv), y, classifier=is_classifier(self.estimator)
        )
        for train, _ in cv.split(x, y):
            samples, labels = _safe_split(self.estimator, x, y, np.asarray(train))
            for setting in model_selection.ParameterGrid(self.param_grid):
                fits.setting = setting
                with contextlib.suppress(Exception):
                    clone(self.estimator).set_params(**clone(setting, safe=False)).fit(
                        samples, labels
                    )
            fits.train()
