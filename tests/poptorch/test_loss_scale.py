"""Automatic loss scaling: which gradients it looks at, when it changes, and that it cancels out."""

import math

import pytest
import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch._loss_scale import AutomaticLossScale, ScalingSettings
from ipufit.poptorch._precision import keep_float64

SETTINGS = "automaticLossScalingSettings."


def followed(scale, counts):
    """The factor after each update, given how many large elements each one had."""
    factors = []
    for large in counts:
        scale.observe(torch.tensor(large))
        scale.update()
        factors.append(scale.factor)
    return factors


def test_the_scale_doubles_until_gradients_are_large():
    assert followed(AutomaticLossScale(elements=9), [0, 0, 1, 9, 0]) == [2.0, 4.0, 2.0, 1.0, 2.0]


def test_the_threshold_is_a_part_of_all_elements_seen():
    scale = AutomaticLossScale(ScalingSettings(threshold=0.25), elements=4)
    assert followed(scale, [1, 2]) == [2.0, 1.0]
    scale.observe(torch.tensor(2))
    scale.observe(torch.tensor(0))
    scale.update()
    assert scale.factor == 2.0


def test_the_first_update_of_every_period_is_looked_at():
    """As PopART's own numbers are: 1, 2, 2, 4, 4 for the second, third ... update of a period 2."""
    scale = AutomaticLossScale(ScalingSettings(period=2))
    assert followed(scale, [0, 1, 0, 1, 1, 0]) == [2.0, 2.0, 4.0, 4.0, 2.0, 2.0]
    assert followed(AutomaticLossScale(ScalingSettings.of(on(updatePeriod=0))), [0, 0]) == [2.0, 4]


def on(**settings):
    """The compiler's options with automatic loss scaling."""
    return {f"{SETTINGS}{name}": value for name, value in {"enabled": True, **settings}.items()}


class Fitted(nn.Module):
    """Half the square of what is left of a target: the weight's gradient is x * (w * x - t)."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=torch.float16))

    def forward(self, x, t):
        rest = x * self.weight - t
        return poptorch.identity_loss(rest * rest / 2, reduction="sum")


def train(model, calls, lr=0.0, options=None, **settings):
    """The factors that the calls were made with, and the one after them."""
    options = options or poptorch.Options()
    for name, value in on(**settings).items():
        options._Popart.set(name, value)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=lr, loss_scaling=1.0)
    training = poptorch.trainingModel(model, options, optimizer)
    factors = []
    for x, t in calls:
        training(torch.tensor(x).half(), torch.tensor(t).half())
        factors.append(optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"].item())
    training.destroy()
    return factors


@pytest.mark.long
def test_gradients_of_every_micro_batch_are_looked_at():
    """Their sum is zero, and each of them large."""
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    assert train(Fitted(), [([100.0, 100.0], [0.0, 200.0])], options=options) == [0.5]
    options = poptorch.Options().replicationFactor(2)
    assert train(Fitted(), [([100.0, 100.0], [0.0, 200.0])], options=options) == [0.5]


def test_gradients_within_the_program_are_looked_at():
    """The weight's own gradient is 4; that of the product, before it is multiplied by x, 8192."""
    x, t = 2.0**-11, -8192.0
    assert train(Fitted(0.0), [([x], [t])]) == [0.5]
    # Counted are products and convolutions alone, and there is none.
    with pytest.raises(poptorch.Error, match="No tracked gradient tensors"):
        train(Fitted(0.0), [([x], [t])], gradientTensorTrackingMethod=1)


@pytest.mark.long
@pytest.mark.skipif(
    torch.__version__.startswith("2.0"), reason="torch 2.0 has no half products on the CPU"
)
def test_products_alone_can_be_looked_at():
    """Whose gradient is 4 of what the loss has 8192 of."""
    layer = nn.Linear(1, 1, bias=False).half()
    with torch.no_grad():
        layer.weight.fill_(0.0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, t):
            return poptorch.identity_loss((self.layer(x) - t) ** 2 / 2, reduction="sum")

    calls = [([[2.0**-11]], [[-8192.0]])]
    assert train(Net(), calls) == [0.5]
    assert train(Net(), calls, gradientTensorTrackingMethod=1) == [2.0]


@pytest.mark.long
def test_where_an_element_is_large_can_be_chosen():
    """An eighth of 65504 is 8188, which counts as large itself."""
    call = [([1.0], [-8187.0])]  # the gradient is 1 + 8187
    assert train(Fitted(), call) == [0.5]
    assert train(Fitted(), call, binEdgeLocation=0.1251) == [2.0]
    assert train(Fitted(), [([1.0], [-99.0])], binEdgeLocation=100.0 / 65504.0) == [0.5]


