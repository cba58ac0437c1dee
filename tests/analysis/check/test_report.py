"""What a check says, what it leaves alone, and what it refuses."""

import copy
import itertools
import json
import linecache
import random
import signal
import sys
from typing import Callable, Dict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit import poptorch
from ipufit.analysis.check import CheckReport, Finding
from ipufit.errors import ConfigurationError, DataError
from ipufit.tracing.grad_step import MicroBatchStep, ModuleWithLoss
from ipufit.utils.console import PACKAGE

from .faulty import MODELS, Base, Branches, CountsCalls, HasSeveralFaults, Prints
from .test_faulty import TARGET, compiled, expected

X = torch.arange(16.0).reshape(4, 4) / 8


class Spoils(Base):
    """Changes whatever a forward can reach."""

    kept = 3

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout()
        self.drop.eval()
        self.calls, self.seen, self.hidden = 0, [], torch.zeros(4)
        self.own = [self.head.weight]
        self.random, self.generator = random.Random(1), np.random.default_rng(2)
        self.register_buffer("average", torch.zeros(4))

    def before(self, x):
        self.calls += 1
        type(self).kept += 1
        self.new = x
        self.seen.append(x)
        self.hidden.add_(1)
        x = self.drop(self.norm(x)) * random.random() * np.random.rand() + torch.rand(4)
        x = x + self.random.random() + self.generator.random()
        self.average = self.average + x.mean(0).detach()
        self.average.add_(1)
        self.head.bias.register_hook(print)
        self.own[0].data.add_(1)
        self.train()
        if x.sum() > 0:
            torch.manual_seed(5)
            print("spoils")
        return x


def everything(net, optimizer):
    """All that a check must not change, as something to compare."""
    tensors = [*net.state_dict().values(), net.hidden]
    plain = {k: v for k, v in vars(net).items() if k in ("calls", "training", "seen", "own")}
    return (
        [t.tolist() for t in tensors],
        [id(t) for t in net.state_dict(keep_vars=True).values()],
        sorted(vars(net)),
        repr(plain),
        [m.training for m in net.modules()],
        [p.grad if p.grad is None else p.grad.tolist() for p in net.parameters()],
        repr(optimizer.state_dict()),
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(np.random.get_state()),
        net.random.getstate(),
        net.generator.bit_generator.state,
        Spoils.kept,
        net.head.bias._backward_hooks,
    )


def test_nothing_is_left_changed(capsys):
    """A check before a run must not make it another run."""
    net = Spoils()
    net.head.weight.grad = torch.ones(3, 4)
    model = compiled(net)
    before, gradient = copy.deepcopy(everything(net, model.optimizer)), net.head.weight.grad
    trace, stdout, excepthook = sys.gettrace(), sys.stdout, sys.excepthook
    kinds = {finding.kind for finding in model.check((X, TARGET))}
    after = everything(net, model.optimizer)
    for one, other in itertools.zip_longest(before, after):
        assert one == other
    assert net.head.weight.grad is gradient
    assert (sys.gettrace(), sys.stdout, sys.excepthook) == (trace, stdout, excepthook)
    assert capsys.readouterr() == ("", "")
    assert {"attribute", "branch", "container", "random", "rebound", "outside"} <= kinds


@pytest.mark.long
def test_fit_after_a_check_has_the_numbers_of_fit_alone():
    """The weights that come out are what counts."""

    def trained(checks):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        model = compiled(net)
        if checks:
            assert not model.check((X, TARGET))
        model.fit(X, TARGET, batch_size=2, epochs=2, verbose=0)
        return net.state_dict()

    one, other = trained(False), trained(True)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_text_of_a_report():
    """It is read in a terminal: place, source, what is wrong, what to write."""
    file = sys.modules[Branches.__module__].__file__
    line = expected(Branches)[0][1]
    assert str(compiled(Branches()).check((X, TARGET))) == (
        f"Branches: 1 error, 0 warnings.\n{file}:{line} in before: error [branch]\n    if x.mean() "
        "> 0:  # finds: branch\n  Python branched on a tensor's value, but the program is recorded "
        "once, before there are values.\n  Write torch.where(condition, a, b), or multiply by a "
        "mask, so that both branches are in the program."
    )


def test_errors_come_first_and_all_is_plain_for_json():
    """Another program reads it."""
    report = compiled(CountsCalls()).check((X, TARGET))
    assert [finding.severity for finding in report] == ["error", "warning"]
    told = json.loads(json.dumps(report.as_dict()))
    assert (told["model"], told["loss"]) == ("CountsCalls", True)
    assert [Finding(**finding) for finding in told["findings"]] == list(report.findings)
    assert report
    assert len(report) == 2
    assert str(report.findings[0]).startswith(report.findings[0].file)
    assert not CheckReport("Net", ())


