"""Several optimizers in one update: by patterns of names, as a list, by "muon"."""

import copy
import functools
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.errors import ConfigurationError, OptimizerError
from ipufit.optim import MultiOptimizer, Muon
from ipufit.optim.resolve import resolve_optimizer
from tests.engines import EAGER_OR_NOT, own_step
from tests.nets import data
from tests.optim.own_optimizers import Lion, ScheduleFree
from tests.optim.test_own_steps import assert_equal, half_cosine

X, Y = data(200)
LOADER = DataLoader(TensorDataset(X, Y), batch_size=4)
SGD, ADAM, ADAMW, NADAM = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
)


class Net(nn.Module):
    """An encoder of two layers, and a head."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 7))
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        return self.head(self.encoder(x.flatten(1)).tanh())


def net():
    torch.manual_seed(2)
    return Net().double()


def by_hand(module, optimizers, epochs=1, schedulers=(), finish=lambda: None):
    """Train with a loop in which each optimizer makes its step."""
    for _ in range(epochs):
        for x, y in LOADER:
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            finish()
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()


def fitted(module, optimizer, epochs=1, fit_options=None, **options):
    model = ipufit.Model(module)
    model.compile(optimizer, "cross_entropy", **options)
    work = {"device_iterations": 8, "verbose": 0, **(fit_options or {})}
    history = model.fit(LOADER, epochs=epochs, **work)
    return model, history


# Both with rules; one with its own step; a rule beside hooks.
PAIRS = [
    (lambda p: ADAMW(p, lr=0.01), lambda p: SGD(p, lr=0.1, momentum=0.9)),
    (lambda p: SGD(p, lr=0.1), lambda p: NADAM(p, lr=0.01)),
    (lambda p: Lion(p, lr=0.01), lambda p: ADAM(p, lr=0.02, amsgrad=True)),
    (lambda p: NADAM(p, lr=0.01), lambda p: torch.optim.Adagrad(p, lr=0.02)),
]


@own_step
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize("pair", PAIRS, ids=["rules", "mixed", "reversed", "steps"])
def test_fifty_updates_equal_the_loop(pair, eager):
    """By patterns, as objects and as a factory that returns a list."""
    forms = [
        lambda m: {"encoder.*": pair[0], "head": pair[1]},
        lambda m: [pair[0](m.encoder.parameters()), pair[1](m.head.parameters())],
        lambda m: {"head": pair[1](list(m.head.parameters())), "*": pair[0]},
        lambda m: lambda params: [pair[0](params[:4]), pair[1](params[4:])],
    ]
    other = net()
    by_hand(other, [pair[0](other.encoder.parameters()), pair[1](other.head.parameters())])
    for form in forms if not eager else forms[:1]:
        module = net()
        model, _ = fitted(module, form(module), run_eagerly=eager)
        assert_equal(module, other)
        assert isinstance(model.optimizer, MultiOptimizer)


@own_step
def test_names_of_optimizers_are_those_that_users_gave():
    module = net()
    head = SGD(module.head.parameters(), lr=0.1, momentum=0.9)
    model, _ = fitted(module, {"encoder.*": "adamw", "head": head})
    optimizer = model.optimizer
    assert list(optimizer.optimizers) == ["encoder.*", "head"]
    assert [type(each) for each in optimizer.optimizers.values()] == [ADAMW, SGD]
    assert optimizer.param_groups[1] is optimizer.optimizers["head"].param_groups[0]
    for each, part in zip(optimizer.optimizers.values(), (module.encoder, module.head)):
        assert set(each.state) == set(part.parameters()) <= set(optimizer.state)
        assert all(optimizer.state[p] is each.state[p] for p in part.parameters())


@own_step
def test_a_run_goes_from_a_loop_to_fit_and_back():
    """The state of each optimizer is taken over and handed back."""
    module, other = net(), net()
    make = lambda m: [ADAM(m.encoder.parameters(), lr=0.01), NADAM(m.head.parameters(), lr=0.01)]  # noqa: E731
    optimizers = make(module)
    by_hand(module, optimizers)
    fitted(module, optimizers)
    by_hand(module, optimizers)
    by_hand(other, make(other), epochs=3)
    assert_equal(module, other)


@own_step
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize("pair", PAIRS, ids=["rules", "mixed", "reversed", "steps"])
def test_each_optimizer_saves_and_loads_its_own_state_after_compile(pair, eager):
    """A training that a loop had begun goes on, and its states are those of a loop again."""
    module, other = net(), net()
    make = lambda m: [pair[0](m.encoder.parameters()), pair[1](m.head.parameters())]  # noqa: E731
    before = make(other)
    by_hand(other, before)
    module.load_state_dict(other.state_dict())
    optimizers = make(module)
    model = ipufit.Model(module)
    model.compile(optimizers, "cross_entropy", run_eagerly=eager)
    for each, loaded in zip(optimizers, before):
        each.load_state_dict(copy.deepcopy(loaded.state_dict()))
    model.fit(LOADER, device_iterations=8, verbose=0)
    by_hand(other, before)
    assert_equal(module, other)
    for each, expected in zip(optimizers, before):
        states, expected_states = each.state_dict()["state"], expected.state_dict()["state"]
        assert states.keys() == expected_states.keys()
        for place, values in states.items():
            assert values.keys() == expected_states[place].keys()


@own_step
def test_a_group_added_to_one_of_them_belongs_to_it():
    """Between two fits: of a first optimizer, so that the indices of later groups change."""
    module, other = net(), net()
    clips = {"head": ipufit.Clip(global_norm=0.05)}
    make = lambda m: {  # noqa: E731
        "encoder": ADAM([p for p in m.encoder.parameters() if p.requires_grad], lr=0.01),
        "head": NADAM(m.head.parameters(), lr=0.05),
    }
    for each in (module, other):
        each.encoder[0].bias.requires_grad_(False)
    optimizers, pair = make(module), make(other)
    schedules = {"head": lambda update: 0.05 * 0.99**update}
    model, _ = fitted(module, optimizers, clip=clips, lr_scheduler=schedules)
    by_hand_clipped = functools.partial(
        by_hand,
        other,
        [*pair.values()],
        schedulers=[ExponentialLR(pair["head"], 0.99)],
        finish=lambda: nn.utils.clip_grad_norm_(other.head.parameters(), 0.05),
    )
    by_hand_clipped()
    for each, adam in ((module, optimizers["encoder"]), (other, pair["encoder"])):
        bias = each.encoder[0].bias.requires_grad_(True)
        adam.add_param_group({"params": [bias], "lr": 0.1})
    history = model.fit(LOADER, epochs=1, device_iterations=8, verbose=0)
    by_hand_clipped()
    assert_equal(module, other)
    assert history.history["learning_rate_1"] == [0.05 * 0.99**99]


@own_step
def test_a_group_for_all_of_them_is_refused():
    module = net()
    model = ipufit.Model(module)
    model.compile({"encoder": "adam", "head": "sgd"}, "cross_entropy")
    with pytest.raises(OptimizerError) as caught:
        model.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert str(caught.value) == (
        "a parameter group must belong to one of several optimizers, got one for all (number of "
        "parameters: 1). Call add_param_group of one of them, such as "
        "model.optimizer.optimizers['encoder']."
    )


def rates(module):
    """Two optimizers, of which one has two groups."""
    head = [{"params": [module.head.weight]}, {"params": [module.head.bias], "lr": 0.02}]
    return [ADAM(module.encoder.parameters(), lr=0.01), NADAM(head, lr=0.05)]


@own_step
def test_a_schedule_for_each_optimizer():
    """By their names, in every form; and schedulers of torch, each over its own."""
    module, other = net(), net()
    schedules = {"encoder": lambda update: 0.01 * 0.95**update, "head": half_cosine}
    optimizers = {"encoder": lambda p: ADAM(p, lr=0.01), "head": lambda p: NADAM(p, lr=0.05)}
    _, history = fitted(module, optimizers, lr_scheduler=schedules)
    pair = [ADAM(other.encoder.parameters(), lr=0.01), NADAM(other.head.parameters(), lr=0.05)]
    schedulers = [ExponentialLR(pair[0], 0.95), half_cosine(pair[1])]
    by_hand(other, pair, schedulers=schedulers)
    assert_equal(module, other)
    assert history.history["learning_rate"] == pytest.approx([0.01 * 0.95**49], abs=1e-15)
    last = 0.05 * (0.05 + 0.475 * (1 + math.cos(math.pi * 49 / 50)))
    assert history.history["learning_rate_1"] == pytest.approx([last], abs=1e-15)
    third = net()
    pair = rates(third)
    fitted(third, pair, lr_scheduler=[StepLR(pair[1], 20, 0.1)])
    fourth = net()
    pair = rates(fourth)
    by_hand(fourth, pair, schedulers=[StepLR(pair[1], 20, 0.1)])
    assert_equal(third, fourth)


@own_step
def test_one_schedule_for_all_optimizers():
    module, other = net(), net()
    fitted(module, rates(module), lr_scheduler=half_cosine)
    pair = rates(other)
    by_hand(other, pair, schedulers=list(map(half_cosine, pair)))
    assert_equal(module, other)


@own_step
@pytest.mark.parametrize("pair", PAIRS[:2], ids=["rules", "mixed"])
def test_a_bound_for_all_and_bounds_for_each(pair):
    """One norm of all gradients together, or of those of each optimizer."""
    for clip, bounds in (
        (ipufit.Clip(global_norm=0.1), [("", 0.1)]),
        ({"encoder": ipufit.Clip(global_norm=0.05), "head": ipufit.Clip(value=0.01)}, None),
        ({"head": ipufit.Clip(norm=0.02)}, [("head.weight", 0.02), ("head.bias", 0.02)]),
    ):
        module, other = net(), net()
        fitted(module, {"encoder": pair[0], "head": pair[1]}, clip=clip)

        def finish(other=other, bounds=bounds):
            if bounds is None:
                nn.utils.clip_grad_norm_(other.encoder.parameters(), 0.05)
                nn.utils.clip_grad_value_(other.head.parameters(), 0.01)
            for prefix, bound in bounds or ():
                named = other.named_parameters()
                chosen = [p for name, p in named if name.startswith(prefix)]
                nn.utils.clip_grad_norm_(chosen, bound)

        pair_of = [pair[0](other.encoder.parameters()), pair[1](other.head.parameters())]
        by_hand(other, pair_of, finish=finish)
        assert_equal(module, other)


@own_step
@pytest.mark.parametrize(
    "optimizer",
    [
        {"encoder": "adamw", "head": "nadam"},
        {"encoder": ScheduleFree, "head": lambda p: SGD(p, lr=0.1, momentum=0.9)},
        "muon",
    ],
    ids=["nadam", "free", "muon"],
)
def test_a_run_that_goes_on_has_the_same_bits(optimizer, tmp_path):
    def run(epochs, **checkpoint):
        module = net()
        work = {"seed": 1, "validation_data": (X[:20], Y[:20])}
        if checkpoint:
            work["checkpoint"] = ipufit.Checkpoint(tmp_path / "run", **checkpoint)
        model = ipufit.Model(module)
        model.compile(optimizer, "cross_entropy", lr_scheduler=half_cosine)
        model.fit(X[:40], Y[:40], batch_size=4, epochs=epochs, verbose=0, **work)
        return [p.detach().clone() for p in module.parameters()]

    whole = run(3)
    run(2, every_updates=7)
    for value, other in zip(run(3, resume="auto"), whole):
        assert torch.equal(value, other)


@own_step
def test_a_callback_sees_and_sets_every_rate():
    """One optimizer, with the groups of all in a row."""
    module, other = net(), net()
    halve = ipufit.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    _, history = fitted(module, rates(module), epochs=2, fit_options={"callbacks": [halve]})
    pair = rates(other)
    for _ in range(2):
        for group in [group for optimizer in pair for group in optimizer.param_groups]:
            group["lr"] /= 2
        by_hand(other, pair)
    assert_equal(module, other)
    logged = [history.history[name][-1] for name in ("learning_rate", "learning_rate_2")]
    assert logged == [0.0025, 0.005]


@own_step
def test_the_bits_are_those_of_every_device_iterations():
    results = []
    for device_iterations in (1, 7):
        module = net()
        options = {"device_iterations": device_iterations}
        fitted(module, "muon", fit_options=options, lr_scheduler=half_cosine)
        results.append(module)
    assert_equal(*results, atol=0)


@own_step
def test_hooks_of_one_of_them_are_called():
    if not hasattr(torch.optim.Optimizer, "register_step_pre_hook"):
        pytest.skip("torch without step hooks")
    module, other, calls, expected = net(), net(), [], []
    pair = [SGD(module.encoder.parameters(), lr=0.1), SGD(module.head.parameters(), lr=0.1)]
    pair[1].register_step_pre_hook(lambda *_: calls.append(1))
    fitted(module, pair)
    whole = SGD(other.parameters(), lr=0.1)
    whole.register_step_pre_hook(lambda *_: expected.append(1))
    by_hand(other, [whole])
    assert_equal(module, other)
    if not expected:
        pytest.skip("this torch calls no hook of its own optimizers once it has loaded dynamo")
    assert len(calls) == len(expected) == 50


class Tied(nn.Module):
    """A language model in small: embedding, hidden layers, normalisation, output layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 11)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.out(self.norm(x))


