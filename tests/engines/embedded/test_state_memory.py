"""``offload_optimizer=True``: the optimizer's state in host memory, with the same numbers."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.engines.embedded.optimizer_state_location import HostMemory, StateMemory
from ipufit.engines.ipu.engine import IpuEngine
from tests.fitting import Plan, assert_equal, compiled, fit
from tests.nets import MLP, data
from tests.told import refused

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "lamb": lambda p: ipufit.optim.LAMB(p, 0.01),
    # Recorded with their own step.
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
}
X, Y = data(23)


def run(make, offload, eagerly=False, fits=2, **options):
    """A model after some fits, on an engine that takes the host for a device."""
    torch.manual_seed(0)
    way = "eager" if eagerly else "late"
    options["memory"] = ipufit.Memory(offload_optimizer=offload)
    # Without the measurements that choose among kernels.
    options.update({} if eagerly else {"jit": "graph"})
    model, engine = compiled(MLP().double(), make, way=way, **options)
    engine.as_device = True
    histories = [fit(model, X, Y, Plan(3, 2, 2)).history for _ in range(fits)]
    return model, histories


def states(model):
    """What the torch optimizer has, by parameter."""
    found = model.optimizer.state
    return [
        {
            name: value.clone() if torch.is_tensor(value) else value
            for name, value in found[p].items()
        }
        for p in model.module.parameters()
    ]


@pytest.mark.long
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop", "lamb", "adadelta", "rprop"])
def test_the_bits_are_those_of_a_state_that_stays(name, eagerly):
    """Over two fits, with a tail in the epoch, and in what the torch optimizer gets."""
    moved, first = run(OPTIMIZERS[name], True, eagerly)
    stays, second = run(OPTIMIZERS[name], False, eagerly)
    assert isinstance(moved._session.engine.training.state.placement.memory, HostMemory)
    assert type(stays._session.engine.training.state.placement.memory) is StateMemory
    assert first == second
    assert_equal(moved.module, stays.module)
    for own, other in zip(states(moved), states(stays)):
        assert own.keys() == other.keys()
        for key, value in own.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key


@pytest.mark.long
def test_updates_that_are_left_out_leave_the_state_as_it_was():
    """An execution that is taken back takes the state in host memory back too."""
    x = torch.tensor([1.0, 2.0, 1e30, 3.0, 1.5, 0.5]).unsqueeze(1)
    found = []
    for offload in (True, False):
        torch.manual_seed(0)
        made = {
            "loss": lambda y, t: (y * t).mean(),
            "precision": ipufit.Precision(loss_scale=ipufit.LossScale(2.0**30, 5)),
        }
        net = nn.Linear(1, 1)
        model, _ = compiled(
            net,
            OPTIMIZERS["adam"],
            way="late",
            memory=ipufit.Memory(offload_optimizer=offload),
            **made,
        )
        history = fit(model, x, torch.ones(6, 1), Plan(1, 3)).history
        assert history["skipped_updates"] == [1, 1]
        found.append((history, model))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1].module, found[1][1].module)


@pytest.mark.long
def test_an_update_leaves_nothing_on_the_device(monkeypatch):
    """What it fetched is gone when it is over, and each update fetches anew."""
    fetched, kept = [], set()
    fetch = HostMemory.fetch

    def watched(self, tensors):
        gc.collect()
        assert [ref for ref in fetched if ref() is not None] == []
        kept.update(tensor.data_ptr() for tensor in tensors)
        found = fetch(self, tensors)
        assert not kept.intersection(tensor.data_ptr() for tensor in found)
        fetched.extend(weakref.ref(tensor) for tensor in found)
        return found

    monkeypatch.setattr(HostMemory, "fetch", watched)
    _, (history,) = run(OPTIMIZERS["adam"], True, fits=1)
    updates = 2 * -(-23 // 6)
    # Three moments for each, and once more where the update has to be recorded.
    assert len(fetched) in (3 * updates, 3 * (updates + 1))
    assert len(history["loss"]) == 2


@pytest.mark.long
def test_callbacks_and_others_read_the_present_state():
    """While training goes on copies of the state are in host memory, and later with the module."""
    seen = []

    def look(epoch, logs):
        seen.append(states(moved))

    moved, _ = run(OPTIMIZERS["adam"], True, fits=0)
    plain, _ = run(OPTIMIZERS["adam"], False, fits=0)
    callback = ipufit.callbacks.LambdaCallback(on_epoch_end=look)
    fit(moved, X, Y, callbacks=[callback])
    fit(plain, X, Y, epochs=1)
    for own, other in zip(seen[0], states(plain)):
        assert all(torch.equal(own[key], other[key]) for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.long("ipu-standin")
def test_a_plain_loop_goes_on_with_the_state():
    """The torch optimizer of a finished fit works."""
    model, _ = run(OPTIMIZERS["adam"], True)
    before = copy.deepcopy(model.module.state_dict())
    nn.functional.cross_entropy(model.module(X), Y).backward()
    model.optimizer.step()
    assert any(not torch.equal(v, before[k]) for k, v in model.module.state_dict().items())


@pytest.mark.long
def test_on_the_cpu_nothing_is_copied_and_explain_says_so(capsys):
    model = ipufit.Model(MLP().double(), engine="embedded")
    model.compile("adam", "cross_entropy", memory=ipufit.Memory(offload_optimizer=True))
    fit(model, X, Y)
    assert type(model._session.engine.training.state.placement.memory) is StateMemory
    model.explain()
    text = capsys.readouterr().out
    assert (
        "offload_optimizer changes nothing, because the module is in host memory itself."
    ) in text
    assert "offload_optimizer_state=True" in text


@pytest.mark.long
def test_explain_says_where_the_state_is(capsys):
    model, _ = run(OPTIMIZERS["adam"], True)
    model.explain()
    assert (
        "The optimizer's state is in host memory, and on the device only during updates."
    ) in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_peak_falls_by_the_state():
    """Where activations are what takes most memory; the weights have the same bits."""
    peaks, weights = [], []
    x = torch.randn(2**14, 1024)
    for offload in (False, True):
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        net = nn.Sequential(*layers).cuda()
        model = ipufit.Model(net)
        memory = ipufit.Memory(offload_optimizer=offload)
        # A captured graph keeps its memory.
        model.compile("adam", "mse", memory=memory, jit="graph")
        model.fit(x, x, batch_size=2**14, verbose=0, seed=1)
        torch.cuda.reset_peak_memory_stats()
        model.fit(x, x, batch_size=2**14, epochs=2, verbose=0, seed=1)
        peaks.append(torch.cuda.max_memory_allocated())
        weights.append([p.detach().cpu().clone() for p in net.parameters()])
        model.close()
        del model, net, layers
        gc.collect()
    moments = 2 * sum(p.numel() * p.element_size() for p in weights[0])
    assert peaks[0] - peaks[1] > 0.9 * moments
    for first, second in zip(*weights):
        assert torch.equal(first, second)


def configured(value):
    return ipufit.IPUConfig(optimizer_state_offchip=value)


def located(value):
    options = poptorch.Options()
    location = poptorch.TensorLocationSettings().useOnChipStorage(value)
    options.TensorLocations.setOptimizerLocation(location)
    return options


@pytest.mark.parametrize(
    ("options", "offloads"),
    [
        ({}, False),
        ({"memory": ipufit.Memory(offload_optimizer=True)}, True),
        ({"config": configured(True)}, True),
        ({"config": configured(False)}, False),
        ({"poptorch": located(False)}, True),
        ({"poptorch": located(True)}, False),
        ({"poptorch": located(None)}, False),
        ({"poptorch": located(False), "memory": ipufit.Memory(offload_optimizer=True)}, True),
    ],
)
def test_who_says_where_the_state_is(options, offloads):
    model = ipufit.Model(nn.Linear(4, 3), engine="embedded")
    model.compile("adam", "cross_entropy", **options)
    assert model._session.config.offload_optimizer_state is offloads


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            lambda: {"config": configured(False), "memory": ipufit.Memory(offload_optimizer=True)},
            "Memory.offload_optimizer must agree with IPUConfig.optimizer_state_offchip, which is "
            "False, got True. Leave it out, or change the config.",
        ),
        (
            lambda: {"poptorch": located(True), "memory": ipufit.Memory(offload_optimizer=True)},
            "Memory.offload_optimizer must agree with "
            "training_options.TensorLocations.setOptimizerLocation, which says False, got True. "
            "Leave it out, or change the options.",
        ),
        (
            lambda: {"memory": ipufit.Memory(offload_optimizer="cpu")},
            "Memory.offload_optimizer must be one of None, True, False, got 'cpu'.",
        ),
    ],
)
def test_what_is_refused(options, text):
    model = ipufit.Model(nn.Linear(4, 3))
    refused(lambda: model.compile("adam", "cross_entropy", **options()), text)


@pytest.mark.long
@pytest.mark.parametrize("offload", [None, True])
def test_on_an_ipu_the_state_is_off_the_chip(offload):
    """The options of a training program say so."""
    seen = []

    class Sdk:
        __name__ = "ipufit.poptorch"

        def __getattr__(self, name):
            return getattr(poptorch, name)

        def trainingModel(self, model, options, optimizer):  # noqa: N802
            seen.append(options.TensorLocations.toDict())
            return poptorch.trainingModel(model, options=options, optimizer=optimizer)

    model = ipufit.Model(MLP(), engine=lambda: IpuEngine(Sdk(), "ipu-standin"))
    model.compile("adam", "cross_entropy", memory=ipufit.Memory(offload_optimizer=offload))
    fit(model, X.float(), Y)
    wanted = {"location_optimizer": {"onChip": 0}} if offload else {}
    assert all(locations == wanted for locations in seen)
    assert seen
