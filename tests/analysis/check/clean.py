"""Models that a recorded program does exactly as they are written."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import ipufit

MODELS = {}


def clean(make):
    """A function that returns a module, its inputs, its target and its loss."""
    MODELS[make.__name__] = make
    return make


def classes(size=4, count=3):
    return torch.arange(size) % count


def picture(size=4, side=8, channels=3):
    return torch.randn(size, channels, side, side)


class Last(nn.Module):
    """A recurrent layer, and a head on its last output."""

    def __init__(self, recurrent, width):
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


@clean
def dense():
    between = [nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout()]
    net = nn.Sequential(nn.Linear(4, 8), *between, nn.Linear(8, 3))
    return net, torch.randn(4, 4), classes(), "cross_entropy"


@clean
def rnn():
    return Last(nn.RNN(4, 5, batch_first=True), 5), torch.randn(4, 3, 4), classes(), "cross_entropy"


@clean
def lstm_of_two_layers_and_directions():
    layer = nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True, dropout=0.1)
    return Last(layer, 10), torch.randn(4, 3, 4), classes(), "cross_entropy"


@clean
def gru():
    return Last(nn.GRU(4, 5, batch_first=True), 5), torch.randn(4, 3, 4), classes(), "cross_entropy"


class Cells(nn.Module):
    """Cells in a Python loop."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTMCell(4, 5), nn.GRUCell(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = c = x.new_zeros(len(x), 5)
        g = torch.zeros_like(h)
        for step in x.unbind(1):
            h, c = self.lstm(step, (h, c))
            g = self.gru(h, g)
        return self.head(g)


@clean
def cells_in_a_loop():
    return Cells(), torch.randn(4, 3, 4), classes(), "cross_entropy"


class Attends(nn.Module):
    """Attention with weights that are left aside."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


@clean
def attention():
    return Attends(), torch.randn(4, 5, 8), classes(), "cross_entropy"


@clean
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(40, 3)
    )
    return net, torch.randn(4, 5, 8), classes(), "cross_entropy"


class Translates(nn.Module):
    """A whole transformer, with a causal mask and embeddings with sine positions."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.body = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.head = nn.Linear(8, 11)
        place = torch.arange(6)[:, None] * torch.exp(torch.arange(0, 8, 2) * -math.log(100.0) / 8)
        self.register_buffer("places", torch.cat([place.sin(), place.cos()], 1))

    def forward(self, x):
        h = self.words(x) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.body(h, h, tgt_mask=mask)).transpose(1, 2)


@clean
def encoder_decoder():
    tokens = torch.randint(1, 11, (4, 6))
    return Translates(), tokens, tokens.roll(1, 1), "cross_entropy"


@clean
def norms():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.InstanceNorm2d(8, affine=True),
        nn.BatchNorm2d(8),
        nn.LayerNorm(8),
        nn.LocalResponseNorm(2),
        nn.Flatten(),
        nn.Linear(512, 3),
    )
    return net, picture(), classes(), "cross_entropy"


@clean
def embedding_bag():
    net = nn.Sequential(nn.EmbeddingBag(11, 8, mode="mean"), nn.Linear(8, 3))
    return net, torch.randint(0, 11, (4, 6)), classes(), "cross_entropy"


@clean
def dropouts():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Dropout2d(0.2),
        nn.SELU(),
        nn.AlphaDropout(0.1),
        nn.FeatureAlphaDropout(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8, 3),
    )
    return net, picture(), classes(), "cross_entropy"


@clean
def activations():
    kinds = [nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.PReLU, nn.Softplus, nn.Tanh, nn.Hardswish]
    net = nn.Sequential(nn.Linear(4, 8), *(kind() for kind in kinds), nn.RReLU(), nn.Linear(8, 3))
    return net, torch.randn(4, 4), classes(), "cross_entropy"


@clean
def convolutions_of_one_dimension():
    net = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding="same"),
        nn.BatchNorm1d(8),
        nn.MaxPool1d(2),
        nn.ConvTranspose1d(8, 4, 2, 2),
        nn.AdaptiveMaxPool1d(2),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return net, torch.randn(4, 3, 8), classes(), "cross_entropy"