@own_step
def test_muon_by_name_trains_hidden_matrices_and_says_so(capsys):
    """AdamW has embedding, output layer, and all that is no matrix."""
    torch.manual_seed(0)
    module = Tied()
    other = copy.deepcopy(module)
    x = torch.randint(0, 11, (40,))
    model = ipufit.Model(module)
    model.compile("muon", "cross_entropy")
    assert capsys.readouterr().out == (
        "Muon trains 2 hidden matrices: layers.0.weight, layers.1.weight, AdamW the others: "
        "embed.weight, layers.0.bias, norm.weight, norm.bias, out.weight, out.bias.\n"
    )
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    matrices = [other.layers[0].weight, other.layers[1].weight]
    rest = [p for p in other.parameters() if all(p is not m for m in matrices)]
    kind = getattr(torch.optim, "Muon", Muon)
    pair = [kind(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw"), ADAMW(rest, lr=1e-3)]
    for inputs in x.split(4):
        for optimizer in pair:
            optimizer.zero_grad()
        nn.functional.cross_entropy(other(inputs), inputs).backward()
        for optimizer in pair:
            optimizer.step()
    for value, expected in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch without Muon")
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_our_muon_is_torchs(adjust, nesterov):
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(7, 4).double()), nn.Parameter(torch.randn(3, 9).double())]
    second = copy.deepcopy(first)
    options = {"lr": 0.02, "adjust_lr_fn": adjust, "nesterov": nesterov}
    pair = [(first, Muon(first, **options)), (second, torch.optim.Muon(second, **options))]
    for step in range(5):
        for parameters, optimizer in pair:
            for parameter in parameters:
                parameter.grad = torch.sin(parameter.detach() * (step + 1))
            optimizer.step()
    for value, other in zip(first, second):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-12)


