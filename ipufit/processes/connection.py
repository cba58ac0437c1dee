"""The connections of one process to the others, and what becomes of them when one of them ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import datetime
import math
import time
from typing import TYPE_CHECKING, Any, Callable, List, NoReturn, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed

from ipufit.errors import ConfigurationError, IpufitError, ProcessError, describe_error, first_line
from ipufit.processes.heartbeat_store import POLL, Heartbeats, HeartbeatStore, StoreLostError
from ipufit.processes.launchers import Rendezvous
from ipufit.utils.interrupts import ForkGuard

if TYPE_CHECKING:
    # Public as those of torch.distributed, but torch does not say so to type checkers.
    from torch._C._distributed_c10d import Store, Work


# What torch.distributed raises has no class of its own; on torch 2.0 a limit is a TimeoutError.
_TORCH_ERRORS = (RuntimeError, ValueError, OSError)
_GRACE = 3.0  # seconds in which those who are alive answer
_AGAIN = "tart all processes again; a run with checkpoints resumes from the last one."
_LOOK = (
    "Read the output of that process, fix the cause, and start all processes again; a run with "
    "checkpoints resumes from the last one."
)
_SLOW = "If it is only slow, raise the limit with ipufit.distributed(timeout=...); then s" + _AGAIN


@dataclasses.dataclass(frozen=True)
class _PeerFault:
    """A failure of the link between processes, and its cure."""

    what: str
    cure: str = "S" + _AGAIN


@dataclasses.dataclass(frozen=True)
class _FaultFinder:
    """Finds out which process is at fault when a collective fails.

    Attributes:
        num_processes: how many there are.
        timeout: seconds that one waits for another.
        is_hosted: whether the store is the launcher's; process 0 has it otherwise.
    """

    num_processes: int
    timeout: float
    is_hosted: bool

    def ask(self, heartbeats: HeartbeatStore, reason: object) -> _PeerFault:
        """Find it with the others' help.

        Args:
            reason: by torch, or nothing.
        Raises:
            StoreLostError: the store is gone.
        """
        view = self._answers(heartbeats)
        fault = self._reported(heartbeats)
        if fault is not None and heartbeats.ended:
            return fault
        # Not those that have found the fault already, and ended by it.
        left = [has and not knew for has, knew in zip(view.left, view.noticed)]
        if any(left):
            who = self._who(left)
            return _PeerFault(f"{who} ended the program already", _LOOK)
        if view.is_closed and not all(view.alive):
            who = self._who([not each for each in view.alive])
            return _PeerFault(f"{who} gone (killed, or the machine failed)")
        if not view.is_closed and not all(view.noticed):
            who = _named([number for number, came in enumerate(view.noticed) if not came])
            return _PeerFault(
                f"{who} of {self.num_processes} did not reach the same point within "
                f"{self.timeout:g} s (waits, is busy, or hangs)",
                _SLOW,
            )
        return fault or _PeerFault(
            f"torch.distributed failed: {first_line(reason) or 'it does not say why'}"
        )

    def without_asking(self, heartbeats: HeartbeatStore) -> _PeerFault:
        """Find it where the store is gone."""
        fault = self._reported(heartbeats)
        if fault is not None:
            return fault
        if heartbeats.lost is None or heartbeats.is_silent:
            return _PeerFault(
                f"process 0 of {self.num_processes} did not reach the same point within "
                f"{self.timeout:g} s, and does not answer (it hangs, or its machine failed)"
            )
        if self.is_hosted:
            return _PeerFault("the launcher, through which they communicate, is gone")
        return _PeerFault(
            f"process 0 of {self.num_processes} has gone (ended, killed, or its machine failed)"
        )

    def _answers(self, heartbeats: HeartbeatStore) -> Heartbeats:
        until = time.monotonic() + _GRACE
        while True:
            view = heartbeats.look()
            # Where a connection is closed, an error may still be on its way to the store.
            is_known = heartbeats.ended or (not view.is_closed and all(view.noticed))
            if is_known or time.monotonic() >= until:
                return view
            time.sleep(POLL / 5)

    def _reported(self, heartbeats: HeartbeatStore) -> Optional[_PeerFault]:
        """An error that a process ended with, or what others found before."""
        for process, text in sorted(heartbeats.ended.items()):
            return _PeerFault(f"process {process} of {self.num_processes} ended with {text}", _LOOK)
        for process, text in sorted(heartbeats.concluded.items()):
            return _PeerFault(f"process {process} of {self.num_processes} gave up because {text}")
        return None

    def _who(self, are: Sequence[bool]) -> str:
        which = [number for number, each in enumerate(are) if each]
        return f"{_named(which)} of {self.num_processes} {'has' if len(which) == 1 else 'have'}"


def _named(which: Sequence[int]) -> str:
    """Processes by their numbers, in words."""
    if len(which) == 1:
        return f"process {which[0]}"
    return f"processes {', '.join(map(str, which[:-1]))} and {which[-1]}"


# Public, but torch does not say so to type checkers; absent from a torch without distributed.
_TCPStore: Any = getattr(distributed, "TCPStore", None)
_PrefixStore: Any = getattr(distributed, "PrefixStore", None)

_MARGIN = 60.0  # seconds that torch's own limit comes after ours, which names who is missing


class Connection:
    """Connection of one process to the others, opened at the first call of :meth:`connect`.

    Args:
        place: None where torch.distributed is initialised already.
        timeout: seconds that one process waits for another.
    """

    def __init__(
        self, process_id: int, num_processes: int, place: Optional[Rendezvous], timeout: float
    ) -> None:
        self.group: Any = None  # that of the host, for tensors there
        self.is_connected: bool = False
        self.pending: int = 0  # collectives that were begun and not waited for
        self._me = process_id
        self._count = num_processes
        self._place = place
        self._timeout = timeout
        is_hosted = place is not None and place.is_hosted
        self._faults = _FaultFinder(num_processes, timeout, is_hosted)
        self._heartbeats: Optional[HeartbeatStore] = None
        self._store: Optional[Store] = None
        self._broken = ""
        self._is_ours = False
        self._same = ForkGuard()

    def connect(self) -> None:
        """Join torch.distributed, if that has not been done yet.

        Raises:
            ProcessError: another process did not come, or this one has left.
            ConfigurationError: torch.distributed is absent, or has other numbers; or this is a
                copy, made by ``os.fork``.
        """
        self._same.check()
        if self._broken:
            raise ProcessError(
                "a process that left the others can't reconnect, but this one left them because "
                f"{self._broken}. {_PeerFault('').cure}"
            )
        if self.is_connected:
            return
        if not distributed.is_available():
            raise ConfigurationError(
                f"a run of {self._count} processes needs torch.distributed, but this torch was "
                "built without it. Install another build of torch, or start one process."
            )
        heartbeats = self._open(self._timeout)
        limit = datetime.timedelta(seconds=self._timeout + _MARGIN)
        try:
            self._arrive(heartbeats)
            if self._is_ours:
                has_nccl = torch.cuda.is_available() and distributed.is_nccl_available()
                backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
                store = _PrefixStore("group", self._store)
                distributed.init_process_group(
                    backend, store=store, rank=self._me, world_size=self._count, timeout=limit
                )
                self.group = distributed.group.WORLD
            else:
                # The user's own may have no gloo, and another limit.
                self.group = distributed.new_group(backend="gloo", timeout=limit)
        except _TORCH_ERRORS as error:
            if isinstance(error, IpufitError):
                raise
            self.fail(True, error)
        self.is_connected = True

    def pending_work(self) -> PendingWork:
        """Make a list of collectives under way, with none in it yet."""
        return PendingWork(self)

    def wait(self, works: Sequence[Tuple[Work, bool]]) -> None:
        """Wait until the collectives are done, or a process is known to be at fault.

        Args:
            works: each with whether its tensors are on the host.
        Raises:
            ProcessError: another process failed, has gone or did not come.
        """
        heartbeats = self._heartbeats
        assert heartbeats is not None
        until = time.monotonic() + self._timeout
        given_up = math.inf
        for work, is_on_host in works:
            while True:
                try:
                    if _is_done(work, is_on_host):
                        break
                except _TORCH_ERRORS as error:
                    self.fail(True, error)
                now = time.monotonic()
                if heartbeats.alarm or heartbeats.lost is not None:
                    # What the others sent before they ended may still arrive.
                    given_up = min(given_up, now + (0.0 if heartbeats.alarm else _GRACE))
                if now >= given_up:
                    self.fail(heartbeats.lost is not None)
                if now >= until:
                    self.fail(False)

    def tell(self, error: BaseException) -> None:
        """Tell the others that this process ends by an error, and leave them."""
        if self._broken or not self._same.is_here or not distributed.is_available():
            return
        text = describe_error(error)
        # The error itself matters more than who hears of it.
        with contextlib.suppress(StoreLostError, *_TORCH_ERRORS):
            self._open(min(self._timeout, 2 * _GRACE)).tell_error(text)
        self._leave(f"it ended with {text}")

    def _open(self, seconds: float) -> HeartbeatStore:
        if self._heartbeats is not None:
            return self._heartbeats
        if distributed.is_initialized():
            rank, size = distributed.get_rank(), distributed.get_world_size()
            if (rank, size) != (self._me, self._count):
                raise ConfigurationError(
                    "torch.distributed and ipufit must agree, but for torch this is process "
                    f"{rank} of {size}, and for ipufit {self._me} of {self._count}. Leave "
                    "ipufit.distributed out, or pass it the same numbers."
                )
            # Not public, but there since torch 1.x, and torch's own packages use it.
            store = distributed.distributed_c10d._get_default_store()
            mine = _PrefixStore("ipufit", store)
        else:
            self._store, mine = self._stores(seconds)
            self._is_ours = True
        self._heartbeats = HeartbeatStore(mine, self._me, self._count)
        atexit.register(self._close)
        return self._heartbeats

    def _stores(self, seconds: float) -> Tuple[Store, Store]:
        """Open a store for torch, which waits in it, and one for heartbeats, which must not."""
        place = self._place
        assert place is not None
        limit = datetime.timedelta(seconds=seconds)
        is_host = self._me == 0 and not place.is_hosted
        stores = []
        for number in range(2):
            try:
                store = _TCPStore(
                    place.host,
                    place.port,
                    self._count,
                    is_host and number == 0,
                    timeout=limit,
                    wait_for_workers=False,
                )
            except _TORCH_ERRORS as error:
                where = f"{place.host}:{place.port}"
                if is_host:
                    raise ProcessError(
                        f"process 0 must be able to listen at {where}, but it can't: "
                        f"{first_line(error)}. Choose another port by MASTER_PORT or "
                        'ipufit.distributed(address="host:port"), the same in all processes.'
                    ) from error
                raise ProcessError(
                    f"process 0 must be reachable at {where} within {seconds:g} s, but is not: "
                    f"{first_line(error)}. Check that it runs, and that MASTER_ADDR and "
                    "MASTER_PORT, or the address of ipufit.distributed, name its machine in all "
                    "processes."
                ) from error
            stores.append(_PrefixStore(f"ipufit/{place.attempt}", store))
        return stores[0], _PrefixStore("heartbeats", stores[1])

    def _arrive(self, heartbeats: HeartbeatStore) -> None:
        """Wait for the others, before torch does, which would not say who is missing."""
        try:
            if heartbeats.arrive(self._count) > 1:
                self._refuse(
                    "each process of a run must have its own number, but two have number "
                    f"{self._me}. Check the launcher, or the arguments of ipufit.distributed."
                )
            until = time.monotonic() + self._timeout
            while True:
                absent = heartbeats.absent()
                if 0 not in absent:
                    first, total = heartbeats.sizes()
                    if first != self._count or (not absent and total != self._count**2):
                        what = (
                            f"process 0 has {first}" if self._me else "another has another number"
                        )
                        self._refuse(
                            "all processes of a run must have the same number of processes, but "
                            f"process {self._me} has {self._count} and {what}. Check the launcher, "
                            "or the arguments of ipufit.distributed."
                        )
                if heartbeats.alarm:
                    self.fail(False)
                if not absent:
                    return
                if time.monotonic() >= until:
                    who = f"{_named(absent)} of {self._count}"
                    raise ProcessError(
                        f"all processes of a run must start within {self._timeout:g} s, but {who} "
                        "did not. Start it too, or raise the limit with "
                        "ipufit.distributed(timeout=...)."
                    )
                time.sleep(POLL / 5)
        except StoreLostError as error:
            self.fail(True, error)

    def _refuse(self, text: str) -> NoReturn:
        error = ConfigurationError(text)
        self.tell(error)
        raise error

    def fail(self, is_closed: bool, cause: Optional[Exception] = None) -> NoReturn:
        """Find out who has failed, let the others know, and leave them.

        Args:
            is_closed: whether a collective failed, and not only took too long.
            cause: what torch raised, if it did.
        """
        heartbeats = self._heartbeats
        assert heartbeats is not None
        fault = None
        try:
            heartbeats.notice(is_closed)
            fault = self._faults.ask(heartbeats, cause or "")
            heartbeats.tell_conclusion(fault.what)
            if self._me == 0:
                # It may host the store, which the others still have to read.
                heartbeats.wait_for("concluded", _GRACE / 2)
        except StoreLostError:
            fault = fault or self._faults.without_asking(heartbeats)
        self._leave(fault.what)
        raise ProcessError(
            f"all processes of a run must continue together, but {fault.what}. {fault.cure}"
        ) from cause

    def _leave(self, why: str) -> None:
        self._broken = why
        # A group is freed when its collectives have ended, and those of this one may never: Python
        # could not exit. A reference too many keeps it until the process ends, which closes all.
        groups = [self.group]
        if self._is_ours and distributed.is_initialized():
            groups.append(distributed.group.WORLD)
        for group in groups:
            if group is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _close(self) -> None:
        if not self._same.is_here:
            return
        if self._heartbeats is not None:
            self._heartbeats.leave()
        if self._is_ours and not self._broken and distributed.is_initialized():
            # Only where nobody holds it any more is it freed, and its threads are waited for. One
            # that still lets go of a collective's tensors when Python ends takes the process down.
            if not self.pending:
                self.group = None
            # torch 2.0 holds the lock of the interpreter while it waits for threads, and one that
            # is still letting go of a tensor waits for that lock: it gets it now.
            time.sleep(0.1)
            distributed.destroy_process_group()


class PendingWork:
    """Collectives that were started and not waited for yet.

    Args:
        connection: open.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._started: List[Tuple[Work, bool]] = []

    def start(self, collective: Callable[..., Work], *arguments: object, like: Tensor) -> None:
        """Begin a collective of torch.distributed.

        Args:
            collective: takes the arguments, a group and ``async_op``.
            arguments: tensors among them stay as they are until it is done.
            like: on the device of the tensors.
        Raises:
            ProcessError: another process failed or has gone.
        """
        is_on_host = like.device.type == "cpu"
        group = self._connection.group if is_on_host else None
        try:
            work = collective(*arguments, group=group, async_op=True)
        except _TORCH_ERRORS as error:
            # The others have begun it, perhaps, and are not to wait.
            self._connection.fail(True, error)
        self._started.append((work, is_on_host))
        self._connection.pending += 1

    def wait(self) -> None:
        """Wait until the collectives are done, or a process is known to be at fault.

        Raises:
            ProcessError: another process failed, has gone or did not come.
        """
        started, self._started = self._started, []
        self._connection.wait(started)
        self._connection.pending -= len(started)


def _is_done(work: Work, is_on_host: bool) -> bool:
    """Wait a moment.

    Raises:
        RuntimeError: the collective failed.
    """
    if not is_on_host:
        # A limit would make NCCL give up for good.
        until = time.monotonic() + POLL
        while not work.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(0)
        work.wait()
        return True
    try:
        work.wait(datetime.timedelta(seconds=POLL / 2))
    except _TORCH_ERRORS:
        if not work.is_completed():
            return False  # it was the limit
        work.wait()
    return True
