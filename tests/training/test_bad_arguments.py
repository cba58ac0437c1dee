"""Arguments that cannot work: refused with a pinned text before anything is done."""

import copy
import gc
import io
import pickle
import re
import weakref

import pytest
import torch
from torch import nn

import ipufit
from ipufit.callbacks import Callback
from ipufit.engines import Engine
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.errors import (
    ConfigurationError,
    DataError,
    NotCompiledError,
    OptimizerError,
    PlanError,
    UnknownNameError,
)
from ipufit.optim.schedules import AtEpochEnd
from tests.faulty import (
    Net,
    Told,
    Watched,
    assert_clean,
    batches,
    compiled,
    fit,
    loader,
    refused,
    state,
)
from tests.told import message

LOSSES = (
    "bce, bce_with_logits, binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy, "
    "hinge_embedding, huber, kl_div, l1, mae, mean_absolute_error, mean_squared_error, mse, "
    "multi_margin, multilabel_soft_margin, nll, poisson_nll, smooth_l1, soft_margin."
)
METRICS = (
    "acc, accuracy, auc, binary_accuracy, binary_accuracy_with_logits, categorical_accuracy, "
    "concordance_correlation, cosine_similarity, f1, f1_score, fbeta_score, hinge, kl_divergence, "
    "log_cosh, logcosh, mae, mape, mean_absolute_error, mean_absolute_percentage_error, "
    "mean_io_u, mean_iou, mean_squared_error, mean_squared_logarithmic_error, mse, msle, "
    "pearson_correlation, perplexity, precision, r2, r2_score, recall, rmse, "
    "root_mean_squared_error, sparse_categorical_accuracy, sparse_top_k_categorical_accuracy, "
    "squared_hinge, top_5_accuracy, top_k_categorical_accuracy."
)
IPUS = "`ipus`, the total number of IPUs, must be a power of two"
TRY_4 = (
    "Try 2 or 4, or compile(..., parallel=ipufit.Parallel(auto_round_ipus=True)) to reserve 4 and "
    "leave 1 idle."
)
WHOLE = "must be a positive whole number"
CALLBACKS = "callbacks must be a list of ipufit.callbacks.Callback objects, got "
VERBOSE = "verbose must be 0 (silent), 1 (bar), 2 (one line an epoch), 'rich' or 'auto', got "


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text", "nearest"),
    [
        (("sgd", "cros_entropy"), "unknown loss 'cros_entropy'", "cross_entropy"),
        (("sgd", "mse", None, ["acuracy"]), "unknown metric 'acuracy'", "accuracy"),
        (("adm", "mse"), "unknown optimizer 'adm'", "adam"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(arguments, text, nearest):
    """A typo costs a look at the docs otherwise."""
    model = compiled()
    with refused(
        model, UnknownNameError, f"{text}. Did you mean {nearest!r}? ", part=True
    ) as caught:
        model.compile(*arguments)
    assert caught.value.nearest == nearest
    assert f"Known names: {', '.join(caught.value.known)}." in str(caught.value)


def test_the_known_names_are_listed_in_full():
    """Whoever is far off needs the whole list."""
    model = compiled()
    with refused(model, UnknownNameError, f"unknown loss 'zzz'. Known names: {LOSSES}"):
        model.compile("sgd", "zzz")
    with refused(model, UnknownNameError, f"unknown metric 'zzz'. Known names: {METRICS}"):
        model.compile("sgd", "mse", metrics="zzz")


def test_all_bad_arguments_of_compile_are_reported_together():
    """One fault at a time makes a user start a job once per typo."""
    model = compiled()
    with refused(model, ConfigurationError, "unknown loss 'msee'.", part=True) as caught:
        model.compile(
            "adm",
            "msee",
            metrics="acuracy",
            clip=1.0,
            run_eagerly=1,
        )
    lines = str(caught.value).split("\n")
    assert lines[0] == (
        "clip must be an ipufit.Clip or None, got 1.0. Write for example "
        "clip=ipufit.Clip(global_norm=1.0)."
    )
    assert lines[1].startswith("unknown loss 'msee'. Did you mean 'mse'? ")
    assert lines[2].startswith("unknown optimizer 'adm'. Did you mean 'adam'? ")
    assert lines[3].startswith("unknown metric 'acuracy'. Did you mean 'accuracy'? ")
    assert lines[4:] == ["run_eagerly must be True or False, got 1."]


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "text"),
    [
        ("sgd", "cosin", "unknown lr_scheduler 'cosin'. Did you mean 'cosine'? "),
        ("adm", "cosin", "unknown lr_scheduler 'cosin'. Did you mean 'cosine'? "),
        ("adm", {"lr": 0.1}, "lr_scheduler must have a callable for 'lr', got 0.1"),
        ("adm", torch.optim.lr_scheduler.StepLR, "got the class StepLR"),
        ("adm", AtEpochEnd("cosin"), "unknown lr_scheduler 'cosin'. Did you mean 'cosine'? "),
        (None, lambda update: 0.1, "lr_scheduler needs an optimizer to schedule"),
        ("sgd", {"momentun": lambda update: 0.1}, "'momentun'"),
    ],
)
def test_a_bad_schedule_is_reported_with_the_other_faults(optimizer, scheduler, text):
    """It was told when all others were mended."""
    model = compiled()
    with refused(model, ConfigurationError, text, part=True) as caught:
        model.compile(optimizer, "msee", lr_scheduler=scheduler, lr_scheduler_interval="updates")
    lines = str(caught.value).split("\n")
    assert lines[0].startswith("unknown loss 'msee'. ")
    assert (optimizer == "adm") == lines[1].startswith("unknown optimizer 'adm'. ")
    assert lines[-2] == "lr_scheduler_interval must be 'update' or 'epoch', got 'updates'."
    assert text in lines[-1]
    assert len(lines) == 3 + (optimizer == "adm")