def refusal(optimizer, module=None):
    """The text of the OptimizerError that must come."""
    module = module or net()
    with pytest.raises(OptimizerError) as caught:
        resolve_optimizer(
            optimizer(module) if callable(optimizer) else optimizer,
            list(module.named_parameters()),
            [module],
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            {"encoder": "adam", "*.weight": "sgd"},
            "each parameter must belong to one optimizer, but 'encoder.0.weight' belongs to those "
            "of 'encoder' and '*.weight' (and so does 'encoder.2.weight'). The patterns must not "
            "overlap.",
        ),
        (
            {"encoder.0": "adam", "head": "sgd"},
            "each parameter must belong to one optimizer, but 'encoder.2.weight' belongs to none "
            "(and so does 'encoder.2.bias'). Add a pattern for it, '*' for all the others, or "
            "freeze it with requires_grad_(False).",
        ),
        (
            {"encoders": "adam", "*": "sgd"},
            "each pattern of optimizer must match trainable parameters of the module, but "
            "'encoders' matches none. Its parameters are 'encoder.0.weight', 'encoder.0.bias', "
            "'encoder.2.weight', 'encoder.2.bias', 'head.weight', ....",
        ),
        (
            lambda m: [ADAM(m.parameters()), SGD(m.head.parameters(), lr=0.1)],
            "each parameter must belong to one optimizer, but 'head.weight' belongs to those at "
            "places 0 and 1. Leave it out of one of them.",
        ),
        (
            lambda m: [ADAM(m.encoder.parameters()), SGD([m.head.weight], lr=0.1)],
            "each parameter must belong to one optimizer, but 'head.bias' belongs to none of the "
            "2. Add it to one, or freeze it with requires_grad_(False).",
        ),
        (
            lambda m: {"encoder": "adam", "head": SGD([m.head.weight], lr=0.1)},
            "each parameter must belong to one optimizer, but 'head.bias', which 'head' matches, "
            "is not in its SGD. Build that from all of them, or pass a factory.",
        ),
        (
            ["adam", "sgd"],
            "a list of optimizers must hold torch optimizers, got str at place 0. Pass a dict by "
            "patterns of parameter names for others: {'encoder.*': 'adamw', '*': 'sgd'}.",
        ),
        (
            {0: "adam"},
            "optimizer must have patterns of parameter names as keys, got int. Write for example "
            "{'encoder.*': 'adamw', '*': 'sgd'}.",
        ),
    ],
    ids=["two", "none", "nothing", "list twice", "list none", "object", "names", "keys"],
)
def test_what_belongs_to_two_or_none_is_refused_with_its_name(optimizer, text):
    assert refusal(optimizer) == text


