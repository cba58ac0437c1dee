"""What several lists of programs make up: pictures in idx files, a library without operators."""

import subprocess

import numpy as np

from tests.idx_files import idx


def write_idx(folder, part, images, labels):
    """Write pictures and labels into the two files of a part that torchvision reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(np.asarray(images)))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.asarray(labels)))


def empty_library(path):
    """Write a shared library with nothing in it, as what a program compiles for IPUs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), "-x", "c", "/dev/null"], check=True)
