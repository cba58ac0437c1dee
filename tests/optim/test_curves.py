"""Curves by name over the whole run, against the formulas of torch and transformers."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback
from ipufit.errors import CheckpointError, ConfigurationError, UnknownNameError
from ipufit.optim.schedules import (
    WSD,
    AtEpochEnd,
    Constant,
    Cosine,
    Linear,
    OneCycle,
    Polynomial,
    resolve_schedule,
)
from tests.nets import MLP, data
from tests.told import message

X, Y = data(50)
LOADER = DataLoader(TensorDataset(X, Y), 5)  # ten updates of an epoch
RATES = (0.1, 0.01)
LENGTH = 40


def sgd(params=None):
    """Two groups with rates of their own."""
    if params is None:
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    first, *rest = params
    groups = [{"params": [first], "lr": RATES[0]}, {"params": rest, "lr": RATES[1]}]
    return torch.optim.SGD(groups, momentum=0.9)


def rows(curve, length=LENGTH, make=sgd, **run):
    """The settings of every update of a run of this length."""
    schedule = resolve_schedule(curve, make())
    schedule.begin_run(length, 1, **run)
    return schedule.rows(length)


def rates(curve, length=LENGTH, **options):
    return [[group["lr"] for group in row] for row in rows(curve, length, **options)]


# What transformers.optimization writes down, after its warm-up, of update u of n with w of warm-up.


def ramp(u, w):
    return u / max(1, w)


def hf_constant(u, n, w):
    return ramp(u, w) if u < w else 1.0


def hf_linear(u, n, w):
    return ramp(u, w) if u < w else max(0.0, (n - u) / max(1, n - w))


def hf_cosine(u, n, w, least=0.0):
    wave = 0.5 * (1 + math.cos(2 * math.pi * 0.5 * (u - w) / max(1, n - w)))
    return ramp(u, w) if u < w else max(0.0, wave * (1 - least) + least)


def hf_polynomial(u, n, w, power, rate, end):
    if u < w:
        return ramp(u, w)
    left = 1 - (u - w) / (n - w)
    return ((rate - end) * left**power + end) / rate


def hf_wsd(u, n, w, d, shape, least=0.0):
    if u < w:
        return ramp(u, w)
    if u < n - d:
        return 1.0
    past = (u - (n - d)) / max(1, d)
    factor = {
        "linear": 1 - past,
        "cosine": 0.5 * (1 + math.cos(2 * math.pi * 0.5 * past)),
        "1-sqrt": 1 - math.sqrt(past),
    }[shape]
    return max(0.0, factor * (1 - least) + least)


def close(found, expected, share):
    pair = (torch.tensor(each, dtype=torch.float64) for each in (found, expected))
    torch.testing.assert_close(*pair, rtol=share, atol=1e-17)


OF_TRANSFORMERS = {
    "constant": ("constant", partial(hf_constant, w=0)),
    "constant, warm-up": (Constant(7), partial(hf_constant, w=7)),
    "constant, a share": (Constant(0.31), partial(hf_constant, w=13)),
    "linear": ("linear", partial(hf_linear, w=0)),
    "linear, warm-up": (Linear(warmup=5), partial(hf_linear, w=5)),
    "cosine": ("cosine", partial(hf_cosine, w=0)),
    "cosine, warm-up": (Cosine(warmup=0.1), partial(hf_cosine, w=4)),
    "cosine, not to 0": (Cosine(0.25, final=0.1), partial(hf_cosine, w=10, least=0.1)),
    "polynomial": ("polynomial", partial(hf_polynomial, w=0, power=1, rate=1, end=0)),
    "polynomial, power": (
        Polynomial(6, power=3, final=1e-7),
        partial(hf_polynomial, w=6, power=3, rate=1, end=1e-7),
    ),
    "wsd": ("wsd", partial(hf_wsd, w=0, d=4, shape="cosine")),
    "wsd, linear": (WSD(3, 10, "linear"), partial(hf_wsd, w=3, d=10, shape="linear")),
    "wsd, root": (
        WSD(0.1, 0.5, "1-sqrt", final=0.2),
        partial(hf_wsd, w=4, d=20, shape="1-sqrt", least=0.2),
    ),
    "wsd, no decay": (WSD(3, 0), partial(hf_wsd, w=3, d=0, shape="cosine")),
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_every_update_has_the_rate_of_transformers(name):
    """Of every group its own rate, times the formula."""
    curve, formula = OF_TRANSFORMERS[name]
    expected = [[rate * formula(u, LENGTH) for rate in RATES] for u in range(LENGTH)]
    close(rates(curve), expected, 1e-14)


def of_torch(make, length=LENGTH, optimizer=sgd):
    """Settings that torch's own scheduler gives, update by update."""
    made = optimizer()
    scheduler, found = make(made), []
    for _ in range(length):
        found.append([{**group} for group in made.param_groups])
        made.step()
        scheduler.step()
    return found


