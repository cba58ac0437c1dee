"""What a list of published models consists of, and how one is trained beside its plain loop."""

import copy
import dataclasses
import warnings
from typing import Callable, Optional

import torch
from torch import nn

import ipufit
from ipufit.utils.random_streams import Generators, micro_batch_key, seed_generators, update_key

RECORDED, ITSELF = "recorded", "itself"
SEED = 7


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of a library.

    Attributes:
        name: class or function, as the library has it.
        make: makes the module, of random weights.
        batches: makes the batches, each as a loader yields it.
        loss: name or function; None where the module returns ``(outputs, loss)``.
        way: how ipufit trains it with ``jit="auto"``: recorded, or the module itself.
        why: what can't be recorded; empty where it is.
        dtype: in which it is compared.
        within: by how much weights may differ from the loop's.
    """

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[], list]
    loss: Optional[object] = None
    way: str = RECORDED
    why: str = ""
    dtype: torch.dtype = torch.float64
    within: float = 1e-10


class Own(nn.Module):
    """Makes ``(outputs, loss)`` of what a model returns.

    Args:
        model: of a library.
        call: takes the model and a batch; returns outputs and loss.
    """

    def __init__(self, model, call):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *args, **kwargs):
        return self.call(self.model, *args, **kwargs)


def optimizer_of(net):
    """Plain descent with momentum, which does not enlarge what rounding has left."""
    return torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)


def loss_in_a_loop(net, batch, loss):
    """The loss as a loop by hand has it."""
    if loss is not None:
        return loss(net(batch[0]), batch[1])
    if isinstance(batch, dict):
        result = net(**batch)
    else:
        result = net(*batch) if isinstance(batch, (tuple, list)) else net(batch)
    return result.loss if hasattr(result, "loss") else result[1]


def compare(entry):
    """Train a model in both ways.

    Returns:
        How ipufit trained it, why it could not be recorded, and by how much a weight or buffer
        differs at most, in parts of itself where it is larger than 1.
    """
    torch.manual_seed(0)
    net = entry.make().to(entry.dtype).train()
    twin, batches = copy.deepcopy(net), in_dtype(entry.batches(), entry.dtype)
    model = ipufit.Model(net)
    # Rates of dropout, layers that are left out and masks are what the library has.
    model.compile(optimizer_of(net), entry.loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(batches, epochs=2, seed=SEED, verbose=0)
    said = [str(w.message) for w in caught if "can't be recorded as one program" in str(w.message)]
    by_hand(twin, batches, entry.loss)
    state, other = net.state_dict(), twin.state_dict()
    difference = max(
        ((one - other[name]).double().abs() / other[name].double().abs().clamp(min=1)).max().item()
        for name, one in state.items()
        if isinstance(one, torch.Tensor) and one.numel()
    )
    way = ITSELF if model.history.params["jit"] == "off" else RECORDED
    return (
        way,
        said[0].partition("itself: ")[2].partition(" It trains")[0] if said else "",
        difference,
    )


def by_hand(net, batches, loss):
    """The loop, with the random numbers that ipufit draws in each micro-batch."""
    optimizer = optimizer_of(net)
    function = getattr(nn.functional, loss) if isinstance(loss, str) else loss
    for update, batch in enumerate([*batches, *batches]):
        key = micro_batch_key(update_key(SEED, "train", update), 0)
        seed_generators(key)
        Generators().start(key)
        optimizer.zero_grad()
        loss_in_a_loop(net, batch, function).backward()
        optimizer.step()


def in_dtype(value, dtype):
    """What floating point a batch holds, in another dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: in_dtype(each, dtype) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(in_dtype(each, dtype) for each in value)
    return value.apply(lambda each: in_dtype(each, dtype)) if hasattr(value, "apply") else value
