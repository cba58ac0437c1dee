"""Batches of samples of like length: the least padding, every sample once, the same bits again."""

import collections
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ipufit.core.plan import Plan
from ipufit.data import LengthBuckets
from ipufit.data.length_buckets import _least_padding
from ipufit.data.sharding import GlobalBatchIndex, RankShard
from ipufit.errors import ConfigurationError, DataError
from tests.told import message

pytestmark = pytest.mark.both_engines

LENGTHS = [3, 9, 4, 4, 12, 7, 5, 3, 9, 11, 2, 6, 6, 5, 12, 8, 4, 10, 3, 7, 5, 9, 6]


def texts(lengths=tuple(LENGTHS)):
    """Samples of these lengths: token numbers from 1 on, and two numbers to learn."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(1, 20, (length,), generator=generator),
            torch.randn(2, generator=generator, dtype=torch.float64),
        )
        for length in lengths
    ]


def loader(buckets, dataset, **options):
    return DataLoader(dataset, batch_sampler=buckets, collate_fn=buckets.pad, **options)


def padded(borders, lengths):
    return sum(min(border for border in borders if border >= each) for each in lengths)


@pytest.mark.parametrize("multiple_of", [1, 4])
@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_no_other_boundaries_leave_less_padding(most, multiple_of):
    """All choices of so many boundaries are tried."""
    drawn = random.Random(most * multiple_of)
    for _ in range(40):
        lengths = [drawn.randint(1, 20) for _ in range(drawn.randint(1, 25))]
        candidates = sorted({-(-each // multiple_of) * multiple_of for each in lengths})
        choices = (
            (*some, candidates[-1])
            for count in range(min(most, len(candidates)))
            for some in itertools.combinations(candidates[:-1], count)
        )
        best = min(padded(borders, lengths) for borders in choices)
        chosen = _least_padding(torch.tensor(lengths), most, multiple_of)
        assert len(chosen) <= most
        assert set(chosen) <= set(candidates)
        assert padded(chosen, lengths) == best


@pytest.mark.parametrize("size", [1, 3, 4, 23, 30])
@pytest.mark.parametrize("most", [1, 2, 4, 8])
def test_every_sample_comes_once_in_no_more_shapes_than_are_wanted(size, most):
    """Over several epochs, the smaller last batch included."""
    data = texts()
    buckets = LengthBuckets(data, size, max_recordings=most)
    shapes = set()
    for _ in range(3):
        batches = list(buckets)
        assert len(batches) == len(buckets) == -(-len(data) // size)
        assert sorted(itertools.chain(*batches)) == list(range(len(data)))
        assert all(len(batch) == size for batch in batches[:-1])
        shapes |= {tuple(x.shape) for x, _ in loader(buckets, data)}
    # One boundary and a smaller last batch are two shapes whatever one wants.
    assert len(shapes) <= max(most, 1 + bool(len(data) % size and size < len(data)))


def test_the_share_of_padding_is_that_of_an_epoch():
    data = texts()
    for size in (2, 4, 5):
        buckets = LengthBuckets(data, size)
        elements = sum(x.numel() for x, _ in loader(buckets, data))
        assert buckets.padding == pytest.approx(1 - sum(LENGTHS) / elements)
    assert repr(LengthBuckets(data, 4, boundaries=(8, 12))) == (
        "LengthBuckets(23 samples, batch_size=4, boundaries=(8, 12), padding=0.292)"
    )


def test_the_order_is_drawn_from_torchs_generator_alone():
    """As that of torch's samplers; without shuffling it goes from short to long."""
    buckets = LengthBuckets(texts(), 4)
    orders = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        orders.append(list(buckets))
        random.seed(seed)
    assert orders[0] == orders[2] != orders[1]
    ordered = LengthBuckets(texts(), 4, boundaries=(5, 12), shuffle=False)
    state = torch.get_rng_state()
    short = [i for i, each in enumerate(LENGTHS) if each <= 5]
    long = [i for i, each in enumerate(LENGTHS) if each > 5]
    assert list(itertools.chain(*ordered)) == [*short, *long]
    assert torch.equal(torch.get_rng_state(), state)


def test_boundaries_may_be_given():
    """Those that no sample needs have no batches."""
    buckets = LengthBuckets(texts(), 4, boundaries=(1, 6, 7, 16, 64))
    assert buckets.boundaries == (6, 7, 16)
    found = {x.shape[1] for x, _ in loader(buckets, texts())}
    assert found <= {6, 7, 16}
    for border in LengthBuckets(texts(), 4, max_recordings=4, multiple_of=4).boundaries:
        assert border % 4 == 0


def of_pairs(sample):
    return len(sample[0])


