"""Train a convolutional net that ipufit divides over four IPUs, on real handwritten digits.

The pictures, 8 x 8 grey values each, ship with scikit-learn: nothing is downloaded. ipufit divides
the net into four stages by itself, prints what each takes on an IPU, and saves a picture of the
pipeline's timeline and memory to pipeline.png, in the folder given or in a temporary one. Then it
trains the divided net on two replicas, eight IPUs in all, for a moment: the accuracy on the
held-out part is at least 0.9. No IPU is needed: the embedded engine checks the rules of the
pipeline, and computes what the whole net would. Takes well under a minute on two cores; two runs
print the same numbers.

    pip install ".[examples]"
    python examples/pipeline.py [folder]
"""

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import ipufit

SEED = 0
BATCH = 4


def load():
    """Pictures (n, 1, 8, 8) in [0, 1] and classes, split into training and test part."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    test, train = order[:450], order[450:]
    return (x[train], y[train]), (x[test], y[test])


def block(inputs, outputs):
    """A convolution with BatchNorm."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def build():
    """Six blocks with pooling in the middle, and a dense layer."""
    return nn.Sequential(
        block(1, 8),
        block(8, 8),
        block(8, 8),
        nn.MaxPool2d(2),
        block(8, 16),
        block(16, 16),
        block(16, 16),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def main(folder):
    """Plan, draw, train, evaluate."""
    # Micro-batches of four small pictures are too little work to share between cores.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    (x, y), held_out = load()

    model = ipufit.Model(build())
    model.compile(
        "adam",
        "cross_entropy",
        metrics=["accuracy"],
        parallel=ipufit.Parallel(stages="auto", ipus_per_replica=4),
    )
    plan = model.plan((x[:BATCH], y[:BATCH]), ipus=8, gradient_accumulation=8)
    print(plan)
    picture = Path(folder) / "pipeline.png"
    plan.plot(picture)
    print(f"timeline and memory: {picture}")

    model.fit(
        x, y, batch_size=BATCH, epochs=4, ipus=8, gradient_accumulation=8, seed=SEED, verbose=2
    )
    model.explain()
    accuracy = model.evaluate(*held_out, batch_size=32, verbose=0)["accuracy"]
    print(f"test: accuracy {accuracy:.4f}")
    if accuracy < 0.9:
        raise SystemExit(f"the accuracy is below 0.9: {accuracy:.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
