"""Module that processes import as ``poptorch`` that a script run by ``ipufit run`` starts."""

if __name__ == "poptorch":
    import sys

    import ipufit.poptorch
    from ipufit.poptorch import _alias

    _alias.install()
    sys.modules[__name__] = ipufit.poptorch
