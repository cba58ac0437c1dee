"""Estimators train as a loop by hand does, and live in scikit-learn's pipelines and searches."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import ipufit
from ipufit.sklearn import IpufitClassifier, IpufitRegressor
from tests.told import message

X, Y = load_iris(return_X_y=True)
X = StandardScaler().fit_transform(X)
NAMES = np.array(["setosa", "versicolor", "virginica"])[Y]
SETTINGS = {
    "dtype": "float64",
    "random_state": 0,
    "epochs": 5,
    "batch_size": 16,
    "compile__jit": "graph",
}


class Net(nn.Module):
    """Two layers, and a dropout that is off unless asked for."""

    def __init__(self, n_features, n_outputs, hidden=8, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(n_features, hidden)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(hidden, n_outputs)

    def forward(self, x):
        return self.last(self.dropout(torch.tanh(self.first(x))))


class Flat(nn.Module):
    """One class less than asked for."""

    def __init__(self, n_features, n_outputs):
        super().__init__()
        self.layer = nn.Linear(n_features, n_outputs)

    def forward(self, x):
        return self.layer(x).sum(1)


def classifier(**settings):
    return IpufitClassifier(**{"module": Net, **SETTINGS, **settings})


def regressor(**settings):
    return IpufitRegressor(**{"module": Net, **SETTINGS, **settings})


def by_hand(net, loss, x, y, epochs, lr=0.01, weight=None):
    """Full batches and Adam, in float64."""
    net = copy.deepcopy(net).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    losses = []
    for _ in range(epochs):
        values = loss(net(torch.from_numpy(x)), torch.from_numpy(y))
        value = values.mean()
        if weight is not None:
            value = (values * torch.from_numpy(weight)).sum() / weight.sum()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return net, losses


def cross_entropy(prediction, target):
    return nn.functional.cross_entropy(prediction, target, reduction="none")


@pytest.mark.parametrize("weighted", [False, True])
def test_a_classifier_equals_a_loop_by_hand(weighted):
    """Labels, weights and probabilities are only another form of the same training."""
    weight = np.linspace(0.0, 2.0, len(X)) if weighted else None
    net = Net(4, 3)
    given = classifier(module=net, batch_size=150, optimizer__lr=0.01)
    found = given.fit(X, NAMES, sample_weight=weight)
    expected, losses = by_hand(net, cross_entropy, X, Y, 5, weight=weight)
    np.testing.assert_allclose(found.history_.history["loss"], losses, rtol=0, atol=1e-10)
    with torch.no_grad():
        probabilities = expected(torch.from_numpy(X)).softmax(1).numpy()
    np.testing.assert_allclose(found.predict_proba(X), probabilities, rtol=0, atol=1e-10)
    labels = np.array(["setosa", "versicolor", "virginica"])[probabilities.argmax(1)]
    assert (found.predict(X) == labels).all()
    assert found.score(X, NAMES) == (labels == NAMES).mean()
    assert list(found.classes_) == ["setosa", "versicolor", "virginica"]


@pytest.mark.few
@pytest.mark.parametrize("columns", [None, 1, 2])
def test_a_regressor_equals_a_loop_by_hand(columns):
    """A target without columns is one with a single one; predictions have the target's shape."""
    x, y = make_regression(40, 4, n_targets=columns or 1, random_state=0)
    y = y / 100 if columns != 1 else y[:, None] / 100
    net = Net(4, columns or 1)
    found = regressor(module=net, batch_size=40, optimizer__lr=0.01).fit(x, y)
    targets = y.reshape(len(y), -1)
    expected, losses = by_hand(net, nn.functional.mse_loss, x, targets, 5)
    np.testing.assert_allclose(found.history_.history["loss"], losses, rtol=0, atol=1e-10)
    with torch.no_grad():
        predicted = expected(torch.from_numpy(x)).numpy().reshape(y.shape)
    assert found.predict(x).dtype == np.float64
    np.testing.assert_allclose(found.predict(x), predicted, rtol=0, atol=1e-10)


@pytest.mark.long
def test_the_device_arguments_are_those_of_fit():
    """Replicas, accumulation and iterations divide the work, and the History says so."""
    found = classifier(batch_size=8, ipus=2, device_iterations=2, gradient_accumulation=2)
    params = found.fit(X, Y).history_.params
    assert params["updates_done"] == 5 * 5
    whole = classifier(batch_size=32, module=Net).fit(X, Y)
    np.testing.assert_allclose(found.predict_proba(X), whole.predict_proba(X), atol=1e-10)


