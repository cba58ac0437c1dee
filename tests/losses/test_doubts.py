"""Losses of outputs that they are not made for: told once, where it is certain."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit
from tests.engines import EAGER_OR_NOT

X = torch.linspace(-2, 3, 72).reshape(12, 6).sin()
CLASSES = torch.arange(12) % 3
BITS = (torch.arange(12) % 2).float()
WHOLE = "so the model learns little. Remove it from the module"
LOGITS = "predict(x).softmax(1) turns logits into probabilities."
NEEDS_SHAPES = pytest.mark.skipif(
    not hasattr(torch.ones(1, requires_grad=True).exp().grad_fn, "_input_metadata"),
    reason="this torch does not tell the shapes of operators",
)


def net(outputs, *layers):
    """A linear layer and what comes behind it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, outputs), *layers)


def squares(prediction, target):
    """A mean of squares as it is often written."""
    return ((prediction - target) ** 2).mean()


def distances(prediction, target):
    """The other way around."""
    return (target - prediction).abs().mean()


def reshaped(prediction, target):
    """The cure."""
    return squares(prediction, target.reshape(prediction.shape))


def warned(module, loss, target, **options):
    """The warnings of a fit of two epochs, and of a second one."""
    torch.manual_seed(0)
    model = ipufit.Model(module)
    model.compile("sgd", loss, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(X, target, batch_size=5, epochs=2, validation_split=0.25, seed=0, verbose=0)
    return [str(warning.message) for warning in caught]


# Module, loss, target; what is told; and a module and a loss that do what it advises.
DOUBTS = {
    "cross entropy behind a softmax": (
        *(lambda: net(3, nn.Softmax(1)), "cross_entropy", CLASSES),
        "loss 'cross_entropy' takes logits and applies a softmax itself, but the module's outputs "
        f"already come from a softmax, {WHOLE}; {LOGITS}",
        *(lambda: net(3), "cross_entropy"),
    ),
    "a module of it, by the last dimension": (
        *(lambda: net(3, nn.Softmax(-1)), nn.CrossEntropyLoss(), CLASSES),
        "loss 'CrossEntropyLoss' takes logits and applies a softmax itself, but the module's "
        f"outputs already come from a softmax, {WHOLE}; {LOGITS}",
        *(lambda: net(3), nn.CrossEntropyLoss()),
    ),
    "a function of it behind a sigmoid": (
        *(lambda: net(3, nn.Sigmoid()), functional.cross_entropy, CLASSES),
        "loss 'cross_entropy' takes logits and applies a softmax itself, but the module's outputs "
        f"already come from a sigmoid, {WHOLE}; {LOGITS}",
        *(lambda: net(3), functional.cross_entropy),
    ),
    "binary cross entropy of logits behind a sigmoid": (
        *(lambda: net(1, nn.Sigmoid(), nn.Flatten(0)), "bce_with_logits", BITS),
        "loss 'bce_with_logits' takes logits and applies a sigmoid itself, but the module's "
        f"outputs already come from a sigmoid, {WHOLE}, or use loss='bce', which takes "
        "probabilities.",
        *(lambda: net(1, nn.Sigmoid(), nn.Flatten(0)), "bce"),
    ),
    "nll of logits": (
        *(lambda: net(3), "nll", CLASSES),
        "loss 'nll' takes log-probabilities, but the module's outputs come from a linear layer: "
        "the loss decreases without limit, and the model learns little. Let the module return "
        "logits with loss='cross_entropy', or end it with nn.LogSoftmax(1).",
        *(lambda: net(3), "cross_entropy"),
    ),
    "nll of probabilities": (
        *(lambda: net(3, nn.Softmax(1)), nn.NLLLoss(), CLASSES),
        "loss 'NLLLoss' takes log-probabilities, but the module's outputs come from a softmax: the "
        "loss decreases without limit, and the model learns little. Let the module return logits "
        "with loss='cross_entropy', or end it with nn.LogSoftmax(1).",
        *(lambda: net(3, nn.LogSoftmax(1)), nn.NLLLoss()),
    ),
    "a column against a row": (
        *(lambda: net(1), squares, BITS),
        "the loss 'squares' compares a prediction of shape (5, 1) with a target of shape (5,), "
        "which torch broadcasts to (5, 5): every prediction is compared with the target of every "
        "sample. Make the shapes equal in the loss, for example with "
        "target.reshape(prediction.shape).",
        *(lambda: net(1), reshaped),
    ),
    "a row against a column": (
        *(lambda: net(1, nn.Flatten(0)), distances, BITS[:, None]),
        "the loss 'distances' compares a prediction of shape (5,) with a target of shape (5, 1), "
        "which torch broadcasts to (5, 5): every prediction is compared with the target of every "
        "sample. Make the shapes equal in the loss, for example with "
        "target.reshape(prediction.shape).",
        *(lambda: net(1, nn.Flatten(0)), reshaped),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[NEEDS_SHAPES] * ("against" in name)) for name in DOUBTS]
)
@pytest.mark.parametrize("eager", EAGER_OR_NOT)
def test_it_is_told_once_and_what_it_advises_helps(name, eager):
    """In several epochs, validations, tails and calls of fit."""
    module, loss, target, text, other, cured = DOUBTS[name]
    assert warned(module(), loss, target, run_eagerly=eager) == [text]
    assert warned(other(), cured, target, run_eagerly=eager) == []