@pytest.mark.parametrize(
    "lengths",
    [None, LENGTHS, tuple(LENGTHS), torch.tensor(LENGTHS), np.array(LENGTHS), of_pairs],
    ids=["none", "list", "tuple", "tensor", "array", "function"],
)
def test_lengths_come_in_every_form(lengths):
    expected = LengthBuckets(texts(), 4, LENGTHS, boundaries=(5, 8, 12))
    buckets = LengthBuckets(texts(), 4, lengths, boundaries=(5, 8, 12))
    assert torch.equal(buckets._buckets, expected._buckets)


def test_an_entry_may_be_the_length_itself():
    """As the column is that the transformers library groups by."""
    samples = [{"ids": [1] * size, "length": size} for size in LENGTHS]
    expected = LengthBuckets(samples, 4, "ids", boundaries=(5, 12))
    assert torch.equal(
        LengthBuckets(samples, 4, "length", boundaries=(5, 12))._buckets, expected._buckets
    )


def one_batch(data, **options):
    """Everything in one batch, in the data's order from short to long."""
    buckets = LengthBuckets(data, len(data), shuffle=False, **options)
    (batch,) = loader(buckets, data)
    return batch


def test_tensors_are_padded_to_the_boundary_and_not_to_the_longest():
    batch = one_batch([torch.tensor([1, 2]), torch.tensor([3, 4, 5])], boundaries=(6,), pad=9)
    assert batch.tolist() == [[1, 2, 9, 9, 9, 9], [3, 4, 5, 9, 9, 9]]
    batch = one_batch([torch.ones(2), torch.ones(5)], multiple_of=4, pad=-1.5)
    assert batch.shape == (2, 8)
    assert batch[0].tolist() == [1, 1, *[-1.5] * 6]
    alike = one_batch([torch.ones(3, 2), torch.ones(3, 2)], multiple_of=4)
    assert alike.sum((0, 2)).tolist() == [4, 4, 4, 0]


def test_whichever_dimension_varies_is_padded():
    """Channels may come first, and matrices vary in both."""
    batch = one_batch([torch.ones(2, 3), torch.ones(2, 5)], lengths=[3, 5])
    assert batch.shape == (2, 2, 5)
    assert batch.sum((1, 2)).tolist() == [6, 10]
    batch = one_batch([torch.ones(2, 2), torch.ones(3, 3)])
    assert batch[0].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]


def test_pairs_have_targets_that_the_loss_leaves_out():
    """A target for each token is padded with -100, a class of the whole text is not."""
    tagged = [(torch.tensor([1, 2]), torch.tensor([0, 1])), (torch.arange(3), torch.arange(3))]
    _, target = one_batch(tagged)
    assert target.tolist() == [[0, 1, -100], [0, 1, 2]]
    inputs, target, weight = one_batch([(torch.ones(1), 1, 0.5), (torch.ones(2), 0, 1.0)])
    assert inputs.tolist() == [[1, 0], [1, 1]]
    assert target.tolist() == [1, 0]
    assert weight.tolist() == [0.5, 1]
    weighted = [(torch.ones(n), torch.ones(n), torch.ones(n)) for n in (1, 2)]
    _, target, weight = one_batch(weighted, pad=(0, 7, None))
    assert target.tolist() == [[1, 7], [1, 1]]
    assert weight.tolist() == [[1, 0], [1, 1]]


class Encoding(collections.UserDict):
    """As BatchEncoding of transformers."""

    def convert_to_tensors(self):
        raise AssertionError


class Tokenizer:
    """What the tokenizers of Hugging Face have about padding."""

    pad_token_id = 5
    pad_token_type_id = 3

    def __init__(self, padding_side="right"):
        self.padding_side = padding_side


def encoded(length, form=list):
    """One text, as a tokenizer makes it: lists, or a batch of one."""
    entries = {
        "input_ids": list(range(10, 10 + length)),
        "token_type_ids": [1] * length,
        "attention_mask": [1] * length,
        "special_tokens_mask": [0] * length,
    }
    if form is list:
        return Encoding({**entries, "labels": list(range(length))})
    return Encoding({name: torch.tensor([each]) for name, each in entries.items()})


def test_outputs_of_tokenizers_are_padded_as_they_pad_them():
    """Every entry with what its models expect, labels with what the loss ignores."""
    batch = one_batch([encoded(2), encoded(3)], boundaries=(4,), pad=Tokenizer())
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[10, 11, 5, 5], [10, 11, 12, 5]],
        "token_type_ids": [[1, 1, 3, 3], [1, 1, 1, 3]],
        "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 0]],
        "special_tokens_mask": [[0, 0, 1, 1], [0, 0, 0, 1]],
        "labels": [[0, 1, -100, -100], [0, 1, 2, -100]],
    }
    left = one_batch([encoded(2), encoded(3)], pad=Tokenizer("left"))
    assert left["input_ids"].tolist() == [[5, 10, 11], [10, 11, 12]]
    assert left["labels"].tolist() == [[-100, 0, 1], [0, 1, 2]]
    tensors = one_batch([encoded(2, "tensors"), encoded(3, "tensors")], pad=Tokenizer())
    assert torch.equal(tensors["input_ids"], torch.tensor([[10, 11, 5], [10, 11, 12]]))