OF_TORCH = {
    "linear": (
        Linear(final=0.2),
        partial(lrs.LinearLR, start_factor=1.0, end_factor=0.2, total_iters=LENGTH),
    ),
    "cosine": ("cosine", partial(lrs.CosineAnnealingLR, T_max=LENGTH)),
    "polynomial": (Polynomial(power=2), partial(lrs.PolynomialLR, total_iters=LENGTH, power=2)),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_every_update_has_the_rate_of_torch(name):
    curve, make = OF_TORCH[name]
    expected = [[group["lr"] for group in row] for row in of_torch(make)]
    close(rates(curve), expected, 1e-12)


def adam():
    return torch.optim.Adam([{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1}])


CYCLES = {
    "one cycle": ("one_cycle", {}),
    "linear": (OneCycle(shape="linear"), {"anneal_strategy": "linear"}),
    "a share": (
        OneCycle(0.4, div_factor=10, final_div_factor=100),
        {"pct_start": 0.4, "div_factor": 10, "final_div_factor": 100},
    ),
    "updates": (OneCycle(8), {"pct_start": 8 / LENGTH}),
    "momentum": (OneCycle(momentum=(0.7, 0.8)), {"base_momentum": 0.7, "max_momentum": 0.8}),
    "none": (OneCycle(momentum=None), {"cycle_momentum": False}),
}


@pytest.mark.parametrize("make", [sgd, adam], ids=["momentum", "betas"])
@pytest.mark.parametrize("name", CYCLES)
def test_one_cycle_is_that_of_torch(name, make):
    """Momentum or beta1 included, which move the other way."""
    curve, options = CYCLES[name]
    peaks = [group["lr"] for group in make().param_groups]
    expected = of_torch(
        partial(lrs.OneCycleLR, max_lr=peaks, total_steps=LENGTH, **options), LENGTH - 1, make
    )
    for row, theirs in zip(rows(curve, make=make), expected):
        for group, their in zip(row, theirs):
            assert group["lr"] == pytest.approx(their["lr"], rel=1e-12, abs=1e-18)
            for name in {"betas", "momentum"} & set(group):
                assert group[name] == pytest.approx(their[name], rel=1e-12)
    last = rows(curve, make=make)[-1]
    divisor = options.get("div_factor", 25) * options.get("final_div_factor", 1e4)
    assert [group["lr"] for group in last] == pytest.approx([peak / divisor for peak in peaks])


def loop(net, make, epochs=2, batches=tuple(LOADER)):
    """A loop by hand, with a scheduler over so many updates."""
    optimizer = sgd(net.parameters())
    scheduler = make(optimizer)
    for x, y in [*batches] * epochs:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        scheduler.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def compiled(net, curve, **options):
    model = ipufit.Model(net)
    model.compile(lambda params: sgd(params), "cross_entropy", lr_scheduler=curve, **options)
    return model


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.module.parameters()])


@pytest.fixture
def net():
    torch.manual_seed(0)
    return MLP().double()


def warm_cosine(optimizer, warmup=2, length=20):
    return lrs.LambdaLR(optimizer, partial(hf_cosine, n=length, w=warmup))


