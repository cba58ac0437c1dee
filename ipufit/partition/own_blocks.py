"""Blocks that a module begins itself, compared with how it is to be divided.

``poptorch.BeginBlock``, ``Block`` and ``BlockFunction`` say on which IPU something runs, and a
strategy of PopTorch's may name them. Of the stand-in's it is seen which ones a forward pass enters;
those of the SDK don't tell, and its own checks follow. The stand-in reports every block it begins
to the recordings that are under way, and registers its class of blocks when it is imported; nothing
here knows the stand-in.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from typing import Any, Dict, Hashable, Iterator, List, Optional, Sequence, Tuple

from torch import nn

from ipufit.errors import PartitionError
from ipufit.partition.partition import BLOCK, Partition
from ipufit.utils.poptorch_sdk import sdk_kind


class UncountedError(PartitionError):
    """Blocks of the module's own take another number of IPUs than a replica has.

    Attributes:
        ipus: that the blocks take.
        stages: that the blocks make.
    """

    def __init__(self, text: str, ipus: int, stages: int) -> None:
        super().__init__(text)
        self.ipus = ipus
        self.stages = stages


class OwnBlocks:
    """Blocks that a forward pass enters, in order.

    Args:
        partition: as ``compile`` has it; None for one IPU.

    Attributes:
        can_hear: whether it is seen which blocks are entered.
        can_hear_all: whether there are no others, of the SDK.
    """

    def __init__(self, partition: Optional[Partition]) -> None:
        self._partition = partition
        self.can_hear = bool(BLOCK_CLASSES)
        sdk = sys.modules.get("poptorch")
        self.can_hear_all = sdk is None or sdk.__name__ != "poptorch"
        self._blocks = EnteredBlocks()
        self._placed: List[Tuple[str, Optional[int]]] = []
        self._numbers: Dict[str, int] = {}

    def recording(self) -> contextlib.AbstractContextManager[object]:
        """Record the blocks that are entered in this context."""
        return record_blocks(self._blocks)

    @property
    def is_left(self) -> bool:
        """True if the last block was left, and no other one entered."""
        return not self._blocks.is_active

    def entered(self) -> List[Tuple[str, Optional[int]]]:
        """Name and IPU of each one that ipufit has not begun itself, in order."""
        for name, ipu in self._blocks.entered[len(self._placed) :]:
            self._placed.append((str(name), self._ipu_of(str(name), ipu)))
        return [entry for entry in self._placed if not entry[0].startswith(BLOCK)]

    def _ipu_of(self, name: str, ipu: Optional[int]) -> Optional[int]:
        """Find the IPU of a block, as the strategy has it."""
        strategy = self._partition.poptorch_strategy if self._partition is not None else None
        if strategy is None or name.startswith(BLOCK):
            return ipu
        stage = strategy._block_map.get(name)
        if stage is not None and stage._ipu is not None:
            return int(stage._ipu)
        # Stages go by the order of the names, after what comes before all blocks.
        number = self._numbers.setdefault(name, 1 + len(self._numbers))
        if ipu is not None or "Phased" in type(strategy).__name__:
            return ipu
        if stage is not None:
            return int(stage._stage_id)
        automatic = getattr(strategy, "_auto_stage", None)
        return number if getattr(automatic, "name", "") == "AutoIncrement" else None

    def place(self) -> Optional[int]:
        """The IPU of the last block that was entered; None before the first."""
        blocks = self.entered()
        return (blocks[-1][1] or 0) if blocks else None

    def reopen(self, sdk: Any) -> None:
        """Go on with the last block if forward has left it: the loss has to be in one.

        Args:
            sdk: PopTorch.
        """
        if self.is_left and self._blocks.entered:
            name, ipu = self._blocks.entered[-1]
            sdk.Block.start(name, ipu_id=ipu)

    def stages(self) -> int:
        """Stages of a pipeline, as PopTorch counts them: changes of the IPU, and one.

        What comes before the first block is on IPU 0.
        """
        ipus = [0, *(ipu for _, ipu in self.entered() if ipu is not None)]
        return 1 + sum(before != after for before, after in zip(ipus, ipus[1:]))

    def check_entered(self) -> None:
        """Look at the names and IPUs after a forward pass.

        Raises:
            PartitionError: they contradict the partition.
        """
        blocks, partition = self.entered(), self._partition
        if partition is not None and partition.begins:
            if blocks:
                some = [f", such as {name!r}," for name, _ in blocks if name != "None"]
                named = (ipu for _, ipu in blocks if ipu is not None)
                raise PartitionError(
                    "a module is divided either by its own blocks or by arguments of compile, but "
                    f"it has blocks{some[0] if some else ''} and also stages or layers_per_ipu. "
                    "Remove its blocks with poptorch.removeBlocks(module), or leave the arguments "
                    "out; with layers_per_ipu=[-1] in a config, pass "
                    f"ipus_per_replica={1 + max(named, default=partition.ipus - 1)}."
                )
            return
        if partition is not None and partition.poptorch_strategy is not None:
            _check_names(partition.poptorch_strategy, [name for name, _ in blocks])
            self._check_together(partition.poptorch_strategy)
        without = [name for name, ipu in blocks if ipu is None]
        if partition is not None and without:
            raise PartitionError(
                f"every block must name its IPU, but the block {without[0]!r} does not. Begin it "
                "with ipu_id=0, for example, or name its IPU in an object for strategy."
            )
        placed = [ipu for _, ipu in (blocks or self._placed) if ipu is not None]
        ipus = partition.ipus if partition is not None else 1
        if placed and 1 + max(placed) != ipus:
            count = 1 + max(placed)
            raise UncountedError(
                f"the module's own blocks put it on {count} IPU{'s' if count > 1 else ''}, but "
                f"ipus_per_replica is {ipus}. Leave it out, or set it to {count}, in compile or in "
                "the config.",
                count,
                self.stages(),
            )

    def _check_together(self, strategy: Any) -> None:
        """Blocks of one stage are on one IPU."""
        first: Dict[int, Tuple[str, Optional[int]]] = {}
        for name, ipu in self.entered():
            stage = strategy._block_map.get(name)
            if stage is None:
                continue
            other, where = first.setdefault(id(stage), (name, ipu))
            if where != ipu:
                raise PartitionError(
                    f"the blocks of a stage run on one IPU, but strategy puts {other!r} and "
                    f"{name!r} into one stage, and they begin on IPUs {where} and {ipu}. Give each "
                    "its own poptorch.Stage, or use poptorch.Stage(...).ipu(number)."
                )


@contextlib.contextmanager
def blocks_without_end() -> Iterator[None]:
    """Let each ``with poptorch.Block(...)`` of this context go on until another block begins.

    PopTorch wants every operator in a block, but a step of Lightning's computes its loss behind
    the blocks of ``forward``.
    """
    sdk = sys.modules.get("poptorch")
    blocks: List[Any] = [*BLOCK_CLASSES, *([] if sdk is None else [sdk.__dict__["Block"]])]
    ends = [(block, block.__exit__) for block in dict.fromkeys(blocks)]
    for block, _ in ends:
        block.__exit__ = _go_on
    try:
        yield
    finally:
        for block, end in ends:
            block.__exit__ = end


def _go_on(block: object, *error: object) -> None:
    """Leave a block open."""


def _check_names(strategy: Any, entered: Sequence[str]) -> None:
    """Hold the names of a strategy against those of the blocks, both ways."""
    named = list(strategy._block_map)
    if not named:
        return
    there = list(dict.fromkeys(entered))
    title = f"poptorch.{type(strategy).__name__}"
    # A stage may name blocks that only some passes enter, but one of them has to be there.
    filled = {id(strategy._block_map[name]) for name in there if name in named}
    missing = [name for name in named if id(strategy._block_map[name]) not in filled]
    extra = [name for name in there if name not in named]
    if missing:
        entered_names = ", ".join(map(repr, there)) or "none"
        raise PartitionError(
            f"forward must enter a block of every stage that {title} names, but it does not enter "
            f"{_all(missing)}. {_nearest(missing[0], extra or there)}It enters {entered_names}. "
            f"Begin the block with poptorch.BeginBlock(module, {missing[0]!r}), or leave it out of "
            "the strategy."
        )
    if extra:
        raise PartitionError(
            f"{title} must name every block that forward enters, but it does not name "
            f"{_all(extra)}. {_nearest(extra[0], named)}It names {', '.join(map(repr, named))}. "
            "Add the block to the strategy."
        )


def _all(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}? " if near else ""


# Of PopTorch and of the stand-in: what BeginBlock hangs on a module or makes of a callable, and
# the context manager, which a module may hold.
_HOOKS = ("_BlockHook", "BlockHook")
_MODULES = ("LegacyBeginBlockFn", "Block")


def is_annotated(module: nn.Module) -> bool:
    """True if ``BeginBlock`` was called for the module or a part of it, or it holds a ``Block``.

    What ``forward`` makes itself is not seen.
    """
    return any(True for _ in _annotations(module))


def annotated_ipus(module: nn.Module) -> Optional[int]:
    """Count the IPUs that the annotations of a module name, from 0; None where they name none."""
    ipus = [block._ipu_id for block in _annotations(module) if block._ipu_id is not None]
    return 1 + max(ipus) if ipus else None


def _annotations(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if sdk_kind(part, _MODULES):
            yield part
        for hook in part._forward_pre_hooks.values():
            if sdk_kind(hook, _HOOKS):
                yield hook


# A block's name, and the IPU that was asked for.
Entry = Tuple[Hashable, Optional[int]]

# Context managers that report to the recordings; empty until a PopTorch that does is imported.
BLOCK_CLASSES: List[type] = []

_recordings: List[EnteredBlocks] = []


class EnteredBlocks:
    """The blocks of one forward pass, in the order in which they were entered.

    Attributes:
        entered: one entry for each time that a block was entered; a block may come twice.
        is_active: whether the last block is still open, or none was entered.
    """

    def __init__(self) -> None:
        self.entered: List[Entry] = []
        self.is_active = True
        self._next_auto_id = 0
        self._numbered: Dict[int, str] = {}

    def use_auto_id(self) -> None:
        """Restart the numbering of unnamed blocks at 0."""
        self._next_auto_id = 0

    def next_auto_id(self) -> str:
        """Return the name of the next unnamed block."""
        self._next_auto_id += 1
        return str(self._next_auto_id - 1)

    def enter(self, user_id: Optional[Hashable], ipu_id: Optional[int]) -> None:
        """Start a block, which lasts until the next one starts, or until it is left."""
        self.entered.append((user_id or self.next_auto_id(), ipu_id))
        self.is_active = True

    def number_of(self, owner: object) -> str:
        """Return the number of an unnamed block, which stays the same for its owner."""
        if id(owner) not in self._numbered:
            self._numbered[id(owner)] = self.next_auto_id()
        return self._numbered[id(owner)]

    def leave(self) -> None:
        """End the current block, so that the next operator needs a new one."""
        self.is_active = False


@contextlib.contextmanager
def record_blocks(blocks: Optional[EnteredBlocks] = None) -> Iterator[List[Entry]]:
    """Record name and IPU of every block that is entered in the context, compiling or not.

    Args:
        blocks: the recording to add to; a new one by default.
    """
    blocks = EnteredBlocks() if blocks is None else blocks
    _recordings.append(blocks)
    try:
        yield blocks.entered
    finally:
        _recordings.pop()


def recordings() -> List[EnteredBlocks]:
    """Return the recordings that are under way, the outermost first."""
    return list(_recordings)
