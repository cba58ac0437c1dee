"""Runs of one micro-batch through module, loss and backward pass, recorded or on copies."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.analysis.check.recorders import OperationRecorder, Reads
from ipufit.core.batch import MicroBatch
from ipufit.errors import CaptureError
from ipufit.losses import Loss, LossFacts
from ipufit.partition.partition import Partitions
from ipufit.tracing.capture import capture, recordable
from ipufit.tracing.grad_step import GradStep, ModuleWithLoss
from ipufit.tracing.interpreter import watch_functions, watch_operators
from ipufit.tracing.ipu_only import for_this_engine
from ipufit.tracing.recurrent import SecondGradientError, time_steps, whole_recurrent_layers
from ipufit.training.sanity_check import FailureExplainer
from ipufit.utils import tree


@dataclasses.dataclass
class CheckRun:
    """Operations, findings and results that one run of the module under test left behind.

    Attributes:
        recorder: has recorded the program.
        error: what ended it early, or None.
        rebound: parameters and buffers that forward replaced.
        with_gradient: names of the parameters that got a gradient; None where that is unknown.
        results: the numbers, outputs, gradients and buffers of a run on values.
    """

    recorder: OperationRecorder
    error: Optional[BaseException] = None
    rebound: Sequence[CaptureError] = ()
    with_gradient: Optional[Tuple[str, ...]] = None
    results: Tuple[Tensor, ...] = ()

    @property
    def needs_values(self) -> bool:
        """True if the run ended where the value of a tensor was needed."""
        return isinstance(self.error, CaptureError) and self.error.cause is not None


class ModuleUnderTest:
    """Module with its loss and a micro-batch, to be run as often as needed.

    Args:
        explainer: module, loss and precision; its loss is None where there is none, or no target
            for it: gradients are then those of all outputs.
        sample: the micro-batch.
        owned: the parameters that the optimizer has; None for all.
        partitions: of the module over IPUs, whose rules are checked on the way.

    Attributes:
        step: module and loss.
        trained: names of the parameters that get a gradient.
        state: the tensors of both, by name, those first.
        facts: what the first run that computed the loss has shown of it; None before.
    """

    def __init__(
        self,
        explainer: FailureExplainer,
        sample: MicroBatch,
        owned: Optional[Sequence[Tensor]],
        partitions: Partitions,
    ) -> None:
        self._partitions = partitions
        self._rebound: List[CaptureError] = []
        self.facts: Optional[LossFacts] = None
        self._precision = explainer.precision
        loss = explainer.loss or Loss("outputs", function=_all_outputs)
        self.step = ModuleWithLoss(explainer.module, loss)
        self.step.forgive = self._rebound.append
        named = dict(self.step.named_parameters())
        wanted = {id(p) for p in (named.values() if owned is None else owned)}
        self.trained = [n for n, p in named.items() if p.requires_grad and id(p) in wanted]
        tensors: Dict[str, Tensor] = {**named, **dict(self.step.named_buffers())}
        self.state = {name: tensors[name] for name in self.step.state_names(self.trained)}
        self.device = next((t.device for t in tensors.values()), torch.device("cpu"))
        # Copies: one tensor in two places is two inputs of a program.
        leaves = tuple(leaf.detach().to(self.device, copy=True) for leaf in sample.leaves)
        self.sample = dataclasses.replace(sample, leaves=leaves)

    def recorded(self, titles: Dict[int, str], training: bool, rolled: bool = False) -> CheckRun:
        """Record the module: nothing is computed, and no tensor has a value.

        Args:
            titles: where the user keeps tensors that are no state.
            training: with gradients.
            rolled: of other data, the rows of the batch in another order.
        """
        leaves = self.sample.leaves
        if rolled:
            leaves = tuple(leaf.roll(1, 0) if leaf.dim() else leaf for leaf in leaves)
        state = [tensor.detach() for tensor in self.state.values()]

        def record(call: Callable[..., Sequence[Tensor]]) -> None:
            with for_this_engine():
                capture(call, [*state, *leaves])

        return self._done(titles, training, record)

    def ran(
        self,
        titles: Dict[int, str],
        training: bool,
        pristine: Mapping[str, Tensor],
        note: Optional[Callable[[CaptureError], None]] = None,
        around: Optional[contextlib.AbstractContextManager[object]] = None,
    ) -> CheckRun:
        """Run the module on copies of these tensors, with their values.

        Args:
            titles: where the user keeps tensors that are no state.
            training: with gradients.
            pristine: the values of the state.
            note: told where a value is asked for.
            around: entered for the run.
        """
        state = [pristine[name].clone() for name in self.state]
        leaves = [leaf.clone() for leaf in self.sample.leaves]
        results: List[Tensor] = []

        def execute(call: Callable[..., Sequence[Tensor]]) -> None:
            with recordable(), around or contextlib.nullcontext():
                try:
                    with whole_recurrent_layers():
                        results.extend(call(*state, *leaves))
                except SecondGradientError:
                    with time_steps():
                        results.extend(call(*state, *leaves))

        run = self._done(titles, training, execute, note or (lambda error: None))
        run.results = (*(result.detach() for result in results), *state)
        return run

    def _done(
        self,
        titles: Dict[int, str],
        training: bool,
        execute: Callable[[Callable[..., Sequence[Tensor]]], object],
        note: Optional[Callable[[CaptureError], None]] = None,
    ) -> CheckRun:
        run = CheckRun(OperationRecorder((), titles))
        self._rebound.clear()
        fixed = list(self.state)[len(self.trained) :]
        with_gradients = training and bool(self.trained)
        # Gradients need no storage of their own.
        layout = (lambda names: ()) if with_gradients else None
        partition = self._partitions.of(training)
        if partition is not None and partition.is_open:
            partition = None  # fit is yet to search for one
        micro = GradStep(
            self.step,
            self.trained,
            fixed,
            self.sample,
            True,
            True,
            layout,
            self._precision,
            partition=partition,
        )

        def call(*tensors: Tensor) -> Sequence[Tensor]:
            recorder = run.recorder = OperationRecorder(tensors, titles, note)
            with contextlib.ExitStack() as watched:
                watched.enter_context(watch_operators(recorder))
                if note is not None:
                    watched.enter_context(watch_functions(Reads(note, recorder)))
                return micro(*tensors)

        try:
            execute(call)
        except Exception as error:
            run.error = error
        self.facts = self.facts or micro.facts
        run.recorder.seal()
        run.rebound = list(self._rebound)
        if with_gradients and run.error is None:
            run.with_gradient = micro.with_gradient
        return run


def _all_outputs(prediction: object, target: object) -> Tensor:
    """Stands for a loss that depends on every output."""
    total = torch.zeros(())
    for leaf in tree.flatten(prediction)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            total = total.to(leaf.device) + leaf.float().mean()
    return total
