"""How a module lies on the IPUs of a replica, and which modules can begin a stage."""

from __future__ import annotations

import dataclasses
from typing import Any, Container, Dict, List, Mapping, Optional, Tuple

from torch import nn

from ipufit.errors import PartitionError, UnknownNameError, shown
from ipufit.utils.error_collector import ErrorCollector, whole_number

# How the names of the blocks begin that ipufit begins itself.
BLOCK = "ipufit "
# How a beginning is written that is no call of a module, but the return from its call.
AFTER = "after "
STRATEGIES = ("pipelined", "sharded", "serial_phased", "parallel_phased")


@dataclasses.dataclass(frozen=True)
class Partition:
    """Stages of a module and the IPUs of a replica that they lie on.

    Attributes:
        begins: modules that begin a stage, by name, with the stage's number, in the order of
            definition; "after " before a name means what runs once that module has returned. What
            runs before the first is of stage 0. Stages without any hold parts of serialised
            layers, which begin them. Empty where the module itself says it, with
            ``poptorch.Block`` and the like.
        stages: how many; phases of a phased strategy. Of a module that divides itself it is the
            number of IPUs until the first micro-batch is known.
        strategy: "pipelined", "sharded", "serial_phased" or "parallel_phased".
        is_chosen: whether the user named the strategy; otherwise one that does not fit the batches
            of an inference gives way to "sharded".
        poptorch_strategy: an object of PopTorch's instead, as the user made it, or None.
        ipus: IPUs of one replica.
        is_automatic: whether ipufit divides the module, which it does when it knows a micro-batch;
            until then ``begins`` is empty.
        places: the IPU of each stage where one goes back to an earlier IPU, for a weight that is
            there; empty where every stage has an IPU of its own, or phases take turns.
    """

    begins: Tuple[Tuple[str, int], ...]
    stages: int
    strategy: str
    is_chosen: bool
    ipus: int
    poptorch_strategy: Any = None
    is_automatic: bool = False
    places: Tuple[int, ...] = ()

    def ipu_of(self, stage: int) -> int:
        """The IPU of a replica on which a stage or phase runs."""
        return self.places[stage] if self.places else stage % self.ipus

    @property
    def depth(self) -> int:
        """Stages, where they are more than IPUs since some go back; else 0."""
        return self.stages if self.stages > self.ipus and "phased" not in self.strategy else 0

    @property
    def is_open(self) -> bool:
        """True if it is yet to be found where the stages begin."""
        return self.is_automatic and self.stages > 1 and not self.begins

    @property
    def is_own(self) -> bool:
        """True if the module divides itself."""
        return self.ipus > 1 and not self.begins and not self.is_automatic

    @property
    def is_pipelined(self) -> bool:
        """True if stages work on different micro-batches at the same time."""
        return self.strategy == "pipelined"

    def pipelines(self, training: bool, device_iterations: object) -> bool:
        """Decide whether a job runs as a pipeline, or refuse it because it can't fill one.

        An inference that does not fill it runs one stage after the other, unless the user named
        the strategy.
        """
        if training or self.is_chosen or not isinstance(device_iterations, int):
            return self.is_pipelined
        return self.is_pipelined and device_iterations >= self.stages

    @property
    def unit(self) -> str:
        """Word for a part in messages."""
        return "phase" if "phased" in self.strategy else "stage"

    def first(self) -> Dict[int, str]:
        """Map each stage to the module that begins it."""
        begins_by_stage: Dict[int, str] = {}
        for name, stage in self.begins:
            begins_by_stage.setdefault(stage, name)
        return begins_by_stage

    def describe(self) -> str:
        """Strategy and beginnings, in one line."""
        if self.is_open:
            how = "divided once the first micro-batch is known"
            return f"{self.strategy} over {self.stages} stages, {how}"
        if not self.begins:
            count = f" in {self.stages} stages" if self.stages != self.ipus else ""
            return f"{self.strategy} over {self.ipus} IPUs{count} by the module's own blocks"
        unit, first = self.unit, self.first()
        begins = "; ".join(
            f"{unit} {stage} {'' if name.startswith(AFTER) else 'from '}{name}{self.where(stage)}"
            for stage, name in first.items()
        )
        cut = [str(stage) for stage in range(1, self.stages) if stage not in first]
        if cut:
            many = "s" if len(cut) > 1 else ""
            begins += f"; {unit}{many} {', '.join(cut)} from parts of serialised layers"
        ipus = f" on {self.ipus} IPUs" if self.places else ""
        origin = " found by ipufit" if self.is_automatic else ""
        return f"{self.strategy} over {self.stages} {unit}s{ipus}{origin}: {begins}"

    def where(self, stage: int) -> str:
        """Name the IPU of a stage where it is not the stage's number."""
        has_own = not self.places or self.places[stage] == stage
        return "" if has_own else f" on IPU {self.places[stage]}"


