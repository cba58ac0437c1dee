"""Which argument of ``compile`` holds PopTorch's options for a program."""

from __future__ import annotations

from ipufit.core.batch import Mode

__all__ = ["INFERENCE", "TRAINING", "role_of"]

TRAINING, INFERENCE = "training_options", "inference_options"


def role_of(mode: Mode) -> str:
    """The argument of ``compile`` that holds the options for such a program."""
    return TRAINING if mode is Mode.TRAIN else INFERENCE
