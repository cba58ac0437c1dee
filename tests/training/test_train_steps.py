"""Steps of one's own: equal to their loops, the same bits however they run, and clear refusals."""

import copy
import dataclasses
import functools
import importlib
import re

import pytest
import torch
from torch import nn

import ipufit
from ipufit import TrainStep
from ipufit.errors import ConfigurationError, LossError, MetricError, NonFiniteLossError
from tests.engines import moves_parts, own_step
from tests.optim.own_optimizers import Lion, ScheduleFree
from tests.training.own_steps import (
    PROGRAMS,
    Adversaries,
    adam,
    by_hand,
    deceive,
    fit,
    make,
    samples,
    smooth,
    tell_apart,
)

GAN = PROGRAMS["dcgan"]


def difference(net, other):
    """The largest difference of two modules' states."""
    pairs = zip(net.state_dict().values(), other.state_dict().values())
    return max((one.double() - two.double()).abs().max().item() for one, two in pairs)


def equal(first, second):
    """Whether two fits agree in every bit."""
    (net, history, _), (other, other_history, _) = first, second
    return difference(net, other) == 0 and history.history == other_history.history


@moves_parts
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_equals_its_loop(name, accumulation):
    """44 samples in micro-batches of 4: with accumulation the last update is a smaller one."""
    program = PROGRAMS[name]
    net, history, _ = fit(program, gradient_accumulation=accumulation)
    assert difference(net, by_hand(program, accumulation=accumulation)) < 1e-10
    assert history.history["loss"][0] != history.history["loss"][-1]


@moves_parts
@pytest.mark.parametrize("name", PROGRAMS)
def test_device_iterations_and_eager_runs_have_the_same_bits(name):
    """Executions of several updates, and the module itself in place of a recording."""
    first = fit(PROGRAMS[name], gradient_accumulation=2)
    assert equal(first, fit(PROGRAMS[name], gradient_accumulation=2, device_iterations=3))
    eager = {"run_eagerly": True}
    assert equal(first, fit(PROGRAMS[name], gradient_accumulation=2, compile_options=eager))


@moves_parts
@pytest.mark.parametrize("name", ["wgan-gp", "actor-critic"])
def test_replicas_are_accumulation(name):
    """But for running statistics of BatchNorm, which each replica has of its own.

    Once ipufit.poptorch is imported, a module may have blocks, which are counted before it runs.
    """
    importlib.import_module("ipufit.poptorch")
    program = PROGRAMS[name]
    pairs = zip(fit(program, ipus=4)[0].parameters(), by_hand(program, accumulation=4).parameters())
    assert max((one - two).abs().max().item() for one, two in pairs) < 1e-10
    assert equal(fit(program, ipus=4), fit(program, ipus=4, device_iterations=2))


class Stop(ipufit.callbacks.Callback):
    """Interrupts the second epoch, if it is to."""

    def __init__(self, stops):
        super().__init__()
        self.stops = stops

    def on_train_batch_end(self, batch, logs=None):
        if self.stops and self.model.history.epoch and batch == 4:
            raise KeyboardInterrupt


def interrupted(work, path, folder, stops=False, **options):
    """What a fit returns that writes checkpoints after every update into this folder."""
    checkpoint = ipufit.Checkpoint(path / folder, every_updates=1, **options)
    return work(callbacks=[Stop(stops)], checkpoint=checkpoint)


@moves_parts
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupted_run_goes_on_with_the_same_bits(name, tmp_path):
    """In the middle of an epoch, between updates that make a step and updates that don't."""
    work = functools.partial(fit, PROGRAMS[name], gradient_accumulation=2)
    run = functools.partial(interrupted, work, tmp_path)
    expected = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", stops=True)
    assert equal(expected, run("parts", resume="auto"))


def noisy(net, batch):
    """Draws noise inside the step."""
    real, _ = batch
    noise = torch.randn(len(real), 3, dtype=real.dtype)
    fake = net.generator(noise)
    deceived = net.critic(fake).mean()
    lost = net.critic(fake.detach()).mean() - net.critic(real).mean()
    return {"d": lost, "deceived": deceived, "noise": noise.mean()}


