"""A run that is interrupted, and goes on in as many processes or in others.

Arguments: the folder for checkpoints and results, and what happens in this run: nothing, "kill"
(process 1 kills itself when it comes to an update), "term" (all are asked to end).
"""

import json
import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback, EarlyStopping

FOLDER, HAPPENS = sys.argv[1], sys.argv[2]
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
PROCESS = int(os.environ.get("RANK", "0"))
RESTARTED = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
LAST = PROCESSES - 1


class Happens(Callback):
    def on_train_batch_end(self, batch, logs=None):
        updates = int(self.model.optimizer.state_dict()["state"][0]["step"])
        if HAPPENS == "kill" and updates == 7 and not RESTARTED and PROCESS == LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        if HAPPENS == "term" and updates == 7 and PROCESS == LAST:
            os.kill(os.getpid(), signal.SIGTERM)


def main():
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(45, 6, generator=generator)
    y = torch.randint(0, 3, (45,), generator=generator)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy", metrics=["accuracy"], ema=ipufit.EMA())
    history = model.fit(
        DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True),
        epochs=4,
        ipus=4 // PROCESSES,
        device_iterations=1,
        validation_data=(x, y),
        callbacks=[Happens(), EarlyStopping("val_loss", patience=9)],
        checkpoint=ipufit.Checkpoint(
            os.path.join(FOLDER, "checkpoints"), every_updates=2, resume="auto"
        ),
        seed=5,
        verbose=0,
    )
    weights = {name: value.flatten().tolist() for name, value in net.state_dict().items()}
    found = {"history": history.history, "weights": weights}
    with open(os.path.join(FOLDER, f"{PROCESS}.json"), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
