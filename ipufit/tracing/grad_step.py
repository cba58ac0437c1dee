"""One micro-batch as a function of tensors alone, ready to be recorded, and what it returns."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, TypeVar

import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch
from ipufit.core.logged_values import Entries, LogRule, collecting, merge_rules
from ipufit.core.outputs import drop_ignored_outputs, refuse_hidden_tensors
from ipufit.core.precision import computing_in, with_inputs_in
from ipufit.core.train_config import Precision
from ipufit.errors import CaptureError, ConfigurationError, LossError
from ipufit.losses import Loss, LossFacts, LossTerm, find_loss
from ipufit.partition.own_blocks import OwnBlocks
from ipufit.partition.partition import Partition
from ipufit.tracing.capture import UNREGISTERED, capture
from ipufit.tracing.fingerprint import StepModule
from ipufit.tracing.flat_storage import FlatBlock, storage_id
from ipufit.tracing.ipu_only import record_hints
from ipufit.tracing.recording import autograd_nodes, mark_backward_pass, mark_layers
from ipufit.tracing.validate import find_unregistered, rebound, refuse_unrecordable
from ipufit.tracing.validate import public_name as public_name
from ipufit.utils import tree
from ipufit.utils.names import check_log_name
from ipufit.utils.random_streams import isolated
from ipufit.utils.state import PLAIN, call_with, device_of, eval_mode, train_mode, version_of

T = TypeVar("T")
# Outputs of a module, and the loss, if it is wanted.
Evaluated = Tuple[tree.Tree, Optional[LossTerm]]


class OutputShape:
    """Structure of a module's outputs, by which tensors of a step become outputs again.

    Leaves that are not tensors (None, numbers, strings) are what they were when the step was
    recorded.
    """

    def __init__(self, outputs: object) -> None:
        leaves, self._structure = tree.flatten(outputs)
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: List[Tensor] = [leaves[i] for i in self._places]

    def equals(self, other: OutputShape) -> bool:
        """Tell whether both put tensors into the same places among the same other leaves."""
        return (
            self._structure == other._structure
            and self._places == other._places
            and all(
                type(one) is type(two) and (one is two or (isinstance(one, PLAIN) and one == two))
                for one, two in zip(self._leaves, other._leaves)
            )
        )

    def forget(self) -> None:
        """Let go of the tensors of the recording."""
        self.tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in self.tensors]

    def rebuild(self, tensors: Sequence[Tensor]) -> tree.Tree:
        """Build the module's outputs around these tensors."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        return tree.unflatten(leaves, self._structure)


@dataclasses.dataclass(frozen=True)
class ReportedScalars:
    """The numbers that a micro-batch reports, in one tensor: the loss, its count, what it logged.

    Attributes:
        counted: whether the loss comes with a count.
        rules: of the logged values, by name, in the order of the tensor.
    """

    counted: bool = False
    rules: Mapping[str, LogRule] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(term: LossTerm, entries: Entries) -> Tuple[ReportedScalars, Tensor]:
        """Gather the numbers into a tensor: shape (), or (size,) in float64 for several."""
        loss = term.value.detach()
        values = [loss] if term.count is None else [loss, term.count.detach()]
        rules = {name: entry.rule for name, entry in entries.items()}
        values += [entry.reduce(loss.device) for entry in entries.values()]
        for name, part in term.parts.items():
            rules[check_log_name(name, rules)] = LogRule(counted=True)
            values.append(part.detach())
        reported = ReportedScalars(term.count is not None, rules)
        if not (reported.counted or reported.rules):
            return reported, loss
        return reported, torch.stack([v.reshape(()).to(torch.float64) for v in values])


def unpack_reported(
    kinds: Sequence[ReportedScalars], values: Tensor
) -> Tuple[Tensor, Optional[Tensor], Sequence[Dict[str, float]], Dict[str, LogRule]]:
    """Losses, counts, logged values and how these are reduced, of several micro-batches.

    Args:
        kinds: of the numbers of each.
        values: these numbers one after the other, float64, on the host.
    """
    if not [kind for kind in kinds if kind.counted or kind.rules]:
        return values, None, (), {}
    losses, counts, logged = [], [], []
    rules: Dict[str, LogRule] = {}
    numbers = iter(values.tolist())
    for kind in kinds:
        losses.append(next(numbers))
        counts += [next(numbers)] if kind.counted else []
        logged.append({name: next(numbers) for name in kind.rules})
        rules = merge_rules(rules, kind.rules)
    as_tensor = torch.tensor(counts, dtype=torch.float64) if counts else None
    return torch.tensor(losses, dtype=torch.float64), as_tensor, logged, rules