@moves_parts
def test_random_numbers_are_functions_of_update_step_and_repetition():
    """Repetitions draw other numbers, executions of several updates the same."""
    seen = {}

    def watched(net, batch):
        result = noisy(net, batch)
        seen.setdefault(net.training, []).append(result["noise"].item())
        return result

    def run(function, repeat=3, **options):
        net = make(GAN)
        model = ipufit.Model(net)
        steps = [TrainStep(function, {"d": "critic"}, repeat=repeat)]
        steps.append(TrainStep(lambda n, b: {"g": -noisy(n, b)["deceived"]}, {"g": "generator"}))
        options = {"run_eagerly": function is watched, **options}
        device_iterations = options.pop("device_iterations", 1)
        model.compile(adam(net, GAN.rates), steps, **options)
        x = samples()[0]
        history = model.fit(
            x, x, batch_size=4, epochs=2, shuffle=False, verbose=0, seed=3,
            device_iterations=device_iterations,
        )  # fmt: skip
        return net, history, model

    first = run(noisy)
    assert equal(first, run(noisy, device_iterations=4))
    assert equal(first, run(watched))
    # The first call is the check before any work.
    drawn = seen[True][-3 * 22 :]
    assert len(set(drawn)) == 3 * 22


@moves_parts
def test_history_has_each_loss_and_what_the_steps_log():
    """Their sum is the loss; a step that is made now and then counts when it is made."""
    _, history, model = fit(PROGRAMS["critic-more-often"], epochs=1)
    assert set(history.history) == {"loss", "d", "gp", "g"}
    assert history.history["loss"][0] != history.history["d"][0]
    x, y = samples()
    values = model.evaluate(list(zip(x.split(4), y.split(4))), verbose=0)
    assert set(values) == {"loss", "d", "gp", "g"}
    assert values["loss"] == pytest.approx(values["d"] + values["g"], abs=1e-12)


@moves_parts
def test_evaluation_is_the_mean_of_the_steps_over_all_samples():
    """In eval mode, with a gradient where a step takes one, and nothing moves."""
    _, _, model = fit(PROGRAMS["wgan-gp"], epochs=1)
    x, y = samples()
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    values = model.evaluate(list(zip(x.split(4), y.split(4))), verbose=0)
    model.module.eval()
    total = 0.0
    for pair in zip(x.split(4), y.split(4)):
        with torch.enable_grad():
            total += 4 * PROGRAMS["wgan-gp"].turns[0][0](model.module, pair)["d"].item()
    assert values["d"] == pytest.approx(total / 44, abs=1e-12)
    after = model.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_forward_of_several_arguments_is_the_steps_to_call():
    """The batch is held against the step, not against forward."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 1), nn.Linear(3, 1)

        def forward(self, x, y, *, scale):
            return scale * (self.one(x) + self.two(y))

    net = Sum().double()
    model = ipufit.Model(net)
    model.compile("sgd", TrainStep(lambda net, batch: net(*batch, scale=2.0).square().mean()))
    x, y = samples()
    losses = model.fit(list(zip(x.split(4), y.split(4))), epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]


@moves_parts
def test_predict_calls_the_module_itself():
    """A step is for training; what comes out of the module is its forward's."""
    net, _, model = fit(GAN, epochs=1)
    noise = samples()[1]
    net.eval()
    assert torch.equal(model.predict(noise, batch_size=4, verbose=0), net(noise))


def test_metrics_compare_outputs_with_the_second_part_of_the_batch():
    """Under "outputs" a step hands out what it has computed anyway."""

    def step(net, batch):
        x, y = batch
        out = net(x)
        return {"loss": (out - y).square().mean(), "outputs": out}

    net = make(PROGRAMS["sam"])
    model = ipufit.Model(net)
    model.compile("sgd", TrainStep(step), metrics=["mse"])
    x, y = samples()
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=(x, y)).history
    assert history["mse"] == pytest.approx(history["loss"])
    assert history["val_mse"] == pytest.approx(history["val_loss"])


