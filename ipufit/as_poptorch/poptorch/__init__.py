"""``import poptorch`` finds this module, which becomes ipufit's stand-in, or the SDK's own."""

from ipufit.as_poptorch import become_poptorch
from ipufit.utils.poptorch_sdk import stands_in

if stands_in(__name__, "in plain torch"):
    from ipufit import poptorch
    from ipufit.poptorch._operators import torch_ops

    become_poptorch(poptorch, torch_ops)
