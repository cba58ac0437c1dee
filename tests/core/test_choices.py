"""Words that arguments take: what type checkers let pass is what the program takes."""

import ast
import inspect
from typing import get_args

import pytest
import torch

import ipufit
from ipufit.core import EngineName, Jit, PrecisionName
from ipufit.core.compile_arguments import resolve_jit
from ipufit.engines.choice import engine_maker, list_engines
from tests import typed_calls

pytestmark = pytest.mark.both_engines


def last_arguments():
    """Of each wrong call, in order, the last argument, which is the word that there is not."""
    for node in ast.walk(ast.parse(inspect.getsource(typed_calls.wrong))):
        if isinstance(node, ast.Yield):
            call = node.value.body
            yield ast.literal_eval(call.keywords[-1].value if call.keywords else call.args[-1])


@pytest.mark.parametrize("place", range(len([*typed_calls.right()])))
def test_what_type_checkers_take_is_taken(place):
    [*typed_calls.right()][place]()


@pytest.mark.parametrize(("place", "word"), [*enumerate(last_arguments())])
def test_what_type_checkers_refuse_is_refused(place, word):
    with pytest.raises(ipufit.errors.ConfigurationError) as caught:
        [*typed_calls.wrong()][place]()
    assert repr(word) in str(caught.value)


def test_every_name_of_a_precision_means_something():
    """It is either mixed or a dtype."""
    for name in get_args(PrecisionName):
        precision = ipufit.Precision(name)
        assert (precision.autocast is None) != (precision.inputs is None), name


def test_every_name_of_an_engine_has_one():
    assert {status.name for status in list_engines()} | {"auto"} == set(get_args(EngineName))
    assert all(callable(engine_maker(name)) for name in ("auto", "embedded", "ipu-standin"))


def test_every_way_to_run_a_program_has_no_backend():
    """A backend of torch.compile has any other name."""
    for name in get_args(Jit):
        assert resolve_jit(name, False) == (name, None)
    backend = resolve_jit("eager", False)[1]
    assert backend is not None
    assert callable(backend.function)


def test_a_typing_error_of_jit_is_refused_with_what_is_near():
    model = ipufit.Model(torch.nn.Linear(2, 1), engine="embedded")
    with pytest.raises(ipufit.errors.UnknownNameError, match="'inductor'"):
        model.compile("sgd", "mse", jit="inductr")
