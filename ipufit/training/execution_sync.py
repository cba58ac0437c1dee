"""Exchange between the processes of a run in every execution."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterator, List, Optional, Sequence

import torch
from torch import Tensor

from ipufit.core.batch import CombinedBatch, split_by_update
from ipufit.core.logged_values import LogRule
from ipufit.core.outputs import SampleOutputs
from ipufit.core.plan import Plan
from ipufit.data.weights import has_weight, zero_update
from ipufit.engines.program import ExecutionResult, Program
from ipufit.errors import NonFiniteLossError, ProcessError
from ipufit.processes import Processes, common
from ipufit.utils import tree


@dataclasses.dataclass(eq=False)
class ExecutionSync:
    """One program in each process, which run the same executions.

    With one process everything but :meth:`run`, which only several need, is handed through.

    Attributes:
        processes: all of them.
        plan: of the executions.
        is_portioned: whether it is known what the others read.
        weighted: what training data is for, where its samples count by a weight each; else None.
    """

    processes: Processes
    plan: Plan
    is_portioned: bool
    weighted: Optional[str] = None

    def __post_init__(self) -> None:
        self._batches = 0

    def executions(self, batches: Iterator[CombinedBatch]) -> Iterator[CombinedBatch]:
        """Yield the executions of this process with the sizes of the shares of all others.

        Where data comes in parts of its own length, the epoch ends with the longest of them.
        """
        self._batches = 0
        if not self.processes.is_distributed or self.is_portioned:
            yield from batches
            return
        plan, group = self.plan, self.plan.own_micro_batches_per_update
        places: List[List[int]] = [[] for _ in range(plan.processes)]
        for place in range(plan.micro_batches_per_update):
            places[plan.owner(place)].append(place)
        batch: Optional[CombinedBatch] = CombinedBatch([])
        while True:
            if batch is not None:
                batch = next(batches, None)
            sizes = None if batch is None else [each.size for each in batch.micro_batches]
            told = self.processes.gather(sizes, "size of a part")
            if all(each is None for each in told):
                return
            count = max(-(-len(each) // group) for each in told if each)
            layout = [[0] * plan.micro_batches_per_update for _ in range(count)]
            for process, each in enumerate(told):
                for index, size in enumerate(each or ()):
                    update, within = divmod(index, group)
                    layout[update][places[process][within]] = size
            own = CombinedBatch([]) if batch is None else batch
            yield dataclasses.replace(own, layout=layout)

    def run(self, program: Program, batch: CombinedBatch) -> ExecutionResult:
        """One execution, and what it gave in all processes; outputs are those of this one.

        Raises:
            NonFiniteLossError: in all processes, if it is in one.
            ProcessError: they do not read the same order of samples.
        """
        if self.weighted is not None:
            self._refuse_zero_update(batch, self.weighted)
        lost: Optional[NonFiniteLossError] = None
        anchors = None
        try:
            anchors = program.run(batch)
        except NonFiniteLossError as error:
            if error.is_common:
                raise
            lost = error
        told = self.processes.gather(_numbers(batch.order, anchors, lost), "results")
        self._refuse_lost([each["lost"] for each in told], lost)
        refuse_other_order([each["order"] for each in told])
        assert anchors is not None
        return self._joined(anchors, batch, told)

    def _refuse_zero_update(self, batch: CombinedBatch, role: str) -> None:
        """Refuse an update of which no sample in any process has a weight, as one process would."""
        shares = batch.shares(self.plan)
        counts = list(map(any, split_by_update(map(has_weight, batch.micro_batches), shares)))
        told = self.processes.gather(counts, "weights of samples")
        for share, *seen in zip(shares, *told):
            first = self._batches
            self._batches += len(share.sizes)
            if not any(seen):
                raise common(zero_update(role, first, self._batches - 1))

    def _refuse_lost(self, told: Sequence[Any], own: Optional[NonFiniteLossError]) -> None:
        found = [each for each in told if each is not None]
        if not found:
            return
        message, update, value = min(found, key=lambda each: each[1])
        raise common(NonFiniteLossError(message, update, value)) from own

    def _joined(
        self, anchors: ExecutionResult, batch: CombinedBatch, told: Sequence[Dict[str, Any]]
    ) -> ExecutionResult:
        """The numbers of all micro-batches, in stream order."""
        order = self._in_order(batch)
        losses = [told[process]["losses"][index] for process, index in order]
        counts = None
        if any(each["counts"] is not None for each in told):
            counts = [told[process]["counts"][index] for process, index in order]
        logged, rules = [], {}
        for each in told:
            rules.update({name: LogRule(**rule) for name, rule in each["rules"].items()})
        if rules:
            logged = [told[process]["logged"][index] for process, index in order]
        return dataclasses.replace(
            anchors,
            losses=torch.tensor(losses, dtype=torch.float64),
            counts=None if counts is None else torch.tensor(counts, dtype=torch.float64),
            logged=logged,
            rules=rules,
        )

    def _in_order(self, batch: CombinedBatch) -> List[Any]:
        """For every micro-batch of the execution its process, and its index there."""
        assert batch.layout is not None
        plan = self.plan
        seen = [0] * plan.processes
        found = []
        for update in batch.layout:
            for place, size in enumerate(update):
                if size:
                    process = plan.owner(place)
                    found.append((process, seen[process]))
                    seen[process] += 1
        return found

    def share_buffers(self, program: Program) -> None:
        """The module's buffers become in all processes those of the first replica of all."""
        if self.processes.is_distributed:
            program.share_buffers()

    def outputs(self, batch: CombinedBatch, outputs: Sequence[object], like: object) -> List[Any]:
        """The outputs of all micro-batches, in stream order.

        Args:
            batch: of the execution.
            outputs: of the own ones.
            like: the outputs of one, for a process that has none.
        """
        if not self.processes.is_distributed:
            return list(outputs)
        order = self._in_order(batch)
        if isinstance(like, list):
            is_by_sample = any(isinstance(each, SampleOutputs) for each in outputs)
            if any(self.processes.gather(is_by_sample, "form of outputs")):
                entries = self.processes.gather(list(outputs), "outputs")
                return [SampleOutputs(entries[process][index]) for process, index in order]
        sizes: List[List[int]] = [[] for _ in range(self.plan.processes)]
        for (process, _), size in zip(order, (s for u in batch.layout or () for s in u if s)):
            sizes[process].append(size)
        leaves, structure = tree.flatten(like)
        columns = [tree.flatten(each)[0] for each in outputs]
        forms = self._row_shapes(columns)
        whole: List[List[object]] = []
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                whole.append([leaf] * len(order))
                continue
            # Elements one after the other: their micro-batches may differ in shape.
            own = [column[i].reshape(-1) for column in columns]
            joined = torch.cat(own) if own else torch.empty(0, dtype=leaf.dtype)
            shapes = [[(size, *rows[i]) for size, rows in zip(*each)] for each in zip(sizes, forms)]
            counts = [[torch.Size(shape).numel() for shape in each] for each in shapes]
            elements = self.processes.gather_rows(joined, list(map(sum, counts)))
            parts = [torch.split(each, count) for each, count in zip(elements, counts)]
            whole.append(
                [parts[process][index].reshape(shapes[process][index]) for process, index in order]
            )
        return [tree.unflatten(list(each), structure) for each in zip(*whole)]

    def _row_shapes(self, columns: Sequence[Sequence[object]]) -> List[List[List[List[int]]]]:
        """By process, micro-batch and leaf, the shape of a row; empty for what is no tensor."""
        shapes = [
            [list(leaf.shape[1:]) if isinstance(leaf, Tensor) else [] for leaf in column]
            for column in columns
        ]
        return self.processes.gather(shapes, "shapes of outputs")


def _numbers(
    order: int, anchors: Optional[ExecutionResult], lost: Optional[NonFiniteLossError]
) -> Dict[str, object]:
    """Return the numbers of an execution that one process sends to the others."""
    if anchors is None:
        assert lost is not None
        return {"order": order, "lost": [str(lost), lost.update, lost.value]}
    return {
        "order": order,
        "lost": None,
        "losses": anchors.losses.tolist(),
        "counts": None if anchors.counts is None else anchors.counts.tolist(),
        "logged": list(anchors.logged),
        "rules": {name: dataclasses.asdict(rule) for name, rule in anchors.rules.items()},
    }


def refuse_other_order(orders: Sequence[int]) -> None:
    """All processes go through the same samples.

    Args:
        orders: what tells the order of each from another one.

    Raises:
        ProcessError: they do not; in all of them.
    """
    for process, order in enumerate(orders):
        if order != orders[0]:
            text = (
                "all processes must use the same order of samples, of which each reads its part, "
                f"but process {process} has another order than process 0. Use the same seed in all "
                "of them, for the generator of the DataLoader or for your own sampler."
            )
            raise common(ProcessError(text))