@moves_parts
def test_schedules_averages_and_clipping_go_with_turns():
    """A rate that falls with the update falls for all turns of one update at once."""
    rates = []

    class Rates(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(logs["learning_rate"])

    options = {
        "lr_scheduler": lambda update: 0.9**update,
        "ema": ipufit.EMA(0.9),
        "clip": ipufit.Clip(global_norm=0.1),
    }
    first = fit(PROGRAMS["wgan-gp"], epochs=2, compile_options=options, callbacks=[Rates()])
    assert rates[1] == pytest.approx(0.9 * rates[0])
    assert equal(first, fit(PROGRAMS["wgan-gp"], epochs=2, compile_options=options,
                            device_iterations=3, callbacks=[Rates()]))  # fmt: skip


class Two(nn.Module):
    """A body and a head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x):
        return self.head(self.body(x))


def both(net, batch):
    """Moves all."""
    return {"both": (net(batch[0]) - batch[1]).square().mean()}


def body(net, batch):
    """Moves a part of it."""
    return {"body": (net.body(batch[0]) - batch[1]).abs().mean()}


@moves_parts
def test_a_parameter_without_a_gradient_keeps_its_state():
    """Two losses on the same optimizer: what one of them does not reach, its turn leaves alone."""

    torch.manual_seed(2)
    net = Two()
    twin = copy.deepcopy(net)
    model = ipufit.Model(net)
    model.compile("adamw", [TrainStep(both, {"both": None}), TrainStep(body, {"body": None})])
    x, y = samples()
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    optimizer = torch.optim.AdamW(twin.parameters())
    for _ in range(2):
        for pair in zip(x.split(4), y.split(4)):
            for function in (both, body):
                optimizer.zero_grad()
                sum(function(twin, pair).values()).backward()
                optimizer.step()
    assert difference(net, twin) < 1e-12
    steps = [float(model.optimizer.state[p]["step"]) for p in net.parameters()]
    assert steps == [44, 44, 22, 22]


class Dropping(nn.Module):
    """Layers of which a value of the batch leaves one out, and a head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), nn.Linear(2, 3)
        self.double()

    def hidden(self, x):
        left_out = int(x.abs().sum() * 97) % 4
        for number, layer in enumerate(self.body):
            x = x if number == left_out else x + layer(x).tanh()
        return x

    def forward(self, x):
        return self.head(self.hidden(x))


def whole(net, batch):
    """Moves all that it reaches."""
    return {"whole": (net(batch[0]) - batch[1]).square().mean()}


def hidden(net, batch):
    """Moves the body alone, or nothing: of some batches its loss has no gradient for it."""
    x = batch[0]
    scale = torch.ones((), dtype=x.dtype, requires_grad=True)
    of = net.hidden(x) if x[0, 0] < 0 else scale * x
    return {"hidden": of.abs().mean()}


def fit_dropping(optimizer, compile_options, **options):
    """The module after a fit, its history and its model."""
    torch.manual_seed(1)
    net = Dropping()
    model = ipufit.Model(net)
    steps = [TrainStep(whole, {"whole": None}), TrainStep(hidden, {"hidden": "body"})]
    model.compile(optimizer(net.parameters()), steps, **compile_options)
    data = {"batch_size": 4, "epochs": 3, "seed": 5, "shuffle": False, "verbose": 0}
    return net, model.fit(*samples(), **data, **options), model


ADAMW = functools.partial(torch.optim.AdamW, lr=0.03)
EAGER = {"run_eagerly": True}


@moves_parts
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1], ids=["free", "clipped"])
@pytest.mark.parametrize(
    "optimizer", [ADAMW, functools.partial(Lion, lr=0.01)], ids=["adamw", "own"]
)
def test_what_a_step_does_not_reach_in_an_update_stays_where_the_module_runs(
    optimizer, clip, accumulation
):
    """Neither momentum nor decay moves it, whatever it moved in the update before."""
    options = {**EAGER, **({"clip": ipufit.Clip(global_norm=clip)} if clip else {})}
    net, _, model = fit_dropping(optimizer, options, gradient_accumulation=accumulation)
    torch.manual_seed(1)
    twin = Dropping()
    by_hand = optimizer(twin.parameters())
    x, y = samples()
    for _ in range(3):
        for several in zip(x.split(4 * accumulation), y.split(4 * accumulation)):
            for function in (whole, hidden):
                by_hand.zero_grad()
                for pair in zip(*(tensor.split(4) for tensor in several)):
                    (loss,) = function(twin, pair).values()
                    (loss * len(pair[0]) / len(several[0])).backward()
                if clip:
                    nn.utils.clip_grad_norm_(twin.parameters(), clip)
                by_hand.step()
    assert difference(net, twin) < 1e-10
    for parameter, of_twin in zip(net.parameters(), twin.parameters()):
        mine, other = model.optimizer.state[parameter], by_hand.state[of_twin]
        assert mine.keys() == other.keys()
        assert float(mine.get("step", 0)) == float(other.get("step", 0))


