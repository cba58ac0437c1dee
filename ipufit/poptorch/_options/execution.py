"""Options about what a run computes: iterations, replicas, outputs, random numbers."""

from __future__ import annotations

from typing import List, Optional, TypeVar, Union

import torch

from ipufit.poptorch import enums
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.group import OptionGroup, need_type
from ipufit.poptorch._options.popart import _PopartOptions
from ipufit.poptorch._options.strategies import _IExecutionStrategy

__all__ = ["ExecutionOptions"]

Self = TypeVar("Self", bound="ExecutionOptions")


class ExecutionOptions(OptionGroup):
    """Options on which the results of a run depend."""

    _popart: _PopartOptions
    _execution_strategy: _IExecutionStrategy

    def deviceIterations(self: Self, device_iterations: int) -> Self:
        """Set the number of steps of one run, each with its own micro-batches."""
        self.set(device_iterations=device_iterations)
        return self

    def replicationFactor(self: Self, replication_factor: int) -> Self:
        """Set the number of copies of the model, each with its own micro-batches."""
        self.set(replication_factor=replication_factor)
        return self

    def inputReplicaGrouping(
        self: Self, input_group_size: int, input_group_type: enums.CommGroupType
    ) -> Self:
        """Let the replicas of a group read the same micro-batch.

        Args:
            input_group_size: replicas of a group; divides the replication factor set so far.
            input_group_type: which replicas are a group; ``NoGrouping`` means groups of one.
        Raises:
            ValueError: ``All``, or a size that does not divide the replication factor.
            AssertionError: another type.
        """
        self.checkIsFrozen()
        need_type("input_group_size", input_group_size, int)
        need_type("input_cgt", input_group_type, enums.CommGroupType)
        replicas = self.replication_factor
        if input_group_type == enums.CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, enums.CommGroupType.Consecutive
        if input_group_type == enums.CommGroupType.All:
            raise ValueError(
                "CommGroupType.All is no grouping of inputs. For one group of all replicas use "
                f"inputReplicaGrouping({replicas}, poptorch.CommGroupType.Consecutive)."
            )
        if replicas < input_group_size:
            raise ValueError(
                f"A group of {input_group_size} replicas needs as many replicas, got "
                f"replicationFactor({replicas}). Call replicationFactor first, with a multiple."
            )
        if input_group_size < 1 or replicas % input_group_size:
            sizes = [size for size in range(1, replicas + 1) if replicas % size == 0]
            raise ValueError(
                f"The size of a group must divide the {replicas} replicas, got {input_group_size}. "
                f"Use one of {sizes}."
            )
        self.set(input_group_size=input_group_size, input_cgt=input_group_type)
        return self

    def broadcastBuffers(self: Self, broadcast_buffers: bool = True) -> Self:
        """Require equal buffers on all replicas; False gives each replica its own."""
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    def outputMode(
        self: Self, output_mode: enums.OutputMode, output_return_period: Optional[int] = None
    ) -> Self:
        """Set which outputs of a run come back.

        Args:
            output_mode: see ``OutputMode``.
            output_return_period: the N of ``EveryN``, in device iterations.
        Raises:
            AssertionError: not an ``OutputMode``, or ``EveryN`` without a positive period.
        """
        need_type("outputMode", output_mode, enums.OutputMode)
        if output_return_period is not None:
            need_type("output_return_period", output_return_period, int)
        if output_mode == enums.OutputMode.EveryN:
            if output_return_period is None or output_return_period <= 0:
                raise AssertionError(
                    "OutputMode.EveryN needs output_return_period, a positive integer, got "
                    f"{output_return_period}. Use outputMode(poptorch.OutputMode.EveryN, 2) for "
                    "every second device iteration."
                )
        elif output_return_period:
            logger.info(
                "output_return_period=%d is not used: it belongs to OutputMode.EveryN, not to "
                "OutputMode.%s",
                output_return_period,
                output_mode.name,
            )
            output_return_period = None
        self.set(output_mode=output_mode.value, output_return_period=output_return_period or 1)
        return self

    def defaultOutputMode(self) -> bool:
        """Return True while the output mode depends on the kind of model."""
        return bool(self.output_mode == enums.OutputMode.Default)

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: Optional[enums.OutputMode] = None,
        output_return_period: int = 1,
    ) -> None:
        """Return a tensor of the program too, through ``executor.getAnchoredTensor(short_name)``.

        Frozen options take it as well. It returns nothing: calls can't be chained behind it.

        Args:
            short_name: the name to ask for.
            long_name: the program's name, one of ``executor.getTensorNames()``.
            output_mode: None for that of the outputs.
            output_return_period: the N of ``EveryN``.
        Raises:
            AssertionError: another type.
        """
        need_type("short_name", short_name, str)
        need_type("long_name", long_name, str)
        need_type("output_return_period", output_return_period, int)
        if output_mode is not None:
            need_type("output_mode", output_mode, enums.OutputMode)
        period = output_return_period if output_mode == enums.OutputMode.EveryN else 1
        self.anchored_tensors[short_name] = [long_name, output_mode is None, output_mode, period]

    def randomSeed(self: Self, random_seed: int) -> Self:
        """Seed the device's random numbers, and torch's at once.

        Raises:
            AssertionError: not an int.
        """
        self.checkIsFrozen()
        need_type("random_seed", random_seed, int)
        torch.manual_seed(random_seed)
        self.createOrSet(random_seed=random_seed)
        return self

    def setExecutionStrategy(self: Self, strategy: _IExecutionStrategy) -> Self:
        """Set how the model is distributed over IPUs.

        Raises:
            AssertionError: not an execution strategy.
        """
        self.checkIsFrozen()
        if not isinstance(strategy, _IExecutionStrategy):
            raise AssertionError(
                f"Unexpected type {type(strategy).__name__} for option setExecutionStrategy. "
                "Expected poptorch.PipelinedExecution, ShardedExecution, ParallelPhasedExecution "
                f"or SerialPhasedExecution, got {strategy!r}."
            )
        self._execution_strategy = strategy
        return self

    def updatableNamedBuffers(self: Self, buffers: List[str]) -> Self:
        """Name the buffers that ``executor.copyNamedBuffersToDevice()`` copies.

        Raises:
            AssertionError: not a list of strings.
        """
        need_type("updatableNamedBuffers", buffers, list, tuple)
        for name in buffers:
            need_type("updatableNamedBuffers", name, str)
        self._popart.set("updatableNamedBuffers", list(buffers))
        return self

    def enableSyntheticData(self: Self, enabled: Union[bool, int]) -> Self:
        """Compute on synthetic inputs and return no useful results, to measure speed.

        Args:
            enabled: numbers of ``popart.SyntheticDataMode`` count as in PopTorch, where any but 0
                is the normal distribution.
        """
        need_type("enableSyntheticData", enabled, bool, int)
        # The compiler's numbers: 0 for off, 2 for normally distributed.
        self._popart.set("syntheticDataMode", 2 if enabled else 0)
        return self

    def enableStableNorm(self: Self, enabled: bool) -> Self:
        """Compute norms more exactly. torch's norms are exact already."""
        need_type("enableStableNorm", enabled, bool)
        self._popart.set("enableStableNorm", enabled)
        return self
