"""What published integrations and examples read of PopTorch beside its public names.

Lightning's and Graphcore's programs, optimum's pipelines and PopTorch Geometric were looked
through; each test makes their calls, on modules of its own.
"""

import importlib.util
import inspect
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.partition.own_blocks import record_blocks
from ipufit.poptorch._compiled import _OverwriteContextManager
from ipufit.poptorch._impl import isWrapped, rewrapModelIfNecessary, unwrapModelIfNecessary


class Net(nn.Module):
    """Arguments of a transformer: everything may be left out, labels lead to a loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs=None, mask=None, labels=None):
        out = self.linear(inputs) * self.scale
        if labels is None:
            return out
        return out, nn.functional.cross_entropy(out, labels)


def data(rows=4):
    return torch.randn(rows, 3), torch.arange(rows) % 3


def trained(net, rate=0.5):
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    return poptorch.trainingModel(net, poptorch.Options(), optimizer)


def run(*lines):
    """Run lines as a script of ``ipufit run``; returns what it prints."""
    script = textwrap.dedent("\n".join(lines))
    program = f"import sys; sys.argv = ['x']; exec({script!r})"
    offered = "from ipufit.utils.poptorch_sdk import install; install('standin', quiet=True); "
    done = subprocess.run(
        [sys.executable, "-c", offered + program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_executable_is_there_from_compiling_until_it_is_destroyed():
    """Lightning and the CNN examples ask whether there is something to detach or to destroy."""
    inputs, labels = data()
    model = trained(Net())
    assert model._executable is None
    assert model._executable_inputs is None
    model.compile(inputs, None, labels)
    assert model._executable
    model(inputs, None, labels)
    assert model._executable
    model.destroy()
    assert model._executable is None
    assert model._executable_inputs is None


def test_the_batch_size_of_a_compiled_model_is_read_off_its_arguments():
    """A pipeline passes by name, and destroys the program for a batch of another size."""
    model = poptorch.inferenceModel(Net().eval())
    for rows in (4, 2):
        if model._executable_inputs:
            compiled = [a.shape[0] for a in model._executable_inputs.args if torch.is_tensor(a)]
            assert compiled == [4]
            model.destroy()
        assert model(inputs=torch.randn(rows, 3)).shape == (rows, 3)


def test_the_executor_is_where_programs_look_for_it():
    model = poptorch.inferenceModel(Net())
    assert isinstance(model, poptorch._poplar_executor.PoplarExecutor)


def test_a_trained_model_is_plain_until_it_is_wrapped_again():
    """A trainer does this around a generation, which wraps the same module for inference."""
    inputs, labels = data()
    net = Net()
    model = trained(net)
    before = net.linear.weight.detach().clone()
    model(inputs, None, labels)
    unwrapModelIfNecessary(net)
    held = [net, net.linear.weight, net.linear.bias, net.scale]
    assert [type(value) for value in held] == [Net, nn.Parameter, nn.Parameter, torch.Tensor]
    # What the device had learnt came over first.
    learnt = net.linear.weight.detach().clone()
    assert not torch.equal(learnt, before)
    expected = net(inputs).detach()
    generating = poptorch.inferenceModel(net)
    torch.testing.assert_close(generating(inputs), expected)
    generating.destroy()
    rewrapModelIfNecessary(net)
    assert all(isWrapped(value) for value in held)
    model(inputs, None, labels)
    assert not torch.equal(net.linear.weight.detach(), learnt)
    model.destroy()
    assert type(net) is Net


def test_training_while_a_model_is_plain_comes_over_when_it_is_wrapped_again():
    inputs, labels = data()
    net = Net()
    model = trained(net)
    unwrapModelIfNecessary(net)
    before = net.linear.weight.detach().clone()
    model(inputs, None, labels)
    assert torch.equal(net.linear.weight.detach(), before)
    rewrapModelIfNecessary(net)
    assert not torch.equal(net.linear.weight.detach(), before)


def test_a_model_that_is_destroyed_while_it_is_plain_stays_plain():
    inputs, labels = data()
    net = Net()
    model = trained(net)
    model(inputs, None, labels)
    unwrapModelIfNecessary(net)
    model.destroy()
    rewrapModelIfNecessary(net)
    assert not any(isWrapped(value) for value in [net, net.linear.weight, net.scale])
    # Its executor is gone, too.
    gone = trained(net)
    unwrapModelIfNecessary(net)
    del gone
    rewrapModelIfNecessary(net)
    assert not isWrapped(net)


def test_wrapping_and_unwrapping_a_plain_model_does_nothing():
    net = Net()
    unwrapModelIfNecessary(net)
    rewrapModelIfNecessary(net)
    assert type(net) is Net


def test_batches_are_joined_tensor_by_tensor():
    first, second = torch.arange(2), torch.arange(4).view(2, 2)
    joined = poptorch._utils.combine_batch_tensors_gen([[first, second], [first + 2, second + 4]])
    assert inspect.isgenerator(joined)
    one, other = joined
    assert one.tolist() == [0, 1, 2, 3]
    assert other.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


# A process each, which imports torch.
@pytest.mark.long
@pytest.mark.parametrize("first", ["", "import poptorch._poplar_executor"])
def test_a_substitution_is_registered_through_the_loader_of_the_executor_s_module(first):
    """PopTorch Geometric loads the module by hand; classes must stay those that models use."""
    assert run(
        "import importlib, importlib.util, poptorch",
        first,
        "executor = poptorch.PoplarExecutor",
        "spec = importlib.util.find_spec('poptorch._poplar_executor')",
        "module = spec.loader.load_module()",
        "class Substitution:",
        "    def replace(self): print('recording')",
        "    def restore(self): print('recorded')",
        "module._OverwriteContextManager.registerSubsitutionManager(Substitution)",
        "print(module.PoplarExecutor is executor is poptorch.PoplarExecutor)",
        "print(importlib.util.find_spec('poptorch').name)",
        "import torch",
        "poptorch.inferenceModel(torch.nn.Tanh())(torch.ones(1))",
    ) == ["True", "ipufit.poptorch", "recording", "recorded"]


def test_the_module_of_the_executor_may_be_executed_anew():
    spec = importlib.util.find_spec("ipufit.poptorch._poplar_executor")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PoplarExecutor is poptorch.PoplarExecutor
    assert module._OverwriteContextManager is _OverwriteContextManager


class Gathering(nn.Module):
    """Attention of DeBERTa does this with the positions of pairs of tokens."""

    def __init__(self, attributes=None):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.attributes = attributes

    def forward(self, data, index):
        data = data * self.scale
        if not poptorch.isRunningOnIpu():
            return torch.gather(data, -1, index)
        like = torch.zeros_like(index).to(data.dtype).requires_grad_()
        (out,) = poptorch.custom_op(
            [data, index],
            "FastGatherLastDim",
            "poptorch.custom_ops",
            1,
            example_outputs=[like],
            attributes=self.attributes,
        )
        return out


@pytest.mark.parametrize("attributes", [None, {}, {"axis": -1}])
@pytest.mark.parametrize("columns", [2, 6, 9])
def test_the_gather_that_poptorch_brings_along_gathers_on_the_last_dimension(columns, attributes):
    data, index = torch.randn(3, 4, 6), torch.randint(6, (3, 4, columns))
    net = Gathering(attributes).eval()
    torch.testing.assert_close(poptorch.inferenceModel(net)(data, index), net(data, index))


class Training(nn.Module):
    def __init__(self):
        super().__init__()
        self.gather = Gathering()

    def forward(self, data, index):
        return poptorch.identity_loss(self.gather(data, index).square(), "mean")


@pytest.mark.long
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_the_gradient_of_that_gather_is_torch_s(index_dtype):
    data, index = torch.randn(2, 6), torch.tensor([[0, 0, 5], [2, 1, 2]])
    net, other = Training(), Training()
    expected = other(data, index)
    expected.backward()
    model = trained(net)
    torch.testing.assert_close(model(data, index.to(index_dtype)), expected.detach())
    torch.testing.assert_close(
        net.gather.scale.detach(), other.gather.scale.detach() - 0.5 * other.gather.scale.grad
    )


def test_that_gather_refuses_an_index_of_another_shape_and_another_version():
    model = poptorch.inferenceModel(Gathering())
    with pytest.raises(poptorch.Error) as caught:
        model(torch.randn(9, 11, 6), torch.zeros(9, 1, 6, dtype=torch.int64))
    assert caught.value.message == (
        "FastGatherLastDim: the index tensor must have the same dimensions as the input, except "
        "for the last one, got (9, 1, 6) for (9, 11, 6). Expand one of them."
    )

    class Newer(nn.Module):
        def forward(self, x):
            return poptorch.custom_op([x, x], "FastGatherLastDim", "poptorch.custom_ops", 2, [x])

    with pytest.raises(poptorch.Error, match="version 2, is code compiled for an IPU"):
        poptorch.inferenceModel(Newer())(torch.ones(2))


def test_that_gather_trains_on_the_embedded_engine():
    class Sorting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 4, dtype=torch.float64)

        def forward(self, x):
            out = self.linear(x)
            like = torch.zeros_like(out)
            index = out.argsort(1)
            name = ("FastGatherLastDim", "poptorch.custom_ops", 1)
            return poptorch.custom_op([out, index], *name, [like])[0]

    net = Sorting()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    weight, bias = (p.detach().clone().requires_grad_() for p in net.parameters())
    loss = nn.functional.mse_loss((x @ weight.T + bias).sort(1).values, y)
    loss.backward()
    model = ipufit.Model(net, engine="embedded")
    model.compile(torch.optim.SGD(net.parameters(), lr=0.1), "mse")
    history = model.fit(x, y, batch_size=6, verbose=0)
    assert history.history["loss"] == [pytest.approx(loss.item())]
    torch.testing.assert_close(net.linear.weight.detach(), (weight - 0.1 * weight.grad).detach())


@pytest.fixture
def alias(imports):
    """``import poptorch`` is the stand-in, and ``torch.ops.poptorch`` its operators."""
    poptorch.install("standin", quiet=True)
    assert __import__("poptorch") is poptorch
    return torch.ops.poptorch


def recorded(function, *inputs):
    """What a model for inference returns that is this function."""

    class Module(nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.ShardedExecution()).TensorLocations.numIOTiles(32)
    return poptorch.inferenceModel(Module(), options)(*inputs)


def test_operators_of_torch_ops_are_those_that_poptorch_registers(alias):
    """The names are a fact of the source of PopTorch 3.4."""
    assert set(alias.__all__) == {
        "begin_ipu_block",
        "begin_multi_conv",
        "call_cpu_op",
        "clear_attribute",
        "ctc_beam_search_decoder",
        "custom_operation",
        "dynamic_slice",
        "dynamic_update",
        "end_cpu_op",
        "end_for_loop",
        "end_if_block",
        "end_ipu_block",
        "end_multi_conv",
        "fps",
        "identity_loss",
        "internal_cast",
        "ipu_print_tensor",
        "nearest",
        "nearest_batch_list",
        "nop",
        "optimizer_group",
        "pop_name_scope",
        "push_name_scope",
        "recomputation_checkpoint",
        "set_attribute",
        "set_available_memory",
        "set_matmul_serialization",
        "set_overlap_for_input",
        "set_overlap_for_output",
        "start_else_block",
        "start_for_loop",
        "start_if_block",
    }
    assert all(callable(getattr(alias, name)) for name in alias.__all__)


def test_hooks_of_a_model_push_and_pop_names_of_its_modules(alias):
    """The CNN examples register these on every module."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    for name, module in net.named_modules():
        if name:
            module.register_forward_pre_hook(lambda m, i, n=name: alias.push_name_scope(f"the{n}"))
            module.register_forward_hook(lambda m, i, o: alias.pop_name_scope())
    options = poptorch.Options().disableModuleNamescope()
    model = poptorch.inferenceModel(net, options)
    model(torch.ones(1, 2))
    assert "the1/tanh:0" in model.getTensorNames()