@moves_parts
@pytest.mark.parametrize("clip", [{}, {"clip": ipufit.Clip(global_norm=0.1)}], ids=["", "clipped"])
def test_what_varies_in_turns_has_the_same_bits_however_it_runs(clip, tmp_path):
    """Executions of several updates, jit="auto", and a run that goes on."""
    options = {**EAGER, **clip}
    first = fit_dropping(ADAMW, options)
    assert equal(first, fit_dropping(ADAMW, options, device_iterations=4))
    with pytest.warns(UserWarning, match="Dropping can't be recorded as one program"):
        assert equal(first, fit_dropping(ADAMW, clip))

    run = functools.partial(interrupted, functools.partial(fit_dropping, ADAMW, options), tmp_path)
    expected = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", stops=True)
    assert equal(expected, run("parts", resume="auto"))


@own_step
@pytest.mark.parametrize("alone", [False, True], ids=["beside another", "alone"])
@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
def test_a_step_that_runs_as_it_is_runs_once_in_every_turn(alone, eager):
    """A schedule-free optimizer counts its steps, a hook is called by each."""
    counts = {}
    has_hooks = hasattr(torch.optim.Optimizer, "register_step_post_hook")

    def optimizers(net):
        counts[net] = []
        free = ScheduleFree(net.parameters() if alone else net.body.parameters(), lr=0.05)
        if has_hooks:
            free.register_step_post_hook(lambda *_: counts[net].append(1))
        return [free] if alone else [free, torch.optim.Adam(net.head.parameters(), lr=0.05)]

    torch.manual_seed(2)
    net = Two()
    twin = copy.deepcopy(net)
    chosen, by_hand = optimizers(net), optimizers(twin)
    model = ipufit.Model(net)
    steps = [TrainStep(both, {"both": None}), TrainStep(body, {"body": "body"})]
    model.compile(chosen[0] if alone else chosen, steps, run_eagerly=eager)
    x, y = samples()
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    by_hand[0].train()
    for pair in zip(x.split(4), y.split(4)):
        for function in (both, body):
            twin.zero_grad()
            sum(function(twin, pair).values()).backward()
            for each in by_hand:
                each.step()
    by_hand[0].eval()
    assert difference(net, twin) < 1e-12
    assert len(counts[net]) == len(counts[twin]) == (22 if has_hooks else 0)


@own_step
@pytest.mark.parametrize("optimizer", ["one", "several"])
@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
def test_a_bound_is_one_of_all_gradients_of_a_step(optimizer, eager):
    """Also where another step moves a part of them."""

    def optimizers(net):
        if optimizer == "one":
            return [torch.optim.SGD(net.parameters(), lr=0.5)]
        rest = torch.optim.Adagrad(net.head.parameters(), lr=0.5)
        return [torch.optim.SGD(net.body.parameters(), lr=0.5), rest]

    torch.manual_seed(2)
    net = Two()
    twin = copy.deepcopy(net)
    model = ipufit.Model(net)
    chosen = optimizers(net)
    steps = [TrainStep(both, {"both": None}), TrainStep(body, {"body": "body"})]
    bound = ipufit.Clip(global_norm=0.1)
    model.compile(chosen if chosen[1:] else chosen[0], steps, clip=bound, run_eagerly=eager)
    x, y = samples()
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    by_hand = optimizers(twin)
    for pair in zip(x.split(4), y.split(4)):
        for function in (both, body):
            twin.zero_grad()
            sum(function(twin, pair).values()).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            for each in by_hand:
                each.step()
    assert difference(net, twin) < 1e-12


