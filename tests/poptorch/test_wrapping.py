import copy
import gc
import io
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ipufit import poptorch
from ipufit.poptorch import _wrapping as wrapping
from ipufit.poptorch._recording import check_not_replaced, module_tensors
from ipufit.poptorch._wrapping import ExecutorLink, HostWeights, isWrapped, quietly, unwrap
from ipufit.poptorch.poptorch_core import Error
from tests.told import message


class Device:
    """A training executor in so far as the model knows it: each run adds one to every weight."""

    def __init__(self, model):
        self.model = model
        self.link = ExecutorLink(self)
        self.copies = 0
        self.on_device = None
        wrapping.wrap(model, self.link)

    def train(self):
        if self.on_device is None:
            held = wrapping.host_tensors(self.model)
            self.on_device = {name: tensor.clone() for name, tensor in held.items()}
        for tensor in self.on_device.values():
            tensor += 1
        self.link.dirty = True

    def copyWeightsToHostIfNeeded(self):
        if not self.link.dirty:
            return False
        self.link.pulled()
        self.copies += 1
        for name, tensor in wrapping.host_tensors(self.model).items():
            tensor.copy_(self.on_device[name])
        return True

    def destroy(self):
        self.copyWeightsToHostIfNeeded()
        unwrap(self.model, self)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.tied = self.lin
        self.norm = nn.BatchNorm1d(2)
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("offset", torch.zeros(2))
        with torch.no_grad():
            self.lin.weight.zero_()

    def forward(self, x):
        return self.norm(self.lin(x)) + self.weight + self.offset


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def device(net):
    return Device(net)


def test_the_object_and_its_tensors_stay_the_users_own(net):
    weight, offset = net.weight, net.offset
    device = Device(net)
    assert type(net).__name__ == "PoptorchNet"
    assert isinstance(net, Net)
    assert net.weight is weight
    assert type(weight).__name__ == "PoptorchParameter"
    assert isinstance(weight, nn.Parameter)
    assert net.offset is offset
    assert type(offset).__name__ == "PoptorchBuffer"
    assert net.tied is net.lin
    assert isWrapped(net)
    assert isWrapped(weight)
    device.destroy()
    assert type(net) is Net
    assert type(weight) is nn.Parameter
    assert type(offset) is Tensor
    assert type(net.norm.running_mean) is Tensor
    assert not isWrapped(net)


