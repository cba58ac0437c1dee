"""``Model.check_invariance``: does it matter how the samples of an update are divided?"""

import json
import warnings

import pytest
import torch
from torch import nn

import ipufit
from ipufit.errors import ConfigurationError, DataError, NotCompiledError
from tests import nets
from tests.told import refused

SAMPLE = nets.data(12)


def around(layer, flat=True):
    """A net with a layer of some kind in the middle."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(12, 8) if flat else nn.Conv2d(1, 4, 2)
            self.middle = layer()
            self.head = nn.Linear(8 if flat else 24, 5)

        def forward(self, x):
            x = self.first(x.flatten(1) if flat else x)
            return self.head(torch.tanh(self.middle(x)).flatten(1))

    return Net


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Picky(nn.Module):
    def forward(self, x):
        raise ValueError


class Tries(nn.Module):
    """Takes the mean over the batch itself, after a layer that raises what it catches."""

    def __init__(self):
        super().__init__()
        self.picky = Picky()

    def forward(self, x):
        try:
            return self.picky(x)
        except ValueError:
            return x - x.mean(0)


class OwnCode(nn.Module):
    """Takes the mean over the batch itself, beside a layer that does so too."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(12, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.norm(self.first(x.flatten(1)))
        return self.head(x * x.amax(0).tanh())