class Scores(nn.Module):
    """Attention weights as outputs, (batch, classes, places): a softmax over the places."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 12)

    def forward(self, x):
        return self.inner(x).reshape(-1, 3, 4).softmax(2)


def pairs(prediction, target):
    """A loss over all pairs, which is meant to compare each with each."""
    return ((prediction - prediction.T).abs() * (target[:, None] != target)).mean()


def contrasted(prediction, target):
    """The same of a matrix of similarities."""
    alike = prediction @ prediction.T
    return (alike - (target[:, None] == target).to(alike.dtype)).square().mean()


@pytest.mark.parametrize(
    ("module", "loss", "target"),
    [
        (lambda: net(3), "cross_entropy", CLASSES),
        (lambda: net(3, nn.ReLU()), "cross_entropy", CLASSES),
        (lambda: net(3, nn.LogSoftmax(1)), "cross_entropy", CLASSES),
        (lambda: net(3, nn.LogSoftmax(1)), "nll", CLASSES),
        (lambda: net(3, nn.Softmax(1), Clamped()), "nll", CLASSES),
        (Scores, "cross_entropy", CLASSES[:, None].expand(12, 4)),
        (lambda: net(1, nn.Sigmoid()), "bce", BITS[:, None]),
        (lambda: net(1, nn.Sigmoid()), "mse", BITS),
        (lambda: net(3, nn.Softmax(1)), "mse", X[:, :3]),
        (lambda: net(1), "bce_with_logits", BITS),
        (lambda: net(1), pairs, BITS),
        (lambda: net(1), contrasted, BITS),
        (lambda: net(1), reshaped, BITS),
        (lambda: net(1), lambda p, t: squares(p[:, 0], t), BITS),
        (lambda: net(3), lambda p, t: functional.cross_entropy(p.softmax(1), t), CLASSES),
    ],
)
def test_what_may_be_meant_is_not_told(module, loss, target):
    """A wrong alarm would teach to overlook the right ones."""
    assert warned(module(), loss, target) == []


class Clamped(nn.Module):
    """Logarithms of probabilities, written out."""

    def forward(self, x):
        return torch.log(x + 1e-6)


class Two(nn.Module):
    """Two outputs by name."""

    def __init__(self):
        super().__init__()
        self.kind, self.size = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        return {"kind": self.kind(x).softmax(1), "size": self.size(x)}


def test_of_several_losses_it_is_told_of_the_one():
    """By its name, and of losses that take their arguments by name."""
    target = {"kind": CLASSES, "size": BITS[:, None]}
    (text,) = warned(Two(), {"kind": "cross_entropy", "size": "mse"}, target)
    assert text.startswith("loss 'cross_entropy' takes logits")
    call = ipufit.losses.Call(nn.CrossEntropyLoss(), input="output", target="target")
    (text,) = warned(net(3, nn.Softmax(1)), call, CLASSES)
    assert text.startswith("loss 'CrossEntropyLoss' takes logits")


def test_check_reports_it_too():
    """Before anything is trained; without a loss there is none to doubt."""
    model = ipufit.Model(net(3, nn.Softmax(1)))
    assert not model.check(X)
    model.compile("sgd", "cross_entropy")
    (finding,) = model.check((X, CLASSES)).findings
    assert (finding.kind, finding.severity) == ("loss", "warning")
    assert finding.cure == f"Remove it from the module; {LOGITS}"


def test_evaluation_alone_tells_nothing():
    """There is nothing to learn."""
    model = ipufit.Model(net(3, nn.Softmax(1)))
    assert set(model.evaluate(X, CLASSES, loss="cross_entropy", verbose=0)) == {"loss"}
