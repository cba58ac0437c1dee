"""From a recorded graph to what runs: the same operators, faster kernels, whole executions."""
