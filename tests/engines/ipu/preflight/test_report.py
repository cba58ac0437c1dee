"""What ``Model.preflight`` returns, and what it leaves alone."""

import copy
import inspect
import json
import re

import pytest
import torch
from torch import nn

import ipufit
from ipufit.engines.ipu.preflight import COMMIT
from ipufit.errors import ConfigurationError, DataError, NotCompiledError
from tests.engines.ipu.preflight.looked_at import report_of

pytestmark = pytest.mark.both_engines

X, Y = torch.zeros(2, 5, 4), torch.zeros(2, dtype=torch.int64)
HERE = __file__


class Tagger(nn.Module):
    """Of layers and calls that PopTorch does not have."""

    def __init__(self):
        super().__init__()
        self.read = nn.LSTM(4, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        seen, _ = self.read(x)
        best, _ = seen.topk(2, dim=1, sorted=False)
        return self.head(best.sum(1) + torch.special.erfcx(seen).sum(1))


def line_of(text):
    """The line of Tagger that holds a text."""
    lines, start = inspect.getsourcelines(Tagger)
    return start + next(number for number, line in enumerate(lines) if text in line)


def compiled(module, optimizer="sgd", **options):
    """A model."""
    model = ipufit.Model(module)
    model.compile(optimizer, "cross_entropy", **options)
    return model


def tagged():
    """The report that is pinned."""
    return compiled(Tagger(), clip=ipufit.Clip(norm=1.0)).preflight((X, Y))


@pytest.mark.long
def test_the_report_says_what_where_who_says_so_and_what_to_do():
    """It is read by somebody who then changes the model."""
    assert (
        str(tagged())
        == f"""\
Tagger for PopTorch 3.4: not ready (3 not supported, 1 unknown, 1 supported with limits), \
{tagged().operators} kinds of operators
From PopTorch's published source and documentation; not verified on an IPU.

not supported
  aten::topk sorted=False in the model itself
    at: {HERE}:{line_of(".topk(")}
    PopTorch: sorted=False is not supported
    source: docs/user_guide/supported_ops.rst, line 197
    cure: Leave sorted=False out: the k largest come sorted.
  LSTM(num_layers>1) in read
    at: {HERE}:{line_of("self.read(x)")}
    PopTorch: a recurrent layer has one layer
    source: docs/user_guide/supported_ops.rst, line 337; \
poptorch/source/popart_canonicalization/RNNOps.cpp, line 129
    cure: Write one module for each of its layers.
  Clip(norm=1)
    PopTorch: PopTorch bounds the norm of all gradients together only
    source: python/optim.py, line 229
    cure: Use Clip(global_norm=...)

unknown
  aten::special_erfcx in the model itself
    at: {HERE}:{line_of("erfcx")}
    PopTorch: nothing in the table says that PopTorch has it; a graph with an operator that it \
has no handler for is refused when it is compiled
    source: docs/user_guide/supported_ops.rst, line 8; \
poptorch/source/ErrorOnUnsupportedAten.cpp, line 30
    cure: Write it with operators that are in the table.

supported with limits
  an input of shape (2,) of int64
    PopTorch: it becomes int32: larger numbers don't fit
    source: poptorch/source/Utils.cpp, line 145; poptorch/source/PoplarExecutable.cpp, line 80"""
    )


@pytest.mark.long
def test_as_dict_is_the_whole_report_for_json():
    """A build that checks models reads it."""
    report = tagged()
    found = json.loads(json.dumps(report.as_dict()))
    assert found["ok"] is report.ok is False
    assert found["poptorch"] == {"version": "3.4", "commit": COMMIT}
    assert [len(found[kind]) for kind in ("unsupported", "unknown", "limited")] == [3, 1, 1]
    assert found["unsupported"][0] == {
        "what": "aten::topk sorted=False",
        "module": "",
        "file": HERE,
        "line": line_of(".topk("),
        "times": 1,
        "group": "operators",
        "key": "aten::topk sorted=False",
        "verdict": "not supported",
        "says": "sorted=False is not supported",
        "sources": [{"file": "docs/user_guide/supported_ops.rst", "line": 197}],
        "cure": "Leave sorted=False out: the k largest come sorted.",
    }


def test_what_is_met_several_times_in_one_place_is_told_once():
    """A loop over a hundred steps is one line of the user's."""
    (found,) = report_of(lambda t: [t.x.topk(2, sorted=False) for _ in range(3)]).unsupported
    assert found.times == 3
    assert str(found).startswith("aten::topk sorted=False in the model itself, 3 times\n")


@pytest.mark.parametrize(
    ("make", "loss", "text"),
    [
        (
            lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)),
            "cross_entropy",
            "loss 'cross_entropy' takes logits and applies a softmax itself, but the module's "
            "outputs already come from a softmax, so the model learns little. Remove it from the "
            "module; predict(x).softmax(1) turns logits into probabilities.",
        ),
        (
            lambda: nn.Linear(4, 1),
            lambda prediction, target: ((prediction - target) ** 2).mean(),
            "compares a prediction of shape (2, 1) with a target of shape (2,), which torch",
        ),
    ],
    ids=["softmax twice", "broadcast"],
)
def test_a_loss_that_teaches_little_is_reported_with_what_fit_warns_of(make, loss, text):
    """It is no word of PopTorch's, and runs there as it does anywhere."""
    model = ipufit.Model(make())
    model.compile("sgd", loss)
    report = model.preflight((X[:, 0], Y))
    (told,) = report.warnings
    assert text in told
    assert report.as_dict()["warnings"] == [told]
    assert str(report).endswith(f"\n\non every engine\n  {told}")
    assert report.ok
    with pytest.warns(UserWarning, match=f"^{re.escape(told)}$"):
        model.fit(X[:, 0], Y, verbose=0)


