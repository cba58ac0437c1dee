"""What is otherwise on a GPU: labels, recurrent layers, and kernels that draw lots for an order.

Skipped by name where there is none; ``pytest -m cuda`` runs these and the others like them.
"""

import copy

import pytest
import torch
from torch import nn

import ipufit
from ipufit.callbacks import Callback
from ipufit.errors import DataError
from tests.fitting import assert_close, assert_equal
from tests.nets import CNN, MLP, data

pytestmark = [
    pytest.mark.both_engines,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

X, Y = data(47)
JITS = ["graph", "cudagraph"]


def trained(net, jit, x=X, y=Y, device_iterations=3, precision=None, **options):
    """A model of a copy of the net that was trained on the GPU; "off" runs the net itself."""
    model = ipufit.Model(copy.deepcopy(net).cuda())
    how = {"run_eagerly": True} if jit == "off" else {"jit": jit}
    model.compile("adam", "cross_entropy", precision=precision, **how)
    options = {"epochs": 2, "seed": 5, "verbose": 0, "shuffle": False, **options}
    model.fit(x, y, batch_size=4, device_iterations=device_iterations, **options)
    return model


@pytest.mark.parametrize("jit", JITS)
def test_a_label_that_is_no_class_is_named_and_the_gpu_can_be_used_again(jit):
    """A kernel that meets one would end its use for the whole process."""
    y, ends = Y.clone(), []
    y[40] = 5

    class Ends(Callback):
        def on_train_batch_end(self, batch, logs=None):
            ends.append(batch)

    with pytest.raises(DataError) as caught:
        trained(MLP().double(), jit, y=y, callbacks=[Ends()])
    assert str(caught.value) == (
        "training data, batch 10: loss 'cross_entropy' needs labels from 0 to 4 for a prediction "
        "of 5 classes, got 5 in sample 0. Let the module return 6 classes, or number labels from "
        "0."
    )
    assert ends == [2, 5, 8]
    assert trained(MLP().double(), jit).history.history["loss"]


class Tagger(nn.Module):
    """A recurrent layer over words."""

    def __init__(self, kind, **options):
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.cell = getattr(nn, kind)(6, 8, 2, batch_first=True, **options)
        self.head = nn.Linear(16 if options else 8, 5)

    def forward(self, x):
        return self.head(self.cell(self.embed(x))[0].mean(1))


@pytest.mark.parametrize("jit", ["off", *JITS])
@pytest.mark.parametrize(
    ("kind", "options"), [("LSTM", {}), ("LSTM", {"bidirectional": True}), ("GRU", {}), ("RNN", {})]
)
def test_recurrent_layers_have_the_numbers_of_a_loop(kind, options, jit):
    """Their weights stay the program's, though cuDNN would have them in memory of its own."""
    net = Tagger(kind, **options).double()
    x = torch.randint(20, (47, 7))
    model = trained(net, jit, x)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        for begin in range(0, 47, 4):
            loss = nn.functional.cross_entropy(net(x[begin : begin + 4]), Y[begin : begin + 4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_close(model.module.cpu(), net, 1e-10)
    assert not {"flatten_parameters", "forward"} & vars(model.module.cell).keys()
    assert model.predict(x, verbose=0).shape == (47, 5)


@pytest.mark.parametrize("jit", ["off", *JITS])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_dropout_of_recurrent_layers_is_keyed_as_any_other(kind, jit):
    """That of cuDNN has a stream of its own, which no seed starts anew."""
    net, x = Tagger(kind, dropout=0.5, bidirectional=True), torch.randint(20, (47, 7))
    first, *others = [trained(net, jit, x, device_iterations=n) for n in (1, 3, 3)]
    for other in others:
        assert_close(other.module, first.module, 1e-6)


@pytest.mark.parametrize("jit", ["off", *JITS])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_train_in_mixed_precision(kind, jit):
    net, x = Tagger(kind), torch.randint(20, (47, 7))
    model = trained(net, jit, x, device_iterations=1, precision="bf16-mixed", epochs=3)
    history = model.history.history
    assert history["loss"][-1] < history["loss"][0] < 1.8


@pytest.fixture
def deterministic(monkeypatch):
    """Kernels that give the same bits again, as torch has them."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.usefixtures("deterministic")
def test_with_deterministic_kernels_bits_are_those_of_any_number_of_device_iterations(jit):
    """Convolutions and BatchNorm in float32, where the order of a sum shows."""
    torch.manual_seed(1)
    net, x = CNN(), X.float()
    first, *others = [trained(net, jit, x, device_iterations=n) for n in (1, 3, 12, 3)]
    for other in others:
        assert_equal(other.module, first.module)


@pytest.mark.usefixtures("deterministic")
def test_with_deterministic_kernels_a_run_goes_on_with_the_same_bits(tmp_path):
    torch.manual_seed(1)
    net, x = CNN(), X.float()
    whole = trained(net, "auto", x, epochs=4)
    trained(net, "auto", x, checkpoint=str(tmp_path))
    resumed = ipufit.Checkpoint(str(tmp_path), resume="auto")
    assert_equal(trained(net, "auto", x, epochs=4, checkpoint=resumed).module, whole.module)
