"""Writes small files of the form that MNIST and its kin have, for `examples/fashion_mnist.py`.

    python -m tests.idx_files FOLDER

The pictures are the real digits of scikit-learn, three times as large. Those to train on are as
they are, those to test with gzipped, so that both ways of reading are tried.
"""

import gzip
import sys
from pathlib import Path

import numpy as np


def idx(values):
    """The bytes of a file with this array of bytes."""
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    return head + values.astype(np.uint8).tobytes()


def main(folder):
    """Write the four files."""
    # Imported here: who writes other pictures does without.
    from sklearn.datasets import load_digits

    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    large = np.kron(np.minimum(digits.images * 16, 255), np.ones((3, 3)))
    pictures = np.pad(large, ((0, 0), (2, 2), (2, 2)))
    for name, part in (("train", slice(0, 1400)), ("t10k", slice(1400, None))):
        parts = {"images-idx3": pictures[part], "labels-idx1": digits.target[part]}
        for kind, values in parts.items():
            data = idx(values)
            path = folder / f"{name}-{kind}-ubyte"
            if name == "train":
                path.write_bytes(data)
            else:
                path.with_suffix(".gz").write_bytes(gzip.compress(data))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