@pytest.mark.few
@pytest.mark.parametrize("loss", ["bce_with_logits", "nll", nn.CrossEntropyLoss()])
def test_probabilities_are_what_the_loss_takes(loss):
    """A sigmoid over one output, or the exponential of logarithms, as the loss has it."""
    x, y = X[Y < 2], NAMES[Y < 2]

    def log_probabilities(n_features, n_outputs):
        return nn.Sequential(Net(n_features, n_outputs), nn.LogSoftmax(1))

    module = log_probabilities if loss == "nll" else Net
    found = classifier(module=module, loss=loss, optimizer__lr=0.05).fit(x, y)
    probabilities = found.predict_proba(x)
    assert probabilities.shape == (100, 2)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=0, atol=1e-12)
    with torch.no_grad():
        outputs = found.module_(torch.from_numpy(x))
    expected = {"bce_with_logits": torch.sigmoid, "nll": torch.exp}.get(
        loss, lambda t: t.softmax(1)
    )(outputs)
    np.testing.assert_allclose(probabilities[:, -1], expected[:, -1].numpy(), atol=1e-12)
    assert (found.predict(x) == np.where(probabilities[:, 1] > 0.5, "versicolor", "setosa")).all()
    assert found.score(x, y) == 1.0


def test_a_loss_of_ones_own_needs_a_function_for_probabilities():
    """What outputs mean is not guessed; the largest one wins either way."""

    def hinge(prediction, target):
        return nn.functional.multi_margin_loss(prediction, target)

    found = classifier(loss=hinge).fit(X, Y)
    with torch.no_grad():
        outputs = found.module_(torch.from_numpy(X))
    assert (found.predict(X) == outputs.argmax(1).numpy()).all()
    with pytest.raises(
        ipufit.errors.ConfigurationError, match=r"because the loss .*hinge.* does not"
    ):
        found.predict_proba(X)
    found.set_params(predict_nonlinearity=lambda outputs: torch.softmax(2 * outputs, 1))
    expected = (2 * outputs).softmax(1).numpy()
    np.testing.assert_allclose(found.predict_proba(X), expected, rtol=0, atol=1e-12)
    found.set_params(predict_nonlinearity="softmax")
    with pytest.raises(ipufit.errors.ConfigurationError, match="must be 'auto' or a function"):
        found.predict_proba(X)


@pytest.mark.long
@pytest.mark.parametrize("class_weight", [{"setosa": 2.0, "versicolor": 0.5}, "balanced"])
def test_class_weight_is_a_weight_of_samples(class_weight):
    """By label, and beside sample weights their product."""
    own = np.linspace(0.5, 1.5, 110)
    x, y = X[:110], NAMES[:110]
    by_label = {"setosa": 2.0, "versicolor": 0.5, "virginica": 1.0}
    if class_weight == "balanced":
        by_label = {label: 110 / (3 * (y == label).sum()) for label in set(y)}
    product = own * np.array([by_label[label] for label in y])
    found = classifier(class_weight=class_weight).fit(x, y, sample_weight=own)
    expected = classifier().fit(x, y, sample_weight=product)
    np.testing.assert_allclose(found.predict_proba(X), expected.predict_proba(X), atol=1e-12)


