"""Who has a device, when it is taken and let go, and what an executor leaves behind."""

import gc
import threading

import pytest
import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch import ConnectionType, _placement, optim
from ipufit.poptorch.poptorch_core import Error


class Shift(nn.Module):
    """Trained towards its target by its only weight."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x, y=None):
        out = x + self.shift
        return out if y is None else (out, poptorch.identity_loss((out - y).sum(), "none"))


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """No device is taken, and nobody waits for one."""
    monkeypatch.setattr(_placement, "_allocations", {})
    monkeypatch.delenv("POPTORCH_WAIT_FOR_IPU", raising=False)
    monkeypatch.delenv("POPTORCH_IPU_MODEL", raising=False)


def options(device=None):
    made = poptorch.Options().showCompilationProgressBar(False)
    return made if device is None else made.useIpuId(device)


def trainer(model=None, opts=None, rate=1.0):
    model = model or Shift()
    optimizer = optim.SGD(model.parameters(), lr=rate)
    return poptorch.trainingModel(model, opts or options(), optimizer)


def reader(model=None, opts=None):
    return poptorch.inferenceModel(model or Shift(), opts or options())


ONE = torch.ones(1)


@pytest.mark.long
def test_one_device_is_one_models_at_a_time():
    first, second = reader(opts=options(1)), reader(opts=options(1))
    first(ONE)
    with pytest.raises(Error) as caught:
        second.compile(ONE)
    assert caught.value.message == (
        "Failed to acquire device Id 1: another model of this process is attached to it. Call "
        "detachFromDevice() or destroy() on that one, or leave out useIpuId."
    )
    assert not second.isCompiled()
    first.detachFromDevice()
    second.compile(ONE)
    assert second.isAttachedToDevice()
    with pytest.raises(Error, match="Failed to acquire device Id 1"):
        first(ONE)
    assert first.isCompiled()
    second.destroy()
    assert torch.equal(first(ONE), ONE)


def test_a_refused_training_model_can_be_compiled_later():
    """Nothing is bound to the program that was given up."""
    holder, model = reader(opts=options(0)), Shift()
    holder(ONE)
    executor = trainer(model, options(0))
    with pytest.raises(Error, match="Failed to acquire"):
        executor(ONE, ONE)
    holder.detachFromDevice()
    executor(ONE, ONE)
    assert model.shift.item() == -1


def test_without_a_number_there_is_always_a_device(caplog):
    caplog.set_level("DEBUG", logger="poptorch::python")
    models = [reader() for _ in range(3)]
    for model in models:
        model(ONE)
    models[1].detachFromDevice()
    models.append(reader())
    models[-1](ONE)
    lines = [r.getMessage() for r in caplog.records if " device " in r.getMessage()]
    assert lines == [
        "Acquired 1 IPU(s): running on device Id 0.",
        "Attached to device 0",
        "Acquired 1 IPU(s): running on device Id 1.",
        "Attached to device 1",
        "Acquired 1 IPU(s): running on device Id 2.",
        "Attached to device 2",
        "Detached from device 1",
        "Acquired 1 IPU(s): running on device Id 1.",
        "Attached to device 1",
    ]


def test_every_transfer_of_weights_is_in_the_log(caplog):
    caplog.set_level("DEBUG", logger="poptorch::python")
    model = Shift()
    training, inference = trainer(model), reader(model)
    training.compile(ONE, ONE)
    inference.compile(ONE)
    caplog.clear()
    training(ONE, ONE)
    inference(ONE)
    inference(ONE)
    lines = [r.getMessage() for r in caplog.records]
    assert [line for line in lines if "weights" in line.lower()] == [
        "Implicit copyWeightsToHost()",
        "Writing weights from IPU to host",
        "Implicit copyWeightsToDevice()",
        "Writing weights from host to IPU memory",
    ]


def test_the_ipu_model_is_nobodys_own():
    first, second = (reader(opts=options(1).useIpuModel(True)) for _ in range(2))
    first(ONE)
    assert torch.equal(second(ONE), ONE)
    assert first.isAttachedToDevice()
    assert second.isAttachedToDevice()


def test_a_model_that_is_gone_has_no_device():
    first, second = reader(opts=options(1)), reader(opts=options(1))
    first(ONE)
    del first
    second(ONE)


@pytest.mark.long
def test_a_model_that_is_only_reached_in_a_circle_has_no_device():
    first, second = reader(opts=options(1)), reader(opts=options(1))
    first(ONE)
    gc.disable()
    try:
        circle = [first]
        circle.append(circle)
        del first, circle
        second(ONE)
    finally:
        gc.enable()


def test_waiting_for_a_device_if_the_environment_says_so(monkeypatch):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    first, second = reader(opts=options(1)), reader(opts=options(1))
    first(ONE)
    results = []
    thread = threading.Thread(target=lambda: results.append(second(ONE)))
    with _placement._changed:
        # It can't have the device before this thread lets go of the lock.
        thread.start()
    first.detachFromDevice()
    thread.join(60)
    assert [r.tolist() for r in results] == [[1.0]]


def test_a_second_attach_or_detach_is_refused():
    model = reader()
    for method in (model.attachToDevice, model.detachFromDevice):
        with pytest.raises(Error, match="Model has not been compiled or has been destroyed"):
            method()
    model.compile(ONE)
    with pytest.raises(Error, match="Device is already attached"):
        model.attachToDevice()
    model.detachFromDevice()
    assert not model.isAttachedToDevice()
    with pytest.raises(Error, match="Device is not attached"):
        model.detachFromDevice()
    model.attachToDevice()
    assert model.isAttachedToDevice()


@pytest.mark.parametrize("kind", [ConnectionType.Always, ConnectionType.OnDemand])
def test_compiling_attaches(kind):
    model = reader(opts=options().connectionType(kind))
    model.compile(ONE)
    assert model.isAttachedToDevice()
    model.destroy()
    assert not model.isAttachedToDevice()


@pytest.mark.parametrize(
    ("kind", "attached"), [(ConnectionType.Always, True), (ConnectionType.OnDemand, False)]
)
def test_on_demand_a_loaded_program_has_no_device_before_its_call(tmp_path, kind, attached):
    reader().compileAndExport(str(tmp_path / "x"), ONE, export_model=False)
    model = reader(opts=options().connectionType(kind))
    model.loadExecutable(str(tmp_path / "x"))
    assert model.isAttachedToDevice() is attached
    model(ONE)
    assert model.isAttachedToDevice()


def test_offline_a_model_is_compiled_and_nothing_else():
    model = reader(opts=options().useOfflineIpuTarget())
    model.compile(ONE)
    assert model.isCompiled()
    assert not model.isAttachedToDevice()
    with pytest.raises(AssertionError, match="Trying to run a model on an offline device"):
        model(ONE)
    with pytest.raises(AssertionError, match="Trying to attach to an offline device"):
        model.attachToDevice()


def test_offline_takes_no_device_of_a_number():
    with pytest.raises(Error, match=r"ConnectionType\.Never takes no device"):
        reader(opts=options(1).connectionType(ConnectionType.Never)).compile(ONE)


def test_training_and_inference_take_turns_on_one_device():
    model = Shift()
    training, inference = trainer(model, options(3)), reader(model, options(3))
    for turn in (1, 2):
        training(ONE, ONE)
        training.detachFromDevice()
        assert inference(ONE).item() == 1 - turn
        inference.detachFromDevice()


def test_an_executor_that_goes_out_of_scope_leaves_its_training():
    model = Shift()
    trainer(model)(ONE, ONE)
    assert model.shift.item() == -1
    # The module is free to be wrapped again.
    trainer(model)(ONE, ONE)
    assert model.shift.item() == -2


@pytest.mark.long
def test_an_executor_that_goes_out_of_scope_leaves_its_optimizers_state():
    model = Shift()
    optimizer = optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    poptorch.trainingModel(model, options(), optimizer)(ONE, ONE)
    assert optimizer.state_dict()["ipu_state"]["Accl1___shift"].item() == 1
    poptorch.trainingModel(model, options(), optimizer)(ONE, ONE)
    # 1, then 1 + 0.5 * 1
    assert model.shift.item() == -2.5


@pytest.mark.parametrize(
    ("name", "value"),
    [("sys.is_finalizing", lambda: True), ("ipufit.poptorch._executor.sys", None)],
    ids=["finalizing", "emptied"],
)
def test_at_the_end_of_the_interpreter_nothing_is_read_back(monkeypatch, name, value):
    """torch may be half gone by then, and modules emptied; nothing is said of it either."""
    model = Shift()
    executor = trainer(model)
    executor(ONE, ONE)
    said = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    monkeypatch.setattr(name, value)
    del executor
    assert said == []
    assert model.shift.item() == 0


@pytest.mark.long
def test_what_was_never_finished_goes_in_silence():
    """Not an error of its own on top of the first one."""
    model = Shift()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(AssertionError, match="Optimizer should be None for inference"):
        poptorch.PoplarExecutor(model, None, False, "1", optimizer)
    gc.collect()


def test_constants_are_those_of_the_compilation():
    """A later change of an attribute, or of a tensor of the function around, changes nothing."""
    outside, moved = torch.tensor(10.0), torch.tensor([20.0])

    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.attribute = torch.tensor([1.0])

        def forward(self, x):
            return x + self.attribute, x + outside, x + moved.to("ipu"), x + self.attribute[0]

    module = Constants()
    model = reader(module)
    x = torch.zeros(1)
    model.compile(x)
    module.attribute.fill_(5)
    outside.fill_(50)
    moved.fill_(60)
    assert [t.item() for t in model(x)] == [1, 10, 20, 1]


def test_constants_inside_of_loops_are_those_of_the_compilation():
    outside = torch.tensor(10.0)

    class Loop(nn.Module):
        def forward(self, x):
            return poptorch.for_loop(2, lambda t: t + outside, [x])[0]

    model = reader(Loop())
    model.compile(torch.zeros(1))
    outside.fill_(50)
    assert model(torch.zeros(1)).item() == 20


def test_a_constant_that_is_returned_has_its_values():
    held = torch.tensor([1.0, 2.0])

    class Returns(nn.Module):
        def forward(self, x):
            return x * 2, held

    doubled, constant = reader(Returns())(ONE)
    assert doubled.item() == 2
    assert constant.tolist() == [1, 2]
    assert type(constant) is torch.Tensor


def test_the_mode_of_an_inference_model_is_its_own():
    """It is a shallow copy: it shares weights, and not whether it trains."""

    class Mode(nn.Module):
        def forward(self, x):
            return x * (2 if self.training else 3)

    module = Mode()
    model = reader(module)
    model.model.eval()
    assert module.training
    assert model(ONE).item() == 3


@pytest.mark.parametrize(
    ("asked", "said"), [(True, ["Enabled"]), (False, ["Disabled"]), (None, [])]
)
def test_the_log_says_whether_the_options_ask_for_the_ipu_model(caplog, asked, said):
    options = poptorch.Options()
    if asked is not None:
        options.useIpuModel(asked)
    with caplog.at_level("INFO", poptorch.logger.name):
        poptorch.inferenceModel(torch.nn.Identity(), options).compile(torch.ones(1))
    text = "From the user configuration: Ipu model: "
    assert [m[len(text) :] for m in caplog.messages if m.startswith(text)] == said
