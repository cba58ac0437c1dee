"""Checkpoints of a whole training: folders of JSON and safetensors, complete or absent."""

from typing import TYPE_CHECKING

from ipufit.on_use import on_use

if TYPE_CHECKING:
    from ipufit.checkpoints.encoding import decode, encode
    from ipufit.checkpoints.files import Files
    from ipufit.checkpoints.names import name_of
    from ipufit.checkpoints.reading import Contents
    from ipufit.checkpoints.store import Store
else:
    __getattr__, __dir__ = on_use(
        __name__,
        {
            "Contents": "ipufit.checkpoints.reading",
            "Files": "ipufit.checkpoints.files",
            "Store": "ipufit.checkpoints.store",
            "decode": "ipufit.checkpoints.encoding",
            "encode": "ipufit.checkpoints.encoding",
            "name_of": "ipufit.checkpoints.names",
        },
    )

__all__ = ["Contents", "Files", "Store", "decode", "encode", "name_of"]
