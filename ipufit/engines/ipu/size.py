"""How much one call of a compiled program does."""

from __future__ import annotations

import dataclasses

from ipufit.core.plan import Plan

__all__ = ["Size"]


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a call.

    Attributes:
        iterations: device iterations: weight updates when training.
        accumulation: micro-batches that a replica sums before an update.
        replicas: copies of the model.
        micro_batch: samples in a micro-batch.
        padding: what of a call may be padding: "none"; "micro-batches", whole ones, for which the
            program takes a coefficient; or "samples" as well, for which it takes their validity.
    """

    iterations: int
    accumulation: int
    replicas: int
    micro_batch: int
    padding: str = "none"

    @staticmethod
    def of(plan: Plan) -> Size:
        """The size of a full execution."""
        return Size(
            plan.device_iterations, plan.gradient_accumulation, plan.replicas, plan.micro_batch_size
        )

    @property
    def per_update(self) -> int:
        """Micro-batches of one update or device iteration."""
        return self.accumulation * self.replicas

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one call."""
        return self.iterations * self.per_update
