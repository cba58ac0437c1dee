"""The batch algebra: how samples become micro-batches, updates and executions.

Sample ``i`` of micro-batch ``(it, a, r)`` stands at ``((it*ga + a)*R + r)*mb + i`` in a combined
batch, and `Plan.shape` is the one place that says so. `Plan.make` is where arguments are refused.
"""

from __future__ import annotations

import dataclasses
import operator
import textwrap
from dataclasses import dataclass
from functools import partial
from typing import Iterator, List, NamedTuple, Optional, SupportsIndex, Tuple

from ipufit.core.plan_checks import Checks, round_up

__all__ = ["Place", "Plan", "Tail"]


class Place(NamedTuple):
    """Where one sample of a combined batch is worked on. Every part counts from 0."""

    iteration: int
    accumulation: int
    replica: int
    position: int


@dataclass(frozen=True)
class Tail:
    """Rest of an epoch after its full executions, which runs as one smaller execution."""

    samples: int
    updates: int
    micro_batches: int
    last_update_size: int
    last_micro_batch_size: int


@dataclass(frozen=True)
class Plan:
    """How much work one call of the program does, and what that makes of an epoch.

    Build it with `Plan.make`, which checks the arguments; the constructor checks nothing. In
    inference an "update" is one device iteration: one micro-batch on every replica.

    Attributes:
        micro_batch_size: samples that one replica sees at once; the loader's ``batch_size``.
        gradient_accumulation: micro-batches summed on a replica before one update; 1 in inference.
        replicas: copies of the model, in each process.
        device_iterations: updates per execution; forward passes per execution in inference.
        stages: IPUs that share one replica.
        pipelined: whether they work on different micro-batches at the same time.
        processes: how many work together, each with `replicas` replicas and IPUs of its own.
        process: which of them this is, from 0.
        reserved_ipus: IPUs taken from the machine; more than `ipus` only after rounding up.
        samples: samples that the loader delivers per epoch; None if nobody knows (a stream).
        dropped: samples that a loader with ``drop_last=True`` leaves out; not part of `samples`.
        training: False for evaluate and predict.
        fixed_updates: updates of every epoch where ``steps_per_epoch`` (or ``steps``) fixes them;
            None if the data does.
        depth: stages of the pipeline where one goes back to an earlier IPU, so that there are more
            than IPUs; otherwise 0.
    """

    micro_batch_size: int
    gradient_accumulation: int
    replicas: int
    device_iterations: int
    stages: int
    reserved_ipus: int
    samples: Optional[int] = None
    dropped: int = 0
    training: bool = True
    fixed_updates: Optional[int] = None
    pipelined: bool = False
    processes: int = 1
    process: int = 0
    depth: int = 0

    @classmethod
    def make(
        cls,
        *,
        micro_batch_size: SupportsIndex,
        ipus: Optional[SupportsIndex] = None,
        device_iterations: SupportsIndex = 1,
        gradient_accumulation: SupportsIndex = 1,
        stages: SupportsIndex = 1,
        samples: Optional[SupportsIndex] = None,
        dropped: SupportsIndex = 0,
        training: bool = True,
        auto_round_ipus: bool = False,
        fixed_updates: Optional[SupportsIndex] = None,
        pipelined: bool = False,
        processes: int = 1,
        process: int = 0,
        depth: int = 0,
    ) -> Plan:
        """Check the arguments and build the plan.

        Args:
            ipus: the number of IPUs of each process, its replicas together; None means one replica.
            pipelined: whether the stages are a pipeline, which needs ``2 * stages - 1``
                micro-batches per update when training and ``stages`` per execution otherwise.
            auto_round_ipus: reserve the next power of two and leave the rest idle, where ``ipus``
                is not a power of two.
            depth: stages of the pipeline where one goes back to an earlier IPU; 0 for as many as
                ``stages``, the IPUs of a replica.
        Raises:
            PlanError: with all faults, and a suggestion that this function accepts.

        >>> plan = Plan.make(micro_batch_size=8, ipus=4, gradient_accumulation=2, samples=1000)
        >>> plan.replicas, plan.update_size, plan.updates_per_epoch
        (4, 64, 16)
        >>> Plan.make(micro_batch_size=8, ipus=3)
        Traceback (most recent call last):
            ...
        ipufit.errors.PlanError: `ipus`, the total number of IPUs, must be a power of two, got 3. \
Try 2 or 4, or auto_round_ipus=True to reserve 4 and leave 1 idle.
        """
        check = Checks()
        rounding = check.flag("auto_round_ipus", auto_round_ipus)
        stages = check.count("stages", stages)
        total = check.ipus(ipus, stages, rounding)
        filling = (depth or stages) if pipelined else 1
        accumulation = check.accumulation(gradient_accumulation, training, filling)
        iterations = check.iterations(device_iterations, training, filling)
        if samples is not None:
            samples = check.count("samples", samples, least=0)
        if fixed_updates is not None:
            fixed_updates = check.count("fixed_updates", fixed_updates)
        processes = check.count("processes", processes)
        rule = f"a whole number below processes={processes}"
        process = check.number("process", process, rule, lambda n: [min(max(n, 0), processes - 1)])
        plan = cls(
            micro_batch_size=check.count("micro_batch_size", micro_batch_size),
            gradient_accumulation=accumulation,
            replicas=total // stages,
            device_iterations=iterations,
            stages=stages,
            reserved_ipus=round_up(total),
            samples=samples,
            dropped=check.count("dropped", dropped, least=0),
            training=training,
            fixed_updates=fixed_updates,
            pipelined=pipelined,
            processes=processes,
            process=process,
            depth=0 if depth == stages else depth,
        )
        check.raise_faults()
        return plan

    @property
    def ipus(self) -> int:
        """IPUs that work."""
        return self.replicas * self.stages

    @property
    def idle_ipus(self) -> int:
        """IPUs that are reserved and do nothing."""
        return self.reserved_ipus - self.ipus

    @property
    def all_replicas(self) -> int:
        """Replicas of all processes."""
        return self.replicas * self.processes

    @property
    def micro_batches_per_update(self) -> int:
        """Micro-batches of one full update, on all replicas together."""
        return self.gradient_accumulation * self.all_replicas

    @property
    def own_micro_batches_per_update(self) -> int:
        """Micro-batches of an update that this process computes."""
        return self.gradient_accumulation * self.replicas

    def owner(self, number: int) -> int:
        """The process that computes the micro-batch at a place of an update, or of a stream."""
        return number % self.all_replicas // self.replicas

    def own_before(self, number: int) -> int:
        """How many of the first micro-batches of a stream this process computes."""
        turns, rest = divmod(number, self.all_replicas)
        return turns * self.replicas + max(
            0, min(self.replicas, rest - self.process * self.replicas)
        )

    @property
    def alone(self) -> Plan:
        """Make the plan of this process as if there were no other."""
        return dataclasses.replace(self, processes=1, process=0)

    def updates_in(self, micro_batches: int) -> int:
        """How many updates so many micro-batches make, the last of which may be smaller."""
        return -(-micro_batches // self.micro_batches_per_update)

    @property
    def micro_batches_per_execution(self) -> int:
        """Micro-batches of one full execution, on all replicas together."""
        return self.device_iterations * self.micro_batches_per_update

    @property
    def update_size(self) -> int:
        """Samples of one full update."""
        return self.micro_batch_size * self.micro_batches_per_update

    @property
    def combined_batch_size(self) -> int:
        """Samples of one full execution."""
        return self.micro_batch_size * self.micro_batches_per_execution

    @property
    def micro_batches_per_epoch(self) -> Optional[int]:
        """Micro-batches of an epoch, a smaller last one included; None for a stream."""
        if self.samples is None and self.fixed_updates is not None:
            return self.fixed_updates * self.micro_batches_per_update
        return _parts_if_known(self.samples, self.micro_batch_size)

    @property
    def updates_per_epoch(self) -> Optional[int]:
        """Updates of an epoch, a smaller last one included; None for a stream."""
        if self.fixed_updates is not None:
            return self.fixed_updates
        return _parts_if_known(self.samples, self.update_size)

    @property
    def executions_per_epoch(self) -> Optional[int]:
        """Executions of an epoch, the tail included; None for a stream."""
        if self.fixed_updates is not None:
            return _parts(self.fixed_updates, self.device_iterations)
        return _parts_if_known(self.samples, self.combined_batch_size)

    @property
    def full_executions_per_epoch(self) -> Optional[int]:
        """Executions of an epoch that have all their samples; None for a stream."""
        if self.samples is None and self.fixed_updates is not None:
            return self.fixed_updates // self.device_iterations
        return None if self.samples is None else self.samples // self.combined_batch_size

    @property
    def tail(self) -> Optional[Tail]:
        """Rest after the full executions; None if nothing is left, and for a stream."""
        left = (self.samples or 0) % self.combined_batch_size
        if left == 0:
            return None
        return Tail(
            samples=left,
            updates=_parts(left, self.update_size),
            micro_batches=_parts(left, self.micro_batch_size),
            last_update_size=left % self.update_size or self.update_size,
            last_micro_batch_size=left % self.micro_batch_size or self.micro_batch_size,
        )

    @property
    def shape(self) -> Tuple[int, int, int, int]:
        """How a combined batch unfolds: iterations, accumulation, replicas, micro-batch size.

        The order is `Place`'s: the iteration changes slowest, the position fastest.
        """
        return (
            self.device_iterations,
            self.gradient_accumulation,
            self.all_replicas,
            self.micro_batch_size,
        )

    def place(self, index: int) -> Place:
        """Where sample ``index`` of a combined batch is worked on.

        >>> plan = Plan.make(micro_batch_size=8, ipus=4, gradient_accumulation=2)
        >>> plan.place(37)
        Place(iteration=0, accumulation=1, replica=0, position=5)
        >>> plan.index(*plan.place(37))
        37
        """
        rest = _inside("index in the combined batch", index, self.combined_batch_size)
        parts: List[int] = []
        for size in reversed(self.shape):
            rest, part = divmod(rest, size)
            parts.append(part)
        return Place(*reversed(parts))

    def index(self, iteration: int, accumulation: int, replica: int, position: int) -> int:
        """The sample of a combined batch that is worked on at a place; the inverse of `place`."""
        index = 0
        parts = (iteration, accumulation, replica, position)
        for name, part, size in zip(Place._fields, parts, self.shape):
            index = index * size + _inside(name, part, size)
        return index

    def updates(self, samples: int) -> Iterator[Tuple[int, ...]]:
        """The sizes of the micro-batches, update by update, when so many samples run in order.

        >>> list(Plan.make(micro_batch_size=4, gradient_accumulation=2).updates(13))
        [(4, 4), (4, 1)]
        """
        for begin in range(0, samples, self.update_size):
            end = min(samples, begin + self.update_size)
            starts = range(begin, end, self.micro_batch_size)
            yield tuple(min(self.micro_batch_size, end - start) for start in starts)

    def explain(self) -> str:
        """The plan in words, in lines of at most 100 characters.

        >>> print(Plan.make(micro_batch_size=8, ipus=2, training=False, samples=100).explain())
        Plan for inference (evaluate, predict)
          micro-batch        8  samples that one replica sees at once; the loader's batch_size
          replicas           2  copies of the model, each with its own micro-batches
          stages             1  IPUs that share one replica
          device iterations  1  forward passes per execution, which is one call of the program
        One device iteration = 8 samples x 2 replicas = 16 samples.
        One execution = 16 samples x 1 device iteration = 16 samples.
        One epoch = 100 samples = 7 device iterations in 7 executions.
        The last 4 samples run as one smaller execution: 1 device iteration, 1 micro-batch.
        IPUs: 2 planned, 2 used (2 replicas x 1 stage), none idle.
        """
        lines = [*self._explain_execution(), *self._explain_epoch()]
        wrap = partial(textwrap.fill, width=100, subsequent_indent="    ", break_on_hyphens=False)
        return "\n".join(map(wrap, lines))

    def _explain_execution(self) -> Iterator[str]:
        calls = "updates" if self.training else "forward passes"
        spread = f"; {self.replicas} in each process" if self.processes > 1 else ""
        meanings = (
            ("micro-batch", "samples that one replica sees at once; the loader's batch_size"),
            ("gradient accumulation", "micro-batches that a replica sums before one update"),
            ("replicas", f"copies of the model, each with its own micro-batches{spread}"),
            self._explain_stages(),
            ("device iterations", f"{calls} per execution, which is one call of the program"),
        )
        di, ga, replicas, mb = self.shape
        product = [_n(mb, "sample"), _n(replicas, "replica")]
        rows = [(*row, n) for row, n in zip(meanings, (mb, ga, replicas, self.stages, di))]
        if self.training:
            yield "Plan for training"
            product.insert(1, f"{ga} accumulation")
        else:
            yield "Plan for inference (evaluate, predict)"
            del rows[1]
        names, counts = (max(len(str(row[i])) for row in rows) for i in (0, 2))
        for name, meaning, count in rows:
            yield f"  {name:{names}}  {count:>{counts}}  {meaning}"
        update = _n(self.update_size, "sample")
        yield f"One {self._update_word} = {' x '.join(product)} = {update}."
        execution = _n(self.combined_batch_size, "sample")
        yield f"One execution = {update} x {_n(di, 'device iteration')} = {execution}."

    def _explain_stages(self) -> Tuple[str, str]:
        if not self.depth:
            return "stages", f"IPUs that share one replica{', as a pipeline' * self.pipelined}"
        how = f"as a pipeline of {self.depth}" if self.pipelined else f"in {self.depth}"
        return "IPUs", f"which share one replica, {how} stages"

    def _explain_epoch(self) -> Iterator[str]:
        word = self._update_word
        if self.samples is None and self.fixed_updates is not None:
            executions = _n(_parts(self.fixed_updates, self.device_iterations), "execution")
            yield f"One epoch = {_n(self.fixed_updates, word)} in {executions}."
        elif self.samples is None:
            yield "One epoch = a stream of unknown length; what is left at its end runs as well."
        else:
            updates = _n(_parts(self.samples, self.update_size), word)
            executions = _n(_parts(self.samples, self.combined_batch_size), "execution")
            yield f"One epoch = {_n(self.samples, 'sample')} = {updates} in {executions}."
        if self.tail is not None:
            tail = self.tail
            run = "run" if tail.samples > 1 else "runs"
            work = f"{_n(tail.updates, word)}, {_n(tail.micro_batches, 'micro-batch')}"
            yield f"The last {_n(tail.samples, 'sample')} {run} as one smaller execution: {work}."
            if tail.micro_batches > 1:
                size = f"{_n(tail.last_update_size, 'sample')}, its last micro-batch"
                yield f"Its last {word} has {size} {tail.last_micro_batch_size}."
        elif self.samples:
            yield "Every execution is full."
        if self.training and self.fixed_updates is not None:
            yield "steps_per_epoch ends the epoch; the next one goes on with the data after it."
        if self.dropped:
            left_out = _n(self.dropped, "more sample")
            yield f"drop_last=True leaves out {left_out} per epoch; drop_last=False keeps all."
        share = f"{self.stages} IPUs" if self.depth else _n(self.stages, "stage")
        product = f"{_n(self.replicas, 'replica')} x {share}"
        idle = f"{self.idle_ipus or 'none'} idle"
        each = "IPUs of each process" if self.processes > 1 else "IPUs"
        yield f"{each}: {self.reserved_ipus} planned, {self.ipus} used ({product}), {idle}."
        if self.processes > 1:
            all_ipus = f"{self.processes * self.ipus} IPUs and {_n(self.all_replicas, 'replica')}"
            yield f"Processes: {self.processes}, with {all_ipus} in all; this is {self.process}."

    @property
    def _update_word(self) -> str:
        return "update" if self.training else "device iteration"


def _inside(name: str, value: int, size: int) -> int:
    number = operator.index(value)
    if not 0 <= number < size:
        raise IndexError(f"{name} must be 0 to {size - 1}, got {number}. Count from 0.")
    return number


def _parts(count: int, size: int) -> int:
    """How many parts of ``size`` hold ``count``, a smaller last one included."""
    return -(-count // size)


def _parts_if_known(count: Optional[int], size: int) -> Optional[int]:
    return None if count is None else _parts(count, size)


def _n(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"