def test_a_name_that_was_not_pushed_can_not_be_popped(alias):
    with pytest.raises(poptorch.Error, match="pop_name_scope without push_name_scope"):
        recorded(lambda x: alias.pop_name_scope() or x + 1, torch.ones(1))
    assert alias.pop_name_scope() is None  # outside of a recording nothing is named


def test_a_model_computes_part_of_itself_in_float32(alias):
    def gelu(x):
        wide = alias.internal_cast(x, "FLOAT")
        assert wide.dtype is torch.float32
        return alias.internal_cast(nn.functional.gelu(wide), "FLOAT16"), wide

    x = torch.randn(5).half()
    narrow, wide = recorded(gelu, x)
    assert narrow.dtype is torch.float16
    assert torch.equal(wide, x.float())
    assert torch.equal(narrow, nn.functional.gelu(x.float()).half())
    with pytest.raises(poptorch.Error, match="internal_cast expects one of BOOL, FLOAT, FLOAT16"):
        alias.internal_cast(x, "FLOAT64")
    # Outside of a recording PopTorch widens what would become half, and does nothing else.
    assert alias.internal_cast(x, "FLOAT16").dtype is torch.float32
    assert alias.internal_cast(x, "FLOAT") is x


SAME = {
    "nop": (lambda ops, x: ops.nop(x), lambda x: x),
    "recomputation_checkpoint": (lambda ops, x: ops.recomputation_checkpoint(x), lambda x: x),
    "set_available_memory": (lambda ops, x: ops.set_available_memory(x, 0.3), lambda x: x),
    "set_matmul_serialization": (
        lambda ops, x: ops.set_matmul_serialization(x @ x, "reducing_dim", 2, False),
        lambda x: x @ x,
    ),
    "set_overlap_for_output": (
        lambda ops, x: ops.set_overlap_for_output(x + 1, "no_overlap"),
        lambda x: x + 1,
    ),
    "set_overlap_for_input": (
        lambda ops, x: ops.set_overlap_for_input(x, "no_overlap") + 1,
        lambda x: x + 1,
    ),
    "identity_loss": (
        lambda ops, x: torch.stack([ops.identity_loss(x, 0), ops.identity_loss(x, 1)]),
        lambda x: torch.stack([x.sum(), x.mean()]),
    ),
    "dynamic_slice": (
        lambda ops, x: ops.dynamic_slice(x, 0, torch.tensor([2]), 2, 1),
        lambda x: x[2:4],
    ),
    "dynamic_update": (
        lambda ops, x: ops.dynamic_update(x, x[:2], 0, torch.tensor([2]), 2),
        lambda x: torch.cat([x[:2], x[:2]]),
    ),
    "nearest_batch_list": (
        lambda ops, x: ops.nearest_batch_list(x, x.flip(0), [0, 0, 1, 1], [0, 0, 1, 1]),
        lambda x: poptorch.nearest(x, x.flip(0), [0, 0, 1, 1], [0, 0, 1, 1]).int(),
    ),
    "custom_operation": (
        lambda ops, x: ops.custom_operation(
            [x, x.argsort(1)], "FastGatherLastDim", "poptorch.custom_ops", 1, 1, [x], "{}"
        )[0],
        lambda x: x.sort(1).values,
    ),
    "blocks and attributes": (
        lambda ops, x: (
            ops.begin_ipu_block(0, -1, 0),
            ops.set_attribute("a", "b", "c"),
            x + 1,
            ops.clear_attribute("a", "b"),
            ops.end_ipu_block(),
            ops.optimizer_group(0, [x]),
        )[2],
        lambda x: x + 1,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_an_operator_of_torch_ops_is_poptorch_s(alias, name):
    call, expected = SAME[name]
    x = torch.randn(4, 4)
    torch.testing.assert_close(recorded(lambda x: call(alias, x), x), expected(x))


def test_a_block_of_torch_ops_is_on_its_ipu(alias):
    def staged(x):
        alias.begin_ipu_block(0, -1, 0)
        x = x + 1
        alias.begin_ipu_block(1, -1, 1)
        return x * 2

    with record_blocks() as entered:
        assert recorded(staged, torch.ones(2)).tolist() == [4, 4]
    assert entered == [("stage-0", 0), ("stage-1", 1)]


def test_several_convolutions_begin_and_end(alias):
    conv = nn.functional.conv1d

    def both(x, weight):
        alias.begin_multi_conv()
        x = conv(conv(x, weight), weight)
        alias.end_multi_conv([0.1, 0.2], None, 0, None, None, [1])
        return x

    x, weight = torch.randn(1, 1, 3), torch.randn(1, 1, 1)
    torch.testing.assert_close(recorded(both, x, weight), conv(conv(x, weight), weight))
    with pytest.raises(poptorch.Error, match="Unexpected end_multi_conv without begin_multi_conv"):
        recorded(lambda x: alias.end_multi_conv() or x + 1, x)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("start_for_loop", "poptorch.for_loop"),
        ("end_for_loop", "poptorch.for_loop"),
        ("start_if_block", "poptorch.cond"),
        ("start_else_block", "poptorch.cond"),
        ("end_if_block", "poptorch.cond"),
        ("call_cpu_op", "poptorch.CPU"),
        ("end_cpu_op", "poptorch.CPU"),
    ],
)
def test_one_end_of_what_is_recorded_as_a_whole_is_refused(alias, name, instead):
    with pytest.raises(poptorch.Error) as caught:
        recorded(lambda x: getattr(alias, name)([x]), torch.ones(1))
    assert caught.value.message == (
        f"torch.ops.poptorch.{name} is one end of {instead}, whose body is recorded as a whole "
        f"here. Call {instead} instead."
    )


