"""``import poptorch``, and what a program imports beside it, also where there is no Poplar SDK.

``ipufit.utils.poptorch_sdk`` puts this folder on ``sys.path``, before all that is installed: each
module in it has the name of one of the SDK's, and gives way to that one where it can be imported.
"""