class ModuleWithLoss(StepModule):
    """The user's module and loss as one module that can be called.

    Attributes:
        forgive: called with the error for a tensor that forward replaces, which is then not raised;
            None: it is raised.
    """

    forgive: Optional[Callable[[CaptureError], None]] = None

    def state_names(self, trained: Sequence[str]) -> List[str]:
        """Names of all parameters and buffers, these parameters first."""
        others = self.tensors()
        for name in trained:
            del others[name]
        return [*trained, *others]

    def refuse_frozen(self, trained: Sequence[str]) -> None:
        """Make sure that there are names of trained parameters.

        Raises:
            LossError: there are none.
        """
        if not trained:
            raise LossError(
                f"{type(self.net).__name__} must have a trainable parameter, but no parameter of "
                "the optimizer requires gradients any more. Unfreeze one with "
                "requires_grad_(True); if it was frozen at compile or replaced since, call compile "
                "again."
            )

    def forward(
        self, batch: Sequence[tree.Tree], tensors: Mapping[str, Tensor], with_loss: bool
    ) -> Evaluated:
        """Outputs and, if asked for, the loss.

        Args:
            batch: (args, kwargs, target, sample_weight).
            tensors: those that were put in place for this call; none where they are the module's
                own, which forward may replace.
            with_loss: whether to compute it.
        """
        args, kwargs, target, sample_weight = batch
        before = {name: storage_id(tensor) for name, tensor in tensors.items()}
        if self.loss is None:
            result = self.net(*args, **kwargs)
        else:
            result = self.loss.call(self.net, args, kwargs)
        outputs, term = split_loss(self.loss, result, target, sample_weight, with_loss)
        for error in rebound(self, tensors, before) if tensors else ():
            if self.forgive is None:
                raise error
            self.forgive(error)
        return drop_ignored_outputs(self.net, outputs), term


def split_loss(
    loss: Optional[Loss],
    result: tree.Tree,
    target: tree.Tree,
    sample_weight: object,
    with_loss: bool,
    valid: Optional[Tensor] = None,
) -> Tuple[tree.Tree, Optional[LossTerm]]:
    """Tell the outputs of a module from the loss, and compute that if it is wanted.

    Args:
        loss: normal form; None where there is none.
        result: what the module has returned.
        target, sample_weight: of the batch.
        with_loss: whether the loss is wanted.
        valid: shape (batch,), 1 for samples that count and 0 for padding; None: all count.

    Returns:
        The outputs, and the loss or None.

    Raises:
        ConfigurationError: forward has returned nothing.
    """
    outputs, term = result, None
    if result is None and not (with_loss and loss is not None and loss.in_module):
        raise ConfigurationError(
            "forward must return the outputs of the module, but it returned None. End it with "
            "return and the outputs."
        )
    if loss is not None and loss.in_module:
        if with_loss or _carries_loss(result):
            outputs, term = loss.split(result)
    elif loss is not None and with_loss:
        if valid is None:
            term = loss(result, target, sample_weight)
        else:
            term = loss.without_padding(result, target, sample_weight, valid)
            assert term is not None, "only a loss of samples gets samples that do not count"
    return outputs, term if with_loss else None


def _carries_loss(result: object) -> bool:
    """Tell whether a module that may return its own loss did so: a 0-dim tensor in its place."""
    loss = find_loss(result)
    return loss is not None and loss[1].dim() == 0 and loss[1].is_floating_point()


@contextlib.contextmanager
def follow_stages(
    partition: Optional[Partition],
    module: nn.Module,
    on_begin: Callable[[int], None] = lambda stage: None,
) -> Iterator[OwnBlocks]:
    """Watch a forward pass of the module, and the loss after it, and check the stages.

    Args:
        partition: of the module; None for one IPU.
        module: the user's module.
        on_begin: called with the number of every stage that begins, 0 at the start included.

    Yields:
        The blocks that the module begins itself.

    Raises:
        PartitionError: a stage runs after a later one; a module that begins one did not run;
            a stage or IPU has nothing to compute; a parameter is used in two; or the module has
            blocks of its own that contradict the partition.
    """
    blocks = OwnBlocks(partition)
    with blocks.recording():
        if partition is None:
            walk = None
            yield blocks
        else:
            # Imported here: few models are divided.
            from ipufit.tracing.stage_trace import Walk

            walk = Walk(partition, module, blocks, on_begin)
            with walk.watching():
                yield blocks
    blocks.check_entered()
    if walk is not None:
        walk.check_end()