def test_ids_without_a_mask_get_one():
    """Nobody could tell padding from tokens."""
    samples = [{"input_ids": [1, 2], "label": 1}, {"input_ids": [3, 4, 5], "label": 0}]
    batch = one_batch(samples)
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["attention_mask"].dtype == torch.int64
    assert batch["label"].tolist() == [1, 0]


def test_a_mask_may_be_asked_for():
    """Under a name in a dict, else beside the inputs."""
    expected = [[True, False], [True, True]]
    batch = one_batch([{"x": torch.ones(1)}, {"x": torch.ones(2)}], mask="there")
    assert batch["there"].tolist() == expected
    (x, mask), _ = one_batch([(torch.ones(1), 0), (torch.ones(2), 1)], mask="mask")
    assert x.tolist() == [[1, 0], [1, 1]]
    assert mask.tolist() == expected
    inputs, _ = one_batch([((torch.ones(n), n), 0) for n in (1, 2)], mask="mask")
    assert inputs[2].tolist() == expected


def test_other_entries_are_collated_as_torch_does():
    samples = [{"x": np.ones(n), "id": f"text {n}", "score": 0.5, "of": None} for n in (1, 3)]
    batch = one_batch(samples, lengths="x")
    assert batch["id"] == ["text 1", "text 3"]
    assert batch["score"].tolist() == [0.5, 0.5]
    assert batch["of"] is None
    assert batch["x"].dtype == torch.float64


def test_it_goes_to_workers():
    """By any way of starting them, without the dataset."""
    data = texts()
    buckets = LengthBuckets(data, 4, shuffle=False)
    alone = list(loader(buckets, data))
    for one, other in zip(alone, loader(buckets, data, num_workers=1)):
        assert torch.equal(one[0], other[0])
    pad = pickle.loads(pickle.dumps(buckets.pad))
    assert torch.equal(pad(data[:3])[0], buckets.pad(data[:3])[0])


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_processes_divide_the_batches_of_one(processes, accumulation):
    """Together they have every batch, and each knows how large those of the others are."""
    buckets = LengthBuckets(texts(), 4)
    torch.manual_seed(3)
    expected = list(buckets)
    found = []
    for process in range(processes):
        plan = Plan.make(
            micro_batch_size=4,
            gradient_accumulation=accumulation,
            device_iterations=1,
            training=True,
            processes=processes,
            process=process,
        )
        ledger = GlobalBatchIndex()
        torch.manual_seed(3)
        shard = RankShard(plan, ledger, 0, torch.enable_grad)
        own = shard.picked(lambda: buckets, len, list)
        found += [(shard.number(index), batch) for index, batch in enumerate(own)]
        assert ledger.total == len(expected)
    assert [batch for _, batch in sorted(found)] == expected


# bad input


def stream():
    return iter(())


def refused(kind, *arguments, **options):
    return message(LengthBuckets, *arguments, **options, kind=kind)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size of LengthBuckets must be an integer of at least 1, got 0."),
        (
            {"max_recordings": 0},
            "max_recordings of LengthBuckets must be an integer of at least 1 or None, got 0.",
        ),
        (
            {"multiple_of": 1.5},
            "multiple_of of LengthBuckets must be an integer of at least 1, got 1.5.",
        ),
        ({"shuffle": 1}, "shuffle of LengthBuckets must be True or False, got 1."),
        (
            {"boundaries": (8, 12), "multiple_of": 8, "max_recordings": 2},
            "max_recordings and multiple_of of LengthBuckets choose boundaries, but boundaries are "
            "given. Leave one of them out.",
        ),
        (
            {"boundaries": (12, 8)},
            "boundaries of LengthBuckets must be growing lengths, got [12, 8]. Write for example "
            "boundaries=(32, 64, 128).",
        ),
        (
            {"boundaries": (4, 8)},
            "the last boundary of LengthBuckets must be at least as long as the longest sample, "
            "12, got 8. Add a boundary, or cut the samples.",
        ),
        (
            {"lengths": [3, 4]},
            "lengths of LengthBuckets must be an integer for each of the 23 samples, got 2. Pass a "
            "list of them, or a function of a sample.",
        ),
        (
            {"lengths": lambda sample: 1.5},
            "lengths of LengthBuckets must be an integer for each of the 23 samples, got 1.5. Pass "
            "a list of them, or a function of a sample.",
        ),
        (
            {"lengths": [0, *LENGTHS[1:]]},
            "lengths of LengthBuckets must be at least 1, got 0 for sample 0. Leave empty samples "
            "out.",
        ),
        (
            {"pad": "zero"},
            "pad of LengthBuckets must be a number, a dict of numbers by the names of entries, a "
            "tuple of numbers by their places, or a tokenizer, got 'zero'. Write for example "
            "pad={'input_ids': 1, 'labels': -100}.",
        ),
        (
            {"pad": {"text": 0}},
            "pad of LengthBuckets must name entries of a sample, got 'text'. There is 0, 1.",
        ),
        (
            {"mask": 3},
            "mask of LengthBuckets must be the name of a new input, got 3. Choose another name, or "
            "leave it out.",
        ),
    ],
)
def test_what_can_not_work_is_refused_as_it_is_made(options, text):
    assert refused(ConfigurationError, texts(), **{"batch_size": 4, **options}) == text


