"""Devices that torch has no CUDA for: keyed random numbers, checkpoints and copies on them.

The device is the one of :mod:`tests.plain_device`, registered in a process of its own.
"""

import contextlib
import functools
import io
import multiprocessing
import traceback
import types

import pytest
import torch
from torch import nn

import ipufit
from ipufit.cli import doctor
from ipufit.errors import CaptureError, ConfigurationError, ProcessError
from ipufit.training import rank_consistency
from ipufit.utils import devices
from ipufit.utils.random_streams import isolated, seed_generators
from ipufit.utils.state import fork_rng
from tests.copies import CAN_COPY
from tests.fitting import assert_equal
from tests.nets import CNN, data
from tests.plain_device import CAN_REGISTER, Keyed, Plain, register

pytestmark = [
    pytest.mark.both_engines,
    pytest.mark.skipif(
        not (CAN_REGISTER and CAN_COPY), reason="this torch registers no device from Python"
    ),
]


# Autograd makes queues for the devices that there are as the first backward pass begins. So a copy
# of a process that has made one can't train on a device that is registered later.
CLEAN = multiprocessing.get_context("forkserver") if CAN_COPY else None


def run(name, module, sender, arguments):
    """Run a test in this process, in which torch gets to know the device."""
    try:
        register(module())
        globals()[name].__wrapped__(**arguments)
        sender.send("")
    except BaseException:
        sender.send(traceback.format_exc())


def on_the_device(test):
    """Run a test in a process in which torch knows the device."""

    @functools.wraps(test)
    def started(**arguments):
        module = arguments.get("module", Plain)
        receiver, sender = CLEAN.Pipe(duplex=False)
        CLEAN.set_forkserver_preload([__name__])
        process = CLEAN.Process(target=run, args=(test.__name__, module, sender, arguments))
        process.start()
        try:
            assert receiver.poll(120), "the process said nothing"
            said = receiver.recv()
            assert not said, said
        finally:
            process.kill()
            process.join()

    return started


both = pytest.mark.parametrize("module", [Plain, Keyed], ids=["unkeyed", "keyed"])


def fitted(device, net=CNN, optimizer="adam", compiling=None, rows=23, **options):
    torch.manual_seed(0)
    model = ipufit.Model(net().double(), engine="embedded", device=device)
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"], **(compiling or {}))
    work = {"batch_size": 4, "epochs": 2, "gradient_accumulation": 2, "device_iterations": 2}
    model.fit(*data(rows), verbose=0, **{**work, "seed": 3, **options})
    return model


def net_of(model):
    return model.module.cpu()


@both
@pytest.mark.parametrize(
    "compiling", [{}, {"jit": "graph"}, {"run_eagerly": True}], ids=["auto", "graph", "eagerly"]
)
@on_the_device
def test_training_with_dropout_has_the_bits_of_the_host(module, compiling):
    """One key starts the host's generator and the device's, whoever draws in the end."""
    on_host = fitted("cpu", compiling={"jit": "graph"})
    model = fitted("plain", compiling=compiling)
    assert model.history.history == on_host.history.history
    assert_equal(net_of(model), net_of(on_host))


@both
@on_the_device
def test_an_execution_is_one_copy_to_the_host(module):
    one = fitted("plain", device_iterations=1)
    del torch.plain.reads[:]
    three = fitted("plain", device_iterations=3)
    # Six micro-batches are three updates, which are one execution in each of two epochs.
    assert len(torch.plain.reads) == 2
    assert_equal(net_of(one), net_of(three))


@both
@on_the_device
def test_a_run_that_goes_on_ends_with_the_same_bits(module, tmp_path):
    whole = fitted("plain", epochs=3)
    fitted("plain", epochs=1, checkpoint=ipufit.Checkpoint(str(tmp_path)))
    torch.plain.manual_seed_all(77)
    resumed = fitted("plain", epochs=3, checkpoint=ipufit.Checkpoint(str(tmp_path), resume="auto"))
    assert_equal(net_of(whole), net_of(resumed))


