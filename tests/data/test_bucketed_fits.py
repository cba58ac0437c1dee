"""Fits, evaluations and predictions over batches of samples of like length."""

import copy
import gc
import itertools
import random
import re
from pydoc_data import topics

import pytest
import torch
from torch import nn

import ipufit
from ipufit.data import LengthBuckets
from tests.checkpoint.test_resume import EndError, Ends
from tests.data.test_length_buckets import loader, texts
from tests.engines import embedded_only

in_order = embedded_only("an update of an IPU waits for micro-batches of one shape")


class Reader(nn.Module):
    """The mean over the tokens that are there, each seen with its neighbours."""

    def __init__(self, drop=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 6)
        self.layer = nn.Conv1d(6, 6, 3, padding=1)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(6, 2)

    def forward(self, text, mask):
        there = mask.unsqueeze(1).double()
        seen = self.layer(self.embed(text).transpose(1, 2) * there).tanh()
        seen = self.drop(seen) * there
        return self.head(seen.sum(2) / there.sum(2))


def compiled(drop=0.0, **options):
    net = Reader(drop).double()
    model = ipufit.Model(net)
    model.compile(torch.optim.AdamW(net.parameters(), 0.01), "mse", **options)
    return model


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.module.parameters()])


def batches(data, size=4, workers=None, **options):
    buckets = LengthBuckets(data, size, mask="mask", **options)
    return loader(buckets, data, **(workers or {}))


class Noting(torch.utils.data.Dataset):
    """Remembers which samples were read."""

    def __init__(self):
        self.data, self.read = texts(), []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.read.append(index)
        return self.data[index]


def padded_loop(net, data, orders, per_update, size=4):
    """The weights of a loop by hand, which pads to the longest text of all and masks."""
    longest = max(len(x) for x, _ in data)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for order in orders:
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        for start in range(0, len(groups), per_update):
            update = groups[start : start + per_update]
            optimizer.zero_grad()
            for group in update:
                text = torch.zeros(len(group), longest, dtype=torch.int64)
                for row, index in zip(text, group):
                    row[: len(data[index][0])] = data[index][0]
                target = torch.stack([data[index][1] for index in group])
                loss = nn.functional.mse_loss(net(text, text > 0), target)
                (loss * len(group) / sum(map(len, update))).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize(
    ("accumulation", "iterations"),
    [(1, 1), pytest.param(2, 2, marks=in_order), pytest.param(3, 1, marks=in_order)],
)
def test_training_equals_padding_all_to_the_longest_and_masking(accumulation, iterations):
    """Sample by sample in the same order, in two epochs of shuffled buckets with a tail."""
    data = Noting()
    model, source = compiled(), batches(data)
    net = copy.deepcopy(model.module)
    data.read.clear()
    plan = {"gradient_accumulation": accumulation, "device_iterations": iterations}
    model.fit(source, epochs=2, seed=5, verbose=0, **plan)
    orders = [data.read[: len(data)], data.read[len(data) :]]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(len(data)))
    assert orders[0] != orders[1]
    expected = padded_loop(net, data.data, orders, accumulation)
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-10)


def test_there_are_no_more_recordings_than_are_wanted():
    """In any number of epochs."""
    for most in (2, 4):
        source = batches(texts(), max_recordings=most)
        history = compiled().fit(source, epochs=3, seed=1, verbose=0)
        assert history.params["recordings"] <= most


@pytest.mark.long("ipu-standin")
def test_the_order_depends_on_seed_and_epoch_alone():
    """Not on what was drawn before, nor on the plan; a range of epochs begins where it would."""

    def read(seed, epochs, drawn=0, **plan):
        data, model = Noting(), compiled()
        source = batches(data)
        torch.rand(drawn)
        data.read.clear()
        model.fit(source, epochs=epochs, seed=seed, verbose=0, **plan)
        return [data.read[i : i + len(data)] for i in range(0, len(data.read), len(data))]

    expected = read(1, 3)
    assert read(1, 3, drawn=5, device_iterations=2, gradient_accumulation=2) == expected
    assert read(1, range(1, 3)) == expected[1:]
    assert read(2, 1) != expected[:1]


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("after", [2, 6])
@pytest.mark.parametrize(
    "workers",
    [None, pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.long)],
    ids=["alone", "workers"],
)
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(after, workers, tmp_path):
    """Dropout included."""

    def fit(model, **options):
        source = batches(texts(), workers=workers)
        model.fit(source, epochs=2, seed=1, verbose=0, **options)
        return weights(model)

    whole = fit(compiled(0.3))
    checkpoint = ipufit.Checkpoint(tmp_path, every_updates=1, resume="auto")
    with pytest.raises(EndError):
        fit(compiled(0.3), checkpoint=checkpoint, callbacks=[Ends(after)])
    # What went through the error may hold files of old torch's, which workers would remove.
    gc.collect()
    assert torch.equal(fit(compiled(0.3), checkpoint=checkpoint, callbacks=[Ends()]), whole)


def test_a_run_does_not_go_on_with_other_boundaries(tmp_path):
    """They are part of the data, as any collate_fn is."""
    work = {"seed": 1, "verbose": 0}
    compiled().fit(batches(texts()), checkpoint=ipufit.Checkpoint(tmp_path), **work)
    checkpoint = ipufit.Checkpoint(tmp_path, resume="auto")
    with pytest.raises(ipufit.errors.CheckpointError, match=r"data collate_fn\.boundaries"):
        compiled().fit(
            batches(texts(), boundaries=(6, 12)), epochs=2, checkpoint=checkpoint, **work
        )


