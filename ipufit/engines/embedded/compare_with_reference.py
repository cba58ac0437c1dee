"""One micro-batch through the recorded program, compared with a reference, value by value."""

from __future__ import annotations

import collections
import copy
import dataclasses
import difflib
import operator
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.batch import MicroBatch
from ipufit.core.precision import WithoutAutocast
from ipufit.core.train_config import Precision
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.engines.embedded.training_state import TrainingState
from ipufit.errors import ConfigurationError
from ipufit.tracing.comparison import Comparison, Difference, Tolerance, distance
from ipufit.tracing.grad_step import public_name
from ipufit.tracing.interpreter import InstrumentedInterpreter, Listener, OperatorCall
from ipufit.tracing.source_map import CallRecorder, Origin, TracedCall, trace_calls
from ipufit.utils import tree

_DETACH = "aten.detach.default"
_NOWHERE = Origin()


@dataclasses.dataclass
class ReferenceComparison:
    """Holds a recording against the module that it was made of.

    Args:
        live: the state; it stays as it is.
        recorded: what runs a micro-batch.
        batch: the micro-batch.
        seed: starts its random numbers.
        tolerance: what is no difference.
    """

    live: TrainingState
    recorded: TracedStep
    batch: MicroBatch
    seed: Callable[[], None]
    tolerance: Tolerance
    found: List[Difference] = dataclasses.field(default_factory=list)

    def run(self, reference: str) -> Comparison:
        """Compare everything.

        Args:
            reference: "eager", or "float64" for the same in double precision.

        Raises:
            ConfigurationError: there is no recording, or random numbers that double precision
                would draw otherwise.
        """
        recorded = self.recorded
        if recorded.graph is None:
            raise ConfigurationError(
                "compare compares the recorded program with the module, but run_eagerly=True "
                "records none. Compile without it."
            )
        if reference == "float64" and recorded.random:
            raise ConfigurationError(
                "reference='float64' needs a module without random numbers, because they differ "
                "between dtypes, but this one draws some. Turn random layers off, such as "
                "dropout, or use reference='eager'."
            )
        arguments = self._arguments()
        eager, results, state = self._eagerly(reference == "float64")
        calls = trace_calls(recorded.micro, self.live.step, arguments)
        comparison = _NodeComparison(recorded.graph.graph, self._pairs(calls, eager), self._add)
        run = InstrumentedInterpreter(recorded.graph, [comparison]).run
        self.seed()
        traced_results = list(WithoutAutocast(run, arguments)(*arguments))
        self._add_results("", traced_results, arguments, results, state)
        self._add_lowered(traced_results, arguments)
        operators = [each for each in self.found if each.kind == "operator"]
        return Comparison(
            reference,
            tuple(each for each in self.found if not each.ok),
            dict(collections.Counter(each.kind for each in self.found)),
            max(operators, key=lambda each: each.relative, default=None),
            recorded.lowered.why,
        )

    def _arguments(self, dtype: Optional[torch.dtype] = None) -> List[Tensor]:
        """The state, of its own so that it may change, and the batch."""
        arguments = self.live.call_arguments(self.live.states[0], self.batch.leaves)
        return [_as(tensor, dtype).clone() for tensor in arguments]

    def _eagerly(self, double: bool) -> Tuple[List[TracedCall], List[Tensor], List[Tensor]]:
        """The operators of the reference, what it returned, and its state afterwards."""
        micro = self.recorded.micro
        if double:
            micro = copy.copy(micro)
            micro.precision = Precision()
        arguments = self._arguments(torch.float64 if double else None)
        calls = CallRecorder(self.live.step, keeps=True)
        self.seed()
        run: Callable[..., Sequence[Tensor]] = micro
        if double:
            run = WithoutAutocast(micro, arguments)
        with self.live.step.preserve_attributes(), calls.listed():
            results = list(run(*arguments))
        return calls.calls, results, arguments

    def _pairs(
        self, calls: Sequence[TracedCall], eager: Sequence[TracedCall]
    ) -> Dict[str, Tuple[TracedCall, TracedCall]]:
        """For each node that stands for a call, that call when recorded and when run eagerly."""
        # What only says that no gradient passes is in no graph.
        calls = [call for call in calls if call.operator != _DETACH]
        eager = [call for call in eager if call.operator != _DETACH]
        first, second = ([call.operator for call in each] for each in (calls, eager))
        blocks: Sequence[Tuple[int, int, int]] = [(0, 0, len(first))]
        if first != second:
            matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
            blocks = matcher.get_matching_blocks()
        pairs = {}
        for begin, other, size in blocks:
            for call, same in zip(calls[begin : begin + size], eager[other : other + size]):
                for name in call.nodes:
                    pairs[name] = (call, same)
        return pairs

    def _add(
        self,
        pair: Tuple[Tensor, Tensor],
        kind: str,
        name: str,
        origin: Origin = _NOWHERE,
        node: Optional[str] = None,
    ) -> None:
        """Measure a pair of tensors; those of an operator or a module come with their origin."""
        away = distance(*pair)
        difference = Difference(
            kind,
            name,
            away.absolute,
            away.relative,
            self.tolerance.of(pair[0].dtype, away.scale),
            origin.module,
            origin.kind,
            node,
            origin.is_backward,
            origin.file,
            origin.line,
            origin.source,
        )
        self.found.append(difference)

    def _add_results(
        self,
        kind: str,
        traced_results: Sequence[Tensor],
        own_state: Sequence[Tensor],
        results: Sequence[Tensor],
        state: Sequence[Tensor],
    ) -> None:
        """Loss, gradients and buffers; all of one kind, unless it is ""."""
        numbers, _, gradients = self.recorded.micro.split_results(results)
        traced_numbers, _, traced_gradients = self.recorded.micro.split_results(traced_results)
        for what, name, one, other in [
            ("loss", "loss", traced_numbers, numbers),
            *self._gradients(traced_gradients, gradients),
            *self._buffers(own_state, state),
        ]:
            prefix = f"{what} " if kind and what != "loss" else ""
            self._add((one, other), kind or what, f"{prefix}{name}")

    def _gradients(
        self, traced_flats: Sequence[Tensor], flats: Sequence[Tensor]
    ) -> Iterator[Tuple[str, str, Tensor, Tensor]]:
        for block, one, other in zip(self.live.storage.blocks, traced_flats, flats):
            for slot in block.slots:
                name = public_name(slot.name)
                yield "gradient", name, slot.view(one), slot.view(other)

    def _buffers(
        self, traced_state: Sequence[Tensor], other: Sequence[Tensor]
    ) -> Iterator[Tuple[str, str, Tensor, Tensor]]:
        names = {id(buffer): name for name, buffer in self.live.step.named_buffers()}
        buffers = set(names.values())
        for name, one, two in zip(self.recorded.micro.names, traced_state, other):
            if name in buffers:
                yield "buffer", public_name(name), one, two

    def _add_lowered(self, traced_results: Sequence[Tensor], own_state: Sequence[Tensor]) -> None:
        """Compare what really runs with the traced graph that it stands for."""
        arguments = self._arguments()
        self.seed()
        results = list(self.recorded.run(*arguments))
        self._add_results("lowering", results, arguments, traced_results, own_state)


