"""A compiled model in a file: what comes back goes on exactly as the saved one would have."""

import io
import json
import os
import shutil
import sys
import types
import zipfile

import pytest
import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch import __version__, _saving, optim
from ipufit.poptorch._precision import keep_float64
from ipufit.poptorch.poptorch_core import Error


class Net(nn.Module):
    """Weights, buffers and random numbers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 2)
        self.loss = nn.MSELoss()

    def forward(self, x, y=None):
        out = self.last(self.drop(self.norm(self.first(x))))
        return out if y is None else (out, self.loss(out, y))


class Plain(nn.Module):
    """Nothing but a linear layer, and a number that is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, *, factor=2.0):
        return {"out": self.linear(x) * factor, "factor": factor}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "new" / "model.poptorch")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file of a training model, to be copied."""
    path = str(tmp_path_factory.mktemp("written") / "model.poptorch")
    trainer().compileAndExport(path, *data())
    return path


def data():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, width, generator=generator) for width in (3, 2)]


def options():
    made = poptorch.Options().deviceIterations(2).randomSeed(3).showCompilationProgressBar(False)
    made.Training.gradientAccumulation(2)
    return made


def trainer(make=None, opts=None):
    torch.manual_seed(1)
    model = Net()
    optimizer = None if make is None else make(model.parameters())
    return poptorch.trainingModel(model, opts or options(), optimizer)


def weights(executor):
    return {name: tensor.clone() for name, tensor in executor.model.state_dict().items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


OPTIMIZERS = {
    "torch-sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch-adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "torch-adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "torch-rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
    "adam": lambda p: optim.Adam(p, lr=0.1, loss_scaling=8.0, max_grad_norm=1.0),
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, use_tf_variant=True, momentum=0.5),
    "lamb": lambda p: optim.LAMB(p, lr=0.1, max_weight_norm=3.0),
}


# The two adaptive ones of torch have the state of ours.
@pytest.mark.few
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in ("torch-adam", "torch-adamw") else ())
        for name in OPTIMIZERS
    ],
)
def test_training_goes_on_bit_for_bit(path, name):
    """Weights, running statistics, optimizer state, settings and random numbers."""
    executor, batch = trainer(OPTIMIZERS[name]), data()
    executor(*batch)
    executor(*batch)
    executor.save(path)
    there = [executor(*batch) for _ in range(2)]
    back = poptorch.load(path)
    assert type(back._optimizer.optimizer) is type(executor._optimizer.optimizer)
    here = [back(*batch) for _ in range(2)]
    for left, right in zip(there, here):
        assert torch.equal(left[0], right[0])
        assert torch.equal(left[1], right[1])
    assert equal(weights(executor), weights(back))


@pytest.mark.long
def test_settings_and_marks_of_an_optimizer_come_back(path):
    executor = trainer(lambda p: optim.Adam([{"params": list(p), "lr": 0.5}], eps=1e-3))
    own = executor._optimizer.optimizer
    own.variable_attrs.markAsConstant("eps")
    own.param_groups[0]["initial_lr"] = 0.25
    executor.compileAndExport(path, *data())
    made = poptorch.load(path)._optimizer.optimizer
    assert made.param_groups[0]["lr"] == 0.5
    assert made.param_groups[0]["initial_lr"] == 0.25
    assert made.defaults == own.defaults
    assert made.variable_attrs.isConstant("eps")
    assert made.variable_attrs._variable_attributes == own.variable_attrs._variable_attributes


@pytest.mark.long
def test_state_of_an_optimizer_can_be_read_after_loading(path):
    executor, batch = trainer(OPTIMIZERS["adam"]), data()
    executor(*batch)
    executor.save(path)
    expected = executor._optimizer.optimizer.state_dict()["ipu_state"]
    state = poptorch.load(path)._optimizer.optimizer.state_dict()["ipu_state"]
    assert equal(expected, state)
    assert state["Step___first.weight"] == 2


@pytest.mark.long
def test_state_that_was_loaded_and_not_yet_sent_is_saved(path):
    source, batch = trainer(OPTIMIZERS["adam"]), data()
    source(*batch)
    state = source._optimizer.optimizer.state_dict()
    executor = trainer(OPTIMIZERS["adam"])
    executor.compile(*batch)
    executor._optimizer.optimizer.load_state_dict(state)
    executor.save(path)
    back = poptorch.load(path)._optimizer.optimizer.state_dict()
    assert equal(back["ipu_state"], state["ipu_state"])


@pytest.mark.long
def test_the_default_optimizer_is_saved_too(path):
    executor = trainer()
    executor.compileAndExport(path, *data())
    made = poptorch.load(path)._optimizer.optimizer
    assert type(made) is optim.SGD
    assert made.param_groups[0]["lr"] == 0.01


def test_an_optimizer_of_the_users_own_class_is_refused(path):
    class Mine(torch.optim.SGD):
        pass

    executor = trainer(lambda p: Mine(p, lr=0.1))
    with pytest.raises(Error) as caught:
        executor.compileAndExport(path, *data())
    assert caught.value.message.startswith(
        "a file holds optimizers of torch.optim and poptorch.optim, got "
    )
    assert "Use one of these as it is, or save with export_model=False." in caught.value.message
    assert not os.path.exists(path)
    executor.save(path, export_model=False)


def test_inference_comes_back_with_structure_and_keywords(path):
    torch.manual_seed(0)
    executor = poptorch.inferenceModel(Plain())
    x = torch.randn(3, 2)
    expected = executor(x, factor=3.0)
    executor.save(path)
    executor.destroy()
    back = poptorch.load(path)
    got = back(x, factor=3.0)
    assert torch.equal(got["out"], expected["out"])
    assert got["factor"] == 3.0
    # The module itself can be called too.
    assert torch.equal(back.model(x, factor=3.0)["out"], expected["out"])
    with pytest.raises(Error, match="Value mismatch for factor"):
        back(x, factor=4.0)


def test_loops_and_branches_come_back(path):
    class Loops(nn.Module):
        def forward(self, x):
            inner = lambda t: poptorch.for_loop(2, lambda u: u + x, [t])[0]  # noqa: E731
            (doubled,) = poptorch.for_loop(3, lambda t: inner(t) * 2, [x])
            return poptorch.cond(
                x.sum() > 0, lambda t: t + 1, [doubled], lambda t: t - 1, [doubled]
            )[0]

    executor = poptorch.inferenceModel(Loops())
    x = torch.tensor([1.0, 2.0])
    expected = executor(x), executor(-x)
    executor.save(path, export_model=False)
    executor.destroy()
    del executor
    back = poptorch.inferenceModel(Loops())
    back.loadExecutable(path)
    assert torch.equal(back(x), expected[0])
    assert torch.equal(back(-x), expected[1])


def test_constants_and_constant_outputs_come_back(path):
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.arange(3.0)

        def forward(self, x):
            return x + self.shift, self.shift

    executor = poptorch.inferenceModel(Constants())
    executor.compileAndExport(path, torch.zeros(3))
    back = poptorch.load(path)
    moved, shift = back(torch.ones(3))
    assert moved.tolist() == [1, 2, 3]
    assert shift.tolist() == [0, 1, 2]


def test_a_function_of_the_host_can_not_be_saved(path):
    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.call = [poptorch.CPU(lambda x: x + 1, "plus")]

        def forward(self, x):
            return self.call[0](x)

    executor = poptorch.inferenceModel(Host())
    executor.compile(torch.zeros(2))
    with pytest.raises(Error, match=r"poptorch\.CPU, a Python function, which a file"):
        executor.save(path, export_model=False)


@pytest.mark.long
def test_without_the_model_a_file_is_for_an_executor_of_ones_own(path):
    first, batch = trainer(OPTIMIZERS["sgd"]), data()
    first.compileAndExport(path, *batch, export_model=False)
    with pytest.raises(AssertionError) as caught:
        poptorch.load(path)
    assert str(caught.value) == (
        f"{path} is a valid PopTorch file but was created with 'export_model=False'. Wrap the "
        f"module with poptorch.trainingModel, then call loadExecutable({path!r}) on that."
    )
    second = trainer(OPTIMIZERS["sgd"])
    second.loadExecutable(path)
    assert second.isCompiled()
    assert second.isAttachedToDevice()
    for _ in range(2):
        assert torch.equal(first(*batch)[1], second(*batch)[1])
    assert equal(weights(first), weights(second))


def test_a_program_takes_the_weights_of_the_executor_that_loads_it(path):
    torch.manual_seed(0)
    saved, own = Plain(), Plain()
    poptorch.inferenceModel(saved).compileAndExport(path, torch.zeros(1, 2))
    executor = poptorch.inferenceModel(own)
    executor.loadExecutable(path)
    x = torch.ones(1, 2)
    assert torch.equal(executor(x)["out"], own(x)["out"].detach())


@pytest.mark.long
def test_loading_replaces_the_program_and_keeps_the_training(path):
    executor, batch = trainer(OPTIMIZERS["sgd"]), data()
    executor.compileAndExport(path, *batch, export_model=False)
    executor(*batch)
    before = weights(executor)
    executor.loadExecutable(path)
    assert equal(weights(executor), before)
    assert executor.isAttachedToDevice()


@pytest.mark.long
def test_the_state_of_random_numbers_is_saved_unless_unwanted(path):
    executor, batch = trainer(), data()
    executor(*batch)
    assert executor.rng_state == [5]
    executor.save(path)
    assert poptorch.load(path).rng_state == [5]
    executor.save(path, save_rng_state=False)
    assert poptorch.load(path).rng_state == [3]


def test_a_folder_gets_a_file_inside_and_a_file_is_no_folder(tmp_path):
    executor = poptorch.inferenceModel(Plain())
    executor.compile(torch.zeros(1, 2))
    executor.save(str(tmp_path))
    assert os.listdir(tmp_path) == ["model.poptorch"]
    with pytest.raises(AssertionError, match=r"Destination folder .* is not a directory"):
        executor.save(str(tmp_path / "model.poptorch" / "x"))


def test_saving_needs_a_program(path):
    executor = poptorch.inferenceModel(Plain())
    with pytest.raises(Error, match="Model has not been compiled or has been destroyed"):
        executor.save(path)
    assert not os.path.exists(path)


def test_compiling_offline_leaves_no_trace_in_the_loaded_options(path):
    opts = poptorch.Options().useOfflineIpuTarget(21).modelName("named")
    executor = poptorch.inferenceModel(Plain(), opts)
    executor.compileAndExport(path, torch.zeros(1, 2))
    assert not executor.isAttachedToDevice()
    back = poptorch.load(path)
    assert back.options.connection_type == poptorch.ConnectionType.Always
    assert not back.options.exists("ipu_version")
    assert back.options.model_name == "named"
    assert back.isAttachedToDevice()
    back(torch.zeros(1, 2))


def test_the_environment_does_not_change_what_is_loaded(path, monkeypatch):
    executor = poptorch.inferenceModel(Plain())
    executor.compileAndExport(path, torch.zeros(1, 2))
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 7}')
    monkeypatch.setenv("POPTORCH_CACHE_DIR", os.path.dirname(path))
    options = poptorch.load(path).options
    assert options.device_iterations == 1
    assert "enableEngineCaching" not in options._Popart.options


def test_options_can_be_edited_unless_the_program_depends_on_them(path):
    executor = poptorch.inferenceModel(Plain())
    executor.compileAndExport(path, torch.zeros(2, 2))
    edited = poptorch.load(path, lambda o: o.useIpuId(5).modelName("m"))
    assert (edited.options.ipu_id, edited.options.model_name) == (5, "m")
    edited.destroy()
    with pytest.raises(Error) as caught:
        poptorch.load(path, edit_opts_fn=lambda o: o.deviceIterations(2))
    assert caught.value.message == (
        f"{path} was compiled with other options than these of the model: deviceIterations was 1, "
        "and is 2. Set them alike, or compile the model anew."
    )


def other_options(**kwargs):
    made = options()
    for name, value in kwargs.items():
        getattr(made if hasattr(made, name) else made.Training, name)(value)
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"replicationFactor": 2}, "replicationFactor was 1, and is 2"),
        ({"outputMode": poptorch.OutputMode.All}, "outputMode was "),
        ({"broadcastBuffers": False}, "broadcastBuffers was True, and is False"),
        ({"gradientAccumulation": 1}, "gradientAccumulation was 2, and is 1"),
        (
            {"accumulationAndReplicationReductionType": poptorch.ReductionType.Sum},
            "accumulationAndReplicationReductionType was ",
        ),
    ],
)
def test_a_program_of_other_options_is_refused(path, changes, text):
    trainer().compileAndExport(path, *data(), export_model=False)
    executor = trainer(opts=other_options(**changes))
    with pytest.raises(Error) as caught:
        executor.loadExecutable(path)
    assert text in caught.value.message
    assert not executor.isCompiled()


def test_a_program_of_the_other_kind_is_refused(path):
    trainer().compileAndExport(path, *data())
    with pytest.raises(Error) as caught:
        poptorch.inferenceModel(Net()).loadExecutable(path)
    assert caught.value.message == (
        f"{path} holds a program for training, and this model is for inference. Wrap the module "
        "with poptorch.trainingModel."
    )


def test_a_program_of_other_weights_is_refused(path):
    poptorch.inferenceModel(Plain()).compileAndExport(path, torch.zeros(1, 2))
    other = Plain()
    other.linear = nn.Linear(2, 3, bias=False)
    executor = poptorch.inferenceModel(other)
    with pytest.raises(Error) as caught:
        executor.loadExecutable(path)
    assert caught.value.message == (
        f"{path} was compiled for a model with other parameters and buffers: linear.bias: "
        "float32[2], here none; linear.weight: float32[2, 2], here float32[3, 2]. Build the model "
        "as it was when it was saved."
    )
    assert not executor.isCompiled()


def test_a_program_that_trains_more_than_the_optimizer_is_refused(path):
    trainer().compileAndExport(path, *data(), export_model=False)
    model = Net()
    optimizer = optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.1)
    executor = poptorch.trainingModel(model, options(), optimizer)
    with pytest.raises(Error) as caught:
        executor.loadExecutable(path)
    assert caught.value.message == (
        f"{path} trains last.bias, last.weight, which the optimizer has not, or which has "
        "requires_grad=False. Build the optimizer as it was when the model was saved."
    )


def test_replica_groupings_come_back_and_are_compared(path):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.tensor([[1.0], [2.0]]))

        def forward(self, x):
            return x * self.rows

    def wrapped():
        return poptorch.inferenceModel(Rows(), poptorch.Options().replicationFactor(2))

    executor = wrapped()
    kind, mode = poptorch.CommGroupType.NoGrouping, poptorch.VariableRetrievalMode.OnePerGroup
    executor.rows.replicaGrouping(kind, 1, mode)
    executor.compileAndExport(path, torch.ones(2, 1), export_model=False)
    other = wrapped()
    with pytest.raises(Error, match="was compiled with replicaGrouping of rows"):
        other.loadExecutable(path)
    other.rows.replicaGrouping(kind, 1, mode)
    other.loadExecutable(path)
    assert other(torch.ones(2, 1)).flatten().tolist() == [1, 2]
    executor.save(path)
    module = sys.modules[__name__]
    module.Rows, Rows.__qualname__ = Rows, "Rows"
    executor.save(path)
    assert poptorch.load(path)(torch.ones(2, 1)).flatten().tolist() == [1, 2]
    del module.Rows


def test_a_file_of_another_version_is_refused(path):
    executor = poptorch.inferenceModel(Plain())
    executor._version = "1.2.3"
    executor.compileAndExport(path, torch.zeros(1, 2))
    expected = (
        f"Invalid file {path}: PopTorch version mismatch: it was created with version 1.2.3, and "
        f"this is version {__version__}. Write it anew with compileAndExport() or save() of this "
        "version; files of PopTorch itself can't be read here."
    )
    for reading in (poptorch.load, poptorch.inferenceModel(Plain()).loadExecutable):
        with pytest.raises(Error) as caught:
            reading(path)
        assert caught.value.message == expected


def test_a_foreign_file_is_refused(tmp_path):
    file = tmp_path / "x"
    torch.save({"a": 1}, file)
    for reading in (poptorch.load, poptorch.inferenceModel(Plain()).loadExecutable):
        with pytest.raises(Error, match=f"Invalid file {file}: "):
            reading(str(file))


def rewritten(path, change):
    """The file with other values in its JSON."""
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    metadata = json.loads(parts["metadata.json"].decode())
    change(metadata["values"])
    parts["metadata.json"] = json.dumps(metadata).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, content in parts.items():
            file.writestr(name, content)


def assign(value, key, new):
    assert key in value
    value[key] = new


@pytest.mark.parametrize(
    "change",
    [
        lambda v: assign(v["program"], "graph", 1),
        lambda v: assign(v["program"], "computed", []),
        lambda v: assign(v["program"], "entered", [1]),
        lambda v: assign(v["program"], "bodies", [1]),
        lambda v: v.pop("program"),
        lambda v: v.update(arguments=[1]),
        lambda v: v.update(state=3),
        lambda v: v.update(options={}),
        lambda v: v.update(groupings={"w": [9, 1, 0]}),
        lambda v: v.update(rng_state=["x"]),
        lambda v: v.update(model=[{}]),
        lambda v: assign(v["optimizer"], "class", "os:system"),
        lambda v: assign(v["optimizer"], "groups", []),
        lambda v: assign(v["optimizer"], "settings", {"step": 1}),
        lambda v: assign(v["optimizer"], "state", [{"$tuple": [1, {}]}]),
    ],
)
def test_a_file_that_was_tampered_with_is_invalid(written, tmp_path, change):
    path = shutil.copy(written, tmp_path)
    rewritten(path, change)
    with pytest.raises(Error, match=f"Invalid file {path}: "):
        poptorch.load(path)


def test_a_program_of_a_file_can_not_call_python(path):
    """Numbers of loops' bodies and of host functions are those of one process."""

    class Loop(nn.Module):
        def forward(self, x):
            return poptorch.for_loop(2, lambda t: t + 1, [x])[0]

    executor = poptorch.inferenceModel(Loop())
    executor.compileAndExport(path, torch.zeros(2), export_model=False)

    def other_body(values):
        assign(values["program"], "bodies", [])

    rewritten(path, other_body)
    with pytest.raises(Error, match=f"Invalid file {path}: it holds no sound program"):
        executor.loadExecutable(path)


