"""Padding: a batch of samples of several lengths, as tensors of one length."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping
from numbers import Number
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from ipufit.data.in_memory import as_tensor, is_array
from ipufit.errors import ConfigurationError, DataError, unfit
from ipufit.utils import tree
from ipufit.utils.error_collector import is_number

# Padding of entries that have a usual one, by name; targets of whole numbers have IGNORED.
_USUAL = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "position_ids": 0}
_TARGETS = ("label", "labels", "label_ids", "target", "targets", "decoder_labels")
_IGNORED = -100  # ignore_index of torch's cross entropy


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A tensor, or something else, that every sample has.

    Attributes:
        path: in words, for messages.
        dims: that are padded; none of what is stacked as it is.
        value: of the padding.
    """

    path: str
    dims: Tuple[int, ...] = ()
    value: Union[int, float] = 0

    def join(self, column: Sequence[Tensor], border: int, is_left: bool) -> object:
        """Return those of all samples as one tensor, or as torch's default_collate has them."""
        if not self.dims:
            # There may be something else than tensors, too.
            shapes = {tuple(each.shape) for each in column if isinstance(each, Tensor)}
            if len(shapes) > 1:
                raise DataError(
                    f"{self.path} must have the same shape in the whole batch, or be padded, got "
                    f"shapes {', '.join(map(str, sorted(shapes)[:2]))}. Say by name what to pad "
                    "it with, such as pad={'labels': -100}."
                )
            return default_collate(list(column))
        if self.dims == (0,) and not is_left:
            # The usual case, in one call of torch's.
            batch = pad_sequence(list(column), batch_first=True, padding_value=self.value)
            missing = (0, 0) * (batch.dim() - 2) + (0, border - batch.shape[1])
            return functional.pad(batch, missing, value=self.value)
        shape = list(column[0].shape)
        for dim in self.dims:
            shape[dim] = border
        stacked = column[0].new_full((len(column), *shape), self.value)
        for row, each in zip(stacked, column):
            # torch has no slice of a dimension by number, but a view of one.
            for dim in self.dims:
                size = each.shape[dim]
                row = row.narrow(dim, border - size if is_left else 0, size)
            row.copy_(each)
        return stacked


@dataclasses.dataclass(frozen=True)
class Padding:
    """Makes a batch of samples of like length, padded to the first boundary that all fit into.

    Attributes:
        boundaries: lengths to pad to.
        structure: of a sample.
        entries: of a sample, in order.
        mask: name of the mask that the inputs get, and the entry that it says the sizes of; None
            for no mask.
        is_left: whether padding comes first.
    """

    boundaries: Tuple[int, ...]
    structure: tree.Structure
    entries: Tuple[_Entry, ...]
    mask: Optional[Tuple[str, int]]
    is_left: bool

    @staticmethod
    def of(
        extremes: Sequence[object],
        boundaries: Tuple[int, ...],
        length: Optional[int],
        pad: object,
        mask: Optional[str],
    ) -> Padding:
        """Find out what is padded.

        Args:
            extremes: the shortest and the longest sample.
            boundaries: lengths to pad to.
            length: that all samples have; None if they differ.
            pad: as LengthBuckets takes it.
            mask: as LengthBuckets takes it.

        Raises:
            ConfigurationError: ``pad`` or ``mask`` can't work for such samples.
            DataError: the two samples differ in more than their sizes.
        """
        (leaves, structure), (others, second) = (tree.flatten(as_plain(e)) for e in extremes)
        if structure != second:
            raise _differing(structure, second)
        values = _PadValues(pad)
        inputs = structure.children[0] if _is_pair(structure) else structure
        entries = []
        for place, (keys, short, long) in enumerate(zip(_key_paths(structure), leaves, others)):
            dims = _padded_dims(short, long, length) or values.dims(keys)
            is_target = place >= inputs.leaves
            value = values.of(keys, long, is_target) if dims else 0
            entries.append(_Entry("sample" + "".join(f"[{key!r}]" for key in keys), dims, value))
        values.refuse_unused(structure)
        named = _mask_of(inputs, entries, mask)
        return Padding(boundaries, structure, tuple(entries), named, values.is_left)

    def __call__(self, samples: Sequence[object]) -> object:
        """Make a batch.

        Args:
            samples: of one bucket.

        Raises:
            DataError: samples that are not like the first ones, or longer than the last boundary.
        """
        flat = [tree.flatten(as_plain(sample)) for sample in samples]
        for _, structure in flat:
            if structure != self.structure:
                raise _differing(self.structure, structure)
        columns: List[Tuple[Tensor, ...]] = list(zip(*(leaves for leaves, _ in flat)))
        padded = [(e, column) for e, column in zip(self.entries, columns) if e.dims]
        sizes = [each.shape[dim] for e, column in padded for each in column for dim in e.dims]
        longest = max(sizes, default=0)
        if longest > self.boundaries[-1]:
            raise DataError(
                "a sample must be no longer than the last boundary of LengthBuckets, "
                f"{self.boundaries[-1]}, got {longest}. Let lengths return the length of the "
                "longest padded entry of a sample, such as lengths=lambda s: max(map(len, s))."
            )
        border = self.boundaries[bisect.bisect_left(self.boundaries, longest)]
        stacked = [e.join(column, border, self.is_left) for e, column in zip(self.entries, columns)]
        batch = tree.unflatten(stacked, self.structure)
        if self.mask is None:
            return batch
        name, place = self.mask
        mask = self._mask(columns[place], self.entries[place].dims[0], border)
        if not _is_pair(self.structure):
            return _with_mask(batch, name, mask)
        return (_with_mask(batch[0], name, mask), *batch[1:])

    def _mask(self, column: Sequence[Tensor], dim: int, border: int) -> Tensor:
        sizes = torch.tensor([each.shape[dim] for each in column]).unsqueeze(1)
        places = torch.arange(border)
        return places >= border - sizes if self.is_left else places < sizes