class Draws(nn.Module):
    """All kinds of random numbers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = x.flatten(1)
        same, share = {"device": x.device, "dtype": x.dtype}, torch.sigmoid(x.detach())
        noise = torch.rand(12, **same) + torch.randn(12, **same) + torch.rand_like(x)
        noise = noise + torch.randint(3, (12,), device=x.device)
        noise = noise + torch.randperm(12, device=x.device)
        for fill, arguments in (
            *(("bernoulli_", (0.3,)), ("bernoulli_", (share,)), ("uniform_", (0.0, 2.0))),
            *(("normal_", (1.0, 2.0)), ("exponential_", ()), ("geometric_", (0.4,))),
        ):
            noise = noise + getattr(torch.empty_like(x), fill)(*arguments)
        noise = noise + torch.bernoulli(share) + torch.normal(share, share)
        noise = noise + torch.normal(share, 0.5) + torch.normal(1.0, share)
        for count, again in ((3, False), (20, True)):
            places = torch.multinomial(share, count, replacement=again)
            noise = noise + x.detach().gather(1, places).sum(1, keepdim=True)
        noise = noise + nn.functional.alpha_dropout(x.detach(), 0.2)
        return self.head(x + 0.01 * noise)


@both
@on_the_device
def test_every_kind_of_random_number_follows_the_key(module):
    runs = [
        fitted("plain", Draws, device_iterations=count, compiling={"run_eagerly": eagerly})
        for count, eagerly in ((1, False), (3, False), (2, True))
    ]
    first, *others = [net_of(run) for run in runs]
    for other in others:
        assert_equal(first, other)


class Spread(nn.Module):
    """Begins on the host, and drops out on the device."""

    def __init__(self, device="plain"):
        super().__init__()
        self.first = nn.Linear(12, 6)
        self.second = nn.Linear(6, 5).to(device)

    def forward(self, x):
        x = nn.functional.dropout(self.first(x.flatten(1)).to(self.second.weight.device), 0.3)
        return self.second(x).to("cpu")


@both
@on_the_device
def test_a_module_on_several_devices_follows_the_key_on_all(module):
    for eagerly in (False, True):
        compiling = {"run_eagerly": eagerly}
        one, three = (
            fitted(None, Spread, compiling=compiling, device_iterations=count) for count in (1, 3)
        )
        assert one.module.second.weight.device.type == "plain"
        assert_equal(net_of(one), net_of(three))
        if module is Plain:
            on_host = fitted(None, lambda: Spread("cpu"), compiling=compiling)
            assert_equal(net_of(one), net_of(on_host))


@on_the_device
def test_numbers_that_are_drawn_elsewhere_have_their_distribution():
    device = torch.device("plain", 0)
    share = torch.tensor([0.1, 0.7, 0.2]).to(device)
    with isolated(device):
        seed_generators(5, device)
        many = share.expand(4000, 3)
        counts = torch.multinomial(many, 1).cpu().flatten().bincount() / 4000
        torch.testing.assert_close(counts, share.cpu(), atol=0.03, rtol=0)
        again = torch.multinomial(share, 4000, replacement=True).cpu().bincount() / 4000
        torch.testing.assert_close(again, share.cpu(), atol=0.03, rtol=0)
        pairs = torch.multinomial(many, 2).cpu()
        assert (pairs[:, 0] != pairs[:, 1]).all()
        torch.testing.assert_close(
            torch.bernoulli(many).mean(0).cpu(), share.cpu(), atol=0.03, rtol=0
        )
        normal = torch.normal(many, 2.0).cpu() - share.cpu()
        assert abs(normal.mean()) < 0.1
        assert abs(normal.std() - 2.0) < 0.1
        dropped = nn.functional.dropout(torch.ones(4000).to(device).requires_grad_(), 0.25)
        assert set(dropped.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
        assert abs(dropped.mean().item() - 1.0) < 0.05
        assert not nn.functional.dropout(torch.ones(9).to(device), 1.0).any()


class Poisson(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)) + torch.poisson(torch.ones(5, 5).to(x))[0]


@pytest.mark.parametrize("eagerly", [False, True])
@on_the_device
def test_numbers_that_nobody_can_key_are_refused(eagerly):
    kind = ConfigurationError if eagerly else CaptureError
    with pytest.raises(kind) as caught:
        fitted("plain", lambda: Poisson(12, 5), compiling={"run_eagerly": eagerly})
    text = str(caught.value)
    assert text.startswith(
        "aten::poisson draws random numbers on plain:0, whose generator can't be seeded per "
        "micro-batch, so they would depend neither on seed nor on checkpoints"
    )
    assert text.endswith(
        "Draw with torch.rand, randn, randint, bernoulli, normal, multinomial or dropout, which "
        "can get them from the host, or move the module with module.cpu()."
    )
    assert eagerly or "in forward: `return super().forward(x.flatten(1)) + torch.poisson" in text


@on_the_device
def test_several_processes_are_refused():
    model = ipufit.Model(nn.Linear(12, 5), device="plain")
    session = types.SimpleNamespace(module=model.module)
    with pytest.raises(ProcessError) as caught:
        rank_consistency._check_device(session)
    assert str(caught.value) == (
        "several processes exchange tensors on CPUs and CUDA devices, but Linear is on plain:0. "
        "Train in one process, or move the module to such a device."
    )


@on_the_device
def test_what_looks_into_a_model_works_on_the_device(tmp_path):
    model = fitted("plain", compiling={"jit": "graph"})
    x, y = data(4)
    assert not model.check((x, y)).findings
    assert model.compare((x, y)).ok
    report = ipufit.Report(str(tmp_path / "run"))
    model.fit(x, y, batch_size=2, verbose=0, callbacks=[report])
    assert model.predict(x, batch_size=2, verbose=0).device.type == "cpu"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model.explain()
    assert "on the embedded engine, device plain:0" in printed.getvalue()
    assert doctor._examined()["machine"]["other devices"] == "plain"


@on_the_device
def test_state_in_host_memory_comes_and_goes():
    memory = ipufit.Memory(offload_optimizer=True)
    offloaded = fitted("plain", compiling={"memory": memory, "jit": "graph"})
    assert_equal(net_of(offloaded), net_of(fitted("plain", compiling={"jit": "graph"})))


@both
@on_the_device
def test_a_backend_gets_random_numbers_from_the_host_too(module):
    compiled = fitted("plain", optimizer="sgd", compiling={"jit": lambda graph, _: graph.forward})
    as_recorded = fitted("plain", optimizer="sgd", compiling={"jit": "graph"})
    assert_equal(net_of(compiled), net_of(as_recorded))


@pytest.mark.parametrize("module", [Keyed])
@on_the_device
def test_generators_of_the_device_are_left_as_they_were(module):
    device = torch.device("plain", 0)
    assert devices.is_keyed(device)
    devices.check_devices([("weight", torch.ones(1).to(device))])
    torch.plain.manual_seed(5)
    state = torch.plain.get_rng_state()
    with isolated(device):
        seed_generators(1, device)
        one = torch.rand(3, device=device)
        seed_generators(1, device)
        assert torch.equal(one.cpu(), torch.rand(3, device=device).cpu())
    assert torch.equal(torch.plain.get_rng_state(), state)
    with fork_rng():
        torch.rand(3, device=device)
        assert not torch.equal(torch.plain.get_rng_state(), state)
    assert torch.equal(torch.plain.get_rng_state(), state)


class Deaf(Keyed):
    """A module whose functions do nothing."""

    def set_rng_state(self, state, device="plain"):
        pass


@pytest.mark.parametrize("module", [Deaf])
@on_the_device
def test_a_generator_that_only_says_that_it_can_be_set_is_found_out(module):
    assert not devices.is_keyed(torch.device("plain", 0))
    on_host = fitted("cpu", compiling={"jit": "graph"})
    assert_equal(net_of(fitted("plain")), net_of(on_host))