@clean
def spectral_norms():
    parametrized = torch.nn.utils.parametrizations.spectral_norm
    net = nn.Sequential(
        parametrized(nn.Linear(4, 8)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(8, 3))
    )
    return net, torch.randn(4, 4), classes(), "cross_entropy"


class Residual(nn.Module):
    """Of a ResNet, with a shortcut where the shape changes."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))
        self.short = None
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x):
        h = F.relu(self.norms[0](self.first(x)), inplace=True)
        h = self.norms[1](self.second(h))
        h += x if self.short is None else self.short(x)
        return F.relu(h)


def head(width):
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3)]


@clean
def resnet():
    net = nn.Sequential(Residual(3, 4, 1), Residual(4, 8, 2), Residual(8, 8, 1), *head(8))
    return net, picture(), classes(), "cross_entropy"


@clean
def vgg():
    layers = []
    for before, after in ((3, 4), (4, 8)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 8), nn.ReLU(True), nn.Dropout())
    return nn.Sequential(net, nn.Linear(8, 3)), picture(), classes(), "cross_entropy"


class Inverted(nn.Module):
    """Of a MobileNet, with squeeze and excitation."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU6(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.Hardswish(),
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(2 * width, 2 * width, 1), nn.Hardsigmoid()
        )
        self.end = nn.Conv2d(2 * width, width, 1)

    def forward(self, x):
        h = self.body(x)
        return x + self.end(h * self.gate(h))


@clean
def mobilenet():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), Inverted(4), Inverted(4), *head(4))
    return net, picture(), classes(), "cross_entropy"


class Dense(nn.Module):
    """Of a DenseNet: every layer sees all before it."""

    def __init__(self, width, growth, count):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + i * growth),
                nn.ReLU(),
                nn.Conv2d(width + i * growth, growth, 3, padding=1),
            )
            for i in range(count)
        )

    def forward(self, x):
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1)))
        return torch.cat(seen, 1)


@clean
def densenet():
    between = [nn.Conv2d(15, 6, 1), nn.AvgPool2d(2)]
    net = nn.Sequential(Dense(3, 4, 3), *between, Dense(6, 4, 2), *head(14))
    return net, picture(), classes(), "cross_entropy"


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.end = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        first = F.relu(self.down[0](x))
        second = F.relu(self.down[1](F.max_pool2d(first, 2)))
        up = self.up(second)
        up = F.interpolate(up, size=first.shape[-2:], mode="bilinear", align_corners=False)
        return self.end(torch.cat([first, up], 1))


@clean
def unet():
    return UNet(), picture(), torch.randint(0, 2, (4, 8, 8)), "cross_entropy"


class Inception(nn.Module):
    """Branches of several sizes, and a second head while training."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(3, 2, k, padding=k // 2) for k in (1, 3, 5))
        self.pool = nn.MaxPool2d(3, 1, 1)
        self.end, self.second = nn.Sequential(*head(9)), nn.Sequential(*head(9))

    def forward(self, x):
        h = torch.cat([*(branch(x) for branch in self.branches), self.pool(x)], 1)
        return (self.end(h), self.second(h)) if self.training else self.end(h)


def both(prediction, target):
    if isinstance(prediction, tuple):
        return sum(F.cross_entropy(one, target) for one in prediction)
    return F.cross_entropy(prediction, target)


@clean
def inception():
    return Inception(), picture(), classes(), both


class Autoencodes(nn.Module):
    """A variational autoencoder that returns its own loss."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        back = self.decode(z)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
        ipufit.log("divergence", divergence)
        return back, F.mse_loss(back, x) + 0.1 * divergence


@clean
def variational_autoencoder():
    return Autoencodes(), torch.randn(4, 6), None, None


class Averages(nn.Module):
    """A moving average in a buffer, in place, and a count of updates."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.calls += 1
        return self.layer(x - self.average)


@clean
def buffers_in_place():
    return Averages(), torch.randn(4, 4), classes(), "cross_entropy"


class Caches(nn.Module):
    """A mask that is made once, and kept."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask, self.size = nn.Linear(4, 3), None, 0

    def forward(self, x):
        if self.mask is None or self.size != x.shape[1]:
            self.mask, self.size = torch.ones(x.shape[1]).cumsum(0), x.shape[1]
        return self.layer(x * self.mask)