def capture_step(
    step: ModuleWithLoss,
    batch: MicroBatch,
    run: Callable[[Dict[str, Tensor], Sequence[Tensor]], None],
    is_training: bool,
    stand_in: Callable[[Tensor], Tensor] = Tensor.detach,
    **options: bool,
) -> None:
    """Call a function of a step's state and a batch's tensors once, without values.

    No value is computed, no buffer changes, no random number is drawn, and what forward sets on its
    modules is undone.

    Args:
        step: module and loss.
        batch: of its tensors only shape and dtype matter.
        run: takes the tensors that stand for parameters and buffers, by name, and for the batch.
        is_training: mode of module and loss meanwhile.
        stand_in: makes of a parameter or buffer the tensor that is recorded.
        options: of :func:`ipufit.tracing.capture.capture`.

    Raises:
        CaptureError: the function needs a value.
    """
    refuse_unrecordable(step.net, batch)
    device = device_of(step.net)
    named = step.tensors()
    leaves = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in batch.leaves]

    def traced(*tensors: Tensor) -> Tuple[Tensor, ...]:
        run(dict(zip(named, tensors)), tensors[len(named) :])
        return ()

    mode = (train_mode if is_training else eval_mode)(step.net, step.loss_module)
    with isolated(device), mode, step.preserve_attributes():
        capture(traced, [*map(stand_in, named.values()), *leaves], **options)


