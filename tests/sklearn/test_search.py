"""The grid search of ipufit has the results of scikit-learn's, with fits that run as one."""

import copy

import joblib
import numpy as np
import pytest
import torch
from sklearn import model_selection
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch import nn

import ipufit
from ipufit.search import fit_many
from ipufit.sklearn import GridSearchCV, IpufitClassifier, IpufitRegressor


def net(n_features, n_outputs, hidden=4, dropout=0.0):
    """A net with a hidden layer."""
    layers = nn.Linear(n_features, hidden), nn.ReLU(), nn.Dropout(dropout)
    return nn.Sequential(*layers, nn.Linear(hidden, n_outputs))


def scaled(n_features, n_outputs, scales=(1.0,) * 2000):
    """A net whose weights are scaled by the last of many numbers."""
    made = net(n_features, n_outputs)
    with torch.no_grad():
        made[0].weight.mul_(float(scales[-1000]))
    return made


def multiplied(n_features, n_outputs, factor=None):
    """A net whose weights are multiplied with a tensor."""
    made = net(n_features, n_outputs)
    with torch.no_grad():
        made[0].weight.mul_(factor)
    return made


@pytest.fixture
def groups(monkeypatch):
    """How many fits each program had."""
    counts = []
    train = fit_many._Group.train

    def counted(self, *rest):
        train(self, *rest)
        counts.append(len(self._results))

    monkeypatch.setattr(fit_many._Group, "train", counted)
    return counts


def assert_same(search, others):
    """Same scores, choice and predictions."""
    for name, values in others.cv_results_.items():
        if name.endswith("_score"):
            np.testing.assert_allclose(search.cv_results_[name], values, atol=1e-10, err_msg=name)
    assert search.best_params_ == others.best_params_


def test_a_classifier_in_a_pipeline(groups):
    """Rates and dropout run as one; the other width makes another program for each split."""
    x, y = load_iris(return_X_y=True)
    estimator = IpufitClassifier(net, random_state=0, epochs=3, dtype="float64")
    pipeline = make_pipeline(StandardScaler(), estimator)
    grid = {
        "ipufitclassifier__module__hidden": [4, 6],
        "ipufitclassifier__module__dropout": [0.0, 0.3],
        "ipufitclassifier__optimizer__lr": [0.01, 0.05],
    }
    scoring = "neg_log_loss"
    search = GridSearchCV(pipeline, grid, cv=2, scoring=scoring).fit(x, y)
    assert groups == [4, 4, 4, 4]
    others = model_selection.GridSearchCV(pipeline, grid, cv=2, scoring=scoring).fit(x, y)
    assert_same(search, others)
    np.testing.assert_allclose(search.predict_proba(x), others.predict_proba(x), atol=1e-10)


@pytest.mark.parametrize(
    "grid",
    [
        {"batch_size": [8, 40], "optimizer__lr": [0.01, 0.05]},
        {"epochs": [1, 6], "optimizer__lr": [0.01, 0.05]},
        {"validation_fraction": [0.0, 0.3], "optimizer__lr": [0.01, 0.05]},
        {"fit__shuffle": [True, False], "optimizer__lr": [0.01, 0.05]},
        {"random_state": [1, 2], "optimizer__lr": [0.01, 0.05]},
        {"module__scales": [np.ones(2000), 2 * np.ones(2000)], "optimizer__lr": [0.01, 0.05]},
        {
            "loss": ["cross_entropy", nn.CrossEntropyLoss(label_smoothing=0.3)],
            "optimizer__lr": [0.01, 0.05],
        },
        {"dtype": ["float32", "float64"], "optimizer__lr": [0.01, 0.05]},
        {"optimizer": ["sgd", "adam"], "optimizer__lr": [0.01, 0.05]},
        {"module": [nn.Linear(4, 3), nn.Linear(4, 3)], "optimizer__lr": [0.01, 0.05]},
        {
            "module": [multiplied],
            "module__factor": [torch.ones(4), torch.full((4,), 2.0)],
            "optimizer__lr": [0.01, 0.05],
        },
    ],
    ids=lambda grid: next(iter(grid)),
)
def test_settings_of_any_kind_are_tried(grid, groups):
    """Fits that have other arguments are other programs."""
    x, y = load_iris(return_X_y=True)
    estimator = IpufitClassifier(scaled, random_state=0, epochs=3, dtype="float64")
    search = GridSearchCV(estimator, grid, cv=2, scoring="accuracy").fit(x, y)
    assert groups
    others = model_selection.GridSearchCV(estimator, grid, cv=2, scoring="accuracy").fit(x, y)
    assert_same(search, others)


