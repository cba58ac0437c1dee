"""``training_options`` and ``inference_options`` of ``compile``: PopTorch's, on every engine."""

from ipufit.whole_options.roles import INFERENCE, TRAINING, role_of

__all__ = ["INFERENCE", "TRAINING", "role_of"]
