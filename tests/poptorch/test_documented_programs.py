"""Programs like those that public documents about IPUs show, written against PopTorch itself.

Each test is a row of docs/sources.md; the nets and the numbers are of our own.
"""

import json
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipufit import poptorch
from tests.processes.launching import run_processes

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(4))
Y = X[:, :3].argmax(1)


class Steps(nn.Module):
    """A strategy of a Trainer wraps its module so: what forward runs depends on the Trainer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.trainer = types.SimpleNamespace(stage="fit")

    def forward(self, x, labels=None):
        out = self.net(x)
        return out if self.trainer.stage == "predict" else F.cross_entropy(out, labels)


def by_hand(epochs, samples, rates):
    """The module of a loop over updates of so many samples."""
    module = Steps()
    optimizer = torch.optim.Adam(module.parameters())
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = rates[epoch]
        for begin in range(0, len(X), samples):
            optimizer.zero_grad()
            module(X[begin : begin + samples], Y[begin : begin + samples]).backward()
            optimizer.step()
    return module


def assert_same(module, expected):
    torch.testing.assert_close(
        list(module.net.parameters()), list(expected.net.parameters()), rtol=1e-4, atol=1e-6
    )


def quiet(options):
    return options.showCompilationProgressBar(False)


@pytest.mark.parametrize("make", [torch.optim.Adam, poptorch.optim.Adam])
def test_a_trainer_s_strategy_has_a_model_for_each_stage(make):
    """They share the module, take turns on the device, and the optimizer is set at every batch."""
    options = quiet(poptorch.Options().deviceIterations(2).replicationFactor(2))
    module = Steps()
    optimizer = make(module.parameters(), lr=1.0)
    training = poptorch.trainingModel(module, options, optimizer)
    inference = poptorch.inferenceModel(module, quiet(poptorch.Options()))
    loader = poptorch.DataLoader(
        options, torch.utils.data.TensorDataset(X, Y), batch_size=4, drop_last=False
    )
    rates = [0.02, 0.01, 0.005]
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        module.train()
        for batch, labels in loader:
            training.setOptimizer(optimizer)
            training(batch, labels)
        training.detachFromDevice()
        module.eval()
        module.trainer.stage = "predict"
        predicted = inference(X)
        inference.detachFromDevice()
        module.trainer.stage = "fit"
        training.attachToDevice()
    expected = by_hand(3, 8, rates)
    assert_same(module, expected)
    torch.testing.assert_close(predicted, expected.net(X), rtol=1e-4, atol=1e-5)


def checkpointed(make, rates):
    """An epoch at each rate, with new models in the middle that go on from a checkpoint."""
    saved = None
    for part in (rates[:2], rates[2:]):
        module = Steps()
        optimizer = make(module.parameters(), lr=part[0])
        if saved is not None:
            module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        training = poptorch.trainingModel(module, quiet(poptorch.Options()), optimizer)
        for rate in part:
            optimizer.param_groups[0]["lr"] = rate
            for begin in range(0, len(X), 8):
                training.setOptimizer(optimizer)
                training(X[begin : begin + 8], Y[begin : begin + 8])
        training.destroy()
        saved = module.state_dict(), optimizer.state_dict()
        # A Trainer's schedule has stepped at the end of the epoch, before the checkpoint.
        saved[1]["param_groups"][0]["lr"] = rates[2]
    return module


def test_a_run_goes_on_with_the_state_of_poptorch_s_optimizers():
    assert_same(checkpointed(poptorch.optim.Adam, [0.02] * 4), by_hand(4, 8, [0.02] * 4))


def test_a_run_that_goes_on_has_the_rate_of_its_last_execution_until_the_next_change():
    """A checkpoint holds the numbers of the device, and they are written behind the optimizer's."""
    rates = [0.02, 0.01, 0.005, 0.0025]
    module = checkpointed(poptorch.optim.Adam, rates)
    assert_same(module, by_hand(4, 8, [0.02, 0.01, 0.01, 0.0025]))


