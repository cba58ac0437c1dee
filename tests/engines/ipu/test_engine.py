"""The IPU engine over the stand-in makes the numbers of the embedded engine."""

import copy
import importlib
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback
from ipufit.engines.ipu import sdk
from ipufit.errors import (
    ConfigurationError,
    DeviceError,
    NonFiniteLossError,
    OptimizerError,
    PlanError,
    RecoverableDeviceError,
    UnrecoverableDeviceError,
)
from ipufit.poptorch._precision import keep_float64
from tests.fitting import PLANS, Plan, unmeasured
from tests.nets import CNN, MLP, Normed, Running, Transformer, data
from tests.told import message

pytestmark = pytest.mark.both_engines

X, Y = data(23)
# Summation in another order, and a mean over samples with weights of one and zero.
TOLERANCE = 1e-10

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "lamb": lambda p: ipufit.optim.LAMB(p, lr=0.01),
}


@pytest.fixture(autouse=True)
def _wide():
    """The stand-in computes in float64, so that nothing hides behind rounding."""
    with keep_float64():
        yield


def compiled(engine, net, optimizer="adam", loss="cross_entropy", metrics=("accuracy",), **options):
    net = copy.deepcopy(net)
    model = ipufit.Model(net, engine=engine)
    made = optimizer(net.parameters()) if callable(optimizer) else optimizer
    model.compile(made, loss, metrics=list(metrics), **unmeasured(engine), **options)
    return model


def fitted(model, plan, x=X, y=Y, epochs=2, **options):
    return model.fit(
        DataLoader(TensorDataset(x, y), batch_size=plan.mb),
        epochs=epochs,
        ipus=plan.replicas,
        device_iterations=plan.di,
        gradient_accumulation=plan.ga,
        seed=5,
        verbose=0,
        **options,
    )