def _with_mask(inputs: object, name: str, mask: Tensor) -> object:
    if isinstance(inputs, dict):
        return {**inputs, name: mask.long() if name == "attention_mask" else mask}
    return (*inputs, mask) if isinstance(inputs, tuple) else (inputs, mask)


def _is_pair(structure: tree.Structure) -> bool:
    """Return True of (inputs, target), and of (inputs, target, sample_weight)."""
    return structure.kind is tuple and len(structure.keys) in (2, 3)


def _mask_of(
    inputs: tree.Structure, entries: Sequence[_Entry], mask: Optional[str]
) -> Optional[Tuple[str, int]]:
    """Find the name of the mask, and the first entry of the inputs that is padded.

    Raises:
        ConfigurationError: there is a mask already, or nothing that is padded.
    """
    padded = [place for place in range(inputs.leaves) if entries[place].dims]
    if mask is None:
        is_text = "input_ids" in inputs.keys and "attention_mask" not in inputs.keys
        return ("attention_mask", padded[0]) if is_text and padded else None
    if not isinstance(mask, str) or mask in inputs.keys or not padded:
        came = repr(mask)
        if isinstance(mask, str):
            came += ", but no input is padded" if not padded else ", but there is one already"
        raise ConfigurationError(
            f"mask of LengthBuckets must be the name of a new input, got {came}. Choose another "
            "name, or leave it out."
        )
    return mask, padded[0]


