"""The exceptions of the device side, and what PopTorch's compiled half offers beside them."""

from __future__ import annotations

__all__ = ["Error", "RecoverableError", "UnrecoverableError"]


class Error(Exception):
    """Anything that compiling or running a model refuses.

    Attributes:
        type: which part of the system it comes from; ``"poptorch_py_error"`` for the front end.
        message: the text alone.
        location: where it happened, outermost last; empty for the front end.
    """

    def __init__(self, message: str = "", type: str = "poptorch_py_error", location: str = ""):
        super().__init__(f"'{type}': {message}")
        self.type = type
        self.message = message
        self.location = location


class RecoverableError(Error):
    """The system failed, and can be used again after an action.

    Attributes:
        recovery_action: ``"IPU_RESET"``, ``"LINK_RESET"``, ``"PARTITION_RESET"`` or
            ``"FULL_RESET"``.
    """

    def __init__(
        self,
        message: str = "",
        type: str = "poplar_recoverable_runtime_error",
        location: str = "",
        recovery_action: str = "",
    ):
        super().__init__(message, type, location)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """The system failed, and has to be looked at before it can be used again."""
