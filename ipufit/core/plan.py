"""The batch algebra: how samples become micro-batches, updates and executions.

Sample ``i`` of micro-batch ``(it, a, r)`` stands at ``((it*ga + a)*R + r)*mb + i`` in a combined
batch, and `Plan.shape` is the one place that says so. `Plan.make` refuses bad arguments: every
fault at once, with the nearest valid value.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from functools import cached_property, partial
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, SupportsIndex, Tuple

from ipufit.errors import PlanError, shown
from ipufit.utils.console import fold
from ipufit.utils.error_collector import whole_number

# The arguments in the order in which their faults are told, in the words of who typed them.
_WORDS = {
    "micro_batch_size": "`batch_size` of the loader",
    "ipus": "`ipus`, the total number of IPUs,",
    "device_iterations": "`device_iterations`",
    "gradient_accumulation": "`gradient_accumulation`",
    "stages": "`stages`",
    "samples": "`samples`",
    "dropped": "`dropped`",
    "fixed_updates": "`fixed_updates`",
    "auto_round_ipus": "`auto_round_ipus`",
    "processes": "`processes`",
    "process": "`process`, which counts from 0,",
}


class Checks:
    """Collects faults; every check gives back a valid value, so that the next ones can go on."""

    def __init__(self) -> None:
        self.faults: Dict[str, str] = {}
        self.fixes: Dict[str, object] = {}

    def raise_faults(self) -> None:
        """Raise one PlanError with everything found, if anything was."""
        if self.faults:
            raise PlanError([self.faults[n] for n in _WORDS if n in self.faults], self.fixes)

    def fault(self, name: str, rest: str, **fix: object) -> None:
        """Note a fault of an argument, and the arguments that would mend it."""
        self.faults[name] = f"{_WORDS[name]} must be {rest}"
        self.fixes.update(fix)

    def number(
        self,
        name: str,
        value: object,
        rule: str,
        nearest: Callable[[int], List[int]],
        hint: str = "",
    ) -> int:
        """The value if ``nearest`` leaves it alone, otherwise a fault and the nearest valid one."""
        whole = whole_number(value)
        near = _near(value) if whole is None else [whole]
        valid = sorted({choice for n in near for choice in nearest(n)})
        if whole is not None and valid == [whole]:
            return whole
        best = min(valid, key=lambda choice: sum(abs(choice - n) for n in near))
        choices = " or ".join(map(str, valid)) + hint
        if whole is None:
            self.fault(name, f"{rule}. {_kind(value)}, write {choices}.", **{name: best})
        else:
            self.fault(name, f"{rule}, got {whole}. Try {choices}.", **{name: best})
        return best

    def count(self, name: str, value: object, least: int = 1) -> int:
        """Check that an argument is a whole number of at least ``least``."""
        rule = "a positive whole number" if least else "a whole number of at least 0"
        return self.number(name, value, rule, lambda n: [max(n, least)])

    def flag(self, name: str, value: object) -> bool:
        """True or False, nothing that only counts as one."""
        if not isinstance(value, bool):
            self.fault(name, f"a bool. {_kind(value)}, write True or False.", **{name: False})
        return value is True

    def accumulation(self, value: object, training: bool, pipeline: int = 1) -> int:
        """Check that a training pipeline of so many stages is filled; 1 in inference."""
        if training and pipeline > 1:
            least = 2 * pipeline - 1
            rule = (
                f"at least {least} to fill a training pipeline of {pipeline} stages, forward and "
                "backward"
            )
            return self.number("gradient_accumulation", value, rule, lambda n: [max(n, least)])
        if training:
            return self.count("gradient_accumulation", value)
        rule = "1 in evaluate and predict, which make no updates"
        return self.number("gradient_accumulation", value, rule, lambda n: [1])

    def iterations(self, value: object, training: bool, pipeline: int = 1) -> int:
        """Check that an inference pipeline of so many stages is filled."""
        if training or pipeline == 1:
            return self.count("device_iterations", value)
        rule = f"at least {pipeline} to fill a pipeline of {pipeline} stages"
        return self.number("device_iterations", value, rule, lambda n: [max(n, pipeline)])

    def ipus(self, value: object, stages: int, rounding: bool) -> int:
        """Check the total number of IPUs, and say where ``auto_round_ipus=True`` would help."""
        total = stages if value is None else whole_number(value)
        # No power of two is a multiple of three: then only rounding up can help.
        stuck = not rounding and stages != round_up(stages)
        rule = "a power of two" + (f" that stages={stages} divides" if stages > 1 else "")
        if rounding:
            rule = f"a multiple of stages={stages}" if stages > 1 else "a positive whole number"
        hint = ""
        if stuck:
            rule, hint = f"{rule} (there is none)", " with auto_round_ipus=True"
        if total is not None and total > 0 and total % stages == 0:
            reserved = round_up(total)
            idle = f"auto_round_ipus=True to reserve {reserved} and leave {reserved - total} idle"
            if stuck:
                came = total if value is not None else f"None, which means {total}"
                self.fault("ipus", f"{rule}, got {came}. Try {idle}.", auto_round_ipus=True)
                return total
            hint = f", or {idle}"
        if value is None:
            return stages
        if stuck:
            self.fixes["auto_round_ipus"] = True
        return self.number("ipus", value, rule, partial(_nearest_ipus, stages, rounding), hint)


def check_filling(accumulation: int, iterations: int, training: bool, stages: int) -> None:
    """Hold a plan against a pipeline whose number of stages was not known before.

    Args:
        accumulation: micro-batches of an update.
        iterations: device iterations.
        training: whether it trains.
        stages: of the forward pass.

    Raises:
        PlanError: the pipeline is not filled; with the smallest number that fills it.
    """
    check = Checks()
    check.accumulation(accumulation, training, stages)
    check.iterations(iterations, training, stages)
    check.raise_faults()


def _nearest_ipus(stages: int, rounding: bool, total: int) -> List[int]:
    """The valid totals around ``total``, itself alone if it is one.

    A power of two is a multiple of every smaller one. Where stages is not a power of two, multiples
    of it are offered, and the caller adds auto_round_ipus=True.
    """
    total = max(total, stages)
    if rounding or stages != round_up(stages):
        below = total // stages * stages
        return [below] if below == total else [below, below + stages]
    above = round_up(total)
    return [above] if above == total else [above // 2, above]


def round_up(count: int) -> int:
    """The power of two that is ``count`` or the next one above it."""
    return 1 << (count - 1).bit_length()


def _near(value: object) -> List[int]:
    """The whole numbers around what should have been an int; [1] where nothing says which."""
    try:
        number = float(value) if isinstance(value, (str, numbers.Real)) else math.nan
        return sorted({math.floor(number), math.ceil(number)})
    except (ValueError, OverflowError):
        return [1]


def _kind(value: object) -> str:
    if value is None:
        return "None is not allowed"
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return f"{shown(value)} is {article} {name}"


class Place(NamedTuple):
    """Place of a sample of a combined batch in the work of a program; all numbers count from 0.

    :meth:`ipufit.Plan.place` returns it.

    Attributes:
        iteration: update of the execution.
        accumulation: micro-batch of its replica in the update.
        replica: copy of the model that computes it.
        position: sample of the micro-batch.
    """

    iteration: int
    accumulation: int
    replica: int
    position: int


@dataclasses.dataclass(frozen=True)
class Tail:
    """Rest of an epoch after its full executions, which runs as one smaller execution.

    :attr:`ipufit.Plan.tail` is one.

    Attributes:
        samples: how many are left.
        updates: how many they make.
        micro_batches: how many they make, over all updates and replicas.
        last_update_size: samples of the last update.
        last_micro_batch_size: samples of the last micro-batch.
    """

    samples: int
    updates: int
    micro_batches: int
    last_update_size: int
    last_micro_batch_size: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Amount of work in one call of the program, and in an epoch.

    Build it with :meth:`make`, which checks the arguments; the constructor checks nothing. It is
    frozen. In inference an "update" is one device iteration: one micro-batch on every replica. See
    docs/plan.md.

    Attributes:
        micro_batch_size: samples that one replica sees at once; the loader's ``batch_size``.
        gradient_accumulation: micro-batches summed on a replica before one update; 1 in inference.
        replicas: copies of the model, in each process.
        device_iterations: updates per execution; forward passes per execution in inference.
        stages: IPUs that share one replica.
        pipelined: whether they work on different micro-batches at the same time.
        processes: how many work together, each with ``replicas`` replicas and IPUs of its own.
        process: which of them this is, from 0.
        reserved_ipus: IPUs taken from the machine; more than ``ipus`` only after rounding up.
        samples: samples that the loader delivers per epoch; None if nobody knows (a stream).
        dropped: samples that a loader with ``drop_last=True`` leaves out; not part of ``samples``.
        training: False for evaluate and predict.
        fixed_updates: updates of every epoch where ``steps_per_epoch`` (or ``steps``) fixes them;
            None if the data does.
        depth: stages of the pipeline where one goes back to an earlier IPU, so that there are more
            than IPUs; otherwise 0.
        batches: that the loader yields per epoch, for :meth:`explain` of a plan without
            ``samples``; None if nobody knows.
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
    batches: Optional[int] = dataclasses.field(default=None, compare=False)

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
            micro_batch_size: samples that one replica sees at once.
            ipus: the number of IPUs of each process, its replicas together; None means one replica.
            device_iterations: updates per execution; forward passes in inference.
            gradient_accumulation: micro-batches that a replica sums for one update; 1 in
                inference.
            stages: IPUs that share one replica.
            samples: samples of an epoch; None if nobody knows.
            dropped: samples that the loader leaves out.
            training: False for evaluate and predict.
            auto_round_ipus: reserve the next power of two and leave the rest idle, where ``ipus``
                is not a power of two.
            fixed_updates: updates of every epoch, whatever the data has; None if the data says it.
            pipelined: whether the stages are a pipeline, which needs ``2 * stages - 1``
                micro-batches per update when training and ``stages`` per execution otherwise.
            processes: how many processes work together.
            process: which of them this is, from 0.
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
        """IPUs of a process that work, which are ``replicas * stages``."""
        return self.replicas * self.stages

    @property
    def idle_ipus(self) -> int:
        """IPUs that are reserved and do nothing."""
        return self.reserved_ipus - self.ipus

    @cached_property
    def all_replicas(self) -> int:
        """Replicas of all processes."""
        return self.replicas * self.processes

    @cached_property
    def micro_batches_per_update(self) -> int:
        """Micro-batches of one full update, on all replicas of all processes."""
        return self.gradient_accumulation * self.all_replicas

    @cached_property
    def own_micro_batches_per_update(self) -> int:
        """Micro-batches of one full update that this process computes."""
        return self.gradient_accumulation * self.replicas

    def owner(self, number: int) -> int:
        """The process that computes the micro-batch at a place of an update, or of a stream.

        Args:
            number: the place, from 0.
        """
        return number % self.all_replicas // self.replicas

    def own_before(self, number: int) -> int:
        """Count those of the first micro-batches of a stream that this process computes.

        Args:
            number: how many of the first ones.
        """
        turns, rest = divmod(number, self.all_replicas)
        return turns * self.replicas + max(
            0, min(self.replicas, rest - self.process * self.replicas)
        )

    @property
    def alone(self) -> Plan:
        """This plan, as if there were no other process."""
        return dataclasses.replace(self, processes=1, process=0)

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
    def tail(self) -> Optional[Tail]:
        """Rest after the full executions; None if nothing is left, and for a stream.

        It is an ``ipufit.core.plan.Tail`` with ``samples``, ``updates``, ``micro_batches``,
        ``last_update_size`` and ``last_micro_batch_size``.
        """
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
        """Shape of a combined batch, (iterations, accumulation, replicas, micro-batch size).

        The order is that of :meth:`place`: the iteration changes slowest, the position fastest.
        """
        return (
            self.device_iterations,
            self.gradient_accumulation,
            self.all_replicas,
            self.micro_batch_size,
        )

    def place(self, index: int) -> Place:
        """Find the place where sample ``index`` of a combined batch is worked on.

        Args:
            index: of the sample, from 0.

        Returns:
            ``Place(iteration, accumulation, replica, position)``, each from 0.

        Raises:
            IndexError: the combined batch has no such sample.

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
        """The sample of a combined batch at a place of the work; the inverse of :meth:`place`.

        Args:
            iteration: device iteration, from 0.
            accumulation: micro-batch of the replica in the update, from 0.
            replica: from 0.
            position: of the sample in its micro-batch, from 0.

        Raises:
            IndexError: there is no such place.
        """
        index = 0
        parts = (iteration, accumulation, replica, position)
        for name, part, size in zip(Place._fields, parts, self.shape):
            index = index * size + _inside(name, part, size)
        return index

    def updates(self, samples: int) -> Iterator[Tuple[int, ...]]:
        """The sizes of the micro-batches, update by update, when so many samples run in order.

        Args:
            samples: how many.

        >>> list(Plan.make(micro_batch_size=4, gradient_accumulation=2).updates(13))
        [(4, 4), (4, 1)]
        """
        for begin in range(0, samples, self.update_size):
            end = min(samples, begin + self.update_size)
            starts = range(begin, end, self.micro_batch_size)
            yield tuple(min(self.micro_batch_size, end - start) for start in starts)

    def explain(self, columns: int = 100) -> str:
        """The plan in words.

        Args:
            columns: of the longest line.

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
        return fold("\n".join([*self._explain_execution(), *self._explain_epoch()]), columns)

    def _explain_execution(self) -> Iterator[str]:
        calls = "updates" if self.training else "forward passes"
        spread = f"; {self.replicas} in each process" if self.processes > 1 else ""
        meanings = (
            ("micro-batch", "samples that one replica sees at once; the loader's batch_size"),
            ("gradient accumulation", "micro-batches that a replica sums for one update"),
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
        updates, executions = self.updates_per_epoch, self.executions_per_epoch
        if updates is None or executions is None:
            epoch = "all batches of the data, whose number is unknown"
            if self.batches is not None:
                updates = _parts(self.batches, self.micro_batches_per_update)
                count = _n(_parts(updates, self.device_iterations), "execution")
                epoch = f"{_n(self.batches, 'batch')} = {_n(updates, word)} in {count}"
            yield f"One epoch = {epoch}; a smaller last {word} is used too."
        else:
            samples = "" if self.samples is None else f"{_n(self.samples, 'sample')} = "
            yield f"One epoch = {samples}{_n(updates, word)} in {_n(executions, 'execution')}."
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
            yield "steps_per_epoch ends the epoch; the next one continues with the data after it."
        if self.dropped:
            left_out = _n(self.dropped, "more sample")
            yield f"drop_last=True leaves out {left_out} per epoch; drop_last=False uses all."
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
    """Count the parts of ``size`` that hold ``count``, a smaller last one included."""
    return -(-count // size)


def _parts_if_known(count: Optional[int], size: int) -> Optional[int]:
    return None if count is None else _parts(count, size)


def _n(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"
