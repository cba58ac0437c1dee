"""Train an unchanged LightningModule with ipufit and with Lightning's own Trainer.

The data are 569 real tumours with 30 measurements each, which ship with scikit-learn: nothing is
downloaded. A quarter is held out. Prints the accuracy on the held-out part (at least 0.95), what
the module logged in the last epoch, and by how much the weights differ from those after Lightning's
own fit (less than 1e-10). Takes well under a minute on two cores; two runs print the same numbers.

    pip install ".[examples]"
    python examples/lightning_module.py
"""

import copy
import logging
import warnings

import lightning.pytorch as pl
import torch
import torchmetrics
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ipufit

EPOCHS = 8


class Tumours(pl.LightningModule):
    """Two dense layers, a warm-up per update, a loss and metric objects in the log."""

    def __init__(self, rate=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2)).double()
        self.train_accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.held_accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)

    def shared(self, batch, name, accuracy):
        """One micro-batch of training or validation."""
        measured, kind = batch
        logits = self.net(measured)
        loss = F.cross_entropy(logits, kind)
        accuracy.update(logits, kind)
        values = {f"{name}_loss": loss, f"{name}_acc": accuracy}
        self.log_dict(values, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        """Lightning's and ipufit's."""
        return self.shared(batch, "train", self.train_accuracy)

    def validation_step(self, batch, batch_idx):
        """The same."""
        self.shared(batch, "val", self.held_accuracy)

    def configure_optimizers(self):
        """AdamW, with a schedule that knows how long training takes."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def load():
    """Loaders of the training and the held-out part."""
    x, y = map(torch.tensor, load_breast_cancer(return_X_y=True))
    x = (x - x.mean(0)) / x.std(0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = order[:426], order[426:]
    return [DataLoader(TensorDataset(x[part], y[part]), batch_size=6) for part in parts]


def by_lightning(module, train, held_out):
    """Lightning's own fit."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", gradient_clip_val=1.0, **quiet)
        trainer.fit(module, train, held_out)


def main():
    """Fit with both, compare, show."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, held_out = load()
    module = Tumours()
    other = copy.deepcopy(module)

    model = ipufit.Model.from_lightning(module)
    model.compile(clip=ipufit.Clip(global_norm=1.0))
    history = model.fit(
        train, validation_data=held_out, epochs=EPOCHS, device_iterations=8, verbose=0
    )
    last = {name: values[-1] for name, values in history.history.items() if "_" in name}
    print(", ".join(f"{name} {value:.3f}" for name, value in sorted(last.items())))

    by_lightning(other, train, held_out)
    pairs = zip(module.parameters(), other.parameters())
    largest = max((mine - its).abs().max().item() for mine, its in pairs)
    print(f"accuracy {last['val_acc']:.3f}")
    assert last["val_acc"] >= 0.95
    assert largest < 1e-10, largest
    print("all weights equal Lightning's to 1e-10")


if __name__ == "__main__":
    main()
