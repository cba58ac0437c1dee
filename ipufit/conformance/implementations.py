"""Implementations that can be examined: the embedded engine, the stand-in, and PopTorch."""

from __future__ import annotations

import abc
import contextlib
import importlib
import os
from types import ModuleType
from typing import Callable, ContextManager, Dict, Optional, Type

import torch
from torch import Tensor

import ipufit
from ipufit.conformance.scenario import Net, Observed, OptimizerSpec, Scenario
from ipufit.core.batch import CombinedBatch, MicroBatch, Mode
from ipufit.core.plan import Plan
from ipufit.core.train_config import Outputs, TrainConfig
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.program import ProgramSpec
from ipufit.losses import resolve_loss


class MissingError(Exception):
    """The implementation is not on this machine, for the reason in the text."""


class Implementation(abc.ABC):
    """Base class of what runs scenarios.

    Attributes:
        name: the name on the command line.
        dtype: dtype of computation.
        tolerance: tolerance of results; see :class:`ipufit.conformance.kit.Kit`.
        poptorch: the package; None where there is only an engine.
    """

    name: str
    dtype: torch.dtype
    tolerance: float
    poptorch: Optional[ModuleType] = None

    @abc.abstractmethod
    def versions(self) -> Dict[str, str]:
        """Return versions and the device, for the head of the table."""

    def computing(self) -> ContextManager[None]:
        """Return a context manager for the run of a case."""
        return contextlib.nullcontext()

    def can(self, scenario: Scenario) -> bool:
        """Return True if the implementation supports the scenario."""
        return True

    @abc.abstractmethod
    def observe(self, scenario: Scenario) -> Observed:
        """Run a scenario."""


class Embedded(Implementation):
    """Programs in plain torch, in float64."""

    name = "embedded"
    dtype = torch.float64
    tolerance = 1e-10

    def versions(self) -> Dict[str, str]:
        """Return the device, as ipufit's version is in the table anyway."""
        return {"device": "CPU"}

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
            batch = [
                MicroBatch.of(each if scenario.training else each[:1], {}, None, size)
                for each in parts
            ]
            program.prepare(batch[0])
            anchors = program.run(CombinedBatch(batch))
            results = {"out": torch.cat(list(map(_first, anchors.outputs)))}
            if scenario.training:
                results["losses"] = anchors.losses
            calls.append(results)
        state = program.read_state()
        program.close()
        return Observed(calls, state.weights, state.buffers)


def _first(output: object) -> Tensor:
    first = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(first, Tensor)
    return first


def _spec(scenario: Scenario, net: Net) -> ProgramSpec:
    """Return the program that runs the scenario."""
    every = Outputs("every_n", scenario.period)
    modes = {"All": Outputs("all"), "Sum": Outputs("sum"), "EveryN": every}
    config = TrainConfig(
        gradient_reduction=scenario.reduction.lower(),
        outputs=modes.get(scenario.mode, Outputs("final")),
    )
    optimizer = optimizer_of(ipufit, scenario.optimizer, net) if scenario.training else None
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


class PopTorch(Implementation):
    """The package of the Poplar SDK, on hardware or on its IPU Model.

    Raises:
        MissingError: it is not installed, or can't be imported.
    """

    name = "poptorch"
    dtype = torch.float32
    # Sums of a few dozen float32 products, in another order.
    tolerance = 1e-4

    def __init__(self) -> None:
        self.poptorch: ModuleType = self._import()

    def _import(self) -> ModuleType:
        try:
            package = importlib.import_module("poptorch")
            if package.__name__ != "poptorch":
                raise ImportError(f"under this name {package.__name__} was found")
            if not hasattr(package, "trainingModel"):
                raise ImportError("what was found under this name has no trainingModel")
        except Exception as fault:
            raise MissingError(
                "--engine poptorch needs the PopTorch of the Poplar SDK, but importing it failed "
                f"({type(fault).__name__}: {fault}). Enable the SDK in this shell, with the "
                "Python and torch that it was made for, or use --engine standin."
            ) from fault
        return package

    def versions(self) -> Dict[str, str]:
        """Return PopTorch's version and its device."""
        package = self.poptorch
        on_hardware = package.ipuHardwareIsAvailable()
        device = "no IPU found"
        if os.environ.get("POPTORCH_IPU_MODEL", "0") not in ("", "0"):
            device = "IPU Model"
        elif on_hardware:
            device = f"IPU, version {package.ipuHardwareVersion()}"
        sdk = os.environ.get("POPLAR_SDK_ENABLED", "unknown")
        return {"poptorch": str(package.__version__), "device": device, "SDK": sdk}

    def observe(self, scenario: Scenario) -> Observed:
        """Wrap the net, call it, and read its results."""
        poptorch = self.poptorch
        net = Net(scenario, poptorch, _parts(poptorch, scenario)).to(self.dtype)
        options = _options(poptorch, scenario)
        if scenario.training:
            optimizer = optimizer_of(poptorch, scenario.optimizer, net)
            model = poptorch.trainingModel(net, options, optimizer)
        else:
            model = poptorch.inferenceModel(net, options)
        calls = []
        try:
            for x, y in scenario.data():
                x = x.to(self.dtype)
                y = y.to(self.dtype) if y.is_floating_point() else y
                returned = model(x, y) if scenario.training else model(x)
                out, loss = returned if scenario.training else (returned, None)
                calls.append({"out": out} if loss is None else {"out": out, "loss": loss})
            state = {name: value.clone() for name, value in net.state_dict().items()}
        finally:
            model.destroy()
        names = {name for name, _ in net.named_parameters()}
        weights = {name: value for name, value in state.items() if name in names}
        buffers = {name: value for name, value in state.items() if name not in names}
        return Observed(calls, weights, [buffers])