@pytest.mark.long
def test_how_many_may_be_large_can_be_chosen():
    call = [([1.0, 1.0, 1.0, 1.0], [-9999.0, 0.0, 0.0, 0.0])]
    assert train(Fitted(), call) == [0.5]
    assert train(Fitted(), call, thresholdUpperCountProportion=0.5) == [2.0]


@pytest.mark.long
def test_how_often_it_changes_can_be_chosen():
    calls = [([1.0], [0.0])] * 4
    assert train(Fitted(), calls) == [2.0, 4.0, 8.0, 16.0]
    assert train(Fitted(), calls, updatePeriod=3) == [2.0, 2.0, 2.0, 4.0]


def test_what_is_no_number_counts_as_large():
    assert train(Fitted(), [([math.nan], [0.0]), ([math.inf], [0.0])]) == [0.5, 0.25]


class Wide(nn.Module):
    """Weights of one type, and a program that computes in half precision."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25, 2.0], dtype=dtype))

    def forward(self, x):
        rest = x * self.weight.half() - 1
        return poptorch.identity_loss((rest * rest).sum() / 2, reduction="none")


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_model_is_trained_as_without_it(dtype):
    """Factors are powers of two, so that nothing is rounded otherwise."""
    found = []
    for automatic in (False, True):
        model = Wide(dtype)
        options = poptorch.Options().deviceIterations(3)
        options.Training.gradientAccumulation(2).setAutomaticLossScaling(automatic)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        training = poptorch.trainingModel(model, options, optimizer)
        with keep_float64():
            training(torch.tensor([[1.0, 2.0, 0.5]] * 6).half())
        training.copyWeightsToHost()
        found.append(model.weight.detach().clone())
        training.destroy()
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert not torch.equal(found[0], Wide(dtype).weight)


def test_a_model_without_half_gradients_is_refused():
    model = poptorch.trainingModel(Fitted().float(), automatic())
    with pytest.raises(poptorch.Error) as failure:
        model.compile(torch.ones(1), torch.ones(1))
    assert failure.value.message == (
        "No tracked gradient tensors of type fp16 were found. Automatic loss scaling follows "
        "gradients of half precision: call model.half(), or leave "
        "Training.setAutomaticLossScaling off."
    )


def automatic(**settings):
    options = poptorch.Options()
    options.Training.setAutomaticLossScaling(True)
    for name, value in settings.items():
        options._Popart.set(SETTINGS + name, value)
    return options


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "binEdgeLocation",
            1.5,
            "Out of range value for 'binEdgeLocation'. The current value is 1.5, but it should be "
            "in the range [0, 1]. Set it with "
            'options._Popart.set("automaticLossScalingSettings.binEdgeLocation", value).',
        ),
        (
            "thresholdUpperCountProportion",
            -0.5,
            "Out of range value for 'thresholdUpperCountProportion'. The current value is -0.5, "
            "but it should be in the range [0, 1]. Set it with "
            'options._Popart.set("automaticLossScalingSettings.thresholdUpperCountProportion", '
            "value).",
        ),
        (
            "gradientTensorTrackingMethod",
            2,
            "gradientTensorTrackingMethod must be 0 (all gradients) or 1 (those of matrix products "
            "and convolutions), got 2: the tensors that 2 stands for can't be named through "
            "PopTorch. Leave it out for 0.",
        ),
    ],
)
def test_settings_that_the_compiler_refuses_are_refused_when_compiling(name, value, text):
    model = poptorch.trainingModel(Fitted(), automatic(**{name: value}))
    with pytest.raises(poptorch.Error) as failure:
        model.compile(torch.ones(1).half(), torch.ones(1).half())
    assert failure.value.message == text


def test_a_file_goes_on_and_is_refused_by_other_settings(tmp_path):
    file, x = str(tmp_path / "model"), torch.ones(1).half()
    model = poptorch.trainingModel(Fitted(), automatic())
    model.compileAndExport(file, x, 0 * x)
    model(x, 0 * x)
    model.save(file)
    again = poptorch.load(file)
    assert followed_by(again, x) == 4.0
    other = poptorch.trainingModel(Fitted(), automatic(binEdgeLocation=0.5))
    with pytest.raises(
        poptorch.Error, match=r"automatic loss scaling was .*edge=0\.125.*edge=0\.5"
    ):
        other.loadExecutable(file)


def followed_by(model, x):
    model(x, 0 * x)
    return model._optimizer.optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"].item()
