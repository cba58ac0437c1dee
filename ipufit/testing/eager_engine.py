"""An engine that runs the module in plain torch: the shortest whole one, to be copied."""

from __future__ import annotations

import math
from typing import Any, List, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from ipufit.core.batch import CombinedBatch, MicroBatch, Mode, split_by_update
from ipufit.core.compile_arguments import OFF
from ipufit.core.logged_values import collecting
from ipufit.core.train_config import TrainConfig
from ipufit.engines import Engine, Program
from ipufit.engines.program import ExecutionResult, Prepared, ProgramSpec, TrainState
from ipufit.errors import ConfigurationError, NonFiniteLossError
from ipufit.losses import LossFacts
from ipufit.planner.divided_module import DividedModule
from ipufit.tracing.grad_step import ModuleWithLoss, ReportedScalars, public_name, unpack_reported
from ipufit.utils import tree
from ipufit.utils.random_streams import isolated, micro_batch_key, seed_generators, update_key
from ipufit.utils.state import copy_optimizer_state, device_of, preserve_state


class EagerEngine(Engine):
    """Runs one micro-batch after the other, like a hand-written loop, and logs every execution.

    ``ipufit.Model(net, engine=EagerEngine)`` trains, evaluates and predicts with it, on one replica
    and in one process. It refuses other features by name, such as clipping in ``compile`` or
    several replicas in ``fit``. To write your own engine, start from a copy of its module,
    ``ipufit/testing/eager_engine.py``; see CONTRIBUTING.md.

    Attributes:
        log: a line for each execution, in order.
    """

    name = "eager"

    def __init__(self) -> None:
        self.log: List[str] = []

    def check(self, divided: DividedModule, options: Mapping[str, Any]) -> None:
        """Refuse arguments of ``compile`` beyond a plain update.

        Raises:
            ConfigurationError: names them.
        """
        refused = {**divided.config.describe(), "normalize": divided.loss.normalize}
        plain = {"gradient_reduction": "mean", "normalize": "samples", "jit": OFF}
        extras = [f"{k}={v!r}" for k, v in refused.items() if plain.get(k) != v]
        if extras:
            raise ConfigurationError(
                f"the {self.name} engine makes only plain updates, got {', '.join(extras)}. Leave "
                "this out, or use engine='embedded'."
            )

    def explain(self, config: TrainConfig, options: Mapping[str, Any]) -> List[str]:
        """Say that nothing is recorded, for any ``run_eagerly``."""
        return ["Every execution calls the module itself: nothing is recorded."]

    def build(self, spec: ProgramSpec) -> EagerProgram:
        """Return a program for the spec.

        Raises:
            ConfigurationError: the spec has several replicas.
        """
        if spec.plan.all_replicas > 1:
            raise ConfigurationError(
                f"the {self.name} engine has one replica, got {spec.plan.all_replicas}. Leave ipus "
                "out and train in one process, or use engine='embedded'."
            )
        return EagerProgram(self, spec)