@pytest.mark.parametrize("di", [1, 7])
def test_a_run_equals_a_loop_with_a_scheduler_of_its_length(net, di):
    """The length is that of all epochs of fit, whatever an execution has of them."""
    other = copy.deepcopy(net)
    model = compiled(net, Cosine(warmup=0.1))
    history = model.fit(LOADER, epochs=2, device_iterations=di, verbose=0)
    torch.testing.assert_close(weights(model), loop(other, warm_cosine), rtol=0, atol=1e-12)
    assert history.history["learning_rate"][-1] == pytest.approx(0.1 * hf_cosine(19, 20, 2))
    assert [group["lr"] for group in model.optimizer.param_groups] == [0.0, 0.0]


@pytest.mark.long("ipu-standin")
def test_one_cycle_trains_as_torchs(net):
    other = copy.deepcopy(net)
    model = compiled(net, "one_cycle")
    model.fit(LOADER, epochs=2, device_iterations=3, verbose=0)

    def cycle(optimizer):
        # Its last step would go beyond the end.
        made = lrs.OneCycleLR(optimizer, max_lr=list(RATES), total_steps=20)
        step, made.step = made.step, lambda: step() if made.last_epoch < 19 else None
        return made

    torch.testing.assert_close(weights(model), loop(other, cycle), rtol=0, atol=1e-12)


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ({"x": LOADER, "epochs": 3}, 30),
        ({"x": LOADER, "gradient_accumulation": 4, "epochs": 2}, 6),
        ({"x": X, "y": Y, "batch_size": 16, "epochs": 2}, 8),
        ({"x": LOADER, "epochs": range(4, 7)}, 30),
        ({"x": LOADER, "epochs": 2, "steps_per_epoch": 3}, 6),
        ({"x": (each for each in [*LOADER] * 2), "steps_per_epoch": 17}, 17),
        ({"x": LOADER, "epochs": 2, "loading": ipufit.Loading(limit_train_batches=4)}, 8),
        ({"x": X, "y": Y, "batch_size": 5, "validation_split": 0.2}, 8),
    ],
    ids=["epochs", "accumulation", "short", "range", "steps", "stream", "limit", "split"],
)
def test_the_length_is_the_number_of_updates_that_fit_makes(net, arguments, length):
    """A line tells it by its last rate."""
    model = compiled(net, "linear")
    history = model.fit(verbose=0, **arguments)
    assert history.params["updates_done"] == length
    assert history.history["learning_rate"][-1] == pytest.approx(0.1 / length)


@pytest.mark.long("ipu-standin")
def test_every_fit_is_a_run_of_its_own(net):
    """A second one begins at the first rate again, as long as it is itself."""
    model = compiled(net, Linear(warmup=2))
    first = model.fit(LOADER, epochs=2, verbose=0).history["learning_rate"]
    second = model.fit(LOADER, epochs=1, verbose=0).history["learning_rate"]
    expected = [0.1 * hf_linear(u, n, 2) for u, n in ((9, 20), (19, 20), (9, 10))]
    assert [*first, *second] == pytest.approx(expected)


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("way", ["interval", "AtEpochEnd"])
def test_a_curve_may_go_over_epochs(net, way):
    """Its length is then a number of epochs."""
    curve, options = AtEpochEnd(Cosine(warmup=1)), {}
    if way == "interval":
        curve, options = Cosine(warmup=1), {"lr_scheduler_interval": "epoch"}
    model = compiled(net, curve, **options)
    found = []
    for _ in range(2):
        found += model.fit(LOADER, epochs=4, verbose=0).history["learning_rate"]
    assert found == pytest.approx([0.1 * hf_cosine(u, 4, 1) for u in range(4)] * 2)


class EndError(Exception):
    """What ends a run in these tests."""


