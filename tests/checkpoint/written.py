"""What tests of checkpoints share: a training of known state, and how it is compared."""

import functools
import json
import os
import struct

import torch

from ipufit.checkpoint import Store, decode, encode, name_of
from ipufit.errors import CheckpointError
from tests import told

ONE = "update-000000001"
TWO = "update-000000002"


refused = functools.partial(told.refused, kind=CheckpointError)


def same(one, other):
    """Whether two values are equal in types, order, signs of zeros and bits of tensors too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and bits(one) == bits(other)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        is_nan = one != one and other != other
        return is_nan or struct.pack("d", one) == struct.pack("d", other)
    return one == other


def bits(tensor):
    """Of the values, whatever they are."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def state(updates):
    """Of a training, different after every update."""
    return {
        "updates": updates,
        "loss": float("nan"),
        "optimizer": {"state": {0: {"step": updates, "exp_avg": torch.full((3,), updates + 0.5)}}},
    }


def written(store, updates, suffix=""):
    """Write the checkpoint after so many updates; its name."""
    document, tensors = encode(state(updates))
    weights = {"head.weight": torch.full((2, 2), float(updates))}
    name = name_of(updates) + suffix
    store.write(name, {"state": document}, {"weights": weights, "state": tensors})
    return name


def assert_whole(folder, name):
    """The checkpoint has all that was written."""
    updates = int(name[7:16])
    contents = Store(folder).read(name)
    found = decode(contents.document["state"], contents.tensors["state"])
    assert same(found, state(updates))
    assert set(contents.tensors) == {"weights", "state"}
    weights = contents.tensors["weights"]
    assert same(weights, {"head.weight": torch.full((2, 2), float(updates))})


def newest(store):
    """The name of the newest checkpoint that can be read, and why those after it can't."""
    (name, _), faults = store.newest()
    return name, faults


def place(store, *parts):
    """A path in its folder."""
    return os.path.join(store.folder, *parts)


def content(store, *parts):
    """Of a file."""
    with open(place(store, *parts), "rb") as file:
        return file.read()


def put(store, data, *parts):
    """Make a file, or change it."""
    with open(place(store, *parts), "wb") as file:
        file.write(data)


def listed(store, name=TWO):
    """The manifest."""
    return json.loads(content(store, name, "manifest.json"))


def list_again(store, changed, name=TWO):
    """Write another manifest."""
    put(store, json.dumps(changed).encode(), name, "manifest.json")
