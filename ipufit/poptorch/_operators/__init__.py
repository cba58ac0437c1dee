"""What the functions of ``poptorch.ops`` do, one topic a module."""