def assert_alike(one, other, path=""):
    """Equal structures, names and numbers."""
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(
            other, one, rtol=0, atol=TOLERANCE, msg=lambda text: f"{path}: {text}"
        )
    elif isinstance(one, dict):
        assert set(one) == set(other), path
        for key, value in one.items():
            assert_alike(value, other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, pair in enumerate(zip(one, other)):
            assert_alike(*pair, f"{path}/{i}")
    elif isinstance(one, float):
        assert other == pytest.approx(one, abs=TOLERANCE), path
    else:
        assert one == other, path


def fits(model, plan, **options):
    """Everything that a user can see of two fits."""
    first = fitted(model, plan, **options)
    second = fitted(model, plan, epochs=1)
    return {
        "history": [first.history, second.history],
        "weights": dict(model.module.state_dict()),
        "optimizer": model.optimizer.state_dict()["state"],
    }


def life(engine, net, optimizer, plan, compile_options=None):
    """Everything that a user can see of two fits, an evaluation and a prediction."""
    model = compiled(engine, net, optimizer, **(compile_options or {}))
    held_out = DataLoader(TensorDataset(X, Y), batch_size=4)
    found = {
        **fits(model, plan, validation_data=held_out),
        "evaluation": model.evaluate(X, Y, batch_size=4, device_iterations=2, verbose=0),
        "prediction": model.predict(X, batch_size=4, device_iterations=3, ipus=2, verbose=0),
    }
    model.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_fit_evaluate_and_predict_are_those_of_the_embedded_engine(plan):
    """With every kind of tail: within a micro-batch, an update, an execution."""
    net = MLP().double()
    expected = life("embedded", net, OPTIMIZERS["adam"], plan)
    assert_alike(expected, life("ipu-standin", net, OPTIMIZERS["adam"], plan))


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_alike_and_its_state_is_torchs(name):
    """The second fit goes on from the state that came back from the first."""
    net, plan = MLP().double(), Plan(4, 3)
    expected = fits(compiled("embedded", net, OPTIMIZERS[name]), plan)
    assert_alike(expected, fits(compiled("ipu-standin", net, OPTIMIZERS[name]), plan))


class Unsized:
    """Batches of which nobody knows how many there are, so that the last one is a surprise."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Slower(Callback):
    """Changes the rate before the first update of a fit, when all programs are compiled."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.model.optimizer.param_groups[0]["lr"] /= 4


@pytest.mark.few
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("iterations", [1, 3])
def test_settings_that_change_beside_state_that_was_handed_over_count(name, iterations):
    """State that waits for the device must not bring the settings before with it."""

    def trained(engine):
        net = copy.deepcopy(MLP().double())
        model = ipufit.Model(net, engine=engine)
        optimizer = OPTIMIZERS[name](net.parameters())
        halved = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        model.compile(optimizer, "cross_entropy", lr_scheduler=halved, **unmeasured(engine))
        loader = Unsized(DataLoader(TensorDataset(X, Y), batch_size=4))
        work = {"device_iterations": iterations, "seed": 5, "verbose": 0}
        model.fit(loader, epochs=2, **work)
        found = [copy.deepcopy(net.state_dict())]
        model.compile(optimizer, "cross_entropy", **unmeasured(engine))
        model.fit(loader, callbacks=Slower(), **work)
        return [*found, net.state_dict()]

    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    expected = trained("embedded")
    torch.random.set_rng_state(state)
    assert_alike(expected, trained("ipu-standin"))


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"clip": ipufit.Clip(global_norm=0.1)},
        {"precision": ipufit.Precision(loss_scale=64.0)},
        {"reduction": ipufit.Reduction(gradients="sum")},
        {"reduction": ipufit.Reduction(normalize="micro_batches")},
        {"outputs": "final"},
        {"outputs": ipufit.Outputs("every_n", 2)},
        {"lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)},
        {
            "lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
            "lr_scheduler_interval": "epoch",
        },
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_compile_adds_is_alike(options):
    net = MLP().double()
    more = {k: v for k, v in options.items() if k != "lr_scheduler"}
    found = []
    for engine in ("embedded", "ipu-standin"):
        own = copy.deepcopy(net)
        optimizer = OPTIMIZERS["sgd"](own.parameters())
        if "lr_scheduler" in options:
            more["lr_scheduler"] = options["lr_scheduler"](optimizer)
        model = ipufit.Model(own, engine=engine)
        model.compile(
            optimizer, "cross_entropy", metrics=["accuracy"], **more, **unmeasured(engine)
        )
        history = fitted(model, Plan(3, 2, 2))
        found.append([history.history, dict(own.state_dict())])
        model.close()
    assert_alike(*found)


@pytest.mark.few(
    "Plan(mb=5, di=2, ga=1, replicas=1)-one number", "Plan(mb=4, di=2, ga=2, replicas=1)-sum"
)
@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        lambda p, t: nn.functional.cross_entropy(p, t, reduction="none"),
        lambda p, t: nn.functional.cross_entropy(p, t),
    ],
    ids=["module", "sum", "per sample", "one number"],
)
@pytest.mark.parametrize("plan", [Plan(5, 2), Plan(4, 2, 2)], ids=str)
def test_losses_of_every_form_have_exact_tails_or_are_refused(loss, plan):
    """A loss that only tells one number can't leave padding out."""
    net, y = MLP().double(), Y
    if isinstance(loss, nn.MSELoss):
        y = torch.rand(23, 5, dtype=torch.float64)
    model = compiled("ipu-standin", net, loss=loss, metrics=())
    one_number = (
        "<lambda>" in getattr(loss, "__qualname__", "")
        and loss(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)).dim() == 0
    )
    if one_number and plan.ga > 1:
        with pytest.raises(PlanError, match="can't be computed sample by sample"):
            fitted(model, plan, y=y)
        return
    other = compiled("embedded", net, loss=loss, metrics=())
    expected, history = fitted(other, plan, y=y).history, fitted(model, plan, y=y).history
    assert_alike(expected, history)
    assert_alike(dict(other.module.state_dict()), dict(model.module.state_dict()))


