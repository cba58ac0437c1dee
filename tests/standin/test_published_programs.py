"""What published integrations and examples read of PopTorch beside its public names.

Lightning's and Graphcore's programs, optimum's pipelines and PopTorch Geometric were looked
through; each test makes their calls, on modules of its own.
"""

import importlib.util
import inspect
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch._hooks import _OverwriteContextManager
from ipufit.poptorch._impl import isWrapped, rewrapModelIfNecessary, unwrapModelIfNecessary


class Net(nn.Module):
    """Arguments of a transformer: everything may be left out, labels lead to a loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs=None, mask=None, labels=None):
        out = self.linear(inputs) * self.scale
        if labels is None:
            return out
        return out, nn.functional.cross_entropy(out, labels)


def data(rows=4):
    return torch.randn(rows, 3), torch.arange(rows) % 3


def trained(net, rate=0.5):
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    return poptorch.trainingModel(net, poptorch.Options(), optimizer)


def run(*lines):
    """Run lines as a script of ``ipufit run``; returns what it prints."""
    script = textwrap.dedent("\n".join(lines))
    program = f"import sys; sys.argv = ['x']; exec({script!r})"
    offered = "from ipufit.finding_poptorch import offer_poptorch; offer_poptorch('standin', len); "
    done = subprocess.run(
        [sys.executable, "-c", offered + program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_executable_is_there_from_compiling_until_it_is_destroyed():
    """Lightning and the CNN examples ask whether there is something to detach or to destroy."""
    inputs, labels = data()
    model = trained(Net())
    assert model._executable is None
    assert model._executable_inputs is None
    model.compile(inputs, None, labels)
    assert model._executable
    model(inputs, None, labels)
    assert model._executable
    model.destroy()
    assert model._executable is None
    assert model._executable_inputs is None


def test_the_batch_size_of_a_compiled_model_is_read_off_its_arguments():
    """A pipeline passes by name, and destroys the program for a batch of another size."""
    model = poptorch.inferenceModel(Net().eval())
    for rows in (4, 2):
        if model._executable_inputs:
            compiled = [a.shape[0] for a in model._executable_inputs.args if torch.is_tensor(a)]
            assert compiled == [4]
            model.destroy()
        assert model(inputs=torch.randn(rows, 3)).shape == (rows, 3)


def test_the_executor_is_where_programs_look_for_it():
    model = poptorch.inferenceModel(Net())
    assert isinstance(model, poptorch._poplar_executor.PoplarExecutor)


def test_a_trained_model_is_plain_until_it_is_wrapped_again():
    """A trainer does this around a generation, which wraps the same module for inference."""
    inputs, labels = data()
    net = Net()
    model = trained(net)
    before = net.linear.weight.detach().clone()
    model(inputs, None, labels)
    unwrapModelIfNecessary(net)
    held = [net, net.linear.weight, net.linear.bias, net.scale]
    assert [type(value) for value in held] == [Net, nn.Parameter, nn.Parameter, torch.Tensor]
    # What the device had learnt came over first.
    learnt = net.linear.weight.detach().clone()
    assert not torch.equal(learnt, before)
    expected = net(inputs).detach()
    generating = poptorch.inferenceModel(net)
    torch.testing.assert_close(generating(inputs), expected)
    generating.destroy()
    rewrapModelIfNecessary(net)
    assert all(isWrapped(value) for value in held)
    model(inputs, None, labels)
    assert not torch.equal(net.linear.weight.detach(), learnt)
    model.destroy()
    assert type(net) is Net


def test_training_while_a_model_is_plain_comes_over_when_it_is_wrapped_again():
    inputs, labels = data()
    net = Net()
    model = trained(net)
    unwrapModelIfNecessary(net)
    before = net.linear.weight.detach().clone()
    model(inputs, None, labels)
    assert torch.equal(net.linear.weight.detach(), before)
    rewrapModelIfNecessary(net)
    assert not torch.equal(net.linear.weight.detach(), before)


def test_a_model_that_is_destroyed_while_it_is_plain_stays_plain():
    inputs, labels = data()
    net = Net()
    model = trained(net)
    model(inputs, None, labels)
    unwrapModelIfNecessary(net)
    model.destroy()
    rewrapModelIfNecessary(net)
    assert not any(isWrapped(value) for value in [net, net.linear.weight, net.scale])
    # Its executor is gone, too.
    gone = trained(net)
    unwrapModelIfNecessary(net)
    del gone
    rewrapModelIfNecessary(net)
    assert not isWrapped(net)


def test_wrapping_and_unwrapping_a_plain_model_does_nothing():
    net = Net()
    unwrapModelIfNecessary(net)
    rewrapModelIfNecessary(net)
    assert type(net) is Net


def test_batches_are_joined_tensor_by_tensor():
    first, second = torch.arange(2), torch.arange(4).view(2, 2)
    joined = poptorch._utils.combine_batch_tensors_gen([[first, second], [first + 2, second + 4]])
    assert inspect.isgenerator(joined)
    one, other = joined
    assert one.tolist() == [0, 1, 2, 3]
    assert other.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("first", ["", "import poptorch._poplar_executor"])
def test_a_substitution_is_registered_through_the_loader_of_the_executor_s_module(first):
    """PopTorch Geometric loads the module by hand; classes must stay those that models use."""
    assert run(
        "import importlib, importlib.util, poptorch",
        first,
        "executor = poptorch.PoplarExecutor",
        "spec = importlib.util.find_spec('poptorch._poplar_executor')",
        "module = spec.loader.load_module()",
        "class Substitution:",
        "    def __init__(self): print('recording')",
        "    def restore(self): print('recorded')",
        "module._OverwriteContextManager.registerSubsitutionManager(Substitution)",
        "print(module.PoplarExecutor is executor is poptorch.PoplarExecutor)",
        "print(importlib.util.find_spec('poptorch').name)",
        "import torch",
        "poptorch.inferenceModel(torch.nn.Tanh())(torch.ones(1))",
    ) == ["True", "ipufit.poptorch", "recording", "recorded"]


def test_the_module_of_the_executor_may_be_executed_anew():
    spec = importlib.util.find_spec("ipufit.poptorch._poplar_executor")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PoplarExecutor is poptorch.PoplarExecutor
    assert module._OverwriteContextManager is _OverwriteContextManager
