"""Group of the processes of a run: collectives and checks between them, by torch.distributed.

Some collectives are of flat tensors of which each process has a part: the part's sum, the whole,
and all of it in one. Parts are told apart by cuts: process p has the elements from ``cuts[p]`` up
to ``cuts[p + 1]``. Sums go round by all-to-all, which both gloo and NCCL have on every torch, for
parts of any length; gloo's own reduce-scatter is missing on old ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor, distributed

from ipufit.errors import ConfigurationError, ProcessError, describe_error
from ipufit.processes.launchers import Rendezvous
from ipufit.utils.codec import decode, encode

if TYPE_CHECKING:
    from ipufit.processes.connection import Connection, PendingWork

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
_FRAME = 4096  # bytes that are sent before anybody knows how long a message is
_BUCKET = 25 * 2**20  # bytes
_LENGTH = 8  # bytes of a number
# Bytes of all processes that are under way at a time; a copy of them is made.
_WINDOW = 25 * 2**20


@dataclasses.dataclass(frozen=True)
class Processes:
    """Process group of a run, as one of its processes sees it.

    :func:`ipufit.distributed` returns it. With one process, nothing is connected.

    Attributes:
        process_id: rank of this process, from 0.
        num_processes: world size.
        launcher: what started the processes, for reports.
        local_id: number of this process among those of its machine; 0 if unknown.
        place: where the processes meet; None if torch.distributed is initialised already.
        timeout: seconds that a process waits for another one.
    """

    process_id: int = 0
    num_processes: int = 1
    launcher: str = "nobody"
    local_id: int = 0
    place: Optional[Rendezvous] = None
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        if not self.is_distributed:
            return
        # Imported here: one process connects to nobody.
        from ipufit.processes.connection import Connection

        connection = Connection(self.process_id, self.num_processes, self.place, self.timeout)
        object.__setattr__(self, "_connection", connection)

    @property
    def connection(self) -> Connection:
        """Connection to the other processes, opened when it is first needed."""
        connection: Connection = self.__dict__["_connection"]
        return connection

    @property
    def is_distributed(self) -> bool:
        """True if there is more than one process."""
        return self.num_processes > 1

    @property
    def is_rank_zero(self) -> bool:
        """True in the process that prints and writes."""
        return self.process_id == 0

    def require_single(self, what: str, instead: str) -> None:
        """Refuse what works in one process alone.

        Args:
            what: works there only.
            instead: what to do.

        Raises:
            ConfigurationError: there are several.
        """
        if self.is_distributed:
            raise ConfigurationError(
                f"{what} works in one process, but this is process {self.process_id} of "
                f"{self.num_processes}. {instead}"
            )

    def describe(self) -> str:
        """Return one line about the process and its group, for reports."""
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
            self.connection.connect()

    def gather(self, value: object, at: str = "") -> List[Any]:
        """All-gather a tree of numbers, texts and host tensors; one from each process, by rank.

        Args:
            value: of this process.
            at: purpose of the call, which must be the same in all processes.
        Raises:
            ProcessError: the others do something else, or are gone.
        """
        if not self.is_distributed:
            return [value]
        answers = [
            _unpack(each) for each in self._in_frames(self._gather_bytes, _pack([at, value]))
        ]
        for process, (theirs, _) in enumerate(answers):
            if theirs != answers[0][0]:
                text = (
                    "all processes must do the same at the same time, but process 0 is at "
                    f"{answers[0][0]!r} and process {process} at {theirs!r}. Call fit, evaluate "
                    "and predict in all of them, also from callbacks, never in only one."
                )
                raise common(ProcessError(text))
        return [answer for _, answer in answers]

    def gather_rows(self, tensor: Tensor, counts: Sequence[int]) -> List[Tensor]:
        """All-gather rows of a tensor, of which processes may have different numbers.

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
        sent = as_bytes(padded)
        received = [torch.empty_like(padded) for _ in counts]
        with self.collectives() as start:
            start(distributed.all_gather, [as_bytes(each) for each in received], sent, like=sent)
        return [each[:count] for each, count in zip(received, counts)]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """All-reduce tensors to their sums, in place, with the same bits in each process.

        Half precision is summed in float32 on the host, and rounded once; for bool it means "any".
        """
        if not self.is_distributed:
            return
        rows = [summable(each) for each in tensors]
        self._in_buckets(rows, distributed.all_reduce)
        for tensor, row in zip(tensors, rows):
            give_back(tensor, row)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite each tensor by that of process 0, in place, whatever its dtype."""
        if not self.is_distributed:
            return
        plain = [_plain(each) for each in tensors]
        self._in_buckets([as_bytes(each) for each in plain], distributed.broadcast, 0)
        if not self.is_rank_zero:
            for tensor, each in zip(tensors, plain):
                give_back(tensor, each)

    def _in_buckets(
        self, rows: Sequence[Tensor], collective: Callable[..., object], *arguments: object
    ) -> None:
        """Run a collective over flat tensors, in place; of each kind in buckets."""
        sent: List[Tuple[Tensor, List[Tensor]]] = []
        with torch.no_grad(), self.collectives() as start:
            for kind in dict.fromkeys((row.device, row.dtype) for row in rows):
                alike = [row for row in rows if (row.device, row.dtype) == kind and row.numel()]
                for bucket, parts in _buckets(alike):
                    start(collective, bucket, *arguments, like=bucket)
                    sent.append((bucket, parts))
        for bucket, parts in sent:
            if bucket is not parts[0]:
                sizes = [part.numel() for part in parts]
                for part, values in zip(parts, torch.split(bucket, sizes)):
                    part.copy_(values)

    def run_on_rank_zero(self, make: Callable[[], T]) -> T:
        """Call ``make`` in process 0 alone, and return its result, a tree as for gather, in all.

        Raises:
            Exception: in process 0, the one that ``make`` raised.
            ProcessError: in the others, if ``make`` raised.
        """
        if not self.is_distributed:
            return make()
        if self.is_rank_zero:
            try:
                result = make()
                message = _pack({"result": result})
            except Exception as error:
                self._in_frames(self._broadcast_bytes, _pack({"error": describe_error(error)}))
                common(error)
                raise
            self._in_frames(self._broadcast_bytes, message)
            return result
        (message,) = self._in_frames(self._broadcast_bytes, b"")
        answer = _unpack(message)
        if "error" in answer:
            raise self._failed(0, answer["error"])
        result = answer["result"]
        return result

    def run_on_all_ranks(self, make: Callable[[], T]) -> T:
        """Call ``make`` in each process, and return its own result there if it fails in none.

        Raises:
            Exception: the one that ``make`` raised in this process.
            ProcessError: ``make`` failed in another process only.
        """
        if not self.is_distributed:
            return make()
        error = None
        try:
            result = make()
        except Exception as caught:
            error = caught
        failures = self.gather(None if error is None else describe_error(error), "check")
        if error is not None:
            raise common(error)
        for process, text in enumerate(failures):
            if text is not None:
                raise self._failed(process, text)
        return result

    def assert_equal_across_ranks(self, **facts: object) -> None:
        """Check that facts are equal in all processes.

        Args:
            facts: small trees by names that a user understands; "_" reads as a space.
        Raises:
            ProcessError: in all processes, with the first that differs.
        """
        if not self.is_distributed:
            return
        answers = self.gather(facts, "agreement")
        for process, theirs in enumerate(answers):
            if list(theirs) != list(answers[0]):
                raise self._disagreed("next step", list(answers[0]), process, list(theirs))
        for name, first in answers[0].items():
            for process, theirs in enumerate(answers):
                if _shown(theirs[name]) != _shown(first):
                    raise self._disagreed(name.replace("_", " "), first, process, theirs[name])

    @contextlib.contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Tell the other processes of an error that leaves the block, so that they do not wait.

        An error with ``is_common`` true is one that all of them have. After any other this process
        can't speak to the others any more.
        """
        try:
            yield
        except BaseException as error:
            if self.is_distributed and not getattr(error, "is_common", False):
                self.connection.tell(error)
            raise

    def _in_frames(self, exchange: Callable[[bytes], List[bytes]], message: bytes) -> List[bytes]:
        """Exchange messages of any length, of which the beginning says how long they are.

        Args:
            exchange: takes as many bytes in every process, and returns what arrives.
            message: of this process; empty where it only receives.
        """
        first = exchange(message[:_FRAME].ljust(_FRAME, b"\0"))
        longest = max(map(_length, first))
        if longest <= _FRAME:
            return first
        rest = exchange(message[_FRAME:].ljust(longest - _FRAME, b"\0"))
        return [begin + end for begin, end in zip(first, rest)]

    def _broadcast_bytes(self, message: bytes) -> List[bytes]:
        row = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        with self.collectives() as start:
            start(distributed.broadcast, row, 0, like=row)
        return [row.numpy().tobytes()]

    def _gather_bytes(self, message: bytes) -> List[bytes]:
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.num_processes)]
        with self.collectives() as start:
            start(distributed.all_gather, received, sent, like=sent)
        return [each.numpy().tobytes() for each in received]

    @contextlib.contextmanager
    def collectives(self) -> Iterator[Callable[..., None]]:
        """Yield what starts a collective; all of them are waited for at the end."""
        works = self.pending_work()
        yield works.start
        works.wait()

    def pending_work(self) -> PendingWork:
        """Make an empty list of collectives, for a caller that waits for them when it likes.

        All processes start the same ones in the same order.
        """
        self.connect()
        return self.connection.pending_work()

    def _failed(self, process: int, text: str) -> ProcessError:
        what = (
            f"all processes must complete this step, but process {process} of {self.num_processes} "
            f"failed: {text}. Read the output of that process, and fix it there."
        )
        return common(ProcessError(what))

    def _disagreed(self, fact: str, first: object, process: int, theirs: object) -> ProcessError:
        text = (
            f"all processes of a run must have the same {fact}, but process 0 has {_shown(first)} "
            f"and process {process} has {_shown(theirs)}. Start all of them with the same program, "
            "arguments and seed, and pass the whole data to each; each takes its own share."
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


def give_back(tensor: Tensor, values: Tensor) -> None:
    """Copy values that :func:`summable` made back into their tensor, if they lie elsewhere."""
    target = tensor.detach()
    if target.data_ptr() == values.data_ptr() and target.is_contiguous():
        return
    if target.is_complex() and not values.is_complex():
        values = torch.view_as_complex(values.reshape(-1, 2))
    if target.dtype is torch.bool:
        values = values != 0
    target.copy_(values.reshape(target.shape))


def common(error: E) -> E:
    """Mark an error as one that all processes have, so that none tells the others of it."""
    # An exception of the user's may take no attributes; then the others are only told once more.
    with contextlib.suppress(Exception):
        error.is_common = True  # type: ignore[attr-defined]
    return error


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value, default=repr)