def test_weights_come_back_where_the_class_is_not_imported(path):
    """The program runs as before; the module holds the weights under their names."""
    module = types.ModuleType("gone_after_saving")
    source = (
        "from torch import nn\n"
        "class Gone(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(2, 2)\n"
        "    def forward(self, x, shift=None, scale=2.0):\n"
        "        return self.linear(x) * scale\n"
    )
    exec(source, vars(module))
    sys.modules[module.__name__] = module
    model, x = module.Gone(), torch.randn(1, 2)
    executor = poptorch.inferenceModel(model)
    executor.compileAndExport(path, x)
    del sys.modules[module.__name__]
    back = poptorch.load(path)
    assert torch.equal(back(x), executor(x))
    assert torch.equal(back(x=x, scale=2.0), executor(x))
    assert equal(back.model.state_dict(), model.state_dict())
    with pytest.raises(Error, match=r"Import gone_after_saving before poptorch\.load"):
        back.model(x)
    back.model.linear.bias.data += 1
    back.copyWeightsToDevice()
    assert torch.allclose(back(x), executor(x) + 2)


def cached(folder, opts=None, factor=2):
    class Times(nn.Module):
        def forward(self, x):
            return x * factor

    opts = opts or poptorch.Options()
    executor = poptorch.inferenceModel(Times(), opts.enableExecutableCaching(str(folder)))
    return executor(torch.ones(2)), os.listdir(folder) if folder.exists() else []