@pytest.mark.long
def test_a_part_is_held_out_with_all_classes():
    """Data sorted by class would else be validated on the last class alone."""
    seen = {}

    class Looking(ipufit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen[epoch] = dict(logs)

    found = classifier(validation_fraction=0.2, metrics=["accuracy"], callbacks=[Looking()])
    weight = np.ones(len(X))
    found.fit(X, Y, sample_weight=weight)
    assert found.history_.history["val_loss"] == [logs["val_loss"] for logs in seen.values()]
    assert len(found.history_.history["val_accuracy"]) == 5
    assert found.history_.params["updates_done"] == 5 * 8
    stopped = classifier(
        validation_fraction=0.2,
        epochs=50,
        callbacks=[ipufit.callbacks.EarlyStopping("val_loss", patience=0, min_delta=0.5)],
    ).fit(X, Y)
    assert stopped.n_iter_ == len(stopped.history_.epoch) < 50
    assert stopped.callbacks_[0] is not stopped.callbacks[0]


@pytest.mark.long
def test_a_fit_begins_anew_and_changes_no_parameter():
    """The same seed gives the same bits, and the module that was passed stays as it was."""
    net = Net(4, 3, dropout=0.5)
    before = copy.deepcopy(net.state_dict())
    torch.manual_seed(7)
    found = classifier(module=net)
    first = found.fit(X, Y).predict_proba(X)
    drawn = torch.rand(1)
    assert found.module is net
    assert found.module_ is not net
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert (found.fit(X, Y).predict_proba(X) == first).all()
    assert found.n_iter_ == 5
    torch.manual_seed(7)
    assert drawn == torch.rand(1)
    assert (classifier(random_state=1).fit(X, Y).predict_proba(X) != first).any()


@pytest.mark.long
def test_partial_fit_goes_on():
    """Five single epochs have the bits of one fit of five."""
    whole = classifier(module__dropout=0.5).fit(X, Y)
    parts = classifier(module__dropout=0.5)
    for _ in range(5):
        parts.partial_fit(X, Y, classes=[0, 1, 2])
    assert (parts.predict_proba(X) == whole.predict_proba(X)).all()
    assert parts.n_iter_ == 5
    targets = X[:, :2]
    whole = regressor().fit(X, targets)
    parts = regressor()
    for _ in range(5):
        parts.partial_fit(X, targets)
    assert (parts.predict(X) == whole.predict(X)).all()


def test_what_partial_fit_can_not_go_on_with_is_refused():
    """Labels, columns and counters belong to the first call."""
    found = classifier()
    with pytest.raises(ValueError, match="the first partial_fit needs all classes"):
        found.partial_fit(X, Y)
    found.partial_fit(X[Y < 2], Y[Y < 2], classes=[0, 1])
    with pytest.raises(ValueError, match=r"labels of classes_, \[0 1\], got 2"):
        found.partial_fit(X, Y)
    with pytest.raises(ValueError, match="must be those of the first partial_fit"):
        found.partial_fit(X[Y < 2], Y[Y < 2], classes=[0, 1, 2])
    lines = regressor().partial_fit(X, X[:, 0])
    with pytest.raises(ValueError, match=r"y must have 1 columns.*got shape \(150, 2\)"):
        lines.partial_fit(X, X[:, :2])


@pytest.mark.long
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_predicts_and_goes_on(copied):
    """As scikit-learn's own: what a search returns may have come from another process."""
    callbacks = [ipufit.callbacks.EarlyStopping("loss", patience=9)]
    found = classifier(callbacks=callbacks, module__dropout=0.5).fit(X, Y)
    twin = copied(found)
    assert (twin.predict_proba(X) == found.predict_proba(X)).all()
    assert twin.history_.history == found.history_.history
    for estimator in (found, twin):
        estimator.partial_fit(X, Y)
    assert (twin.predict_proba(X) == found.predict_proba(X)).all()


def test_a_copy_that_lacks_counters_does_not_go_on():
    """Else its learning rate would begin anew, and nobody would see it."""
    found = classifier(compile__lr_scheduler="cosine", compile__ema=ipufit.EMA())
    found.set_params(compile__lr_scheduler=None).fit(X, Y)
    found.partial_fit(X, Y)
    twin = copy.deepcopy(found)
    assert (twin.predict(X) == found.predict(X)).all()
    with pytest.raises(ipufit.errors.ConfigurationError, match="trained with compile__ema"):
        copy.deepcopy(found).partial_fit(X, Y)
    found.set_params(compile__ema=None, compile__precision="mixed_float16")
    with pytest.raises(ipufit.errors.ConfigurationError, match="trained with compile__precision"):
        copy.deepcopy(found).partial_fit(X, Y)


def test_clone_and_parameters():
    """A search clones and sets by name, those with a prefix too."""
    found = classifier(module__hidden=4, optimizer__lr=0.1, compile__jit="graph")
    twin = clone(found.fit(X, Y))
    assert twin.get_params() == found.get_params()
    assert not hasattr(twin, "module_")
    with pytest.raises(NotFittedError, match="has no model_ yet"):
        _ = twin.model_
    with pytest.raises(NotFittedError):
        twin.predict(X)
    twin.set_params(module__hidden=5, epochs=1).fit(X, Y)
    assert twin.module_.first.out_features == 5
    assert twin.model_.optimizer.param_groups[0]["lr"] == 0.1
    assert twin.history_.params["jit"] == "graph"
    assert "module__hidden=5" in repr(twin)
    with pytest.raises(ValueError, match="Invalid parameter 'modul"):
        twin.set_params(modul__hidden=5)


@pytest.mark.long
def test_a_pipeline_is_searched():
    """The parameters of module and optimizer are reached through the pipeline's step."""
    pipe = make_pipeline(StandardScaler(), classifier(epochs=8))
    grid = {
        "ipufitclassifier__module__hidden": [1, 8],
        "ipufitclassifier__optimizer__lr": [1e-5, 0.1],
    }
    search = GridSearchCV(pipe, grid, cv=3).fit(X, NAMES)
    assert search.best_params_["ipufitclassifier__optimizer__lr"] == 0.1
    assert search.best_score_ > 0.9
    predicted = cross_val_predict(search.best_estimator_, X, NAMES, cv=3)
    assert (predicted == NAMES).mean() > 0.9


@pytest.mark.long
def test_a_search_runs_in_other_processes():
    """Estimators go there and come back."""
    found = cross_validate(classifier(), X, NAMES, cv=3, n_jobs=2, return_estimator=True)
    here = cross_validate(classifier(), X, NAMES, cv=3)
    assert (found["test_score"] == here["test_score"]).all()
    assert all(len(one.predict(X)) == 150 for one in found["estimator"])


@pytest.mark.long
def test_dtype_decides_what_is_computed_in():
    """By default float64 data is brought to float32, as the parameter says."""
    found = classifier(dtype="float32").fit(X, Y)
    assert {p.dtype for p in found.module_.parameters()} == {torch.float32}
    assert found.predict_proba(X).dtype == np.float64
    assert regressor(dtype="float32").fit(X, Y).predict(X).dtype == np.float32

    class Words(nn.Module):
        def __init__(self, n_outputs):
            super().__init__()
            self.table = nn.EmbeddingBag(10, n_outputs)

        def forward(self, words):
            return self.table(words)

    words = np.arange(80).reshape(20, 4) % 9
    found = classifier(module=Words, dtype=None).fit(words, words[:, 0] % 2)
    assert found.predict(words).shape == (20,)
    with pytest.raises(
        ipufit.errors.ConfigurationError, match="dtype must be 'float32', 'float64'"
    ):
        classifier(dtype="half").fit(X, Y)


@pytest.mark.long
def test_pictures_have_more_dimensions():
    """Not every X is a table."""
    pictures = np.random.default_rng(0).normal(size=(30, 1, 4, 4))

    def net(n_outputs):
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, n_outputs))

    found = classifier(module=net).fit(pictures, np.arange(30) % 3)
    assert found.predict(pictures).shape == (30,)