def test_kinds_and_severities_are_those_of_the_guide():
    """A program that reads findings can know all that may come."""
    kinds = {kind for net in MODELS.values() for kind, _ in expected(net)}
    others = [*_left_out().check((X, TARGET)), *compiled(Reentrant()).check((X, TARGET))]
    twice = nn.Sequential(nn.Linear(X.shape[1], 3), nn.Softmax(1))
    others += compiled(twice).check((X, torch.zeros(len(X)).long()))
    assert kinds | {finding.kind for finding in others} == {
        *("attribute", "branch", "capture", "constant", "container", "folded", "generator"),
        *("global", "loss", "mode", "not_optimized", "number", "numpy", "outside", "output"),
        *("program", "random", "rebound", "shape", "text", "unused", "value"),
    }
    assert {finding.severity for finding in others} == {"error", "warning"}


class Reentrant(Base):
    def before(self, x):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.head, x * self.head.weight.mean(), use_reentrant=True).sum() + x


def _left_out():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net[1].parameters(), lr=0.1), "cross_entropy")
    return model


def test_what_has_no_line_of_its_own_has_that_of_the_call():
    """A Sequential has no source of the user's."""
    (finding,) = _left_out().check((X, TARGET))
    assert (finding.kind, finding.module) == ("not_optimized", "0")
    assert finding.file == __file__
    assert finding.function == "test_what_has_no_line_of_its_own_has_that_of_the_call"
    assert "'0' (2 parameters) requires a gradient, but it is not in the optimizer" in finding.text


def test_frozen_parameters_are_meant_to_stay():
    """Fine-tuning of a head is no fault."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net[:2].requires_grad_(False)
    net[1].eval()
    assert not compiled(net).check((X, TARGET))


def test_what_is_wrong_in_eval_mode_alone_says_so():
    """It would surface in the first validation."""
    (finding,) = compiled(MODELS["BranchesInEvalMode"]()).check((X, TARGET))
    assert finding.text.endswith(" in eval mode")


def test_a_loss_is_checked_like_forward():
    """It is recorded as well."""

    def loss(prediction, target):
        return prediction.square().mean() * prediction.max().item()  # here

    model = ipufit.Model(nn.Linear(4, 3))
    model.compile("sgd", loss)
    (finding,) = model.check((X, TARGET))
    assert (finding.kind, finding.function) == ("number", "loss")
    assert linecache.getline(finding.file, finding.line).rstrip().endswith("# here")


def test_a_loss_that_depends_on_no_parameter_is_an_error():
    """Nothing would be trained."""
    model = ipufit.Model(nn.Linear(4, 3))
    model.compile("sgd", lambda prediction, target: target.float().mean())
    found = model.check((X, TARGET))
    assert [(f.kind, f.severity) for f in found] == [("unused", "error")]
    assert "no gradient reached any of the 2" in found.findings[0].text


def test_sparse_gradients_are_told_as_fit_does():
    """It would refuse them."""
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    (finding,) = compiled(net).check((torch.ones(4, 2, dtype=torch.long), TARGET))
    assert (finding.kind, finding.cure) == (
        "capture",
        "Build the layer with sparse=False, or use compile(..., run_eagerly=True).",
    )


def test_stages_and_blocks_for_ipus_are_no_fault():
    """What is written for IPUs is checked without one."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 3)
    net = nn.Sequential(poptorch.BeginBlock(first, ipu_id=0), poptorch.BeginBlock(last, ipu_id=1))
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy", parallel=ipufit.Parallel(ipus_per_replica=2))
    assert not model.check((X, TARGET))


def test_a_loader_is_read_once_and_the_last_fit_is_remembered():
    """As for summary and plan."""
    loader = DataLoader(TensorDataset(X, TARGET), batch_size=2)
    model = compiled(nn.Linear(4, 3))
    assert not model.check(loader)
    model.fit(loader, verbose=0)
    assert not model.check()


@pytest.mark.long
def test_mixed_precision_is_part_of_what_is_checked():
    """The program has the casts too."""
    model = ipufit.Model(nn.Linear(4, 3))
    model.compile("adam", "cross_entropy", precision="mixed_bfloat16")
    assert not model.check((X, TARGET))