def test_a_good_schedule_changes_nothing_of_an_optimizer_that_is_refused_with_others():
    """OneCycleLR sets the rate that its first update has."""
    model = compiled()
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1, momentum=0.9)
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}

    def warm_up(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)

    with pytest.raises(UnknownNameError):
        model.compile(optimizer, "msee", lr_scheduler=warm_up)
    after = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    assert before == after
    model.compile(optimizer, "mse", lr_scheduler=warm_up)
    assert optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.long("ipu-standin")
def test_a_refused_compile_keeps_the_earlier_one():
    """A typo in a notebook cell must not throw a trained optimizer away."""
    model = compiled()
    fit(model)
    optimizer = model.optimizer
    with pytest.raises(UnknownNameError):
        model.compile("adm", "mse")
    assert model.optimizer is optimizer
    assert fit(model).epoch == [0]


def test_nothing_to_train_is_told_at_compile():
    """torch's own "empty parameter list" does not say that the module is frozen."""
    net = Net().requires_grad_(False)
    model = ipufit.Model(net)
    with refused(
        model,
        OptimizerError,
        "the module has no trainable parameter: none of its 8 parameters requires gradients.",
        part=True,
    ):
        model.compile("sgd", "mse")


# ---- before compile, inside fit -----------------------------------------------------------------


@pytest.mark.parametrize("method", ["fit", "plan", "explain"])
def test_nothing_runs_before_compile(method):
    """The error must name the missing call, not a missing attribute."""
    model = ipufit.Model(Net())
    text = (
        f"{method} needs a compiled model. Call "
        "model.compile(optimizer='adam', loss='cross_entropy') first."
    )
    with refused(model, NotCompiledError, text):
        getattr(model, method)(loader())
    with refused(model, NotCompiledError, text):
        model.compile("sgd", "mse")
        model.close()
        getattr(model, method)(loader())


def test_explain_needs_a_loader_or_a_fit():
    """There is no plan to print before either."""
    text = "explain needs a loader, explain(loader, ipus=...), or an earlier fit; got neither."
    model = compiled()
    with refused(model, ConfigurationError, text):
        model.explain()


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda model: fit(model),
            "fit was called inside fit, from a callback or the data. Start the second call after "
            "the first has returned.",
        ),
        (
            lambda model: model.compile("sgd", "mse"),
            "compile was called inside fit, from a callback or the data. Call it after fit has "
            "returned.",
        ),
    ],
    ids=["fit", "compile"],
)
def test_fit_is_not_entered_twice(call, text):
    """Two programs that own the same weights would overwrite each other's updates."""
    model = compiled()
    with pytest.raises(ConfigurationError) as caught:
        fit(model, callbacks=[Told(on_epoch_end=lambda told, epoch: call(model))])
    assert str(caught.value) == text
    assert_clean(model)
    assert model.history.epoch == [0]
    assert fit(model, epochs=2).epoch == [0, 1]


