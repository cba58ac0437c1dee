"""Trained parameters side by side in flat tensors, with the user's module looking into them.

While a training program lives, the module's parameters look into these tensors: the optimizer works
on a few long tensors instead of many short ones, and whoever reads a parameter reads its present
value. For torch each has a storage of its own, no longer than the parameter: torch.save, pickle and
copy.deepcopy take the whole storage of a tensor with them. :meth:`FlatStorage.release` gives every
parameter memory of its own again.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from ipufit.optim.several import index_of_group
from ipufit.utils.state import as_pairs

# Where torch exchanges memory with other libraries, and so with itself.
_EXCHANGES = ("cpu", "cuda")


def _memory_order(tensor: Tensor) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
    """Dimensions from the widest stride to the narrowest; strides of a copy without gaps."""
    shape, stride = tensor.shape, tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-stride[d], d)))
    if _strides(shape, order, stride) == stride:
        return order, stride
    order = tuple(range(tensor.dim()))
    return order, _strides(shape, order, (0,) * tensor.dim())


def _strides(shape: Sequence[int], order: Sequence[int], odd: Sequence[int]) -> Tuple[int, ...]:
    """Strides without gaps in this memory order; of dimensions of size 1, those in ``odd``."""
    result, step = list(odd), 1
    for d in reversed(order):
        if shape[d] != 1 or not odd[d]:
            result[d] = step
        step *= shape[d]
    return tuple(result)


def flatten_like(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Flatten a tensor in the memory order of a parameter (channels-last, say).

    Of a complex one each element becomes two real ones, as torch's optimizers see it.
    """
    if list(order) != sorted(order):
        tensor = tensor.permute(tuple(order))
    return as_pairs(tensor).reshape(-1)


def storage_id(tensor: Tensor) -> int:
    """Equal for tensors that share memory; 0 for sparse ones, which have none of this kind."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def extent(tensor: Tensor) -> Tuple[int, int]:
    """The first element of its storage that a tensor takes, and the one after the last."""
    first = int(tensor.storage_offset())
    if not tensor.numel():
        return first, first
    return first, first + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))


def flat_of(tensor: Tensor, flats: Sequence[Tensor]) -> Optional[int]:
    """The index of the flat tensor in whose memory a tensor begins, or None."""
    if tensor.layout is not torch.strided:
        return None
    address = tensor.data_ptr()
    for index, flat in enumerate(flats):
        begin = flat.data_ptr()
        if begin <= address < begin + flat.numel() * flat.element_size():
            return index
    return None


def is_shared(tensor: Tensor) -> bool:
    """Tell whether other tensors may look into the storage of this one."""
    if not hasattr(torch._C, "_storage_Use_Count"):  # before torch 2.1
        return True
    # Torch counts the storage's object in Python, too, and what a view is of.
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count > 2 + tensor._is_view()


@dataclasses.dataclass(frozen=True)
class Slot:
    """Place of one parameter in its block.

    Attributes:
        name: the parameter's name in the step module.
        parameter: the user's parameter, or a device's copy of it.
        order: its dimensions in memory order.
        stride: of its view into the flat tensor, in elements.
        start: first element in the flat tensor.
    """

    name: str
    parameter: Tensor
    order: Tuple[int, ...]
    stride: Tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Index behind the parameter's last element in the flat tensor."""
        return self.start + self.parameter.numel() * (2 if self.parameter.is_complex() else 1)

    def view(self, flat: Tensor) -> Tensor:
        """The part of a flat tensor that belongs to this parameter, in the parameter's shape."""
        return self._shaped(flat[self.start : self.stop])

    def window(self, flat: Tensor) -> Tensor:
        """The memory of :meth:`view`, in a storage that ends with it; for what users get hold of.

        Do not use it where the storage of the flat tensor is freed while the tensor is in use.
        """
        part = flat.detach()[self.start : self.stop]
        size = part.numel() * part.element_size()
        stays = part.data_ptr() == self.parameter.data_ptr()
        is_part = 0 < size < flat.untyped_storage().nbytes() and not stays
        if type(flat) is Tensor and flat.device.type in _EXCHANGES and is_part:
            part = from_dlpack(part)
        return self._shaped(part)

    def _shaped(self, part: Tensor) -> Tensor:
        if self.parameter.is_complex():
            part = torch.view_as_complex(part.view(-1, 2))
        return part.as_strided(self.parameter.shape, self.stride)


@dataclasses.dataclass(frozen=True)
class FlatBlock:
    """Parameters that are updated by the same rule with the same numbers.

    Attributes:
        group: index of the optimizer's parameter group.
        updates: number of updates that the optimizer has already made to these parameters.
        slots: the parameters, in the order of the flat tensor.
    """

    group: int
    updates: float
    slots: Tuple[Slot, ...]

    @property
    def names(self) -> Tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(slot.name for slot in self.slots)

    @staticmethod
    def of(named: Sequence[Tuple[str, Tensor]], group: int, updates: float) -> FlatBlock:
        """Lay the parameters out one after another."""
        slots: List[Slot] = []
        start = 0
        for name, parameter in named:
            slots.append(Slot(name, parameter, *_memory_order(parameter), start))
            start = slots[-1].stop
        return FlatBlock(group, updates, tuple(slots))

    def gather(self, tensors: Dict[str, Tensor]) -> Tensor:
        """Tensors by parameter name, as one new flat tensor."""
        return torch.cat([flatten_like(tensors[slot.name], slot.order) for slot in self.slots])

    def flat(self, tensors: Dict[str, Tensor]) -> Tensor:
        """Tensors by parameter name, as one flat tensor; a dense one that is alone, as it is."""
        if len(self.slots) > 1:
            return self.gather(tensors)
        return flatten_like(tensors[self.slots[0].name], self.slots[0].order)