def test_a_line_is_reported_once_for_both_modes():
    """Twice the same is noise."""
    report = compiled(HasSeveralFaults()).check((X + 0.1, TARGET))
    assert len({(f.kind, f.line) for f in report}) == len(report) == 3


def test_an_installed_package_may_print():
    """Nobody can change that."""
    net = Prints()
    code = compile("def before(self, x):\n    print(1)\n    return x\n", _PACKAGE, "exec")
    exec(code, _NAMESPACE)
    net.before = _NAMESPACE["before"].__get__(net)
    assert not compiled(net).check((X, TARGET))


_PACKAGE = "/usr/lib/python3/site-packages/package/net.py"
_NAMESPACE = {}


def test_neither_a_batch_nor_a_fit_is_an_error():
    """There would be nothing to run."""
    with pytest.raises(ConfigurationError) as caught:
        compiled(nn.Linear(4, 3)).check()
    text = "check needs a batch, check((inputs, target)), or an earlier fit; got neither."
    assert str(caught.value) == text


def test_a_batch_that_the_module_cannot_take_is_an_error():
    """It says nothing of the module."""
    with pytest.raises(DataError) as caught:
        ipufit.Model(nn.Linear(3, 3)).check(X)
    assert str(caught.value) == (
        "check: the module, Linear(in_features=3, out_features=3, bias=True), needs 3 features in "
        "the last dimension, got shape (4, 4), dtype float32. Build it with in_features=4, or give "
        "it 3 features. torch says: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x4 "
        "and 3x3)."
    )


class Particular(nn.Module):
    """Refuses what it does not like, in words of its own."""

    def forward(self, x):
        raise ValueError("images only")


def test_an_error_of_the_modules_own_is_passed_on_with_its_words():
    """Nobody else knows more of it."""
    with pytest.raises(DataError) as caught:
        ipufit.Model(Particular()).check(X)
    assert str(caught.value) == (
        "check must be able to run module and loss on the batch, whose tensors have shape (4, 4), "
        "but that fails: ValueError: images only. Pass a batch in the form that fit takes."
    )


@pytest.mark.parametrize("method", ["check", "preflight", "plan"])
def test_a_fault_of_ipufit_itself_is_no_fault_of_the_batch(method, monkeypatch):
    """Whoever reads it looks at the right place."""
    spoilt: Dict[str, Callable[..., object]] = {}
    code = "def call(self, *tensors):\n    return nonsense"
    exec(compile(code, f"{PACKAGE}spoilt.py", "exec"), spoilt)
    model = compiled(nn.Linear(4, 3))
    for kind in (MicroBatchStep, *MicroBatchStep.__subclasses__()):
        monkeypatch.setattr(kind, "__call__", spoilt["call"])
    monkeypatch.setattr(ModuleWithLoss, "forward", spoilt["call"])
    with pytest.raises(NameError) as caught:
        getattr(model, method)((X, TARGET))
    assert str(caught.value) == "name 'nonsense' is not defined"


def test_what_only_an_ipu_can_run_is_the_finding():
    """Outside of a program it gives zeros, so the module itself runs."""

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            x = self.head(x)
            return poptorch.custom_op([x], "Cube", "ai.example", 1, example_outputs=[x])[0]

    model = ipufit.Model(Compiled(), engine="embedded")
    model.compile("adam", "cross_entropy")
    (finding,) = model.check((X, torch.arange(4) % 3))
    assert (finding.kind, finding.severity, finding.function) == ("capture", "error", "forward")
    assert "poptorch.custom_op" in linecache.getline(finding.file, finding.line)
    assert finding.text == (
        "poptorch.custom_op: 'Cube' of 'ai.example', version 1, is code compiled for an IPU, which "
        "nothing but IPU hardware with Graphcore's SDK can run"
    )
    assert finding.cure == (
        "Write what it computes elsewhere: ipufit.poptorch.register_custom_op('Cube', "
        "'ai.example', lambda x0: ...), which returns tensors like example_outputs."
    )


def test_what_a_signals_handler_raises_is_no_finding():
    """A time limit, say: it ends the check, as it would end anything else."""

    def late(*args):
        raise LookupError("time is up")

    class Slow(nn.Linear):
        def forward(self, x):
            signal.raise_signal(signal.SIGTERM)
            return super().forward(x)

    model = compiled(Slow(4, 3))
    before = signal.signal(signal.SIGTERM, late)
    try:
        with pytest.raises(LookupError, match="time is up"):
            model.check((X, torch.arange(4) % 3))
    finally:
        signal.signal(signal.SIGTERM, before)
