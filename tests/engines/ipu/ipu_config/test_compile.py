"""compile(config=...): what a configuration fixes, refuses and reports."""

import textwrap

import pytest
import torch
from torch import nn

import ipufit
import ipufit.poptorch as poptorch
from ipufit import IPUConfig
from ipufit.engines.ipu.effects import APPROXIMATED, EXACT, NONE, parameter_effects
from ipufit.engines.ipu.engine import IpuEngine
from ipufit.engines.ipu.ipu_config.parameters import PARAMETERS
from ipufit.errors import ConfigurationError, PlanError
from ipufit.testing import RecordingEngine
from tests.engines.ipu.ipu_config.test_parameters import OTHERS
from tests.told import message as fault

X = torch.arange(96.0).reshape(24, 4).sin()
Y = torch.arange(24) % 3
FULL = {
    "replication_factor": 2,
    "gradient_accumulation_steps": 3,
    "device_iterations": 2,
    "inference_replication_factor": 4,
    "inference_device_iterations": 3,
    "output_mode": "all",
    "seed": 0,
}


def net():
    """With known weights."""
    made = nn.Linear(4, 3)
    with torch.no_grad():
        made.weight.copy_(X[:3])
        made.bias.zero_()
    return made


def model_of(config, engine="embedded", optimizer="sgd", **options):
    """A compiled model."""
    model = ipufit.Model(net(), engine=engine)
    model.compile(optimizer, "cross_entropy", config=config, **options)
    return model


def recorded(config, **options):
    """The same on an engine that computes nothing, and that engine."""
    engine = RecordingEngine()
    return model_of(config, lambda: engine, **options), engine


def fit(model, **options):
    """One epoch."""
    return model.fit(X, Y, **{"batch_size": 2, "verbose": 0, **options})


# What it fixes


@pytest.mark.long
def test_the_numbers_are_those_of_the_arguments(engine):
    """A configuration is another way to say the same: equal weights, history and metrics."""
    one = model_of(IPUConfig(**FULL), engine, metrics=["accuracy"])
    first = fit(one, validation_data=(X, Y))
    other = ipufit.Model(net(), engine=engine)
    other.compile("sgd", "cross_entropy", metrics=["accuracy"])
    second = fit(
        other,
        ipus=2,
        gradient_accumulation=3,
        device_iterations=2,
        seed=0,
        validation_data=ipufit.Validation((X, Y), ipus=4, device_iterations=3),
    )
    assert first.history == second.history
    assert torch.equal(one.module.weight, other.module.weight)
    assert one.evaluate(X, Y, verbose=0) == other.evaluate(
        X, Y, ipus=4, device_iterations=3, verbose=0
    )
    for name in ("seed", "ipus", "gradient_accumulation", "device_iterations", "engine"):
        assert first.params[name] == second.params[name]


@pytest.mark.long("ipu-standin")
def test_inference_has_its_own_counts():
    """Never those of training, as it would be without a configuration."""
    model, engine = recorded(IPUConfig(**FULL))
    fit(model, validation_data=(X, Y))
    plans = [(p.spec.mode.value, p.spec.plan) for p in engine.programs]
    assert [(mode, plan.replicas, plan.device_iterations) for mode, plan in plans] == [
        ("train", 2, 2),
        ("evaluate", 4, 3),
        ("evaluate", 4, 3),
    ]
    assert plans[0][1].gradient_accumulation == 3
    model.evaluate(X, Y, batch_size=2, verbose=0)
    model.predict(X, batch_size=2, verbose=0)
    list(model.predict_iter(X, batch_size=2))
    for program in engine.programs[3:]:
        assert (program.spec.plan.replicas, program.spec.plan.device_iterations) == (4, 3)
    assert len(engine.programs) == 6


@pytest.mark.long
def test_explain_and_the_searches_go_by_it(capsys):
    """They say what fit would do."""
    model = model_of(IPUConfig(**FULL))
    model.explain(X, batch_size=2)
    text = capsys.readouterr().out
    assert "= 2 samples x 3 accumulation x 2 replicas = 12 samples" in text
    assert f"Work, seed and options come from {IPUConfig(**FULL)!r}.\n" in text
    model.find_lr(X, Y, batch_size=2, updates=3)
    found = model.find_batch_size(X, Y, effective_batch_size=8)
    assert found.batch_size * found.gradient_accumulation * 2 == 8
    for search in (
        lambda: model.find_lr(X, Y, gradient_accumulation=2),
        lambda: model.find_batch_size(X, Y, effective_batch_size=8, ipus=4),
        lambda: model.explain(X, device_iterations=3),
    ):
        assert "must agree with IPUConfig." in fault(search)
    assert "seed must agree with IPUConfig.seed" in fault(model.find_lr, X, Y, seed=1)


