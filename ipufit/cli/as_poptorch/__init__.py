"""A folder for ``sys.path``: whoever has it there finds the stand-in as ``poptorch``."""
