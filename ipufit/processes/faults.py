"""Which process is to blame when a collective fails or takes too long, from what the board says."""

from __future__ import annotations

import dataclasses
import time
from typing import Optional, Sequence

from ipufit.processes.board import POLL, Board, Seen

__all__ = ["GRACE", "Fault", "Faults", "brief", "named"]

GRACE = 3.0  # seconds in which those who are alive answer
_AGAIN = "tart all processes again; a run that keeps checkpoints resumes from the last one."
_LOOK = (
    "Look at what that process printed, repair it, and start all processes again; a run that "
    "keeps checkpoints resumes from the last one."
)
_SLOW = "If it is only slow, raise the limit with ipufit.distributed(timeout=...); then s" + _AGAIN


@dataclasses.dataclass(frozen=True)
class Fault:
    """What has happened, and what to do."""

    what: str
    cure: str = "S" + _AGAIN


@dataclasses.dataclass(frozen=True)
class Faults:
    """Finds the fault.

    Attributes:
        num_processes: how many there are.
        timeout: seconds that one waits for another.
        is_hosted: whether the store is the launcher's; process 0 has it otherwise.
    """

    num_processes: int
    timeout: float
    is_hosted: bool

    def ask(self, board: Board, said: str) -> Fault:
        """Find it with the others' help.

        Args:
            said: by torch, or nothing.
        Raises:
            BoardLostError: the store is gone.
        """
        return self._judged(board, self._answers(board), said)

    def without_asking(self, board: Board) -> Fault:
        """Find it where the store is gone."""
        told = self._told(board)
        if told is not None:
            return told
        if board.lost is None or board.is_silent:
            return Fault(
                f"process 0 of {self.num_processes} did not come to the same point within "
                f"{self.timeout:g} s, and does not answer (it hangs, or its machine failed)"
            )
        if self.is_hosted:
            return Fault("the launcher, through which they speak, has gone")
        return Fault(
            f"process 0 of {self.num_processes} has gone (ended, killed, or its machine failed)"
        )

    def _answers(self, board: Board) -> Seen:
        until = time.monotonic() + GRACE
        while True:
            seen = board.look()
            # Where a connection is closed, an error may still be on its way to the board.
            is_known = board.ended or (not seen.is_closed and all(seen.noticed))
            if is_known or time.monotonic() >= until:
                return seen
            time.sleep(POLL / 5)

    def _judged(self, board: Board, seen: Seen, said: str) -> Fault:
        told = self._told(board)
        if told is not None and board.ended:
            return told
        # Not those that have found the fault already, and ended by it.
        left = [has and not knew for has, knew in zip(seen.left, seen.noticed)]
        if any(left):
            who = self._who(left)
            return Fault(f"{who} ended the program already", _LOOK)
        if seen.is_closed and not all(seen.alive):
            who = self._who([not each for each in seen.alive])
            return Fault(f"{who} gone (killed, or the machine failed)")
        if not seen.is_closed and not all(seen.noticed):
            who = named([number for number, came in enumerate(seen.noticed) if not came])
            return Fault(
                f"{who} of {self.num_processes} did not come to the same point within "
                f"{self.timeout:g} s (waits, works on something else, or hangs)",
                _SLOW,
            )
        return told or Fault(f"torch.distributed failed: {brief(said) or 'it does not say why'}")

    def _told(self, board: Board) -> Optional[Fault]:
        """An error that a process ended with, or what others found before."""
        for kind, texts in (("ended with", board.ended), ("gave up because", board.concluded)):
            for process, text in sorted(texts.items()):
                what = f"process {process} of {self.num_processes} {kind} {text}"
                return Fault(what, _LOOK) if texts is board.ended else Fault(what)
        return None

    def _who(self, are: Sequence[bool]) -> str:
        which = [number for number, each in enumerate(are) if each]
        return f"{named(which)} of {self.num_processes} {'has' if len(which) == 1 else 'have'}"


def named(which: Sequence[int]) -> str:
    """Processes by their numbers, in words."""
    if len(which) == 1:
        return f"process {which[0]}"
    return f"processes {', '.join(map(str, which[:-1]))} and {which[-1]}"


def brief(error: object) -> str:
    """The first line of what torch says; its C++ stack follows."""
    return str(error).strip().split("\n")[0].rstrip(".")
