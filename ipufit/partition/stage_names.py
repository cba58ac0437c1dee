"""Keys of ``stages``: modules that are called, by any of their names."""

from __future__ import annotations

import operator
from typing import AbstractSet, Any, Container, Dict, Iterable, Mapping, Optional, Tuple

from torch import nn

from ipufit.errors import PartitionError, UnknownNameError
from ipufit.partition.partition import AFTER
from ipufit.utils.error_collector import ErrorCollector

__all__ = ["Placed", "begun_by", "first_called", "first_gap", "is_called", "named_stages"]


# The number of a stage, and the IPU that it is said to be on.
Placed = Tuple[int, Optional[int]]


def named_stages(
    module: nn.Module, stages: Mapping[object, object], argument: str
) -> Dict[str, Placed]:
    """The stage of each module, and its IPU where that is said, by the first of its names.

    Args:
        module: the user's.
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
                        f"{key!r} are one module, got {stages[written[path]]} and {stage}. "
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
    numbers = list(setting) if is_pair else [setting]
    good = all(not isinstance(n, bool) and hasattr(n, "__index__") and n >= 0 for n in numbers)
    if is_pair and not (good and len(numbers) == 2):
        raise PartitionError(
            f"{argument} as a pair must be the number of a stage and that of its IPU, both "
            f"from 0, got {setting!r}. Write for example (2, 0)."
        )
    if not good:
        raise PartitionError(f"{argument} must be the number of a stage, from 0, got {setting!r}.")
    stage, *ipu = map(operator.index, numbers)
    return stage, ipu[0] if ipu else None


def begun_by(name: str, names: Container[str]) -> str:
    """The module whose call, or return from it, begins a stage."""
    after = name not in names and name.startswith(AFTER)
    return name[len(AFTER) :] if after else name


def is_called(part: nn.Module) -> bool:
    """True of a module that can be called, no mere container."""
    container = isinstance(part, (nn.ModuleList, nn.ModuleDict))
    return not container or type(part).forward is not nn.Module.forward


def _check_called(part: nn.Module, name: str, argument: str) -> None:
    if is_called(part):
        return
    child = first_called(part, name)
    cure = f"Name its first layer, {child!r}." if child else "Name a module that is called."
    raise PartitionError(
        f"{argument} must name modules that forward calls, got {name!r}, which is a "
        f"{type(part).__name__} and only holds others. {cure}"
    )


def first_called(part: nn.Module, name: str) -> Optional[str]:
    """The first module inside a container that can be called."""
    for key, child in part.named_children():
        path = f"{name}.{key}" if name else key
        called_path = path if is_called(child) else first_called(child, path)
        if called_path:
            return called_path
    return None


def first_gap(numbers: Iterable[int], filled: AbstractSet[int] = frozenset((0,))) -> Optional[int]:
    """The smallest stage before the last one that nothing begins.

    Args:
        numbers: of the stages that begin.
        filled: others that need no beginning.
    """
    numbered = {*numbers, *filled}
    free = next(number for number in range(len(numbered) + 1) if number not in numbered)
    return free if free < max(numbered) else None
