"""Train a small convolutional net on 1,797 real handwritten digits.

The pictures, 8 x 8 grey values each, ship with scikit-learn: nothing is downloaded. A quarter is
held out. Prints the accuracy on the held-out part (at least 0.97) and a confusion table, and saves
the curves to digits.png beside this file. Takes well under a minute on two cores; two runs print
the same numbers.

    pip install ".[examples]"
    python examples/digits.py
"""

import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit

SEED = 0


def load():
    """Pictures (n, 1, 8, 8) in [0, 1] and classes, split into training and test part."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    test, train = order[:450], order[450:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def build():
    """Two convolutions with BatchNorm, dropout, and a dense layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 2 * 2, 10),
    )


def main():
    """Fit, evaluate, show."""
    # Micro-batches of eight small pictures are too little work to share between cores.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    train, test = load()
    train_loader = DataLoader(train, batch_size=8, shuffle=True)
    test_loader = DataLoader(test, batch_size=32)

    model = ipufit.Model(build())
    model.compile(
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.002),
        loss="cross_entropy",
        metrics=["accuracy"],
    )
    work = {"ipus": 4, "device_iterations": 8, "gradient_accumulation": 2}
    model.explain(train_loader, **work)
    history = model.fit(train_loader, epochs=30, validation_data=test_loader, seed=SEED, **work)

    result = model.evaluate(test_loader, verbose=0)
    predicted = model.predict(test_loader, verbose=0).argmax(1)
    actual = test.tensors[1]
    print(f"test: loss {result['loss']:.4f}, accuracy {result['accuracy']:.4f}")
    print("rows: the digit, columns: what the net saw")
    table = torch.zeros(10, 10, dtype=torch.int64)
    table.index_put_((actual, predicted), torch.tensor(1), accumulate=True)
    print("   " + "".join(f"{digit:4d}" for digit in range(10)))
    for digit, row in enumerate(table.tolist()):
        print(f"{digit:3d}" + "".join(f"{count:4d}" if count else "   ." for count in row))

    picture = Path(__file__).with_suffix(".png")
    history.plot(picture)
    print(f"curves: {os.path.relpath(picture)}")
    if result["accuracy"] < 0.97:
        raise SystemExit(f"the accuracy is below 0.97: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