class Rowwise(nn.Module):
    """A transformer whose rows lie along the second dimension."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.squeeze(1)).transpose(0, 1)).mean(0))


def contrastive(prediction, target):
    """Every sample against every other."""
    z = nn.functional.normalize(prediction, dim=1)
    return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))


class OwnLoss(nn.Module):
    """Returns a loss of its own."""

    def __init__(self, loss):
        super().__init__()
        self.net, self.loss = nets.MLP(), loss

    def forward(self, x, y):
        out = self.net(x)
        return out, self.loss(out, y)


def built(net, loss="cross_entropy", optimizer="adam", dtype=torch.float64, **options):
    """A compiled model."""
    torch.manual_seed(0)
    model = ipufit.Model(net().to(dtype), engine="embedded")
    model.compile(optimizer, loss, **options)
    return model


def causes(report):
    """Which module, and why."""
    return [(cause.module, cause.kind) for cause in report.causes]


def layer_norm():
    return nn.LayerNorm(8)


def instance_norm():
    return nn.InstanceNorm2d(4, affine=True)


def group_norm():
    return nn.GroupNorm(2, 4)


@pytest.mark.few("MLP", "Net2")
@pytest.mark.parametrize(
    "net",
    [
        nets.MLP,
        nets.Transformer,
        Rowwise,
        around(layer_norm),
        around(group_norm, flat=False),
        around(instance_norm, flat=False),
    ],
)
def test_what_computes_row_by_row_agrees(net):
    """To 1e-10 in float64: summation order is all that is left."""
    assert built(net).check_invariance(SAMPLE).ok
    # Adam would make a step of the rounding of a gradient that is zero.
    report = built(net, optimizer="sgd").check_invariance(SAMPLE)
    assert report.ok, str(report)
    assert report.causes == ()
    assert [s[:4] for s in map(_numbers, report.settings)] == [
        (12, 1, 1, 1),
        (12, 1, 1, 2),
        (6, 2, 1, 1),
        (6, 1, 2, 1),
        (3, 2, 2, 2),
    ]
    assert all(s.difference < 1e-10 and s.loss_difference < 1e-10 for s in report.settings)
    assert str(report).startswith(
        "4 updates of the same 12 samples, in float64, give the same weights.\n"
    )


def _numbers(s):
    return s.batch_size, s.gradient_accumulation, s.replicas, s.device_iterations


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (around(lambda: nn.BatchNorm1d(8)), [("middle", "batch")]),
        (around(Centred), [("middle", "batch")]),
        (around(Tries), [("middle", "batch")]),
        (OwnCode, [("norm", "batch"), ("", "batch")]),
        (around(lambda: nn.Dropout(0.5)), [("middle", "random")]),
        (nets.CNN, [("norm", "batch"), ("drop", "random")]),
        (nets.Noise, [("", "random")]),
    ],
)
def test_the_module_that_breaks_it_is_named(net, expected):
    """And no other: what it spreads to is innocent."""
    report = built(net).check_invariance(SAMPLE)
    assert not report.ok
    assert causes(report) == expected
    assert [s.ok for s in report.settings] == [True, True, False, False, False]


def mean_of(prediction, target):
    return nn.functional.cross_entropy(prediction, target)


def own_contrastive():
    return OwnLoss(contrastive)


def own_mean():
    return OwnLoss(mean_of)


def ignoring(prediction, target):
    return nn.functional.cross_entropy(prediction, target, ignore_index=0)


@pytest.mark.few(
    "MLP-options0-expected0",
    "own_contrastive-options1-expected1",
    "MLP-options3-expected3",
    "MLP-options5-expected5",
)
@pytest.mark.parametrize(
    ("net", "options", "expected"),
    [
        (nets.MLP, {"loss": contrastive}, [("loss", "loss")]),
        (own_contrastive, {"loss": None}, [("loss", "loss")]),
        (own_mean, {"loss": None}, []),
        (nets.MLP, {"loss": nn.CrossEntropyLoss(reduction="sum")}, [("loss", "sum")]),
        (
            nets.MLP,
            {
                "loss": nn.CrossEntropyLoss(reduction="sum"),
                "reduction": ipufit.Reduction(gradients="sum"),
            },
            [],
        ),
        (nets.MLP, {"reduction": ipufit.Reduction(gradients="sum")}, [("loss", "sum")]),
        (nets.MLP, {"loss": ignoring}, [("loss", "loss")]),
        (
            nets.MLP,
            {
                "loss": nn.CrossEntropyLoss(ignore_index=0),
                "reduction": ipufit.Reduction(normalize="tokens"),
            },
            [],
        ),
    ],
)
def test_losses_that_are_no_means_are_named(net, options, expected):
    """With what to do for each."""
    report = built(net, optimizer="sgd", **options).check_invariance(SAMPLE)
    assert causes(report) == expected, str(report)
    assert report.ok is not bool(expected)


@pytest.mark.long
def test_a_module_of_single_precision_is_computed_in_double():
    """So that a sign of rounding, which Adam makes a whole step of, is no cause."""
    x, y = SAMPLE
    model = built(nets.Transformer, dtype=torch.float32, precision="mixed_bfloat16")
    report = model.check_invariance((x.float(), y))
    assert report.ok, str(report)
    assert report.dtype == "float64"
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}


class Single(nn.Module):
    """Computes in float32 whatever its weights are."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)
        self.scale = torch.ones(12, 12)

    def forward(self, x):
        return self.head(x.flatten(1) @ self.scale)


def test_what_can_not_be_doubled_is_tried_as_it_is():
    """With the tolerance of its own dtype."""
    x, y = SAMPLE
    report = built(Single, dtype=torch.float32).check_invariance((x.float(), y))
    assert report.ok, str(report)
    assert report.dtype == "its own precision"


@pytest.mark.long
def test_nothing_of_the_model_changes():
    """Copies are trained."""
    model = built(nets.CNN)
    model.fit(*SAMPLE, batch_size=4, verbose=0)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    state = model.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    modes = [part.training for part in model.module.modules()]
    generator = torch.get_rng_state()
    updates = model._session.updates
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.check_invariance(SAMPLE)
    assert all(torch.equal(before[name], v) for name, v in model.module.state_dict().items())
    assert torch.equal(model.optimizer.state_dict()["state"][0]["exp_avg"], state)
    assert [part.training for part in model.module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)
    assert model._session.updates == updates
    assert not any(part._forward_hooks for part in model.module.modules())


