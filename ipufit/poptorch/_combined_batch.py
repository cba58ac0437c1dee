"""Division of dimension 0 of each input into the micro-batches of one call."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["BatchDivision"]


class BatchDivision(NamedTuple):
    """Numbers by which dimension 0 of a combined batch is divided."""

    device_iterations: int = 1
    replication_factor: int = 1
    input_group_size: int = 1
    gradient_accumulation: int = 1

    @property
    def groups(self) -> int:
        """Number of groups of replicas; all replicas of one read the same micro-batch."""
        return self.replication_factor // self.input_group_size

    @property
    def factor(self) -> int:
        """Number of micro-batches in one call."""
        return self.device_iterations * self.groups * self.gradient_accumulation

    def check(self, tensor: Tensor, name: str) -> int:
        """Return the micro-batch size of an input; a 0-dim tensor counts as a batch of 1.

        Args:
            name: what the input is called in a message.
        Raises:
            AssertionError: its dimension 0 does not divide evenly.
        """
        size = tensor.shape[0] if tensor.dim() else 1
        if self.factor < 1 or size % self.factor:
            raise AssertionError(
                f"Invalid batch dimension: in the input {name} of shape {list(tensor.shape)}, the "
                f"batch dimension ({size}) must be a multiple of "
                f"Options.deviceIterations({self.device_iterations}) * "
                f"(Options.replicationFactor({self.replication_factor}) / "
                f"Options.inputReplicaGrouping.input_group_size({self.input_group_size})) * "
                f"Options.Training.gradientAccumulation({self.gradient_accumulation}) = "
                f"{self.factor}, {self._advice(size)}"
            )
        return size // self.factor

    def _advice(self, size: int) -> str:
        if self.factor < 1:
            return "which must be at least 1. Set each of these numbers to 1 or more."
        below = size // self.factor * self.factor
        sizes = f"{below} or {below + self.factor}" if below else f"{self.factor}"
        return (
            f"so that each micro-batch has the same size. Pass {sizes} samples, or use "
            "poptorch.DataLoader, which loads the right number."
        )

    def first(self, tensor: Tensor, name: str) -> Tensor:
        """Return the first micro-batch of an input as a view, with which forward is recorded."""
        size = self.check(tensor, name)
        return tensor.narrow(0, 0, size) if tensor.dim() else tensor
