"""The embedded engine behind the seam: transfers, captures, state."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback
from ipufit.core.batch import CombinedBatch, MicroBatch, Mode
from ipufit.core.plan import Plan
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.embedded.execution import pack, unpack
from ipufit.engines.program import ProgramSpec
from ipufit.errors import DataError
from ipufit.losses import resolve_loss
from ipufit.tracing.capture import capture
from tests.nets import CNN, MLP, data
from tests.tape import HostReads
from tests.told import Executions


def with_engine(net, optimizer="adam", **options):
    """A compiled model and its engine."""
    engine = EmbeddedEngine()
    model = ipufit.Model(net, engine=lambda: engine)
    model.compile(optimizer, "cross_entropy", **options)
    return model, engine


def loader(n=22, batch_size=4):
    """Pictures and classes."""
    return DataLoader(TensorDataset(*data(n)), batch_size=batch_size)


@pytest.mark.long("ipu-standin")
@pytest.mark.grid
@pytest.mark.parametrize("di", [1, 2, 100])
@pytest.mark.parametrize("metrics", [None, ["accuracy"]])
def test_at_most_one_transfer_to_the_host_per_execution(di, metrics):
    """A copy per micro-batch would make the host the bottleneck."""
    counter = Executions()
    model, engine = with_engine(CNN().double(), metrics=metrics)
    work = {"device_iterations": di, "ipus": 2, "callbacks": [counter], "verbose": 0}
    model.fit(loader(24), epochs=2, validation_data=loader(8), **work)
    model.evaluate(loader(24), **work)
    model.predict(loader(24), **work)
    assert counter.count > 0
    assert engine.transfer.count == counter.count


def run_program(net, **changes):
    """A training program, prepared, and a batch of two updates of two micro-batches each."""
    engine = EmbeddedEngine()
    engine.as_device = changes.pop("as_device", False)
    x, y = data(16)
    micro_batches = [MicroBatch.of((x[i : i + 4],), {}, y[i : i + 4], 4) for i in range(0, 16, 4)]
    spec = ProgramSpec(
        module=net,
        loss=resolve_loss("cross_entropy"),
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        plan=Plan.make(micro_batch_size=4, ipus=2, device_iterations=2),
        mode=Mode.TRAIN,
        want_outputs=True,
        seed=1,
    )
    program = engine.build(spec)
    program.prepare(micro_batches[0])
    return program, CombinedBatch(micro_batches), engine


@pytest.mark.long("ipu-standin")
def test_a_program_for_another_device_reads_nothing_between_updates():
    """On an accelerator every value read is a stop of the whole device."""
    program, batch, engine = run_program(CNN().double(), as_device=True)
    with HostReads() as reads:
        program.run(batch)
    assert reads.count == 0  # losses are looked at on the host, after the one transfer
    assert engine.transfer.count == 1
    program.close()


@pytest.mark.long("ipu-standin")
def test_an_exception_in_a_late_checked_execution_takes_it_back():
    """An update before it may have been spoilt by a loss that nobody has looked at yet."""
    net = CNN().double()
    program, batch, _ = run_program(net, as_device=True)
    before = program.read_state()
    first, *others, last = batch.micro_batches
    spoilt = first.clone()
    spoilt.leaves[0].fill_(float("nan"))
    wrong = last.clone()
    wrong.leaves[1].fill_(99)  # no such class
    with pytest.raises(IndexError):
        program.run(CombinedBatch([spoilt, *others, wrong]))
    after = program.read_state()
    assert after.updates == before.updates == 0
    for name, value in before.weights.items():
        assert torch.equal(value, after.weights[name])
    for own, other in zip(before.buffers, after.buffers):
        assert all(torch.equal(own[name], other[name]) for name in own)
    assert not after.optimizer["state"]
    program.run(batch)
    assert program.updates == 2
    program.close()


@pytest.mark.long("ipu-standin")
def test_a_users_error_in_forward_is_not_drowned_in_torchs_log(caplog):
    """New versions of torch log two dozen lines for every error on a fake tensor."""

    class Wrong(MLP):
        def forward(self, x):
            return super().forward(x) @ torch.ones(3, 3, dtype=torch.float64)

    model, _ = with_engine(Wrong().double())
    with pytest.raises(DataError, match="matmul in Wrong needs shapes that fit together"):
        model.fit(loader(), verbose=0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_one_buffer_carries_tensors_of_all_dtypes():
    """Packing is what makes the one copy possible; every bit must survive it."""
    tensors = [
        torch.tensor(True),
        torch.randn(3, 2, dtype=torch.float64),
        torch.arange(5, dtype=torch.int32),
        torch.empty(0, 3),
        torch.randn(2, 3).half().t(),
        torch.tensor([[-1]], dtype=torch.int64),
        torch.randn(3).bfloat16(),
        torch.tensor(2.5),
    ]
    for value, back in zip(tensors, unpack(pack(tensors), tensors)):
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert torch.equal(back, value)


@pytest.mark.long("ipu-standin")
def test_only_the_micro_batch_decides_how_often_a_module_is_recorded():
    """Another plan must not cost another recording; a smaller last micro-batch costs one."""
    model, engine = with_engine(CNN().double())
    model.fit(loader(24), verbose=0)
    assert engine.captures == 1
    model.fit(loader(24), ipus=4, device_iterations=3, gradient_accumulation=2, verbose=0)
    assert engine.captures == 1
    model.fit(loader(22), ipus=2, verbose=0)
    assert engine.captures == 2
    model.evaluate(loader(22), verbose=0)
    assert engine.captures == 4
    model.fit(loader(22), verbose=0, validation_data=loader(22))
    assert engine.captures == 4
    assert model.capture_seconds == engine.seconds > 0


def set_rate(net):
    """A number that torch's own layer reads."""
    net.drop.p = 0.5