@dataclasses.dataclass(eq=False)
class MicroBatchStep(abc.ABC):
    """The function that runs for a micro-batch: forward, loss and gradients.

    Called with (trained weights, other state, batch leaves, loss scale?) as one flat list, it
    returns ``[reported numbers?, *outputs, *flat gradients]``; the gradients are those of the loss
    times its scale.

    Args:
        step: the user's module with its loss.
        trained: names of the parameters that get a gradient.
        fixed: names of all other parameters and buffers.
        example: a micro-batch; only its structure and shapes matter.
        with_loss: compute the loss.
        precision: in which the module computes.
        scaled: whether a loss scale is the last tensor.
        partition: of the module over IPUs, whose rules are checked; None for one IPU.
        recompute: names of the user's layers whose nodes are marked in a recording.
        want_outputs: return the module's outputs.
        layout: given the names that a gradient reached, the blocks to pack gradients into; None
            when no gradient is wanted. Asked once.
        varies: whether other parameters may be reached later, so that all that are trained have a
            place in the gradients.

    Attributes:
        structure: of the example.
        names: of all state; those that are trained come first.
        outputs: how the output tensors become the module's outputs.
        with_gradient: names of the parameters that have a place in the gradients.
        with_grad: names of those that a gradient came to in the last call.
        indices: where those gradients are sparse, shape (dimensions, values), by name.
        written: names of the state that the first call, or a recording, changes in place.
        blocks: what their gradients are packed into.
        reported: what the numbers are that came with the loss of the last call.
        facts: what the batch shows of the loss; None before the first call with a loss.
    """

    step: ModuleWithLoss
    trained: Sequence[str]
    fixed: Sequence[str]
    example: dataclasses.InitVar[MicroBatch]
    with_loss: bool
    want_outputs: bool = False
    layout: Optional[Callable[[Sequence[str]], Sequence[FlatBlock]]] = None
    precision: Precision = dataclasses.field(default_factory=Precision)
    scaled: bool = False
    partition: Optional[Partition] = None
    recompute: Sequence[str] = ()
    varies: bool = False

    def __post_init__(self, example: MicroBatch) -> None:
        self.structure = example.structure
        self.names = [*self.trained, *self.fixed]
        self._trains = self.layout is not None
        for name, tensor in self.step.tensors().items() if self._trains else ():
            if version_of(tensor) is None:
                raise ConfigurationError(
                    "training needs tensors that torch can change and differentiate with, but "
                    f"{public_name(name)!r} was made under torch.inference_mode(). Make or load "
                    "module and loss outside of that block, or pass copy.deepcopy of them, whose "
                    "tensors are clones."
                )
        # Whether the loss takes gradients itself.
        self._differentiates = self.step.loss is not None and self.step.loss.differentiates
        self.hints: Dict[str, None] = {}
        self.reported = ReportedScalars()
        self.facts: Optional[LossFacts] = None
        self.blocks: Sequence[FlatBlock] = ()
        self.outputs: OutputShape = OutputShape(None)
        self.with_gradient: Tuple[str, ...] = ()
        self.with_grad: frozenset[str] = frozenset()
        self.indices: Dict[str, Tensor] = {}
        self.written: Set[str] = set()

    @property
    def forward_leaves(self) -> int:
        """Number of leaves of a micro-batch that forward gets; the loss gets the others."""
        return sum(child.leaves for child in self.structure.children[:2])

    @abc.abstractmethod
    def state_of(self, tensors: Sequence[Tensor]) -> Dict[str, Tensor]:
        """State by name, at the front of these tensors; trained weights as roots of gradients."""

    @abc.abstractmethod
    def _call(self, batch: Sequence[tree.Tree], state: Mapping[str, Tensor]) -> Evaluated:
        """Call module and loss with this state; return the outputs and the loss, if any."""

    @abc.abstractmethod
    def _differentiate(
        self, objective: Tensor, weights: Sequence[Tensor], keeps: bool
    ) -> Sequence[Optional[Tensor]]:
        """Take the gradients of weights, where ``keeps`` says that those of another loss follow."""

    @abc.abstractmethod
    def _look_for_bypass(self, loss: Tensor) -> None:
        """Say what the loss depends on past the module's parameters: it gets no gradient."""

    def split_results(self, results: Sequence[Tensor]) -> Tuple[Tensor, List[Tensor], List[Tensor]]:
        """Reported numbers, outputs and flat gradients among the results of a step that trains."""
        end = len(results) - len(self.blocks)
        return results[0], list(results[1:end]), list(results[end:])

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        """Run the user's module and loss, and autograd, on these tensors."""
        state = self.state_of(tensors)
        end = len(state)
        scale = tensors[-1] if self.scaled else None
        leaves = tensors[end:-1] if self.scaled else tensors[end:]
        batch = tree.unflatten(leaves, self.structure)
        result: List[Tensor] = []
        gradients: List[Tensor] = []
        with torch.set_grad_enabled(self._trains or self._differentiates):
            marked = mark_layers(self.step.net, self.recompute)
            # The last one may be no tensor where nothing is recorded.
            last = tensors[-1] if isinstance(tensors[-1], Tensor) else tensors[0]
            precision = computing_in(self.precision, last.device)
            with collecting() as entries, precision, marked:
                batch = with_inputs_in(self.precision, batch)
                with record_hints(batch, self.hints), follow_stages(self.partition, self.step.net):
                    outputs, term = self._call(batch, state)
            loss = self.step.loss
            if term is not None and loss is not None:
                if self.facts is None:
                    value = term.value if self._trains else None
                    self.facts = loss.facts(outputs, batch[2], value)
                self.reported, numbers = ReportedScalars.of(term, entries)
                result.append(numbers)
            if self._trains and term is not None:
                gradients = self._gradients(term, state, scale)
        if self.want_outputs:
            # Parameters of the module itself may lie in storages of their own.
            result += self._detached_outputs(outputs, [*tensors, *state.values()])
        return result + gradients

    def _gradients(
        self, term: LossTerm, state: Mapping[str, Tensor], scale: Optional[Tensor]
    ) -> List[Tensor]:
        by_name: Dict[str, Tensor] = {}
        for loss, names in self._moves(term):
            if not loss.requires_grad:
                continue
            self._look_for_bypass(loss)
            objective = loss if scale is None else loss * scale.to(loss.dtype)
            weights = [state[name] for name in names]
            try:
                with mark_backward_pass(objective):
                    gradients = self._differentiate(objective, weights, loss is not term.value)
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise LossError(
                    "forward, loss or step must leave the backward pass to ipufit, but one of them "
                    "calls backward(). Return the loss; its gradients and the update follow."
                ) from error
            by_name.update((n, g) for n, g in zip(names, gradients) if g is not None)
        self.with_grad = frozenset(by_name)
        if not self.with_gradient or not term.value.requires_grad:
            self._lay_out(by_name)
        late = sorted(set(by_name).difference(self.with_gradient))
        if late:
            raise LossError(
                "the same parameters must get a gradient in every micro-batch, but "
                f"{public_name(late[0])!r} got none in the first one and got one later. Multiply "
                "the skipped part by zero instead of skipping it."
            )
        for name in self.with_gradient:
            if name not in by_name:
                by_name[name] = torch.zeros_like(state[name])
        return [block.gather(by_name) for block in self.blocks]

    def _moves(self, term: LossTerm) -> Iterator[Tuple[Tensor, Sequence[str]]]:
        """Yield each loss with the names of the parameters that it moves."""
        if not term.separate:
            yield term.value, self.trained
            return
        assert self.step.loss is not None
        by_public = {public_name(name): name for name in self.trained}
        for index, loss in enumerate(term.separate):
            moved = self.step.loss.moved(list(by_public), index)
            yield loss, [by_public[name] for name in moved]

    def _lay_out(self, gradients: Mapping[str, Tensor]) -> None:
        self.step.refuse_frozen(self.trained)
        if not gradients:
            raise LossError(
                "the loss must depend on at least one trainable parameter, but no gradient "
                f"reached any of the {len(self.trained)} of {type(self.step.net).__name__}. Look "
                "for .detach(), torch.no_grad() or a loss computed from the targets alone."
            )
        for name, gradient in gradients.items():
            if gradient.layout is not torch.strided:
                what = f"gradients must be dense, but that of {public_name(name)!r} is "
                cure = "Build the layer with sparse=False, or use compile(..., run_eagerly=True)."
                raise CaptureError(f"{what}{gradient.layout}. {cure}", what=what, cure=cure)
        assert self.layout is not None
        names = self.trained if self.varies else filter(gradients.__contains__, self.trained)
        self.with_gradient = tuple(names)
        self.blocks = self.layout(self.with_gradient)
        # It belongs to a program, which what is recorded outlives.
        self.layout = None

    def _detached_outputs(self, outputs: object, inputs: Sequence[Tensor]) -> List[Tensor]:
        refuse_hidden_tensors(outputs)
        self.outputs = OutputShape(outputs)
        storages = {storage_id(t) for t in inputs if isinstance(t, Tensor)} - {0}
        # An output that shares memory with a weight, a buffer or the user's batch would change
        # later.
        tensors = [
            t.detach().clone() if storage_id(t) in storages else t.detach()
            for t in self.outputs.tensors
        ]
        self.outputs.forget()
        return tensors


