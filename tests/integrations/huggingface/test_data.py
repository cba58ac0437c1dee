"""Tokenised data in the forms in which people of the transformers library have it."""

import functools
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

import transformers

import ipufit
from ipufit.data import LengthBuckets
from tests.engines import one_shape
from tests.integrations.tiny_models import batch_of, net_of


def fitted(data, compiled=None, **how):
    """Losses of one epoch in the data's order."""
    model = ipufit.Model(net_of("bert"))
    model.compile("sgd", **(compiled or {"jit": "graph"}))
    return model.fit(data, verbose=0, **how).history["loss"]


def samples():
    """Lists of numbers, as tokenizers make them."""
    batch = batch_of("bert")
    return [{key: value[row].tolist() for key, value in batch.items()} for row in range(10)]


@functools.lru_cache(maxsize=None)
def expected():
    return fitted(batch_of("bert"), batch_size=4, shuffle=False)


def test_a_list_of_samples_with_a_collator():
    """The usual loader of the library; a batch is a BatchEncoding or a dict."""
    loader = DataLoader(samples(), batch_size=4, collate_fn=transformers.default_data_collator)
    assert fitted(loader) == expected()
    batches = [transformers.BatchEncoding(batch) for batch in loader]
    assert fitted(batches) == expected()


def test_a_list_of_samples_alone_is_refused():
    """A list is a list of batches; how samples become one, a collator says."""
    with pytest.raises(ipufit.errors.DataError) as caught:
        fitted(samples(), batch_size=4)
    assert str(caught.value) == (
        "training data must be tensors, arrays or batches of them, got a list of samples, each a "
        "dict of int values. Pass DataLoader(x, batch_size=..., collate_fn=...) with a collate_fn "
        "that makes tensors, such as transformers.default_data_collator."
    )


def test_batches_of_other_lengths_are_taken():
    """Each length has a recording of its own, with the numbers of the module itself."""
    batch = batch_of("bert")
    short = {key: value[:, :8] if value.dim() == 2 else value for key, value in batch.items()}
    assert fitted([batch, short]) == fitted([batch, short], {"run_eagerly": True})


def test_labels_under_another_name_are_told():
    """forward takes any name and leaves it unused, so the loss is what is missing."""
    batch = batch_of("bert")
    batch["label"] = batch.pop("labels")
    with pytest.raises(ipufit.errors.LossError, match="put them into the batch under the name"):
        fitted(batch, batch_size=4)


def tokenizer(side="right"):
    """One that splits at blanks, made here: nothing is downloaded."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"[PAD]": 3, "[UNK]": 4, **{str(number): number for number in range(5, 31)}}
    whole = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    whole.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "padding_side": side}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole, **special)


def sentences():
    """Texts of one to sixteen words."""
    return [" ".join(str(5 + (i * j) % 25) for j in range(1, 2 + i * 7 % 16)) for i in range(22)]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", [{}, {"return_tensors": "pt"}], ids=["lists", "tensors"])
def test_buckets_pad_as_the_tokenizer_does(side, form):
    """To the boundary, from outputs of the tokenizer with and without tensors."""
    made = tokenizer(side)
    encoded = [made(text, **form) for text in sentences()]
    buckets = LengthBuckets(encoded, 4, boundaries=(6, 16), pad=made)
    plain = [made(text) for text in sentences()]
    for indices in buckets:
        some = [plain[i] for i in indices]
        border = 6 if max(len(each["input_ids"]) for each in some) <= 6 else 16
        expected = made.pad(
            {name: [each[name] for each in some] for name in some[0]},
            padding="max_length",
            max_length=border,
            return_tensors="pt",
        )
        batch = buckets.pad([encoded[i] for i in indices])
        assert {name: value.tolist() for name, value in batch.items()} == {
            name: value.tolist() for name, value in expected.items()
        }


@one_shape
def test_buckets_train_as_texts_that_are_all_padded_to_the_longest():
    """The attention mask hides padding, so the weights are those of a plain loop over it."""
    made = tokenizer()
    encoded = [{**made(text), "labels": i % 2} for i, text in enumerate(sentences())]
    buckets = LengthBuckets(encoded, 4, max_recordings=4, pad=made, shuffle=False)
    net, other = net_of("bert"), net_of("bert")
    model = ipufit.Model(net)
    model.compile(lambda params: torch.optim.AdamW(params, lr=0.01), loss=None)
    loader = DataLoader(encoded, batch_sampler=buckets, collate_fn=buckets.pad)
    model.fit(loader, epochs=2, verbose=0)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    for indices in [*buckets] * 2:
        some = [encoded[i] for i in indices]
        names = [name for name in some[0] if name != "labels"]
        batch = made.pad(
            {name: [each[name] for each in some] for name in names},
            padding="max_length",
            max_length=16,
            return_tensors="pt",
        )
        optimizer.zero_grad()
        other(**batch, labels=torch.tensor([each["labels"] for each in some])).loss.backward()
        optimizer.step()
    for one, expected in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-10)


class TestTables:
    """A ``datasets.Dataset`` is a map-style dataset, though it does not derive from torch's."""

    @pytest.fixture
    def table(self):
        datasets = pytest.importorskip("datasets")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return datasets.Dataset.from_list(samples())

    def test_it_is_read_as_tensors(self, table):
        """Without a format of its own, as with_format("torch"); with one, in that."""
        assert fitted(table, batch_size=4, shuffle=False) == expected()
        own = table.with_format("numpy")
        assert fitted(own, batch_size=4, shuffle=False) == expected()

    def test_a_part_is_held_out(self, table):
        """validation_split, shuffling and predict go by samples too."""
        model = ipufit.Model(net_of("bert"))
        model.compile("sgd", jit="graph")
        history = model.fit(table, batch_size=4, validation_split=0.2, seed=0, verbose=0)
        assert len(history.history["val_loss"]) == 1
        assert model.predict(table, batch_size=4, verbose=0)["logits"].shape == (10, 2)

    def test_what_is_no_tensor_is_named(self, table):
        """Text that was tokenised is often still there."""
        with pytest.raises(
            ipufit.errors.CaptureError, match=r"input \['text'\]\[0\] must be a tensor"
        ):
            fitted(table.add_column("text", ["a"] * 10), batch_size=4)

    def test_several_splits_are_no_data(self, table):
        """Which one is meant, only the user knows."""
        import datasets

        with pytest.raises(ipufit.errors.DataError, match=r"x\['train'\] must be a tensor"):
            fitted(datasets.DatasetDict(train=table), batch_size=4)