# Elements of a parameter whose gradient takes longer to copy than a block to update.
_LARGE = 2**18


def set_apart(
    named: Sequence[Tuple[str, nn.Parameter]], staying: Sequence[str], large: bool
) -> List[List[Tuple[str, nn.Parameter]]]:
    """Put some parameters into parts by themselves: one that is alone stays where it is.

    Args:
        named: the parameters.
        staying: names of those that must stay.
        large: whether large ones are set apart, too: nothing is copied to join their gradients.
    """
    parts: List[List[Tuple[str, nn.Parameter]]] = [[]]
    for name, parameter in named:
        if name in staying or (large and parameter.numel() >= _LARGE):
            parts.append([(name, parameter)])
        else:
            parts[0].append((name, parameter))
    return parts


def group_alike(
    optimizer: torch.optim.Optimizer,
    named: Sequence[Tuple[str, nn.Parameter]],
    ages: Mapping[str, float],
    updates: Callable[[str, nn.Parameter], float],
) -> List[FlatBlock]:
    """Make a block for the parameters of one group, dtype, device and number of updates.

    Args:
        optimizer: that they belong to.
        named: the parameters.
        ages: numbers of updates that are known, by name.
        updates: returns that of any other one.
    """
    groups = index_of_group(optimizer)
    alike: Dict[Tuple[int, float, torch.dtype, torch.device], List[Tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        age = ages[name] if name in ages else updates(name, parameter)
        key = (groups[id(parameter)], age, parameter.dtype, parameter.device)
        alike.setdefault(key, []).append((name, parameter))
    return [FlatBlock.of(members, key[0], key[1]) for key, members in alike.items()]


class FlatStorage:
    """Owns the memory of the trained parameters until released.

    A parameter that is alone in its block stays where it is.

    Args:
        blocks: the layout.
        others: parameters that are not trained, by the names of the step module; they stay as well.

    Attributes:
        blocks: the layout.
        flats: one flat tensor per block.
        views: the parameters in the memory that a program knows, by name: parts of the flat
            tensors, and the others.
        places: name, parameter and a view for the user of each that may be given other memory.
        form: all that a program over the flat tensors depends on.
        indices: of the coming update, where the gradient of a parameter is sparse, by name.
    """

    def __init__(
        self, blocks: Sequence[FlatBlock], others: Sequence[Tuple[str, Tensor]] = ()
    ) -> None:
        self.blocks = list(blocks)
        self.flats: List[Tensor] = []
        self.views: Dict[str, Tensor] = {}
        self.places: List[Tuple[str, Tensor, Tensor]] = []
        for name, other in others:
            self.views[name] = view = other.detach()
            if other.layout is torch.strided:
                self.places.append((name, other, view))
        self.indices: Dict[str, Tensor] = {}
        with torch.no_grad():
            for block in self.blocks:
                flat = block.flat({slot.name: slot.parameter.data for slot in block.slots})
                for slot in block.slots:
                    slot.parameter.data = window = slot.window(flat)
                    self.views[slot.name] = slot.view(flat)
                    self.places.append((slot.name, slot.parameter, window))
                self.flats.append(flat)
        self.form: Tuple[object, ...] = tuple(
            (block.group, tuple((s.start, s.stop) for s in block.slots), flat.dtype, flat.device)
            for block, flat in zip(self.blocks, self.flats)
        )

    def part(self, places: Sequence[int]) -> FlatStorage:
        """Some of the blocks, in the same memory, which this storage goes on to own."""
        part = FlatStorage([])
        part.blocks = [self.blocks[place] for place in places]
        part.flats = [self.flats[place] for place in places]
        part.views, part.indices = self.views, self.indices
        names = {name for block in part.blocks for name in block.names}
        part.places = [each for each in self.places if each[0] in names]
        part.form = tuple(self.form[place] for place in places)
        return part

    def follow(self, refused: Callable[[str], Exception]) -> None:
        """Take over what was put into parameters by other means than in place.

        Args:
            refused: makes the error for a parameter of this name that is of another form now.
        """
        for name, parameter, view in self.places:
            data = parameter.data
            if data.data_ptr() == view.data_ptr() and data.stride() == view.stride():
                continue
            if (data.shape, data.dtype, data.device) != (view.shape, view.dtype, view.device):
                raise refused(name)
            # It may be another view of the same memory.
            view.copy_(data.clone())
            parameter.data = view

    def release(self) -> None:
        """Give every parameter memory of its own, with the present values; safe twice."""
        with torch.no_grad():
            for block in self.blocks:
                for slot in block.slots if len(block.slots) > 1 else ():
                    slot.parameter.data = slot.parameter.data.clone()
        self.blocks, self.flats, self.views, self.places = [], [], {}, []
