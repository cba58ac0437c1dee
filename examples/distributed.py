"""Train one script in one or several processes, with the same numbers.

    python examples/distributed.py
    torchrun --nproc-per-node=2 examples/distributed.py

Both print the same losses: two processes with one replica each do what one process with two does.
Under torchrun each process reads its own part of the samples and adds its gradients to those of the
others; the first one prints and writes. With a folder as argument the run keeps checkpoints there,
and goes on from the last one if it is started again, in as many processes or in others:

    torchrun --nproc-per-node=2 --max-restarts=3 examples/distributed.py runs/1
"""

import sys

import torch
from torch import nn

import ipufit

REPLICAS = 2  # of all processes together


def main():
    """Train, evaluate, and say what was done."""
    torch.manual_seed(0)
    x = torch.randn(4000, 20)
    y = (x[:, :10].sum(1) > x[:, 10:].sum(1)).long()

    model = ipufit.Model(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    processes = ipufit.distributed()
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    history = model.fit(
        x[:3600],
        y[:3600],
        batch_size=50,
        epochs=4,
        ipus=max(1, REPLICAS // processes.num_processes),
        validation_data=(x[3600:], y[3600:]),
        checkpoint=ipufit.Checkpoint(folder, resume="auto") if folder else None,
        seed=0,
        verbose=0,
    )
    result = model.evaluate(x[3600:], y[3600:], batch_size=50, verbose=0)
    if processes.process_id == 0:
        print(processes.describe())
        print("losses:", [round(loss, 4) for loss in history.history["loss"]])
        print("accuracy on held-out samples:", round(result["accuracy"], 3))


if __name__ == "__main__":
    main()
