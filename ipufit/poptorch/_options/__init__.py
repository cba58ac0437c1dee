"""The groups of options, one idea a file; ``ipufit.poptorch.options`` is their public face."""
