"""Micro-batches of an update as one larger batch, where that is proved to be the same mathematics.

``proof`` follows the samples through the recorded forward, operator by operator (``rules``);
``steps`` are the functions that are recorded; ``decision`` says whether, and if not why; ``merged``
is what runs.
"""

from ipufit.engines.embedded.batching.batched_step import BatchedStep
from ipufit.engines.embedded.batching.decision import Decision, decide

__all__ = ["BatchedStep", "Decision", "decide"]
