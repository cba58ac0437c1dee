"""From a recorded graph to what runs: itself, faster kernels, compiled updates, CUDA graphs."""