# ---- the batch algebra --------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ipus": 0}, f"{IPUS}, got 0. Try 1."),
        ({"ipus": -1}, f"{IPUS}, got -1. Try 1."),
        ({"ipus": 3}, f"{IPUS}, got 3. {TRY_4}"),
        ({"ipus": 1.5}, f"{IPUS}. 1.5 is a float, write 1 or 2."),
        ({"ipus": True}, f"{IPUS}. True is a bool, write 1."),
        ({"ipus": "2"}, f"{IPUS}. '2' is a str, write 2."),
        ({"device_iterations": 0}, f"`device_iterations` {WHOLE}, got 0. Try 1."),
        ({"device_iterations": -1}, f"`device_iterations` {WHOLE}, got -1. Try 1."),
        ({"device_iterations": 1.5}, f"`device_iterations` {WHOLE}. 1.5 is a float, write 1 or 2."),
        ({"device_iterations": True}, f"`device_iterations` {WHOLE}. True is a bool, write 1."),
        ({"device_iterations": "2"}, f"`device_iterations` {WHOLE}. '2' is a str, write 2."),
    ],
)
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "explain"])
def test_a_number_that_is_none_is_refused_everywhere(method, arguments, text):
    """All four read the same arguments, so all four must refuse the same."""
    engine = Watched()
    model = compiled(engine=lambda: engine)
    quiet = {} if method == "explain" else {"verbose": 0, "seed": 1}
    with refused(model, PlanError, text) as caught:
        getattr(model, method)(loader(), **quiet, **arguments)
    assert caught.value.faults == (text,)
    assert engine.built == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, f"{WHOLE}, got 0. Try 1."),
        (-1, f"{WHOLE}, got -1. Try 1."),
        (1.5, f"{WHOLE}. 1.5 is a float, write 1 or 2."),
        (True, f"{WHOLE}. True is a bool, write 1."),
        ("2", f"{WHOLE}. '2' is a str, write 2."),
    ],
)
def test_gradient_accumulation_must_be_a_positive_integer(value, text):
    """``True`` would pass for 1 and "2" fail deep inside the loop."""
    model = compiled()
    with refused(model, PlanError, f"`gradient_accumulation` {text}"):
        fit(model, gradient_accumulation=value)


@pytest.mark.long("ipu-standin")
def test_all_faults_of_fit_are_reported_together():
    """They are found before the first batch is read, and each says which argument it means."""
    engine = Watched()
    model = compiled(engine=lambda: engine)
    faults = [
        f"{IPUS}, got 3. {TRY_4}",
        f"`device_iterations` {WHOLE}, got 0. Try 1.",
        f"`gradient_accumulation` {WHOLE}. 1.5 is a float, write 1 or 2.",
    ]
    plan = {"ipus": 3, "device_iterations": 0, "gradient_accumulation": 1.5}
    with refused(model, PlanError, "\n".join(faults)) as caught:
        fit(model, **plan)
    assert fit(model, **{**plan, **caught.value.suggestion}).epoch == [0]
    own = [
        f"{IPUS}, got 3. {TRY_4}".replace("`ipus`", "`ipus` of Validation"),
        f"`device_iterations` of Validation {WHOLE}, got -2. Try 1.",
    ]
    validation = ipufit.Validation(loader(), ipus=3, device_iterations=-2)
    with refused(model, PlanError, "\n".join([*faults, *own])) as caught:
        fit(model, validation_data=validation, **plan)
    assert caught.value.faults == (*faults, *own)
    assert fit(model, **{**plan, **caught.value.suggestion}).epoch == [0]
    built = engine.built
    rest = [
        "epochs must be an integer of at least 1 or a range such as range(3, 10), got 0.",
        *faults,
        f"{CALLBACKS}3. Subclass ipufit.callbacks.Callback and override its hooks.",
        "seed must be an integer or None, got 1.5.",
        f"{VERBOSE}9.",
    ]
    with refused(model, ConfigurationError, "\n".join(rest)):
        fit(model, epochs=0, callbacks=[3], **{**plan, "seed": 1.5, "verbose": 9})
    assert engine.built == built


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"ipus": 2}, "ipus of Validation"),
        ({"device_iterations": 2}, "device_iterations of Validation"),
        (
            {"ipus": 2, "device_iterations": 2},
            "ipus of Validation and device_iterations of Validation",
        ),
    ],
)
def test_arguments_for_a_validation_that_is_not_there_are_refused(arguments, names):
    """An argument that does nothing would be taken for one that does."""
    text = (
        f"{names} set how validation_data is evaluated, but there is no validation_data. Pass "
        "Validation(data, ...) or validation_split, or leave them out."
    )
    model = compiled()
    with refused(model, ConfigurationError, text):
        fit(model, validation_data=ipufit.Validation(**arguments))


