"""Losses that take their arguments by name, of outputs and batch, against plain loops."""

import copy
import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipufit
from ipufit.errors import DataError, DeviceError, LossError
from ipufit.losses import Call
from tests.engines import EAGER_OR_NOT, but, embedded_only
from tests.fitting import assert_close, skipping_refusals
from tests.told import message

reads_variances = embedded_only("PopTorch's recording meets the look for negative variances")

# Rounding in another order, in float64.
TOLERANCE = 1e-12
# A tail in the micro-batch and in the update.
SAMPLES, MB, GA = 18, 4, 2
RATE = 1e-3
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(SAMPLES, *shape, generator=GENERATOR, dtype=torch.float64)


def whole(low, high, *shape):
    return torch.randint(low, high, (SAMPLES, *shape), generator=GENERATOR)


FIELDS = {
    "x": normal(6, 4),
    "other": normal(6, 4),
    "third": normal(6, 4),
    "y": whole(1, 5, 3),
    "value": normal(6, 5),
    "sign": whole(0, 2).mul(2).sub(1).double(),
    "input_lengths": whole(3, 7),
    "target_lengths": whole(1, 4),
    "mask": whole(0, 2, 6).double(),
    "file": [f"{index}.png" for index in range(SAMPLES)],
}


class Net(nn.Module):
    """Several outputs of one input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(4, 5).double()

    def forward(self, x):
        scores = self.head(x)
        return {"scores": scores, "logits": scores.log_softmax(-1), "var": scores.exp()}


class Likely(Net):
    """The form of CTC: time comes first."""

    def forward(self, x):
        return {"likely": self.head(x).log_softmax(-1).transpose(0, 1)}


class Embedded(Net):
    """One output for each input."""

    def forward(self, x, other, third):
        names = {"anchor": x, "positive": other, "negative": third}
        return {name: self.head(value).mean(1) for name, value in names.items()}


class One(Net):
    """One tensor."""

    def forward(self, x):
        return self.head(x)


def masked(output, value, mask):
    """One value per sample."""
    return ((output - value).square().mean(-1) * mask).sum(1) / 6


CTC = {"log_probs": "likely", "targets": "y"}
PAIR = {"input1": "anchor", "input2": "positive"}
INPUTS = ["x", "other", "third"]
# A module, the loss, the inputs, and the loss by hand of outputs and batch.
LOSSES = {
    "ctc": (
        Likely,
        lambda **kind: Call(nn.CTCLoss(**kind), **CTC),
        ["x"],
        lambda out, b, **kind: F.ctc_loss(
            out["likely"], b["y"], b["input_lengths"], b["target_lengths"], **kind
        ),
    ),
    "triplet": (
        Embedded,
        lambda **kind: nn.TripletMarginLoss(margin=0.5, **kind),
        INPUTS,
        lambda out, b, **kind: F.triplet_margin_loss(*out.values(), margin=0.5, **kind),
    ),
    "ranking": (
        Embedded,
        lambda **kind: Call(nn.MarginRankingLoss(0.1, **kind), target="sign5", **PAIR),
        INPUTS,
        lambda out, b, **kind: F.margin_ranking_loss(
            out["anchor"], out["positive"], b["sign5"], 0.1, **kind
        ),
    ),
    "cosine": (
        Embedded,
        lambda **kind: Call(nn.CosineEmbeddingLoss(**kind), target="sign", **PAIR),
        INPUTS,
        lambda out, b, **kind: F.cosine_embedding_loss(
            out["anchor"], out["positive"], b["sign"], **kind
        ),
    ),
    "gaussian": (
        Net,
        lambda **kind: Call(nn.GaussianNLLLoss(**kind), input="scores", target="value"),
        ["x"],
        lambda out, b, **kind: F.gaussian_nll_loss(out["scores"], b["value"], out["var"], **kind),
    ),
    "pair": (
        Net,
        lambda **kind: Call(nn.HuberLoss(**kind), target="value", input="scores"),
        ["x"],
        lambda out, b, **kind: F.huber_loss(out["scores"], b["value"], **kind),
    ),
    "function": (
        One,
        lambda **kind: masked,
        ["x"],
        lambda out, b, **kind: masked(out, b["value"], b["mask"]).mean(),
    ),
}
FIELDS["sign5"] = FIELDS["sign"][:, None].expand(-1, 5)


def batches(names=(), **more):
    fields = {**FIELDS, **more}
    fields = {name: fields[name] for name in names} if names else fields
    return [{k: v[i : i + MB] for k, v in fields.items()} for i in range(0, SAMPLES, MB)]


def plain_loop(net, inputs, loss, data, epochs=2, summed=False):
    """The weights after a loop written by hand, and the mean loss of each epoch."""
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    means = []
    for _ in range(epochs):
        total = 0.0
        for first in range(0, len(data), GA):
            update = data[first : first + GA]
            samples = sum(len(batch["x"]) for batch in update)
            for batch in update:
                value = loss(net(*(batch[name] for name in inputs)), batch)
                # A sum has the scale of a full micro-batch, also in a smaller one.
                count = MB if summed else len(batch["x"])
                (value * count / samples).backward()
                total += value.item() * count
            optimizer.step()
            optimizer.zero_grad()
        means.append(total / SAMPLES)
    return means


def compiled(net, loss, **options):
    model = ipufit.Model(net)
    with skipping_refusals():
        model.compile(lambda p: torch.optim.SGD(p, RATE), loss, **options)
    return model


def fit(model, data, epochs=2, **options):
    with skipping_refusals():
        history = model.fit(
            data, epochs=epochs, gradient_accumulation=GA, seed=0, verbose=0, **options
        )
    return history.history["loss"]


@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", but(LOSSES, gaussian=reads_variances))
def test_a_loss_by_name_trains_as_in_a_plain_loop(name, reduction, run_eagerly):
    """With tails, for means and sums; a validation has the numbers of the epoch's end."""
    net, loss, inputs, by_hand = LOSSES[name]
    summed = reduction == "sum" and name != "function"
    kind = {"reduction": reduction}
    other = net()
    expected = plain_loop(
        other, inputs, functools.partial(by_hand, **kind), batches(), summed=summed
    )
    model = compiled(net(), loss(**kind), inputs=inputs, run_eagerly=run_eagerly)
    losses = fit(model, batches(), device_iterations=2, validation_data=batches())
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert_close(model.module, other, TOLERANCE)
    with torch.no_grad():
        values = [by_hand(other(*(b[n] for n in inputs)), b, **kind) for b in batches()]
    counts = [MB if summed else len(b["x"]) for b in batches()]
    mean = sum(v.item() * count for v, count in zip(values, counts)) / SAMPLES
    assert model.history.history["val_loss"][-1] == pytest.approx(mean, rel=1e-10)
    assert model.evaluate(batches(), verbose=0)["loss"] == pytest.approx(mean, rel=1e-10)


