"""A tree of values as plain JSON and named tensors, and back: nothing that is read is ever run.

What JSON has stands for itself. Everything else is an object of one key, its tag:
``{"$tuple": [...]}``, ``{"$dict": [[key, value], ...]}`` for keys that are no plain strings,
``{"$float": "nan"}``, ``{"$int": "0x..."}`` beyond 64 bits, ``{"$tensor": name}``. Tensors are made
dense, on the host and apart in memory, as a safetensors file takes them.
"""

from __future__ import annotations

import math
import re
from typing import Any, Callable, Dict, Mapping, Optional, Set, Tuple, Union

import torch
from torch import Tensor, nn

from ipufit.errors import CheckpointError

__all__ = [
    "MAX_DEPTH",
    "UnfitError",
    "advice_of",
    "apart",
    "decode",
    "encode",
    "reason_of",
    "shown",
    "why_not_stored",
]

_SHOWN = 80  # characters of a text from a file that an error repeats


class UnfitError(Exception):
    """A file of a checkpoint, or what should become one, is not as it must be.

    Attributes:
        reason: the end of "but ...", without a full stop.
        advice: what to do, where it is something else than usual.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        self.reason = reason
        self.advice = advice
        super().__init__(reason)


def reason_of(error: Exception) -> str:
    """Describe an error without the path, which the whole message has already."""
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error) or type(error).__name__).rstrip(".")


def advice_of(error: Exception) -> str:
    """Return what an error advises to do; empty where it is the usual."""
    return error.advice if isinstance(error, UnfitError) else ""


def shown(text: str) -> str:
    """A text from a file, quoted and cut: it may be as long as its writer liked."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def why_not_stored(tensor: Tensor) -> Optional[str]:
    """Name the kind of a tensor that no file of tensors can hold; None of one that it can."""
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_meta:
        return "a tensor on the device meta"
    return "a quantized tensor" if tensor.is_quantized else None


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, contiguous and in memory of its own."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach())


