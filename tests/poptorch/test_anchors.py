"""Tensors of a program by name: which names there are, and what they hold."""

import pytest
import torch
from torch import nn

from ipufit import poptorch


class Scaled(nn.Module):
    """A product with a weight, and half its square as loss."""

    def __init__(self, weight=3.0, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=dtype))

    def forward(self, x):
        y = x * self.weight
        return y, poptorch.identity_loss(y * y / 2, reduction="sum")


def training(optimizer=None, automatic=False, model=None, **anchors):
    """A training model with anchors by short name."""
    options = poptorch.Options()
    options.Training.setAutomaticLossScaling(automatic)
    for short, name in anchors.items():
        options.anchorTensor(short, name)
    model = model or Scaled()
    make = optimizer or (lambda p: poptorch.optim.SGD(p, lr=0.5))
    return poptorch.trainingModel(model, options, make(model.parameters()))


def test_names_of_inputs_weights_gradients_and_settings_can_be_asked_for():
    model = training()
    model.compile(torch.ones(1))
    names = model.getTensorNames()
    assert [name for name in names if ":" not in name] == [
        "input",
        "weight",
        "loss",
        "Gradient___weight",
        "UpdatedVar___weight",
        "scaledLearningRate0___specific___weight",
        "weightDecayScaleFactor0___specific___weight",
    ]


def test_an_anchor_holds_what_its_name_says():
    rate = "scaledLearningRate0___specific___weight"
    model = training(g="Gradient___weight", new="UpdatedVar___weight", loss="loss", rate=rate)
    model(torch.tensor([2.0]))
    found = {name: model.getAnchoredTensor(name).tolist() for name in ("g", "new", "loss", "rate")}
    assert found == {"g": [12.0], "new": [-3.0], "loss": 18.0, "rate": 0.5}


def test_the_final_loss_scale_is_the_factor_by_the_optimizers_scaling():
    """Of the update that the call makes, not of the next one."""
    model = training(
        lambda p: poptorch.optim.Adam(p, lr=0.0, loss_scaling=4.0),
        automatic=True,
        model=Scaled(0.5, torch.float16),
        scale="finalLossScale",
        factor="lossScaleUpdateFactor",
    )
    x = torch.ones(1, dtype=torch.float16)
    seen = []
    for _ in range(3):
        model(x)
        names = ("scale", "factor")
        seen.append(tuple(model.getAnchoredTensor(name).item() for name in names))
    assert seen == [(4.0, 1.0), (8.0, 2.0), (16.0, 4.0)]


def test_an_unknown_name_is_refused_when_compiling_and_leaves_no_program():
    model = training(oops="Accl___weight")
    with pytest.raises(poptorch.Error) as failure:
        model.compile(torch.ones(1))
    assert failure.value.message == (
        "no tensor of the program is called 'Accl___weight'. This engine knows those that "
        "getTensorNames() lists, where operators have torch's names, not PopART's."
    )
    assert not model.isCompiled()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((poptorch.OutputMode.All, 3), "ALL/1"),
        ((poptorch.OutputMode.EveryN, 4), "EVERYN/4"),
        ((poptorch.OutputMode.Final,), "FINAL/1"),
        ((poptorch.OutputMode.Sum,), "Sum/1"),
        ((), "FINAL/1"),
    ],
)
def test_the_log_says_which_mode_an_anchor_was_given(caplog, asked, said):
    """As PopTorch's does, although what comes back follows the model's own mode, there as here."""
    options = poptorch.Options()
    options.anchorTensor("g", "Gradient___weight", *asked)
    model = poptorch.trainingModel(Scaled(), options)
    with caplog.at_level("DEBUG", poptorch.logger.name):
        model.compile(torch.ones(1))
    assert f"Anchored tensor Gradient___weight {said}" in caplog.messages


class Deep(nn.Module):
    """Layers within layers, a scope of its own, and a value that is overwritten."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x):
        with poptorch.NameScope("own"):
            y = self.body(x).exp()
        y.add_(1)
        z = y.exp()
        return poptorch.identity_loss(z.sum(), reduction="sum")


def inner(model):
    return [name for name in model.getTensorNames() if ":" in name]


def test_what_lies_between_operators_is_named_after_them_and_their_modules():
    model = poptorch.trainingModel(Deep())
    model.compile(torch.ones(1, 2))
    names = inner(model)
    wanted = ["own/body/0/addmm:0", "own/body/1/tanh:0", "own/exp:0", "add_:0", "exp:0", "sum:0"]
    assert [name for name in names if name in wanted] == wanted
    options = poptorch.Options().disableModuleNamescope()
    model = poptorch.inferenceModel(nn.Sequential(nn.Tanh(), nn.Tanh()), options)
    model.compile(torch.ones(1, 2))
    assert inner(model) == ["tanh:0", "tanh:0/1"]


@pytest.mark.parametrize("training", [True, False])
def test_what_lies_between_operators_can_be_anchored(training, tmp_path):
    """As it was made, whatever is written into it later; of every micro-batch that comes back."""
    torch.manual_seed(0)
    options = poptorch.Options().deviceIterations(2).outputMode(poptorch.OutputMode.All)
    for short, name in [("h", "own/body/1/tanh:0"), ("e", "own/exp:0"), ("w", "body.0.weight")]:
        options.anchorTensor(short, name)
    net, x = Deep(), torch.randn(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    if training:
        model = poptorch.trainingModel(net, options, optimizer)
    else:
        model = poptorch.inferenceModel(net, options)
    loss = model(x)
    hidden = torch.tanh(net.body[0](x)).detach()
    values = {"h": hidden, "e": hidden.exp()}
    for short, value in values.items():
        torch.testing.assert_close(model.getAnchoredTensor(short), value, rtol=1e-6, atol=1e-6)
    expected = (hidden.exp() + 1).exp().view(2, -1).sum(1)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    file = str(tmp_path / "model")
    model.save(file)
    again = poptorch.load(file)
    assert torch.equal(again(x), loss)
    assert torch.equal(again.getAnchoredTensor("e"), model.getAnchoredTensor("e"))


def test_what_a_body_of_a_loop_makes_is_the_loops_own():
    class Loop(nn.Module):
        def forward(self, x):
            return poptorch.for_loop(3, lambda y: [y.exp()], [x])[0].tanh()

    model = poptorch.inferenceModel(Loop())
    model.compile(torch.ones(2))
    assert not any("exp" in name for name in inner(model))
    assert "tanh:0" in inner(model)
