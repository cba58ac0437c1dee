"""Checkpoints of a whole training: folders of JSON and safetensors, complete or absent."""

from ipufit.checkpoints.encoding import decode, encode
from ipufit.checkpoints.files import Files
from ipufit.checkpoints.names import name_of
from ipufit.checkpoints.reading import Contents
from ipufit.checkpoints.store import Store

__all__ = ["Contents", "Files", "Store", "decode", "encode", "name_of"]
