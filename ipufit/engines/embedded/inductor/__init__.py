"""Updates compiled by TorchInductor into a shared library, in a process of its own."""
