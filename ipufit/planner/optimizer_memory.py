"""How much memory an optimizer keeps for every parameter."""

from __future__ import annotations

import collections
from typing import Any, Dict, Mapping, Tuple

import torch
from torch import Tensor, nn

from ipufit.errors import PartitionError

__all__ = ["state_bytes"]

# Settings that want another device than the one of the trial; none of them changes the state.
_FASTER = ("foreach", "fused", "capturable")


def state_bytes(optimizer: torch.optim.Optimizer) -> Dict[int, int]:
    """Bytes of state by the id of the parameter, for all that require gradients.

    What the optimizer has not made yet is found out by a step on zeros of the same shape, in a copy
    that shares nothing with it.

    Raises:
        PartitionError: its step fails on zeros.
    """
    found: Dict[int, int] = {}
    known: Dict[Tuple[Any, ...], int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            if optimizer.state.get(parameter):
                found[id(parameter)] = _size(optimizer.state[parameter])
                continue
            key = (number, parameter.shape, parameter.dtype)
            if key not in known:
                known[key] = _size(_tried(optimizer, group, parameter))
            found[id(parameter)] = known[key]
    return found


def _tried(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> Mapping[str, Any]:
    """The state of a parameter like this after one step."""
    zeros = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))
    zeros.grad = torch.zeros_like(zeros)
    trial = object.__new__(type(optimizer))
    # A schedule may have put its own step, bound to the original, into the object.
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    hooks: Dict[str, Any] = {
        name: collections.OrderedDict() for name in own if name.endswith("_hooks")
    }
    setting = {**group, **{name: None for name in _FASTER if name in group}, "params": [zeros]}
    state: Any = collections.defaultdict(dict)
    vars(trial).update({**own, **hooks, "state": state, "param_groups": [setting]})
    if "capturable" in setting:
        setting["capturable"] = False
    try:
        with torch.enable_grad():
            trial.step()
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise PartitionError(
            f"what {type(optimizer).__name__} keeps for a parameter is found out by a step on "
            f"zeros, but it fails with {type(error).__name__}: {reason}. Make the plan with an "
            "optimizer of the same state, such as 'adam'."
        ) from error
    return dict(state[zeros])


def _size(state: Mapping[str, Any]) -> int:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