def refused(estimator):
    return message(estimator.fit, X, Y)


def test_what_can_not_work_is_refused_by_fit():
    """With what was expected, what came, and what to do."""
    assert refused(IpufitClassifier()).startswith("module must be a torch.nn.Module, a class of")
    assert "but dict returned dict" in refused(classifier(module=dict))
    assert refused(classifier(module__hiden=3)).startswith(
        "Net(n_features, n_outputs, hidden=8, dropout=0.0) makes the module, but does not take its "
        "arguments: got an unexpected keyword argument 'hiden'."
    )
    net = Net(4, 3)
    assert refused(classifier(module=net, module__hidden=3)).startswith(
        "module__hidden needs a class or a function that makes the module, got an object of Net."
    )
    adam = torch.optim.Adam(net.parameters())
    assert refused(classifier(optimizer=adam)).startswith(
        "optimizer must be a name, a class or a factory"
    )
    assert "Did you mean 'adam'?" in refused(classifier(optimizer="adm", optimizer__lr=1.0))
    assert refused(classifier(optimizer__rate=1.0)).startswith(
        "optimizer__ parameters must be arguments of Adam, got rate ("
    )
    assert refused(classifier(optimizer=3, optimizer__lr=1.0)).startswith(
        "optimizer must be a name, a class or a callable of parameters, got 3."
    )
    both = refused(classifier(compile__jt="graph", compile__loss="mse"))
    assert "unknown option of Model.compile 'jt'. Did you mean 'jit'?" in both
    assert "compile__loss must not be set: the estimator sets loss itself." in both
    assert "fit__seed must not be set" in refused(classifier(fit__seed=3))
    flat = classifier(module=Flat, loss=lambda p, t: p.mean()).fit(X, Y)
    with pytest.raises(ipufit.errors.ConfigurationError, match=r"here \(150, 3\), got \(150,\)"):
        flat.predict(X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'hidden'"):
        classifier(hidden=3)
    assert message(ipufit.sklearn.IpufitClassifier, Flat, epoch=3, kind=TypeError) == (
        "IpufitClassifier got an unexpected keyword argument 'epoch'. Did you mean 'epochs'? "
        "Arguments of the module, the optimizer, Model.compile and Model.fit have a prefix: "
        "module__, optimizer__, compile__, fit__."
    )


def test_an_sgd_with_settings_is_the_sgd_without():
    """A second setting must not change the first one's default."""
    found = classifier(optimizer="sgd", optimizer__momentum=0.5).fit(X, Y)
    group = found.model_.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.01, 0.5)
    assert classifier(optimizer="sgd").fit(X, Y).model_.optimizer.param_groups[0]["lr"] == 0.01


def test_one_class_and_three_for_two_are_refused():
    """A module with the wrong number of outputs would train on nonsense."""
    with pytest.raises(ValueError, match="y must have at least two classes, got one class: 0"):
        classifier().fit(X[:50], Y[:50])
    with pytest.raises(ValueError, match="loss 'bce_with_logits' is for two classes, got 3"):
        classifier(loss="bce_with_logits").fit(X, Y)


@pytest.mark.long
def test_without_scikit_learn_the_import_says_what_to_install():
    """The rest of ipufit needs nothing of it."""
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import ipufit\n"
        "try:\n    import ipufit.sklearn\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "ipufit.sklearn needs the package scikit-learn, which is not installed. Run: pip install "
        "ipufit[sklearn]"
    )
