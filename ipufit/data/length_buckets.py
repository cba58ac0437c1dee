"""Batches of samples of like length: which samples go together, and how they are padded."""

from __future__ import annotations

import collections
import itertools
from typing import (
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Protocol,
    Sequence,
    Sized,
    Tuple,
    Union,
)

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from ipufit.data.padding import Padding, as_plain
from ipufit.errors import ConfigurationError, DataError, unfit
from ipufit.utils import error_collector, tree
from ipufit.utils.error_collector import ErrorCollector, at_least, at_least_or_none, one_of

_BUCKETS = 8


_Line = Tuple[int, int, int]


class _Samples(Sized, Protocol):
    def __getitem__(self, index: int) -> object: ...


class LengthBuckets(Sampler[List[int]]):
    """Batch sampler for samples of similar length, which are padded to one of a few lengths.

    Its method ``pad`` is the ``collate_fn``: ``DataLoader(dataset, batch_sampler=buckets,
    collate_fn=buckets.pad)``. Every sample comes once in an epoch. The order is drawn from torch's
    generator, as by torch's own samplers, so in ``fit`` it depends only on seed and epoch. All
    batches except the last one of the epoch are full: samples that do not fill a batch move to the
    next longer bucket, so there are at most ``max_recordings`` shapes. See docs/data.md.

    Args:
        dataset: samples by index, with ``__len__``: tensors, (inputs, target), dicts, the outputs
            of tokenizers of Hugging Face, or lists of numbers.
        batch_size: samples of a batch.
        lengths: a sequence with the length of every sample; a function of a sample; or the name of
            an entry that is a length, or whose first dimension is the length. None uses the inputs,
            in a dict "input_ids" or the first entry with a length. All except a sequence read every
            sample once.
        boundaries: the lengths to pad to, in ascending order; the last one is at least the length
            of the longest sample. None chooses those with the least padding.
        max_recordings: largest number of batch shapes, including that of a smaller last batch; 8 if
            ``boundaries`` is not set either.
        multiple_of: chosen boundaries are multiples of it.
        pad: value for padding: a number, or one for each entry by name, or by position in a tuple;
            or a tokenizer, for its pad token and side. Entries such as "attention_mask", and
            targets of whole numbers, have their usual padding, which is -100 for targets. An entry
            is padded if its size differs between the shortest and the longest sample.
        mask: name of a mask in the inputs that is True where a sample has data; inputs that are not
            a dict get it as an additional argument. If there are "input_ids", "attention_mask" is
            always added, in whole numbers.
        shuffle: whether every epoch has another order.

    Attributes:
        batch_size: samples of a batch.
        shuffle: whether every epoch has another order.
        boundaries: lengths that batches are padded to.
        padding: share of the elements of an epoch that are padding, from 0 to 1.
        pad: makes a batch of a list of samples.
        sampler: gives the order of the samples.
        drop_last: False.

    Raises:
        ConfigurationError: arguments that can't work; with every fault.
        DataError: samples without lengths, or with different structures.
    """

    drop_last: bool = False

    def __init__(
        self,
        dataset: _Samples,
        batch_size: int,
        lengths: Union[Sequence[int], Tensor, Callable[[object], int], str, None] = None,
        *,
        boundaries: Optional[Sequence[int]] = None,
        max_recordings: Optional[int] = None,
        multiple_of: int = 1,
        pad: object = 0,
        mask: Optional[str] = None,
        shuffle: bool = True,
    ) -> None:
        faults = ErrorCollector()
        with faults.collect():
            batch_size = at_least("batch_size of LengthBuckets", batch_size, 1)
        with faults.collect():
            multiple_of = at_least("multiple_of of LengthBuckets", multiple_of, 1)
        with faults.collect():
            _refuse_rivals(boundaries, max_recordings, multiple_of)
        with faults.collect():
            name = "max_recordings of LengthBuckets"
            max_recordings = at_least_or_none(name, max_recordings, 1)
        with faults.collect():
            one_of("shuffle of LengthBuckets", shuffle, (True, False))
        faults.raise_all()
        self.batch_size: int = batch_size
        self.shuffle: bool = shuffle
        sizes = _lengths_of(dataset, lengths)
        self.sampler: Sampler[int] = (
            RandomSampler(dataset) if shuffle else SequentialSampler(dataset)
        )
        if boundaries is None:
            most = _BUCKETS if max_recordings is None else max_recordings
            # A smaller last batch has a shape of its own.
            most -= bool(len(sizes) % batch_size) and most > 1
            borders = _least_padding(sizes, most, multiple_of)
        else:
            borders = _checked(boundaries, sizes)
        self.boundaries: Tuple[int, ...] = tuple(borders)
        self._buckets = torch.bucketize(sizes, torch.tensor(borders))
        self.padding: float = self._share_of_padding(sizes)
        extremes = [dataset[int(place)] for place in (sizes.argmin(), sizes.argmax())]
        # Where all are equally long, what is as long as they are is padded.
        length = int(sizes.max()) if int(sizes.min()) == int(sizes.max()) else None
        self.pad: Padding = Padding.of(extremes, self.boundaries, length, pad, mask)

    def __iter__(self) -> Iterator[List[int]]:
        order = torch.tensor(list(self.sampler), dtype=torch.int64)
        # Bucket after bucket; what does not fill a batch is joined by samples of the next one.
        order = order[torch.argsort(self._buckets[order], stable=True)]
        batches = list(torch.split(order, self.batch_size))
        last = [] if len(batches[-1]) == self.batch_size else [batches.pop()]
        places = torch.randperm(len(batches)).tolist() if self.shuffle else range(len(batches))
        for batch in itertools.chain((batches[place] for place in places), last):
            yield batch.tolist()

    def __len__(self) -> int:
        return -(-len(self._buckets) // self.batch_size)

    def __repr__(self) -> str:
        return (
            f"LengthBuckets({len(self._buckets)} samples, batch_size={self.batch_size}, "
            f"boundaries={self.boundaries}, padding={self.padding:.3f})"
        )

    def _share_of_padding(self, sizes: Tensor) -> float:
        borders = torch.tensor(self.boundaries)
        # The longest sample of a batch is the last one of it, in the order of the buckets.
        batches = torch.split(self._buckets.sort().values, self.batch_size)
        padded = sum(len(batch) * int(borders[batch[-1]]) for batch in batches)
        return 1.0 - int(sizes.sum()) / padded


def _refuse_rivals(boundaries: object, max_recordings: object, multiple_of: int) -> None:
    if boundaries is None:
        return
    rivals = {"max_recordings": max_recordings is not None, "multiple_of": multiple_of != 1}
    names = [name for name, is_there in rivals.items() if is_there]
    if names:
        raise ConfigurationError(
            f"{' and '.join(names)} of LengthBuckets choose boundaries, but boundaries are given. "
            "Leave one of them out."
        )


def _checked(boundaries: Sequence[int], lengths: Tensor) -> List[int]:
    """Return boundaries that are given as integers, without those that no sample needs.

    Raises:
        ConfigurationError: they do not grow, or end before the longest sample.
    """
    borders = [at_least("each boundary of LengthBuckets", border, 1) for border in boundaries]
    if not borders or any(low >= high for low, high in zip(borders, borders[1:])):
        raise ConfigurationError(
            f"boundaries of LengthBuckets must be growing lengths, got {list(boundaries)}. Write "
            "for example boundaries=(32, 64, 128)."
        )
    longest = int(lengths.max())
    if longest > borders[-1]:
        raise ConfigurationError(
            f"the last boundary of LengthBuckets must be at least as long as the longest sample, "
            f"{longest}, got {borders[-1]}. Add a boundary, or cut the samples."
        )
    used = set(torch.bucketize(lengths, torch.tensor(borders)).tolist())
    return [border for place, border in enumerate(borders) if place in used]


def _lengths_of(dataset: _Samples, lengths: object) -> Tensor:
    """Return the length of every sample.

    Raises:
        ConfigurationError: lengths that are none, or not one for each sample.
        DataError: samples that have none.
    """
    try:
        count = len(dataset)
    except TypeError as error:
        raise ConfigurationError(
            "LengthBuckets needs a dataset with samples by index and __len__, got "
            f"{type(dataset).__name__}. A stream can't be grouped by length."
        ) from error
    if lengths is None or isinstance(lengths, str):
        values: Iterable[object] = (_length_of(dataset[i], lengths) for i in range(count))
    elif callable(lengths):
        values = (lengths(dataset[index]) for index in range(count))
    else:
        listed = error_collector.as_list(lengths)
        values = [lengths] if listed is None else listed
    came_as = list(values)
    whole = [*map(error_collector.whole_number, came_as)]
    numbers = [number for number in whole if number is not None]
    wrong = [each for each, number in zip(came_as, whole) if number is None]
    if wrong or not count or len(numbers) != count:
        needed = f"an integer for each of the {count} samples"
        advice = "Pass a list of them, or a function of a sample."
        came = wrong[0] if wrong else len(numbers)
        raise unfit("lengths of LengthBuckets", needed, came, advice)
    sizes = torch.tensor(numbers, dtype=torch.int64)
    if int(sizes.min()) < 1:
        raise ConfigurationError(
            f"lengths of LengthBuckets must be at least 1, got {int(sizes.min())} for sample "
            f"{int(sizes.argmin())}. Leave empty samples out."
        )
    return sizes


def _length_of(sample: object, name: Optional[str]) -> int:
    """Return the size of the first dimension of a sample's inputs, or of the entry of a name."""
    part = as_plain(sample)
    if name is not None:
        part = part.get(name) if isinstance(part, dict) else None
        if isinstance(part, int):
            return part
    elif isinstance(part, dict) and "input_ids" in part:
        part = part["input_ids"]
    # The first of several entries that has one: of (inputs, target) the inputs have.
    leaves = (leaf for leaf in tree.flatten(part)[0] if isinstance(leaf, (str, Tensor)))
    first = next((leaf for leaf in leaves if isinstance(leaf, str) or leaf.dim()), None)
    if first is None:
        where = "" if name is None else f" under {name!r}"
        raise DataError(
            f"LengthBuckets needs a length of every sample, but {type(sample).__name__} has no "
            f"sequence{where}. Pass lengths=, a list of integers or a function of a sample."
        )
    return len(first)


def _least_padding(lengths: Tensor, most: int, multiple_of: int) -> List[int]:
    """Choose boundaries that leave the least padding.

    With the candidates in order, the cheapest way to cover the first ``i`` of them with ``k``
    boundaries ends at the ``i``-th, of ``border`` length, and begins after some ``j``-th: it costs
    ``best[k - 1][j] + border * (count[i] - count[j])`` elements. For growing borders the best ``j``
    is the lowest of lines of falling slope, which are gone through once.

    Args:
        lengths: of all samples.
        most: boundaries at most.
        multiple_of: boundaries are multiples of it.
    """
    rounded = (lengths + multiple_of - 1) // multiple_of * multiple_of
    counts: Dict[int, int] = collections.Counter(rounded.tolist())
    borders = sorted(counts)
    ends = [0, *itertools.accumulate(counts[border] for border in borders)]
    costs = [border * end for border, end in zip(borders, ends[1:])]
    choices: List[List[int]] = [[0] * len(borders)]
    for _ in range(1, min(most, len(borders))):
        costs, choice = _one_more(borders, ends, costs)
        choices.append(choice)
    chosen, place = [], len(borders) - 1
    for choice in reversed(choices):
        chosen.append(borders[place])
        place = choice[place] - 1
        if place < 0:
            break
    return chosen[::-1]


def _one_more(
    borders: List[int], ends: List[int], before: List[int]
) -> Tuple[List[int], List[int]]:
    """Costs with one boundary more, and for each last boundary how many candidates come before."""
    costs, choice = [], []
    # Lines of (intercept, slope, place): the cost of ending the boundaries before at a place.
    lines: List[_Line] = []
    first = 0
    for place, border in enumerate(borders):
        new = (before[place - 1] if place else 0, ends[place], place)
        while len(lines) - first >= 2 and _is_above(lines[-2], lines[-1], new):
            lines.pop()
        lines.append(new)
        while len(lines) - first >= 2 and _at(lines[first + 1], border) <= _at(
            lines[first], border
        ):
            first += 1
        costs.append(_at(lines[first], border) + border * ends[place + 1])
        choice.append(lines[first][2])
    return costs, choice


def _at(line: _Line, border: int) -> int:
    return line[0] - line[1] * border


def _is_above(one: _Line, middle: _Line, other: _Line) -> bool:
    """Return True if the middle one of three lines of falling slopes is the lowest nowhere."""
    return (other[0] - one[0]) * (middle[1] - one[1]) <= (middle[0] - one[0]) * (other[1] - one[1])
