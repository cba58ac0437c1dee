"""What the processes of a run tell each other, through torch.distributed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

import torch
from torch import Tensor, distributed

from ipufit.errors import ProcessError
from ipufit.processes.messages import FRAME, as_bytes, buckets, length, pack, unpack
from ipufit.processes.pending_work import Works
from ipufit.processes.rendezvous import Place

if TYPE_CHECKING:
    from ipufit.processes.connection import Link

__all__ = ["ALONE", "TIMEOUT", "Processes", "common", "give_back", "summable"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

TIMEOUT = 600.0  # seconds that one process waits for another
# Sums in these are made in wider ones: gloo has no such sums, or has them on newer torch only.
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.bool: torch.int32,
}


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run, as one of them sees them.

    With one process every method returns what it was given, and nothing is connected.

    Attributes:
        process_id: of this process, from 0.
        num_processes: how many there are.
        launcher: what started them, for reports.
        local_id: number of this process among those of its machine; 0 if unknown.
        place: where they meet; None where torch.distributed is initialised already.
        timeout: seconds that one waits for another.
    """

    process_id: int = 0
    num_processes: int = 1
    launcher: str = "nobody"
    local_id: int = 0
    place: Optional[Place] = None
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        if not self.is_distributed:
            return
        # Imported here: one process connects to nobody.
        from ipufit.processes.connection import Link

        link = Link(self.process_id, self.num_processes, self.place, self.timeout)
        object.__setattr__(self, "_link", link)

    @property
    def link(self) -> Link:
        """The connections of several, which are made when they are first needed."""
        link: Link = self.__dict__["_link"]
        return link

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one."""
        return self.num_processes > 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.process_id == 0

    def describe(self) -> str:
        """One line for reports."""
        if not self.is_distributed:
            return "One process."
        return (
            f"Process {self.process_id} of {self.num_processes}, started by {self.launcher}, "
            f"number {self.local_id} on this machine."
        )

    def connect(self) -> None:
        """Join torch.distributed, if it is not joined yet; every other method does.

        Raises:
            ProcessError: another process did not come in time, or this one has left.
            ConfigurationError: the user's torch.distributed has other numbers, or there is none.
        """
        if self.is_distributed:
            self.link.connect()

    def gather(self, value: Any, at: str = "") -> List[Any]:
        """What each process passes, by its number: numbers, texts, tensors on the host, nested.

        Args:
            value: of this process.
            at: what for, which all must agree on.
        Raises:
            ProcessError: the others do something else, or are gone.
        """
        if not self.is_distributed:
            return [value]
        message = pack([at, value])
        first = self._gather_bytes(message[:FRAME].ljust(FRAME, b"\0"))
        longest = max(length(each) for each in first)
        if longest > FRAME:
            rest = self._gather_bytes(message[FRAME:].ljust(longest - FRAME, b"\0"))
            first = [begin + end for begin, end in zip(first, rest)]
        told = [unpack(each) for each in first]
        for process, (theirs, _) in enumerate(told):
            if theirs != told[0][0]:
                text = (
                    "all processes must do the same at the same time, but process 0 is at "
                    f"{told[0][0]!r} and process {process} at {theirs!r}. Call fit, evaluate and "
                    "predict in all of them, also from callbacks, and never in one alone."
                )
                raise common(ProcessError(text))
        return [found for _, found in told]

    def gather_rows(self, tensor: Tensor, counts: Sequence[int]) -> List[Tensor]:
        """The rows of all processes.

        Args:
            tensor: shape (counts[process_id], *), of one dtype and shape of a row in all processes.
            counts: how many rows each process has.
        Returns:
            The rows of each process, by its number, on the device of the tensor.
        """
        assert len(counts) == self.num_processes
        assert counts[self.process_id] == len(tensor)
        if not self.is_distributed:
            return [tensor]
        longest = max(counts)
        row = tensor.shape[1:]
        if longest == 0 or row.numel() == 0:
            return [tensor.new_empty((count, *row)) for count in counts]
        padded = tensor.new_zeros((longest, *row))
        padded[: len(tensor)] = tensor.detach()
        own = as_bytes(padded)
        found = [torch.empty_like(padded) for _ in counts]
        with self.collectives() as start:
            start(distributed.all_gather, [as_bytes(each) for each in found], own, like=own)
        return [each[:count] for each, count in zip(found, counts)]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes the sum over all processes, in place, the same bits in each.

        Half precision is summed in float32 on the host, and rounded once; for bool it means "any".
        """
        if not self.is_distributed:
            return
        sent: List[Tuple[Tensor, List[Tensor]]] = []
        rows = [summable(each) for each in tensors]
        with torch.no_grad(), self.collectives() as start:
            for kind in dict.fromkeys((row.device, row.dtype) for row in rows):
                alike = [row for row in rows if (row.device, row.dtype) == kind and row.numel()]
                for bucket, parts in buckets(alike):
                    start(distributed.all_reduce, bucket, like=bucket)
                    sent.append((bucket, parts))
        _unpack_buckets(sent)
        for tensor, row in zip(tensors, rows):
            give_back(tensor, row)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes that of process 0, in place, whatever its dtype."""
        if not self.is_distributed:
            return
        sent: List[Tuple[Tensor, List[Tensor]]] = []
        plain = [_plain(each) for each in tensors]
        rows = [as_bytes(each) for each in plain]
        with torch.no_grad(), self.collectives() as start:
            for device in dict.fromkeys(row.device for row in rows):
                alike = [row for row in rows if row.device == device and row.numel()]
                for bucket, parts in buckets(alike):
                    start(distributed.broadcast, bucket, 0, like=bucket)
                    sent.append((bucket, parts))
        _unpack_buckets(sent)
        if not self.is_rank_zero:
            for tensor, each in zip(tensors, plain):
                give_back(tensor, each)

    def run_on_rank_zero(self, make: Callable[[], T]) -> T:
        """What ``make`` returns in process 0, which alone calls it: a tree as for gather.

        Raises:
            Exception: that of ``make``, in process 0.
            ProcessError: it failed there, in the others.
        """
        if not self.is_distributed:
            return make()
        if self.is_rank_zero:
            return self._first_here(make)
        answer = self._receive()
        if "error" in answer:
            raise self._failed(0, answer["error"])
        result: T = answer["result"]
        return result

    def run_on_all_ranks(self, make: Callable[[], T]) -> T:
        """What ``make`` returns, in each process its own, if it fails in none.

        Raises:
            Exception: that of ``make``, where it failed.
            ProcessError: it failed in another process only.
        """
        if not self.is_distributed:
            return make()
        error = None
        try:
            result = make()
        except Exception as caught:
            error = caught
        told = self.gather(None if error is None else _text(error), "check")
        if error is not None:
            raise common(error)
        for process, text in enumerate(told):
            if text is not None:
                raise self._failed(process, text)
        return result

    def assert_equal_across_ranks(self, **facts: Any) -> None:
        """Make sure that all processes have the same.

        Args:
            facts: small trees by names that a user understands; "_" reads as a space.
        Raises:
            ProcessError: in all processes, with the first that differs.
        """
        if not self.is_distributed:
            return
        told: List[Dict[str, Any]] = self.gather(facts, "agreement")
        for process, theirs in enumerate(told):
            if list(theirs) != list(told[0]):
                raise self._disagreed("next step", list(told[0]), process, list(theirs))
        for name, first in told[0].items():
            for process, theirs in enumerate(told):
                if _shown(theirs[name]) != _shown(first):
                    raise self._disagreed(name.replace("_", " "), first, process, theirs[name])

    @contextlib.contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Whoever leaves the block by an error of its own tells the others, which do not wait.

        An error with ``is_common`` true is one that all of them have. After any other this process
        can't speak to the others any more.
        """
        try:
            yield
        except BaseException as error:
            if self.is_distributed and not getattr(error, "is_common", False):
                self.link.tell(error)
            raise

    def _first_here(self, make: Callable[[], T]) -> T:
        try:
            result = make()
            message = pack({"result": result})
        except Exception as error:
            self._send(pack({"error": _text(error)}))
            common(error)
            raise
        self._send(message)
        return result

    def _send(self, message: bytes) -> None:
        self._broadcast(message[:FRAME].ljust(FRAME, b"\0"))
        if len(message) > FRAME:
            self._broadcast(message[FRAME:])

    def _receive(self) -> Any:
        message = self._broadcast(bytes(FRAME))
        if length(message) > FRAME:
            message += self._broadcast(bytes(length(message) - FRAME))
        return unpack(message)

    def _broadcast(self, message: bytes) -> bytes:
        row = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        with self.collectives() as start:
            start(distributed.broadcast, row, 0, like=row)
        return bytes(row.numpy().tobytes())

    def _gather_bytes(self, message: bytes) -> List[bytes]:
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.num_processes)]
        with self.collectives() as start:
            start(distributed.all_gather, found, own, like=own)
        return [bytes(each.numpy().tobytes()) for each in found]

    @contextlib.contextmanager
    def collectives(self) -> Iterator[Callable[..., None]]:
        """Start some, and wait for all of them at the end."""
        works = self.works()
        yield works.start
        works.wait()

    def works(self) -> Works:
        """None yet; whoever starts collectives with it waits for them when it likes.

        All processes start the same ones in the same order.
        """
        self.connect()
        return Works(self.link)

    def _failed(self, process: int, text: str) -> ProcessError:
        what = (
            f"all processes must get through this, but process {process} of "
            f"{self.num_processes} failed: {text}. Look at what that process printed, and repair "
            "it there."
        )
        return common(ProcessError(what))

    def _disagreed(self, fact: str, first: Any, process: int, theirs: Any) -> ProcessError:
        text = (
            f"all processes of a run must have the same {fact}, but process 0 has {_shown(first)} "
            f"and process {process} has {_shown(theirs)}. Start all of them with the same program, "
            "arguments and seed, and give each the whole data, as each takes its share itself."
        )
        return common(ProcessError(text))


