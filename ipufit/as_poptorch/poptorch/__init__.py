"""``import poptorch`` finds this module, which becomes ipufit's stand-in, or the SDK's own."""

from ipufit.as_poptorch import stands_in

stands_in(__name__, "in plain torch")
