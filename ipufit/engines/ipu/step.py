"""The function that PopTorch traces: the user's module and loss over a batch's tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from types import ModuleType
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.logged_values import Entries, collecting
from ipufit.core.outputs import drop_ignored_outputs, refuse_hidden_tensors
from ipufit.core.precision import with_inputs_in
from ipufit.engines.ipu.options import begin_loss, block_of
from ipufit.engines.program import ProgramSpec
from ipufit.errors import CaptureError, ConfigurationError
from ipufit.losses import Loss, LossFacts, LossTerm
from ipufit.partition.recomputation import checkpoint_outputs
from ipufit.tracing.fingerprint import StepModule
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.grad_step import (
    ModuleWithLoss,
    OutputShape,
    ReportedScalars,
    follow_stages,
    split_loss,
)
from ipufit.tracing.validate import public_name, rebound
from ipufit.utils import tree
from ipufit.utils.poptorch_sdk import trace_with
from ipufit.utils.state import ValueSnapshot


@contextlib.contextmanager
def _in_place_of(original: Optional[nn.Module], copied: nn.Module) -> Iterator[None]:
    """In the block the user's module has the parameters and buffers of its copy.

    A loss that is a function may read them through the user's module, as a penalty of weights does.

    Args:
        original: the user's module; None where there is no copy.
        copied: the copy of it.
    """
    changed: List[Tuple[Dict[str, object], Dict[str, object]]] = []
    if original is not None:
        for mine, other in zip(original.modules(), copied.modules()):
            for kind in ("_parameters", "_buffers"):
                there = vars(mine)[kind]
                changed.append((there, dict(there)))
                there.update(vars(other)[kind])
    try:
        yield
    finally:
        for there, before in changed:
            there.update(before)


@dataclasses.dataclass
class Traced:
    """Facts that tracing the step has shown; empty before.

    Attributes:
        outputs: how output tensors become the module's outputs.
        shapes: of these tensors, for one micro-batch.
        reported: what the numbers are.
        counters: how often one micro-batch runs through each BatchNorm that counts.
        changed: names of the floating-point buffers that forward changes.
        attributes: what forward sets on itself, as "Class.attribute".
        loss: what the example shows of the loss.
    """

    outputs: OutputShape = dataclasses.field(default_factory=lambda: OutputShape(None))
    shapes: Tuple[torch.Size, ...] = ()
    reported: ReportedScalars = dataclasses.field(default_factory=ReportedScalars)
    counters: Dict[str, int] = dataclasses.field(default_factory=dict)
    changed: Tuple[str, ...] = ()
    attributes: Sequence[str] = ()
    loss: LossFacts = dataclasses.field(default_factory=LossFacts)


class IpuStep(StepModule):
    """Forward, and the loss that PopTorch follows.

    Called with the tensors of a micro-batch, then its coefficient and the validity of its samples
    where it may be padding; returns ``(numbers?, objective?, *outputs)``.

    Args:
        sdk: PopTorch.
        net: the user's module.
        loss: normal form; None when only outputs are wanted.
        spec: says what comes back.
        example: a micro-batch, whose layout that of the others is.
        padding: as in :class:`ipufit.engines.ipu.size.Size`.

    Attributes:
        net, loss_module: the two modules, whose tensors are those of the program.
        traced: what was seen when it was traced.
        wants_outputs: whether the module's outputs are among the results.
        precision: in which it computes.
        original: the user's module where ``net`` is a copy of it, else nothing.
    """

    def __init__(
        self,
        sdk: ModuleType,
        net: nn.Module,
        loss: Optional[Loss],
        spec: ProgramSpec,
        example: MicroBatch,
        padding: str,
    ) -> None:
        super().__init__(net, loss)
        self.traced = Traced()
        self._sdk = sdk
        self._mode = spec.mode
        self.wants_outputs = spec.want_outputs
        self.precision = spec.config.precision
        self._recompute = spec.config.recompute
        self._structure = example.structure
        # Places of the leaves without dimensions, which a combined batch holds as vectors.
        self._scalars = [i for i, leaf in enumerate(example.leaves) if not leaf.dim()]
        self._padding = padding
        self._partition = spec.partition
        # In a tuple: it is no part of this module.
        self.original: Tuple[nn.Module, ...] = ()

    @property
    def trains(self) -> bool:
        """True when there is an objective among the results."""
        return self._mode is Mode.TRAIN

    @property
    def reports(self) -> bool:
        """True when there are numbers among the results."""
        return self.loss is not None and self._mode is not Mode.PREDICT

    def whole(self) -> ModuleWithLoss:
        """The user's part of it: module and loss."""
        return ModuleWithLoss(self.net, self.loss)

    def forward(self, *tensors: Tensor) -> Tuple[Tensor, ...]:
        """One micro-batch."""
        leaves, share, valid = self._taken_apart(tensors)
        batch = tree.unflatten(leaves, self._structure)
        batch = with_inputs_in(self.precision, batch)
        tensors_by_name = self.tensors()
        versions = {name: buffer._version for name, buffer in self.named_buffers()}
        places = {name: storage_id(tensor) for name, tensor in tensors_by_name.items()}
        attributes = ValueSnapshot(self.owners())
        recompute = self._recompute if self.trains else ()
        checkpointed = checkpoint_outputs(self._sdk, self.net, recompute)
        borrowed = _in_place_of(self.original[0] if self.original else None, self.net)
        with collecting() as entries, trace_with(self._sdk), checkpointed, borrowed:
            outputs, term = self._call(batch, valid)
        for error in rebound(self, tensors_by_name, places):
            raise error
        # Noted here, since a PopTorch may put them back when it has traced.
        self.traced.attributes = attributes.changed()
        for change in attributes.written():
            raise ConfigurationError(
                f"forward must not change {change.title} on an IPU, where a tensor that is not a "
                "buffer is a constant. Register it as a buffer of float32, or use "
                "engine='embedded'."
            )
        self._note_changes(versions)
        result: List[Tensor] = []
        if term is not None:
            assert self.loss is not None, "there is no term without a loss"
            value = term.value if self.trains else None
            self.traced.loss = self.loss.facts(outputs, batch[2], value)
            self.traced.reported, numbers = ReportedScalars.of(term, entries)
            result.append(numbers.reshape(-1))
            if self.trains:
                result.append(self._objective(term, entries, share))
        if self.wants_outputs:
            outputs = drop_ignored_outputs(self.net, outputs)
            refuse_hidden_tensors(outputs)
            output_shape = OutputShape(outputs)
            self.traced.shapes = tuple(tensor.shape for tensor in output_shape.tensors)
            # Without an operator in between: an overlapped output must be marked last of all.
            result += [t.detach() if t.requires_grad else t for t in output_shape.tensors]
            output_shape.forget()
            self.traced.outputs = output_shape
        return tuple(result)

    def _taken_apart(
        self, tensors: Sequence[Tensor]
    ) -> Tuple[List[Tensor], Optional[Tensor], Optional[Tensor]]:
        leaves, share, valid = list(tensors), None, None
        if self._padding == "samples":
            valid = leaves.pop()
        if self._padding != "none":
            share = leaves.pop().reshape(())
        for place in self._scalars:
            leaves[place] = leaves[place].reshape(())
        return leaves, share, valid

    def _call(
        self, batch: Sequence[Any], valid: Optional[Tensor]
    ) -> Tuple[Any, Optional[LossTerm]]:
        args, kwargs, target, sample_weight = batch
        with follow_stages(self._partition, self.net, self._begin) as blocks:
            result = self._called(args, kwargs)
            begin_loss(self._sdk, self._partition, blocks)
            return split_loss(self.loss, result, target, sample_weight, self.reports, valid)

    def _begin(self, stage: int) -> None:
        assert self._partition is not None
        self._sdk.Block.start(block_of(stage), ipu_id=self._partition.ipu_of(stage))

    def _called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            if self.loss is None:
                return self.net(*args, **kwargs)
            return self.loss.call(self.net, args, kwargs)
        except AttributeError as error:
            if "has no attribute 'ipu'" not in str(error):
                raise
            raise CaptureError(
                "torch.utils.checkpoint can't be traced for an IPU: it asks for a torch.ipu, which "
                "there is not. Call what it wraps directly, or use engine='embedded'."
            ) from error

    def _objective(self, term: LossTerm, entries: Entries, share: Optional[Tensor]) -> Tensor:
        """The loss that is followed."""
        value = term.value if share is None else term.value * share.to(term.value.dtype)
        for entry in entries.values():
            # PopTorch wants one loss that all others go into, also those that are only logged. This
            # comparison is false whatever the value, and so adds nothing.
            for logged in entry.values:
                if isinstance(logged, Tensor):
                    value = value + (logged > logged).reshape(()).to(value.dtype)
        marked: Tensor = self._sdk.identity_loss(value, reduction="none")
        return marked.reshape(1)

    def _note_changes(self, before: Mapping[str, int]) -> None:
        """Look at which buffers forward has changed.

        Raises:
            ConfigurationError: one is made of integers, which are constants on a device.
        """
        counters, changed = {}, []
        for name, buffer in self.named_buffers():
            times = buffer._version - before.get(name, buffer._version)
            if not times:
                continue
            if buffer.is_floating_point():
                changed.append(name)
            elif counts_batches(self, name):
                counters[name] = times
            else:
                raise ConfigurationError(
                    f"forward must not change {public_name(name)!r} on an IPU, where a buffer of "
                    f"{str(buffer.dtype).replace('torch.', '')} is a constant. Make it a buffer of "
                    "float32, or use engine='embedded'."
                )
        self.traced.counters, self.traced.changed = counters, tuple(changed)


def counts_batches(module: nn.Module, name: str) -> bool:
    """Tell whether a buffer is a BatchNorm's counter that does not go into its statistics."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    is_norm = isinstance(owner, nn.modules.batchnorm._BatchNorm)
    return attribute == "num_batches_tracked" and is_norm and owner.momentum is not None
