"""A micro-batch, traced or run by the module itself: what every program is made of."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn

from ipufit.core.batch import MicroBatch
from ipufit.engines.embedded.passes.select_kernels import Lowered
from ipufit.tracing.grad_step import Evaluated, MicroBatchStep, find_leaf
from ipufit.tracing.validate import find_unregistered, rebound_error
from ipufit.utils import tree
from ipufit.utils.console import warn_user
from ipufit.utils.random_streams import isolated


@contextlib.contextmanager
def computing(device: torch.device, is_random: bool) -> Iterator[None]:
    """Compute without gradients of torch's own, and with random numbers of the program's own.

    Args:
        device: whose generators are put back.
        is_random: whether any are drawn. Torch's generator has one user at a time: without need
            the data pipeline is not kept from it.
    """
    with torch.no_grad(), isolated(device) if is_random else contextlib.nullcontext():
        yield


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """One micro-batch, ready to run.

    Attributes:
        run: takes weights, other state, batch leaves and a loss scale if there is one; returns the
            reported numbers, outputs and flat gradients.
        lowered: how it does so.
        micro: what was recorded.
        random: whether it may draw random numbers.
        kept_alive: objects whose identity the recording depends on.
        graph: what ``run`` runs; None where it runs the module itself.
    """

    run: Callable[..., List[Tensor]]
    lowered: Lowered
    micro: MicroBatchStep
    random: bool
    kept_alive: Tuple[object, ...]
    graph: Optional[fx.GraphModule]


class EagerStep(MicroBatchStep):
    """The function that runs for micro-batches of one structure, whatever their shapes.

    It is called as one that is recorded, and returns the same. Forward runs with the module's own
    parameters, gradients come by ``backward``, and so code that looks at either has what it has in
    a loop written by hand: hooks, references from elsewhere, ``.grad``.
    """

    def __post_init__(self, example: MicroBatch) -> None:
        super().__post_init__(example)
        self._parameters: Dict[str, nn.Parameter] = dict(self.step.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        owners: Dict[int, List[_Owner]] = {}
        for part in self.step.modules():
            for key, buffer in part._buffers.items():
                owners.setdefault(id(buffer), []).append((part, key))
        # Of those that a program was built over: not what forward has registered since.
        self._buffers = [
            (name, buffer, owners[id(buffer)])
            for name, buffer in self.step.named_buffers()
            if name in self.names
        ]

    def state_of(self, tensors: Sequence[Tensor]) -> Dict[str, Tensor]:
        """State by name: the module's parameters, and these tensors for the rest."""
        return {**dict(zip(self.names, tensors)), **self._parameters}

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        """Run the user's module and loss, and autograd, on these tensors."""
        state = dict(zip(self.names, tensors))
        self.indices = {}
        moved = []
        versions = {name: parameter._version for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != state[name].data_ptr():
                moved.append((parameter, parameter.data))
                parameter.data = state[name]
        for name, buffer, places in self._buffers:
            if _restore(buffer, places) and state[name] is not buffer:
                _assign(state[name], places)
        try:
            return super().__call__(*tensors)
        finally:
            for name, buffer, places in self._buffers:
                if _restore(state[name], places) and state[name] is not buffer:
                    _assign(buffer, places)
            for name, parameter in self._parameters.items():
                # Its data may be other memory now.
                data, tensor = parameter.data, state[name]
                is_other = data.data_ptr() != tensor.data_ptr() and _copy_alike(data, tensor)
                if is_other:
                    parameter.data = tensor
                if is_other or parameter._version != versions[name]:
                    self.written.add(name)
            for parameter, data in moved:
                parameter.data = data

    def _call(self, batch: Sequence[tree.Tree], state: Mapping[str, Tensor]) -> Evaluated:
        # No tensors: forward may replace the module's own.
        return self.step(batch, {}, self.with_loss)  # type: ignore[no-any-return]

    def _look_for_bypass(self, loss: Tensor) -> None:
        if self.with_gradient:
            return
        # A parameter that forward makes is not the optimizer's.
        for name, parameter in self.step.named_parameters():
            if self._parameters.get(name) is not parameter:
                raise rebound_error(self.step, name, new=name not in self._parameters)
        overlooked = find_leaf(loss, find_unregistered(self.step.net))
        if overlooked is not None:
            warn_user(f"{overlooked.text}: they are not trained. {overlooked.cure}")

    def _differentiate(
        self, objective: Tensor, weights: Sequence[Tensor], keeps: bool
    ) -> Sequence[Optional[Tensor]]:
        before = [(parameter, parameter.grad) for parameter in self._parameters.values()]
        try:
            for parameter, _ in before:
                parameter.grad = None
            objective.backward(retain_graph=keeps)  # type: ignore[no-untyped-call]
            gradients = [weight.grad for weight in weights]
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
        for index, (weight, gradient) in enumerate(zip(weights, gradients)):
            if gradient is not None and gradient.layout is not torch.strided:
                self.indices[self._names[id(weight)]] = gradient.coalesce().indices()
                gradients[index] = gradient.to_dense()
        return gradients


# A module, and the name of a buffer in it.
_Owner = Tuple[nn.Module, str]


def _assign(tensor: Tensor, places: Sequence[_Owner]) -> None:
    for owner, key in places:
        setattr(owner, key, tensor)


def _copy_alike(value: Tensor, tensor: Tensor) -> bool:
    """Copy a value into a tensor, and return True, if it has the form of that."""
    forms = [(t.shape, t.dtype, t.device, t.layout) for t in (value, tensor)]
    if forms[0] != forms[1]:
        return False
    with torch.no_grad():
        tensor.copy_(value)
    return True


def _restore(tensor: Tensor, places: Sequence[_Owner]) -> bool:
    """Have a module's buffer be this tensor again, with the value that forward has put there.

    Returns:
        Whether it is; not where that has another form, and stays.
    """
    owner, key = places[0]
    value = dict(owner._buffers.items()).get(key)
    if value is tensor:
        return True
    if value is None or not _copy_alike(value, tensor):
        return False
    _assign(tensor, places)
    return True


# The micro-batches of an update, each with the traced step that runs it.
Update = Sequence[Tuple[MicroBatch, TracedStep]]

# Starts the random numbers of a micro-batch, given its update, its place in it, and what sets them
# apart from others of the update.
Seeding = Callable[[TracedStep, int, int, str], None]

# By the place of an update in an execution, what makes it in one call, of it and the results so
# far; and what runs a micro-batch of it instead of what is recorded.
UpdateCalls = Dict[int, Callable[..., None]]
MicroBatchCalls = Dict[int, Dict[TracedStep, Callable[..., List[Tensor]]]]
