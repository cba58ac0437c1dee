"""Stages, phases and attributes, of which execution strategies are made."""

from __future__ import annotations

import copy
from types import TracebackType
from typing import Any, ClassVar, Dict, List, Optional, Sequence, Type, Union

from ipufit.poptorch._options.group import need_type

__all__ = ["Attribute", "BlockId", "Phase", "Stage"]

BlockId = str


class Stage:
    """One or more blocks that run one after the other on one IPU.

    Raises:
        AssertionError: a block's name that is not a string.
    """

    def __init__(self, *block_ids: BlockId) -> None:
        if not all(isinstance(block, str) for block in block_ids):
            raise AssertionError(
                f"A stage takes names of blocks, which are strings, got {block_ids}. Use "
                'poptorch.Stage("A", "B").'
            )
        self._blocks = block_ids
        self._stage_id = -1
        self._phase_id = -1
        self._ipu: Optional[int] = None

    @property
    def blocks(self) -> List[BlockId]:
        """The names of the stage's blocks."""
        return list(self._blocks)

    def ipu(self, ipu: int) -> Stage:
        """Set the IPU that the stage runs on, instead of the one that its blocks name.

        Raises:
            AssertionError: not an int, or below 0.
        """
        need_type("ipu", ipu, int)
        if ipu < 0:
            raise AssertionError(f"IPUs are numbered from 0, got ipu={ipu}.")
        self._ipu = ipu
        return self

    def _setStage(self, stage: Optional[int]) -> Stage:
        if stage is not None:
            self._stage_id = stage
        return self


class Phase:
    """Stages that run at the same time.

    Args:
        arg: stages; or names of blocks, which make one stage.
    Raises:
        AssertionError: something else, or both kinds.
    """

    def __init__(self, *arg: Union[BlockId, Stage]) -> None:
        stages = [element for element in arg if isinstance(element, Stage)]
        names = [element for element in arg if isinstance(element, str)]
        if len(stages) == len(arg):
            self.stages: Sequence[Stage] = stages
        elif len(names) == len(arg):
            self.stages = [Stage(*names)]
        else:
            raise AssertionError(
                "A phase takes stages, or names of blocks (strings), but not both; got "
                f"{[type(element).__name__ for element in arg]}."
            )

    def stage(self, idx: int) -> Stage:
        """Return one of the stages, counted from 0."""
        return self.stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Set one IPU for each of the stages, in their order.

        Raises:
            AssertionError: another number of IPUs than of stages.
        """
        if len(ipus) != len(self.stages):
            raise AssertionError(
                f"This phase has {len(self.stages)} stages, got {len(ipus)} IPUs. Give one IPU for "
                "each stage."
            )
        for stage, ipu in zip(self.stages, ipus):
            stage.ipu(ipu)


class Attribute:
    """A context in which operators carry attributes for the device's compiler.

    They change no value, and nothing reads them on this engine.

    Args:
        kwargs: for each attribute, a dict of its keys and values.
    Raises:
        AssertionError: an attribute that is not a dict.
    """

    _current_attrs: ClassVar[Dict[str, Dict[str, Any]]] = {}

    def __init__(self, **kwargs: Dict[str, Any]) -> None:
        for name, attribute in kwargs.items():
            need_type(f"Attribute({name}=...)", attribute, dict)
        self._kwargs = kwargs
        self._saved: Dict[str, Dict[str, Any]] = {}

    def __enter__(self) -> None:
        self._saved = Attribute._current_attrs
        inside = copy.deepcopy(self._saved)
        for name, attribute in self._kwargs.items():
            inside.setdefault(name, {}).update(attribute)
        Attribute._current_attrs = inside

    def __exit__(
        self,
        type: Optional[Type[BaseException]],
        value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        Attribute._current_attrs = self._saved