def set_list(net):
    """A number in a list."""
    net.scale[0] = 2.0


def set_tensor(net):
    """A tensor that is no buffer."""
    net.shift += 1


def set_mode(net):
    """Part of the module to eval."""
    net.norm.eval()


def set_object(net):
    """Another function."""
    net.activation = torch.tanh


class Settings(CNN):
    """A net with Python values that forward reads."""

    def __init__(self):
        super().__init__()
        self.scale = [1.0]
        self.shift = torch.zeros((), dtype=torch.float64)
        self.activation = torch.relu

    def forward(self, x):
        return self.activation(super().forward(x * self.scale[0] + self.shift))


@pytest.mark.long("ipu-standin")
@pytest.mark.few("set_rate", "set_object")
@pytest.mark.parametrize("change", [set_rate, set_list, set_tensor, set_mode, set_object])
def test_a_value_changed_between_two_fits_is_recorded_anew(change):
    """What is frozen in a recording must not outlive the value it was made from."""
    net = Settings().double()
    model, engine = with_engine(net, torch.optim.SGD(net.parameters(), lr=0.0))
    before = model.fit(loader(24), seed=1, verbose=0).history
    change(net)
    fresh, _ = with_engine(net, torch.optim.SGD(net.parameters(), lr=0.0))
    # Dropout draws by the count of updates.
    fresh._session.updates = model._session.updates
    after = model.fit(loader(24), seed=1, verbose=0).history
    assert engine.captures == 2
    assert after == fresh.fit(loader(24), seed=1, verbose=0).history
    assert after != before


@pytest.mark.long("ipu-standin")
def test_nothing_is_computed_while_recording():
    """Recording must leave buffers, random numbers and gradients as they were."""
    net = CNN().double()
    before = copy.deepcopy(net.state_dict())
    generator = torch.get_rng_state()
    program, _, _ = run_program(net)
    program.close()
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.long("ipu-standin")
def test_python_of_the_users_runs_once():
    """The program runs without the module: that is what makes it fast."""

    class Loud(MLP):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return super().forward(x)

    model, _ = with_engine(Loud().double())
    model.fit(loader(24), epochs=3, verbose=0)
    assert Loud.calls == 1