def _as(tensor: Tensor, dtype: Optional[torch.dtype]) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


class _NodeComparison(Listener):
    """Holds the value of each node of a recorded graph against that of an eager run."""

    def __init__(
        self,
        graph: fx.Graph,
        pairs: Dict[str, Tuple[TracedCall, TracedCall]],
        add: Callable[..., None],
    ) -> None:
        self._pairs = pairs
        self._add = add
        # Of a call that left several nodes, the last one has its result.
        last: Dict[int, str] = {}
        for node in graph.nodes:
            if node.name in pairs and node.target is not operator.getitem:
                last[id(pairs[node.name][0])] = node.name
        self._last = set(last.values())

    def after(self, call: OperatorCall, result: object) -> None:
        """Compare the result of a node that stands for an eager call."""
        if call.node is not None and call.node.name in self._last:
            self._compare(call.node.name, result)

    def _compare(self, node: str, result: object) -> None:
        call, eager = self._pairs[node]
        pairs = list(zip(tree.tensors(result), eager.outputs))
        if not pairs or "empty" in call.operator:
            return
        worst = max(pairs, key=lambda pair: distance(*pair).absolute)
        self._add(worst, "operator", call.operator, eager.origin, node)
        for returned, place in eager.returned:
            if place < len(pairs):
                self._add(pairs[place], "module", returned.name, Origin(kind=returned.kind))