def test_a_cache_keeps_each_program_once(tmp_path):
    folder = tmp_path / "cache"
    _, first = cached(folder)
    _, again = cached(folder)
    result, other = cached(folder, factor=3)
    assert len(first) == 1
    assert again == first
    assert len(other) == 2
    assert result.tolist() == [3, 3]


def test_a_program_of_the_cache_is_taken_in_the_place_of_the_recorded_one(tmp_path):
    folder = tmp_path / "cache"
    _, (name,) = cached(folder)
    rewritten(folder / name, lambda v: None)
    with zipfile.ZipFile(folder / name) as file:
        text = file.read("metadata.json").decode()
    assert text.count("aten.mul.Tensor") == 1

    def added(values):
        nodes = json.dumps(values).replace("aten.mul.Tensor", "aten.add.Tensor")
        values.clear()
        values.update(json.loads(nodes))

    rewritten(folder / name, added)
    assert cached(folder)[0].tolist() == [3, 3]


def test_a_damaged_program_in_the_cache_is_recorded_again(tmp_path, caplog):
    folder = tmp_path / "cache"
    _, (name,) = cached(folder)
    (folder / name).write_bytes(b"no zip")
    assert cached(folder)[0].tolist() == [2, 2]
    assert any("The model is compiled again" in r.getMessage() for r in caplog.records)
    with zipfile.ZipFile(folder / name) as file:
        assert len(file.namelist()) == 2


