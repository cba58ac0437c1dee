"""``jit`` of compile: how a recorded program runs."""

import pytest
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from tests.nets import MLP, data
from tests.told import refused


def compiling(**options):
    return lambda: ipufit.Model(MLP()).compile("adam", "cross_entropy", **options)


@pytest.mark.parametrize("jit", ["fast", None, True, "Graph"])
def test_no_way_by_that_name(jit):
    names = "'auto' or 'graph' or 'cudagraph' or 'off'"
    refused(compiling(jit=jit), f"jit must be {names}, got {jit!r}.")


def test_two_ways_at_once_are_refused():
    refused(
        compiling(jit="graph", run_eagerly=True),
        "run_eagerly=True runs the module itself, but jit='graph' asks for a recorded program. "
        "Leave one of them out.",
    )


@pytest.mark.parametrize("options", [{"jit": "off"}, {"run_eagerly": True}])
def test_off_is_the_module_itself(options):
    model = ipufit.Model(MLP().double(), engine="embedded")
    model.compile("adam", "cross_entropy", **options)
    loader = DataLoader(TensorDataset(*data(8)), batch_size=4)
    assert "Runs the module itself, eagerly on the embedded engine" in model.explain(loader)
