"""PopTorch's operators in a module that ipufit.Model trains on the embedded engine."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A layer, and what `operator` makes of its outputs."""

    def __init__(self, operator):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.operator = operator

    def forward(self, x):
        return self.layer(self.operator(self.layer(x)))


def cube(x):
    return poptorch.custom_op([x], "Cube", "com.acme", 1, example_outputs=[x])[0]


def model_of(operator, **options):
    model = ipufit.Model(Net(operator), engine="embedded")
    model.compile("sgd", "mse", **options)
    return model


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("job", ["fit", "predict"])
def test_code_that_is_compiled_for_an_ipu_is_refused(eagerly, job):
    """Its example outputs are zeros: the model would train, on nothing."""
    model = model_of(cube, run_eagerly=eagerly)
    before = model.module.layer.weight.clone()
    data = (X, X) if job == "fit" else (X,)
    with pytest.raises(poptorch.Error, match=r"'Cube' of 'com\.acme', version 1, is code"):
        getattr(model, job)(*data, batch_size=4, verbose=0)
    assert torch.equal(model.module.layer.weight, before)


def test_looking_at_such_a_model_goes_on():
    """On an IPU it is fine, which is what preflight is asked about."""
    assert model_of(cube).preflight((X[:4], X[:4])).stopped is None


def test_a_tensor_that_is_not_printed_is_told():
    """Who looks for the values would think that the line is never reached."""
    model = model_of(poptorch.ipu_print_tensor)
    with pytest.warns(UserWarning, match="prints nothing on the embedded engine"):
        model.fit(X, X, batch_size=4, verbose=0)