@pytest.mark.long("ipu-standin")
def test_one_callback_or_none_is_taken_as_in_keras():
    """A list around one object is a formality."""

    class Count(Callback):
        epochs = 0

        def on_epoch_end(self, epoch, logs=None):
            self.epochs += 1

    count = Count()
    model = compiled()
    fit(model, callbacks=count, epochs=2)
    fit(model, callbacks=None)
    assert count.epochs == 2


@pytest.mark.long("ipu-standin")
def test_without_an_optimizer_a_model_can_evaluate_and_predict_only():
    """A frozen module has nothing to train, and still has outputs."""
    net = Net().requires_grad_(False)
    model = ipufit.Model(net)
    model.compile(None, "mse", metrics=["mse"])
    assert model.optimizer is None
    result = model.evaluate(loader(), verbose=0)
    assert result["loss"] == pytest.approx(result["mse"])
    assert len(model.predict(loader(), verbose=0)) > 0
    assert message(fit, model) == (
        "fit needs an optimizer, but compile got none, which only evaluates and predicts. Call "
        "compile with one, such as optimizer='adam'."
    )


def test_a_model_that_was_not_compiled_evaluates_with_a_loss_of_its_own():
    """Weights of a file are judged without saying how they might be trained."""
    net, (x, y) = nn.Linear(4, 3), batches(1, 8)[0]
    model = ipufit.Model(net)
    values = model.evaluate(x, y, loss="mse", metrics=["mae"], verbose=0)
    assert values["loss"] == pytest.approx((net(x) - y).square().mean().item())
    assert values["mae"] == pytest.approx((net(x) - y).abs().mean().item())
    assert torch.equal(model.predict(x, verbose=0), net(x))
    text = (
        "evaluate needs a compiled model. Pass loss='cross_entropy', or call "
        "model.compile(optimizer='adam', loss='cross_entropy') first."
    )
    with refused(model, NotCompiledError, text):
        model.evaluate(x, y)
    model.compile(loss="mse")
    assert model.evaluate(x, y, verbose=0) == {"loss": values["loss"]}
    text = (
        "evaluate takes loss and metrics only for a model that was not compiled, but this one was "
        "compiled with a loss. Leave them out, or call model.compile(loss=...) again."
    )
    for option in ({"loss": "mse"}, {"metrics": ["mae"]}):
        assert message(model.evaluate, x, y, **option) == text


@pytest.mark.embedded_only("an IPU runs no module eagerly")
def test_arguments_of_compile_by_position_have_the_order_of_keras():
    """That of Keras 3; in Keras 2 metrics came third, which is said."""
    model, (x, y) = ipufit.Model(nn.Linear(4, 3)), batches(1, 8)[0]
    model.compile("sgd", "mse", None, ["mae"], ["mse"], True)
    assert model.optimizer is not None
    assert list(model.evaluate(x, y, verbose=0)) == ["loss", "mae", "mse"]
    assert model._session.config.run_eagerly
    for metrics in (["mae"], "mae", [nn.functional.l1_loss]):
        assert message(model.compile, "sgd", "mse", metrics) == (
            f"loss_weights must be numbers, got {metrics!r}. As positional arguments, metrics come "
            "after loss_weights, as in Keras 3. Write metrics=[...]."
        )


@pytest.mark.parametrize(
    "copied",
    [pickle.dumps, copy.copy, copy.deepcopy, lambda model: torch.save(model, io.BytesIO())],
    ids=["pickle", "copy", "deepcopy", "torch.save"],
)
def test_a_model_that_is_pickled_or_copied_says_what_to_do_instead(copied, tmp_path, monkeypatch):
    """What it advises works."""
    model = compiled()
    with refused(
        model, ConfigurationError, "a Model contains recorded programs", part=True
    ) as caught:
        copied(model)
    monkeypatch.chdir(tmp_path)
    for call in re.findall(
        r"(?:model\.save|ipufit\.load|copy\.deepcopy)\([^)]*\)", str(caught.value)
    ):
        found = eval(call, {"model": model, "ipufit": ipufit, "copy": copy, "module": Net()})
    assert isinstance(found, Net)


