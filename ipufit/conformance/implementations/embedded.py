"""The embedded engine, through the interface that ``ipufit.Model`` uses."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Dict, Optional

import torch
from torch import Tensor

import ipufit
from ipufit.conformance.scenario import Net, Observed, Scenario
from ipufit.conformance.settings import OptimizerSpec
from ipufit.core.batch import CombinedBatch, MicroBatch, Mode
from ipufit.core.plan import Plan
from ipufit.core.train_config import Outputs, TrainConfig
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.program import ProgramSpec
from ipufit.losses import resolve_loss

__all__ = ["Embedded"]

_MODES = {"All": "all", "Default": "final", "Final": "final", "Sum": "sum", "EveryN": "every_n"}


class Embedded:
    """Programs in plain torch, in float64."""

    name = "embedded"
    dtype = torch.float64
    tolerance = 1e-10
    poptorch: Optional[Any] = None

    def versions(self) -> Dict[str, str]:
        """Return the device, as ipufit's version is in the table anyway."""
        return {"device": "CPU"}

    def computing(self) -> ContextManager[None]:
        """Return an empty context manager."""
        return contextlib.nullcontext()

    def can(self, scenario: Scenario) -> bool:
        """Refuse partial results of inference, grouped inputs, and optimizers of PopTorch."""
        plain = scenario.training or scenario.mode in ("All", "Default")
        ungrouped = scenario.input_group[1] == 1
        has_optimizer = scenario.optimizer.home == "torch" or scenario.optimizer.name == "LAMB"
        usual = not scenario.strategy and scenario.mean_strategy == "Post"
        return plain and ungrouped and has_optimizer and usual and "out" in scenario.compared

    def observe(self, scenario: Scenario) -> Observed:
        """Run the scenario as ``fit`` or ``predict`` would, an execution per call."""
        net = Net(scenario).double()
        engine = EmbeddedEngine()
        program = engine.build(_spec(scenario, net))
        calls = []
        for x, y in scenario.data():
            size = scenario.micro_batch
            parts = zip(torch.split(x, size), torch.split(y, size))
            batch = [_micro_batch(scenario, x, y) for x, y in parts]
            program.prepare(batch[0])
            anchors = program.run(CombinedBatch(batch))
            results = {"out": torch.cat(list(map(_first, anchors.outputs)))}
            if scenario.training:
                results["losses"] = anchors.losses
            calls.append(results)
        state = program.read_state()
        program.close()
        return Observed(calls, state.weights, state.buffers)


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return first


def _micro_batch(scenario: Scenario, x: Tensor, y: Tensor) -> MicroBatch:
    inputs = (x, y) if scenario.training else (x,)
    return MicroBatch.of(inputs, {}, None, scenario.micro_batch)


def _spec(scenario: Scenario, net: Net) -> ProgramSpec:
    """Return the program that runs the scenario."""
    every = scenario.period if scenario.mode == "EveryN" else None
    config = TrainConfig(
        gradient_reduction=scenario.reduction.lower(),
        outputs=Outputs(_MODES[scenario.mode], every),
    )
    optimizer = _optimizer(scenario.optimizer, net) if scenario.training else None
    return ProgramSpec(
        module=net,
        loss=resolve_loss(None) if scenario.training else None,
        optimizer=optimizer,
        plan=Plan.make(
            micro_batch_size=scenario.micro_batch,
            ipus=scenario.replicas,
            device_iterations=scenario.iterations,
            gradient_accumulation=scenario.accumulation,
            training=scenario.training,
        ),
        mode=Mode.TRAIN if scenario.training else Mode.PREDICT,
        want_outputs=True,
        seed=0,
        config=config,
    )


def _optimizer(wanted: OptimizerSpec, net: Net) -> torch.optim.Optimizer:
    home = torch.optim if wanted.home == "torch" else ipufit.optim
    optimizer: torch.optim.Optimizer = getattr(home, wanted.name)(
        net.parameters(), **dict(wanted.arguments)
    )
    return optimizer
