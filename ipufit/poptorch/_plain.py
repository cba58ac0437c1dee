"""Objects whose class was exchanged for a subclass, and what they are without it."""

from __future__ import annotations

import contextlib
import copyreg
import functools
from typing import Any, Iterator, Tuple, Type, Union

__all__ = ["as_plain", "reduced_as_plain"]


@contextlib.contextmanager
def as_plain(value: Any, plain: Type[Any]) -> Iterator[None]:
    """Inside, the object is of its own class.

    Args:
        value: whose class was exchanged.
        plain: its own.
    """
    exchanged = type(value)
    value.__class__ = plain
    try:
        yield
    finally:
        value.__class__ = exchanged


def reduced_as_plain(value: Any, plain: Type[Any], protocol: Any) -> Union[str, Tuple[Any, ...]]:
    """What ``__reduce_ex__`` gives for the object of its own class: what is read back is plain."""
    with as_plain(value, plain):
        reduced: Union[str, Tuple[Any, ...]] = value.__reduce_ex__(protocol)
    if isinstance(reduced, str):
        return reduced
    function, args, *rest = reduced
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Pickle insists that the class under this name is the object's own.
        if args[1:]:
            function, args = functools.partial(args[0].__new__, *args), ()
        else:
            function = copyreg._reconstructor  # type: ignore[attr-defined]
            args = (args[0], object, None)
    return (function, args, *rest)
