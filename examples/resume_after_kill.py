"""Kill a training at a random moment and resume it, with the same bits at the end.

The example starts itself as a process of its own, kills it with SIGKILL (as a power cut would) once
it has written a few checkpoints, begins again with the same command, and compares the weights with
those of a run that nobody disturbed. Real digits, which ship with scikit-learn; nothing is
downloaded. Takes well under a minute on two cores.

    pip install ".[examples]"
    python examples/resume_after_kill.py
"""

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn

import ipufit

SEED = 0


def train(folder, checkpoints):
    """Train, or go on, and write the weights at the end; all that it takes is one argument."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    checkpoint = None
    if checkpoints:
        checkpoint = ipufit.Checkpoint(folder / "checkpoints", every_updates=25, resume="auto")
    model.fit(x, y, batch_size=16, epochs=20, checkpoint=checkpoint, seed=SEED, verbose=0)
    model.save_weights(folder / "end.safetensors")


def start(folder, checkpoints=True):
    """Train in a process of its own."""
    command = [sys.executable, __file__, str(folder), "1" if checkpoints else ""]
    return subprocess.Popen(command)


def main():
    """Undisturbed, then with a kill."""
    chance = random.Random()
    with tempfile.TemporaryDirectory() as place:
        calm, killed = Path(place, "calm"), Path(place, "killed")
        for folder in (calm, killed):
            folder.mkdir()
        assert start(calm, checkpoints=False).wait() == 0
        process, begun = start(killed), Path(killed, "checkpoints")
        while process.poll() is None and len(list(begun.glob("update-*"))) < 2:
            time.sleep(0.01)
        time.sleep(chance.random() / 2)
        process.kill()
        was_killed = process.wait() != 0
        left = sorted(each.name for each in begun.glob("update-*"))
        print(f"killed, with {left[-1]} left" if was_killed else "it had ended by itself")
        assert start(killed).wait() == 0
        one, other = (load_file(folder / "end.safetensors") for folder in (calm, killed))
    if not all(torch.equal(one[name], other[name]) for name in one):
        raise SystemExit("the weights differ, but must not")
    print("the weights are equal to the last bit")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(Path(sys.argv[1]), bool(sys.argv[2]))
    else:
        main()
