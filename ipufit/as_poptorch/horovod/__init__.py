"""A stand-in for ``horovod`` where it is not installed: ``horovod.torch``, for one process."""

from ipufit.utils.poptorch_sdk import stands_in

stands_in(__name__, "for one process")