@pytest.mark.long("ipu-standin")
def test_state_goes_out_and_in():
    """A program that gets an earlier state back repeats the same bits."""
    net = CNN().double()
    program, batch, _ = run_program(net)
    program.run(batch)
    state = program.read_state()
    first = program.run(batch)
    after = program.read_state()
    program.write_state(state)
    again = program.run(batch)
    assert torch.equal(first.losses, again.losses)
    assert all(torch.equal(a, b) for a, b in zip(first.outputs, again.outputs))
    repeated = program.read_state()
    assert (state.updates, after.updates, repeated.updates) == (2, 4, 4)
    assert len(after.buffers) == 2
    for name, value in after.weights.items():
        assert torch.equal(value, repeated.weights[name])
        assert not torch.equal(value, state.weights[name])
    for own, other in zip(after.buffers, repeated.buffers):
        assert all(torch.equal(own[name], other[name]) for name in own)
    assert not torch.equal(
        after.buffers[0]["norm.running_mean"], after.buffers[1]["norm.running_mean"]
    )
    program.close()


@pytest.mark.long("ipu-standin")
def test_closing_twice_is_safe():
    """A callback, an exception and the end of fit may all close."""
    net = MLP().double()
    program, batch, _ = run_program(net)
    program.run(batch)
    program.close()
    weights = copy.deepcopy(net.state_dict())
    program.close()
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())


def test_recording_keeps_what_changes_its_arguments():
    """Cleaning the graph must not remove an operator that matters only by its effect."""

    def function(x, buffer):
        buffer.add_(1)
        buffer.detach().mul_(2)
        view = buffer.view(2, 2)
        view[0].zero_()
        return [x * buffer.sum()]

    buffer = torch.ones(4)
    graph = capture(function, [torch.ones(()), buffer])
    assert torch.equal(buffer, torch.ones(4))
    (result,) = graph(torch.ones(()), buffer)
    assert buffer.tolist() == [0, 0, 4, 4]
    assert result == 8
    targets = {str(node.target) for node in graph.graph.nodes}
    assert "aten.detach.default" not in targets


@pytest.mark.long("ipu-standin")
def test_a_compiled_model_is_a_context_manager():
    """The device is free afterwards; compile starts anew."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    with ipufit.Model(net) as model:
        model.compile("sgd", "cross_entropy")
        model.fit(loader(), verbose=0)
    with pytest.raises(ipufit.errors.NotCompiledError):
        model.fit(loader(), verbose=0)
    model.close()
    model.compile("sgd", "cross_entropy")
    model.fit(loader(), verbose=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_numbers_are_those_of_the_cpu():
    """One library, one result: to rounding in float64, with one transfer an execution."""
    histories, weights = [], []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        net = MLP().double().to(device)
        model, engine = with_engine(net, metrics=["accuracy"])
        counter = Executions()
        work = {"device_iterations": 2, "ipus": 2, "callbacks": [counter], "verbose": 0}
        histories.append(model.fit(loader(), epochs=2, **work).history)
        weights.append({name: value.cpu() for name, value in net.state_dict().items()})
        assert engine.transfer.count == counter.count
        assert all(p.device.type == device for p in net.parameters())
    assert histories[0]["loss"] == pytest.approx(histories[1]["loss"], abs=1e-10)
    assert histories[0]["accuracy"] == histories[1]["accuracy"]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=1e-10)


@pytest.mark.long("ipu-standin")
def test_a_gpu_that_is_lost_hides_no_error(monkeypatch):
    """Everything that is asked of it fails then, what ends the program as well."""
    net = MLP().double()
    model, engine = with_engine(net)
    lost = RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")

    class Stops(Callback):
        def on_train_batch_end(self, batch, logs=None):
            monkeypatch.setattr(engine.training.state, "close", fails)
            raise ValueError("what ended it")

    def fails():
        raise lost

    text = (
        "this process can't use the GPU any more, and the training since the last checkpoint is "
        "lost. Restart Python."
    )
    with pytest.warns(UserWarning, match=re.escape(text)), pytest.raises(ValueError, match="ended"):
        model.fit(loader(), callbacks=[Stops()], verbose=0)
    lost.args = ("something else",)
    with pytest.raises(RuntimeError, match="something else"):
        model.fit(loader(), callbacks=[Stops()], verbose=0)