def test_zero_is_the_seed():
    """Of fit, and of updates on single batches."""
    model, engine = recorded(IPUConfig(seed=0))
    assert fit(model).params["seed"] == 0
    model.train_on_batch(X, Y)
    assert [program.spec.seed for program in engine.programs] == [0, 0]


@pytest.mark.long("ipu-standin")
def test_a_model_without_a_configuration_goes_by_arguments_alone():
    """The defaults are those of before: 1 and 1, and validation as training."""
    model, engine = recorded(None)
    fit(model, ipus=2, device_iterations=3, validation_data=(X, Y))
    assert {p.spec.plan.shape for p in engine.programs} == {(3, 1, 2, 2)}
    fit(model)
    assert engine.programs[-1].spec.plan.shape == (1, 1, 1, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "mode"), [("all", "all"), ("final", "final"), ("default", "final"), ("sum", "sum")]
)
def test_the_output_mode_is_that_of_training(given, mode):
    """PopTorch's default is the final one there."""
    model, engine = recorded(IPUConfig(output_mode=given))
    fit(model)
    assert engine.programs[0].spec.config.outputs.mode == mode
    recorded(IPUConfig(output_mode=given), outputs=mode)


def test_ipus_are_rounded_up():
    """As optimum-graphcore always does."""
    model, engine = recorded(IPUConfig(replication_factor=3))
    fit(model)
    plan = engine.programs[0].spec.plan
    assert (plan.replicas, plan.reserved_ipus) == (3, 4)


@pytest.mark.long
def test_automatic_loss_scaling_is_a_dynamic_scale_here():
    """On the embedded engine; PopTorch has its own."""
    model, engine = recorded(IPUConfig(auto_loss_scaling=True))
    fit(model)
    assert engine.programs[0].spec.config.loss_scale == ipufit.LossScale()
    recorded(IPUConfig(auto_loss_scaling=True), precision=ipufit.Precision(loss_scale="dynamic"))
    model = ipufit.Model(net().half(), engine="ipu-standin")
    model.compile("sgd", "cross_entropy", config=IPUConfig(auto_loss_scaling=True))
    history = model.fit(X.half(), Y, batch_size=2, verbose=0)
    assert "loss_scale" not in history.params


@pytest.mark.long("ipu-standin")
def test_a_path_is_read_and_a_copy_is_used(tmp_path):
    """What is changed later changes no compiled model."""
    config = IPUConfig(seed=3)
    config.save_pretrained(tmp_path)
    for source in (tmp_path, str(tmp_path), tmp_path / "ipu_config.json", config):
        model, _ = recorded(source)
        config.seed = 4
        assert fit(model).params["seed"] == 3
        config.seed = 3
    by_pod = IPUConfig.from_dict({"seed": {"pod4": 4, "default": 5}})
    assert fit(recorded(by_pod)[0]).params["seed"] == 5
    assert fit(recorded(by_pod.for_pod_type("pod4"))[0]).params["seed"] == 4


def test_an_ipu_gets_the_options_that_are_not_in_the_plan():
    """What make_options sets itself is left alone, or it would be refused as a contradiction."""
    engine = IpuEngine(poptorch)
    given = {**FULL, "matmul_proportion": 0.3, "inference_matmul_proportion": 0.4}
    made = engine.options_of(IPUConfig(**given, auto_loss_scaling=True))
    training, inference = made["training_options"], made["inference_options"]
    plain = poptorch.Options()
    for options in (training, inference):
        for name in ("replication_factor", "device_iterations", "output_mode"):
            assert getattr(options, name) == getattr(plain, name)
        assert not options.exists("random_seed")
        assert options.Training.gradient_accumulation == 1
    assert training.available_memory_proportion == {0: 0.3}
    assert inference.available_memory_proportion == {0: 0.4}
    assert training._Popart.options["automaticLossScalingSettings.enabled"] is True