def paragraphs(count=120):
    """Word numbers of the help pages that ship with Python, and to which half a page belongs."""
    numbers, pages = {}, sorted(topics.topics)
    samples = []
    for place, page in enumerate(pages):
        for paragraph in re.split(r"\n\s*\n", topics.topics[page]):
            words = re.findall(r"\w+|[^\w\s]", paragraph)[:160]
            ids = [numbers.setdefault(word.lower(), 1 + len(numbers)) for word in words]
            samples += [(torch.tensor(ids), int(2 * place >= len(pages)))] if ids else []
    return random.Random(0).sample(samples, count)


class Attentive(nn.Module):
    """A layer of attention over the words that are there, and their mean."""

    def __init__(self, words):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, words, there):
        seen = self.layer(self.embed(words), src_key_padding_mask=~there)
        there = there.unsqueeze(2)
        return self.head((seen * there).sum(1) / there.sum(1))


@pytest.mark.long("ipu-standin")
def test_texts_of_pythons_own_help_train_as_if_all_were_padded():
    """In no more than eight recordings, to the weights of padding all to the longest text."""
    samples = paragraphs()
    lengths = [len(words) for words, _ in samples]
    assert max(lengths) > 5 * sorted(lengths)[len(lengths) // 2]
    net = Attentive(1 + max(int(words.max()) for words, _ in samples)).double()
    other = copy.deepcopy(net)
    buckets = LengthBuckets(samples, 16, mask="there", shuffle=False)
    model = ipufit.Model(net)
    model.compile(torch.optim.AdamW(net.parameters(), 0.01), "cross_entropy")
    history = model.fit(loader(buckets, samples), epochs=2, verbose=0)
    assert history.params["recordings"] <= 8
    whole = LengthBuckets(samples, 16, boundaries=(max(lengths),), mask="there")
    optimizer = torch.optim.AdamW(other.parameters(), 0.01)
    for indices in [*buckets] * 2:
        (words, there), target = whole.pad([samples[i] for i in indices])
        assert words.shape[1] == max(lengths)
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(words, there), target).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in other.parameters()])
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-10)


@embedded_only("an update of an IPU that counts tokens has one micro-batch")
def test_tokens_count_the_same_in_every_bucket():
    """normalize="tokens" is the mean over all tokens of an update, whatever their buckets."""
    data = [(x, torch.randint(0, 3, (len(x),))) for x, _ in texts()]

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

        def forward(self, text):
            return self.head(self.embed(text)).transpose(1, 2)

    net = Tagger().double()
    other = copy.deepcopy(net)
    model = ipufit.Model(net)
    reduction = ipufit.Reduction(normalize="tokens")
    model.compile(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", reduction=reduction)
    buckets = LengthBuckets(data, 4, boundaries=(5, 12), shuffle=False)
    order = list(buckets)
    model.fit(loader(buckets, data), gradient_accumulation=2, verbose=0)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for start in range(0, len(order), 2):
        indices = [i for batch in order[start : start + 2] for i in batch]
        optimizer.zero_grad()
        logits = torch.cat([other(data[i][0][None])[0] for i in indices], 1).T
        nn.functional.cross_entropy(logits, torch.cat([data[i][1] for i in indices])).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in other.parameters()])
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-12)


def test_evaluate_and_predict_take_them():
    """Unshuffled, predict has the order of the sampler."""
    data = texts()
    buckets = LengthBuckets(data, 4, mask="mask", shuffle=False)
    model = compiled(metrics=["mae"])
    source = loader(buckets, data)
    predicted = model.predict(source, verbose=0)
    alone = {
        i: model.module(x[None], torch.ones(1, len(x), dtype=torch.bool))[0].detach()
        for i, (x, _) in enumerate(data)
    }
    expected = torch.stack([alone[i] for i in itertools.chain(*buckets)])
    torch.testing.assert_close(predicted, expected, rtol=0, atol=1e-12)
    loss = ((expected - torch.stack([data[i][1] for i in itertools.chain(*buckets)])) ** 2).mean()
    assert model.evaluate(source, verbose=0)["loss"] == pytest.approx(loss.item(), rel=1e-12)


def test_explain_counts_batches_whose_sizes_differ(capsys):
    """They are no stream; its plan was one of single samples."""
    pairs = [(torch.ones(5 + i * i % 60), i % 2) for i in range(200)]
    buckets = LengthBuckets(pairs, batch_size=16, max_recordings=5)
    model = ipufit.Model(torch.nn.Linear(1, 2))
    model.compile("sgd", "cross_entropy")
    batches = torch.utils.data.DataLoader(pairs, batch_sampler=buckets, collate_fn=buckets.pad)
    model.explain(batches, device_iterations=4)
    lines = capsys.readouterr().out.splitlines()
    assert "  micro-batch            16  samples" in lines[1]
    n = len(batches)
    assert lines[8].startswith(
        f"One epoch = {n} batches = {n} updates in {-(-n // 4)} executions; "
    )
    model.explain([(torch.zeros(4, 1), torch.zeros(4).long())] * 5)
    lines = capsys.readouterr().out.splitlines()
    assert "  micro-batch            4  samples" in lines[1]
    assert lines[8].startswith("One epoch = 5 batches = 5 updates in 5 executions; ")
