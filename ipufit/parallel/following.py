"""Following a forward pass through the stages of a partition, and what is checked on the way."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ipufit.errors import PartitionError
from ipufit.parallel.partition import BLOCK, Partition
from ipufit.parallel.serialized import Serialized
from ipufit.parallel.serializing import ipus_of

__all__ = ["followed"]


@contextlib.contextmanager
def followed(
    partition: Optional[Partition],
    module: nn.Module,
    on_begin: Callable[[int], None] = lambda stage: None,
) -> Iterator[None]:
    """Watch a forward pass of the module in the block, and check the order of stages.

    Args:
        partition: of the module; None for one IPU.
        module: the user's.
        on_begin: called with the number of every stage that begins, 0 at the start included.

    Raises:
        PartitionError: a stage runs after a later one; a module that begins one did not run;
            a parameter is used in two; or the module has blocks of its own that contradict it.
    """
    with _own_blocks(partition):
        if partition is None or not (partition.begins or ipus_of(module, module.training)):
            yield
            return
        walk = _Walk(partition, module, on_begin)
        # A hook for all modules: one of a module's own would switch off torch's fast paths.
        handle = register_module_forward_pre_hook(walk.on_call)
        if partition.begins:
            on_begin(0)
        try:
            yield
        finally:
            handle.remove()
        walk.check_end()


@contextlib.contextmanager
def _own_blocks(partition: Optional[Partition]) -> Iterator[None]:
    """Hold the blocks that the module enters against the partition."""
    standin = sys.modules.get("ipufit.poptorch._blocks")
    if standin is None:
        # Blocks of the SDK don't tell what they do; its own checks follow.
        yield
        return
    with standin.listened() as entered:
        yield
    if partition is not None and partition.begins:
        own = [name for name, _ in entered if not str(name).startswith(BLOCK)]
        if own:
            raise PartitionError(
                "a module is divided by its own blocks or by the arguments of compile, but it has "
                f"blocks, such as {own[0]!r}, and is divided by stages or layers_per_ipu too. Take "
                "its blocks away with poptorch.removeBlocks(module), or leave the arguments out."
            )
        return
    named = [ipu for _, ipu in entered if ipu is not None]
    ipus = partition.ipus if partition is not None else 1
    if named and 1 + max(named) != ipus:
        count = 1 + max(named)
        raise PartitionError(
            f"the module's own blocks put it on {count} IPU{'s' if count > 1 else ''}, but the "
            f"plan gives a replica {ipus}. Pass ipus_per_replica={count} to compile."
        )


class _Walk:
    """One forward pass, call by call."""

    def __init__(
        self, partition: Partition, module: nn.Module, on_begin: Callable[[int], None]
    ) -> None:
        self._begins = dict(partition.begins)
        self._module = module
        self._names = {id(part): name for name, part in module.named_modules()}
        self._on_begin = on_begin
        self._stage, self._last = 0, "the start"
        self._begun: List[str] = []
        self._called: Dict[str, Set[int]] = {}

    def on_call(self, part: nn.Module, args: Any) -> None:
        name = self._names.get(id(part))
        if name is None:
            return
        stage = self._begins.get(name)
        if stage is not None:
            self._enter(name, stage)
        if isinstance(part, Serialized) and part.parts_in(part.training).ipus:
            self._spread(name, part.parts_in(part.training).ipus)
        self._called.setdefault(name, set()).add(self._stage)

    def _enter(self, name: str, stage: int) -> None:
        again = " again" if name in self._begun else ""
        self._begun.append(name)
        if stage < self._stage:
            raise PartitionError(
                f"stages must run in the order of their numbers, but {name!r} of stage {stage} "
                f"runs{again} after {self._last!r} of stage {self._stage}. Give it stage "
                f"{self._stage} or later, or let forward call it earlier."
            )
        if stage > self._stage:
            self._on_begin(stage)
        self._stage, self._last = stage, name

    def _spread(self, name: str, ipus: Sequence[int]) -> None:
        """A layer whose parts begin blocks by themselves."""
        if ipus[0] < self._stage:
            raise PartitionError(
                f"stages must run in the order of their numbers, but {name!r} has parts on IPU "
                f"{ipus[0]} and runs after {self._last!r} of stage {self._stage}. Split it over "
                f"IPUs from {self._stage} on."
            )
        self._stage, self._last = ipus[-1], name

    def check_end(self) -> None:
        missing = [name for name in self._begins if name not in self._begun]
        if missing:
            raise PartitionError(
                f"every module that begins a stage must be called by forward, but {missing[0]!r} "
                "was not. Name a module that is called as module(...), not one whose parameters "
                "are used from outside."
            )
        used: Dict[int, Tuple[int, str]] = {}
        for name, part in self._module.named_modules(remove_duplicate=False):
            for key, parameter in part._parameters.items():
                for stage in self._stages_of(name, key) if parameter is not None else ():
                    full = f"{name}.{key}" if name else key
                    before, owner = used.setdefault(id(parameter), (stage, full))
                    if before != stage:
                        raise _tied(owner, before, full, stage)

    def _stages_of(self, name: str, key: str) -> List[int]:
        """The stages in which a module ran, or else the nearest one around it that did."""
        owner = self._module.get_submodule(name)
        places = owner.places(owner.training) if isinstance(owner, Serialized) else {}
        if key in places:
            return list(places[key])
        part: Optional[str] = self._names.get(id(owner), name)
        while part:
            if part in self._called:
                return sorted(self._called[part])
            part = part.rpartition(".")[0]
        return []


def _tied(owner: str, before: int, other: str, stage: int) -> PartitionError:
    who = f"{owner!r} is used" if owner == other else f"{owner!r} and {other!r} are one parameter,"
    return PartitionError(
        f"a parameter must be on one IPU, but {who} in stages {before} and {stage}. Put all its "
        f"uses into one stage, or give each its own copy: module.weight = torch.nn.Parameter("
        "module.weight.detach().clone())."
    )