@clean
def a_mask_that_is_kept():
    return Caches(), torch.randn(4, 4), classes(), "cross_entropy"


class Tied(nn.Module):
    """One weight in two layers, and a constant of Python's."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.words.weight
        self.scale = 8**0.5
        self.table = torch.linspace(0, 1, 8)

    def forward(self, x):
        return self.out(self.words(x) * self.scale + self.table).transpose(1, 2)


@clean
def tied_weights():
    tokens = torch.randint(0, 11, (4, 5))
    return Tied(), tokens, tokens, "cross_entropy"


class Experts(nn.Module):
    """A dense mixture: every expert sees every sample."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        return sum(share[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


@clean
def mixture_of_experts():
    return Experts(), torch.randn(4, 4), classes(), "cross_entropy"


class Frozen(nn.Module):
    """A backbone that stays as it is, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.backbone.eval()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


@clean
def frozen_backbone():
    return Frozen(), torch.randn(4, 4), classes(), "cross_entropy"


class Straight(torch.autograd.Function):
    """Rounds, with a straight gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class Rounds(nn.Module):
    """A derivative of one's own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return Straight.apply(self.layer(x))


@clean
def own_derivative():
    return Rounds(), torch.randn(4, 4), classes(), "cross_entropy"


class Two(nn.Module):
    """Two inputs by name, two outputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, a, b):
        assert a.shape[0] == b.shape[0]
        return {"one": self.left(a), "two": self.right(b)}


@clean
def several_inputs_and_losses():
    inputs = {"a": torch.randn(4, 4), "b": torch.randn(4, 2)}
    target = {"one": classes(), "two": torch.randn(4, 3)}
    return Two(), inputs, target, {"one": "cross_entropy", "two": "mse"}


class Focal(nn.Module):
    """A loss with a buffer and a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 1.0]))
        self.sharpness = nn.Parameter(torch.ones(()))

    def forward(self, prediction, target):
        return F.cross_entropy(prediction * self.sharpness, target, self.weight)


@clean
def loss_with_state():
    return nn.Linear(4, 3), torch.randn(4, 4), classes(), Focal()


class Memory(nn.Module):
    """Rotary positions, a causal mask, and torch's own attention."""

    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Embedding(11, 8), nn.Linear(8, 24)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def turned(self, x):
        angle = torch.arange(x.shape[2])[:, None] / 100 ** (torch.arange(0, 4, 2) / 4)
        one, two = x.chunk(2, -1)
        sine, cosine = angle.sin(), angle.cos()
        return torch.cat([one * cosine - two * sine, one * sine + two * cosine], -1)

    def forward(self, x):
        h = self.norm(self.words(x))
        parts = self.mix(h).view(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        query, key, value = self.turned(parts[0]), self.turned(parts[1]), parts[2]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(h + out.transpose(1, 2).flatten(2)).transpose(1, 2)


@clean
def decoder_with_rotary_positions():
    tokens = torch.randint(0, 11, (4, 6))
    return Memory(), tokens, tokens, "cross_entropy"


class Graph(nn.Module):
    """A graph convolution on a dense adjacency."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, nodes, edges):
        degree = edges.sum(-1, keepdim=True).clamp(min=1)
        h = F.relu(self.first(edges @ nodes / degree))
        return self.second((edges @ h / degree).mean(1))


@clean
def graph_convolution():
    edges = (torch.rand(4, 5, 5) > 0.5).float()
    return Graph(), (torch.randn(4, 5, 4), edges), classes(), "cross_entropy"


class Masked(nn.Module):
    """Sequences of several lengths, by a mask and torch.where."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, lengths):
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        h = torch.where(mask[..., None], self.layer(x), torch.zeros(()))
        return h.sum(1) / mask.sum(1, keepdim=True)


@clean
def lengths_as_a_mask():
    return Masked(), (torch.randn(4, 6, 4), torch.tensor([1, 2, 6, 4])), classes(), "cross_entropy"


class Remembers(nn.Module):
    """torch.utils.checkpoint, as it can be recorded."""

    def __init__(self):
        super().__init__()
        self.body, self.end = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        return self.end(checkpoint(self.body, x, use_reentrant=False))


@clean
def checkpointed_layers():
    return Remembers(), torch.randn(4, 4), classes(), "cross_entropy"
