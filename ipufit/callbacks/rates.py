"""Learning rates, where torch keeps them."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

from torch import Tensor

__all__ = ["learning_rates", "log_rates", "set_rates"]


def learning_rates(optimizer: Any) -> List[float]:
    """Return the learning rates of all parameter groups."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_rates(optimizer: Any, new: Callable[[float], float]) -> List[float]:
    """Give every parameter group a learning rate made from its present one."""
    rates = [new(rate) for rate in learning_rates(optimizer)]
    for group, rate in zip(optimizer.param_groups, rates):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return rates


def log_rates(optimizer: object, logs: Dict[str, float]) -> None:
    """Under "learning_rate" that of the first group, under "learning_rate_1", ... the others'."""
    for index, rate in enumerate(learning_rates(optimizer)):
        logs[f"learning_rate_{index}" if index else "learning_rate"] = rate