def apart(tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """The tensors, of which those that are not as a file takes them are copied."""
    fitting: Dict[str, Tensor] = {}
    storages = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        is_fit = (
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
            and memory not in storages
        )
        storages.add(memory)
        fitting[name] = tensor.detach() if is_fit else host_copy(tensor)
    return fitting


MAX_DEPTH = 100  # containers within each other
_BITS = 64  # of an int that every reader of JSON can take
_NOT_FINITE = ("nan", "inf", "-inf")
_HEX = re.compile(r"-?0x[0-9a-f]+")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_RESERVED = "__metadata__"  # what safetensors itself keeps under this name is no tensor

Path = Tuple[Union[str, int], ...]


def encode(value: object) -> Tuple[object, Dict[str, Tensor]]:
    """Take a value apart.

    Args:
        value: a tree of dicts (keys are strings, or ints of at most 64 bits), lists, tuples,
            None, bool, int, float, str and tensors. A subclass of dict becomes a dict, a parameter
            a plain tensor, and a tensor that is in the tree twice is stored twice.
    Returns:
        What ``json.dumps(..., allow_nan=False)`` takes, and copies of the tensors on the host, by
        names made of where they were, such as "optimizer.state.0.exp_avg".
    Raises:
        CheckpointError: something in it is of another type, or it is nested too deeply.
    """
    encoder = _Encoder()
    document = encoder.encode(value, ())
    return document, encoder.tensors


def decode(document: object, tensors: Mapping[str, Tensor]) -> Any:
    """Put a value together again, with the same types; nothing in the document is trusted.

    Args:
        document: parsed JSON, from :func:`encode` or from a stranger.
        tensors: used as they are, each in one place.
    Raises:
        CheckpointError: the document is not what encode makes, or names other tensors.
    """
    decoder = _Decoder(tensors)
    value = decoder.decode(document, ())
    unused = [name for name in tensors if name not in decoder.used]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise _damaged((), f"does not name the tensor {shown(unused[0])}{more} of its files")
    return value


class _Encoder:
    def __init__(self) -> None:
        self.tensors: Dict[str, Tensor] = {}
        self._counts: Dict[str, int] = {}

    def encode(self, value: object, path: Path) -> object:
        _check_depth(path, _refused)
        # Exactly these types: a subclass would come back as something else.
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if isinstance(value, int) and kind is int:
            return value if value.bit_length() <= _BITS else {"$int": hex(value)}
        if isinstance(value, float) and kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, (list, tuple)) and kind in (list, tuple):
            parts = [self.encode(part, (*path, place)) for place, part in enumerate(value)]
            return parts if kind is list else {"$tuple": parts}
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        if isinstance(value, Tensor) and kind in (Tensor, nn.Parameter):
            return {"$tensor": self._keep(value, path)}
        raise _refused(path, f"is of type {_type_name(value)}")

    def _encode_dict(self, value: Mapping[Any, object], path: Path) -> object:
        for key in value:
            if not _is_key(key):
                raise CheckpointError(
                    "the keys of a dict in a checkpoint must be strings, or ints of at most "
                    f"{_BITS} bits, but {_place(path)} has a key of type {_type_name(key)}. "
                    "Convert it, or leave this part out of the state."
                )
        pairs = [(key, self.encode(part, (*path, key))) for key, part in value.items()]
        is_plain = all(_is_plain_key(key) for key, _ in pairs)
        return dict(pairs) if is_plain else {"$dict": [[key, part] for key, part in pairs]}

    def _keep(self, tensor: Tensor, path: Path) -> str:
        fault = why_not_stored(tensor)
        if fault is not None:
            raise _refused(path, f"is {fault}")
        name = ".".join(_NOT_IN_NAMES.sub("_", str(part)) or "_" for part in path) or "value"
        if name in self.tensors or name == _RESERVED:
            # No part of a path keeps a "~", so that this name is new.
            self._counts[name] = self._counts.get(name, 1) + 1
            name = f"{name}~{self._counts[name]}"
        self.tensors[name] = host_copy(tensor)
        return name


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.used: Set[str] = set()
        self._tensors = tensors
        self._tags = {
            "$tuple": self._tuple,
            "$dict": self._dict,
            "$float": self._float,
            "$int": self._int,
            "$tensor": self._tensor,
        }

    def decode(self, document: object, path: Path) -> object:
        _check_depth(path, _damaged)
        kind = type(document)
        if document is None or kind in (bool, str):
            return document
        if (isinstance(document, int) and document.bit_length() <= _BITS) or (
            isinstance(document, float) and math.isfinite(document)
        ):
            return document
        if isinstance(document, list):
            return [self.decode(part, (*path, place)) for place, part in enumerate(document)]
        if not isinstance(document, dict):
            raise _damaged(path, f"is {_said(document)}")
        if all(_is_plain_key(key) for key in document):
            return {key: self.decode(part, (*path, key)) for key, part in document.items()}
        tag = next(iter(document))
        if len(document) != 1 or tag not in self._tags:
            raise _damaged(path, f"has the tag {_said(tag)}, which is unknown or not alone")
        return self._tags[tag](document[tag], path)

    def _tuple(self, content: object, path: Path) -> object:
        if type(content) is not list:
            raise _damaged(path, f"is a tuple of {_said(content)}")
        return tuple(self.decode(part, (*path, place)) for place, part in enumerate(content))

    def _dict(self, content: object, path: Path) -> object:
        if type(content) is not list:
            raise _damaged(path, f"is a dict of {_said(content)}")
        decoded: Dict[object, object] = {}
        for pair in content:
            if type(pair) is not list or len(pair) != 2 or not _is_key(pair[0]):
                raise _damaged(path, "is a dict whose parts are no pairs of a key and a value")
            key, part = pair
            if key in decoded:
                raise _damaged(path, f"is a dict that has the key {shown(str(key))} twice")
            decoded[key] = self.decode(part, (*path, key))
        return decoded

    def _float(self, content: object, path: Path) -> object:
        if type(content) is not str or content not in _NOT_FINITE:
            raise _damaged(path, f"is a float written as {_said(content)}")
        return float(content)

    def _int(self, content: object, path: Path) -> object:
        # Digits of base 16 take linear time, however many there are.
        if type(content) is not str or not _HEX.fullmatch(content):
            raise _damaged(path, f"is an int written as {_said(content)}")
        return int(content, 16)

    def _tensor(self, content: object, path: Path) -> object:
        if type(content) is not str:
            raise _damaged(path, f"is a tensor named by {_said(content)}")
        if content not in self._tensors or content in self.used:
            fault = "used twice" if content in self.used else "missing in the files"
            raise _damaged(path, f"is the tensor {shown(content)}, which is {fault}")
        self.used.add(content)
        return self._tensors[content]


def _is_key(key: object) -> bool:
    return type(key) is str or (type(key) is int and key.bit_length() <= _BITS)


def _is_plain_key(key: object) -> bool:
    return type(key) is str and not key.startswith("$")


def _check_depth(path: Path, error: Callable[[Path, str], CheckpointError]) -> None:
    if len(path) > MAX_DEPTH:
        raise error(path[:3], f"is nested in itself, or deeper than {MAX_DEPTH} levels")


def _place(path: Path) -> str:
    return shown(".".join(map(str, path))) if path else "the whole"


def _said(content: object) -> str:
    """Describe a value without its content, which may be large."""
    return shown(content) if isinstance(content, str) else f"a value of type {_type_name(content)}"


def _type_name(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__


def _refused(path: Path, fault: str) -> CheckpointError:
    return CheckpointError(
        "a checkpoint holds dicts, lists, tuples, None, bool, int, float, str and dense tensors, "
        f"but {_place(path)} {fault}. Convert it, or leave it out of the state."
    )


def _damaged(path: Path, fault: str) -> CheckpointError:
    return CheckpointError(
        f"the state in a checkpoint must be as ipufit wrote it, but {_place(path)} {fault}. "
        "Resume from another checkpoint, or restore this one from a copy."
    )
