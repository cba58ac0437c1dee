"""View and pickle an object as its original class while its class is exchanged for a subclass."""

from __future__ import annotations

import contextlib
import copyreg
import functools
from typing import Any, Iterator, Tuple, Type, Union

__all__ = ["as_plain", "reduced_as_plain"]


@contextlib.contextmanager
def as_plain(value: object, plain: Type[Any]) -> Iterator[None]:
    """Give an object its original class back inside the block.

    Args:
        value: the object, whose class was exchanged.
        plain: its original class.
    """
    exchanged = type(value)
    value.__class__ = plain
    try:
        yield
    finally:
        value.__class__ = exchanged


def reduced_as_plain(value: Any, plain: Type[Any], protocol: Any) -> Union[str, Tuple[Any, ...]]:
    """Return ``__reduce_ex__`` of the original class, so that unpickling gives a plain object."""
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
