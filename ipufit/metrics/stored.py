"""States of metric objects as tensors, numbers and lists, and back."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import torch
from torch import Tensor, nn

from ipufit.errors import MetricError

__all__ = ["is_plain", "merge_states", "refuse_unjoined", "restore", "stored", "without_talk"]

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
    for each, member in zip(_declared(metric), state["metrics"]):
        for name, value in member["values"].items():
            now = getattr(each, name)
            if isinstance(now, Tensor) and isinstance(value, Tensor):
                value = value.to(now.device)
            setattr(each, name, list(value) if isinstance(value, list) else value)
        each._update_count = member["updates"]
        each._computed = None


def is_plain(metric: object) -> bool:
    """True if :func:`stored` takes all that the object keeps."""
    return bool(_declared(metric))


def refuse_unjoined(metric: object, shown: str, processes: int) -> None:
    """Make sure that what several processes have seen can be brought together.

    Raises:
        MetricError: nobody knows how.
    """
    if not _declared(metric):
        raise MetricError(
            f"each of {processes} processes sees a part of the samples, but nobody knows how to "
            f"join what {shown!r} ({type(metric).__name__}) has seen in each. Use a plain metric "
            "of torchmetrics, which says so, or a callable metric(prediction, target)."
        )


def merge_states(metric: object, states: Sequence[Dict[str, Any]], shown: str) -> Dict[str, Any]:
    """Merge the states that :func:`stored` returned in each process.

    States are joined as torchmetrics has declared it for each, by sum, maximum, minimum or one
    after another.

    Raises:
        MetricError: a mean of means, which does not tell how much each stands for.
    """
    members = []
    for index, each in enumerate(_declared(metric)):
        member_states = [state["metrics"][index] for state in states]
        updated = [part for part in member_states if part["updates"]]
        if len(updated) < 2:
            members.append((updated or member_states)[0])
            continue
        values = {
            name: _joined_value(each._reductions[name], [part["values"][name] for part in updated])
            for name in updated[0]["values"]
        }
        for name, value in values.items():
            if value is None:
                raise MetricError(
                    f"{shown!r} ({type(each).__name__}) keeps the mean {name!r} of what it has "
                    "seen, and the means of several processes do not tell how many samples each "
                    "stands for. Use a metric that keeps sums."
                )
        members.append({"updates": sum(part["updates"] for part in updated), "values": values})
    return {"metrics": members}


def _joined_value(reduction: Any, values: Sequence[Any]) -> Any:
    """One of several values of a state; None where they are unequal means."""
    if isinstance(values[0], list):
        return [each for value in values for each in value]
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    if getattr(reduction, "__name__", "") == "dim_zero_mean":
        return values[0] if bool((stacked == stacked[0]).all()) else None
    return stacked if reduction is None else reduction(stacked)


def without_talk(metric: object) -> None:
    """Keep torchmetrics from asking other processes by itself, at a time of its own."""
    for each in _declared(metric):
        each.sync_on_compute = each._to_sync = False


def _is_collection(metric: object) -> bool:
    return callable(getattr(metric, "keys", None)) and callable(getattr(metric, "values", None))


def _declared(metric: object) -> List[Any]:
    """List the torchmetrics in it; none if something in it keeps more than it declares."""
    modules = metric.modules() if isinstance(metric, nn.Module) else [metric]
    members = [each for each in modules if isinstance(getattr(each, "_defaults", None), dict)]
    if any(not hasattr(each, "_update_count") or _keeps_more(each) for each in members):
        return []
    return members


def _keeps_more(metric: object) -> bool:
    is_wrapper = any(".wrappers." in kind.__module__ for kind in type(metric).__mro__)
    return is_wrapper and type(metric).__name__ not in _PLAIN_WRAPPERS


def _state(metric: Any) -> Dict[str, Any]:
    values = {name: _kept(getattr(metric, name)) for name in metric._defaults}
    return {"updates": metric._update_count, "values": values}


def _kept(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_kept(each) for each in value] if isinstance(value, list) else value