LOOKS = {
    "print": lambda n: str(n.lin.weight),
    "format": lambda n: f"{n.lin.weight}",
    "index": lambda n: n.lin.weight[0],
    "data": lambda n: n.lin.weight.data,
    "item": lambda n: n.lin.weight.sum().item(),
    "function, first": lambda n: torch.equal(n.lin.weight, torch.ones(2, 2)),
    "function, second": lambda n: torch.equal(torch.ones(2, 2), n.lin.weight),
    "function of a list": lambda n: torch.stack([n.lin.weight]),
    "operator": lambda n: 1 + n.lin.weight,
    "aten": lambda n: torch.ops.aten.add.Tensor(n.lin.weight, 1),
    "method": lambda n: n.lin.weight.clone(),
    "list": lambda n: n.lin.weight.tolist(),
    "iteration": lambda n: list(n.lin.weight),
    "numpy": lambda n: n.lin.weight.detach().numpy(),
    "array": lambda n: np.asarray(n.offset),
    "buffer": lambda n: n.offset + 1,
    "print a buffer": lambda n: repr(n.norm.running_var),
    "copy": lambda n: copy.copy(n.lin.weight),
    "deepcopy": lambda n: copy.deepcopy(n.offset),
    "deepcopy of the module": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda n: torch.save(n, io.BytesIO()),
    "save of a weight": lambda n: torch.save(n.weight, io.BytesIO()),
    "state_dict": lambda n: n.state_dict(),
    "state_dict of a part": lambda n: n.lin.state_dict(),
    "names": lambda n: [name for name, _ in n.named_parameters()],
    "top-level weight": lambda n: n.weight,
    "top-level buffer": lambda n: n.offset,
    "call": lambda n: n(torch.ones(3, 2)),
    "call of a part": lambda n: n.lin(torch.ones(3, 2)),
    "in place": lambda n: n.offset.add_(1),
    "foreach": lambda n: torch._foreach_add([n.offset], 1),
    "clip": lambda n: nn.utils.clip_grad_norm_(n.parameters(), 1.0),
    "load": lambda n: n.load_state_dict(Net().state_dict()),
    "cast": lambda n: n.double(),
    "by hand": lambda n: n.copyWeightsToHostIfNeeded(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_weights_brings_them_up_to_date_once(net, device, look):
    device.train()
    assert device.copies == 0
    LOOKS[look](net)
    assert device.copies == 1
    LOOKS[look](net)
    assert device.copies == 1


def test_what_is_seen_are_the_devices_values(net, device):
    kept = net.lin.weight
    device.train()
    device.train()
    assert torch.equal(kept, torch.full((2, 2), 2.0))
    assert "tensor([[2., 2.]" in str(kept)
    assert torch.equal(net.state_dict()["offset"], torch.full((2,), 2.0))


def test_printing_is_that_of_the_plain_module(net):
    plain = (repr(net.weight), repr(net.offset))
    device = Device(net)
    assert (repr(net.weight), repr(net.offset)) == plain
    assert device.copies == 0


def test_results_are_plain_tensors_and_in_place_ones_are_the_same(net, device):
    assert type(net.offset + 1) is Tensor
    assert type(net.weight.detach()) is Tensor
    offset = net.offset
    with torch.no_grad():
        assert offset.add_(1) is offset


def test_optimizers_change_wrapped_weights_in_place(net):
    plain = copy.deepcopy(net)
    device = Device(net)
    for model in (net, plain):
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            model(torch.arange(6.0).reshape(3, 2)).square().sum().backward()
            opt.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    assert type(net.weight).__name__ == "PoptorchParameter"
    assert device.copies == 0


def test_state_dict_is_plain_and_shares_memory(net, device):
    plain_keys = list(Net().state_dict())
    state = net.state_dict()
    assert list(state) == plain_keys
    assert all(type(value) is Tensor for value in state.values())
    assert state._metadata == Net().state_dict()._metadata
    assert state["weight"].data_ptr() == net.weight.data_ptr()


def test_state_dict_takes_all_arguments(net, device):
    kept = net.state_dict(keep_vars=True)
    assert type(kept["weight"]) is nn.Parameter
    assert type(kept["offset"]) is Tensor
    assert kept["lin.weight"] is kept["tied.weight"]
    target = {"other": 1}
    assert list(net.state_dict(destination=target, prefix="p."))[:2] == ["other", "p.weight"]


def test_a_file_holds_the_plain_module(net, device):
    device.train()
    file = io.BytesIO()
    torch.save(net, file)
    assert b"ipufit" not in file.getvalue()
    assert b"oplar" not in file.getvalue()
    file.seek(0)
    # The file is this test's own.
    old = torch.__version__.startswith("2.0")
    loaded = torch.load(file) if old else torch.load(file, weights_only=False)
    assert type(loaded) is Net
    assert type(loaded.weight) is nn.Parameter
    assert type(loaded.offset) is Tensor
    assert loaded.tied is loaded.lin
    assert torch.equal(loaded.weight, torch.ones(2))
    assert type(net).__name__ == "PoptorchNet"


def test_a_deep_copy_is_plain_and_its_own(net, device):
    copied = copy.deepcopy(net)
    assert type(copied) is Net
    assert type(copied.weight) is nn.Parameter
    assert copied.tied is copied.lin
    device.train()
    assert torch.equal(copied.weight, torch.zeros(2))
    assert device.copies == 0


def test_a_shallow_copy_is_wrapped_and_has_the_same_weights(net, device):
    copied = copy.copy(net)
    assert type(copied) is type(net)
    assert copied.weight is net.weight
    device.train()
    copied.state_dict()
    assert device.copies == 1


def test_a_module_with_a_deepcopy_of_its_own_keeps_it():
    class Counting(nn.Linear):
        def __deepcopy__(self, memo):
            return "mine"

    model = Counting(1, 1)
    Device(model)
    assert copy.deepcopy(model) == "mine"


def test_quietly_looks_without_asking(net, device):
    device.train()
    with quietly():
        assert torch.equal(net.weight, torch.zeros(2))
    assert torch.equal(wrapping.host_tensors(net)["weight"], torch.zeros(2))
    assert device.copies == 0


def test_host_tensors_share_memory_and_tied_ones_come_once(net, device):
    held = wrapping.host_tensors(net)
    assert all(type(tensor) is Tensor for tensor in held.values())
    assert "tied.weight" not in held
    assert held["lin.weight"].data_ptr() == net.lin.weight.data_ptr()
    assert not held["lin.weight"].requires_grad
    assert "norm.num_batches_tracked" in held


class Trained(Net):
    def forward(self, x):
        return poptorch.identity_loss(super().forward(x), "mean")


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("weight", "a tensor 'weight' of shape [2]"), ("more", "no tensor 'more'")],
)
def test_tensors_that_were_replaced_are_copied_neither_way(name, compiled):
    net = Trained()
    model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    model(torch.ones(4, 2))
    setattr(net, name, nn.Parameter(torch.zeros(3)))
    expected = (
        f"the compiled program has {compiled}, and the model one of shape [3]. Parameters and "
        "buffers may only change in place while the model is compiled: call destroy() on it "
        "before you replace or add one."
    )
    for copies in (model.copyWeightsToHost, model.copyWeightsToDevice):
        with pytest.raises(Error) as caught:
            copies()
        assert caught.value.message == expected


