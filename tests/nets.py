"""Small networks in float64 and data for them."""

import torch
from torch import nn


class MLP(nn.Module):
    """Two dense layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x):
        return self.layers(x.flatten(1))


class CNN(nn.Module):
    """A convolution with BatchNorm, dropout and a dense layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 2)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(4 * 2 * 3, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x).flatten(1))


class Transformer(nn.Module):
    """An encoder layer over the rows of the picture, with a learned position."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.position = nn.Parameter(0.1 * torch.randn(3, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.embed(x.squeeze(1)) + self.position
        return self.head(self.encoder(x).mean(1))


class Running(nn.Module):
    """A buffer of its own that forward changes in place, and a constant that is no buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(12, dtype=torch.float64), persistent=False)
        self.scale = torch.full((12,), 0.5, dtype=torch.float64)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.seen += len(x)
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.head((x - self.mean) * self.scale)


class Normed(nn.Module):
    """BatchNorm, without random numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.norm(x.flatten(1)))


class Tally(MLP):
    """Counts the calls of forward in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x)


def data(n):
    """``n`` pictures of 3 x 4 in float64, and classes."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 1, 3, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 5, (n,), generator=generator)


class Noise(nn.Module):
    """Adds noise in train and eval mode alike."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(x + torch.randn_like(x))
