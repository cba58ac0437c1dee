"""Where the parameters of a module are read, and where anything is computed at all."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Dict, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit.utils import tree
from ipufit.utils.poptorch_tracing import sdk_in_use

__all__ = ["Uses"]


class Uses:
    """Looks at every operator of a forward pass and of the loss after it.

    PopTorch's own tracing is left alone: nothing is seen there.

    Args:
        module: the user's.
        place: asked, for every operator, for the number of the stage or IPU that it runs on.

    Attributes:
        by_forward, by_loss: the places that read a parameter, by its name and in the order of
            their first use.
        works: places at which forward computes something.
        is_seeing: whether operators are seen.
        in_loss: whether what comes is of the loss.
    """

    def __init__(self, module: nn.Module, place: Callable[[], int]) -> None:
        self.by_forward: Dict[str, List[int]] = {}
        self.by_loss: Dict[str, List[int]] = {}
        self.works: Set[int] = set()
        sdk = sdk_in_use()
        self.is_seeing = sdk is None or getattr(sdk, "__name__", "") == "ipufit.poptorch"
        self.in_loss = False
        self._module = module
        self._place = place
        # Names of the parameters in a storage, and which elements of it they take.
        self._lie: Optional[Dict[int, List[Tuple[int, int, str]]]] = None

    @property
    def is_begun(self) -> bool:
        """Whether the module was called."""
        return self._lie is not None

    def seeing(self) -> ContextManager[Any]:
        """See the operators of the block."""
        return _Operators(self) if self.is_seeing else contextlib.nullcontext()

    def begin(self) -> None:
        """The module is called: its parameters are those of this pass from now on."""
        if self._lie is None:
            self._lie = {}
            for name, parameter in self._module.named_parameters():
                key = _storage(parameter)
                if key:
                    first, end = _extent(parameter)
                    self._lie.setdefault(key, []).append((first, end, name))

    def operated(self, operator: Any, inputs: Any, result: Any) -> None:
        """An operator was called."""
        if self._lie is None:
            return
        place = self._place()
        if not self.in_loss and _computes(operator, result):
            self.works.add(place)
        readers = self.by_loss if self.in_loss else self.by_forward
        for leaf in tree.flatten(inputs)[0]:
            if isinstance(leaf, Tensor):
                for name in self._names(leaf):
                    places = readers.setdefault(name, [])
                    if place not in places:
                        places.append(place)

    def _names(self, tensor: Tensor) -> List[str]:
        there = (self._lie or {}).get(_storage(tensor))
        if not there:
            return []
        first, end = _extent(tensor)
        return [name for start, stop, name in there if start < end and first < stop]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def _extent(tensor: Tensor) -> Tuple[int, int]:
    """First element in the storage, and the one after the last."""
    first = int(tensor.storage_offset())
    if not tensor.numel():
        return first, first
    return first, first + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))


def _computes(operator: Any, result: Any) -> bool:
    """Whether it makes or changes a tensor; a view of one only names it anew."""
    if not any(isinstance(leaf, Tensor) for leaf in tree.flatten(result)[0]):
        return False
    if operator.namespace != "aten":
        return True
    if operator.overloadpacket in _NAMES_ANEW:
        return False
    aliases = [one.alias_info for one in operator._schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)


_NAMES_ANEW = {torch.ops.aten.detach, torch.ops.aten.lift_fresh, torch.ops.aten._unsafe_view}


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below autograd: every operator."""

    def __init__(self, uses: Uses) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uses = uses

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._uses.operated(func, (args, kwargs or {}), result)
        return result
