"""While training goes on, torch's optimizer looks into the state that the program works on."""

import copy

import pytest
import torch
from torch import nn

import ipufit
from ipufit.callbacks import Callback
from tests.fitting import Plan, compiled, fit
from tests.nets import MLP, data
from tests.points import only

pytestmark = pytest.mark.both_engines

X, Y = data(20)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "lamb": lambda p: ipufit.optim.LAMB(p, 0.01),
}
# On the host; with results looked at after an execution and the state in host memory, as on a GPU.
PLACES = [("eager", False), ("late", False), ("late", True), ("captured", False)]
# One optimizer in every place, and every other one in one of them.
QUICK = {
    *(("adam", *place) for place in PLACES),
    ("sgd", "late", False),
    ("rmsprop", "captured", False),
    ("lamb", "eager", False),
}
EVERY_STATE = only(QUICK, [(name, *place) for name in OPTIMIZERS for place in PLACES])


def made(make, way="late", offload=False):
    torch.manual_seed(0)
    # Without the measurements that choose among kernels.
    how = {"jit": "graph"} if way == "late" else {}
    memory = ipufit.Memory(offload_optimizer=offload)
    model, _ = compiled(MLP().double(), make, way=way, memory=memory, **how)
    return model


def memory(optimizer):
    """Bytes that its state keeps alive."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for name, value in state.items()
        if torch.is_tensor(value) and name != "step"
    }
    return sum(storages.values())


class Look(Callback):
    """What ``read`` finds in the optimizer at the end of each epoch."""

    def __init__(self, read):
        super().__init__()
        self.read, self.seen = read, []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self.read(self.model.optimizer))


def places(tensors):
    """Address and bytes of each."""
    return [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]


def places_of(optimizer):
    states = optimizer.state.values()
    return places(v for state in states for name, v in state.items() if name != "step")


def are_all_of(parts, wholes):
    """Whether the parts are the memory of the wholes, no more and no less."""
    inside = all(any(w <= p and p + n <= w + size for w, size in wholes) for p, n in parts)
    return inside and sum(n for _, n in parts) == sum(size for _, size in wholes)


@pytest.mark.few("sgd-late-False", "adam-captured-False", "lamb-eager-False", "adam-late-True")
@pytest.mark.parametrize(("name", "way", "offload"), EVERY_STATE)
def test_the_state_exists_once(name, way, offload):
    """From the first epoch of the first fit on, and from the start of a second one."""
    model = made(OPTIMIZERS[name], way, offload)
    look = Look(places_of)
    held = []

    class LiveBytes(Callback):
        def on_train_batch_end(self, batch, logs=None):
            updater = self.model._session._training.state.updater
            held.append(places(updater.state_tensors()))

    fit(model, X, Y, callbacks=[look, LiveBytes()], epochs=2)
    assert are_all_of(look.seen[0], held[0])
    assert are_all_of(look.seen[1], held[-1])
    in_second = []

    class First(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            in_second.append(places_of(optimizer))

    optimizer = model.optimizer
    held.clear()
    fit(model, X, Y, callbacks=[First(), LiveBytes()], epochs=1)
    assert are_all_of(in_second[0], held[0])


@pytest.mark.few("sgd-late-False", "adam-captured-False", "lamb-eager-False", "adam-late-True")
@pytest.mark.parametrize(("name", "way", "offload"), EVERY_STATE)
def test_after_fit_every_tensor_has_memory_of_its_own(name, way, offload):
    model = made(OPTIMIZERS[name], way, offload)
    fit(model, X, Y)
    for parameter, state in model.optimizer.state.items():
        for key, value in state.items():
            if key != "step":
                size = value.numel() * value.element_size()
                assert value.untyped_storage().nbytes() == size, key
                assert value.stride() == parameter.stride()
                assert not value.is_pinned()
    assert memory(model.optimizer) == sum(
        value.numel() * value.element_size()
        for state in model.optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )


def test_also_where_a_callback_has_the_last_word():
    """What it has made of the state at the end is what remains, and nothing looks into the rest."""
    model = made(OPTIMIZERS["adam"])
    wanted = []

    class Counts(Callback):
        def on_epoch_end(self, epoch, logs=None):
            for state in self.model.optimizer.state.values():
                state["step"] += 100
                state["exp_avg"] = torch.zeros_like(state["exp_avg"])
                wanted.append(state["exp_avg_sq"].clone())

    fit(model, X, Y, callbacks=[Counts()], epochs=1)
    states = list(model.optimizer.state.values())
    assert [float(state["step"]) for state in states] == [105.0] * 4
    for state, squares in zip(states, wanted):
        assert torch.equal(state["exp_avg_sq"], squares)
        assert not state["exp_avg"].any()
        size = squares.numel() * squares.element_size()
        assert state["exp_avg_sq"].untyped_storage().nbytes() == size


def loop(make, at, change):
    """A loop by hand over two epochs, with a change after some of its updates."""
    torch.manual_seed(0)
    net = copy.deepcopy(MLP().double())
    optimizer = make(net.parameters())
    for update in range(10):
        rows = slice(4 * update % 20, 4 * update % 20 + 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X[rows]), Y[rows]).backward()
        optimizer.step()
        if update in at:
            change(optimizer)
    return net


@pytest.mark.few("sgd-late-False", "adam-captured-False", "adam-late-True")
@pytest.mark.parametrize(
    ("name", "way", "offload"), [state for state in EVERY_STATE if state.values[0] != "lamb"]
)
def test_what_is_written_into_it_the_next_update_finds(name, way, offload):
    """In the middle of an epoch and through a reference of the user's own, as in a loop."""
    model = made(OPTIMIZERS[name], way, offload)
    optimizer = model.optimizer

    def change(own):
        for state in own.state.values():
            for key, value in state.items():
                if key != "step":
                    value.mul_(0.25)

    class Change(Callback):
        def __init__(self):
            super().__init__()
            self.updates = -1

        def on_train_batch_end(self, batch, logs=None):
            self.updates += 1
            if self.updates in (5, 7):
                change(optimizer)

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                change(optimizer)

    fit(model, X, Y, callbacks=[Change()])
    by_hand = loop(OPTIMIZERS[name], (4, 5, 7), change)
    for own, wanted in zip(model.module.parameters(), by_hand.parameters()):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)


def test_a_checkpoint_shares_nothing_with_training(tmp_path):
    """It is read while training goes on, and written as it was then."""
    model = made(OPTIMIZERS["adam"])
    states = []

    class Read(Callback):
        def on_epoch_end(self, epoch, logs=None):
            state = self.model._session._training.read_state().optimizer["state"]
            states.append((state, copy.deepcopy(state)))

    fit(model, X, Y, Plan(4), callbacks=[Read()])
    for state, before in states:
        for key, own in state.items():
            for name, value in own.items():
                assert torch.equal(value, before[key][name])
                assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert not torch.equal(states[0][0][0]["exp_avg"], states[1][0][0]["exp_avg"])