@embedded_only("PopTorch has no value of CTC for each sample")
@pytest.mark.parametrize("name", ["ctc", "triplet", "ranking", "gaussian", "pair", "function"])
def test_weights_of_samples_weigh_the_values_before_the_mean(name):
    """CTC's are divided by the lengths of their targets first, as in its mean."""
    net, loss, inputs, by_hand = LOSSES[name]
    weights = torch.linspace(0, 2, SAMPLES, dtype=torch.float64)

    def weighted(out, batch):
        if name == "function":
            return (masked(out, batch["value"], batch["mask"]) * batch["sample_weight"]).mean()
        values = by_hand(out, batch, reduction="none")
        if name == "ctc":
            values = values / batch["target_lengths"]
        return (values.reshape(len(batch["x"]), -1).mean(1) * batch["sample_weight"]).mean()

    data = batches(sample_weight=weights)
    other = net()
    expected = plain_loop(other, inputs, weighted, data)
    model = compiled(net(), loss(), inputs=inputs)
    assert fit(model, data) == pytest.approx(expected, rel=TOLERANCE)
    assert_close(model.module, other, TOLERANCE)


class Named(NamedTuple):
    """Outputs as fields of a named tuple."""

    mean: torch.Tensor
    spread: torch.Tensor


@dataclasses.dataclass
class Data:
    """Outputs as fields of a dataclass."""

    mean: torch.Tensor
    spread: torch.Tensor


class Attributes:
    """Outputs as attributes."""

    def __init__(self, mean, spread):
        self.mean, self.spread = mean, spread


@reads_variances
@pytest.mark.parametrize("form", [dict, Named, Data, tuple, Attributes])
def test_outputs_of_every_form_have_names(form):
    class Two(Net):
        def forward(self, x):
            mean, spread = self.head(x), self.head(x).exp()
            return (mean, spread) if form is tuple else form(mean=mean, spread=spread)

    mean, spread = ("output_0", "output_1") if form is tuple else ("mean", "spread")
    loss = Call(nn.GaussianNLLLoss(), input=mean, var=spread)
    model = compiled(Two(), loss, targets="value")
    expected = F.gaussian_nll_loss((out := One()(FIELDS["x"])), FIELDS["value"], out.exp())
    value = model.evaluate(batches(), verbose=0)["loss"]
    assert value == pytest.approx(expected.item(), rel=TOLERANCE)


