"""What a callback writes of a part of the model is as long as that part, whatever else there is."""

import copy
import io

import pytest
import safetensors.torch
import torch
from torch import nn

import ipufit
from ipufit.callbacks import Callback
from tests.fitting import compiled, fit
from tests.nets import data

pytestmark = pytest.mark.both_engines

X, Y = data(20)
WAYS = ["eager", "late", "captured"]


class Wide(nn.Module):
    """A small layer beside a large one."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(12, 2), nn.Linear(2, 5000)
        self.head = nn.Linear(5000, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.large(self.small(x.flatten(1)))))


def written(value):
    """Bytes that torch.save makes of it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return len(stream.getvalue())


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors if torch.is_tensor(t))


def states(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]


def read(model):
    """Bytes beyond those of the values, of all that a callback gets hold of."""
    module, optimizer = model.module, model.optimizer
    small = dict(module.small.state_dict())
    stored = optimizer.state_dict()["state"]
    first = {key: value for key, value in stored[min(stored)].items() if torch.is_tensor(value)}
    return {
        "layer": written(small) - size(small.values()),
        "copied layer": written(copy.deepcopy(small)) - size(small.values()),
        "parameter": written(module.small.weight) - size([module.small.weight]),
        "module": written(dict(module.state_dict())) - size(module.state_dict().values()),
        "state of a parameter": written(first) - size(first.values()),
        "state": written(optimizer.state_dict()) - size(states(optimizer)),
    }


# What torch writes around six tensors: names, types and padding to 64 bytes.
LEAST = 6000


@pytest.mark.grid
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.Adam(p, 0.01), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)],
    ids=["adam", "sgd"],
)
def test_a_part_is_as_long_as_it_is(make, way):
    """In the middle of an epoch, at its end, and after fit."""
    torch.manual_seed(0)
    model, _ = compiled(Wide().double(), make, way=way)
    found = []

    class Reads(Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(read(self.model))

        def on_epoch_end(self, epoch, logs=None):
            found.append(read(self.model))

    fit(model, X, Y, callbacks=[Reads()], epochs=1)
    found.append(read(model))
    for each in found:
        assert all(0 < extra < LEAST for extra in each.values()), each


@pytest.mark.few
@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_memory_that_training_works_on(way):
    """What a callback writes into a state dict counts, as in a loop written by hand."""
    torch.manual_seed(0)
    model, _ = compiled(Wide().double(), lambda p: torch.optim.SGD(p, 0.0), way=way)
    kept = {}

    class Writes(Callback):
        def on_train_begin(self, logs=None):
            kept.update(self.model.module.small.state_dict())

        def on_train_batch_begin(self, batch, logs=None):
            with torch.no_grad():
                kept["bias"].fill_(float(batch))

    fit(model, X, Y, callbacks=[Writes()], epochs=1)
    assert model.module.small.bias.tolist() == [4.0, 4.0]


def test_safetensors_takes_a_state_dict_as_it_is(tmp_path):
    """It asks which of them share a storage, and finds none."""
    torch.manual_seed(0)
    model, _ = compiled(Wide().double(), lambda p: torch.optim.SGD(p, 0.1))

    class Saves(Callback):
        def on_epoch_end(self, epoch, logs=None):
            safetensors.torch.save_file(self.model.module.state_dict(), tmp_path / "file")

    fit(model, X, Y, callbacks=[Saves()], epochs=1)
    loaded = safetensors.torch.load_file(tmp_path / "file")
    for name, value in model.module.state_dict().items():
        assert torch.equal(loaded[name], value)


@pytest.mark.long
def test_other_processes_get_the_part_alone():
    """Sending it moves its memory, which training follows."""
    torch.manual_seed(0)
    model, _ = compiled(Wide().double(), lambda p: torch.optim.SGD(p, 0.1))
    other = copy.deepcopy(model.module)
    sizes = []

    class Sends(Callback):
        def on_train_batch_end(self, batch, logs=None):
            for tensor in self.model.module.small.state_dict().values():
                tensor.share_memory_()
                sizes.append(tensor.untyped_storage().nbytes() - size([tensor]))

    fit(model, X, Y, callbacks=[Sends()], epochs=2)
    assert set(sizes) == {0}
    whole, _ = compiled(other, lambda p: torch.optim.SGD(p, 0.1))
    fit(whole, X, Y, epochs=2)
    for name, value in whole.module.state_dict().items():
        assert torch.equal(model.module.state_dict()[name], value), name


@pytest.mark.long
def test_outputs_and_averages_too():
    """As a callback gets them from several updates at once."""
    torch.manual_seed(0)
    model = ipufit.Model(Wide())
    model.compile("sgd", "cross_entropy", ema=ipufit.EMA())
    extra = []

    class Reads(Callback):
        wants_outputs = True

        def on_train_batch_end(self, batch, logs=None):
            one = self.model.outputs[0]
            extra.append(written(one.clone()) - written(one))

        def on_epoch_end(self, epoch, logs=None):
            self.model.swap_ema_weights()
            small = dict(self.model.module.small.state_dict())
            extra.append(written({k: v.clone() for k, v in small.items()}) - written(small))
            self.model.swap_ema_weights()

    model.fit(X.float(), Y, batch_size=4, device_iterations=5, callbacks=[Reads()], verbose=0)
    assert extra == [0] * len(extra)
    assert len(extra) == 2
