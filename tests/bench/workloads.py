"""What every peer trains: data, a torch module with fixed weights, and its twin for Keras."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["LEARNING_RATE", "LOSSES", "WORKLOADS", "Batches", "Workload"]

LEARNING_RATE = 1e-3
CLASSES = 10
# Updates over which losses are compared.
LOSSES = 16
# Peers that train some workloads only, by the first word of their names.
OTHERS = ("Lightning", "Keras", "skorch", "Trainer", "Accelerate")

LOSS_FUNCTIONS: Dict[str, Callable[[Any, Any], Tensor]] = {
    "cross_entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
}

# Inputs and targets, batch by batch.
Batches = List[Tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """One model with its data; Adam, samples in order.

    Attributes:
        name: for the report.
        batch: samples of an update.
        updates: of an epoch.
        module: makes the torch module, the same weights each time.
        data: inputs and targets for a number of samples.
        keras: given the torch module, makes a Keras model with its weights; None for no twin.
        for_keras: inputs in Keras' layout.
        loss: by ipufit's name.
        cuts: given an epoch's inputs and targets, the batches, where they vary in length.
        peers: others that train such models, by the first word of their names.
        compared: updates over which losses of peers must agree.
    """

    name: str
    batch: int
    updates: int
    module: Callable[[], nn.Module]
    data: Callable[[int], Tuple[Tensor, Tensor]]
    keras: Optional[Callable[[nn.Module], Any]] = None
    for_keras: Optional[Callable[[Tensor], np.ndarray]] = None
    loss: str = "cross_entropy"
    cuts: Optional[Callable[[Tensor, Tensor, int], Batches]] = None
    peers: Tuple[str, ...] = ("Lightning", "Keras", "skorch")
    compared: int = LOSSES

    @property
    def loss_function(self) -> Callable[[Any, Any], Tensor]:
        """The loss, of outputs and targets."""
        return LOSS_FUNCTIONS[self.loss]

    def batches(self, count: int = 0) -> Batches:
        """The first batches of an epoch; 0 for all."""
        x, y = self.tensors()
        if self.cuts is not None:
            return self.cuts(x, y, self.batch)[: count or None]
        updates = min(count or self.updates, self.updates)
        starts = range(0, updates * self.batch, self.batch)
        return [(x[start : start + self.batch], y[start : start + self.batch]) for start in starts]

    def has(self, peer: str) -> bool:
        """Say whether a peer trains such a model."""
        word = peer.split()[0].rstrip(",")
        return word in self.peers if word in OTHERS else True

    def of(self, updates: int) -> Workload:
        """The same with at most so many updates an epoch; 0 for all."""
        return dataclasses.replace(self, updates=min(updates or self.updates, self.updates))

    def tensors(self) -> Tuple[Tensor, Tensor]:
        """Inputs and classes of an epoch."""
        return self.data(self.batch * self.updates)


def _classes(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=generator)


def _pictures(count: int) -> Tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 28, 28, generator=generator), _classes(count, generator)


def _vectors(count: int) -> Tuple[Tensor, Tensor]:
    x, y = _pictures(count)
    return x.flatten(1), y


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def _keras_mlp(net: Any) -> Any:
    from keras import Sequential, layers

    model = Sequential([layers.Input((784,)), layers.Dense(128, "relu"), layers.Dense(CLASSES)])
    model.set_weights([*_dense(net[0]), *_dense(net[2])])
    return model


def _cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, CLASSES),
    )


def _keras_cnn(net: Any) -> Any:
    from keras import Sequential, layers

    model = Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )
    kernel, bias = _dense(net[7])
    # Channels come last in what Keras flattens.
    kernel = kernel.reshape(32, 7, 7, CLASSES).transpose(1, 2, 0, 3).reshape(-1, CLASSES)
    model.set_weights([*_conv(net[0]), *_conv(net[3]), kernel, bias])
    return model


class Encoder(nn.Module):
    """A classifier of sequences: two blocks of torch's own, d=128."""

    def __init__(self, width: int = 128, length: int = 64, words: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Classes of sequences."""
        x = self.embed(words) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def _transformer() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


def _sequences(count: int) -> Tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(64, (count, 64), generator=generator), _classes(count, generator)


def _keras_transformer(net: Any) -> Any:
    import keras
    from keras import layers, ops

    class Position(layers.Layer):
        def build(self, shape: Any) -> None:
            self.table = self.add_weight(shape=shape[1:], name="position")

        def call(self, x: Any) -> Any:
            return x + self.table

    words = layers.Input((64,), dtype="int32")
    x = Position()(layers.Embedding(64, 128)(words))
    for _ in net.blocks:
        seen = layers.MultiHeadAttention(4, 32)(x, x)
        x = layers.LayerNormalization(epsilon=1e-5)(x + seen)
        inner = layers.Dense(128)(layers.Dense(512, "relu")(x))
        x = layers.LayerNormalization(epsilon=1e-5)(x + inner)
    model = keras.Model(words, layers.Dense(CLASSES)(ops.mean(x, 1)))
    weights: List[Any] = [net.embed.weight, net.position]
    for block in net.blocks:
        weights += _attention(block.self_attn)
        weights += [block.norm1.weight, block.norm1.bias]
        weights += [*_dense(block.linear1), *_dense(block.linear2)]
        weights += [block.norm2.weight, block.norm2.bias]
    weights += _dense(net.head)
    model.set_weights([w.detach().numpy() if isinstance(w, Tensor) else w for w in weights])
    return model


def _dense(layer: Any) -> List[np.ndarray]:
    return [layer.weight.detach().numpy().T, layer.bias.detach().numpy()]


def _conv(layer: Any) -> List[np.ndarray]:
    return [layer.weight.detach().permute(2, 3, 1, 0).numpy(), layer.bias.detach().numpy()]


def _attention(layer: Any, heads: int = 4) -> List[np.ndarray]:
    """Kernels and biases of query, key, value and output, as Keras has them."""
    width = layer.embed_dim
    found = []
    for weight, bias in zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)):
        found.append(weight.detach().t().reshape(width, heads, -1).numpy())
        found.append(bias.detach().reshape(heads, -1).numpy())
    out = layer.out_proj
    return [
        *found,
        out.weight.detach().t().reshape(heads, -1, width).numpy(),
        out.bias.detach().numpy(),
    ]


WORKLOADS: Dict[str, Workload] = {
    work.name: work
    for work in (
        Workload("mlp", 32, 256, _mlp, _vectors, _keras_mlp, lambda x: x.numpy()),
        Workload(
            "cnn", 64, 32, _cnn, _pictures, _keras_cnn, lambda x: x.permute(0, 2, 3, 1).numpy()
        ),
        Workload(
            "transformer",
            16,
            32,
            _transformer,
            _sequences,
            _keras_transformer,
            lambda x: x.int().numpy(),
        ),
    )
}
