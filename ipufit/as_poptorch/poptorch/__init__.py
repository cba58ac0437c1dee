"""``import poptorch`` finds this module, which becomes ipufit's stand-in, or the SDK's own."""

import contextlib
import importlib.util
import sys

from ipufit.utils.poptorch_sdk import stands_in

if stands_in(__name__, "in plain torch"):
    import torch

    from ipufit import poptorch as standin
    from ipufit.poptorch._operators import torch_ops

    # With these two, all of its modules have been imported: each is one under both names.
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{standin.__name__}.")]:
        sys.modules[name[len("ipufit.") :]] = sys.modules[name]
    # No library of torch's: PopTorch's own could not be imported into this process any more.
    torch.ops.poptorch = torch_ops  # type: ignore[attr-defined]
    # As PopTorch does: programs pass batches of torch_geometric without another import.
    if importlib.util.find_spec("poptorch_geometric") is not None:
        with contextlib.suppress(standin.Error):
            standin.registerGeometricCustomArgParsers()
