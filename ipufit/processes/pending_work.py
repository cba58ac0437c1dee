"""Collectives under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List, Tuple

from torch import Tensor

if TYPE_CHECKING:
    from ipufit.processes.connection import Link

__all__ = ["TORCH_ERRORS", "Works"]

# What torch.distributed raises has no class of its own; on torch 2.0 a limit is a TimeoutError.
TORCH_ERRORS = (RuntimeError, ValueError, OSError)


class Works:
    """Some that were started and not waited for yet.

    Args:
        link: connected.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._started: List[Tuple[Any, bool]] = []

    def start(self, collective: Callable[..., Any], *arguments: Any, like: Tensor) -> None:
        """Begin one of torch.distributed.

        Args:
            collective: takes the arguments, a group and ``async_op``.
            arguments: tensors among them stay as they are until it is done.
            like: on the device of the tensors.
        Raises:
            ProcessError: another process failed or has gone.
        """
        is_on_host = like.device.type == "cpu"
        group = self._link.group if is_on_host else None
        try:
            work = collective(*arguments, group=group, async_op=True)
        except TORCH_ERRORS as error:
            # The others have begun it, perhaps, and are not to wait.
            self._link.fail(True, str(error), error)
        self._started.append((work, is_on_host))
        self._link.pending += 1

    def wait(self) -> None:
        """Until all are done.

        Raises:
            ProcessError: another process failed, has gone or did not come.
        """
        started, self._started = self._started, []
        self._link.wait(started)
        self._link.pending -= len(started)