class Coupled(nn.Module):
    """Its outputs for a sample depend on the others of the micro-batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(x - x.mean(0))


@pytest.mark.long
def test_samples_that_see_each_other_are_never_padded():
    """One smaller micro-batch has a program of its own; beside others it is refused."""
    net = Coupled().double()
    expected = life("embedded", net, OPTIMIZERS["sgd"], Plan(5, 2))
    assert_alike(expected, life("ipu-standin", net, OPTIMIZERS["sgd"], Plan(5, 2)))
    model = compiled("ipu-standin", net)
    assert message(fitted, model, Plan(4, 1, 2), kind=PlanError) == (
        "an IPU must be able to run every update exactly, but the last one of an epoch has "
        "micro-batches of 4, 3 samples instead of 2 of 4, and the loss or a logged value can't be "
        "computed sample by sample. Use drop_last=True in the loader, a batch_size and "
        "gradient_accumulation that divide the samples, or engine='embedded'."
    )


@pytest.mark.long
@pytest.mark.parametrize("plan", [Plan(5, 2), Plan(4, 3), Plan(6, 1, 1, 1)], ids=str)
def test_batchnorm_trains_alike_with_its_counter(plan):
    """The device leaves integers alone, and padding would change what is counted."""
    net = Normed().double()
    expected = life("embedded", net, OPTIMIZERS["sgd"], plan)
    assert_alike(expected, life("ipu-standin", net, OPTIMIZERS["sgd"], plan))


@pytest.mark.long
def test_batchnorm_with_an_update_that_is_not_full_is_refused_by_name():
    model = compiled("ipu-standin", Normed().double())
    with pytest.raises(PlanError, match=r"forward changes the buffer 'norm\."):
        fitted(model, Plan(4, 1, 2))


def test_a_buffer_of_integers_that_forward_changes_is_refused():
    model = compiled("ipu-standin", Running().double())
    assert message(fitted, model, Plan(4)) == (
        "forward must not change 'seen' on an IPU, where a buffer of int64 is a constant. Make it "
        "a buffer of float32, or use engine='embedded'."
    )


@pytest.mark.long
def test_callbacks_see_and_change_weights_as_on_the_embedded_engine():
    seen = {}

    class Look(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            first = next(self.model.module.parameters())
            found.append(first.detach().clone())
            if batch == 1:
                with torch.no_grad():
                    first.mul_(0.5)

        def on_epoch_begin(self, epoch, logs=None):
            with torch.no_grad():
                self.model.module.layers[2].bias.fill_(0.25)

    net = MLP().double()
    for engine in ("embedded", "ipu-standin"):
        found = []
        model = compiled(engine, net)
        fitted(model, Plan(4, 2), callbacks=[Look()])
        seen[engine] = [torch.stack(found), dict(model.module.state_dict())]
    assert_alike(seen["embedded"], seen["ipu-standin"])


@pytest.mark.long
def test_the_module_is_as_plain_after_fit_as_before():
    net = Transformer().double()
    model = ipufit.Model(net, engine="ipu-standin")
    model.compile("adam", "cross_entropy")
    fitted(model, Plan(5, 2), X[:20], Y[:20])
    assert {type(p) for p in net.parameters()} == {nn.Parameter}
    assert type(net) is Transformer


def test_a_loss_that_is_no_number_names_its_update_and_says_what_the_state_is():
    net = MLP().double()
    model = compiled("ipu-standin", net)
    x = X.clone()
    x[9] = torch.nan
    with pytest.raises(NonFiniteLossError) as caught:
        fitted(model, Plan(4, 3), x=x)
    assert caught.value.update == 2
    assert str(caught.value) == (
        "the loss must be finite, but it became nan in update 2. An IPU can't go back: the weights "
        "and the optimizer state are those after update 2, the last one of its call. Look for a "
        "learning rate that is too high, a log or division of zero, or non-finite data."
    )


REFUSED = [
    (
        {"clip": ipufit.Clip(norm=1.0)},
        "Clip(norm=1): PopTorch bounds the norm of all gradients together only",
    ),
    (
        {"clip": ipufit.Clip(value=1.0)},
        "Clip(value=1): PopTorch bounds the norm of all gradients together only",
    ),
    (
        {"ema": ipufit.EMA()},
        "EMA(momentum=0.99, overwrite_frequency=None): PopTorch keeps no averages of weights",
    ),
    ({"precision": "mixed_bfloat16"}, "precision='mixed_bfloat16': PopTorch has no autocast"),
    ({"precision": "float64"}, "precision='float64': a device computes in float16 and float32"),
    (
        {"precision": ipufit.Precision(loss_scale="dynamic")},
        "loss_scale='dynamic': PopTorch's own automatic scaling follows other rules and does not "
        "tell its factor",
    ),
    (
        {"precision": ipufit.Precision(accumulation_dtype="float64")},
        "accumulation_dtype='float64': accumulators are float16 or",
    ),
    ({"run_eagerly": True}, "run_eagerly=True: a device runs compiled programs only"),
    ({"jit": "graph"}, "jit='graph': Poplar alone compiles its programs"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_an_ipu_cannot_do_is_refused_by_name_at_compile(options, text):
    with pytest.raises(ConfigurationError) as caught:
        compiled("ipu-standin", MLP().double(), **options)
    assert str(caught.value).startswith(f"an IPU can't run {text}")


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (torch.optim.Adagrad, "an IPU runs the updates of SGD, Adam, AdamW, RMSprop, LAMB only"),
        (
            {"layers.0": "adam", "*": "sgd"},
            "an IPU runs the updates of SGD, Adam, AdamW, RMSprop, LAMB only, got Adam + SGD.",
        ),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
            "an IPU can't run SGD with maximize=True, which parameter group 0 has",
        ),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "an IPU can't run Adam with amsgrad=True"),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
            "an IPU can't run SGD with dampening=0.1",
        ),
    ],
)
def test_optimizers_that_a_device_has_not_are_refused(optimizer, text):
    with pytest.raises(OptimizerError) as caught:
        compiled("ipu-standin", MLP().double(), optimizer)
    assert str(caught.value).startswith(text)


@pytest.mark.skipif(
    not hasattr(torch.optim.Optimizer, "register_step_pre_hook"), reason="torch without step hooks"
)
def test_hooks_on_the_optimizers_step_are_refused():
    """There is no call of step to hook into."""
    net = MLP().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    model = ipufit.Model(net, engine="ipu-standin")
    model.compile(optimizer, "cross_entropy")
    assert message(model.fit, X, Y, batch_size=4, verbose=0, kind=OptimizerError) == (
        "hooks on the step of SGD can't run, because the program does not call step. Remove them, "
        "or do their work in a callback."
    )


@pytest.mark.long
def test_dampening_without_momentum_is_nothing_as_in_torch():
    """A device would make the learning rate smaller."""
    nets = []
    for engine in ("embedded", "ipu-standin"):
        torch.manual_seed(0)
        net = MLP().double()
        model = ipufit.Model(net, engine=engine)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, dampening=0.5)
        model.compile(optimizer, "cross_entropy")
        model.fit(X, Y, batch_size=4, verbose=0, seed=1)
        nets.append(net)
    for found, expected in zip(nets[1].parameters(), nets[0].parameters()):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_float64_is_converted_or_refused_as_no_device_has_it():
    ipufit.poptorch._precision._Present.preserves = False
    with pytest.raises(ConfigurationError, match="an IPU computes in float16 and float32, but"):
        compiled("ipu-standin", MLP().double())
    model = compiled("ipu-standin", MLP())
    with pytest.warns(UserWarning, match="from float64 to float32"):
        fitted(model, Plan(4))
    weights = torch.ones(8, dtype=torch.float64)
    with pytest.raises(ipufit.errors.DataError, match="float32 at most, but the data is float64"):
        model.fit(X[:8].float(), Y[:8], batch_size=4, sample_weight=weights, verbose=0)
    many = torch.full((8,), 2**40)
    with pytest.raises(
        ipufit.errors.DataError, match="integers on an IPU have 32 bits, but the data contains"
    ):
        fitted(model, Plan(4), x=X[:8].float(), y=many)


@pytest.mark.long
def test_options_of_the_user_stay_his():
    """They are not frozen, and can be changed for the next compile."""
    options = ipufit.poptorch.Options().deviceIterations(7)
    model = compiled("ipu-standin", MLP().double(), poptorch=options)
    fitted(model, Plan(4, 7))
    options.deviceIterations(2)
    model.compile("sgd", "cross_entropy", poptorch=options)
    fitted(model, Plan(4, 2))


@pytest.mark.long
def test_a_loss_that_counts_needs_one_micro_batch_per_update():
    net = MLP().double()
    model = compiled("ipu-standin", net, reduction=ipufit.Reduction(normalize="tokens"))
    with pytest.raises(ConfigurationError, match="must have one micro-batch, got 2 from"):
        fitted(model, Plan(4, 1, 2))
    expected = life(
        "embedded",
        net,
        OPTIMIZERS["sgd"],
        Plan(4, 2),
        {"reduction": ipufit.Reduction(normalize="tokens")},
    )
    found = life(
        "ipu-standin",
        net,
        OPTIMIZERS["sgd"],
        Plan(4, 2),
        {"reduction": ipufit.Reduction(normalize="tokens")},
    )
    assert_alike(expected, found)


# Which engine.


def test_explain_and_history_name_the_engine(capsys):
    net = MLP().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = ipufit.Model(net, engine="ipu-standin")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model.compile(optimizer, "cross_entropy", lr_scheduler=schedule)
    history = fitted(model, Plan(4, 2))
    assert history.params["engine"] == "ipu-standin"
    model.explain()
    text = capsys.readouterr().out
    assert "Runs one recorded program on the ipu-standin engine" in text
    assert (
        "StepLR changes settings with every update, but a device takes them only between calls: "
        "each call makes one update."
    ) in text


def test_the_sdk_is_asked_for_where_it_is_not(monkeypatch):
    monkeypatch.setattr(sdk, "find_sdk", lambda: None)
    assert message(ipufit.Model, MLP(), engine="ipu") == (
        "engine='ipu' needs the Poplar SDK's PopTorch, but there is no PopTorch, which comes with "
        "the Poplar SDK. Enable the SDK in this shell, or use engine='embedded'; "
        "engine='ipu-standin' tries the IPU engine in plain torch."
    )
    found = {status.name: status for status in ipufit.engines()}
    assert found["embedded"].available
    assert found["ipu-standin"].available
    assert str(found["ipu"]) == (
        "ipu: not available, there is no PopTorch, which comes with the Poplar SDK"
    )


def test_an_sdk_for_another_torch_or_python_is_told_as_such(tmp_path, monkeypatch):
    """PopTorch asserts its torch when it is imported."""
    package = tmp_path / "poptorch"
    package.mkdir()
    (package / "__init__.py").write_text("assert False, 'made for torch 2.0.1'")
    (package / "poptorch_core.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "poptorch", raising=False)
    monkeypatch.delenv("IPUFIT_ENGINE")
    importlib.invalidate_caches()
    assert sdk.find_sdk() is not None
    ipu = next(status for status in ipufit.engines() if status.name == "ipu")
    assert not ipu.available
    assert ipu.reason.startswith(
        "its PopTorch can't be imported and is probably for another torch or Python than torch "
    )
    assert ipu.reason.endswith("AssertionError: made for torch 2.0.1")
    model = ipufit.Model(MLP().double())
    model.compile("sgd", "cross_entropy")
    assert model._session.engine.name == "embedded"


def test_a_package_that_is_only_called_poptorch_is_no_sdk(tmp_path, monkeypatch):
    package = tmp_path / "poptorch"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "poptorch", raising=False)
    assert sdk.find_sdk() is None
    monkeypatch.setitem(sys.modules, "poptorch", ipufit.poptorch)
    assert sdk.find_sdk() is None


def test_the_environment_chooses_for_auto_only(monkeypatch):
    def name(engine="auto"):
        model = ipufit.Model(MLP().double(), engine=engine)
        model.compile("sgd", "cross_entropy")
        return model._session.engine.name

    monkeypatch.setenv("IPUFIT_ENGINE", "ipu-standin")
    assert name() == "ipu-standin"
    assert name("embedded") == "embedded"
    monkeypatch.setenv("IPUFIT_ENGINE", "tpu")
    assert message(name) == (
        "the environment variable IPUFIT_ENGINE must be one of 'auto', 'embedded', 'ipu', "
        "'ipu-standin', got 'tpu'. Set it to for example embedded, or unset it."
    )


@pytest.mark.long
def test_neither_import_nor_the_embedded_engine_imports_a_poptorch():
    code = (
        "import sys, torch, ipufit\n"
        "model = ipufit.Model(torch.nn.Linear(1, 1), engine='embedded')\n"
        "model.compile('sgd', 'mse')\n"
        "parts = {part for name in sys.modules for part in name.split('.')}\n"
        "assert 'poptorch' not in parts, sorted(sys.modules)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "IPUFIT_ENGINE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# What PopTorch raises.


def test_errors_of_a_device_keep_their_action_and_their_cause():
    own = ipufit.poptorch
    with pytest.raises(RecoverableDeviceError) as caught, sdk.translate_errors(own, "running"):
        raise own.RecoverableError("link down", recovery_action="LINK_RESET")
    assert caught.value.action == "LINK_RESET"
    assert isinstance(caught.value.__cause__, own.RecoverableError)
    assert str(caught.value) == (
        "running failed on the device: link down. It can be used again after LINK_RESET; see the "
        "documentation of the Poplar SDK, then fit again."
    )
    with pytest.raises(UnrecoverableDeviceError), sdk.translate_errors(own, "running"):
        raise own.UnrecoverableError("burnt")
    with pytest.raises(DeviceError) as caught, sdk.translate_errors(own, "compiling"):
        raise own.Error("no such operator")
    assert str(caught.value) == (
        "compiling failed, because PopTorch says: no such operator. Change what it names, or use "
        "engine='embedded'."
    )


@pytest.mark.long
def test_a_module_that_poptorch_refuses_is_plain_again_and_can_be_compiled_anew():
    net = Normed().double()
    weighted = nn.CrossEntropyLoss(weight=torch.ones(5, dtype=torch.float64))
    model = ipufit.Model(net, engine="ipu-standin")
    model.compile("sgd", weighted)
    with pytest.raises(DeviceError, match="compiling failed, because PopTorch says"):
        fitted(model, Plan(4))
    assert {type(p) for p in net.parameters()} == {nn.Parameter}
    assert {type(b) for b in (*net.buffers(), *weighted.buffers())} == {torch.Tensor}
    model.compile("sgd", "cross_entropy")
    fitted(model, Plan(5))


def test_dropout_trains_on_the_stand_in():
    """With random numbers of its own, so only what does not depend on them is compared."""
    model = compiled("ipu-standin", CNN().double())
    history = fitted(model, Plan(4, 2), x=X[:20], y=Y[:20])
    assert len(history.history["loss"]) == 2
    assert model.module.norm.num_batches_tracked == 10
