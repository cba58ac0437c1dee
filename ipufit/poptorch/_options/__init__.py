"""The options of PopTorch; ``ipufit.poptorch.options`` is their public face."""
