"""What a metric object has seen, as tensors, numbers and lists, and back."""

from __future__ import annotations

from typing import Any, Dict, List

from torch import Tensor, nn

from ipufit.errors import MetricError

__all__ = ["restore", "stored"]

# Of torchmetrics' wrappers, those that keep nothing besides the metrics inside.
_PLAIN_WRAPPERS = ("ClasswiseWrapper", "MultioutputWrapper", "MultitaskWrapper")


def stored(metric: Any, shown: str) -> Dict[str, Any]:
    """The state of an object with the methods of torchmetrics' metrics.

    torchmetrics' own ``state_dict`` leaves out what is not declared persistent, which is all of it
    in most metrics; so what ``add_state`` declared is taken. Anything else says it itself.

    Raises:
        MetricError: it does not.
    """
    if _is_collection(metric):
        # Members that share one state while they are only added to are given copies of it.
        metric.values()
    declared = _declared(metric)
    if declared:
        return {"metrics": [_state(each) for each in declared]}
    if callable(getattr(metric, "state_dict", None)) and callable(
        getattr(metric, "load_state_dict", None)
    ):
        return {"own": metric.state_dict()}
    raise MetricError(
        f"a checkpoint in the middle of an epoch holds what every metric has seen, but {shown!r} "
        f"({type(metric).__name__}) can't say it. Give it state_dict and load_state_dict, use a "
        "plain metric of torchmetrics, or leave checkpoint out."
    )


def restore(metric: Any, state: Dict[str, Any]) -> None:
    """Go on from what :func:`stored` returned."""
    if "own" in state:
        metric.load_state_dict(state["own"])
        return
    for each, own in zip(_declared(metric), state["metrics"]):
        for name, value in own["values"].items():
            now = getattr(each, name)
            if isinstance(now, Tensor) and isinstance(value, Tensor):
                value = value.to(now.device)
            setattr(each, name, list(value) if isinstance(value, list) else value)
        each._update_count = own["updates"]
        each._computed = None


def _is_collection(metric: Any) -> bool:
    return callable(getattr(metric, "keys", None)) and callable(getattr(metric, "values", None))


def _declared(metric: Any) -> List[Any]:
    """Those of torchmetrics in it; none if something in it keeps more than it declares."""
    found = metric.modules() if isinstance(metric, nn.Module) else [metric]
    members = [each for each in found if isinstance(getattr(each, "_defaults", None), dict)]
    if any(not hasattr(each, "_update_count") or _keeps_more(each) for each in members):
        return []
    return members


def _keeps_more(metric: Any) -> bool:
    is_wrapper = any(".wrappers." in kind.__module__ for kind in type(metric).__mro__)
    return is_wrapper and type(metric).__name__ not in _PLAIN_WRAPPERS


def _state(metric: Any) -> Dict[str, Any]:
    values = {name: _kept(getattr(metric, name)) for name in metric._defaults}
    return {"updates": metric._update_count, "values": values}


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_kept(each) for each in value] if isinstance(value, list) else value
