"""Checkpoints of a whole training: folders of JSON and safetensors, complete or absent."""

from typing import TYPE_CHECKING

from ipufit.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ipufit.checkpoint.files import Contents, Files
    from ipufit.checkpoint.store import Store, name_of
    from ipufit.utils.codec import decode, encode
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ipufit.checkpoint.files": ("Contents", "Files"),
            "ipufit.checkpoint.store": ("Store", "name_of"),
            "ipufit.utils.codec": ("decode", "encode"),
        },
    )

__all__ = ["Contents", "Files", "Store", "decode", "encode", "name_of"]