@moves_parts
@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
def test_a_loss_that_is_not_finite_leaves_the_state_before_its_update(eager):
    """Also where an earlier turn of the update has moved weights already."""

    def lost(net, batch):
        return {"g": -net.critic(net.generator(batch[1])).mean() / batch[1][0, 0].abs()}

    steps = [TrainStep(tell_apart, {"d": "critic"}), TrainStep(lost, {"g": "generator"})]
    x, y = (tensor.clone() for tensor in samples())
    y[4 * 5, 0] = 0.0

    def run(updates, device_iterations):
        net = make(GAN)
        model = ipufit.Model(net)
        model.compile(adam(net, GAN.rates), steps, run_eagerly=eager)
        loader = list(zip(x.split(4), y.split(4)))[:updates]
        model.fit(loader, verbose=0, device_iterations=device_iterations)
        return net

    for device_iterations in (1, 4):
        net = make(GAN)
        model = ipufit.Model(net)
        model.compile(adam(net, GAN.rates), steps, run_eagerly=eager)
        with pytest.raises(NonFiniteLossError, match=r"the loss 'g' must be .* in update 5"):
            model.fit(
                list(zip(x.split(4), y.split(4))), verbose=0, device_iterations=device_iterations
            )
        assert difference(net, run(5, device_iterations)) == 0


def compiled(loss, optimizer=None, net=None, **options):
    """A model of the adversaries, or of another module."""
    net = net or make(GAN)
    model = ipufit.Model(net)
    model.compile(optimizer or adam(net, GAN.rates), loss, **options)
    return model


@moves_parts
@pytest.mark.parametrize(
    ("make_loss", "options", "text"),
    [
        (
            lambda: TrainStep(nn.Linear(1, 1)),
            {},
            "TrainStep takes a function of (module, batch) that returns a loss or a dict of losses",
        ),
        (lambda: TrainStep(deceive, {}), {}, "moves must name at least one loss, got {}."),
        (
            lambda: TrainStep(deceive, {"outputs": None}),
            {},
            "moves must name losses, got 'outputs'",
        ),
        (lambda: TrainStep(deceive, {"samples": None}), {}, "got 'samples'. Choose another name"),
        (lambda: TrainStep(deceive, 3), {}, "moves must be a name or a list of names"),
        (lambda: TrainStep(deceive, [3]), {}, "moves must name parameters with strings, got 3."),
        (lambda: TrainStep(deceive, every=0), {}, "every must be an integer of at least 1, got 0"),
        (lambda: TrainStep(deceive, repeat=True), {}, "repeat must be an integer of at least 1"),
        (lambda: TrainStep(deceive, at_once=1), {}, "at_once must be True or False, got 1."),
        (
            lambda: TrainStep(lambda batch: 0),
            {},
            "a function of (module, batch), got <lambda>(batch)",
        ),
        (
            lambda: TrainStep(deceive, "generator", at_once=True),
            {},
            "at_once=True is for several losses, named in moves, got moves='generator'.",
        ),
        (
            lambda: TrainStep(deceive, every=2),
            {},
            "at least one step must run in every update, got every=2. Give the most frequent one",
        ),
        (
            lambda: [TrainStep(deceive), TrainStep(tell_apart, {"d": None})],
            {},
            "each of several losses must have its own name; History logs it",
        ),
        (
            lambda: [TrainStep(deceive), "mse"],
            {},
            "TrainSteps can't be mixed with other losses, because they take turns, got str",
        ),
        (
            lambda: TrainStep(deceive),
            {"loss_weights": [1]},
            "loss_weights is for losses of outputs, got [1] with a TrainStep.",
        ),
        (
            lambda: TrainStep(deceive),
            {"reduction": ipufit.Reduction(normalize="tokens")},
            "normalize='tokens' needs a loss that returns its number of tokens",
        ),
        (
            lambda: [TrainStep(deceive, {"g": None}), TrainStep(deceive, {"g": None})],
            {},
            "losses of several steps must have different names, got 'g' twice.",
        ),
        (
            lambda: TrainStep(deceive, {"g": "generater"}),
            {},
            "moves of 'g' must name trainable parameters of the optimizer, got 'generater', which "
            "matches none. Name one of the parts 'generator', 'critic', or parameters in",
        ),
        (
            lambda: TrainStep(deceive, {"g": "generator"}),
            {},
            "each parameter of the optimizer must belong to some loss, but moves assigns none to "
            "'critic.0.weight', 'critic.0.bias', 'critic.2.weight' and 1 more.",
        ),
        (
            lambda: TrainStep(tell_apart, {"d": None, "e": "critic"}, at_once=True),
            {},
            "losses that are computed at once must move different parameters, but 'd' and 'e' both "
            "move 'critic.0.weight'.",
        ),
        (
            lambda: GAN.loss,
            {"jit": "inductor"},
            "jit='inductor' needs updates with one loss, but several TrainSteps take turns in",
        ),
        (lambda: GAN.loss, {"detect_nan": True}, "detect_nan=True needs updates with one loss"),
        (
            lambda: GAN.loss,
            {"precision": ipufit.Precision("mixed_float16", loss_scale=8.0)},
            "a loss scale needs updates with one loss",
        ),
    ],
)
def test_what_can_not_work_is_refused_before_any_work(make_loss, options, text):
    """The texts name what came and what to write."""
    with pytest.raises((ConfigurationError, LossError), match=re.escape(text)):
        compiled(make_loss(), **options)


