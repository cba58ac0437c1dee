"""Results of operators whose shape torch finds in values, and PopTorch in their arguments.

poptorch/source/dispatch_tracer/RegisterMetaOps.cpp.inc, lines 30 to 180.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional

import torch
from torch import Tensor

__all__ = ["shaped_by_poptorch"]


def shaped_by_poptorch(name: str, arguments: Mapping[str, Any]) -> Optional[Tensor]:
    """An empty result; None of an operator that torch can run without values."""
    if name == "aten::ctc_loss":
        log_probs = arguments["log_probs"]
        # Without reduction, one number for each sample.
        shape = log_probs.shape[1:2] if arguments["reduction"] == 0 else ()
        return _empty(log_probs, shape, log_probs.dtype)
    if name == "aten::one_hot" and arguments["num_classes"] > 0:
        classes = arguments["self"]
        return _empty(classes, (*classes.shape, arguments["num_classes"]), classes.dtype)
    if name == "aten::bincount" and arguments["minlength"] > 0:
        weights = arguments["weights"]
        dtype = torch.int64 if weights is None else weights.dtype
        return _empty(arguments["self"], (arguments["minlength"],), dtype)
    return None


def _empty(like: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)
