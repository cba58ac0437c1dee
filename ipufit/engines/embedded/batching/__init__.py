"""Micro-batches of an update as one larger batch, where that is proved to be the same mathematics.

``proof`` follows the samples through the recorded forward, operator by operator (``rules``);
``decision`` says whether, and if not why; ``batched_step`` has the functions that are recorded, and
what updates run.
"""

from ipufit.engines.embedded.batching.batched_step import BatchedStep
from ipufit.engines.embedded.batching.decision import Decision, Merger

__all__ = ["BatchedStep", "Decision", "Merger"]