def test_wrapping_twice_is_refused(net, device):
    assert message(Device, net, kind=RuntimeError) == (
        "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on the "
        "model to unwrap before wrapping again."
    )
    with pytest.raises(RuntimeError):
        wrapping.check_not_wrapped(net)


def test_the_users_model_destroys_the_executor(net, device):
    device.train()
    net.destroy()
    assert type(net) is Net
    assert torch.equal(net.weight, torch.ones(2))
    again = Device(net)
    again.train()
    assert torch.equal(net.weight, torch.full((2,), 2.0))


def test_an_executor_that_is_gone_does_not_block_the_model(net):
    """Only a weak reference is kept: without this, nothing could ever unwrap the module."""
    Device(net)
    gc.collect()
    wrapping.check_not_wrapped(net)
    assert net.copyWeightsToHostIfNeeded() is False
    again = Device(net)
    again.train()
    assert torch.equal(net.weight, torch.ones(2))
    del again
    gc.collect()
    net.destroy()
    assert type(net) is Net
    assert type(net.weight) is nn.Parameter


def test_wrapping_again_for_the_same_executor_takes_in_new_tensors(net, device):
    net.offset = torch.zeros(2)
    assert type(net.offset) is Tensor
    wrapping.wrap(net, device.link)
    assert type(net.offset).__name__ == "PoptorchBuffer"
    device.destroy()
    assert type(net.offset) is Tensor


def test_a_parameter_in_two_models_asks_both_executors():
    shared = nn.Linear(2, 2)
    left, right = nn.Sequential(shared), nn.Sequential(shared, nn.ReLU())
    one, two = Device(left), Device(right)
    one.train()
    str(shared.weight)
    two.train()
    str(shared.weight)
    assert (one.copies, two.copies) == (1, 1)
    one.destroy()
    two.train()
    assert isWrapped(shared.weight)
    str(shared.weight)
    assert two.copies == 2
    two.destroy()
    assert type(shared.weight) is nn.Parameter


def test_a_buffer_in_two_models_is_refused():
    shared = nn.BatchNorm1d(2)
    one = Device(nn.Sequential(shared))
    with pytest.raises(Error) as caught:
        Device(nn.Sequential(shared, nn.ReLU()))
    assert caught.value.message == (
        "All buffers must be an instance of torch.Tensor, but the buffer '0.running_mean' belongs "
        "to another poptorch.trainingModel. Call destroy() on that one first."
    )
    one.destroy()
    Device(nn.Sequential(shared, nn.ReLU()))


class Odd(Tensor):
    pass


@pytest.mark.parametrize("kind", [Odd, nn.Parameter])
def test_a_buffer_of_another_class_is_refused_and_nothing_is_wrapped(kind):
    model = nn.Linear(2, 2)
    value = torch.zeros(2)
    value = value.as_subclass(Odd) if kind is Odd else nn.Parameter(value)
    model.register_buffer("odd", value)
    with pytest.raises(Error) as caught:
        Device(model)
    assert caught.value.message == (
        f"All buffers must be an instance of torch.Tensor (Got {kind} for 'odd'). Register a "
        "plain tensor, for example with .as_subclass(torch.Tensor)."
    )
    assert type(model) is nn.Linear
    assert type(model.weight) is nn.Parameter


def test_a_parameter_without_a_shape_is_refused():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls lazy modules an unfinished feature
        model = nn.LazyLinear(2)
    with pytest.raises(Error) as caught:
        Device(model)
    assert caught.value.message == (
        "the tensor 'weight' of the model has no shape yet. Call the model once with an example "
        "before you wrap it."
    )