@pytest.mark.parametrize(
    ("function", "moves", "text"),
    [
        (
            lambda net, batch: net.critic(batch[0]).mean(),
            {"d": None},
            "must return a dict with 'd', which moves names, got a tensor of shape ()",
        ),
        (
            lambda net, batch: {"g": net.critic(batch[0]).mean()},
            {"d": None},
            "must return 'd', got a dict of 'g'. Return each loss under its name",
        ),
        (
            lambda net, batch: {"d": net.critic(batch[0])},
            {"d": None},
            "must be a scalar, got shape (4, 1).",
        ),
        (
            lambda net, batch: {"d": net.critic(batch[0]).mean(), "rows": batch[0]},
            {"d": None},
            "may return losses, tensors of one element, which are logged, and 'outputs', got a "
            "tensor of shape (4, 2), dtype float64 for 'rows'.",
        ),
    ],
)
def test_a_step_that_returns_no_loss_says_so_with_the_first_batch(function, moves, text):
    """Before an update is made."""
    net = make(GAN)
    net.generator.requires_grad_(False)
    optimizer = torch.optim.SGD(net.critic.parameters(), 0.1)
    model = compiled(TrainStep(function, moves), optimizer, net)
    with pytest.raises(LossError, match=re.escape(text)):
        model.fit(*samples(), batch_size=4, verbose=0)


@moves_parts
@pytest.mark.both_engines
def test_an_ipu_refuses_several_losses_by_name():
    """PopTorch follows one loss."""
    text = "an IPU makes each update from one loss that trains all parameters"
    for loss in (GAN.loss, PROGRAMS["actor-critic"].loss):
        program = GAN if loss is GAN.loss else PROGRAMS["actor-critic"]
        net = make(program)
        model = ipufit.Model(net, engine="ipu-standin")
        with pytest.raises(ConfigurationError, match=text):
            model.compile(adam(net, program.rates), loss)


@moves_parts
@pytest.mark.both_engines
def test_one_loss_of_a_step_trains_on_an_ipu():
    """Knowledge distillation needs nothing that PopTorch has not."""
    program = PROGRAMS["distillation"]
    net = make(program).float()
    model = ipufit.Model(net, engine="ipu-standin")
    model.compile(adam(net, program.rates), program.loss)
    x, y = samples()
    data = {"batch_size": 4, "shuffle": False}
    history = model.fit(x.float(), y.float(), epochs=3, verbose=0, **data).history
    assert difference(net, by_hand(program)) < 1e-5
    assert set(history) == {"loss", "soft"}


@moves_parts
def test_what_looks_into_one_loss_says_so():
    """Operators, divisions and facts of PopTorch are those of one recording."""
    model = compiled(GAN.loss)
    batch = tuple(tensor[:4] for tensor in samples())
    for name in ("compare", "check_invariance", "preflight", "plan"):
        with pytest.raises(
            ConfigurationError, match=f"{name} works with one loss, but the updates"
        ):
            getattr(model, name)(batch, **({"ipus": 2} if name == "plan" else {}))


@moves_parts
def test_what_looks_into_a_step_with_one_turn_works():
    """A gradient inside is an operator like others."""
    batch = tuple(tensor[:4] for tensor in samples())
    for name in ("penalty", "sam"):
        program = PROGRAMS[name]
        model = compiled(program.loss, net=make(program), optimizer="sgd")
        assert model.compare(batch).ok
        # The worst point near by is that of a micro-batch.
        assert model.check_invariance(batch).ok == (name == "penalty")
        assert "a gradient is computed inside the step" in str(model.preflight(batch))


