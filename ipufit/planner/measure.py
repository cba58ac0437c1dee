"""Passes through a model without values: its stages counted, its calls weighed one by one."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Dict, Iterator, List, Optional, Sequence, Set

import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch
from ipufit.core.precision import computing_in, with_inputs_in
from ipufit.core.train_config import Precision
from ipufit.errors import CaptureError
from ipufit.losses import Loss
from ipufit.partition.flops import OperatorWork, work_of
from ipufit.partition.partition import AFTER, BLOCK, Partition
from ipufit.partition.recomputation import watch_calls
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.grad_step import ModuleWithLoss, capture_step, follow_stages
from ipufit.tracing.interpreter import Listener, OperatorCall, watch_functions, watch_operators
from ipufit.tracing.recording import autograd_nodes
from ipufit.utils import tree
from ipufit.utils.poptorch_sdk import blocks_watched
from ipufit.utils.state import call_with, watch_modules


@dataclasses.dataclass
class Segment:
    """Operators from one call of a module to the next.

    Attributes:
        name: of the module whose call begins it; of a part of a serialised layer that is placed,
            with its number; "after " before the name of one whose return begins it.
        forward, backward: the work of its operators and of their gradients.
        saved: storages that autograd keeps for the backward pass, parameters and buffers aside.
        reads: storages that its operators read, parameters and buffers aside.
        state: names of the parameters and buffers that they use.
        ends: storages with which a layer ends in it that recomputation starts from.
        resumes: such storages that its operators read, afterwards.
    """

    name: str
    forward: OperatorWork = dataclasses.field(default_factory=OperatorWork)
    backward: OperatorWork = dataclasses.field(default_factory=OperatorWork)
    saved: Set[int] = dataclasses.field(default_factory=set)
    reads: Set[int] = dataclasses.field(default_factory=set)
    state: Set[str] = dataclasses.field(default_factory=set)
    ends: Set[int] = dataclasses.field(default_factory=set)
    resumes: Set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class CallTrace:
    """Calls of modules in one micro-batch: through the module, the loss and back.

    Attributes:
        segments: in the order of execution; the loss is in the last one.
        sizes: bytes of every storage.
        born: segment that made it; -1 of a part of the batch.
        placed: for every segment that a part of a serialised layer begins, the IPU of the part.
    """

    segments: List[Segment]
    sizes: Dict[int, int]
    born: Dict[int, int]
    placed: Dict[int, int] = dataclasses.field(default_factory=dict)

    def calls(self) -> Dict[str, List[int]]:
        """Segments that each name begins, by the name."""
        calls: Dict[str, List[int]] = {}
        for number, segment in enumerate(self.segments):
            calls.setdefault(segment.name, []).append(number)
        return calls


def measure(
    module: nn.Module,
    loss: Optional[Loss],
    batch: MicroBatch,
    trained: Sequence[nn.Parameter],
    precision: Optional[Precision] = None,
    partition: Optional[Partition] = None,
    recompute: Sequence[str] = (),
) -> CallTrace:
    """Follow a micro-batch through the module, the loss and the backward pass, without values.

    No value is computed, no buffer changes and no random number is drawn.

    Args:
        module: the user's, in train mode for the moment.
        loss: its normal form; without one, or without a target, the backward pass begins at the
            module's outputs.
        batch: of its tensors only shape and dtype matter.
        trained: the parameters that get a gradient; with none there is no backward pass.
        precision: in which it computes; None for that of the module.
        partition: whose rules are checked on the way.
        recompute: names of the layers from whose outputs recomputation starts.

    Raises:
        CaptureError: the module needs a value.
        PartitionError: the partition can't work.
    """
    step = ModuleWithLoss(module, loss)
    wanted = {id(p) for p in trained}
    weigher = _Weigher(module, {n for n, p in step.named_parameters() if id(p) in wanted})
    target = batch.unpack()[2]
    with_loss = loss is not None and (bool(loss.in_module) or target is not None)
    precision = precision or Precision()

    def begin_stage(stage: int) -> None:
        # A stage that no call of a module begins has a segment of its own.
        for name, number in () if partition is None else partition.begins:
            if number == stage and name.startswith(AFTER):
                weigher.begin(name)

    def run(state: Dict[str, Tensor], leaves: Sequence[Tensor]) -> None:
        for name, tensor in state.items():
            state[name] = tensor.detach().requires_grad_(name in weigher.trained)
        inputs = tree.unflatten(leaves, batch.structure)
        with weigher.weighing(state, leaves), torch.set_grad_enabled(bool(weigher.trained)):
            with computing_in(precision, leaves[-1].device), weigher.forward():
                inputs = with_inputs_in(precision, inputs)
                ends = watch_calls(module, recompute, lambda name: None, weigher.ended)
                parts = blocks_watched(weigher.on_part)
                with ends, parts, follow_stages(partition, module, begin_stage):
                    outputs, term = call_with(step, state, (inputs, state, with_loss))
            last = tree.tensors(outputs) if term is None else [term.value]
            last = [end for end in last if end.requires_grad]
            weights = [state[name] for name in state if name in weigher.trained]
            if last and weights:
                weigher.claim(last)
                seeds = [torch.ones_like(end) for end in last]
                torch.autograd.grad(last, weights, seeds, allow_unused=True)

    # Time step by time step, where it is seen what torch keeps of each.
    capture_step(step, batch, run, True, _apart, whole_layers=False)
    return weigher.trace


def _apart(tensor: Tensor) -> Tensor:
    """Copy a tensor into memory of its own: storages tell the weights apart.

    While a program runs, weights may lie in one storage.
    """
    if tensor.layout is not torch.strided:
        return tensor.detach()
    tensor_bytes = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() == tensor_bytes:
        return tensor.detach()
    return torch.empty_like(tensor.detach())


class _Weigher(Listener):
    """Tells every operator, forward and backward, to the segment it belongs to.

    Attributes:
        trace: the calls so far.
        trained: names of the parameters, in module and loss, that get a gradient.
    """

    def __init__(self, module: nn.Module, trained: Set[str]) -> None:
        self.trained = trained
        self.trace = CallTrace([Segment("")], {}, {})
        self._modules = {id(part): name for name, part in module.named_modules()}
        self._owners: Dict[int, str] = {}
        self._nodes: Dict[object, int] = {}
        self._alive: List[Tensor] = []
        self._ended: Set[int] = set()
        self._is_forward = True
        self._at = 0

    @contextlib.contextmanager
    def weighing(self, state: Dict[str, Tensor], leaves: Sequence[Tensor]) -> Iterator[None]:
        """See all operators of the block."""
        for name, tensor in state.items():
            self._owners[storage_id(tensor)] = name
        for leaf in leaves:
            self._note(leaf, -1)
        try:
            with watch_operators(self):
                yield
        finally:
            self._nodes.clear()
            self._alive.clear()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The block is the forward pass and the loss; what follows is the backward pass."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        try:
            with watch_modules(self._on_call), hooks, watch_functions(_GraphOwner(self)):
                yield
        finally:
            self._is_forward = False

    def claim(self, results: Sequence[object]) -> None:
        """The graph behind these tensors, as far as nobody has it, is the present segment's."""
        first = [t.grad_fn for t in results if isinstance(t, Tensor) and t.requires_grad]
        for node in autograd_nodes(first, self._nodes):
            self._nodes[node] = self._at
            node.register_prehook(lambda _, at=self._at: self._return_to(at))

    def begin(self, name: str) -> None:
        """Begin a segment of this name."""
        self.trace.segments.append(Segment(name))
        self._at = len(self.trace.segments) - 1

    def on_part(self, block: str, ipu: Optional[int]) -> None:
        """A part of a serialised layer begins a block."""
        if ipu is not None:
            self.begin(block[len(BLOCK) :])
            self.trace.placed[self._at] = ipu

    def after(self, call: OperatorCall, result: object) -> None:
        """Add the operator's work and tensors to its segment."""
        segment = self.trace.segments[self._at]
        work = work_of(call.operator, call.args, call.kwargs, result)
        (segment.forward if self._is_forward else segment.backward).add(work)
        if not self._is_forward:
            return
        for tensor in call.inputs:
            key = storage_id(tensor)
            if key in self._owners:
                segment.state.add(self._owners[key])
            elif key in self.trace.sizes:
                segment.reads.add(key)
                if key in self._ended:
                    segment.resumes.add(key)
        for tensor in tree.tensors(result):
            self._note(tensor, self._at)

    def ended(self, name: str, output: object) -> None:
        """A layer has run from whose output recomputation starts."""
        keys = {storage_id(tensor) for tensor in tree.tensors(output)}
        self._ended |= keys
        self.trace.segments[self._at].ends |= keys

    def _return_to(self, at: int) -> None:
        self._at = at

    def _on_call(self, part: nn.Module, args: object) -> None:
        name = self._modules.get(id(part))
        if name and self._is_forward:
            self.begin(name)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_id(tensor)
        if key and key not in self._owners:
            self._note(tensor, self._at)
            self.trace.segments[self._at].saved.add(key)
        return tensor

    def _note(self, tensor: Tensor, at: int) -> None:
        key = storage_id(tensor)
        if key and key not in self._owners and key not in self.trace.sizes:
            self.trace.sizes[key] = tensor.untyped_storage().nbytes()
            self.trace.born[key] = at
            # As long as it lives, no other storage has its address.
            self._alive.append(tensor.detach())