@pytest.mark.long
def test_a_folder_for_executables_is_used(tmp_path):
    """On the IPU engine."""
    config = IPUConfig(executable_cache_dir=tmp_path / "cache", output_mode="all")
    fit(model_of(config, "ipu-standin"))
    assert list((tmp_path / "cache").iterdir())


# What disagrees


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (
            {"ipus": 4},
            ["`ipus` must agree with IPUConfig.replication_factor x ipus_per_replica, which"],
        ),
        ({"device_iterations": 1}, ["`device_iterations` must agree with IPUConfig.device_iter"]),
        (
            {"gradient_accumulation": 1},
            ["`gradient_accumulation` must agree with IPUConfig.gradient_accumulation_steps, wh"],
        ),
        (
            {"validation_data": ipufit.Validation((X, Y), ipus=2)},
            ["`ipus` of Validation must agree with IPUConfig.inference_replication_factor x in"],
        ),
        (
            {"validation_data": ipufit.Validation((X, Y), device_iterations=2)},
            ["`device_iterations` of Validation must agree with IPUConfig.inference_device_it"],
        ),
        ({"seed": 1}, ["seed must agree with IPUConfig.seed, which is 0, got 1. Leave it out, or"]),
        ({"ipus": 1, "device_iterations": 9, "seed": 5}, ["`ipus`", "`device_it", "seed must"]),
        ({"device_iterations": "3"}, ["`device_iterations` must agree"]),
    ],
)
def test_an_argument_of_fit_that_disagrees_is_refused(given, texts):
    """Both are named, and all of them at once; equal values are fine."""
    model, engine = recorded(IPUConfig(**FULL))
    lines = fault(fit, model, **given).splitlines()
    assert len(lines) == len(texts)
    assert all(line.startswith(text) for line, text in zip(lines, texts))
    assert engine.programs == []
    fit(model, ipus=2, device_iterations=2, gradient_accumulation=3, seed=0)
    fit(model, validation_data=ipufit.Validation((X, Y), ipus=4, device_iterations=3))


def test_the_text_says_what_to_do():
    """In full, and with values that are accepted."""
    model, _ = recorded(IPUConfig(**FULL))
    with pytest.raises(PlanError) as caught:
        fit(model, device_iterations=4)
    assert str(caught.value) == (
        "`device_iterations` must agree with IPUConfig.device_iterations, which says 2, got 4. "
        "Leave it out, or compile with another config."
    )
    fit(model, **caught.value.suggestion)


@pytest.mark.parametrize("call", ["evaluate", "predict", "predict_iter"])
def test_an_argument_of_inference_that_disagrees_is_refused(call):
    """Against the values for inference."""
    model, _ = recorded(IPUConfig(**FULL))
    data = (X, Y) if call == "evaluate" else (X,)
    text = fault(getattr(model, call), *data, ipus=2, device_iterations=1)
    assert [line.split(",")[0] for line in text.splitlines()] == [
        "`ipus` must agree with IPUConfig.inference_replication_factor x "
        "inference_ipus_per_replica",
        "`device_iterations` must agree with IPUConfig.inference_device_iterations",
    ]
    getattr(model, call)(*data, ipus=4, device_iterations=3, verbose=0)


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        (
            IPUConfig(),
            {"outputs": "all"},
            "outputs must agree with IPUConfig.output_mode, which is 'final', got 'all'. Leave "
            "it out, or change the config.",
        ),
        (
            IPUConfig(auto_loss_scaling=True),
            {"precision": ipufit.Precision(loss_scale=8.0)},
            "Precision.loss_scale must agree with IPUConfig.auto_loss_scaling, which is True, got "
            "8.0. Leave one out.",
        ),
        *(
            (
                IPUConfig(),
                {"poptorch": pair},
                f"config and {name} both set how PopTorch runs the model. Leave one out; with "
                f"{name}, pass ipus, device_iterations and gradient_accumulation to fit.",
            )
            for name, pair in (
                ("training_options", poptorch.Options()),
                ("inference_options", (None, poptorch.Options())),
            )
        ),
        (
            {"seed": 1},
            {},
            "config must be an ipufit.IPUConfig, the path of one, or None, got dict. Read a dict "
            "with ipufit.IPUConfig.from_dict(...).",
        ),
        (
            IPUConfig(output_mode="sum"),
            {"metrics": ["accuracy"]},
            "metrics compare outputs with targets, but outputs='sum' returns only sums of outputs.",
        ),
    ],
)
def test_an_argument_of_compile_that_disagrees_is_refused(config, options, text):
    """Both are named."""
    assert fault(model_of, config, "ipu-standin", **options).startswith(text)


