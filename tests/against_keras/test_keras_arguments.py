"""Losses and metrics of Keras itself: the values that they have there, and what is refused."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit.errors import ConfigurationError, LossError
from tests.against_keras.twins import from_keras, keras

pytestmark = from_keras

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(20, 6, generator=GENERATOR)
CLASSES = torch.randint(0, 3, (20,), generator=GENERATOR)
ONE_HOT = nn.functional.one_hot(CLASSES, 3).float()
WEIGHT = torch.rand(20, generator=GENERATOR) + 0.5
# Keras computes in float32.
TOLERANCE = 1e-5

LOSSES = {
    "CategoricalCrossentropy": ONE_HOT,
    "BinaryCrossentropy": ONE_HOT,
    "SparseCategoricalCrossentropy": CLASSES,
    "KLDivergence": ONE_HOT * 0.9 + 0.05,
    "Poisson": ONE_HOT,
    "MeanAbsolutePercentageError": ONE_HOT + 0.5,
}


def model_of(loss, **options):
    torch.manual_seed(0)
    model = ipufit.Model(nn.Sequential(nn.Linear(6, 3), nn.Softmax(1)))
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.1), loss, **options)
    return model


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", None])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_object_has_its_value(name, reduction, weighted):
    """The order of its arguments, its reduction and its sample weights."""
    loss = getattr(keras.losses, name)(reduction=reduction)
    model = model_of(loss)
    weight = {"sample_weight": WEIGHT} if weighted else {}
    result = model.evaluate(X, LOSSES[name], batch_size=20, verbose=0, **weight)["loss"]
    expected = loss(LOSSES[name], model.module(X), **weight).mean().item()
    assert result == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(
    "name", ["categorical_crossentropy", "mean_squared_error", "categorical_accuracy"]
)
def test_a_function_has_its_value_as_loss_and_as_metric(name):
    """Those with a gradient train, too."""
    function = getattr(keras.metrics, name)
    loss = function if hasattr(keras.losses, name) else "mse"
    model = model_of(loss, metrics=[function])
    result = model.evaluate(X, ONE_HOT, batch_size=6, verbose=0)
    expected = function(ONE_HOT, model.module(X)).mean().item()
    assert result[name] == pytest.approx(expected, rel=TOLERANCE)
    if loss is function:
        assert result["loss"] == pytest.approx(expected, rel=TOLERANCE)


def test_training_follows_a_loss_of_keras():
    """The weights of a loop that calls it as Keras does."""
    loss = keras.losses.CategoricalCrossentropy()
    model, other = model_of(loss), model_of(loss)
    model.fit(X, ONE_HOT, batch_size=5, epochs=2, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(other.module.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in zip(X.split(5), ONE_HOT.split(5)):
            optimizer.zero_grad()
            loss(y, other.module(x)).backward()
            optimizer.step()
    for mine, plain_loop in zip(model.module.parameters(), other.module.parameters()):
        torch.testing.assert_close(mine, plain_loop, rtol=0, atol=1e-6)


def test_objects_of_another_meaning_are_refused():
    """Metrics that hold a running value, and another divisor than that of compile."""
    with pytest.raises(ConfigurationError, match="got MeanSquaredError with update_state"):
        model_of("mse", metrics=[keras.metrics.MeanSquaredError()])
    with pytest.raises(LossError, match="a metric with update_state and result"):
        model_of(keras.metrics.MeanSquaredError())
    with pytest.raises(LossError, match="of Keras must have the reduction of compile"):
        model_of(keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
