"""A loss of an evaluation that is not finite: said once, with what made it and where."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.core.batch import Mode

X, Y = torch.linspace(0.5, 2.0, 96).reshape(24, 4), torch.ones(24, 1)


class Log(nn.Module):
    """Takes a logarithm in evaluation alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        if self.training:
            return self.layer(x)
        self.calls += 1
        return self.layer(x) + x[:, :1].log()


def compiled():
    torch.manual_seed(0)
    model = ipufit.Model(Log())
    model.compile("sgd", "mse")
    return model


def spoilt(row, value):
    """The inputs, with a number in one row that has no logarithm, or is none."""
    x = X.clone()
    x[row, 0] = value
    return x


def warned(call):
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(each.filename == __file__ for each in caught)  # it names the line that called
    return [str(each.message) for each in caught]


MADE = (
    "The forward pass made the first nan: aten.log.default of the module itself (Log), at "
    f"{__file__}:{Log.forward.__code__.co_firstlineno + 4}: "
    "`return self.layer(x) + x[:, :1].log()`, in batch 3. "
)


@pytest.mark.parametrize("iterations", [1, 2])
def test_evaluate_names_batch_line_and_row(iterations):
    """It is the batch of the whole data, also where an execution has several."""
    model = compiled()
    texts = warned(
        lambda: model.evaluate(
            spoilt(13, -1.0), Y, batch_size=4, device_iterations=iterations, verbose=0
        )
    )
    (text,) = texts
    assert text.startswith(
        "the loss must be finite for every batch of the evaluation data, but that of batch 3 is "
        f"nan, and so is the mean. {MADE}Its operands were (4 x 1): -1 to "
    )
    assert text.endswith(
        ". It is in sample 1 of the micro-batch. A logarithm needs positive numbers: clamp its "
        "input, for example x.clamp(min=1e-6).log(). In the order of epoch 1: 13; row of the data: "
        "13."
    )
    # Each call says it.
    assert len(warned(lambda: model.evaluate(spoilt(13, -1.0), Y, verbose=0))) == 1


def test_test_on_batch_names_line_and_row():
    """The only batch; each call says it, and one with a finite loss says nothing."""
    model, x = compiled(), spoilt(13, -1.0)[12:16]
    assert not warned(lambda: model.test_on_batch(X[:4], Y[:4]))
    for _ in range(2):
        (text,) = warned(lambda: model.test_on_batch(x, Y[12:16]))
        made = MADE.replace("batch 3", "batch 0")
        assert text.startswith(
            f"the loss of the batch must be finite, but it is nan. {made}Its operands were (4 x 1)"
        )
        assert text.endswith(
            ". It is in sample 1 of the micro-batch. A logarithm needs positive numbers: clamp its "
            "input, for example x.clamp(min=1e-6).log()."
        )
    assert not warned(lambda: model.predict_on_batch(x))


def test_fit_says_it_with_the_first_validation_alone():
    """Training goes on: its own loss is finite. The search changes nothing of it."""
    runs = []
    for x in (X, spoilt(13, -1.0)):
        model = compiled()
        texts = warned(
            lambda model=model, x=x: model.fit(
                X, Y, epochs=3, seed=0, validation_data=(x, Y), batch_size=4, verbose=0
            )
        )
        runs.append((model, texts))
    (one, none), (other, texts) = runs
    assert not none
    assert len(texts) == 1
    assert texts[0].startswith(
        "the loss must be finite for every batch of the validation data, but that of batch 3 is "
        f"nan, and so is the mean. {MADE}"
    )
    assert str(other.history.history["val_loss"]) == "[nan, nan, nan]"
    assert other.history.history["loss"] == one.history.history["loss"]
    for name, value in one.module.state_dict().items():
        assert torch.equal(value, other.module.state_dict()[name])


def test_nan_in_the_data():
    """The rows of a loader that draws no order are known, too."""
    loader = DataLoader(TensorDataset(spoilt(6, float("nan")), Y), batch_size=4)
    assert warned(lambda: compiled().evaluate(loader, verbose=0)) == [
        "the loss must be finite for every batch of the evaluation data, but that of batch 1 is "
        "nan, and so is the mean. The data was not finite: nan in batch 1, sample 2 of the "
        "micro-batch. Leave such samples out, or fill the missing values. In the order of epoch 1: "
        "6; row of the data: 6."
    ]


def test_nan_in_the_weights():
    """What has made them so is to be looked for in training."""
    model = compiled()
    with torch.no_grad():
        model.module.layer.weight[0, 1] = float("nan")
    assert warned(lambda: model.evaluate(X, Y, verbose=0)) == [
        "the loss must be finite for every batch of the evaluation data, but that of batch 0 is "
        "nan, and so is the mean. 'layer.weight' is not finite: with compile(detect_nan=True), fit "
        "says where that began."
    ]


def test_buffers_are_not_changed_by_the_search():
    """The module runs once more on copies."""
    counts = []
    for x in (X, spoilt(13, -1.0)):
        model = compiled()
        texts = warned(lambda model=model, x=x: model.evaluate(x, Y, batch_size=4, verbose=0))
        counts.append((model.module.calls.item(), len(texts)))
    (calls, none), other = counts
    assert none == 0
    assert other == (calls, 1)


def test_several_processes_have_no_number_for_a_batch():
    """Each has parts of the data, so what is said is what all know."""
    session = compiled()._session
    explainer = session.explainer(Mode.EVALUATE, "validation data")
    explainer.is_shared = True
    losses = torch.tensor([1.0, float("inf")])
    (text,) = warned(lambda: explainer.examine(losses, [], 0, lambda error: None))
    assert text == (
        "the loss must be finite for every batch of the validation data, but one is inf, and so is "
        "the mean. Look for a log or division of zero, or non-finite data or weights."
    )
