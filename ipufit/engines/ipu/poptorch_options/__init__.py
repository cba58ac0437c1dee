"""``training_options`` and ``inference_options`` of ``compile``: PopTorch's, on every engine."""
