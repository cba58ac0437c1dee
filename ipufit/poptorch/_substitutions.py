"""What stands in for something else while a model is being recorded."""

from __future__ import annotations

from typing import Any, ClassVar, List, Type

__all__ = ["_OverwriteContextManager"]


class _OverwriteContextManager:
    """Makes one of each registered substitution as a recording begins, and undoes it at its end.

    A substitution is a class whose objects have a method ``restore``.
    """

    _subsitution_manager_types: ClassVar[List[Type[Any]]] = []

    def __init__(self) -> None:
        self.substitution_managers: List[Any] = []

    def __enter__(self) -> _OverwriteContextManager:
        self.substitution_managers = [kind() for kind in self._subsitution_manager_types]
        return self

    def __exit__(self, exc_type: Any, value: Any, traceback: Any) -> None:
        for manager in reversed(self.substitution_managers):
            manager.restore()

    @classmethod
    def registerSubsitutionManager(cls, type: Type[Any]) -> None:
        """Have one of this class made for every recording.

        Args:
            type: called without arguments; its objects have a method ``restore``.
        """
        if type not in cls._subsitution_manager_types:
            cls._subsitution_manager_types.append(type)