def test_a_model_that_calls_python_is_compiled_without_the_cache(tmp_path):
    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.host = poptorch.CPU(torch.neg, "neg")

        def forward(self, x):
            return self.host(x) + 1

    options = poptorch.Options().enableExecutableCaching(str(tmp_path / "cache"))
    model = poptorch.inferenceModel(Host(), options)
    assert model(torch.ones(2)).tolist() == [0.0, 0.0]
    assert not (tmp_path / "cache").exists()


def test_the_ipu_model_has_no_cache(tmp_path, caplog):
    folder = tmp_path / "cache"
    assert cached(folder, poptorch.Options().useIpuModel(True))[1] == []


def test_several_processes_take_turns_at_the_cache(tmp_path):
    folder = tmp_path / "cache"
    opts = poptorch.Options()
    opts.Distributed.configureProcessId(0, 2)
    _, names = cached(folder, opts)
    assert sorted(name.rpartition(".")[2] for name in names) == ["lock", "poptorch"]


def test_the_cache_folder_of_the_environment_is_used(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(folder))
    executor = poptorch.inferenceModel(Plain())
    executor.compile(torch.zeros(1, 2))
    assert len(os.listdir(folder)) == 1


def test_reading_says_what_a_file_holds(path):
    trainer(OPTIMIZERS["sgd"]).compileAndExport(path, *data())
    saved = _saving.read(path, __version__)
    assert saved.recorded.trace.training
    assert [t.device.type for t in saved.arguments.tensors()] == ["meta", "meta"]
    assert list(saved.state)[:2] == ["first.weight", "first.bias"]
    assert saved.wide is False
    assert isinstance(saved.model, Net)
    assert saved.optimizer.param_groups[0]["params"][0] is saved.model.first.weight