class EagerProgram(Program):
    """Calls the module and the loss for every micro-batch, and torch's optimizer for every update.

    Weights and the optimizer's state stay where the user has them, so that most methods of a
    program have nothing to do here.

    Args:
        engine: whose log has the executions.
        spec: description of the program.
    """

    def __init__(self, engine: EagerEngine, spec: ProgramSpec) -> None:
        self._engine = engine
        self._spec = spec
        self._step = ModuleWithLoss(spec.module, spec.loss)
        self._updates = spec.first_update
        self._passes = 0

    @property
    def updates(self) -> int:
        """Weight updates done since ``compile``."""
        return self._updates

    def prepare(self, example: MicroBatch) -> Prepared:
        """Describe the results for an example, which runs once and leaves no trace."""
        with preserve_state([self._step], None), torch.no_grad():
            result = self._forward(example, self._updates)
            loss = self._step.loss
            target = example.unpack()[2]
            facts = LossFacts() if loss is None else loss.facts(result.outputs, target, None)
        return Prepared(_on(torch.device("meta"), result.outputs), result.reported.rules, facts)

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """Run one execution.

        Raises:
            NonFiniteLossError: when training; the weights are those before the update named in it.
        """
        work = self._update if self._spec.mode is Mode.TRAIN else self._infer
        results: List[_Result] = []
        with self._engine.clock.during("compute"):
            for micro_batches in split_by_update(
                batch.micro_batches, batch.shares(self._spec.plan)
            ):
                results += work(micro_batches)
        self._engine.log.append(
            f"{self._spec.mode.value}: {len(results)} micro-batches, {batch.samples} samples"
        )
        kinds = [result.reported for result in results]
        numbers = torch.cat([result.numbers.to("cpu", torch.float64) for result in results])
        losses, counts, logged, rules = unpack_reported(kinds, numbers)
        outputs = [result.outputs for result in results] if self._spec.want_outputs else []
        return ExecutionResult(losses, outputs, range(len(results)), counts, logged, rules)

    def _update(self, micro_batches: Sequence[MicroBatch]) -> List[_Result]:
        """Make one update, whose gradient is that of the mean loss over all its samples."""
        optimizer = self._spec.optimizer
        assert optimizer is not None
        optimizer.zero_grad(set_to_none=True)
        samples = sum(micro_batch.size for micro_batch in micro_batches)
        results = []
        for place, micro_batch in enumerate(micro_batches):
            result = self._forward(micro_batch, self._updates, place)
            if not math.isfinite(result.loss.item()):
                raise NonFiniteLossError(
                    f"the loss must be finite, but it became {result.loss.item()} in update "
                    f"{self._updates}. The weights are those from before the update.",
                    self._updates,
                    result.loss.item(),
                )
            torch.autograd.backward(result.loss * (micro_batch.size / samples))
            results.append(result)
        optimizer.step()
        self._updates += 1
        return results

    def _infer(self, micro_batches: Sequence[MicroBatch]) -> List[_Result]:
        results = []
        for micro_batch in micro_batches:
            with torch.no_grad():
                results.append(self._forward(micro_batch, self._passes))
            self._passes += 1
        return results

    def _forward(self, micro_batch: MicroBatch, update: int, place: int = 0) -> _Result:
        spec = self._spec
        device = device_of(self._step)
        key = micro_batch_key(update_key(spec.seed, spec.domain, update), place)
        with isolated(device), collecting() as entries:
            # Random numbers by update and place, so that a run that goes on draws the same.
            seed_generators(key, device)
            arguments = micro_batch.to(device).unpack()
            outputs, term = self._step(
                arguments, self._step.tensors(), spec.mode is not Mode.PREDICT
            )
        outputs = _on(torch.device("cpu"), outputs)
        if term is None:
            return _Result(outputs, torch.zeros(()), ReportedScalars(), torch.empty(0))
        reported, numbers = ReportedScalars.of(term, entries)
        return _Result(outputs, term.value, reported, numbers.reshape(-1))

    def read_state(self) -> TrainState:
        """Copy weights, buffers, the optimizer's state and the counter to the host."""
        optimizer = self._spec.optimizer
        weights, buffers = (
            {public_name(name): tensor.detach().cpu().clone() for name, tensor in named}
            for named in (self._step.named_parameters(), self._step.named_buffers())
        )
        state = {} if optimizer is None else copy_optimizer_state(optimizer)
        return TrainState(weights, [buffers], state, self._spec.seed, self._updates)

    def write_state(self, state: TrainState) -> None:
        """Continue from another state, in place."""
        state.write_to(dict(self._step.named_parameters()), dict(self._step.named_buffers()))
        if self._spec.optimizer is not None:
            self._spec.optimizer.load_state_dict(state.optimizer)
        self._updates = state.updates

    def close(self) -> None:
        """Let go of the gradients of the last update; safe twice."""
        if self._spec.optimizer is not None:
            self._spec.optimizer.zero_grad(set_to_none=True)


class _Result(NamedTuple):
    """Results of one micro-batch: outputs, the loss, and the numbers that are reported of it."""

    outputs: Any
    loss: Tensor
    reported: ReportedScalars
    numbers: Tensor


def _on(device: torch.device, outputs: Any) -> Any:
    """Bring the tensors in a module's outputs to a device, without their gradients."""
    return tree.map_leaves(
        lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, outputs
    )
