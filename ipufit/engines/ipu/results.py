"""The results of micro-batches as what an execution hands back."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.batch import Mode
from ipufit.core.logged_values import LogRule, merge_rules
from ipufit.core.train_config import outputs_wanted
from ipufit.engines.ipu.executable import Result
from ipufit.engines.program import ExecutionResult, ProgramSpec
from ipufit.utils import tree

__all__ = ["anchors_of"]


def anchors_of(
    results: Sequence[Result],
    spec: ProgramSpec,
    settings: Mapping[str, float],
) -> ExecutionResult:
    """Put the results of the micro-batches of an execution together.

    Args:
        results: of each micro-batch, in stream order.
        spec: which outputs are wanted.
        settings: what the program says of itself.
    """
    outputs, places = _outputs(results, spec)
    has_loss = spec.mode is not Mode.PREDICT
    logged: List[Dict[str, float]] = []
    rules: Dict[str, LogRule] = {}
    if any(result.reported.rules for result in results):
        logged = [_logged(result) for result in results]
        for result in results:
            rules = merge_rules(rules, result.reported.rules)
    counted = any(result.reported.counted for result in results)
    return ExecutionResult(
        torch.tensor([r.numbers[0] for r in results] if has_loss else [], dtype=torch.float64),
        outputs,
        places,
        _column(results, 1) if counted else None,
        logged,
        rules,
        dict(settings),
    )


def _logged(result: Result) -> Dict[str, float]:
    first = 2 if result.reported.counted else 1
    return dict(zip(result.reported.rules, result.numbers[first:]))


def _column(results: Sequence[Result], place: int) -> Tensor:
    return torch.tensor([result.numbers[place] for result in results], dtype=torch.float64)


def _outputs(results: Sequence[Result], spec: ProgramSpec) -> Tuple[List[Any], List[int]]:
    if not spec.want_outputs:
        return [], []
    if spec.mode is not Mode.TRAIN:
        return [result.outputs for result in results], list(range(len(results)))
    plan, mode = spec.plan, spec.config.output_mode
    if mode.kind == "sum":
        return [
            _sum([result.outputs for result in results[replica :: plan.replicas]])
            for replica in range(min(plan.replicas, len(results)))
        ], []
    places = outputs_wanted(mode, len(results), plan.own_micro_batches_per_update, plan.replicas)
    return [results[place].outputs for place in places], places


def _sum(outputs: Sequence[Any]) -> Any:
    """Added up; a smaller last micro-batch adds to the rows that it has."""
    leaves, structure = tree.flatten(outputs[0])
    totals = [_to_add_to(leaf) for leaf in leaves]
    for each in outputs[1:]:
        for total, leaf in zip(totals, tree.flatten(each)[0]):
            if isinstance(total, Tensor):
                rows = total[: leaf.shape[0]] if leaf.dim() else total
                rows.add_(leaf)
    return tree.unflatten(totals, structure)


def _to_add_to(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    is_number = leaf.is_floating_point() or leaf.is_complex()
    return leaf.clone() if is_number else leaf.to(torch.int64, copy=True)
