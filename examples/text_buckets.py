"""Classify docstrings by their package: texts of many lengths, in buckets.

Most docstrings have twenty words, some have hundreds. LengthBuckets puts those of like length
together and pads them to one of a few lengths, each of which is recorded once; the learning rate
falls along a cosine to the end of the run. Nothing is downloaded. Prints the shapes of batches (at
most 8), the accuracy on held-out docstrings (at least 0.7), and how many times as many samples a
second there are as with all texts padded to the longest (at least 1.8). Takes well under a minute
on two cores.

    pip install .
    python examples/text_buckets.py
"""

import ast
import re
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import ipufit
from ipufit.data import LengthBuckets
from ipufit.optim.schedules import Cosine

SEED = 0
PACKAGES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml")
LONGEST = 256  # words
WORDS = 2000


def docstrings():
    """Words and number of the package of each docstring."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = []
    for number, package in enumerate(PACKAGES):
        for path in sorted((library / package).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    words = re.findall(r"[A-Za-z_]+|[^\sA-Za-z_]", ast.get_docstring(node) or "")
                    if words:
                        texts.append((words[:LONGEST], number))
    return texts


def load():
    """Samples, ({"words": numbers (n,)}, package), some to train on and some to test with."""
    texts = docstrings()
    counts = Counter(word.lower() for words, _ in texts for word in words)
    numbers = {word: i + 2 for i, (word, _) in enumerate(counts.most_common(WORDS))}
    samples = [
        ({"words": torch.tensor([numbers.get(word.lower(), 1) for word in words])}, package)
        for words, package in texts
    ]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(SEED)).tolist()
    samples = [samples[i] for i in order]
    return samples[len(samples) // 5 :], samples[: len(samples) // 5]


class Reader(nn.Module):
    """A layer of attention over the words that are there, and their mean."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(WORDS + 2, width, padding_idx=0)
        self.place = nn.Parameter(0.02 * torch.randn(LONGEST, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(PACKAGES))

    def forward(self, words, there):
        seen = self.embed(words) + self.place[: words.shape[1]]
        seen = self.layers(seen, src_key_padding_mask=~there)
        there = there.unsqueeze(2)
        return self.head((seen * there).sum(1) / there.sum(1))


def loader(samples, shuffle=True, **options):
    buckets = LengthBuckets(
        samples, 16, lambda s: len(s[0]["words"]), mask="there", shuffle=shuffle, **options
    )
    return DataLoader(samples, batch_sampler=buckets, collate_fn=buckets.pad)


def compiled():
    torch.manual_seed(SEED)
    model = ipufit.Model(Reader())
    model.compile(
        lambda params: torch.optim.AdamW(params, lr=0.003),
        "cross_entropy",
        metrics=["accuracy"],
        lr_scheduler=Cosine(warmup=0.1),
    )
    return model


def rate(model, batches, samples):
    """Samples a second, once all is recorded."""
    start = time.perf_counter()
    model.fit(batches, device_iterations=8, seed=SEED, verbose=0)
    return samples / (time.perf_counter() - start)


def main():
    """Fit in buckets, evaluate, and compare the time of an epoch."""
    torch.set_num_threads(1)
    train, test = load()
    batches = loader(train)
    shapes = {inputs["words"].shape for inputs, _ in batches}
    print(f"{len(train)} docstrings of 1 to {LONGEST} words, batches of {len(shapes)} shapes")
    model = compiled()
    model.fit(batches, epochs=4, device_iterations=8, seed=SEED, verbose=2)
    accuracy = model.evaluate(loader(test, shuffle=False), verbose=0)["accuracy"]
    print(f"test: accuracy {accuracy:.3f}")
    whole = loader(train, boundaries=(LONGEST,))
    longest = compiled()
    longest.fit(whole, device_iterations=8, seed=SEED, verbose=0)
    times = rate(model, batches, len(train)) / rate(longest, whole, len(train))
    print(f"{times:.1f} times the samples a second of padding all to the longest")
    if accuracy < 0.7 or len(shapes) > 8 or times < 1.8:
        sys.exit(f"accuracy {accuracy:.3f}, {len(shapes)} shapes, {times:.1f} times the rate")


if __name__ == "__main__":
    main()
