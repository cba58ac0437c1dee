"""Manual optimization of a LightningModule: its steps of optimizers as turns of an update.

``training_step`` is run once to see which optimizer steps there are, and once more for each turn,
which takes from it the losses of that turn alone: the weights are those that earlier turns have
left, random numbers the same, so that all else comes to the same values.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from ipufit.core.batch import MicroBatch
from ipufit.errors import LossError
from ipufit.lightning_module.trainer_proxy import refuse_here
from ipufit.losses import Loss, LossTerm, Turn, TurnLoss
from ipufit.losses.named import check_loss_value
from ipufit.tracing.grad_step import ModuleWithLoss, capture_step
from ipufit.utils import tree
from ipufit.utils.state import call_with, replaced

_FIELD = "_ipufit_origin"


@dataclasses.dataclass(frozen=True)
class _Origin:
    """When a tensor was computed.

    Attributes:
        segment: number of optimizer steps before.
        reads: optimizers whose parameters it depends on, each with the number of its steps before.
    """

    segment: int
    reads: frozenset[Tuple[int, int]] = frozenset()


class _Origins(TorchFunctionMode):
    """Writes down of each tensor that is computed when that was, and from which parameters."""

    def __init__(self, run: ManualRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Tuple[object, ...] = (),
        kwargs: Optional[Mapping[str, object]] = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        if tensors:
            inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
            reads = frozenset().union(*(self._run.origin_of(t).reads for t in inputs))
            origin = _Origin(self._run.segment, reads)
            for tensor in tensors:
                setattr(tensor, _FIELD, origin)
        return result


class _OptimizerProxy:
    """Stand-in for one of the optimizers that ``self.optimizers()`` returns."""

    def __init__(self, run: ManualRun, index: int) -> None:
        self._run = run
        self._index = index

    def step(self, closure: Optional[Callable[[], object]] = None, **_: object) -> None:
        """Note a step, after the closure that computes its losses."""
        if closure is not None:
            closure()
        self._run.step(self._index)

    def zero_grad(self, *_: object, **__: object) -> None:
        """Note that earlier losses do not count for the next step."""
        self._run.zero_grad(self._index)

    def toggle_model(self, **_: object) -> contextlib.AbstractContextManager[None]:
        """Losses in the block move the parameters of this optimizer alone."""
        return replaced((self._run, "toggled", self._index))

    def __getattr__(self, name: str) -> object:
        refuse_here(
            f"{name} of an optimizer was used inside training_step, which is recorded once; the "
            "program makes the steps",
            "Call only step and zero_grad; for learning rates, return a scheduler from "
            "configure_optimizers.",
        )


@dataclasses.dataclass(frozen=True)
class _Backward:
    """A loss that ``manual_backward`` was called with.

    Attributes:
        loss: of one element.
        segment: number of optimizer steps before it was computed.
        toggled: optimizer whose parameters alone it moves; None for all.
    """

    loss: Tensor
    segment: int
    toggled: Optional[int]


class ManualRun:
    """One run of ``training_step``, and the calls that it makes for manual optimization.

    Args:
        module: the LightningModule.
        names: of the parameters of each optimizer.
        segments: in which the turn lies that is run, each between two optimizer steps; None to see
            which steps there are.
        total: number of optimizer steps, where it is known.

    Attributes:
        segment: number of optimizer steps so far.
        toggled: optimizer whose parameters alone losses move now; None for all.
        steps: of optimizers, in their order: which, and the losses that move it.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[Sequence[str]],
        segments: Optional[range] = None,
        total: Optional[int] = None,
    ) -> None:
        self.segment = 0
        self.toggled: Optional[int] = None
        self.steps: List[Tuple[int, List[_Backward]]] = []
        self._module = module
        parameters = dict(module.named_parameters())
        self._owners = {id(parameters[n]): i for i, each in enumerate(names) for n in each}
        self._versions = [(name, each, each._version) for name, each in parameters.items()]
        self._counts = [0] * len(names)
        # By segment, the steps that each optimizer has made before.
        self._history = [tuple(self._counts)]
        self._losses: List[_Backward] = []
        self._zeroed = [0] * len(names)
        self._segments = segments
        self._total = total
        # Buffers, where copies stand in their place.
        self._buffers: List[Tuple[Dict[str, Optional[Tensor]], str, Tensor]] = []

    @property
    def attributes(self) -> Dict[str, object]:
        """Methods that stand in for those of the LightningModule, by name."""
        proxies = [_OptimizerProxy(self, index) for index in range(len(self._counts))]
        return {
            "optimizers": lambda *_, **__: proxies if len(proxies) > 1 else proxies[0],
            "manual_backward": self._backward,
            "toggle_optimizer": self._toggle,
            "untoggle_optimizer": lambda *_, **__: self._toggle(None),
            "lr_schedulers": _refuse_schedulers,
            "clip_gradients": _refuse_clipping,
        }

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls that ``training_step`` makes in the block."""
        self._place_buffers()
        try:
            with _Origins(self):
                yield
        finally:
            self._bring_buffers_back()
        for name, parameter, version in self._versions:
            if parameter._version != version:
                raise LossError(
                    "training_step must leave updates to the optimizers, but it changes the "
                    f"parameter {name!r} in place. Do it in a callback, or in a buffer."
                )

    def origin_of(self, tensor: Tensor) -> _Origin:
        """Return when a tensor was computed; of a parameter, that it is read now."""
        owner = self._owners.get(id(tensor))
        if owner is not None:
            return _Origin(self.segment, frozenset({(owner, self._counts[owner])}))
        origin: object = getattr(tensor, _FIELD, _Origin(0))
        assert isinstance(origin, _Origin)
        return origin

    def in_turn(self, log: Callable[..., None]) -> Callable[..., None]:
        """Make ``self.log`` report each value in the turn in which it was computed."""

        def log_in_turn(name: str, value: object, *args: object, **options: object) -> None:
            segments = self._segments
            if segments is None:
                return
            origin = self.origin_of(value) if isinstance(value, Tensor) else _Origin(0)
            if origin.reads and origin.segment == self._total:
                refuse_here(
                    f"{name!r} is computed from the weights after the last step of an optimizer, "
                    "but the program makes this step at the very end",
                    "Compute it before the step.",
                )
            if origin.segment in segments:
                log(name, value, *args, **options)

        return log_in_turn

    def step(self, index: int) -> None:
        """Note a step of an optimizer."""
        losses = [
            each for each in self._losses[self._zeroed[index] :] if each.toggled in (None, index)
        ]
        if not losses:
            refuse_here(
                "an optimizer makes a step without a manual_backward after its zero_grad",
                "Call self.manual_backward(loss) before optimizer.step().",
            )
        if len({each.segment for each in losses}) > 1:
            refuse_here(
                "an optimizer makes a step of losses that were computed before and after another "
                "step, and the program computes both with the same weights",
                "Call its zero_grad before computing the second loss.",
            )
        self.steps.append((index, losses))
        self._counts[index] += 1
        self._history.append(tuple(self._counts))
        self.segment += 1
        self._place_buffers()

    def zero_grad(self, index: int) -> None:
        """Note that losses so far do not count for the next step of an optimizer."""
        self._zeroed[index] = len(self._losses)

    def _toggle(self, optimizer: object) -> None:
        self.toggled = optimizer._index if isinstance(optimizer, _OptimizerProxy) else None

    def _backward(self, loss: object, *_: object, **__: object) -> None:
        check_loss_value(loss, "manual_backward")
        assert isinstance(loss, Tensor)
        origin = self.origin_of(loss)
        if any(self._history[origin.segment][index] != count for index, count in origin.reads):
            refuse_here(
                "a loss depends on the weights before a step of their optimizer, but the program "
                "computes it with the weights after the step",
                "Compute everything that the loss needs again after the step.",
            )
        self._losses.append(_Backward(loss, origin.segment, self.toggled))

    def _place_buffers(self) -> None:
        """Let buffers change in the turn that is run, and copies of them elsewhere."""
        is_live = self._segments is None or self.segment in self._segments
        if is_live:
            self._bring_buffers_back()
        elif not self._buffers:
            for part in self._module.modules():
                for name, buffer in part._buffers.items():
                    if buffer is not None:
                        self._buffers.append((part._buffers, name, buffer))
            for owner, name, buffer in self._buffers:
                owner[name] = buffer.clone()

    def _bring_buffers_back(self) -> None:
        for owner, name, buffer in self._buffers:
            owner[name] = buffer
        self._buffers = []


def _refuse_schedulers(*_: object, **__: object) -> None:
    refuse_here(
        "self.lr_schedulers() was called, but the program steps schedulers itself",
        "Pass lr_scheduler= to compile, with the optimizers.",
    )


def _refuse_clipping(*_: object, **__: object) -> None:
    refuse_here(
        "self.clip_gradients was called, but the program computes and clips the gradients",
        "Pass clip=ipufit.Clip(...) to compile, which clips the gradients of each step.",
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _ManualTurn(TurnLoss):
    """Losses of the optimizer steps that ``training_step`` makes with the same weights.

    Attributes:
        names: of the parameters of each optimizer.
        steps: which of the optimizer steps these are; () to see which there are.
        segments: in which their losses, and what is logged, are computed.
        total: number of all optimizer steps.
        notice: called with each run.
    """

    names: Tuple[Tuple[str, ...], ...] = ()
    steps: Tuple[int, ...] = ()
    segments: Optional[range] = None
    total: Optional[int] = None
    notice: Callable[[ManualRun], object] = lambda run: None

    def call(
        self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Run ``training_step`` on a batch: what it has called."""
        run = ManualRun(module, self.names, self.segments, self.total)
        object.__setattr__(module, "manual", run)
        try:
            with torch.enable_grad():
                module(*args)
        finally:
            object.__setattr__(module, "manual", None)
        self.notice(run)
        return run

    def split(self, result: object) -> Tuple[object, LossTerm]:
        """Take the losses of the turn from a run."""
        assert isinstance(result, ManualRun)
        steps = [result.steps[place][1] for place in self.steps or range(len(result.steps))]
        losses = [torch.stack([each.loss.reshape(()) for each in step]).sum() for step in steps]
        separate = tuple(losses) if len(losses) > 1 else ()
        return None, LossTerm(torch.stack(losses).sum(), None, {}, separate)


