"""Options of the methods of a LightningModule's model; without Lightning there is none."""

import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset

import ipufit

from . import FLIPS, With, X, Y, linear, of, told

__all__ = ["FLIPS", "LIGHTNING"]

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports of today's torch warn
        import lightning.pytorch as LIGHTNING
except ImportError:
    LIGHTNING = None


def loader(shift):
    """Batches of the samples, moved by a number."""
    return DataLoader(TensorDataset(X + shift, Y), batch_size=4)


def modules():
    """A LightningModule that has loaders, and a LightningDataModule with others."""

    class Classifier(LIGHTNING.LightningModule):
        def __init__(self):
            super().__init__()
            self.head = linear()

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.head(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("error", self.training_step(batch, batch_idx))

        def test_step(self, batch, batch_idx):
            self.log("error", 2 * self.training_step(batch, batch_idx))

        def predict_step(self, batch, batch_idx):
            return self.head(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(LIGHTNING.LightningDataModule):
        shift = 1

    def loads(self):
        return loader(getattr(self, "shift", 0))

    for kind in (Classifier, Data):
        for stage in ("train", "val", "test", "predict"):
            setattr(kind, f"{stage}_dataloader", loads)
    return Classifier(), Data()


def called(method):
    """A function that calls the method, of which ``datamodule=True`` passes the data module."""

    def observe(datamodule=None, **options):
        module, data = modules()
        model = ipufit.Model.from_lightning(module)
        model.compile(run_eagerly=True)
        if datamodule:
            options["datamodule"] = data
        sizes = []
        module.head.register_forward_hook(lambda head, args, result: sizes.append(len(result)))
        result = getattr(model, method)(**options, verbose=0)
        result = told(result) if method == "fit" else result
        return result, sizes, [p.detach() for p in model.module.parameters()]

    return observe


if LIGHTNING is not None:
    BOTH = {"x": With(X, X + 1, y=Y), "y": With(Y, 2 - Y, x=X), "datamodule": (None, True)}
    SIZE = With(4, 3, x=X, y=Y)
    of("StepsModel.fit", called("fit"), **BOTH, batch_size=SIZE, epochs=(1, 2))
    of("StepsModel.evaluate", called("evaluate"), **BOTH, batch_size=SIZE)
    of("StepsModel.test", called("test"), **BOTH)
    of(
        "StepsModel.predict",
        called("predict"),
        x=(loader(0), loader(1)),
        batch_size=With(4, 3, x=TensorDataset(X, Y)),
        datamodule=(None, True),
    )