def test_the_repr_of_a_model_says_what_it_is():
    """A notebook and a log show it."""
    model = ipufit.Model(nn.Linear(4, 3), engine="embedded")
    assert repr(model) == "<Model of Linear, 15 parameters, not compiled>"
    model.compile("adam", "mse", metrics=["mae"])
    fit(model)
    assert repr(model) == (
        "<Model of Linear, 15 parameters, Adam, loss mse, metrics mae, embedded engine on cpu, "
        "3 updates>"
    )
    model.compile(loss="mse")
    assert repr(model) == (
        "<Model of Linear, 15 parameters, no optimizer, loss mse, embedded engine on cpu, "
        "0 updates>"
    )


# ---- other arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        *(
            (
                {"epochs": value},
                "epochs must be an integer of at least 1 or a range such as range(3, 10), got "
                f"{value!r}.",
            )
            for value in (0, -1, 1.5, True, "2", None, [3, 4])
        ),
        *(
            (
                {"epochs": value},
                "epochs must be a number of epochs or a range of their indices, with at least one "
                f"epoch, no negative index and no gaps, got {value!r}. Pass for example range(3, "
                "10).",
            )
            for value in (range(-1, 1), range(3, 3), range(4, 3), range(0, 4, 2), range(4, 0, -1))
        ),
        *(
            ({"seed": value}, f"seed must be an integer or None, got {value!r}.")
            for value in (1.5, True, "2", torch.tensor(1.5), torch.ones(2))
        ),
        *(({"verbose": v}, f"{VERBOSE}{v!r}.") for v in (3, -1, 1.0, "yes", None, [1])),
        (
            {"callbacks": [Callback]},
            f"{CALLBACKS}the class Callback. Pass an object: Callback(...).",
        ),
        (
            {"callbacks": [3]},
            f"{CALLBACKS}3. Subclass ipufit.callbacks.Callback and override its hooks.",
        ),
        *(
            (
                {"callbacks": value},
                f"{CALLBACKS}{came}. Pass a list of objects: callbacks=[...]; [] for none.",
            )
            for value, came in (
                (Callback, "the class Callback"),
                ("bar", "'bar'"),
                (3, "3"),
            )
        ),
    ],
    ids=repr,
)
def test_a_wrong_argument_of_fit_is_named(arguments, text):
    """Its error must come before a program is built, let alone an epoch is trained."""
    engine = Watched()
    model = compiled(engine=lambda: engine)
    with refused(model, ConfigurationError, text):
        fit(model, **arguments)
    assert engine.built == 0


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"seed": 1.5}, "seed must be an integer or None, got 1.5."),
        ({"verbose": 3}, f"{VERBOSE}3."),
        (
            {"callbacks": [3]},
            f"{CALLBACKS}3. Subclass ipufit.callbacks.Callback and override its hooks.",
        ),
        (
            {"seed": "1", "device_iterations": 0},
            f"`device_iterations` {WHOLE}, got 0. Try 1.\n"
            "seed must be an integer or None, got '1'.",
        ),
    ],
    ids=repr,
)
def test_a_wrong_argument_of_evaluate_and_predict_is_named(method, arguments, text):
    """They share the checks of fit."""
    engine = Watched()
    model = compiled(engine=lambda: engine)
    with refused(model, ConfigurationError, text):
        getattr(model, method)(loader(), **{"verbose": 0, **arguments})
    assert engine.built == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            lambda: {"reduction": ipufit.Reduction(gradients="avg")},
            "Reduction.gradients must be one of None, 'mean', 'sum', got 'avg'.",
        ),
        (
            lambda: {"reduction": ipufit.Reduction(gradients=["mean"])},
            "Reduction.gradients must be one of None, 'mean', 'sum', got ['mean'].",
        ),
        (
            lambda: {"parallel": ipufit.Parallel(auto_round_ipus=1)},
            "Parallel.auto_round_ipus must be one of None, True, False, got 1.",
        ),
        (
            lambda: {"reduction": ipufit.Reduction("token", None)},
            "Reduction.normalize must be one of 'samples', 'tokens', 'micro_batches', got "
            "'token'.\n"
            "Reduction.sample_weights must be 'sum_over_batch_size' or 'mean_with_sample_weight', "
            "got None.",
        ),
        (
            lambda: {"reduction": ipufit.Reduction("tokens", gradients="sum")},
            "Reduction.normalize='tokens' divides the gradient of an update by a count over the "
            "whole update, but gradients='sum' adds up means. Use gradients='mean'.",
        ),
        (
            lambda: {"memory": ipufit.Memory(shard="all", offload_optimizer="cpu")},
            "Memory.offload_optimizer must be one of None, True, False, got 'cpu'.\n"
            "Memory.shard must be one of None, 'none', 'optimizer', 'weights', got 'all'.",
        ),
        (
            lambda: {"parallel": ipufit.Parallel(inference=ipufit.Parallel(ipus_per_replica=2))},
            "Parallel.inference takes only stages, layers_per_ipu and strategy; the rest is the "
            "same as in training, but it sets ipus_per_replica. Leave it out there.",
        ),
        (
            lambda: {"jit": "off"},
            "jit says how a recorded program runs, got 'off'. Pass run_eagerly=True to run the "
            "module itself.",
        ),
        (
            lambda: {"poptorch": (None, None, None)},
            "poptorch must be poptorch.Options, a pair (training_options, inference_options) or "
            "None, got 3 values. Write poptorch=(None, options) for inference alone.",
        ),
        (lambda: {"run_eagerly": "no"}, "run_eagerly must be True or False, got 'no'."),
    ],
)
def test_a_wrong_argument_of_compile_is_named(arguments, text):
    """A string for a switch would silently mean True."""
    model = compiled()
    with refused(model, ConfigurationError, text):
        model.compile("sgd", "mse", **arguments())


