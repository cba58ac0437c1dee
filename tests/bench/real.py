"""Models that people train, small enough for two cores; what they need is in the group "bench"."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import Tensor, nn

from tests.bench.workloads import CLASSES, Batches, Workload

__all__ = ["REAL"]

_WORDS, _LENGTH = 1000, 64
# Lengths of sentences are drawn between these, and padded to the next of the others.
_SHORTEST, _BUCKETS = 5, (16, 32, 48, 64)


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    @functools.wraps(make)
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return made


def _drawn(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


class Logits(nn.Module):
    """A model of transformers as a function of words; of several outputs the scores."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        """Scores, classes in the second dimension."""
        logits: Tensor = self.model(input_ids=words, return_dict=True).logits
        return logits.transpose(1, 2) if logits.dim() == 3 else logits


@_seeded
def _resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=CLASSES)


def _photos(count: int) -> Tuple[Tensor, Tensor]:
    generator = _drawn(3)
    pictures = torch.randn(count, 3, 32, 32, generator=generator)
    return pictures, torch.randint(CLASSES, (count,), generator=generator)


@_seeded
def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=_WORDS,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    return Logits(BertForSequenceClassification(config))


def _texts(count: int) -> Tuple[Tensor, Tensor]:
    generator = _drawn(4)
    words = torch.randint(_WORDS, (count, _LENGTH), generator=generator)
    return words, torch.randint(CLASSES, (count,), generator=generator)


@_seeded
def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_WORDS,
        n_positions=_LENGTH,
        n_embd=256,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return Logits(GPT2LMHeadModel(config))


def _next_words(count: int) -> Tuple[Tensor, Tensor]:
    words = torch.randint(_WORDS, (count, _LENGTH + 1), generator=_drawn(5))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


class Tagger(nn.Module):
    """A class for each word: an LSTM in both directions over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, 64)
        self.layer = nn.LSTM(64, 128, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Scores, classes in the second dimension."""
        scores: Tensor = self.head(self.layer(self.embed(words))[0])
        return scores.transpose(1, 2)


def _sentences(count: int) -> Tuple[Tensor, Tensor]:
    """Sentences of several lengths; what is behind their end counts for nothing."""
    generator = _drawn(6)
    words = torch.randint(1, _WORDS, (count, _LENGTH), generator=generator)
    classes = torch.randint(CLASSES, (count, _LENGTH), generator=generator)
    lengths = torch.randint(_SHORTEST, _LENGTH + 1, (count, 1), generator=generator)
    behind = torch.arange(_LENGTH) >= lengths
    return words.masked_fill(behind, 0), classes.masked_fill(behind, -100)


def _buckets(words: Tensor, classes: Tensor, size: int) -> Batches:
    """Batches of sentences of like length, cut to the longest that a bucket holds."""
    lengths = (words != 0).sum(1)
    found: Batches = []
    for shortest, longest in zip((0, *_BUCKETS), _BUCKETS):
        rows = ((lengths > shortest) & (lengths <= longest)).nonzero()[:, 0]
        for part in rows[: len(rows) // size * size].split(size):
            if len(part) == size:
                batch = words[part, :longest], classes[part, :longest]
                found.append((batch[0].contiguous(), batch[1].contiguous()))
    return found[::2] + found[1::2]


class Tabular(nn.Module):
    """Numbers and categories of a table's rows: embeddings, batch normalisation, three layers."""

    numbers, sizes = 20, (50, 20, 12, 10, 8, 7, 4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(size, (size + 1) // 2) for size in self.sizes)
        self.norm = nn.BatchNorm1d(self.numbers)
        width = self.numbers + sum((size + 1) // 2 for size in self.sizes)
        layers: List[nn.Module] = []
        for inner in (256, 128):
            layers += [nn.Linear(width, inner), nn.ReLU(), nn.BatchNorm1d(inner)]
            width = inner
        self.layers = nn.Sequential(*layers, nn.Linear(width, 2))

    def forward(self, rows: Tensor) -> Tensor:
        """Scores of two classes; the columns behind the numbers are categories."""
        numbers, kinds = rows[:, : self.numbers], rows[:, self.numbers :].long()
        parts = [embed(kinds[:, place]) for place, embed in enumerate(self.embed)]
        scores: Tensor = self.layers(torch.cat([self.norm(numbers), *parts], 1))
        return scores


def _rows(count: int) -> Tuple[Tensor, Tensor]:
    generator = _drawn(7)
    columns = [torch.randn(count, Tabular.numbers, generator=generator)]
    for size in Tabular.sizes:
        columns.append(torch.randint(size, (count, 1), generator=generator).float())
    return torch.cat(columns, 1), torch.randint(2, (count,), generator=generator)


class _Block(nn.Module):
    """Two convolutions with group normalisation, between them a shift that the time gives."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(4, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1)
        )
        self.time = nn.Linear(time, after)
        self.second = nn.Sequential(
            nn.GroupNorm(4, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1)
        )
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Features of the same height and width."""
        inner = self.first(x) + self.time(time)[:, :, None, None]
        result: Tensor = self.second(inner) + self.skip(x)
        return result


class UNet(nn.Module):
    """The noise in pictures, at a time that their last channel holds: two levels, 32 channels."""

    def __init__(self, width: int = 32, time: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, time), nn.SiLU(), nn.Linear(time, time))
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.down = _Block(width, width, time)
        self.narrow = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = _Block(2 * width, 2 * width, time)
        self.widen = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = _Block(2 * width, width, time)
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Noise of shape (samples, 3, height, width)."""
        time = self.time(x[:, 3, :1, 0])
        x = self.down(self.start(x[:, :3]), time)
        inner = self.widen(self.middle(self.narrow(x), time))
        noise: Tensor = self.end(self.up(torch.cat([x, inner], 1), time))
        return noise


def _noisy(count: int) -> Tuple[Tensor, Tensor]:
    generator = _drawn(8)
    noise = torch.randn(count, 3, 16, 16, generator=generator)
    time = torch.rand(count, 1, 1, 1, generator=generator)
    noisy = torch.cat([noise * time.sqrt(), time.expand(count, 1, 16, 16)], 1)
    return noisy.contiguous(), noise


_ANY, _TEXT = ("Lightning",), ("Lightning", "Trainer", "Accelerate")

REAL: Dict[str, Workload] = {
    work.name: work
    for work in (
        Workload("tabular", 128, 64, _seeded(Tabular), _rows, peers=("Lightning", "skorch")),
        Workload(
            "tagger", 32, 32, _seeded(Tagger), _sentences, cuts=_buckets, peers=("Lightning",)
        ),
        Workload("unet", 32, 8, _seeded(UNet), _noisy, loss="mse", peers=("Lightning",)),
        # Adam's first steps follow signs of gradients: after two, float32 is 2e-2 from float64.
        Workload("resnet18", 16, 8, _resnet, _photos, peers=("Lightning",), compared=2),
        Workload("bert", 16, 8, _bert, _texts, peers=_TEXT),
        Workload("gpt2", 16, 8, _gpt2, _next_words, peers=_TEXT),
    )
}