def test_functions_without_a_name_of_their_own_are_compared(groups):
    """Modules that a function inside of another makes, as in a notebook."""
    x, y = load_iris(return_X_y=True)
    estimator = IpufitClassifier(
        lambda n_features, n_outputs: net(n_features, n_outputs),
        random_state=0,
        epochs=1,
        dtype="float64",
    )
    grid = {"optimizer__lr": [0.01, 0.05]}
    search = GridSearchCV(estimator, grid, cv=2).fit(x, y)
    assert groups == [2, 2]
    assert_same(search, model_selection.GridSearchCV(estimator, grid, cv=2).fit(x, y))


def test_a_regressor_whose_fits_are_looked_at(groups):
    """A search keeps what its own fits leave: history and count of epochs."""
    x, y = load_iris(return_X_y=True)
    seen = []

    def score(estimator, x, y):
        seen.append((estimator.n_iter_, len(estimator.history_.epoch)))
        return estimator.score(x, y)

    estimator = IpufitRegressor(net, random_state=1, epochs=2, validation_fraction=0.2)
    grid = {"optimizer__lr": [0.01, 0.05]}
    search = GridSearchCV(estimator, grid, cv=2, scoring=score, refit=False).fit(x, y)
    assert groups == [2, 2]
    assert seen == [(2, 2)] * 4
    assert "best_estimator_" not in vars(search)


