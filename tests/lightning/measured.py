"""A module with metric objects of all kinds, and one fit of it in as many processes as there are.

python -m torch.distributed.run --nproc-per-node=2 tests/lightning/measured.py
"""

import json
import os

import torch
import torchmetrics
from torch.nn import functional as F
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from tests.lightning.twins import Classifier, ipufit_of, loader, rows


class Measured(Classifier):
    """Training has metrics of its own, validation and test a collection and one with a list."""

    def __init__(self):
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(3)
        self.train_mean = torchmetrics.MeanMetric()
        several = [MulticlassPrecision(3), MulticlassRecall(3), MulticlassF1Score(3)]
        self.held = torchmetrics.MetricCollection(several, prefix="val_")
        self.area = BinaryAUROC()

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        prediction = self(inputs)
        loss = F.cross_entropy(prediction, target)
        self.train_accuracy(prediction, target)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.train_mean.update(loss, weight=len(inputs))
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        prediction = self(batch[0])
        self.held.update(prediction, batch[1])
        self.log_dict(self.held)
        self.area(prediction.softmax(1)[:, 0], (batch[1] == 0).long())
        self.log("area", self.area)

    test_step = validation_step


class AtEnds(Measured):
    """Computes some of them by hand too, one of which it never resets."""

    def __init__(self):
        super().__init__()
        self.sum = torchmetrics.SumMetric()
        self.own = MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        self.sum.update(batch[1].double())
        self.own.update(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log_dict({"sum": self.sum.compute(), "own": self.own.compute()})
        self.own.reset()


def main():
    """Fit, and print the history in the first process."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    x, y = rows(22, 6)
    history = ipufit_of(AtEnds()).fit(
        loader(x, y, batch_size=4),
        validation_data=loader(x[:10], y[:10], batch_size=4),
        epochs=2,
        ipus=2 // processes,
        seed=0,
        verbose=0,
    )
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(history.history))


if __name__ == "__main__":
    main()