class Ends(Callback):
    """Raises after so many updates."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise EndError


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("before", [0, 1], ids=["first fit", "second fit"])
@pytest.mark.parametrize("after", [4, 10])
def test_a_run_that_goes_on_has_the_curve_of_the_whole(net, after, before, tmp_path):
    """Bit for bit, also where it is not the first of its model."""

    def model_of():
        model = compiled(copy.deepcopy(net), Cosine(warmup=0.1))
        for _ in range(before):
            model.fit(LOADER, verbose=0)
        return model

    whole = model_of()
    whole.fit(LOADER, epochs=2, seed=1, verbose=0)
    checkpoint = ipufit.Checkpoint(tmp_path, every_updates=1, resume="auto")
    work = {"epochs": 2, "seed": 1, "verbose": 0, "checkpoint": checkpoint}
    with pytest.raises(EndError):
        model_of().fit(LOADER, callbacks=[Ends(after)], **work)
    model = model_of()
    history = model.fit(LOADER, callbacks=[Ends(-1)], **work)
    assert "resumed" in history.params
    assert torch.equal(weights(model), weights(whole))


@pytest.mark.long("ipu-standin")
def test_a_run_goes_on_with_more_epochs_where_that_is_meant(net, tmp_path):
    """Its curve is then that of the longer run, from there on."""
    other = copy.deepcopy(net)
    checkpoint = ipufit.Checkpoint(tmp_path)
    compiled(net, "linear").fit(LOADER, seed=1, verbose=0, checkpoint=checkpoint)
    model = compiled(copy.deepcopy(other), "linear")
    checkpoint = ipufit.Checkpoint(tmp_path, resume="auto")
    with pytest.raises(CheckpointError, match="lr_scheduler length: 10 in the checkpoint, 30 now"):
        model.fit(LOADER, epochs=3, seed=1, verbose=0, checkpoint=checkpoint)
    checkpoint = ipufit.Checkpoint(tmp_path, resume="auto", resume_changes={"lr_scheduler"})
    model = compiled(copy.deepcopy(other), "linear")
    history = model.fit(LOADER, epochs=3, seed=1, verbose=0, checkpoint=checkpoint)
    found = history.history["learning_rate"]
    assert found == pytest.approx([0.1 * (1 - u / n) for u, n in ((9, 10), (19, 30), (29, 30))])


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("interval", ["update", "epoch"])
def test_another_curve_goes_on_where_its_run_is(net, interval, tmp_path):
    """Not where the model is, which had a run before."""
    options = {"lr_scheduler_interval": interval}
    model = compiled(copy.deepcopy(net), "linear", **options)
    model.fit(LOADER, verbose=0)
    checkpoint = ipufit.Checkpoint(tmp_path, every_updates=1)
    work = {"epochs": 4, "seed": 1, "verbose": 0}
    with pytest.raises(EndError):
        model.fit(LOADER, checkpoint=checkpoint, callbacks=[Ends(23)], **work)
    checkpoint = ipufit.Checkpoint(tmp_path, resume="auto", resume_changes={"lr_scheduler"})
    other = compiled(copy.deepcopy(net), Cosine(final=0.5), **options)
    history = other.fit(LOADER, checkpoint=checkpoint, callbacks=[Ends(-1)], **work)
    ends = (29, 39, 40) if interval == "update" else (2, 3, 4)
    expected = [0.1 * hf_cosine(u, ends[-1], 0, 0.5) for u in ends[:-1]]
    assert history.history["learning_rate"][2:] == pytest.approx(expected)


def test_data_without_a_length_needs_a_total(net):
    """Before anything is trained; what needs no length needs none."""

    def stream(count=1):
        yield from [*LOADER] * count

    before = copy.deepcopy(net.state_dict())
    model = compiled(net, Cosine(warmup=2))
    assert message(model.fit, stream(), verbose=0) == (
        "lr_scheduler=Cosine(warmup=2) must know how many updates the run has, but the length of "
        "the data is unknown. Pass fit(steps_per_epoch=...), or data with __len__, or "
        "Cosine(total=...)."
    )
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    history = compiled(net, Cosine(total=10)).fit(stream(), verbose=0)
    assert history.history["learning_rate"] == pytest.approx([0.1 * hf_cosine(9, 10, 0)])
    history = compiled(net, Constant(warmup=20)).fit(stream(), verbose=0)
    assert history.history["learning_rate"] == pytest.approx([0.1 * 9 / 20])
    model = compiled(net, Linear(total=12))
    assert message(model.fit, stream(2), verbose=0) == (
        "lr_scheduler=Linear(total=12) ends after 12 updates, but another update comes. Set total "
        "to the length of the run, or leave it out if the data has a length."
    )


class Short(list):
    """Batches, of which it announces one less."""

    def __len__(self):
        return super().__len__() - 1


def test_data_that_is_longer_than_it_says_is_named_where_the_curve_ends(net):
    """Without total in the curve, its length is that of the data."""
    assert message(compiled(net, "linear").fit, Short(LOADER), verbose=0) == (
        "lr_scheduler=Linear() ends after 9 updates, but another update comes. If fit still runs, "
        "correct __len__ of the data, which says fewer batches."
    )


@pytest.mark.parametrize(
    ("curve", "text"),
    [
        (
            Cosine(total=5),
            "total of Cosine(total=5) must be the length of the run, which is 10 updates, got 5: "
            "the curve would end too early. Leave total out to use the length of the run, or "
            "change epochs of fit.",
        ),
        (
            Cosine(total=50),
            "total of Cosine(total=50) must be the length of the run, which is 10 updates, got 50: "
            "the curve would end too late. Leave total out to use the length of the run, or change "
            "epochs of fit.",
        ),
        (
            Constant(warmup=10),
            "warmup of Constant(warmup=10) must be shorter than the run, which is 10 updates, got "
            "10. Pass fewer updates, or a share of the run such as warmup=0.1.",
        ),
        (
            WSD(warmup=6, decay=5),
            "warmup and decay of WSD(warmup=6, decay=5) must fit into the run, which is 10 "
            "updates, got 6 and 5. Make one of them shorter.",
        ),
    ],
)
def test_a_curve_longer_or_shorter_than_the_run_is_refused(net, curve, text):
    """Before anything is trained."""
    before = copy.deepcopy(net.state_dict())
    model = compiled(net, curve)
    assert message(model.fit, LOADER, verbose=0) == text
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


@pytest.mark.long("ipu-standin")
def test_a_trial_has_the_first_rates_of_a_long_run(net):
    """A total, or a warm-up, that is longer than one execution is no fault of it."""
    for curve in (Cosine(total=500), Linear(warmup=100), "cosine"):
        model = compiled(copy.deepcopy(net), curve)
        trial = ipufit.Loading(fast_dev_run=True)
        for _ in range(2):
            model.fit(LOADER, verbose=0, loading=trial)
    compiled(net, "cosine").fit(LOADER, verbose=0)


@pytest.mark.long("ipu-standin")
def test_single_updates_need_a_total(net):
    model = compiled(copy.deepcopy(net), "linear")
    batch = next(iter(LOADER))
    with pytest.raises(ConfigurationError, match="must know how many updates the run has"):
        model.train_on_batch(*batch)
    model = compiled(net, Linear(total=2))
    found = []
    for _ in range(2):
        found.append(model.optimizer.param_groups[0]["lr"])
        model.train_on_batch(*batch)
    assert found == [0.1, 0.05]
    with pytest.raises(ConfigurationError, match="ends after 2 updates, but another update"):
        model.train_on_batch(*batch)


def test_a_curve_that_no_run_has_begun_has_the_length_that_it_says():
    """Where nobody says one, there is no rate to give."""
    expected = [[rate * hf_cosine(u, 6, 2) for rate in RATES] for u in range(6)]
    found = resolve_schedule(Cosine(warmup=2, total=6), sgd()).rows(6)
    close([[group["lr"] for group in row] for row in found], expected, 1e-14)
    assert message(lambda: resolve_schedule(Cosine(warmup=0.1), sgd()).rows(1)) == (
        "lr_scheduler=Cosine(warmup=0.1) must know how many updates the run has, but the length of "
        "the data is unknown. Pass fit(steps_per_epoch=...), or data with __len__, or "
        "Cosine(total=...)."
    )
    assert message(lambda: resolve_schedule(Cosine(warmup=6, total=6), sgd())) == (
        "warmup of Cosine(warmup=6, total=6) must be shorter than the run, which is 6 updates, got "
        "6. Pass fewer updates, or a share of the run such as warmup=0.1."
    )


@pytest.mark.parametrize("name", ["Cosine", "ONE_cycle", "wsd"])
def test_names_may_be_in_any_case(name):
    assert len(rates(name)) == LENGTH


SPAN = (
    "{} must be a whole number of updates, or a share of the run as a float less than 1, got {}. "
    "Write for example {}=100, or {}=0.1."
)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *(
            (partial(Cosine, value), SPAN.format("warmup of Cosine", repr(value), *["warmup"] * 2))
            for value in (-1, 1.0, -0.5, True, "0.1", None, math.nan)
        ),
        (partial(WSD, decay=2.5), SPAN.format("decay of WSD", 2.5, "decay", "decay")),
        (
            partial(Linear, total=0),
            "total of Linear must be an integer of at least 1 or None, got 0.",
        ),
        (
            partial(Linear, final=-0.1),
            "final of Linear must be a finite number of at least 0, got -0.1.",
        ),
        (
            partial(Polynomial, power=math.inf),
            "power of Polynomial must be a finite number of at least 0, got inf.",
        ),
        (
            partial(OneCycle, div_factor=0.5),
            "div_factor of OneCycle must be a finite number of at least 1, got 0.5.",
        ),
        (
            partial(OneCycle, shape="1-sqrt"),
            "shape of OneCycle must be 'cosine' or 'linear', got '1-sqrt'.",
        ),
        (
            partial(WSD, shape="cos"),
            "shape of WSD must be one of 'cosine', 'linear', '1-sqrt', got 'cos'.",
        ),
        (
            partial(OneCycle, momentum=0.9),
            "momentum of OneCycle must be two numbers of at least 0 and less than 1, or None, got "
            "0.9. Write for example momentum=(0.85, 0.95).",
        ),
    ],
)
def test_values_that_can_not_work_are_refused_where_they_are_written(make, text):
    assert message(make) == text


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"lr_scheduler.*'cosin'.*cosine") as caught:
        resolve_schedule("cosin", sgd())
    assert caught.value.nearest == "cosine"
    assert set(caught.value.known) == {
        *("constant", "cosine", "linear", "one_cycle", "polynomial", "wsd")
    }


def test_a_class_is_refused_with_what_makes_an_object_of_it():
    assert message(partial(resolve_schedule, Cosine, sgd())) == (
        "lr_scheduler must be an object, a factory, a callable or a dict, got the class Cosine. "
        "Pass for example Cosine()."
    )


def test_a_cycle_of_momentum_needs_one():
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(1))])
    assert message(partial(resolve_schedule, "one_cycle", optimizer)) == (
        "OneCycle() changes momentum in addition to the learning rate, but Adagrad has none. Pass "
        "OneCycle(momentum=None)."
    )
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert rows(OneCycle(momentum=None), make=lambda: optimizer)[-1][0]["lr"] < 1e-7


def test_a_rate_that_was_set_by_hand_is_refused_before_the_run():
    schedule = resolve_schedule("linear", sgd())
    schedule.begin_run(4, 1)
    schedule._optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(ConfigurationError, match="lr is set by lr_scheduler, but it was changed"):
        schedule.begin_run(4, 1)


def test_an_optimizer_that_is_compiled_again_keeps_its_rates(net):
    """It ends at 0, but was made with others; torch's schedulers keep them in the same place."""
    optimizer = sgd(net.parameters())
    for _ in range(2):
        model = ipufit.Model(net)
        model.compile(optimizer, "cross_entropy", lr_scheduler="linear")
        history = model.fit(LOADER, verbose=0)
        assert history.history["learning_rate"] == pytest.approx([0.1 / 10])