@pytest.mark.few
@pytest.mark.parametrize(
    ("size", "ways"),
    [
        (2, [(2, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1)]),
        (9, [(9, 1, 1, 1), (9, 1, 1, 2), (3, 3, 1, 1)]),
        (27, [(27, 1, 1, 1), (27, 1, 1, 2), (9, 3, 1, 1), (3, 9, 1, 2)]),
        (8, [(8, 1, 1, 1), (8, 1, 1, 2), (4, 2, 1, 1), (4, 1, 2, 1), (2, 2, 2, 2)]),
    ],
)
def test_divisors_are_tried(size, ways):
    """As many micro-batches as the samples make."""
    report = built(nets.MLP).check_invariance(nets.data(size))
    assert [_numbers(s) for s in report.settings] == ways
    assert report.ok


@pytest.mark.long
def test_tolerances_are_the_users():
    """Nothing is exact in the last bit."""
    model = built(nets.MLP)
    assert not model.check_invariance(SAMPLE, rtol=0, atol=0).ok
    report = built(around(lambda: nn.BatchNorm1d(8))).check_invariance(SAMPLE, rtol=10.0)
    assert report.ok


def test_the_report_is_a_table_and_sentences():
    """For people, and as plain data for programs."""
    report = built(around(lambda: nn.BatchNorm1d(8))).check_invariance(SAMPLE)
    lines = str(report).splitlines()
    assert lines[0] == (
        "4 updates of the same 12 samples, in float64, depend on how they are divided."
    )
    assert lines[1].split() == (
        ["batch_size", "accumulation", "replicas", "iterations", "loss", "weights", "differ"]
    )
    assert lines[2].split()[:4] == ["12", "1", "1", "1"]
    assert lines[-1] == (
        "'middle' (BatchNorm1d) normalises with the statistics of each micro-batch. Use "
        "GroupNorm or LayerNorm, or keep the size of the micro-batch and change only "
        "device_iterations."
    )
    told = json.loads(json.dumps(report.as_dict()))
    assert told["ok"] is False
    assert told["causes"][0]["module"] == "middle"
    assert len(told["settings"]) == 5


class NoCopy(nets.MLP):
    def __deepcopy__(self, memo):
        raise TypeError("no")


def test_what_can_not_be_checked_is_refused():
    """Each with what to do."""
    refused(
        lambda: built(NoCopy).check_invariance(SAMPLE),
        "check_invariance trains copies of module, loss and optimizer, but NoCopy can't be copied: "
        "TypeError: no. Make copy.deepcopy work with it.",
    )
    with pytest.raises(DataError) as caught:
        built(nets.MLP).check_invariance(nets.data(1))
    assert str(caught.value) == (
        "check_invariance divides the samples of a batch, which needs at least 2, got 1. Pass a "
        "batch of 8 or 12."
    )
    with pytest.raises(ConfigurationError, match="rtol must be None or a number"):
        built(nets.MLP).check_invariance(SAMPLE, rtol="small")
    with pytest.raises(NotCompiledError):
        ipufit.Model(nets.MLP()).check_invariance(SAMPLE)


class Counts(nn.Module):
    """Divides by the number of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x / self.calls


def test_a_module_that_counts_its_calls_is_not_said_to_mix_rows():
    """The advice for rows would not help it; without the counter all agrees."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    reports = []
    for inner in (Counts(), nn.Identity()):
        model = ipufit.Model(nn.Sequential(nn.Linear(4, 3), inner))
        model.compile("sgd", "cross_entropy")
        reports.append(model.check_invariance((x, y)))
    assert not reports[0].ok
    (cause,) = reports[0].causes
    assert (cause.module, cause.kind) == ("1", "state")
    assert str(cause) == (
        "'1' (Counts) computes other values when it is called once more with the same rows. "
        "Something is kept from call to call, such as a counter: leave it out, or make it a buffer "
        "that counts samples. model.check(sample) names the line."
    )
    assert reports[1].ok