class Memory:
    """A device in so far as the host's weights go there and back."""

    def read(self, into):
        pass

    def write(self, values):
        pass


def test_the_dirty_flag_and_the_version_follow_readings_and_uploads(net):
    memory = Memory()
    host = HostWeights(Device(nn.Module()), net, True)
    (link,) = wrapping.links_of(net)
    assert (host.is_dirty, link.version) == (False, link.first_version)
    host.trained()
    assert host.is_dirty
    host.push(memory)
    assert (host.is_dirty, link.version) == (False, link.first_version)
    host.trained()
    host.pull(memory)
    assert not host.is_dirty
    assert link.version > link.first_version


def test_an_inference_side_uploads_once_per_reading(net, device):
    memory = Memory()
    follower = HostWeights(Device(nn.Module()), net, False)
    assert not follower.is_behind()
    follower.push(memory)
    assert not follower.is_behind()
    for copies in (1, 2):
        device.train()
        device.train()
        assert follower.is_behind()
        assert device.copies == copies
        follower.push(memory)
        assert not follower.is_behind()
    with torch.no_grad():
        net.weight.add_(1)
    assert not follower.is_behind()


def test_an_inference_side_notices_readings_by_others_and_the_last_one(net, device):
    memory = Memory()
    follower = HostWeights(Device(nn.Module()), net, False)
    follower.push(memory)
    device.train()
    str(net.weight)
    assert follower.is_behind()
    follower.push(memory)
    device.train()
    device.destroy()
    assert wrapping.sharing_links(net) == []
    assert follower.is_behind()
    follower.push(memory)
    again = Device(net)
    assert not follower.is_behind()
    again.train()
    assert follower.is_behind()


def test_a_part_or_a_container_of_a_trained_module_follows_too(net, device):
    for model in (net.lin, nn.Sequential(net, nn.ReLU())):
        assert wrapping.sharing_links(model) == [device.link]
        device.train()
        before = device.copies
        wrapping.sharing_links(model)
        assert device.copies == before + 1


def test_changes_in_place_are_no_changes(net):
    before = module_tensors(net)
    with torch.no_grad():
        net.offset += 1
        net.weight.add_(1)
    check_not_replaced(before, module_tensors(net))


def test_a_removed_buffer_is_an_error(net):
    before = module_tensors(net)
    del net.offset
    with pytest.raises(Error) as caught:
        check_not_replaced(before, module_tensors(net))
    assert caught.value.message == (
        "Buffer offset is removed from the model when calling the forward method. Keep it, and "
        "change its values in place."
    )


@pytest.mark.parametrize(("what", "name"), [("Buffer", "offset"), ("Parameter", "lin.weight")])
def test_a_rebound_tensor_is_an_error(net, what, name):
    before = module_tensors(net)
    net.offset = net.offset.clone() if what == "Buffer" else net.offset
    net.lin.weight = nn.Parameter(torch.ones(2, 2)) if what == "Parameter" else net.lin.weight
    with pytest.raises(Error) as caught:
        check_not_replaced(before, module_tensors(net))
    assert caught.value.message == (
        f"{what} {name} is reassigned within the model when calling the forward method. This is "
        f"not supported. Consider using self.{name}.copy_(src) to copy data from a source tensor, "
        "where src is the name of the source tensor."
    )


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_batch_normalisation_may_rebind_its_statistics(kind):
    model = nn.Sequential(kind(2))
    before = module_tensors(model)
    model[0].running_mean = torch.ones(2)
    check_not_replaced(before, module_tensors(model))


@pytest.mark.parametrize(
    ("function", "kind"), [(lambda x: x + 1, "function"), (torch.sin, "builtin_function_or_method")]
)
def test_a_function_is_no_model(function, kind):
    """PopTorch looks at its signature, and fails as it looks for its modules."""
    text = (
        f"{kind!r} object has no attribute 'named_modules': a model must be a torch.nn.Module to "
        f"be compiled, got a {kind}. Call it in the forward of a module, and wrap that."
    )
    model = poptorch.inferenceModel(function)
    with pytest.raises(AttributeError) as failure:
        model(torch.ones(1))
    assert str(failure.value) == text
    assert not model.isCompiled()
    assert message(poptorch.trainingModel, function, kind=AttributeError) == text