class _GraphOwner(Listener):
    """Claims autograd's graph behind the results of every function for the present segment."""

    def __init__(self, weigher: _Weigher) -> None:
        self._weigher = weigher

    def after(self, call: OperatorCall, result: object) -> None:
        """Claim the graph behind a function's results."""
        self._weigher.claim(tree.flatten(result)[0])


def stages_of_blocks(
    partition: Optional[Partition],
    module: nn.Module,
    loss: Loss,
    batch: MicroBatch,
    is_training: bool,
) -> int:
    """Stages of the pipeline that the module's own blocks make, as PopTorch counts them.

    A module that goes back to an earlier IPU has more of them than IPUs.

    Args:
        partition: that leaves it to the module; None where that is thought to be on one IPU.
        module: the user's module.
        loss: its normal form.
        batch: of its tensors only shape and dtype matter.
        is_training: the mode of the pass.

    Returns:
        As many as IPUs where it can't be seen: of blocks of the SDK, or if the module needs values.

    Raises:
        UncountedError: the blocks take another number of IPUs.
        PartitionError: the blocks contradict the partition.
    """
    step = ModuleWithLoss(module, loss)
    learned = {name for name, tensor in step.tensors().items() if tensor.requires_grad}
    counted_stages = [1 if partition is None else partition.ipus]

    def run(state: Dict[str, Tensor], leaves: Sequence[Tensor]) -> None:
        inputs = tree.unflatten(leaves, batch.structure)
        if loss.differentiates:
            # Steps of the user's own may compute gradients of parameters.
            state = {name: tensor.requires_grad_(name in learned) for name, tensor in state.items()}
        with torch.set_grad_enabled(loss.differentiates), follow_stages(
            partition, module
        ) as blocks:
            call_with(step, state, (inputs, state, False))
        if blocks.entered():
            counted_stages[0] = blocks.stages()

    # Whatever runs the module says what it can't do.
    with contextlib.suppress(CaptureError):
        capture_step(step, batch, run, is_training)
    return counted_stages[0]