def test_unknown_is_not_ok():
    """Somebody who compiles for hours on a yes must have been told a yes."""
    report = report_of(lambda t: torch.special.erfcx(t.x))
    assert [finding.what for finding in report.unknown] == ["aten::special_erfcx"]
    assert not report.unsupported
    assert not report.ok


def test_a_recording_that_ends_early_says_what_was_not_looked_at():
    """What follows a branch on a value may be worse."""
    report = report_of(lambda t: t.x.tril() if t.x.sum() > 0 else t.x)
    assert [finding.fact.key for finding in report.unsupported] == ["a value in Python"]
    assert report.unsupported[0].line is not None
    assert report.stopped is not None
    assert "Operators after this were not checked: Python branched on a tensor's value" in str(
        report
    )


def test_what_ipufit_can_not_record_is_unknown():
    """It is no word of PopTorch's."""

    class Rebinds(nn.Linear):
        def forward(self, x):
            self.weight = nn.Parameter(self.weight * 2)
            return super().forward(x)

    report = compiled(Rebinds(4, 3)).preflight((X[:, 0], Y))
    assert [finding.what for finding in report.unknown] == ["what can't be recorded"]
    assert "weight" in report.unknown[0].cure
    assert not report.ok


class Encoder(nn.Module):
    """A small transformer with a causal mask."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        mask = torch.triu(torch.ones(5, 5), diagonal=1).bool()
        return self.head(self.body(x, mask=mask).mean(1))


class Reader(nn.Module):
    """A recurrent net."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.read = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.read(self.embed(x))[0][:, -1])


def pictures():
    """A small CNN."""
    parts = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


CLEAN = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), X[:, 0]),
    "cnn": (pictures, torch.zeros(2, 3, 8, 8)),
    "transformer": (Encoder, X),
    "gru": (Reader, torch.zeros(2, 5, dtype=torch.int64)),
}