@pytest.mark.parametrize("number", [1, 2, 3])
def test_synthetic_data_is_switched_on_by_a_number_of_popart_s(number):
    """Programs pass ``int(popart.SyntheticDataMode.RandomNormal)``; PopTorch looks at its truth."""
    options = poptorch.Options().enableSyntheticData(number)
    assert options._Popart.options["syntheticDataMode"] == 2
    assert options.enableSyntheticData(0)._Popart.options["syntheticDataMode"] == 0
    with pytest.raises(AssertionError, match="Expected bool or int, got 'RandomNormal'"):
        options.enableSyntheticData("RandomNormal")


@pytest.mark.parametrize("strategy", ["SharedMemory", poptorch.SharingStrategy.SharedMemory, 0])
def test_a_loader_s_strategy_may_be_passed_by_name(strategy):
    made = []

    def noted(dataset, settings, strategy):
        made.append(strategy)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ipufit.poptorch._accessor.DataProcess", noted)
        with pytest.raises(KeyboardInterrupt):
            poptorch.DataLoader(
                poptorch.Options(),
                torch.utils.data.TensorDataset(torch.arange(8.0)),
                batch_size=2,
                mode=poptorch.DataLoaderMode.Async,
                async_options={"sharing_strategy": strategy},
            )
    assert made == [poptorch.SharingStrategy.SharedMemory]
    assert type(made[0]) is poptorch.SharingStrategy


@pytest.mark.parametrize("strategy", ["Shared", 4, None])
def test_a_strategy_that_there_is_not_is_refused_with_the_names(strategy):
    with pytest.raises(AssertionError) as caught:
        poptorch.AsynchronousDataAccessor([torch.ones(1)], sharing_strategy=strategy)
    assert str(caught.value) == (
        "sharing_strategy must be a poptorch.SharingStrategy or the name of one, SharedMemory, "
        f"FileSystem, Fork, ForkServer, got {strategy!r}. Name one of them."
    )


@pytest.mark.parametrize("rest", [{}, {"dim": 0}, {"dim": -1}])
def test_elements_are_repeated_a_fixed_number_of_times(rest):
    x = torch.randn(2, 3)
    assert torch.equal(
        recorded(lambda x: x.repeat_interleave(3, **rest), x), x.repeat_interleave(3, **rest)
    )
    assert torch.equal(
        recorded(lambda x: torch.repeat_interleave(x, 3, **rest), x),
        torch.repeat_interleave(x, 3, **rest),
    )
