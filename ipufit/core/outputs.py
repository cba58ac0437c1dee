"""The outputs of a module: which are handed back, and one of them by name or by position."""

from __future__ import annotations

import dataclasses
from typing import Any, Hashable, List, Mapping, Optional, Sequence, Tuple, Type, Union

import numpy as np
import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch
from ipufit.errors import CaptureError, ConfigurationError, DataError
from ipufit.utils import tree

# A mapping's key, a field's name, or a position.
Key = Union[str, int]


_PLAIN = (Tensor, bool, int, float, complex, str, bytes)
# How deep objects among the outputs are searched for tensors.
_DEPTH = 4


def drop_ignored_outputs(module: nn.Module, outputs: tree.Tree) -> tree.Tree:
    """The outputs without those that the module itself says nobody wants.

    Models of the transformers library say so of the caches that make generating words faster, in
    ``config.keys_to_ignore_at_inference``; its own Trainer leaves them out too.

    Args:
        module: the user's module.
        outputs: what it returned; anything but a mapping stays as it is.
    """
    names = getattr(getattr(module, "config", None), "keys_to_ignore_at_inference", None)
    if not isinstance(names, (list, tuple)) or not isinstance(outputs, Mapping):
        return outputs
    rest = {key: value for key, value in outputs.items() if key not in names}
    if len(rest) == len(outputs):
        return outputs
    kind: Any = type(outputs)
    return rest if kind is dict else kind(rest)


def accumulator_of(output: Tensor) -> Tensor:
    """A copy of an output to which others can be added.

    Of integers it is one in which the sum does not overflow, as ``torch.sum`` has it.
    """
    is_number = output.is_floating_point() or output.is_complex()
    return output.clone() if is_number else output.to(torch.int64, copy=True)


def add_to(total: Tensor, output: Tensor) -> None:
    """Add an output to the sum; a smaller last micro-batch adds to the rows that it has.

    Raises:
        ConfigurationError: the output has other dimensions, or more rows.
    """
    rows = total[: output.shape[0]] if output.dim() else total
    if rows.shape != output.shape:
        raise ConfigurationError(
            "outputs='sum' adds up outputs of one shape, but micro-batches have outputs of shape "
            f"{tuple(total.shape)} and {tuple(output.shape)}. Use outputs='all' or 'final', or pad "
            "batches to one shape in collate_fn."
        )
    rows.add_(output)


def add_up(outputs: Sequence[tree.Tree]) -> tree.Tree:
    """Add up the outputs of micro-batches; what is no tensor is that of the first one."""
    leaves, structure = tree.flatten(outputs[0])
    totals = [accumulator_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    for each in outputs[1:]:
        for total, leaf in zip(totals, tree.flatten(each)[0]):
            if isinstance(total, Tensor):
                add_to(total, leaf)
    return tree.unflatten(totals, structure)


class SampleOutputs(List[tree.Tree]):
    """Outputs of a micro-batch as a list with an entry for each sample, such as a dict of boxes."""


def with_entries(outputs: tree.Tree, batch: MicroBatch) -> tree.Tree:
    """Tell a list with an entry for each sample from a list of several outputs.

    Both may be as long as the batch. It is the first where a tensor has not a row for each sample,
    or the batch itself has not: a list of images.

    Args:
        outputs: of a module.
        batch: of which they are.
    """
    if type(outputs) is not list:
        return outputs
    lengths = {batch.size}
    if all(isinstance(entry, Mapping) for entry in outputs):
        # Of a list of images alone, their channels look like samples.
        lengths.update(len(part) for part in batch.unpack()[0] if tree.is_sequence(part))
    if len(outputs) not in lengths:
        return outputs
    tensors = [leaf for leaf in tree.flatten(outputs)[0] if isinstance(leaf, Tensor)]
    are_rows = all(tensor.dim() and tensor.shape[0] == batch.size for tensor in tensors)
    return outputs if are_rows and batch.has_rows else SampleOutputs(outputs)


def check_rows(outputs: tree.Tree, batch: MicroBatch) -> tree.Tree:
    """Make sure that ``predict`` can join the outputs of a micro-batch with those of others.

    Returns:
        The outputs as :func:`with_entries` has them.

    Raises:
        DataError: an output has no row for each sample.
    """
    outputs, size = with_entries(outputs, batch), batch.size
    if isinstance(outputs, SampleOutputs):
        return outputs
    for path, leaf in tree.flatten_with_paths(outputs, "output")[0]:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != size):
            single = " If x is one sample, pass x[None]." if leaf.dim() else ""
            raise DataError(
                f"predict returns one row per sample, but {path} has shape {tuple(leaf.shape)} "
                f"for {size} samples. Return it with the samples along its first dimension, or "
                f"do not return it in eval mode.{single}"
            )
    return outputs


def join_rows(outputs: Sequence[tree.Tree], padding_value: Optional[float] = None) -> tree.Tree:
    """Join the outputs of micro-batches, in the structure of those of one.

    Where they differ in more than the number of rows, what stands for the tensor is a list with a
    tensor for each row, which has no dimension of samples. What is no tensor stays if it is equal
    in all of them, and is a list with the value for each row where it is not. Lists with an entry
    for each sample make one list.

    Args:
        outputs: of each micro-batch; a row or an entry for each sample.
        padding_value: fills rows up at the end of every dimension, so that they make one tensor.

    Raises:
        DataError: they have several structures.
        ConfigurationError: rows can't be filled up: they have several numbers of dimensions, or are
            of integers.
    """
    if any(isinstance(each, SampleOutputs) for each in outputs):
        # Of few samples all tensors may have as many rows by chance.
        return [entry for each in outputs for entry in each]
    leaves, structures = zip(*map(tree.flatten, outputs))
    for structure in structures:
        if structure != structures[0]:
            raise DataError(
                "predict joins the outputs of all batches, which must have the same structure, "
                f"but forward returned {structures[0]} and {structure}. Return the same "
                "structure every time, or use predict_iter(..., device_iterations=1), which "
                "yields them batch by batch."
            )
    # How many rows each has; where there is no tensor, each is taken for one.
    rows = [next((len(leaf) for leaf in each if isinstance(leaf, Tensor)), 1) for each in leaves]
    columns = [_join(column, rows, padding_value) for column in zip(*leaves)]
    return tree.unflatten(columns, structures[0])


