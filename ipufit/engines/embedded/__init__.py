"""Programs in plain torch, on a CPU or a CUDA device: capture, lower, run."""
