"""Implementation of the functions of ``poptorch.ops``, one module a topic."""
