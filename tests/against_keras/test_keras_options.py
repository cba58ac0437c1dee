"""docs/coming-from-keras.md has a row for every argument of Keras' methods."""

import inspect

import pytest

import ipufit
from tests.against_keras.twins import keras
from tests.pages.test_coming_from import options_of_keras

METHODS = (
    *("compile", "fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
)


def arguments(owner, method):
    """Default by name."""
    taken = inspect.signature(getattr(owner, method)).parameters.values()
    return {each.name: each.default for each in taken if each.name not in ("self", "kwargs")}


def test_every_argument_has_a_row():
    """One that is not in the table might be anything."""
    known = {(method, name) for method in METHODS for name in arguments(keras.Model, method)}
    assert known == set(options_of_keras())


@pytest.mark.parametrize("method", METHODS)
def test_what_may_be_given_by_position_has_its_place(method):
    """Another order would give a value to another argument, without a word."""
    by_position = [
        [
            each.name
            for each in inspect.signature(getattr(owner, method)).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"
        ]
        for owner in (ipufit.Model, keras.Model)
    ]
    ours, theirs = by_position
    assert ours == theirs[: len(ours)]
    # All of them, up to one that has another name here.
    assert len(ours) == len(theirs) or theirs[len(ours)] in RENAMED


# Arguments of Keras' that are given here in another way.
RENAMED = ("initial_epoch", "steps_per_execution")


def test_what_is_called_exact_has_the_same_default():
    """Who leaves an argument out means what Keras does then."""
    same = {None: None, (): None}
    for (method, name), kind in options_of_keras().items():
        if kind == "exact":
            here, there = arguments(ipufit.Model, method), arguments(keras.Model, method)
            ours, theirs = here[name], there[name]
            if name == "x":  # is required here
                continue
            assert same.get(ours, ours) == same.get(theirs, theirs), f"{method}({name})"
