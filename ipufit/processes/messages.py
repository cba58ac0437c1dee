"""Values and tensors as bytes: nothing that comes from another process is ever run."""

from __future__ import annotations

import json
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.utils.codec import decode, encode

__all__ = ["FRAME", "as_bytes", "buckets", "length", "pack", "unpack"]

FRAME = 4096  # bytes that are sent before anybody knows how long a message is
_BUCKET = 25 * 2**20  # bytes
_LENGTH = 8  # bytes of a number


def pack(value: object) -> bytes:
    """A tree of values as a message that begins with its own length.

    Args:
        value: dicts, lists, tuples, None, bool, int, float, str and tensors.
    """
    content, tensors = encode(value)
    head = json.dumps(content, allow_nan=False).encode()
    body = b""
    if tensors:
        # Imported here, as below: few messages have tensors.
        import safetensors.torch

        body = safetensors.torch.save(tensors)
    size = 2 * _LENGTH + len(head) + len(body)
    return b"".join((_number(size), _number(len(head)), head, body))


def unpack(message: bytes) -> Any:
    """The value of a message, whatever follows it."""
    start = 2 * _LENGTH + int.from_bytes(message[_LENGTH : 2 * _LENGTH], "little")
    body = message[start : length(message)]
    tensors: Dict[str, Tensor] = {}
    if body:
        import safetensors.torch

        tensors = safetensors.torch.load(body)
    return decode(json.loads(message[2 * _LENGTH : start]), tensors)


def length(message: bytes) -> int:
    """Read the length of a whole message from its beginning."""
    return int.from_bytes(message[:_LENGTH], "little")


def as_bytes(tensor: Tensor) -> Tensor:
    """The values as one row of bytes; shares memory with a contiguous tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def buckets(rows: Sequence[Tensor]) -> Iterator[Tuple[Tensor, List[Tensor]]]:
    """Put flat tensors of one kind behind each other, about 25 MB a time.

    Returns:
        Pairs of what to send and the tensors that it consists of. A large tensor is sent alone
        and is not copied.
    """
    waiting: List[Tensor] = []
    size = 0
    for row in rows:
        bytes_ = row.numel() * row.element_size()
        if bytes_ >= _BUCKET:
            yield row, [row]
            continue
        waiting.append(row)
        size += bytes_
        if size >= _BUCKET:
            yield _joined(waiting), waiting
            waiting, size = [], 0
    if waiting:
        yield _joined(waiting), waiting


def _joined(rows: List[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _number(value: int) -> bytes:
    return value.to_bytes(_LENGTH, "little")
