"""Options of training models."""

from __future__ import annotations

from ipufit.poptorch import enums
from ipufit.poptorch._options.group import OptionGroup, need_type
from ipufit.poptorch._options.popart import _PopartOptions

__all__ = ["_TrainingOptions"]


class _TrainingOptions(OptionGroup):
    """Options of how gradients are reduced: ``options.Training``. Not for inference models."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Set the number of micro-batches whose gradients make one update of the weights."""
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(
        self, reduction_type: enums.ReductionType
    ) -> _TrainingOptions:
        """Set whether gradients are averaged or added up over micro-batches and replicas.

        It does not depend on the loss' own reduction.

        Raises:
            ValueError: anything but ``ReductionType.Mean`` or ``ReductionType.Sum``.
        """
        if reduction_type not in (enums.ReductionType.Mean, enums.ReductionType.Sum) or (
            not isinstance(reduction_type, enums.ReductionType)
        ):
            raise ValueError(
                "accumulationAndReplicationReductionType must be poptorch.ReductionType.Mean or "
                f"poptorch.ReductionType.Sum, got {reduction_type!r}."
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> _TrainingOptions:
        """Set when a mean is divided: at every addition (``Running``) or at the end (``Post``).

        An optimizer whose ``accum_type`` is float16 chooses ``Running`` by itself.
        """
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Let the loss scale follow the size of half-precision gradients."""
        need_type("setAutomaticLossScaling", enabled, bool)
        self._popart_options.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Spread convolutions over the tiles of an IPU. Nothing is spread on this engine.

        It replaces what ``Precision.setPartialsType`` has set for convolutions.
        """
        need_type("setConvolutionDithering", enabled, bool)
        self._popart_options.set("convolutionOptions", {"enableConvDithering": enabled})
        return self