ALONE = Processes()


def _pack(value: object) -> bytes:
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


def _unpack(message: bytes) -> Any:
    """The value of a message, whatever follows it."""
    start = 2 * _LENGTH + int.from_bytes(message[_LENGTH : 2 * _LENGTH], "little")
    body = message[start : _length(message)]
    document = json.loads(message[2 * _LENGTH : start])
    if not body:
        return decode(document, {})
    import safetensors.torch

    return decode(document, safetensors.torch.load(body))


def _length(message: bytes) -> int:
    """Read the length of a whole message from its beginning."""
    return int.from_bytes(message[:_LENGTH], "little")


def as_bytes(tensor: Tensor) -> Tensor:
    """The values as one row of bytes; shares memory with a contiguous tensor."""
    return _plain(tensor).reshape(-1).view(torch.uint8)


def _buckets(rows: Sequence[Tensor]) -> Iterator[Tuple[Tensor, List[Tensor]]]:
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
            yield _join(waiting), waiting
            waiting, size = [], 0
    if waiting:
        yield _join(waiting), waiting


def _join(rows: List[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _number(value: int) -> bytes:
    return value.to_bytes(_LENGTH, "little")


def part_of(processes: Processes, flat: Tensor, cuts: Sequence[int]) -> Tensor:
    """A view of this process's part of a whole tensor."""
    return flat[cuts[processes.process_id] : cuts[processes.process_id + 1]]


def reduce_scatter(
    processes: Processes, flats: Sequence[Tensor], cuts: Sequence[Sequence[int]]
) -> List[Tensor]:
    """Sum flat tensors over all processes, and return this process's part of each sum.

    Each process sends a value once, and not twice as for a sum that all get. Half precision is
    summed in float32, and rounded once.

    Args:
        flats: whole and contiguous in each process; they are changed.
        cuts: of each.
    Returns:
        Views of them. What is beside the part means nothing any more.
    """
    parts = []
    with torch.no_grad():
        for flat, bounds in zip(flats, cuts):
            for pieces in _windows(flat, bounds):
                edges = [*itertools.accumulate(map(len, pieces), initial=0)]
                pending = PendingReduceScatter(processes, torch.cat(pieces), edges)
                pending.end()
                pieces[processes.process_id].copy_(pending.result)
            parts.append(part_of(processes, flat, bounds))
    return parts


def _windows(flat: Tensor, cuts: Sequence[int]) -> Iterator[List[Tensor]]:
    """A piece of each part, window after window; pieces of short parts are empty at last."""
    parts = [flat[begin:end] for begin, end in zip(cuts, cuts[1:])]
    width = max(1, _WINDOW // (flat.element_size() * len(parts)))
    for begin in range(0, max(map(len, parts)), width):
        yield [part[begin : begin + width] for part in parts]


def all_gather_parts(
    processes: Processes, flats: Sequence[Tensor], cuts: Sequence[Sequence[int]]
) -> None:
    """Make flat tensors whole in all processes, in place, from the part that each one has.

    Args:
        flats: contiguous.
        cuts: of each.
    """
    works = processes.pending_work()
    with torch.no_grad():
        for flat, bounds in zip(flats, cuts):
            start_all_gather(works, flat, bounds)
    works.wait()


def start_all_gather(works: PendingWork, flat: Tensor, cuts: Sequence[int]) -> None:
    """Start to make a flat tensor whole from the part that each process has.

    Args:
        works: of the processes; the tensor is whole when they are done.
        flat: contiguous.
        cuts: of it.
    """
    for process, (begin, end) in enumerate(zip(cuts, cuts[1:])):
        if end > begin:
            part = as_bytes(flat[begin:end])
            works.start(distributed.broadcast, part, process, like=part)


def gather_parts(
    processes: Processes, part: Tensor, lengths: Sequence[int], everywhere: bool
) -> Optional[Tensor]:
    """Gather the parts that processes have into a whole tensor.

    Args:
        part: of this process, flat and contiguous.
        lengths: of the parts, by process.
        everywhere: whether all get it; else process 0 alone.
    Returns:
        A new tensor on the device of the part, or None where nobody wants it.
    """
    assert lengths[processes.process_id] == len(part)
    cuts = [*itertools.accumulate(lengths, initial=0)]
    if everywhere:
        whole = part.new_empty(cuts[-1])
        part_of(processes, whole, cuts).copy_(part)
        all_gather_parts(processes, [whole], [cuts])
        return whole
    wants = processes.is_rank_zero
    whole = part.new_empty(cuts[-1] if wants else 0)
    one = part.element_size()
    here = [one * length if wants else 0 for length in lengths]
    there = [one * len(part), *[0] * (len(lengths) - 1)]
    with torch.no_grad(), processes.collectives() as start:
        texts: Tuple[Tensor, Tensor] = as_bytes(whole), as_bytes(part)
        start(distributed.all_to_all_single, *texts, here, there, like=part)
    return whole if wants else None


class PendingReduceScatter:
    """Sum of a flat tensor over all processes, under way, of which each gets its part.

    Args:
        processes: all of them.
        whole: contiguous; it stays as it is until the sum has ended.
        cuts: of it.

    Attributes:
        result: this process's part, when the sum has ended.
    """

    def __init__(self, processes: Processes, whole: Tensor, cuts: Sequence[int]) -> None:
        count = len(cuts) - 1
        self.result = torch.empty_like(part_of(processes, whole, cuts))
        self._received = whole.new_empty(count * len(self.result))
        # What is sent stays until it has arrived.
        self._sent = whole
        self._works = processes.pending_work()
        one = whole.element_size()
        here = [one * len(self.result)] * count
        there = [one * (end - begin) for begin, end in zip(cuts, cuts[1:])]
        texts = as_bytes(self._received), as_bytes(whole)
        self._works.start(distributed.all_to_all_single, *texts, here, there, like=whole)

    def end(self) -> None:
        """Wait until the sums have arrived."""
        self._works.wait()
        rows = self._received.view(-1, len(self.result)) if len(self.result) else None
        if rows is not None:
            wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
            self.result.copy_(rows.sum(0, dtype=wide))
