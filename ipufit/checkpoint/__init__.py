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
            "Contents": "ipufit.checkpoint.files",
            "Files": "ipufit.checkpoint.files",
            "Store": "ipufit.checkpoint.store",
            "decode": "ipufit.utils.codec",
            "encode": "ipufit.utils.codec",
            "name_of": "ipufit.checkpoint.store",
        },
    )

__all__ = ["Contents", "Files", "Store", "decode", "encode", "name_of"]
