"""From a recorded graph to what runs: the same operators, or faster kernels for them."""