class GradStep(MicroBatchStep):
    """The function that is recorded for micro-batches of one shape."""

    def state_of(self, tensors: Sequence[Tensor]) -> Dict[str, Tensor]:
        """State by name, at the front of these tensors; weights as roots of gradients.

        Without gradients, too: torch chooses by ``requires_grad`` of weights how it multiplies.
        """
        state = dict(zip(self.names, tensors))
        parameters = self.step.named_parameters()
        roots = self.trained if self._trains else [n for n, p in parameters if p.requires_grad]
        for name in roots:
            if not state[name].is_inference():
                state[name] = state[name].detach().requires_grad_()
        return state

    def _call(self, batch: Sequence[tree.Tree], state: Mapping[str, Tensor]) -> Evaluated:
        parameters = dict(self.step.named_parameters())
        for name in self.trained if self._trains else ():
            # Hooks of the user's see the gradient of every micro-batch.
            if getattr(parameters[name], "_post_accumulate_grad_hooks", None):
                raise CaptureError(
                    f"{public_name(name)!r} has a hook that runs after .grad is filled, but a "
                    "program never fills .grad. Use parameter.register_hook."
                )
            for hook in (parameters[name]._backward_hooks or {}).values():
                state[name].register_hook(hook)  # type: ignore[no-untyped-call]
        arguments = (batch, state, self.with_loss)
        return call_with(self.step, state, arguments)  # type: ignore[no-any-return]

    def _differentiate(
        self, objective: Tensor, weights: Sequence[Tensor], keeps: bool
    ) -> Sequence[Optional[Tensor]]:
        return torch.autograd.grad(objective, weights, retain_graph=keeps, allow_unused=True)

    def _look_for_bypass(self, loss: Tensor) -> None:
        # Those are looked for once: it takes longer than the rest.
        overlooked = (
            None if self.with_gradient else find_leaf(loss, find_unregistered(self.step.net))
        )
        if overlooked is not None:
            raise CaptureError(
                f"{overlooked.text}, so they would not be trained. {overlooked.cure} If that is on "
                "purpose, call requires_grad_(False) on them.",
                kind=UNREGISTERED,
            )
        name = find_leaf(loss, {id(p): public_name(n) for n, p in self.step.named_parameters()})
        if name is not None:
            raise CaptureError(
                f"{name!r} was used through a reference outside of the module, such as a list of "
                "parameters, and would get no gradient from this use. Use it through the "
                "module, such as self.layer.weight, in forward or in the loss."
            )


def find_leaf(loss: Tensor, tensors: Mapping[int, T]) -> Optional[T]:
    """Find the first of these tensors, by identity, that a loss is computed from."""
    for node in autograd_nodes([loss.grad_fn]) if tensors else ():
        leaf = id(getattr(node, "variable", None))
        if leaf in tensors:
            return tensors[leaf]
    return None