@moves_parts
def test_explain_tells_the_turns(capsys):
    """Who reads it sees what an update is made of."""
    model = compiled(PROGRAMS["critic-more-often"].loss)
    model.explain(list(zip(*(tensor.split(4) for tensor in samples()))))
    text = capsys.readouterr().out
    assert "In each update: criticise, of which 'd' moves critic.\n" in text
    assert "In one update of 3: please, of which 'g' moves generator.\n" in text


@moves_parts
def test_a_report_says_why_operators_are_missing(tmp_path):
    """The rest of it is there."""
    fit(GAN, epochs=1, callbacks=[ipufit.Report(tmp_path)])
    written = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert "Operators can be timed for one loss, but the updates have several in turn." in written


class Follower(nn.Module):
    """Two parts that share a third, and parameters that follow one."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(2, 3)
        self.actor = nn.ModuleDict({"encoder": shared, "head": nn.Linear(3, 3)})
        self.critic = nn.ModuleDict({"encoder": shared, "head": nn.Linear(3, 1)})
        self.target = nn.Linear(3, 1).requires_grad_(False)

    def forward(self, x):
        return self.actor["head"](self.actor["encoder"](x))


def judge(net, batch, assigns=False):
    """The critic's loss, beside which the target follows it, whatever the mode."""
    x, y = batch
    value = net.critic["head"](net.critic["encoder"](x))
    loss = (value - 0.9 * net.target(net.critic["encoder"](x)).detach() - y[:, :1]).square().mean()
    for followed, follower in zip(net.critic["head"].parameters(), net.target.parameters()):
        value = 0.9 * follower.data + 0.1 * followed.data
        if assigns:
            follower.data = value
        else:
            follower.data.copy_(value)
    return {"q": loss}


def behave(net, batch):
    """The actor's loss."""
    return {"pi": (net(batch[0]) - batch[1]).abs().mean()}


def follow(options, moves=("critic", "actor.head"), **fit_options):
    """The module after a fit, and its model."""
    torch.manual_seed(4)
    net = Follower().double()
    model = ipufit.Model(net)
    critic = functools.partial(judge, assigns="run_eagerly" in options)
    steps = [TrainStep(critic, {"q": moves[0]}), TrainStep(behave, {"pi": moves[1]})]
    model.compile("sgd", steps, **options)
    x, y = samples()
    loader = list(zip(x.split(4), y.split(4)))
    model.fit(loader, epochs=2, verbose=0, **fit_options)
    return net, model, loader


@moves_parts
@pytest.mark.parametrize("moves", [("critic", "actor.head"), ("critic", "actor")])
def test_a_part_that_two_parts_share_is_moved_under_either_name(moves):
    """named_parameters() has it under one name alone."""
    net, _, loader = follow({"run_eagerly": True}, moves)
    torch.manual_seed(4)
    twin = Follower().double()
    parts = {
        "critic": twin.critic.parameters(),
        "actor": twin.actor.parameters(),
        "actor.head": twin.actor["head"].parameters(),
    }
    parts = {name: list(parameters) for name, parameters in parts.items()}
    for _ in range(2):
        for batch in loader:
            for function, part in ((judge, moves[0]), (behave, moves[1])):
                (loss,) = function(twin, batch).values()
                with torch.no_grad():
                    for p, slope in zip(parts[part], torch.autograd.grad(loss, parts[part])):
                        p -= 0.01 * slope
    assert difference(net, twin) < 1e-12


@moves_parts
def test_validation_and_evaluation_move_nothing():
    """Not even what a step changes in place whatever the mode."""
    x, y = samples()
    held = list(zip(x.split(4), y.split(4)))
    for options in ({"run_eagerly": True}, {}):
        first, _, _ = follow(options)
        net, model, loader = follow(options, validation_data=held)
        assert difference(first, net) == 0
        before = {name: value.clone() for name, value in net.state_dict().items()}
        model.evaluate(loader, verbose=0)
        assert all(torch.equal(value, before[n]) for n, value in net.state_dict().items())


