"""State that the programs of one embedded engine share, and the steps that it has traced."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn

from ipufit.core.batch import MicroBatch, Mode, copy_leaf
from ipufit.core.compile_arguments import AUTO, GRAPH, OFF, Backend
from ipufit.core.precision import (
    WithoutAutocast,
    autocast_state,
    computes_in_half,
    mixes_double,
    refuse_missing_half,
    try_out,
)
from ipufit.engines.embedded.cuda_graphs import GraphMaker
from ipufit.engines.embedded.execution import ExecutionOutputs, Transfer
from ipufit.engines.embedded.passes.select_kernels import Lowered, lower
from ipufit.engines.embedded.passes.torch_compile import compile_micro_batch
from ipufit.engines.embedded.traced_step import EagerStep, TracedStep
from ipufit.engines.embedded.training_state import CarriedState
from ipufit.engines.program import Engine, ExecutionResult, ProgramSpec
from ipufit.losses import Loss
from ipufit.tracing.capture import capture, carried_error
from ipufit.tracing.fingerprint import CodeReader, fingerprint, is_of_users
from ipufit.tracing.flat_storage import FlatBlock
from ipufit.tracing.grad_step import GradStep, MicroBatchStep, ModuleWithLoss
from ipufit.tracing.graph_analysis import Memories, is_repeated, peak_bytes
from ipufit.tracing.ipu_only import for_this_engine
from ipufit.tracing.recompute import recompute_layers
from ipufit.tracing.recording import GraphPlace, current_graph
from ipufit.tracing.untraced_random import reachable_generators, refuse_draws
from ipufit.tracing.validate import refuse_unrecordable
from ipufit.utils.console import warn_user
from ipufit.utils.random_operators import uses_random_numbers
from ipufit.utils.random_streams import Generators, isolated
from ipufit.utils.state import ValueSnapshot, device_of, same_values

if TYPE_CHECKING:
    from ipufit.engines.embedded.batching import Decision, Merger
    from ipufit.engines.embedded.inductor.store import Libraries

# Traced steps, and decisions about them, that are kept for later programs; the least recently used
# go first.
_KEPT = 64


class EngineContext(Engine):
    """Traces micro-batches, and carries from one program to the next what outlives it.

    Attributes:
        captures: number of recordings made so far.
        transfer: the way to the host; counts the copies.
        carried: state that a training program leaves to the next one.
        as_device: treat the host as a device of its own: look at losses after an execution, and
            keep in other memory what is to be there.
        tape: makes what captures work on a host that is treated as a device; None: nothing does.
        hints: marks for an IPU that were seen in forward.
        libraries: compiled updates that are loaded.
        recomputed: of the last training recording, the number of operators that run twice, and how
            many bytes its values take at most without and with that; None without recomputation.
    """

    def __init__(self) -> None:
        self.captures = 0
        self.transfer = Transfer()
        self.carried = CarriedState()
        self.as_device = False
        self.tape: Optional[Callable[[torch.device], GraphMaker]] = None
        self.hints: Dict[str, None] = {}
        self.recomputed: Optional[Tuple[int, int, int]] = None
        self.libraries: Libraries = {}
        self._traced: OrderedDict[Tuple[object, ...], TracedStep] = OrderedDict()
        self._decisions: OrderedDict[Tuple[object, ...], Decision] = OrderedDict()
        self._steps: Dict[Tuple[int, int], ModuleWithLoss] = {}

    def step_module(self, module: nn.Module, loss: Optional[Loss]) -> ModuleWithLoss:
        """The user's module and loss in one; always the same one for the same two."""
        key = (id(module), id(loss))
        if key not in self._steps:
            self._steps[key] = ModuleWithLoss(module, loss)
        return self._steps[key]

    def record(
        self,
        spec: ProgramSpec,
        example: MicroBatch,
        trained: Sequence[str],
        fixed: Sequence[str],
        state: Sequence[Tensor],
        layout: Optional[Callable[[Sequence[str]], Sequence[FlatBlock]]],
        step: ModuleWithLoss,
        bound: Sequence[str] = (),
    ) -> TracedStep:
        """Return what runs such micro-batches: a recording for their shapes, made if it is new.

        Where the program runs eagerly, it is the module itself, for all shapes of its structure.

        Args:
            spec: of the program.
            example: a micro-batch.
            trained, fixed, layout, step: as for a ``GradStep``.
            state: weights and buffers.
            bound: where the module runs eagerly beside recordings, names of the parameters that
                these have gradients of.
        """
        config = spec.config
        scaled = config.loss_scale is not None and layout is not None
        recompute = () if spec.run_eagerly or layout is None else config.recompute
        micro = (EagerStep if spec.run_eagerly else GradStep)(
            step,
            trained,
            fixed,
            example,
            spec.mode is not Mode.PREDICT,
            spec.want_outputs,
            layout,
            config.precision,
            scaled,
            spec.partition,
            recompute,
            spec.varies,
        )
        arguments = [*state, *example.leaves]
        if scaled:
            device = device_of(spec.module)
            arguments.append(torch.ones((), dtype=torch.float64, device=device))
        if isinstance(micro, EagerStep):
            if bound and layout is not None:
                micro.with_gradient, micro.blocks = tuple(bound), layout(bound)
            return self._try_eagerly(micro, arguments, device_of(spec.module))
        refuse_unrecordable(spec.module, example)
        layouts = [t.stride() if t.layout is torch.strided else t.layout for t in arguments]
        key: Tuple[object, ...] = (
            fingerprint(step)[0],
            spec.mode,
            spec.want_outputs,
            (config.jit, config.compiler),
            id(step),
            example.structure,
            tuple(trained),
            tuple(block.names for block in layout(trained)) if layout else (),
            tuple((t.shape, t.dtype, t.device) for t in arguments),
            tuple(layouts),
            tuple(parameter.requires_grad for parameter in step.parameters()),
            (config.precision, scaled, recompute, spec.divides_weights),
            autocast_state(state[0].device if state else torch.device("cpu")),
        )
        if key not in self._traced:
            names = micro.names if spec.divides_weights else None
            run, random, lowered, graph = self._make(
                micro,
                step,
                arguments,
                config.jit,
                recompute,
                names,
                spec.processes.is_distributed,
                config.compiler,
            )
            self.hints.update(micro.hints)
            # Recording may fill a cache, or import what forward needs.
            frozen, held = fingerprint(step)
            key = (frozen, *key[1:])
            self._traced[key] = TracedStep(run, lowered, micro, random, held, graph)
            if len(self._traced) > max(_KEPT, 4 * config.max_recordings):
                self._traced.popitem(last=False)
        self._traced.move_to_end(key)
        return self._traced[key]

    def _try_eagerly(
        self, micro: EagerStep, arguments: Sequence[Tensor], device: torch.device
    ) -> TracedStep:
        """Run the module itself on copies, to see outputs, and what a gradient reaches."""
        step = micro.step
        generators = Generators(reachable_generators(step))
        with self.timed(), step.preserve_attributes(), for_this_engine():
            try:
                with isolated(device), refuse_missing_half():
                    copies = list(map(copy_leaf, arguments))
                    micro(*copies)
            finally:
                generators.restore()
        self.hints.update(micro.hints)
        compared = zip(micro.names if micro.blocks else (), copies, arguments)
        micro.written = {name for name, now, before in compared if not same_values(now, before)}
        return TracedStep(micro, Lowered(micro, OFF, ""), micro, True, (), None)

    def merge(self, merger: Merger, replicas: Sequence[Mapping[str, Tensor]]) -> Decision:
        """Decide whether micro-batches run as larger batches.

        Args:
            merger: of them.
            replicas: buffers of each.
        """
        recorded, config = merger.recorded, merger.spec.config
        total = merger.spec.plan.own_micro_batches_per_update

        def make(
            merged: Callable[..., List[Tensor]], arguments: Sequence[Tensor]
        ) -> Tuple[Callable[..., List[Tensor]], Lowered]:
            step, several = recorded.micro.step, merger.spec.processes.is_distributed
            run, _, lowered, _ = self._make(
                merged, step, arguments, config.jit, (), several=several
            )
            return run, lowered

        key = (recorded, total, config.accumulation_dtype)
        if key not in self._decisions:
            self._decisions[key] = merger.decide(make, self.recording)
            if len(self._decisions) > max(_KEPT, 4 * config.max_recordings):
                self._decisions.popitem(last=False)
        self._decisions.move_to_end(key)
        return self._decisions[key].among(replicas, total)

    def _make(
        self,
        micro: Callable[..., List[Tensor]],
        step: ModuleWithLoss,
        arguments: Sequence[Tensor],
        jit: str,
        recompute: Sequence[str],
        divided: Optional[Sequence[str]] = None,
        several: bool = False,
        compiler: Optional[Backend] = None,
    ) -> Tuple[Callable[..., List[Tensor]], bool, Lowered, Optional[fx.GraphModule]]:
        """Trace a function; return what runs, whether it draws random numbers, how, and the graph.

        Args:
            divided: names of the first arguments, where these are weights in parts.
            several: whether gradients go to other processes.
            compiler: compiles the graph; None: it runs by torch's own operators.
        """
        # What is merged has been looked at by itself.
        places = CodeReader(step).places if isinstance(micro, MicroBatchStep) else ()
        snapshot = ValueSnapshot(step.owners(), places, is_users=is_of_users)
        with self.recording(), step.preserve_attributes(notes_writes=True) as changed:
            record = functools.partial(capture, micro, arguments)
            with for_this_engine(), refuse_draws(step, record):
                graph = record()
            if recompute:
                before, repeated = peak_bytes(graph), recompute_layers(graph)
                self.recomputed = (repeated, before, peak_bytes(graph))
            titles = snapshot.changed()
        self.captures += 1
        if isinstance(micro, MicroBatchStep):
            memories = Memories(graph.graph)
            for index in memories.changed:
                micro.written.update(micro.names[index : index + 1])
            written = memories.constants
            if written or (titles and not self._is_repeated(micro, arguments)):
                ids = {id(getattr(graph, name)) for name in written}
                titles += [title for title, tensor in snapshot.tensors() if id(tensor) in ids]
                snapshot.restore()
                raise carried_error(titles)
        if changed:
            warn_user(
                f"forward sets {', '.join(sorted(set(changed)))}, but it runs only once, to be "
                "recorded: the loss of the same step reads the new value, but for all else the "
                "attribute keeps its present one. To carry a value from one micro-batch to the "
                "next, register a buffer and change it in place; to run forward every time, use "
                "compile(..., run_eagerly=True).",
            )
        blocks = len(micro.blocks) if isinstance(micro, MicroBatchStep) else 0
        if divided is not None:
            from ipufit.engines.embedded.fsdp import ShardedStep

            kept = Lowered(ShardedStep(graph, divided, blocks), GRAPH, "")
            run = WithoutAutocast(kept.run, arguments)
            return run, uses_random_numbers(graph), kept, graph
        with self.recording():
            if compiler is not None:
                lowered = compile_micro_batch(compiler, graph, arguments)
            else:
                sums = blocks if several and blocks > 1 else 0
                may_change = jit == AUTO and not several
                lowered = lower(graph, arguments, jit, sums, may_change)
        run = WithoutAutocast(lowered.trial or lowered.run, arguments)
        if lowered.trial is not None:
            lowered.trial.caller = run
        values = [node.meta.get("val") for node in graph.graph.nodes]
        on_cpu = arguments[-1].device.type == "cpu"
        if (on_cpu and computes_in_half(values)) or mixes_double(arguments):
            try_out(run, arguments)
        return run, uses_random_numbers(graph), lowered, graph

    def _is_repeated(self, micro: MicroBatchStep, arguments: Sequence[Tensor]) -> bool:
        """Tell whether a micro-batch computes the same once more, with what the first has set."""
        calls: List[List[fx.Node]] = []

        def call_twice(*tensors: Tensor) -> Sequence[Tensor]:
            for inputs in (tensors[: len(arguments)], tensors[len(arguments) :]):
                place = GraphPlace(current_graph())
                micro(*inputs)
                calls.append(place.nodes_after())
            return ()

        with self.recording(), micro.step.preserve_attributes(), for_this_engine():
            try:
                return is_repeated(capture(call_twice, [*arguments, *arguments]), *calls)
            except Exception:  # Such as a graph that was followed back before.
                return False

    def fetch(
        self, results: ExecutionOutputs, settings: Optional[Mapping[str, float]] = None
    ) -> Tuple[ExecutionResult, List[bool]]:
        """Bring the results of an execution to the host, in one copy.

        Args:
            results: the results, on the device.
            settings: what the program says of itself.
        Returns:
            The results, and for each update whether its gradient was finite.
        """
        with self.clock.during("anchors"):
            return results.anchors(self.transfer.to_host(results.tensors()), settings)