LEFT_ALONE = {
    "callbacks": (
        {"callbacks": ipufit.callbacks.EarlyStopping("loss")},
        {},
        "4 fits of the search run by themselves, not as one program: the estimator has callbacks.",
    ),
    "class weights": (
        {"class_weight": "balanced"},
        {},
        "4 fits of the search run by themselves, not as one program: samples have weights.",
    ),
    "splits of an iterator": (
        {},
        {"cv": iter([(np.arange(100), np.arange(100, 150))])},
        "all fits of the search run by themselves, not as one program: cv is an iterator.",
    ),
    "a seed of each fit": (
        {"random_state": None},
        {},
        "4 fits of the search run by themselves, not as one program: random_state is None.",
    ),
    "several at once": (
        {},
        {"n_jobs": 2},
        "all fits of the search run by themselves, not as one program: n_jobs is not None or 1.",
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_fits_run_one_after_another(name):
    """A search has all scores also where nothing can run as one, and says why."""
    x, y = load_iris(return_X_y=True)
    options, of_search, text = LEFT_ALONE[name]
    estimator = IpufitClassifier(net, **{"random_state": 0, "epochs": 1, **options})
    search = GridSearchCV(estimator, {"optimizer__lr": [0.01, 0.05]}, **{"cv": 2, **of_search})
    threads = joblib.parallel_backend("threading")
    with pytest.warns(UserWarning, match="run by themselves") as caught, threads:
        search.fit(x[::-1], y[::-1])
    assert [str(each.message) for each in caught] == [text]
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


def test_an_estimator_of_another_library_is_fitted_once():
    """What is not ipufit's is no plan: it would be fitted twice."""
    x, y = load_iris(return_X_y=True)
    with pytest.warns(UserWarning, match="no part of the estimator is one of ipufit's"):
        GridSearchCV(LogisticRegression(max_iter=200), {"C": [0.1, 1.0]}, cv=2).fit(x, y)
    estimator = IpufitClassifier(net, random_state=0, epochs=1)
    search = GridSearchCV(estimator, {"epochs": [1]}, cv=2)
    with pytest.warns(UserWarning, match="its fit has other arguments than X and y"):
        search.fit(x, y, sample_weight=np.ones(len(x)))


@pytest.mark.parametrize(
    "cv",
    [
        model_selection.KFold(2, shuffle=True),
        model_selection.KFold(2, shuffle=True, random_state=np.random.RandomState(0)),
        model_selection.ShuffleSplit(2),
    ],
    ids=["shuffled", "of a generator", "random"],
)
def test_splits_that_are_drawn_are_those_of_scikit_learn(cv, groups):
    """Also the random numbers of NumPy that follow a search."""
    x, y = load_iris(return_X_y=True)
    estimator = IpufitClassifier(net, random_state=0, epochs=1, dtype="float64")
    grid = {"optimizer__lr": [0.01, 0.05]}
    searches, numbers = [], []
    for kind in (GridSearchCV, model_selection.GridSearchCV):
        np.random.seed(5)
        searches.append(kind(estimator, grid, cv=copy.deepcopy(cv)).fit(x, y))
        numbers.append(np.random.rand())
    assert groups == [2, 2]
    assert_same(*searches)
    assert numbers[0] == numbers[1]


def test_fits_that_were_trained_in_vain_are_told():
    """A step without a seed makes other data of the same samples each time."""
    x, y = load_iris(return_X_y=True)

    class Draws(FunctionTransformer):
        """Adds a number of its own to each pair of fits."""

        count = 0

        def transform(self, x):
            """Add it."""
            Draws.count += 1
            return x + Draws.count // 4

    estimator = IpufitClassifier(net, random_state=0, epochs=1, dtype="float64")
    grid = {"ipufitclassifier__optimizer__lr": [0.01, 0.05, 0.1]}
    search = GridSearchCV(make_pipeline(Draws(), estimator), grid, cv=[(range(100), range(100))])
    with pytest.warns(UserWarning, match="3 fits of the search were trained as one in vain"):
        search.fit(x, y)


def test_lines_of_epochs_are_those_of_all_fits(capsys):
    """Where the estimator prints them, with the setting of the best."""
    x, y = load_iris(return_X_y=True)
    estimator = IpufitClassifier(net, random_state=0, epochs=1, verbose=2)
    grid = {"optimizer__lr": [0.01, 0.05]}
    GridSearchCV(estimator, grid, cv=2, refit=False).fit(x, y)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", loss from")[0] for line in lines] == ["epoch 1: 2 models"] * 2
    assert all("(optimizer__lr=0.05)" in line for line in lines)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.FitFailedWarning", "ignore:One or more")
@pytest.mark.parametrize(
    ("grid", "text"),
    [
        ({"optimizer__lr": [0.01, 0.02, -1.0]}, "Invalid learning rate"),
        ({"batch_size": [64, 32, 0]}, "batch_size must be an integer of at least 1"),
        ({"epochs": [2, 1, 0]}, "epochs must be a number of epochs"),
    ],
    ids=str,
)
def test_an_error_of_a_setting_is_that_of_its_fit(grid, text):
    """As in scikit-learn, it fails alone, or is raised."""
    x, y = load_iris(return_X_y=True)
    estimator = IpufitClassifier(net, random_state=0, epochs=1)
    rates = {} if "optimizer__lr" in grid else {"optimizer__lr": [0.01, 0.02]}
    grid = {**grid, **rates}
    search = GridSearchCV(estimator, grid, cv=2).fit(x, y)
    count = 2 if rates else 1
    expected = [False] * 2 * count + [True] * count
    assert np.isnan(search.cv_results_["mean_test_score"]).tolist() == expected
    with pytest.raises(ValueError, match=text):
        GridSearchCV(estimator, grid, cv=2, error_score="raise").fit(x, y)