def test_muon_without_hidden_matrices_is_refused():
    module = nn.Linear(3, 2)
    assert refusal("muon", module) == (
        "optimizer='muon' trains the matrices of hidden layers, but the module has none: "
        "embeddings, the output layer and everything else are trained by AdamW. Use 'adamw'."
    )


def compiling(**options):
    """The text of the ConfigurationError that must come."""
    with pytest.raises(ConfigurationError) as caught:
        ipufit.Model(net()).compile(
            options.pop("optimizer", {"encoder": "adam", "*": "sgd"}), "cross_entropy", **options
        )
    return str(caught.value)


def test_what_is_for_optimizers_that_there_are_not_is_refused():
    assert compiling(clip={"heads": ipufit.Clip(norm=1)}) == (
        "clip must name existing optimizers, got 'heads'. There is 'encoder', '*'."
    )
    assert compiling(optimizer="sgd", clip={"head": ipufit.Clip(norm=1)}) == (
        "clip must name existing optimizers, got 'head'. There is only one, without a name."
    )
    assert compiling(lr_scheduler={"encoder": half_cosine, "head": half_cosine}) == (
        "lr_scheduler must name existing optimizers, got 'head'. There is 'encoder', '*'."
    )
    other = SGD(net().parameters(), lr=0.1)
    assert compiling(lr_scheduler=[StepLR(other, 3), StepLR(other, 3)]) == (
        "a list of schedulers must have at most one for each compiled optimizer, got one for "
        "another SGD, StepLR. Make each with one of these optimizers."
    )
    assert compiling(clip={"encoder": 1.0}) == (
        "clip must have an ipufit.Clip for the optimizer 'encoder', got 1.0. Write for example "
        "clip={'head': ipufit.Clip(global_norm=1.0)}."
    )