def test_pairs_have_names_too():
    """The target of (inputs, target) is called so, and inputs as forward's parameters."""

    def loss(output, labels, x, *, weight):
        return (F.mse_loss(output, labels, reduction="none") * weight).mean() + x.mean()

    class Weighed(One):
        def forward(self, x, weight):
            return self.head(x)

    pairs = [((b["x"], b["mask"][..., None]), b["value"]) for b in batches()]
    dicts = [({"x": x, "weight": weight}, target) for (x, weight), target in pairs]
    expected = compiled(Weighed(), lambda out, t: ((out - t[0]).square() * t[1]).mean() + t[2])
    packed = [(inputs, (target, inputs[1], inputs[0].mean((1, 2)))) for inputs, target in pairs]

    def by_hand(out, target):
        values, weight, mean = target
        return ((out - values).square() * weight).mean() + mean.mean()

    expected = fit(compiled(Weighed(), by_hand), packed)
    for data in (pairs, dicts):
        assert fit(compiled(Weighed(), loss), data) == pytest.approx(expected, rel=TOLERANCE)


def test_metrics_get_the_target_of_the_loss():
    """By name and of one's own; fields that the loss takes are there for them too."""

    def share(prediction, target, mask):
        assert prediction.shape == target.shape
        return mask

    def first(output, value, mask):
        return masked(output, value, mask)

    model = compiled(One(), first, targets="value", metrics=["mae", share])
    values = model.evaluate(batches(), verbose=0)
    mae = (One()(FIELDS["x"]) - FIELDS["value"]).abs().mean().item()
    assert values["mae"] == pytest.approx(mae, rel=1e-6)
    assert values["share"] == pytest.approx(FIELDS["mask"].mean().item())
    # The name of the parameter says it as well.
    model = compiled(One(), Call(nn.HuberLoss(), target="value"), metrics=["mae"])
    assert (
        model.evaluate(batches(["x", "value", "file", "mask"]), verbose=0)["mae"] == values["mae"]
    )


@pytest.mark.parametrize("form", ["fields", "names", "pairs"])
def test_a_loss_by_name_is_one_of_several(form):
    """As CTC beside a classifier; each has its own targets, whatever form the batch has."""

    class Both(Likely):
        def forward(self, x, mask):
            likely = super().forward(x)["likely"]
            return {"likely": likely, "digit": self.head(x).mean(1), "mask": mask}

    digits = FIELDS["y"][:, 0]
    data = batches(["x", "mask", "y", "input_lengths", "target_lengths", "file"], y=FIELDS["y"])
    for batch, digit in zip(data, digits.split(MB)):
        batch["digit"] = digit
    losses = {"ctc": Call(nn.CTCLoss(), **CTC), "digit": "cross_entropy"}
    options = {"targets": ["digit"]} if form == "names" else {}

    def by_hand(out, batch):
        lengths = batch["input_lengths"], batch["target_lengths"]
        ctc = F.ctc_loss(out["likely"], batch["y"], *lengths)
        return 0.5 * ctc + F.cross_entropy(out["digit"], batch["digit"])

    other = Both()
    expected = plain_loop(other, ["x", "mask"], by_hand, data)
    if form == "pairs":
        targets = ("y", "digit", "input_lengths", "target_lengths")
        data = [
            ({"x": batch["x"], "mask": batch["mask"]}, {name: batch[name] for name in targets})
            for batch in data
        ]
    weights = {"ctc": 0.5, "digit": 1.0}
    metrics = {"digit": ["accuracy"]}
    model = compiled(Both(), losses, loss_weights=weights, metrics=metrics, **options)
    assert fit(model, data) == pytest.approx(expected, rel=TOLERANCE)
    assert_close(model.module, other, TOLERANCE)
    assert {"ctc_loss", "digit_loss", "digit_accuracy"} <= set(model.history.history)


def test_labels_that_are_no_class_are_named():
    """As with the loss by itself."""
    model = compiled(One(), Call(nn.CrossEntropyLoss(), target="classes", input="output"))
    good = {"x": FIELDS["x"][:4, 0], "classes": torch.tensor([0, 1, 2, 3])}
    assert model.fit([good], verbose=0).epoch == [0]
    bad = {**good, "classes": torch.tensor([0, 1, 2, 7])}
    with pytest.raises(DataError, match=r"training data, batch 0: .*7"):
        model.fit([bad], verbose=0)


def test_what_a_loss_does_not_take_stays_beside_the_program():
    seen = []
    note = ipufit.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.extend(note.model.extras)
    )
    net, loss, inputs, _ = LOSSES["ctc"]
    model = compiled(net(), loss(), inputs=inputs)
    fit(model, batches(), epochs=1, callbacks=note)
    assert [file for extras in seen for file in extras["file"]] == FIELDS["file"]


