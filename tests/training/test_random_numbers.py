"""Random numbers are reproducible, and nothing that should not matter changes them."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ipufit
from ipufit.utils.random_streams import DataStream, isolated, stream_key
from tests.caching import once_per_engine
from tests.engines import counts_in_a_buffer, ragged, replicas_meet, runs_eagerly
from tests.nets import CNN, Noise, Running, data


def fit(n=72, epochs=2, seed=7, shuffle=True, net=None, compile_options=None, **options):
    """Weights after a fit of a net with BatchNorm and dropout."""
    torch.manual_seed(3)
    net = net or CNN().double()
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy", **(compile_options or {}))
    x, y = data(n)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=shuffle)
    history = model.fit(loader, epochs=epochs, seed=seed, verbose=0, **options)
    return net.state_dict(), history.history


def equal(first, second):
    """Whether two results agree in every bit."""
    weights, losses = first
    others, other_losses = second
    return losses == other_losses and all(torch.equal(weights[k], others[k]) for k in weights)


@once_per_engine
def one_by_one(ga, replicas, n):
    """The same with an execution for every update."""
    return fit(n, gradient_accumulation=ga, ipus=replicas)


@pytest.mark.long("ipu-standin")
@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("di", [2, 3, 5, 16, 100])
@pytest.mark.parametrize(
    ("ga", "replicas", "n"), [(1, 1, 70), pytest.param(3, 2, 70, marks=ragged), (3, 1, 72)]
)
def test_device_iterations_do_not_change_a_bit(di, ga, replicas, n):
    """How many updates share an execution is a matter of speed alone."""
    found = fit(n, device_iterations=di, gradient_accumulation=ga, ipus=replicas)
    assert equal(found, one_by_one(ga, replicas, n))


@pytest.mark.long("ipu-standin")
def test_one_seed_gives_one_result():
    """A run can be repeated."""
    assert equal(fit(seed=1), fit(seed=1))
    assert not equal(fit(seed=1), fit(seed=2))


@pytest.mark.long("ipu-standin")
def test_seed_zero_is_a_seed():
    """Zero must not mean 'none', as it does elsewhere."""
    torch.manual_seed(1)
    first = fit(seed=0)
    torch.manual_seed(2)
    assert equal(first, fit(seed=0))
    assert not equal(first, fit(seed=1))


@pytest.mark.long("ipu-standin")
def test_without_a_seed_torch_manual_seed_fixes_the_run():
    """torch users expect manual_seed to be enough."""
    assert equal(fit(seed=None), fit(seed=None))


@runs_eagerly
def test_a_run_without_capture_has_the_same_bits():
    """run_eagerly is the first debugging tool: it must show the same numbers."""
    work = {"device_iterations": 3, "gradient_accumulation": 2, "ipus": 2}
    assert equal(fit(**work), fit(compile_options={"run_eagerly": True}, **work))


@pytest.mark.long("ipu-standin")
def test_validation_does_not_change_training():
    """Looking must not disturb, even when validation data is shuffled and evaluated in parts."""
    held_out = DataLoader(TensorDataset(*data(32)), batch_size=4, shuffle=True)
    weights, history = fit(validation_data=held_out, device_iterations=2)
    assert set(history) == {"loss", "val_loss"}
    assert equal((weights, {"loss": history["loss"]}), fit())


@pytest.mark.long("ipu-standin")
def test_validation_that_draws_random_numbers_does_not_change_training():
    """A module may be random in eval mode too."""
    torch.manual_seed(0)
    net = Noise().double()
    held_out = DataLoader(TensorDataset(*data(32)), batch_size=4)
    weights, history = fit(net=copy.deepcopy(net), validation_data=held_out)
    assert equal((weights, {"loss": history["loss"]}), fit(net=copy.deepcopy(net)))


class Echo(nn.Module):
    """Returns random numbers, so that a prediction shows what a stream gave."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = []

    def forward(self, x):
        noise = torch.rand(len(x))
        self.seen.append(noise)
        return noise + self.weight * x[:, 0]


@runs_eagerly
def test_replicas_and_updates_draw_from_streams_of_their_own():
    """Two micro-batches with the same dropout mask would be a silent loss of randomness."""
    net = Echo()
    model = ipufit.Model(net)
    model.compile("sgd", "mse", run_eagerly=True)
    x = torch.ones(24, 1)
    loader = DataLoader(TensorDataset(x, torch.zeros(24)), batch_size=2)
    model.fit(loader, epochs=2, ipus=2, gradient_accumulation=2, seed=0, verbose=0)
    drawn = [tuple(noise.tolist()) for noise in net.seen]
    assert len(drawn) == len(set(drawn)) == 2 * 12