@own_step
def test_a_plateau_of_one_of_them():
    """Its rate falls at epoch ends, the other's stays."""
    module = net()
    pair = [SGD(module.encoder.parameters(), lr=0.1), SGD(module.head.parameters(), lr=0.1)]
    plateau = ReduceLROnPlateau(pair[1], mode="max", patience=0, factor=0.5)
    fitted(module, pair, epochs=3, lr_scheduler=[plateau])
    assert [each.param_groups[0]["lr"] for each in pair] == [0.1, 0.025]


@own_step
def test_state_dicts_go_both_ways():
    """Loading finds the state of every member again, and they share it."""
    module = net()
    model, _ = fitted(module, {"encoder": "adam", "head": "nadam"})
    state = copy.deepcopy(model.optimizer.state_dict())
    fresh = ipufit.Model(copy.deepcopy(module))
    fresh.compile({"encoder": "adam", "head": "nadam"}, "cross_entropy")
    fresh.optimizer.load_state_dict(state)
    fresh.fit(LOADER, verbose=0, device_iterations=8)
    model.fit(LOADER, verbose=0, device_iterations=8)
    assert_equal(module, fresh.module, atol=0)
    copied = copy.deepcopy(model.optimizer)
    assert copied.optimizers["head"].param_groups[0] is copied.param_groups[1]


