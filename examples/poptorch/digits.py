"""Train on 1,797 handwritten digits with PopTorch, then evaluate what was trained.

The usual shape of a PopTorch program: options say how many micro-batches a call takes, the module
returns its loss beside its output, a data loader makes batches for whole calls, and a training and
an inference model share one module's weights. Prints the loss of every epoch and the accuracy on
the digits held out: at least 0.95 (here 0.97). Takes well under a minute.

    ipufit run examples/poptorch/digits.py
"""

import poptorch
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS = 15


class Classifier(nn.Module):
    """A convolutional net; with labels it returns the loss too."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(32 * 2 * 2, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, pictures, labels=None):
        scores = self.head(self.features(pictures))
        if labels is None:
            return scores
        return scores, self.loss(scores, labels)


def load():
    """Pictures (n, 1, 8, 8) in [0, 1] and labels; the first 360 of a shuffle are held out."""
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    held_out, train = order[:360], order[360:]
    return TensorDataset(pictures[train], labels[train]), TensorDataset(
        pictures[held_out], labels[held_out]
    )


def main():
    # Micro-batches of a few small pictures are too little work to share between cores.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, held_out = load()

    # A call makes 2 updates, each from 2 x 2 micro-batches of 16 pictures.
    training_options = poptorch.Options()
    training_options.deviceIterations(2)
    training_options.replicationFactor(2)
    training_options.Training.gradientAccumulation(2)
    training_options.outputMode(poptorch.OutputMode.All)
    training_options.randomSeed(0)
    loader = poptorch.DataLoader(training_options, train, batch_size=16, shuffle=True)

    module = Classifier()
    optimizer = poptorch.optim.AdamW(module.parameters(), lr=0.005)
    model = poptorch.trainingModel(module, training_options, optimizer)
    for epoch in range(EPOCHS):
        losses = [model(pictures, labels)[1].mean() for pictures, labels in loader]
        print(f"epoch {epoch + 1:2d}: loss {torch.stack(losses).mean():.4f}")
    model.detachFromDevice()

    inference_options = poptorch.Options()
    inference_options.deviceIterations(5)
    inference = poptorch.inferenceModel(module, inference_options)
    right = seen = 0
    for pictures, labels in poptorch.DataLoader(inference_options, held_out, batch_size=24):
        right += int((inference(pictures).argmax(1) == labels).sum())
        seen += len(labels)
    print(f"{right} of {seen} digits that it never saw are right: {right / seen:.4f}")
    if seen != len(held_out) or right < 0.95 * seen:
        raise SystemExit("expected at least 0.95 of 360")


if __name__ == "__main__":
    main()