def summable(tensor: Tensor) -> Tensor:
    """The values flat, in a dtype that can be summed; the tensor's own memory where possible."""
    row = _plain(tensor).reshape(-1)
    if row.is_complex():
        row = torch.view_as_real(row).reshape(-1)
    is_half = row.dtype in (torch.float16, torch.bfloat16)
    if row.dtype in _WIDER and not (is_half and row.device.type != "cpu"):
        row = row.to(_WIDER[row.dtype])
    return row


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _unpack_buckets(sent: Sequence[Tuple[Tensor, List[Tensor]]]) -> None:
    for bucket, parts in sent:
        if bucket is not parts[0]:
            sizes = [part.numel() for part in parts]
            for part, found in zip(parts, torch.split(bucket, sizes)):
                part.copy_(found)


def give_back(tensor: Tensor, found: Tensor) -> None:
    """Put what was made of :func:`summable` values where these came from, if it is elsewhere."""
    target = tensor.detach()
    if target.data_ptr() == found.data_ptr() and target.is_contiguous():
        return
    if target.is_complex() and not found.is_complex():
        found = torch.view_as_complex(found.reshape(-1, 2))
    if target.dtype is torch.bool:
        found = found != 0
    target.copy_(found.reshape(target.shape))


def common(error: E) -> E:
    """The error, marked as one that all processes have; none is to tell the others of it."""
    # An exception of the user's may take no attributes; then the others are only told once more.
    with contextlib.suppress(Exception):
        error.is_common = True  # type: ignore[attr-defined]
    return error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value, default=repr)


ALONE = Processes()