def test_faults_of_a_configuration_come_with_all_others(tmp_path):
    """One go, one error."""
    (tmp_path / "ipu_config.json").write_text('{"sed": 1}')
    lines = fault(model_of, tmp_path, optimizer="sdg", run_eagerly=1).splitlines()
    assert "can't be read as an IPUConfig:" in lines[0]
    assert lines[1] == "IPUConfig has no parameter 'sed'. Did you mean 'seed'?"
    assert len(lines) == 4
    config = IPUConfig()
    config.layers_per_ipu = [1, 2]
    assert "ipus_per_replica has 1" in fault(model_of, config)


class Language(nn.Module):
    """Two embeddings and two linear layers, of which the larger are meant."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.position, self.embed = nn.Embedding(4, 6), nn.Embedding(12, 6)
        blocks = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(6, 12)

    def forward(self, x):
        return self.head(self.body(self.embed(x) + self.position(x % 4)))


@pytest.mark.parametrize(
    ("given", "cuts"),
    [
        ({"embedding_serialization_factor": 2}, {"embed": "factor=2"}),
        ({"projection_serialization_factor": 3}, {"head": "factor=3"}),
        ({"serialized_embedding_splits_per_ipu": [2]}, {"embed": "splits_per_ipu=[2]"}),
        (
            {"serialized_projection_splits_per_ipu": [4], "embedding_serialization_factor": 1},
            {"head": "splits_per_ipu=[4]"},
        ),
        ({}, {}),
    ],
)
def test_the_largest_embedding_and_projection_are_cut(given, cuts):
    module = Language()
    ipufit.Model(module).compile("sgd", "mse", config=IPUConfig(**given))
    found = {n: m.parts.describe() for n, m in module.named_modules() if hasattr(m, "parts")}
    assert found == cuts


def test_every_layer_is_computed_again(capsys):
    """Which is said; and bits stay as they are (test_recomputation.py)."""
    model = ipufit.Model(Language())
    model.compile("sgd", "mse", config=IPUConfig(recompute_checkpoint_every_layer=True))
    assert model._session.config.recompute == ("body.0", "body.1")


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (
            {"embedding_serialization_factor": 2},
            {"memory": ipufit.Memory(serialize={"embed": 3})},
            "Memory.serialize must agree with IPUConfig.embedding_serialization_factor, which "
            "says 2, got 3 for 'embed'. Leave one out.",
        ),
    ],
)
def test_what_is_cut_is_said_once(given, options, text):
    model = ipufit.Model(Language())
    assert fault(model.compile, "sgd", "mse", config=IPUConfig(**given), **options) == text


def test_a_module_without_the_layer_that_is_cut_is_refused():
    config = IPUConfig(embedding_serialization_factor=2)
    assert fault(model_of, config) == (
        "IPUConfig.embedding_serialization_factor cuts an nn.Embedding, but Linear has none that "
        "can be cut. Leave it out."
    )


def stack():
    """Three layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


@pytest.mark.long
def test_layers_per_ipu_divides_the_module(engine):
    """As the argument of compile does; inference is sharded, so nothing has to be filled."""
    config = IPUConfig(layers_per_ipu=[2, 1], gradient_accumulation_steps=3, replication_factor=2)
    weights, reports = [], []
    for options, work in (
        ({"config": config}, {}),
        (
            {"parallel": ipufit.Parallel(layers_per_ipu=[2, 1])},
            {"ipus": 4, "gradient_accumulation": 3},
        ),
    ):
        model = ipufit.Model(stack(), engine=engine)
        model.compile("sgd", "cross_entropy", outputs="final", **options)
        reports.append(model.fit(X, Y, batch_size=2, seed=1, verbose=0, **work).history)
        reports.append(model.evaluate(X, Y, verbose=0, batch_size=2))
        weights.append(model.module.state_dict())
    assert reports[:2] == reports[2:]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])


@pytest.mark.long
def test_one_wildcard_spreads_the_layers_over_all_ipus(capsys):
    config = IPUConfig(ipus_per_replica=2, gradient_accumulation_steps=3)
    model = ipufit.Model(stack())
    model.compile("sgd", "cross_entropy", config=config)
    model.fit(X, Y, batch_size=2, verbose=0)
    model.explain()
    text = capsys.readouterr().out
    assert "Training: pipelined over 2 stages: stage 0 from 0; stage 1 from 1." in text
    assert "Inference: sharded over 2 stages: stage 0 from 0; stage 1 from 1." in text


