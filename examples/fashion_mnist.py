"""Train a convolutional net on Fashion-MNIST, from the standard IDX files.

Reads train-images-idx3-ubyte, train-labels-idx1-ubyte and their t10k twins, gzipped (.gz) or not,
from the folder given. What is missing there is downloaded, and kept only if its checksum is that
of Zalando's files; without a network, put the files there yourself. Any data set in that form will
do, such as MNIST. Pictures are mapped from the file where that is not gzipped. Prints the accuracy
on the test part, which must reach 0.8 after three epochs.

    pip install .
    python examples/fashion_mnist.py --data data/fashion-mnist
"""

import argparse
import gzip
import hashlib
import math
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ipufit

SEED = 0
SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
# MD5 sums, as the data set's own page gives them.
SUMS = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}


def found(folder, name):
    """The path of a file, gzipped or not; downloaded if it is not there."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    folder.mkdir(parents=True, exist_ok=True)
    print(f"downloading {name}.gz")
    try:
        with urllib.request.urlopen(f"{SITE}{name}.gz", timeout=60) as answer:
            data = answer.read()
    except (urllib.error.URLError, OSError) as error:
        sys.exit(f"{folder / name} is missing and can't be downloaded ({error}): put it there.")
    came = hashlib.md5(data).hexdigest()
    if came != SUMS[name]:
        sys.exit(f"{SITE}{name}.gz must have the MD5 sum {SUMS[name]}, but has {came}.")
    path.write_bytes(data)
    return path


def read_idx(path):
    """An array of bytes in the shape that the file says."""
    is_packed = path.suffix == ".gz"
    with gzip.open(path) if is_packed else path.open("rb") as file:
        head = file.read(16)
        data = head + file.read() if is_packed else None
    zeros, kind, dimensions = head[:2], head[2], head[3]
    begin = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(head[i : i + 4], "big") for i in range(4, begin, 4))
    if zeros != b"\0\0" or kind != 8 or not 1 <= dimensions <= 3:
        sys.exit(f"{path} is no IDX file of bytes.")
    if data is None:
        return np.memmap(path, np.uint8, "r", begin, shape)
    if len(data) != begin + math.prod(shape):
        sys.exit(f"{path} must have {math.prod(shape)} values, but is cut off.")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)


class Net(nn.Module):
    """Takes pictures as bytes, so that a quarter of the memory goes to the device."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, pictures):
        return self.layers(pictures.unsqueeze(1).float() / 255)


def main(folder):
    """Read, fit, evaluate."""
    torch.manual_seed(SEED)
    arrays = {name: read_idx(found(folder, name)) for name in SUMS}
    x, y = arrays["train-images-idx3-ubyte"], arrays["train-labels-idx1-ubyte"].astype(np.int64)
    test_x = arrays["t10k-images-idx3-ubyte"]
    test_y = arrays["t10k-labels-idx1-ubyte"].astype(np.int64)
    print(f"{len(x)} pictures to train on, {len(test_x)} to test with")

    model = ipufit.Model(Net())
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=32, epochs=3, device_iterations=16, seed=SEED, verbose=2)
    result = model.evaluate(test_x, test_y, batch_size=128, verbose=0)
    print(f"test: loss {result['loss']:.4f}, accuracy {result['accuracy']:.4f}")
    if result["accuracy"] < 0.8:
        sys.exit(f"the accuracy is below 0.8: {result['accuracy']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on Fashion-MNIST.")
    parser.add_argument("--data", type=Path, default=Path("data/fashion-mnist"), metavar="DIR")
    main(parser.parse_args().data)
