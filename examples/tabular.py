"""Classify tumours from 30 measurements: tabular data, with AUROC over all samples.

The 569 rows (breast cancer, Wisconsin) ship with scikit-learn: nothing is downloaded. A quarter is
held out. Classes are weighted, early stopping keeps the best weights, and the area under the ROC
curve is torchmetrics', which is exact over batches of any size. Prints accuracy (at least 0.95) and
AUROC (at least 0.98). Takes seconds.

    pip install ".[examples]"
    python examples/tabular.py
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

import ipufit
from ipufit.callbacks import EarlyStopping

SEED = 0


def load():
    """Measurements (n, 30), scaled by those to train on, and labels (n,) of floating point."""
    table = load_breast_cancer()
    x = torch.tensor(table.data, dtype=torch.float32)
    y = torch.tensor(table.target, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    test, train = order[:142], order[142:]
    mean, deviation = x[train].mean(0), x[train].std(0)
    x = (x - mean) / deviation
    return (x[train], y[train]), (x[test], y[test])


class Net(nn.Module):
    """One logit for each row."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1), nn.Flatten(0)
        )

    def forward(self, x):
        return self.layers(x)


def main():
    """Fit until it no longer gets better, and evaluate."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    (x, y), (test_x, test_y) = load()
    model = ipufit.Model(Net())
    model.compile(
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.003),
        loss="bce_with_logits",
        metrics={"accuracy": BinaryAccuracy(), "auroc": BinaryAUROC()},
    )
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=60,
        device_iterations=4,
        validation_split=0.2,
        class_weight={0: 1.3, 1: 0.8},
        callbacks=[EarlyStopping(patience=8, restore_best_weights=True)],
        seed=SEED,
        verbose=0,
    )
    result = model.evaluate(test_x, test_y, batch_size=64, verbose=0)
    print(f"{len(history.epoch)} epochs, the best was {history.best_epoch()}")
    print(f"test: accuracy {result['accuracy']:.4f}, AUROC {result['auroc']:.4f}")
    if result["accuracy"] < 0.95 or result["auroc"] < 0.98:
        raise SystemExit("the accuracy must reach 0.95, and AUROC 0.98")


if __name__ == "__main__":
    main()