def _join(column: Sequence[tree.Leaf], rows: List[int], padding_value: Optional[float]) -> object:
    if not isinstance(column[0], Tensor):
        if all(np.array_equal(value, column[0]) for value in column):
            return column[0]
        return [value for value, count in zip(column, rows) for _ in range(count)]
    if len({tensor.shape[1:] for tensor in column}) == 1:
        return torch.cat([*column])
    if padding_value is None:
        return [row for tensor in column for row in tensor.unbind()]
    sizes = {tensor.dim() for tensor in column}
    is_whole = not any(tensor.is_floating_point() or tensor.is_complex() for tensor in column)
    if len(sizes) > 1 or (is_whole and padding_value != int(padding_value)):
        what = "integers" if len(sizes) == 1 else f"{min(sizes)} and {max(sizes)} dimensions"
        raise ConfigurationError(
            f"padding_value={padding_value!r} can't pad outputs of {what}. Leave it out to get a "
            "list of rows, or pad in forward."
        )
    longest = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in column))]
    result = column[0].new_full((sum(rows), *longest), padding_value)
    for tensor, part in zip(column, torch.split(result, rows)):
        part[tuple(map(slice, tensor.shape))] = tensor
    return result


def refuse_hidden_tensors(outputs: object) -> None:
    """Make sure that no output is an object around tensors: a recording's have no values.

    Args:
        outputs: that are handed back.

    Raises:
        CaptureError: one is.
    """
    if all(isinstance(leaf, _PLAIN) for leaf in tree.flatten(outputs)[0]):
        return
    for path, leaf in tree.flatten_with_paths(outputs)[0]:
        if not isinstance(leaf, _PLAIN) and holds_tensor(leaf):
            raise CaptureError(
                "the module's outputs must be tensors in tuples, lists, dicts or dataclasses, but "
                f"output{path} is a {type(leaf).__name__} that holds tensors, which a program "
                "can't return. Return its tensors themselves, or leave it out; in models of the "
                "transformers library, config.use_cache = False turns the cache off."
            )


def holds_tensor(value: object, depth: int = _DEPTH) -> bool:
    """Tell whether a value is a tensor, or an object or container with one inside."""
    if isinstance(value, Tensor):
        return True
    if not depth or isinstance(value, (type, nn.Module)):
        return False
    inside = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple, set)):
        inside += value
    return any(holds_tensor(each, depth - 1) for each in inside)


def label(key: Key) -> str:
    """The output's name in logs: the key itself, ``output_0`` of a position."""
    return key if isinstance(key, str) else f"output_{key}"


def children(value: tree.Tree) -> Tuple[Hashable, ...]:
    """Keys of a mapping, fields of a named tuple or dataclass, else positions; () of a leaf."""
    if isinstance(value, Mapping):
        return tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in dataclasses.fields(value))
    if isinstance(value, (tuple, list)):
        return tuple(getattr(value, "_fields", range(len(value))))
    return ()


def describe_value(value: tree.Tree) -> str:
    """Describe a value in a sentence: its type, and the keys or the length if it has any."""
    keys = children(value)
    if tree.is_sequence(value):
        return f"{type(value).__name__} of {len(value)}"
    if not keys and not isinstance(value, Mapping):
        return type(value).__name__
    return f"{type(value).__name__} with {[str(key) for key in keys]}"


def pick(value: object, key: Key, role: str, kind: Type[ConfigurationError]) -> tree.Tree:
    """Pick one output of a module that returns several.

    Args:
        value: a mapping, named tuple or dataclass for a name; a tuple or list for a position.
        key: which one.
        role: what the value is, for the message: "the module's outputs", "the target".
        kind: of the error.

    Raises:
        ConfigurationError: of that kind; nothing is there under this name or position.
    """
    if isinstance(key, int):
        if isinstance(value, (tuple, list)):
            if key < len(value):
                return value[key]
            raise kind(
                f"{role} must have an element {key}, got {describe_value(value)}. Pass one for "
                "each output, in the order in which the module returns them."
            )
        raise kind(
            f"{role} must be a tuple or list to be used by position, got "
            f"{describe_value(value)}. {_by_name(value, key)}"
        )
    if isinstance(value, Mapping) and key in value:
        return value[key]
    keys = children(value)
    if not isinstance(value, Mapping) and key in keys:
        return getattr(value, key)
    if any(isinstance(name, str) for name in keys) or isinstance(value, Mapping):
        raise kind(
            f"{role} must hold {key!r}, got {describe_value(value)}. Use an existing name, or "
            "add it."
        )
    raise kind(
        f"{role} must be a mapping, named tuple or dataclass to be used by name ({key!r}), got "
        f"{describe_value(value)}. Return a dict, or pass losses and metrics as a list by "
        "position."
    )


def _by_name(value: object, key: int) -> str:
    names: List[str] = [str(name) for name in children(value)]
    if names:
        return f"Pass losses and metrics as a dict by name: {{{names[0]!r}: ...}}."
    return f"Pass a tuple with one element for each output; output {key} has none."