@pytest.mark.long
def test_a_program_that_does_not_fit_leaves_the_one_that_there_is(tmp_path):
    path, x = str(tmp_path / "x"), torch.ones(1, 2)
    poptorch.inferenceModel(nn.Linear(2, 3)).compileAndExport(path, x)
    executor = poptorch.inferenceModel(nn.Linear(2, 2))
    expected = executor(x)
    with pytest.raises(Error, match="was compiled for a model with other parameters"):
        executor.loadExecutable(path)
    assert executor.isAttachedToDevice()
    assert torch.equal(executor(x), expected)


@pytest.mark.long
def test_detaching_and_attaching_again_goes_on_bit_for_bit(path):
    executor, batch = trainer(OPTIMIZERS["sgd"]), data()
    executor(*batch)
    executor.save(path)
    there = [executor(*batch)[1] for _ in range(2)]
    back = poptorch.load(path)
    here = [back(*batch)[1]]
    back.detachFromDevice()
    here.append(back(*batch)[1])
    assert torch.equal(torch.stack(here), torch.stack(there))


def test_anchors_and_checks_of_numbers_come_back(path):
    opts = poptorch.Options()
    opts.anchorTensor("in", "input")
    opts.Precision.enableFloatingPointExceptions(True)
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, 2.0)
    executor = poptorch.inferenceModel(net, opts)
    executor.compileAndExport(path, torch.ones(1, 2))
    back = poptorch.load(path)
    back(torch.tensor([[1.0, 2.0]]))
    assert back.getAnchoredTensor("in").tolist() == [[1, 2]]
    with pytest.raises(Error, match="made an infinity of finite numbers"):
        back(torch.tensor([[1.0, 3e38]]))