@dataclasses.dataclass(frozen=True)
class Partitions:
    """Partitions of a module for training and for inference; None for one IPU.

    Attributes:
        training, inference: how the module lies on IPUs.
        is_ipus_set: whether the user has divided the module or set how many IPUs a replica has;
            otherwise the module's own blocks say it when it runs.
    """

    training: Optional[Partition] = None
    inference: Optional[Partition] = None
    is_ipus_set: bool = False

    def of(self, training: bool) -> Optional[Partition]:
        """Choose the partition of training or of inference."""
        return self.training if training else self.inference

    @property
    def open(self) -> Optional[Partition]:
        """Partition of training or inference where the stages are yet to be found; else None."""
        both = (self.training, self.inference)
        return next((p for p in both if p is not None and p.is_open), None)

    def with_stages(
        self, begins: Tuple[Tuple[str, int], ...], places: Tuple[int, ...]
    ) -> Partitions:
        """Fill in the stages that were yet to be found."""
        training, inference = (
            dataclasses.replace(p, begins=begins, stages=len(places) or p.ipus, places=places)
            if p is not None and p.is_automatic and p.ipus > 1
            else p
            for p in (self.training, self.inference)
        )
        return dataclasses.replace(self, training=training, inference=inference)

    def replaced(self, training: bool, partition: Optional[Partition]) -> Partitions:
        """Put another partition in the place of that of training or of inference."""
        if training:
            return dataclasses.replace(self, training=partition)
        return dataclasses.replace(self, inference=partition)

    def marks(self) -> Dict[str, List[str]]:
        """By the names of modules, the stages that begin with them."""
        marks_by_name: Dict[str, List[str]] = {}
        train, infer = self.training, self.inference
        same = train is not None and infer is not None and train.begins == infer.begins
        for partition, when in ((train, ""), (None if same else infer, " of inference")):
            if partition is not None and partition.stages > 1:
                for stage, name in partition.first().items():
                    where = partition.where(stage)
                    text = f"{partition.unit} {stage}{when} begins{where}"
                    marks_by_name.setdefault(name, []).append(text)
        return marks_by_name

    def describe(self) -> List[str]:
        """Describe both partitions, a line each; what they share is said once."""
        if self.training is None and self.inference is None:
            return []
        alone = "the whole module on one IPU"
        both = (self.training, self.inference)
        train, infer = (p.describe() if p and p.stages > 1 else alone for p in both)
        lines = [f"Training: {train}.", f"Inference: {infer}."]
        inference = self.inference
        if inference is None or inference.stages == 1:
            return lines
        if inference.is_pipelined and not inference.is_chosen:
            lines[1] = (
                f"Inference: {infer}; sharded if an execution has less than {inference.stages} "
                "device iterations, which can't fill the pipeline."
            )
        return lines


NOT_DIVIDED = Partitions()


# The number of a stage, and the IPU that it is said to be on.
Placed = Tuple[int, Optional[int]]


def named_stages(
    module: nn.Module, stages: Mapping[object, object], argument: str
) -> Dict[str, Placed]:
    """The stage of each module, and its IPU where that is said, by the first of its names.

    Args:
        module: the user's module.
        stages: as the user wrote it; a whole number is the name of a module in a Sequential.
        argument: what the user calls it.

    Raises:
        PartitionError: a number that is none, a module that is never called, or one named twice.
        UnknownNameError: a name that the module has not; with all such faults.
    """
    first = {id(part): name for name, part in module.named_modules() if name}
    modules = {
        n: p for n, p in module.named_modules(remove_duplicate=False) if n and p is not module
    }
    faults = ErrorCollector()
    placed_by_path: Dict[str, Placed] = {}
    written: Dict[str, object] = {}
    for key, stage in stages.items():
        with faults.collect():
            name = str(key)
            inside = begun_by(name, modules)
            if inside not in modules:
                raise UnknownNameError(f"module in {argument}", name, first.values(), shown=5)
            _check_called(modules[inside], inside, argument)
        with faults.collect():
            placed = _placed(stage, f"{argument}[{key!r}]")
            if inside in modules:
                path = name[: len(name) - len(inside)] + first[id(modules[inside])]
                if placed_by_path.setdefault(path, placed) != placed:
                    raise PartitionError(
                        f"{argument} must give a module one stage, but {written[path]!r} and "
                        f"{key!r} are the same module, got {stages[written[path]]} and {stage}. "
                        "Leave one out."
                    )
                written.setdefault(path, key)
    faults.raise_all()
    return placed_by_path


def _placed(setting: Any, argument: str) -> Placed:
    """Read the number of a stage, alone or with its IPU.

    Raises:
        PartitionError: it is something else.
    """
    is_pair = isinstance(setting, (tuple, list))
    listed = setting if is_pair else [setting]
    numbers = [n for n in map(whole_number, listed) if n is not None and n >= 0]
    if is_pair and not len(numbers) == len(listed) == 2:
        raise PartitionError(
            f"{argument} as a pair must be the number of a stage and that of its IPU, both "
            f"from 0, got {shown(setting)}. Write for example (2, 0)."
        )
    if not numbers:
        raise PartitionError(
            f"{argument} must be the number of a stage, from 0, got {shown(setting)}."
        )
    stage, *ipu = numbers
    return stage, ipu[0] if ipu else None


def begun_by(name: str, names: Container[str]) -> str:
    """The module whose call, or return from it, begins a stage."""
    after = name not in names and name.startswith(AFTER)
    return name[len(AFTER) :] if after else name


def is_called(part: nn.Module) -> bool:
    """True of a module that can be called, no mere container of modules or parameters."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return not isinstance(part, containers) or type(part).forward is not nn.Module.forward


def _check_called(part: nn.Module, name: str, argument: str) -> None:
    if is_called(part):
        return
    child = first_called(part, name)
    cure = f"Name its first layer, {child!r}." if child else "Name a module that is called."
    raise PartitionError(
        f"{argument} must name modules that forward calls, got {name!r}, which is a "
        f"{type(part).__name__} and only contains others. {cure}"
    )


def first_called(part: nn.Module, name: str) -> Optional[str]:
    """The first module inside a container that can be called."""
    for key, child in part.named_children():
        path = f"{name}.{key}" if name else key
        called_path = path if is_called(child) else first_called(child, path)
        if called_path:
            return called_path
    return None