def test_a_run_goes_on_without_the_state_of_torch_s_optimizers():
    """It stays on the device, so the second half begins with moments of zero."""
    module = checkpointed(torch.optim.Adam, [0.02] * 4)
    expected = by_hand(2, 8, [0.02] * 2)
    optimizer = torch.optim.Adam(expected.parameters(), lr=0.02)
    for begin in [*range(0, len(X), 8)] * 2:
        optimizer.zero_grad()
        expected(X[begin : begin + 8], Y[begin : begin + 8]).backward()
        optimizer.step()
    assert_same(module, expected)


class Spelling(nn.Module):
    """Letters at each step, and CTC's loss of the words."""

    def __init__(self, reduction):
        super().__init__()
        torch.manual_seed(1)
        self.letters = nn.Linear(6, 5)
        self.loss = nn.CTCLoss(reduction=reduction)

    def forward(self, x, words, steps, lengths):
        probabilities = self.letters(x).log_softmax(2).transpose(0, 1)
        return probabilities, self.loss(probabilities, words, steps, lengths)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_ctc_trains_as_in_torch(reduction):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 7, 6, generator=generator)
    words = torch.tensor([[1, 2, 3], [4, 4, 1], [2, 0, 0], [3, 1, 0]])
    lengths, steps = torch.tensor([3, 3, 1, 2]), torch.full((4,), 7)
    module, expected = Spelling(reduction), Spelling(reduction)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    training = poptorch.trainingModel(module, quiet(poptorch.Options()), optimizer)
    by_torch = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        by_torch.zero_grad()
        _, loss = expected(x, words, steps, lengths)
        loss.backward()
        by_torch.step()
        _, on_device = training(x, words.int(), steps.int(), lengths.int())
        torch.testing.assert_close(on_device, loss.detach())
    torch.testing.assert_close(module.letters.weight.detach(), expected.letters.weight.detach())


LISTING = """
import json
import types
import os
import torch
from torch import nn
from ipufit import poptorch

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3)

    def forward(self, x, labels):
        out = self.linear(x)
        return out, nn.functional.cross_entropy(out, labels)

torch.manual_seed(4)
x = torch.randn(96, 6)
labels = x[:, :3].argmax(1)
numbers = torch.arange(96)
options = poptorch.Options().deviceIterations(2).replicationFactor(2).randomSeed(42)
options.showCompilationProgressBar(False)
options.Distributed.configureProcessId(int(os.environ["RANK"]), 2)
options.Training.gradientAccumulation(4)
dataset = torch.utils.data.TensorDataset(x, labels, numbers)
loader = poptorch.DataLoader(options, dataset, batch_size=3, shuffle=True, drop_last=True)
net = Net()
training = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.5))
seen = []
for x, labels, numbers in loader:
    training(x, labels)
    seen.append(numbers.tolist())
print(json.dumps([seen, net.linear.weight.tolist()]))
"""


@pytest.mark.long
def test_two_processes_of_an_own_launcher_train_one_model():
    """Each is told its place, has two replicas, and reads its half of one shuffled dataset."""
    ended = run_processes(LISTING, 2)
    assert [one.code for one in ended] == [0, 0], ended
    (seen, weight), (other, same) = (json.loads(one.stdout.splitlines()[-1]) for one in ended)
    assert weight == same
    assert sorted(n for batch in seen + other for n in batch) == list(range(96))
    # Each process has one execution of two updates of 2 replicas x 4 micro-batches of 3 samples.
    assert [len(batch) for batch in seen] == [48]
    torch.manual_seed(4)
    x = torch.randn(96, 6)
    labels = x[:, :3].argmax(1)
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for update in (slice(0, 24), slice(24, 48)):
        rows = seen[0][update] + other[0][update]
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), labels[rows]).backward()
        optimizer.step()
    torch.testing.assert_close(torch.tensor(weight), net.weight.detach(), rtol=1e-4, atol=1e-6)