def test_double_precision_that_was_kept_is_kept(path):
    """Of comparisons with other engines: no device has it."""
    x = torch.ones(1, 2, dtype=torch.float64) / 3
    with keep_float64():
        executor = poptorch.inferenceModel(nn.Linear(2, 2).double())
        expected = executor(x)
    executor.save(path)
    back = poptorch.load(path)
    assert back(x).dtype == torch.float64
    assert torch.equal(back(x), expected)


def test_tied_weights_stay_tied(path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return poptorch.identity_loss(self.two(self.one(x)).sum(), "none")

    module = sys.modules[__name__]
    module.Tied, Tied.__qualname__ = Tied, "Tied"
    executor = poptorch.trainingModel(Tied(), poptorch.Options().showCompilationProgressBar(False))
    executor.compileAndExport(path, torch.ones(1, 2))
    back = poptorch.load(path)
    del module.Tied
    assert back.model.one.weight is back.model.two.weight
    for _ in range(2):
        assert torch.equal(back(torch.ones(1, 2)), executor(torch.ones(1, 2)))
    assert equal(weights(back), weights(executor))


def test_a_model_can_be_given_to_torch_save():
    """Scripts do, though the result can only be read by unpickling."""
    file = io.BytesIO()
    torch.save(poptorch.inferenceModel(nn.Linear(2, 2)), file)
    assert b"PoplarExecutor" in file.getvalue()
