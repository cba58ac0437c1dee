"""``training_options`` and ``inference_options`` of ``compile``: PopTorch's, on every engine."""

from ipufit.whole_options.pair import OptionPair
from ipufit.whole_options.reading import INFERENCE, TRAINING, WholeOptions, role_of

__all__ = ["INFERENCE", "TRAINING", "OptionPair", "WholeOptions", "role_of"]