class StandIn(PopTorch):
    """ipufit's stand-in for PopTorch, in float64."""

    name = "standin"
    dtype = torch.float64
    tolerance = 1e-10

    def _import(self) -> ModuleType:
        # Imported here, as below: the SDK's PopTorch is compared without it.
        import ipufit.poptorch

        return ipufit.poptorch

    def versions(self) -> Dict[str, str]:
        """Return the version of PopTorch that it stands in for."""
        package = self.poptorch
        return {"poptorch": f"stand-in for {package.__version__}", "device": "CPU"}

    def computing(self) -> ContextManager[None]:
        """Preserve float64, which no IPU has."""
        from ipufit.poptorch._precision import keep_float64

        return keep_float64()


def optimizer_of(
    package: ModuleType, wanted: OptimizerSpec, net: torch.nn.Module
) -> torch.optim.Optimizer:
    """Make the optimizer over the net's parameters, torch's or that of a package."""
    home = torch.optim if wanted.home == "torch" else package.optim
    optimizer: torch.optim.Optimizer = getattr(home, wanted.name)(
        net.parameters(), **dict(wanted.arguments)
    )
    return optimizer


def _options(poptorch: ModuleType, scenario: Scenario) -> object:
    options = poptorch.Options()
    options.showCompilationProgressBar(False)  # hundreds of bars would be in the table
    options.deviceIterations(scenario.iterations)
    options.replicationFactor(scenario.replicas)
    mode = getattr(poptorch.OutputMode, scenario.mode)
    if scenario.mode == "EveryN":
        options.outputMode(mode, scenario.period)
    else:
        options.outputMode(mode)
    kind, size = scenario.input_group
    if size > 1:
        options.inputReplicaGrouping(size, getattr(poptorch.CommGroupType, kind))
    if scenario.training:
        training = options.Training
        training.gradientAccumulation(scenario.accumulation)
        reduction = getattr(poptorch.ReductionType, scenario.reduction)
        training.accumulationAndReplicationReductionType(reduction)
        strategy = getattr(poptorch.MeanReductionStrategy, scenario.mean_strategy)
        training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    if scenario.strategy:
        options.setExecutionStrategy(_strategy(poptorch, scenario.strategy))
    return options


def _strategy(poptorch: ModuleType, name: str) -> object:
    """Return the strategy that runs the parts "0" and "1" of the net."""
    if name == "pipelined":
        return poptorch.PipelinedExecution(poptorch.Stage("0"), poptorch.Stage("1"))
    if name == "sharded":
        return poptorch.ShardedExecution(poptorch.Stage("0"), poptorch.Stage("1"))
    phases = [poptorch.Phase(poptorch.Stage("0")), poptorch.Phase(poptorch.Stage("1"))]
    serial = name == "serial phased"
    phases[0].ipus(0)
    phases[1].ipus(0 if serial else 1)
    if serial:
        return poptorch.SerialPhasedExecution(*phases)
    return poptorch.ParallelPhasedExecution(*phases)


def _parts(poptorch: ModuleType, scenario: Scenario) -> Callable[[int], ContextManager[object]]:
    """Return a function of the context for each part of the net."""
    if not scenario.strategy:
        return lambda index: contextlib.nullcontext()
    several = scenario.strategy in ("pipelined", "sharded")
    return lambda index: poptorch.Block(str(index), ipu_id=index if several else None)


IMPLEMENTATIONS: Dict[str, Type[Implementation]] = {
    each.name: each for each in (Embedded, StandIn, PopTorch)
}
