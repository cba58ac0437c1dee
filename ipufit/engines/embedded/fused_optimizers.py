"""torch's own kernels for whole optimizer updates, where this torch has them.

They compute what the rules compute, in one pass over memory. SGD is left to its rule, which has one
operator or three.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Type

import torch
from torch import Tensor

from ipufit.optim.rules import AdamRule, AdamWRule, OptimizerRule, RuleOfModels

# Changes parameters and state in place: flat parameters, flat gradients, both moments, the largest
# second moments of amsgrad or an empty list, which update of the group it is, from 1, and what
# :func:`numbers_for` makes of the group's settings.
FusedKernel = Callable[..., None]

# In narrower types a kernel rounds once where the rules round after each operator.
_DTYPES = (torch.float32, torch.float64)


def fused_for(rule: OptimizerRule, flat: Tensor) -> Optional[FusedKernel]:
    """The kernel for a rule and the tensors of a block; None where there is none.

    Args:
        rule: of the block.
        flat: its parameters.
    """
    of_models = isinstance(rule, RuleOfModels)
    kernel = _KERNELS.get(type(rule).__bases__[1] if of_models else type(rule))
    if kernel is None or flat.dtype not in _DTYPES:
        return None
    if isinstance(rule, AdamRule) and rule.decoupled:
        kernel = _KERNELS[AdamWRule]
    assert kernel is not None
    if not _works(kernel, flat.device, flat.dtype):
        return None
    return functools.partial(_each_row, kernel) if of_models else kernel


def _each_row(
    kernel: FusedKernel,
    *lists: Sequence[Tensor],
    models: Sequence[Mapping[str, object]],
    amsgrad: bool,
) -> None:
    """Call a kernel for each of several models, whose rows are in the tensors of the lists."""
    *tensors, steps = lists
    by_list = [[tensor.view(len(models), -1).unbind() for tensor in each] for each in tensors]
    for row, settings in enumerate(models):
        kernel(*[[rows[row] for rows in each] for each in by_list], steps, **settings)


def numbers_for(group: Mapping[str, Any], n: float) -> Dict[str, Any]:
    """Return the settings that the kernels take as numbers.

    Args:
        group: settings of a parameter group.
        n: which update of the group it is, from 1.
    """
    if "models" in group:
        models = [numbers_for(settings, n) for settings in group["models"]]
        return {"models": models, "amsgrad": bool(group.get("amsgrad"))}
    beta1, beta2 = group["betas"]
    # State that was read back may make no sense, which the weights then show.
    is_sane = n > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1
    return {
        "lr": group["lr"] if is_sane else math.nan,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": bool(group["maximize"]),
        "amsgrad": bool(group.get("amsgrad")),
    }


_KERNELS: Dict[Type[OptimizerRule], Optional[FusedKernel]] = {
    AdamRule: getattr(torch, "_fused_adam_", None),
    AdamWRule: getattr(torch, "_fused_adamw_", None),
}
_EXAMPLE: Mapping[str, object] = {
    "lr": 0.0,
    "weight_decay": 0.0,
    "maximize": False,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
}


@functools.lru_cache(maxsize=None)
def _works(kernel: FusedKernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether this torch has the kernel for such tensors: for the CPU since 2.4."""
    tensors = [[torch.zeros(1, dtype=dtype, device=device)] for _ in range(4)]
    step = torch.ones((), dtype=torch.float32, device=device)
    try:
        with torch.no_grad():
            kernel(*tensors, [], [step], **numbers_for(_EXAMPLE, 1))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return True