class Layers(nn.Module):
    """As many as a number says, one after the other."""

    def __init__(self, count):
        super().__init__()
        self.block = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x):
        for layer in self.block:
            x = layer(x).tanh()
        return x


class Summarizer(nn.Module):
    """Has an encoder and a decoder."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.head = Layers(4), Layers(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.decoder(self.encoder(x)))


@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
def test_a_file_changed_for_inference_spreads_encoder_and_decoder(engine, tmp_path, capsys):
    """As a notebook about T5 does, which also names a folder for executables."""
    IPUConfig(layers_per_ipu=[1, 3, 2, 2], gradient_accumulation_steps=8).save_pretrained(tmp_path)
    config = IPUConfig.from_pretrained(
        str(tmp_path),
        executable_cache_dir=str(tmp_path / "cache"),
        inference_layers_per_ipu=[-1],
    )
    module = Summarizer()
    model = ipufit.Model(module, engine=engine)
    model.compile("sgd", "cross_entropy", config=config)
    model.fit(X, Y, batch_size=1, verbose=0)
    values = model.evaluate(X, Y, batch_size=1, verbose=0)
    expected = nn.functional.cross_entropy(module(X), Y).item()
    assert values["loss"] == pytest.approx(expected, rel=1e-5)
    model.explain()
    text = capsys.readouterr().out
    stages = "stage 0 from encoder.block.0; stage 1 from {}; stage 2 from {}; stage 3 from {}."
    trained = stages.format("encoder.block.1", "decoder.block.0", "decoder.block.2")
    spread = stages.format("encoder.block.2", "decoder.block.0", "decoder.block.2")
    assert f"Training: pipelined over 4 stages: {trained}" in text
    assert f"Inference: sharded over 4 stages: {spread}" in text
    assert (tmp_path / "cache").exists() is (engine == "ipu-standin")


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (
            {"layers_per_ipu": [2, 1]},
            {"parallel": ipufit.Parallel(stages={"1": 1})},
            "stages and IPUConfig.layers_per_ipu both divide the module, the latter by [2, 1]. "
            "Leave one out; with [-1] in the config, compile decides.",
        ),
        (
            {"layers_per_ipu": [2, 1]},
            {"parallel": ipufit.Parallel(layers_per_ipu=[1, 2])},
            "layers_per_ipu must agree with IPUConfig.layers_per_ipu, which is [2, 1], got [1, "
            "2]. Leave it out, or change the config.",
        ),
        (
            {"ipus_per_replica": 2},
            {"parallel": ipufit.Parallel(ipus_per_replica=4)},
            "ipus_per_replica must agree with IPUConfig.ipus_per_replica, which is 2, got 4. Leave "
            "it out, or change the config.",
        ),
        (
            {"ipus_per_replica": 4},
            {"parallel": ipufit.Parallel(stages={"1": 1})},
            "IPUConfig.ipus_per_replica must be the number of IPUs that the pipelined stages need, "
            "2, got 4. Set it to 2.",
        ),
        (
            {"layers_per_ipu": [1, 1]},
            {},
            "IPUConfig.layers_per_ipu must add up to the number of repeated layers, got 2 and the "
            "module has 3 (3 in the module itself). Write -1 for one of the numbers to assign the "
            "rest, or name the layers with layers=.",
        ),
    ],
)
def test_a_module_is_divided_by_the_configuration_or_by_arguments(given, options, text):
    model = ipufit.Model(stack())
    found = fault(model.compile, "sgd", "cross_entropy", config=IPUConfig(**given), **options)
    assert found.splitlines()[0] == text


# What it reports

ENGINES = ["embedded", "ipu", "ipu-standin"]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_parameter_is_in_exactly_one_list(engine):
    """Of the report, too: a line each, under one of three headings, with a reason."""
    rows = parameter_effects(PARAMETERS, engine)
    assert list(rows) == list(PARAMETERS)
    assert {kind for kind, _ in rows.values()} <= {EXACT, APPROXIMATED, NONE}
    report = IPUConfig().report(engine).splitlines()
    assert report[0] == f"IPUConfig on engine {engine!r}"
    assert [line for line in report[1:] if not line.startswith("  ")] == [
        f"{kind}:" for kind in (EXACT, APPROXIMATED, NONE)
    ]
    named = [line.strip().partition("=")[0] for line in report if line.startswith("  ")]
    assert sorted(named) == sorted(PARAMETERS)
    assert all(len(why) > 10 for _, why in rows.values())


def seen(engine_name, capsys, **given):
    """What a configuration does on an engine (plans, recipes, options, refusals), and its text."""
    config = IPUConfig(**{"output_mode": "final", **given})
    engine = RecordingEngine()
    engine.name = engine_name
    options = None
    if engine_name != "embedded":
        made = IpuEngine(poptorch).options_of(config)
        options = {role: repr(value) for role, value in made.items()}
        engine.options_of = lambda config: {}
    capsys.readouterr()
    try:
        model = model_of(config, lambda: engine)
    except ConfigurationError as error:
        return str(error), None
    fit(model, validation_data=(X, Y))
    specs = [
        (p.spec.plan, p.spec.config, p.spec.seed if config.seed is not None else None)
        for p in engine.programs
    ]
    return (specs, options, str(model.module)), capsys.readouterr().out


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_every_parameter_does_what_its_list_says(name, engine, capsys):
    """No effect means none but a line of the report; anything else changes what is built."""
    plain, plain_text = seen(engine, capsys)
    # On one IPU the number of layers chooses nothing.
    given = {name: [1, 1] if name.endswith("layers_per_ipu") else OTHERS[name]}
    if name == "replicated_tensor_sharding":
        given["replication_factor"] = 2
        plain, plain_text = seen(engine, capsys, replication_factor=2)
    found, text = seen(engine, capsys, **given)
    kind, why = parameter_effects(PARAMETERS, engine)[name]
    if name == "recompute_checkpoint_every_layer":
        # A refusal on every engine: this module has no repeated layers to mark.
        assert "recompute=True means every repeated layer" in found
    elif kind == NONE:
        # The stand-in takes the options of an IPU, and says itself that it leaves them aside.
        assert found == plain or engine == "ipu-standin"
        assert text != plain_text
        value = getattr(IPUConfig(**given), name)
        flat = " ".join(text.split())
        assert f"{name}={value!r}: {why}" in flat
    elif kind != NONE:
        assert found != plain


def test_compile_prints_the_three_lists(capsys):
    """Names of all, reasons of what was set and does not hold exactly."""
    model_of(IPUConfig(seed=0, enable_half_partials=False))
    assert capsys.readouterr().out == textwrap.dedent(
        """\
        IPUConfig on engine 'embedded'; config.report('embedded') says why
          exact: replication_factor, inference_replication_factor, gradient_accumulation_steps,
              layers_per_ipu, inference_layers_per_ipu, ipus_per_replica, inference_ipus_per_replica,
              recompute_checkpoint_every_layer, device_iterations, inference_device_iterations, output_mode
          approximated: optimizer_state_offchip, embedding_serialization_factor,
              inference_embedding_serialization_factor, serialized_embedding_splits_per_ipu,
              inference_serialized_embedding_splits_per_ipu, projection_serialization_factor,
              inference_projection_serialization_factor, serialized_projection_splits_per_ipu,
              inference_serialized_projection_splits_per_ipu, seed, auto_loss_scaling
            seed=0: seed of fit, which gives other random numbers than on an IPU
          no effect here: replicated_tensor_sharding, matmul_proportion, inference_matmul_proportion,
              enable_half_partials, executable_cache_dir, explicit_ir_inference, parallelize_kwargs,
              inference_parallelize_kwargs
            enable_half_partials=False: torch chooses the type of partial sums
        """  # noqa: E501
    )
    ipufit.Model(net()).compile("sgd", "cross_entropy")
    assert capsys.readouterr().out == ""


def test_the_report_says_what_is_odd():
    """Sharding over one replica shares nothing; optimum-graphcore warns of it."""
    note = "note: replicated_tensor_sharding needs a replication_factor of more than 1: nothing is"
    assert note in IPUConfig(replicated_tensor_sharding=True).report()
    assert note not in IPUConfig(replicated_tensor_sharding=True, replication_factor=2).report()
    assert fault(IPUConfig().report, "gpu") == (
        "engine must be one of 'embedded', 'ipu', 'ipu-standin', got 'gpu'. Try 'embedded'."
    )