@moves_parts
def test_a_step_may_freeze_a_part_for_its_own_time():
    """As CycleGAN's set_requires_grad does; afterwards all is as it was."""

    def toggled(function, part):
        def step(net, batch):
            for name, each in net.named_children():
                each.requires_grad_(name == part)
            return function(net, batch)

        return step

    plain = fit(GAN)
    steps = [
        TrainStep(toggled(tell_apart, "critic"), {"d": "critic"}),
        TrainStep(toggled(deceive, "generator"), {"g": "generator"}),
    ]
    program = dataclasses.replace(GAN, loss=steps)
    for options in ({}, {"run_eagerly": True}):
        net, _, _ = fit(program, compile_options=options)
        assert difference(net, plain[0]) == 0
        assert all(parameter.requires_grad for parameter in net.parameters())


@moves_parts
def test_a_gradient_of_parameters_is_part_of_an_evaluation():
    """As in meta-learning, which adapts to each batch."""

    def adapt(net, batch):
        x, y = batch
        named = dict(net.named_parameters())
        loss = (net(x) - y).square().mean()
        slopes = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        moved = {name: p - 0.1 * s for (name, p), s in zip(named.items(), slopes)}
        return (torch.func.functional_call(net, moved, (x,)) - y).square().mean()

    net = make(PROGRAMS["sam"])
    model = compiled(TrainStep(adapt), "sgd", net, jit="graph")
    x, y = (tensor[:4] for tensor in samples())
    value = model.evaluate([(x, y)], verbose=0)["loss"]
    assert value == pytest.approx(adapt(net, (x, y)).item(), abs=1e-12)


@moves_parts
def test_steps_that_log_one_name_are_refused():
    """History could have only one of them."""

    def noted(function):
        return lambda net, batch: {**function(net, batch), "size": batch[0].norm()}

    steps = [
        TrainStep(noted(tell_apart), {"d": "critic"}),
        TrainStep(noted(deceive), {"g": "generator"}),
    ]
    with pytest.raises(ConfigurationError, match="but two of them have 'size'"):
        compiled(steps).fit(list(zip(*(t.split(4) for t in samples()))), verbose=0)


def test_batches_as_dicts_go_to_steps_but_for_their_texts():
    """Metrics compare with the field that targets names; parts may have sizes of their own."""

    def step(net, batch):
        out = net(batch["x"])
        return {"loss": (out - batch["goal"]).square().mean(), "outputs": out,
                "rest": batch["more"].mean()}  # fmt: skip

    x, y = samples()
    loader = [
        {"x": a, "goal": b, "more": torch.ones(7, 1), "file": ["a", "b", "c", "d"]}
        for a, b in zip(x.split(4), y.split(4))
    ]
    model = compiled(TrainStep(step), "sgd", make(PROGRAMS["sam"]), metrics=["mse"], targets="goal")
    history = model.fit(loader, verbose=0).history
    assert history["mse"] == pytest.approx(history["loss"])
    assert history["rest"] == [1.0]
    with pytest.raises(MetricError, match="Name the field: compile"):
        compiled(TrainStep(step), "sgd", make(PROGRAMS["sam"]), metrics=["mse"]).fit(
            loader, verbose=0
        )
    bare = compiled(TrainStep(smooth), "sgd", make(PROGRAMS["sam"]), metrics=["mse"])
    with pytest.raises(MetricError, match="Return it as 'outputs', together with the loss"):
        bare.fit(x, y, batch_size=4, verbose=0)
    with pytest.raises(ConfigurationError, match="but the steps compute their own"):
        bare.fit(x, y, sample_weight=torch.ones(44), batch_size=4, verbose=0)


@moves_parts
def test_history_sums_what_each_loss_is_where_it_is_made():
    """A loss that is made now and then counts as much as in an evaluation."""
    _, history, _ = fit(PROGRAMS["critic-more-often"], epochs=2)
    values = history.history
    for loss, d, g in zip(values["loss"], values["d"], values["g"]):
        assert loss == pytest.approx(d + g, abs=1e-12)


@moves_parts
def test_the_adversaries_are_what_the_docs_show():
    """Both parts move, and the module is the user's."""
    net, _, _ = fit(GAN, epochs=1)
    assert isinstance(net, Adversaries)
    assert difference(net, make(GAN)) > 0