@pytest.mark.few("mlp-sgd", "transformer-sgd")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", list(CLEAN))
def test_a_model_of_what_poptorch_has_is_ok(name, optimizer):
    """These are the models that people bring."""
    make, x = CLEAN[name]
    report = compiled(make(), optimizer).preflight((x, Y))
    assert report.ok, str(report)
    assert report.operators > 3


@pytest.mark.few
@pytest.mark.parametrize("name", list(CLEAN))
def test_a_model_that_only_predicts_is_looked_at_in_eval_mode(name):
    """Torch has short cuts there that PopTorch's device does not take."""
    make, x = CLEAN[name]
    model = ipufit.Model(make())
    model.compile(None, "cross_entropy")
    report = model.preflight({"x": x} if name == "transformer" else x)
    assert report.ok, str(report)


@pytest.mark.long
def test_nothing_is_changed():
    """It is a look."""
    model = compiled(pictures())
    before = copy.deepcopy(model.module.state_dict())
    state = torch.get_rng_state()
    model.preflight((torch.zeros(2, 3, 8, 8), Y))
    assert torch.equal(state, torch.get_rng_state())
    after = model.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert model.module.training
    model.fit(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64), batch_size=2, verbose=0)
    assert str(model.preflight()) == str(model.preflight((torch.zeros(2, 3, 8, 8), Y)))


def test_the_modules_of_the_loss_have_its_name():
    """A finding in the loss must not be looked for in the model."""

    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(3, elementwise_affine=False)

        def forward(self, prediction, target):
            return nn.functional.cross_entropy(self.norm(prediction), target)

    model = ipufit.Model(nn.Linear(4, 3))
    model.compile("sgd", Weighed())
    (found,) = model.preflight((X[:, 0], Y)).unsupported
    assert (found.what, found.module) == ("LayerNorm(elementwise_affine=False)", "loss.norm")


def test_what_a_loss_function_computes_is_in_the_loss():
    """It is no part of the model either."""
    model = ipufit.Model(nn.Linear(4, 3))
    model.compile("sgd", lambda prediction, target: torch.special.erfcx(prediction).mean())
    (found,) = model.preflight((X[:, 0], Y)).unknown
    assert (found.what, found.module) == ("aten::special_erfcx", "loss")


def test_a_loss_that_was_not_looked_at_is_unknown():
    """A yes without the loss would be half a yes."""
    report = compiled(nn.Linear(4, 3)).preflight(X[:, 0])
    assert [finding.what for finding in report.unknown] == ["a loss without a target"]
    assert not report.ok


def test_a_module_that_raised_and_was_caught_is_not_blamed_for_what_follows():
    """Findings name the module to change."""

    class Picky(nn.Module):
        def forward(self, x):
            raise ValueError

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.picky, self.head = Picky(), nn.Linear(4, 3)

        def forward(self, x):
            try:
                return self.picky(x)
            except ValueError:
                return torch.special.erfcx(self.head(x))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Tries()

        def forward(self, x):
            return torch.special.erfcx(self.inner(x))

    found = compiled(Outer()).preflight((X[:, 0], Y)).unknown
    assert found[-1].module == ""


def test_preflight_needs_a_compiled_model_and_a_batch():
    """Each is said before any work."""
    model = ipufit.Model(nn.Linear(4, 3))
    with pytest.raises(NotCompiledError, match="preflight needs a compiled model"):
        model.preflight(X)
    model.compile("sgd", "cross_entropy")
    with pytest.raises(ConfigurationError) as nothing:
        model.preflight()
    assert str(nothing.value) == (
        "preflight needs a batch, preflight((inputs, target)), or an earlier fit; got neither."
    )
    with pytest.raises(DataError, match=r"^preflight: the module, Linear\(.*, needs 4 features"):
        model.preflight((torch.zeros(2, 5), Y))


class Scaled(nn.Module):
    """Makes a constant of Python numbers in every call."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x * torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_a_tensor_of_python_numbers_is_a_constant():
    """Below autograd torch took it for one that it may not change."""
    assert compiled(Scaled()).preflight((X[:, 0], Y)).ok
