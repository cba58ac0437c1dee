"""A clean report can be trusted: models that are as they should be have no finding at all."""

import pytest

import ipufit

from .clean import MODELS


@pytest.mark.grid
@pytest.mark.parametrize("name", MODELS)
def test_a_clean_model_has_no_finding(name):
    """One false alarm, and nobody reads the next report."""
    net, inputs, target, loss = MODELS[name]()
    model = ipufit.Model(net)
    model.compile("adam", loss)
    report = model.check(inputs if target is None else (inputs, target))
    assert str(report) == f"{type(net).__name__}: nothing found."
    assert not report


def test_there_are_thirty_of_them():
    """The promise names the number."""
    assert len(MODELS) >= 30


@pytest.mark.parametrize("name", ["dense"])
def test_a_model_that_is_not_compiled_is_checked_without_a_loss(name):
    """The check needs no decision about training."""
    net, inputs, _, _ = MODELS[name]()
    report = ipufit.Model(net).check(inputs)
    assert str(report) == f"{type(net).__name__}: nothing found (without a loss)."