class _PadValues:
    """Values that entries of a sample are padded with.

    Args:
        pad: as LengthBuckets takes it.

    Attributes:
        is_left: whether padding comes first.

    Raises:
        ConfigurationError: it is none of its forms, or a tokenizer without padding.
    """

    def __init__(self, pad: object) -> None:
        self._default: Union[int, float] = 0
        self._by_key: Dict[object, Union[int, float]] = {}
        self._usual: Dict[str, int] = dict(_USUAL)
        self._used: List[object] = []
        self.is_left = False
        if hasattr(pad, "pad_token_id"):
            self._read_tokenizer(pad)
        elif isinstance(pad, Mapping):
            self._by_key = dict(pad)
        elif isinstance(pad, tuple):
            self._by_key = {i: each for i, each in enumerate(pad) if each is not None}
        elif isinstance(pad, (int, float)):
            self._default = pad
        is_form = hasattr(pad, "pad_token_id") or isinstance(pad, (Mapping, tuple, int, float))
        values = [pad] if isinstance(pad, bool) else self._by_key.values()
        if not is_form or not all(map(is_number, values)):
            needed = "a number, a dict of numbers by the names of entries, a tuple of numbers by "
            advice = "Write for example pad={'input_ids': 1, 'labels': -100}."
            raise unfit(
                "pad of LengthBuckets", f"{needed}their places, or a tokenizer", pad, advice
            )

    def _read_tokenizer(self, tokenizer: Any) -> None:
        if tokenizer.pad_token_id is None:
            raise ConfigurationError(
                "pad of LengthBuckets must be a tokenizer with a pad token, but "
                f"{type(tokenizer).__name__} has none. Set tokenizer.pad_token = "
                "tokenizer.eos_token (the attention mask hides it), or pass pad={'input_ids': "
                "...}."
            )
        self._default = tokenizer.pad_token_id
        self._usual["token_type_ids"] = getattr(tokenizer, "pad_token_type_id", 0)
        self.is_left = getattr(tokenizer, "padding_side", "right") == "left"

    def dims(self, keys: Sequence[object]) -> Tuple[int, ...]:
        """Return the first dimension of an entry that is named."""
        return (0,) if any(key in self._by_key for key in keys) else ()

    def of(self, keys: Sequence[object], leaf: Tensor, is_target: bool) -> Union[int, float]:
        """Return the padding of an entry.

        Args:
            keys: where it is in a sample.
            leaf: of a sample.
            is_target: whether it is no input.

        Raises:
            ConfigurationError: nobody says what floating-point targets are padded with.
        """
        named = [key for key in keys if key in self._by_key]
        if named:
            self._used += named
            return self._by_key[named[-1]]
        name = str(keys[-1]) if keys else ""
        if name in self._usual:
            return self._usual[name]
        if is_target and keys[0] == 2:
            return 0  # weights
        if not is_target and name not in _TARGETS:
            return self._default
        if leaf.is_floating_point() or leaf.dtype == torch.bool:
            raise ConfigurationError(
                f"pad of LengthBuckets must say what the target {keys[-1]!r} of {leaf.dtype} is "
                f"padded with, because the loss counts it. Pass pad={{{keys[-1]!r}: 0.0}} and a "
                "loss or weights that ignore padding."
            )
        return _IGNORED

    def refuse_unused(self, structure: tree.Structure) -> None:
        """Refuse names that are no entry's.

        Raises:
            ConfigurationError: there are such names; with those that there are.
        """
        unused = [key for key in self._by_key if key not in self._used]
        if unused:
            there = dict.fromkeys(key for keys in _key_paths(structure) for key in keys)
            raise ConfigurationError(
                f"pad of LengthBuckets must name entries of a sample, got {unused[0]!r}. There is "
                f"{', '.join(map(repr, there)) or 'one without a name: pass a number'}."
            )


def _key_paths(structure: tree.Structure) -> List[Tuple[object, ...]]:
    """Return the keys that lead to each leaf."""
    if structure.is_leaf:
        return [()]
    return [
        (key, *keys)
        for key, child in zip(structure.keys, structure.children)
        for keys in _key_paths(child)
    ]


def _padded_dims(short: object, long: object, length: Optional[int]) -> Tuple[int, ...]:
    """Return the dimensions in which the shortest and the longest sample differ, or of a length."""
    if not (isinstance(short, Tensor) and isinstance(long, Tensor)) or short.dim() != long.dim():
        return ()
    sizes = zip(short.shape, long.shape)
    return tuple(dim for dim, (one, other) in enumerate(sizes) if one != other or one == length)


def _differing(structure: tree.Structure, other: tree.Structure) -> DataError:
    return DataError(
        f"all samples of LengthBuckets must have the same structure, got {structure} and "
        f"{other}. Yield the same entries for every sample."
    )


def as_plain(part: object) -> tree.Tree:
    """Return a sample of tensors, or of what is none, in dicts and tuples."""
    if isinstance(part, Mapping):
        entries = {name: as_plain(each) for name, each in part.items()}
        # A tokenizer of Hugging Face that makes tensors makes a batch of one text.
        is_batch = hasattr(part, "convert_to_tensors") and all(
            isinstance(each, Tensor) and each.dim() == 2 and len(each) == 1
            for each in entries.values()
        )
        return {name: each[0] for name, each in entries.items()} if is_batch else entries
    if is_array(part):
        return as_tensor(part, "a sample")
    if isinstance(part, list) and all(issubclass(kind, Number) for kind in set(map(type, part))):
        return torch.tensor(part)
    return tuple(map(as_plain, part)) if isinstance(part, (list, tuple)) else part