def test_a_loss_of_one_output_alone_needs_no_target():
    model = compiled(One(), Call(lambda output: output.square().mean((1, 2)), output="output"))
    other = One()
    data = batches(["x", "file"])
    expected = plain_loop(other, ["x"], lambda out, b: out.square().mean(), data)
    assert fit(model, data) == pytest.approx(expected, rel=TOLERANCE)
    assert_close(model.module, other, TOLERANCE)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.both_engines
def test_what_poptorch_has_no_operator_for_is_refused_by_name():
    """On IPUs CTC has a mean and a sum, and nothing that weights of samples could weigh."""
    net, loss, inputs, _ = LOSSES["ctc"]
    model = ipufit.Model(net().float(), engine="ipu-standin")
    model.compile("sgd", loss(), inputs=inputs)
    data = {"x": FIELDS["x"].float()}
    names = ["x", "y", "input_lengths", "target_lengths"]
    with pytest.raises(DeviceError) as caught:
        model.fit(batches(sample_weight=torch.ones(SAMPLES), **data), verbose=0)
    assert 'CTCLoss with reduction="none" is currently not supported' in str(caught.value)
    assert model.fit(batches(names, **data), verbose=0).epoch == [0]


@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize(
    ("net", "loss", "text"),
    [
        (
            One,
            nn.CTCLoss(),
            "loss 'CTCLoss' takes 'input_lengths' by the name 'input_lengths', but the module's "
            "outputs are 'output' and the fields of the batch 'target', 'x', 'mask', 'value'. Name "
            "one of these, ipufit.losses.Call(loss, input_lengths='...'), or yield a dict with a "
            "field 'input_lengths'.",
        ),
        (
            Net,
            Call(nn.GaussianNLLLoss(), var="variance", input="scores"),
            "loss 'GaussianNLLLoss' takes 'var' by the name 'variance', but the module's outputs "
            "are 'scores', 'logits', 'var' and the fields of the batch 'target', 'x', 'mask', "
            "'value'. Name one of these, ipufit.losses.Call(loss, var='...'), or yield a dict with "
            "a field 'variance'.",
        ),
        (
            Net,
            nn.GaussianNLLLoss(),
            "loss 'GaussianNLLLoss' takes 'input' by the name 'input', but the module's outputs "
            "are 'scores', 'logits', 'var' and the fields of the batch 'target', 'x', 'mask', "
            "'value'. Name one of these, ipufit.losses.Call(loss, input='...'), or yield a dict "
            "with a field 'input'.",
        ),
        (
            One,
            Call(nn.TripletMarginLoss(), anchor="x", positive="value", negative="mask"),
            "loss 'TripletMarginLoss' must take an output of the module, but it takes 'anchor', "
            "'positive', 'negative' from the batch, and the outputs are 'output'. Name one: "
            "ipufit.losses.Call(loss, anchor='output').",
        ),
    ],
    ids=["field", "name", "several outputs", "no output"],
)
def test_names_that_match_nothing_are_refused_before_any_work(net, loss, text, run_eagerly):
    model = compiled(net(), loss, targets="value", run_eagerly=run_eagerly)
    before = copy.deepcopy(model.module)
    for method in (model.fit, model.evaluate):
        assert message(method, batches(["x", "mask", "value"]), verbose=0, kind=LossError) == text
    assert_close(model.module, before, 0)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            Call(nn.CTCLoss(), logits="y"),
            "loss 'CTCLoss' takes log_probs, targets, input_lengths, target_lengths, got 'logits'. "
            "Write ipufit.losses.Call(loss, parameter='name of an output or a field') with these.",
        ),
        (
            Call(nn.CTCLoss(), targets=3),
            "ipufit.losses.Call takes the name of an output or of a batch field for 'targets' of "
            "loss 'CTCLoss', got 3. For a constant, pass functools.partial(loss, ...).",
        ),
        (
            Call(torch.ctc_loss, targets="y"),
            "the arguments of loss 'ctc_loss' are matched by parameter names, but Python can't "
            "read its signature. Pass a function that calls it.",
        ),
        (
            ["mse", nn.CTCLoss()],
            "losses in a list are called with (prediction, target), got 'CTCLoss' for 'output_1', "
            "which takes its arguments by name. Pass a dict of losses: its keys are the names in "
            "the logs.",
        ),
    ],
)
def test_what_no_loss_can_be_called_with_is_refused_by_compile(loss, text):
    assert message(compiled, Net(), loss, kind=LossError) == text