@pytest.mark.long("ipu-standin")
def test_replicas_times_accumulation_decides_not_either():
    """Without BatchNorm, 2 replicas x 3 steps see the same data and masks as 1 x 6 or 6 steps."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 5)).double()
    results = [
        fit(net=copy.deepcopy(net), ipus=replicas, gradient_accumulation=ga)
        for replicas, ga in ((1, 4), (2, 2), (4, 1))
    ]
    for weights, history in results[1:]:
        assert history["loss"] == pytest.approx(results[0][1]["loss"], abs=1e-12)
        for name, value in weights.items():
            torch.testing.assert_close(value, results[0][0][name], rtol=0, atol=1e-12)


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("kind", "ipus"),
    [
        (CNN, 1),
        pytest.param(CNN, 2, marks=replicas_meet),
        pytest.param(Running, 2, marks=counts_in_a_buffer),
    ],
)
def test_two_fits_go_on_where_one_would(kind, ipus):
    """A second fit continues the counts, the optimizer's state and the buffers of every replica."""
    start = kind().double()
    net = copy.deepcopy(start)
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy")
    n = 72 if ipus == 1 else 70
    loader = DataLoader(TensorDataset(*data(n)), batch_size=4)
    losses, plan = [], {"ipus": ipus, "gradient_accumulation": 2}
    for epoch in range(2):
        work = {"epochs": range(epoch, epoch + 1), **plan}
        losses += model.fit(loader, seed=7, verbose=0, **work).history["loss"]
    once = fit(net=copy.deepcopy(start), n=n, shuffle=False, **plan)
    assert equal((net.state_dict(), {"loss": losses}), once)


@pytest.mark.long("ipu-standin")
def test_fit_leaves_the_users_generator_alone():
    """With a seed given, fit draws nothing from torch's global generator."""
    x, y = data(20)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    model = ipufit.Model(CNN().double())
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    before = torch.get_rng_state()
    model.fit(loader, seed=1, validation_data=loader, verbose=0)
    model.evaluate(loader, verbose=0)
    with pytest.warns(UserWarning, match="which shuffles"):
        model.predict(loader, verbose=0)
    assert torch.equal(torch.get_rng_state(), before)


class Augmented(Dataset):
    """Draws from torch's generator in __getitem__, as augmentation does."""

    def __init__(self):
        self.drawn = []

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.drawn.append(torch.rand(()).item())
        return torch.ones(1, 3, 4, dtype=torch.float64), index % 5


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("di", [1, 3])
def test_augmentation_does_not_depend_on_the_plan(di):
    """What a dataset draws depends on seed and epoch, not on what the program draws in between."""
    dataset = Augmented()
    model = ipufit.Model(CNN().double())
    model.compile("sgd", "cross_entropy")
    model.fit(DataLoader(dataset, batch_size=4), epochs=2, seed=5, device_iterations=di, verbose=0)
    stream = []
    for epoch in range(2):
        torch.manual_seed(stream_key(5, "train", epoch))
        torch.empty((), dtype=torch.int64).random_()  # the loader's own draw, a seed for workers
        stream += [torch.rand(()).item() for _ in range(12)]
    assert dataset.drawn == stream


@pytest.mark.long("ipu-standin")
def test_epochs_are_shuffled_differently():
    """One order for all epochs would be a silent loss of randomness."""
    order = []

    class Seen(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            order.append(index)
            return torch.zeros(12, dtype=torch.float64), 0

    model = ipufit.Model(nn.Linear(12, 5).double())
    model.compile("sgd", "cross_entropy")
    model.fit(DataLoader(Seen(), batch_size=2, shuffle=True), epochs=2, seed=0, verbose=0)
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]


def test_keys_are_apart_and_fit_a_generator():
    """Neighbouring seeds and places must not share a stream."""
    keys = {
        stream_key(seed, "train", u, p) for seed in range(4) for u in range(9) for p in range(9)
    }
    assert len(keys) == 4 * 81
    assert all(0 <= key < 2**63 for key in keys)
    assert stream_key(1, 23) != stream_key(12, 3)


def test_a_stream_goes_on_where_it_stopped():
    """Fetching in parts draws what fetching at once would."""
    whole, parts = DataStream(1, "a"), DataStream(1, "a")
    with whole.active():
        expected = torch.rand(6)
    drawn = []
    for _ in range(3):
        torch.rand(5)
        with parts.active():
            drawn.append(torch.rand(2))
    assert torch.equal(torch.cat(drawn), expected)


def test_isolated_puts_the_generator_back_after_an_error():
    """An exception must not leave the program's generator in place."""
    before = torch.get_rng_state()

    def interrupted():
        with isolated(torch.device("cpu")):
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.embedded_only("an IPU's module lies on the CPU")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_module_without_values_is_refused(when):
    """At compile, and where it was moved since; it trains once it has values."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    net.register_buffer("table", torch.zeros(5))
    model = ipufit.Model(net)
    x, y = data(8)
    if when == "after":
        model.compile("sgd", "cross_entropy")
    net.table = torch.zeros(5, device="meta")
    compiling = functools.partial(model.compile, "sgd", "cross_entropy")
    fitting = functools.partial(model.fit, x, y, batch_size=4, verbose=0)
    with pytest.raises(ipufit.errors.ConfigurationError) as caught:
        (compiling if when == "before" else fitting)()
    assert str(caught.value) == (
        "a module must have values to compute with, but 'table' is on the device 'meta', where "
        "tensors have none. Allocate it with module.to_empty(device='cpu'), and load or initialise "
        "its weights."
    )
    net.table = torch.zeros(5)
    model.compile("sgd", "cross_entropy")
    model.fit(x, y, batch_size=4, verbose=0)