def test_several_faults_are_reported_together():
    text = refused(ConfigurationError, texts(), 0, shuffle=None)
    assert text.splitlines() == [
        "batch_size of LengthBuckets must be an integer of at least 1, got 0.",
        "shuffle of LengthBuckets must be True or False, got None.",
    ]


def test_data_without_lengths_is_refused():
    assert refused(ConfigurationError, stream(), 4) == (
        "LengthBuckets needs a dataset with samples by index and __len__, got tuple_iterator. A "
        "stream can't be grouped by length."
    )
    assert refused(DataError, [{"a": 1.0}], 4) == (
        "LengthBuckets needs a length of every sample, but dict has no sequence. Pass lengths=, a "
        "list of integers or a function of a sample."
    )
    assert refused(DataError, [{"a": [1]}], 4, "b") == (
        "LengthBuckets needs a length of every sample, but dict has no sequence under 'b'. Pass "
        "lengths=, a list of integers or a function of a sample."
    )


def test_samples_that_do_not_go_together_are_refused():
    assert refused(DataError, [{"a": [1]}, {"b": [1, 2]}], 2) == (
        "all samples of LengthBuckets must have the same structure, got dict('a': *) and "
        "dict('b': *). Yield the same entries for every sample."
    )
    buckets = LengthBuckets([torch.ones(2), torch.ones(3)], 2, boundaries=(4,))
    with pytest.raises(DataError) as caught:
        buckets.pad([torch.ones(5)])
    assert str(caught.value) == (
        "a sample must be no longer than the last boundary of LengthBuckets, 4, got 5. Let "
        "lengths return the length of the longest padded entry of a sample, such as "
        "lengths=lambda s: max(map(len, s))."
    )
    samples = [
        {"x": [1], "tags": [1, 2]},
        {"x": [1, 2], "tags": [1]},
        {"x": [1] * 3, "tags": [1, 2]},
    ]
    assert message(LengthBuckets(samples, 3, "x").pad, samples, kind=DataError) == (
        "sample['tags'] must have the same shape in the whole batch, or be padded, got shapes "
        "(1,), (2,). Say by name what to pad it with, such as pad={'labels': -100}."
    )
    named = LengthBuckets(samples, 3, "x", pad={"tags": -1}).pad(samples)
    assert named["tags"].tolist() == [[1, 2, -1], [1, -1, -1], [1, 2, -1]]


def test_numbers_that_the_loss_would_count_need_to_be_said():
    samples = [(torch.ones(n), torch.ones(n)) for n in (1, 2)]
    assert refused(ConfigurationError, samples, 2) == (
        "pad of LengthBuckets must say what the target 1 of torch.float32 is padded with, "
        "because the loss counts it. Pass pad={1: 0.0} and a loss or weights that ignore "
        "padding."
    )
    _, target = one_batch(samples, pad={1: 0.0})
    assert target.tolist() == [[1, 0], [1, 1]]


def test_a_tokenizer_without_a_pad_token_is_refused():
    tokenizer = Tokenizer()
    tokenizer.pad_token_id = None
    assert refused(ConfigurationError, [encoded(2), encoded(3)], 2, pad=tokenizer) == (
        "pad of LengthBuckets must be a tokenizer with a pad token, but Tokenizer has none. Set "
        "tokenizer.pad_token = tokenizer.eos_token (the attention mask hides it), or pass "
        "pad={'input_ids': ...}."
    )


def test_a_mask_that_is_there_or_of_nothing_is_refused():
    samples = [encoded(2), encoded(3)]
    assert refused(ConfigurationError, samples, 2, mask="attention_mask") == (
        "mask of LengthBuckets must be the name of a new input, got 'attention_mask', but there is "
        "one already. Choose another name, or leave it out."
    )
    samples = [(torch.ones(2), 0)] * 2
    assert refused(ConfigurationError, samples, 2, [1, 2], mask="mask") == (
        "mask of LengthBuckets must be the name of a new input, got 'mask', but no input is "
        "padded. Choose another name, or leave it out."
    )
