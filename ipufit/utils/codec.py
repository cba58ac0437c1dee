"""A tree of values as plain JSON and named tensors, and back: nothing that is read is ever run.

What JSON has stands for itself. Everything else is an object of one key, its tag:
``{"$tuple": [...]}``, ``{"$dict": [[key, value], ...]}`` for keys that are no plain strings,
``{"$float": "nan"}``, ``{"$int": "0x..."}`` beyond 64 bits, ``{"$tensor": name}``, and the tags of
further types of values. Tensors are made dense, on the host and apart in memory, as a safetensors
file takes them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch
from torch import Tensor, nn

from ipufit.errors import CheckpointError

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


def _host_copy(tensor: Tensor) -> Tensor:
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
        fitting[name] = tensor.detach() if is_fit else _host_copy(tensor)
    return fitting


MAX_DEPTH = 100  # containers within each other
_BITS = 64  # of an int that every reader of JSON can take
_NOT_FINITE = ("nan", "inf", "-inf")
_HEX = re.compile(r"-?0x[0-9a-f]+")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_RESERVED = "__metadata__"  # what safetensors itself keeps under this name is no tensor

Path = Tuple[Union[str, int], ...]


class ValueType(NamedTuple):
    """A further type of values, for documents whose reader knows it.

    Attributes:
        tag: names the type in a document, without the "$".
        takes: tells whether a value is of it.
        parts: what such a value is made of, which is encoded in its place.
        whole: makes the value of its decoded parts. These may be anything: of others than it takes
            it raises an error of ``MALFORMED``.
    """

    tag: str
    takes: Callable[[object], bool]
    parts: Callable[..., object]
    whole: Callable[..., object]


@dataclasses.dataclass(frozen=True)
class Codec:
    """How values are written.

    Attributes:
        refuses: makes the error for a value that can't be encoded, of where it is and of the end of
            a sentence about it.
        rejects: makes the error for a document that can't be decoded, in the same way.
        kinds: further types of values; the first that takes a value has it.
        shares: whether one tensor in two places is written once, and read as one; then one of a
            subclass of Tensor is taken too, and read as a plain one.
    """

    refuses: Callable[[str, str], Exception]
    rejects: Callable[[str, str], Exception]
    kinds: Sequence[ValueType] = ()
    shares: bool = False

    def encode(self, value: object) -> Tuple[object, Dict[str, Tensor]]:
        """Take a value apart.

        Args:
            value: a tree of dicts (keys are strings, or ints of at most 64 bits), lists, tuples,
                None, bool, int, float, str, tensors and ``kinds``. A subclass of dict becomes a
                dict, and a parameter a plain tensor.
        Returns:
            What ``json.dumps(..., allow_nan=False)`` takes, and copies of the tensors on the host,
            by names made of where they were, such as "optimizer.state.0.exp_avg".
        """
        encoder = _Encoder(self)
        document = encoder.encode(value, ())
        return document, encoder.tensors

    def decode(self, document: object, tensors: Mapping[str, Tensor]) -> Any:
        """Put a value together again, with the same types; nothing in the document is trusted.

        Args:
            document: parsed JSON, from :meth:`encode` or from a stranger.
            tensors: used as they are; all of them must be.
        """
        decoder = _Decoder(self, tensors)
        value = decoder.decode(document, ())
        unused = [name for name in tensors if name not in decoder.used]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            fault = f"does not name the tensor {shown(unused[0])}{more} of its files"
            raise self.rejects(_place(()), fault)
        return value


def encode(value: object) -> Tuple[object, Dict[str, Tensor]]:
    """Take a value of a checkpoint apart; a tensor that is in the tree twice is stored twice.

    Args:
        value: as for :meth:`Codec.encode`, without further types.
    Raises:
        CheckpointError: something in it is of another type, or it is nested too deeply.
    """
    return _CHECKPOINTS.encode(value)


def decode(document: object, tensors: Mapping[str, Tensor]) -> Any:
    """Put a value of a checkpoint together again; nothing in the document is trusted.

    Args:
        document: parsed JSON, from :func:`encode` or from a stranger.
        tensors: used as they are, each in one place.
    Raises:
        CheckpointError: the document is not what encode makes, or names other tensors.
    """
    return _CHECKPOINTS.decode(document, tensors)


class _Encoder:
    def __init__(self, codec: Codec) -> None:
        self.tensors: Dict[str, Tensor] = {}
        self._codec = codec
        self._counts: Dict[str, int] = {}
        self._names: Dict[Tensor, str] = {}

    def encode(self, value: object, path: Path) -> object:
        _check_depth(path, self._codec.refuses)
        for each in self._codec.kinds:
            if each.takes(value):
                return {f"${each.tag}": self.encode(each.parts(value), path)}
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
        if isinstance(value, Tensor) and (self._codec.shares or kind in (Tensor, nn.Parameter)):
            return {"$tensor": self._keep(value, path)}
        raise self._codec.refuses(_place(path), f"is of type {type_name(value)}")

    def _encode_dict(self, value: Mapping[Any, object], path: Path) -> object:
        for key in value:
            if not _is_key(key):
                raise self._codec.refuses(
                    _place(path),
                    f"has a key of type {type_name(key)}, where a key is a string, or an int of "
                    f"at most {_BITS} bits",
                )
        pairs = [(key, self.encode(part, (*path, key))) for key, part in value.items()]
        is_plain = all(_is_plain_key(key) for key, _ in pairs)
        return dict(pairs) if is_plain else {"$dict": [[key, part] for key, part in pairs]}

    def _keep(self, tensor: Tensor, path: Path) -> str:
        if self._codec.shares and tensor in self._names:
            return self._names[tensor]
        fault = why_not_stored(tensor)
        if fault is not None:
            raise self._codec.refuses(_place(path), f"is {fault}")
        name = ".".join(_NOT_IN_NAMES.sub("_", str(part)) or "_" for part in path) or "value"
        if name in self.tensors or name == _RESERVED:
            # No part of a path keeps a "~", so that this name is new.
            self._counts[name] = self._counts.get(name, 1) + 1
            name = f"{name}~{self._counts[name]}"
        self.tensors[name] = _host_copy(tensor)
        self._names[tensor] = name
        return name


# What a content of another form than its type has makes a reader of it raise.
MALFORMED = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class _Decoder:
    def __init__(self, codec: Codec, tensors: Mapping[str, Tensor]) -> None:
        self.used: Set[str] = set()
        self._codec = codec
        self._tensors = tensors
        self._tags: Dict[str, Callable[[object, Path], object]] = {
            "$tuple": self._tuple,
            "$dict": self._dict,
            "$float": self._float,
            "$int": self._int,
            "$tensor": self._tensor,
            **{f"${kind.tag}": functools.partial(self._kind, kind) for kind in codec.kinds},
        }

    def decode(self, document: object, path: Path) -> object:
        _check_depth(path, self._codec.rejects)
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
            raise self._damaged(path, f"is {_said(document)}")
        if all(_is_plain_key(key) for key in document):
            return {key: self.decode(part, (*path, key)) for key, part in document.items()}
        tag = next(iter(document))
        if len(document) != 1 or tag not in self._tags:
            raise self._damaged(path, f"has the tag {_said(tag)}, which is unknown or not alone")
        return self._tags[tag](document[tag], path)

    def _damaged(self, path: Path, fault: str) -> Exception:
        return self._codec.rejects(_place(path), fault)

    def _kind(self, kind: ValueType, content: object, path: Path) -> object:
        parts = self.decode(content, path)
        try:
            return kind.whole(parts)
        except MALFORMED as error:
            raise self._damaged(path, f"is not a valid {kind.tag}: {reason_of(error)}") from error

    def _tuple(self, content: object, path: Path) -> object:
        if type(content) is not list:
            raise self._damaged(path, f"is a tuple of {_said(content)}")
        return tuple(self.decode(part, (*path, place)) for place, part in enumerate(content))

    def _dict(self, content: object, path: Path) -> object:
        if type(content) is not list:
            raise self._damaged(path, f"is a dict of {_said(content)}")
        decoded: Dict[object, object] = {}
        for pair in content:
            if type(pair) is not list or len(pair) != 2 or not _is_key(pair[0]):
                raise self._damaged(path, "is a dict whose parts are no pairs of a key and a value")
            key, part = pair
            if key in decoded:
                raise self._damaged(path, f"is a dict that has the key {shown(str(key))} twice")
            decoded[key] = self.decode(part, (*path, key))
        return decoded

    def _float(self, content: object, path: Path) -> object:
        if type(content) is not str or content not in _NOT_FINITE:
            raise self._damaged(path, f"is a float written as {_said(content)}")
        return float(content)

    def _int(self, content: object, path: Path) -> object:
        # Digits of base 16 take linear time, however many there are.
        if type(content) is not str or not _HEX.fullmatch(content):
            raise self._damaged(path, f"is an int written as {_said(content)}")
        return int(content, 16)

    def _tensor(self, content: object, path: Path) -> object:
        if type(content) is not str:
            raise self._damaged(path, f"is a tensor named by {_said(content)}")
        is_reused = content in self.used and not self._codec.shares
        if content not in self._tensors or is_reused:
            fault = "used twice" if is_reused else "missing in the files"
            raise self._damaged(path, f"is the tensor {shown(content)}, which is {fault}")
        self.used.add(content)
        return self._tensors[content]


def _is_key(key: object) -> bool:
    return type(key) is str or (type(key) is int and key.bit_length() <= _BITS)


def _is_plain_key(key: object) -> bool:
    return type(key) is str and not key.startswith("$")


def _check_depth(path: Path, error: Callable[[str, str], Exception]) -> None:
    if len(path) > MAX_DEPTH:
        raise error(_place(path[:3]), f"contains itself, or is deeper than {MAX_DEPTH} levels")


def _place(path: Path) -> str:
    return shown(".".join(map(str, path))) if path else "the whole"


def _said(content: object) -> str:
    """Describe a value without its content, which may be large."""
    return shown(content) if isinstance(content, str) else f"a value of type {type_name(content)}"


def type_name(value: object) -> str:
    """Name the class of a value, with its module unless Python has it built in."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__


def _refused(place: str, fault: str) -> CheckpointError:
    return CheckpointError(
        "a checkpoint holds dicts, lists, tuples, None, bool, int, float, str and dense tensors, "
        f"but {place} {fault}. Convert it, or leave it out of the state."
    )


def _damaged(place: str, fault: str) -> CheckpointError:
    return CheckpointError(
        f"the state in a checkpoint must be as ipufit wrote it, but {place} {fault}. "
        "Resume from another checkpoint, or restore this one from a copy."
    )


_CHECKPOINTS = Codec(_refused, _damaged)