ENGINE = (
    "engine must be one of 'auto', 'embedded', 'ipu', 'ipu-standin', or a callable that makes an "
    "engine, got "
)


@pytest.mark.parametrize(
    ("module", "engine", "text"),
    [
        (
            Net,
            "auto",
            "Model takes a torch.nn.Module object, got <class 'tests.faulty.Net'>. Pass an "
            "instance, such as ipufit.Model(MyNet()).",
        ),
        (
            None,
            "auto",
            "Model takes a torch.nn.Module object, got None. Pass an instance, such as "
            "ipufit.Model(MyNet()).",
        ),
        (nn.Linear(1, 1), "gpu", f"{ENGINE}'gpu'. Pass for example engine='embedded'."),
        (nn.Linear(1, 1), 3, f"{ENGINE}3. Pass for example engine='embedded'."),
        (nn.Linear(1, 1), None, f"{ENGINE}None. Pass for example engine='embedded'."),
    ],
    ids=repr,
)
def test_a_module_and_an_engine_are_what_they_say(module, engine, text):
    """The class instead of an object is the usual slip."""
    assert message(ipufit.Model, module, engine=engine) == text


def test_an_engine_factory_must_make_an_engine():
    """Otherwise fit would fail on a missing method, an epoch's preparation later."""
    model = ipufit.Model(Net(), engine=lambda: 3)
    text = (
        "engine must make an object of a class that derives from ipufit.engines.Engine, got 3. "
        "Derive its class, or pass for example engine='embedded'."
    )
    with refused(model, ConfigurationError, text):
        model.compile("sgd", "mse")
    assert ipufit.Model(Net(), engine=EmbeddedEngine).history.epoch == []


def test_an_engine_must_build_programs():
    """A program that lacks a method would be missed in the middle of a training."""

    class Builder(Engine):
        name = "builder"

        def build(self, spec):
            return 3

    model = compiled(engine=Builder)
    text = (
        "Builder.build must return an object of a class that derives from ipufit.engines.Program, "
        "got 3. Derive its class."
    )
    with refused(model, ConfigurationError, text):
        fit(model)


@pytest.mark.long("ipu-standin")
def test_a_refused_fit_leaves_the_last_history():
    """The results of an hour must survive a typo in the next call."""
    model = compiled()
    history = fit(model)
    after = state(model)
    with pytest.raises(PlanError):
        fit(model, ipus=3)
    assert model.history is history
    assert torch.equal(after["/body.weight"], state(model)["/body.weight"])


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("also", [{}, {"epochs": 0}], ids=["one fault", "several"])
def test_what_a_refused_call_was_given_is_free_when_its_error_is(also):
    """In a circle with its frames it would keep loaders and their workers, till Python cleans."""
    model = compiled(Net())
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ConfigurationError if also else DataError):
            model.fit(7, **also)
        del model
        assert gone() is None
    finally:
        gc.enable()
