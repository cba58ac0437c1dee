"""Train a small language model on letters, with the pages of Python's help as text.

The text ships with Python (pydoc_data.topics): nothing is downloaded. A transformer of two layers
learns to tell the next letter from those before it; the loss is a mean over letters, and the
learning rate warms up and falls from update to update. Prints what the model makes of the held-out
end, in bits per letter (at most 3.3; a letter drawn by frequency takes about 4.7), and a
sample. Takes well under a minute on two cores.

    pip install .
    python examples/language_model.py
"""

import math
import sys
from pydoc_data import topics

import torch
from torch import nn

import ipufit

SEED = 0
LENGTH, WIDTH = 64, 64
UPDATES = 400


def load():
    """Numbers of letters of the whole text, and the letters."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    text = text.encode("ascii", "ignore").decode()[:200_000]
    letters = sorted(set(text))
    place = {letter: number for number, letter in enumerate(letters)}
    return torch.tensor([place[letter] for letter in text]), letters


def cut(numbers):
    """Pieces (n, LENGTH), and the letter that follows each letter of them."""
    count = (len(numbers) - 1) // LENGTH
    pieces = numbers[: count * LENGTH].reshape(count, LENGTH)
    return pieces, numbers[1 : count * LENGTH + 1].reshape(count, LENGTH)


class Writer(nn.Module):
    """Logits (n, letters, LENGTH), as cross entropy over letters takes them."""

    def __init__(self, letters):
        super().__init__()
        self.letter = nn.Embedding(letters, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, text):
        size = text.shape[1]
        seen = self.letter(text) + self.place[:size]
        seen = self.layers(seen, mask=self.later[:size, :size])
        return self.head(seen).transpose(1, 2)


def rate(update):
    """A linear warm-up, then half a cosine; of the optimizer's own."""
    if update < 40:
        return (update + 1) / 40
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - 40) / (UPDATES - 40))))


@torch.no_grad()
def sample(net, letters, start, count=200):
    """What the model would write on, drawn letter by letter."""
    net.eval()
    generator = torch.Generator().manual_seed(SEED)
    text = [letters.index(letter) for letter in start]
    for _ in range(count):
        logits = net(torch.tensor([text[-LENGTH:]]))[0, :, -1]
        text.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
    return "".join(letters[number] for number in text)


def main():
    """Fit, evaluate, write."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    numbers, letters = load()
    x, y = cut(numbers)
    held = len(x) // 10
    net = Writer(len(letters))
    model = ipufit.Model(net)
    model.compile(
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.006, weight_decay=0.01),
        loss="cross_entropy",
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        clip=ipufit.Clip(global_norm=1.0),
        reduction=ipufit.Reduction(normalize="tokens"),
    )
    work = {"batch_size": 16, "device_iterations": 10, "seed": SEED, "verbose": 2}
    model.fit(x[:-held], y[:-held], steps_per_epoch=UPDATES // 4, epochs=4, **work)
    loss = model.evaluate(x[-held:], y[-held:], batch_size=16, verbose=0)["loss"]
    bits = loss / math.log(2)
    print(f"held out: {bits:.3f} bits per letter")
    print(f"a sample: {sample(net, letters, 'The following ')!r}")
    if bits > 3.3:
        sys.exit(f"more than 3.3 bits per letter: {bits:.3f}")


if __name__ == "__main__":
    main()
