"""docs/coming-from-keras.md has a row for every argument of Keras' methods."""

import inspect

import ipufit
from tests.against_keras.twins import keras
from tests.pages.test_coming_from import options_of_keras

METHODS = ("compile", "fit", "evaluate", "predict")


def arguments(owner, method):
    """Default by name."""
    taken = inspect.signature(getattr(owner, method)).parameters.values()
    return {each.name: each.default for each in taken if each.name not in ("self", "kwargs")}


def test_every_argument_has_a_row():
    """One that is not in the table might be anything."""
    known = {(method, name) for method in METHODS for name in arguments(keras.Model, method)}
    assert known == set(options_of_keras())


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
