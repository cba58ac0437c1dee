"""Train a small language model with Muon for hidden matrices and AdamW for the rest.

Trains on the text of Python's own `this` module, character by character, with "muon" and with
"adamw", under one schedule, and prints the last losses and who trained what. Takes some seconds.

    pip install .
    python examples/muon.py
"""

import codecs
import contextlib
import io

import torch
from torch import nn

import ipufit

with contextlib.redirect_stdout(io.StringIO()):
    import this

TEXT = codecs.decode(this.s, "rot13")
LETTERS = sorted(set(TEXT))
LENGTH = 16


class Letters(nn.Module):
    """Predicts the next letter of each place from the letters before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width)
        self.position_embedding = nn.Parameter(torch.zeros(LENGTH, width))
        self.mix = nn.Linear(LENGTH * width, 2 * width)
        self.hidden = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, len(LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Logits of the letter after the last one."""
        x = (self.embed(letters) + self.position_embedding).flatten(1)
        x = torch.relu(self.hidden(torch.relu(self.mix(x))))
        return self.out(self.norm(x))


codes = torch.tensor([LETTERS.index(letter) for letter in TEXT])
x = codes.unfold(0, LENGTH, 1)[:-1]
y = codes[LENGTH:]

losses = {}
for optimizer in ("muon", "adamw"):
    torch.manual_seed(0)
    model = ipufit.Model(Letters())
    model.compile(optimizer, "cross_entropy", lr_scheduler=lambda update: 3e-3 * 0.98**update)
    history = model.fit(x, y, batch_size=32, epochs=5, device_iterations=8, seed=0, verbose=0)
    losses[optimizer] = history.history["loss"][-1]
    print(f"{optimizer}: loss {losses[optimizer]:.3f}")
assert losses["muon"] < losses["adamw"]
print(f"muon's loss is lower by {losses['adamw'] - losses['muon']:.3f}")