@dataclasses.dataclass(frozen=True, eq=False)
class ManualLosses(Loss):
    """The turns of an update of a LightningModule with manual optimization.

    Attributes:
        names: of the parameters of each optimizer.
        recorded: the turns, once the step has run on a batch.
    """

    names: Tuple[Tuple[str, ...], ...] = ()
    recorded: List[Turn] = dataclasses.field(default_factory=list)

    @property
    def turns(self) -> Tuple[Turn, ...]:
        """The turns of an update; before a batch has shown them, one that stands for all."""
        return tuple(self.recorded) or (Turn(self._turn(), 1, 1, 0),)

    def call(
        self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call the step of the present role; in training, to see what it does."""
        if module.training:
            return self._turn().call(module, args, kwargs)
        return super().call(module, args, kwargs)

    def split(self, result: object) -> Tuple[object, LossTerm]:
        """Take apart what the step has returned, or the losses of all turns."""
        if isinstance(result, ManualRun):
            return self._turn().split(result)
        return super().split(result)

    def _turn(self, **fields: Any) -> _ManualTurn:
        return _ManualTurn("training_step", in_module="whole", names=self.names, **fields)

    def examine(self, module: nn.Module, first: MicroBatch) -> None:
        """See which steps ``training_step`` makes, on a batch of which only shapes matter.

        Raises:
            CaptureError: what it does can't be recorded in turns; with file and line.
            LossError: an optimizer makes no step, or one of losses that are out of date by then.
        """
        runs: List[ManualRun] = []
        step = ModuleWithLoss(module, self._turn(notice=runs.append))

        def run(state: Dict[str, Tensor], leaves: Sequence[Tensor]) -> None:
            for name, _ in step.named_parameters():
                state[name].requires_grad_()
            call_with(step, state, (tree.unflatten(leaves, first.structure), state, False))

        capture_step(step, first, run, is_training=True)
        steps = runs[-1].steps
        groups: List[List[int]] = []
        for place, (index, losses) in enumerate(steps):
            begin = losses[0].segment
            if begin == place:
                groups.append([place])
            elif groups[-1][0] == begin and index not in [steps[other][0] for other in groups[-1]]:
                groups[-1].append(place)
            else:
                raise LossError(
                    f"step {place + 1} of an optimizer in training_step needs a loss that is "
                    "computed after the previous step, but its loss was computed before. Compute "
                    "the loss again, or make both steps one after another."
                )
        missing = sorted(set(range(len(self.names))) - {index for index, _ in steps})
        if missing:
            raise LossError(
                "training_step must call step of each optimizer from configure_optimizers, but "
                f"does not for number {missing[0]}. Call self.optimizers()[{missing[0]}].step(), "
                "or do not return that optimizer."
            )
        ends = [*(group[0] for group in groups[1:]), len(steps) + 1]
        self.recorded[:] = [
            Turn(
                self._turn(
                    steps=tuple(group),
                    segments=range(group[0], end),
                    total=len(steps),
                    moves=tuple(
                        (f"optimizer {steps[place][0]}", self.names[steps[place][0]])
                        for place in group
                    ),
                ),
                1,
                1,
                0,
            )
            for group, end in zip(groups, ends)
        ]
