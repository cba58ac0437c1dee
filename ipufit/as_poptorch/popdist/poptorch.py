"""PopDist's options, for one process."""

import importlib
from typing import Any

__all__ = ["Options"]

if __name__ == "popdist.poptorch":
    # By whichever name a script finds it: an SDK's without its PopDist, or the stand-in.
    _poptorch: Any = importlib.import_module("poptorch")

    def _init(self: object, ipus_per_replica: int = 1) -> None:
        """Begin with the defaults.

        Args:
            ipus_per_replica: PopDist compares it with what PopRun has reserved, which is nothing
                here.
        """
        _poptorch.Options.__init__(self)

    Options: Any = type(
        "Options", (_poptorch.Options,), {"__init__": _init, "__module__": __name__}
    )