class GAN(nn.Module):
    """A generator and a critic."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
        self.critic = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, noise):
        return self.generator(noise)


def tell_apart(gan, batch):
    real, noise = batch
    fake = gan.generator(noise).detach()
    return {"critic": gan.critic(fake).mean() - gan.critic(real).tanh().mean()}


def deceive(gan, batch):
    return {"generator": -gan.critic(gan.generator(batch[1])).tanh().mean()}


@own_step
@pytest.mark.parametrize(
    "kinds", [(NADAM, SGD), (ADAM, SGD), (Lion, ScheduleFree)], ids=lambda k: k[0].__name__
)
def test_losses_in_turn_move_what_their_optimizers_have(kinds):
    """Each turn is a step of the optimizer of what it moves, as in every loop of a GAN."""
    torch.manual_seed(4)
    module = GAN().double()
    other = copy.deepcopy(module)
    loader = DataLoader(
        TensorDataset(torch.randn(40, 3).double(), torch.randn(40, 2).double()), batch_size=4
    )
    optimizers = {
        "generator": lambda p: kinds[0](p, lr=0.02),
        "critic": lambda p: kinds[1](p, lr=0.05, momentum=0.5),
    }
    steps = [
        ipufit.TrainStep(tell_apart, moves={"critic": "critic"}),
        ipufit.TrainStep(deceive, moves={"generator": "generator"}),
    ]
    model = ipufit.Model(module)
    model.compile(optimizers, loss=steps, lr_scheduler=half_cosine)
    model.fit(loader, epochs=3, device_iterations=4, verbose=0)
    pair = [
        kinds[1](other.critic.parameters(), lr=0.05, momentum=0.5),
        kinds[0](other.generator.parameters(), lr=0.02),
    ]
    schedulers = list(map(half_cosine, pair))
    for _ in range(3):
        for optimizer in pair:
            getattr(optimizer, "train", lambda: None)()
        for batch in loader:
            for step, optimizer in zip((tell_apart, deceive), pair):
                other.zero_grad()
                sum(step(other, batch).values()).backward()
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        for optimizer in pair:
            getattr(optimizer, "eval", lambda: None)()
    assert_equal(module, other)


@own_step
@pytest.mark.parametrize("watches", [True, False], ids=["plateau", "curve"])
def test_a_run_goes_on_with_another_rate_of_one_of_them(watches, tmp_path):
    """What is changed on purpose counts from there; the other goes on as it was."""

    def run(epochs, rate, **checkpoint):
        module = net()
        pair = [SGD(module.encoder.parameters(), lr=rate), SGD(module.head.parameters(), lr=0.1)]
        scheduler = StepLR(pair[1], 50, 0.5)
        if watches:
            scheduler = ReduceLROnPlateau(pair[1], mode="max", patience=0, factor=0.5)
        options = {"checkpoint": ipufit.Checkpoint(tmp_path, **checkpoint), "seed": 1}
        model, _ = fitted(module, pair, epochs, options, lr_scheduler=[scheduler])
        return [group["lr"] for group in model.optimizer.param_groups]

    # The watched value gets worse in the second epoch and in the third.
    assert run(2, 0.1) == [0.1, 0.05 if watches else 0.025]
    changes = {"resume": "auto", "resume_changes": {"lr"}}
    assert run(3, 0.2, **changes) == [0.2, 0.05 if watches else 0.0125]


@own_step
def test_other_schedules_go_on_from_the_run_or_from_compile(tmp_path):
    """A curve by name from where its run is, a function of updates from where the model is."""

    def compiled(head):
        model = ipufit.Model(net())
        optimizers = {"encoder.*": lambda p: SGD(p, lr=0.1), "head": lambda p: SGD(p, lr=0.1)}
        schedules = {"encoder.*": "cosine", "head": head}
        model.compile(optimizers, "cross_entropy", lr_scheduler=schedules)
        return model

    model = compiled(lambda update: 0.1)
    model.fit(LOADER, epochs=2, verbose=0)
    model.fit(LOADER, seed=1, verbose=0, checkpoint=ipufit.Checkpoint(tmp_path))
    checkpoint = ipufit.Checkpoint(tmp_path, resume="auto", resume_changes={"lr_scheduler"})
    model = compiled(lambda update: 0.1 * 0.99**update)
    history = model.fit(LOADER, epochs=2, seed=1, verbose=0, checkpoint=checkpoint).history
    curve = 0.05 * (1 + math.cos(math.pi * 99 / 100))
    assert history["learning_rate"][-1] == pytest.approx(curve)
    assert history["learning_rate_1"][-1] == pytest.approx(0.1 * 0.99**199)
