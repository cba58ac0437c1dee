"""The warnings of a run, while they are shown as ever."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Dict, Iterator, List, Optional, TextIO, Tuple, Type, Union

__all__ = ["Heard"]

# Of a run that warns without end, the kinds of warnings that are kept.
_MOST = 200


class Heard:
    """Counts what Python warns of."""

    def __init__(self) -> None:
        self._counts: Dict[Tuple[str, str, str], int] = {}
        self.left_out = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the warnings that are shown in the block."""
        shown = warnings.showwarning

        def show(
            message: Union[Warning, str],
            category: Type[Warning],
            filename: str,
            lineno: int,
            file: Optional[TextIO] = None,
            line: Optional[str] = None,
        ) -> None:
            self._hear(str(message), category.__name__, f"{filename}:{lineno}")
            shown(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        try:
            yield
        finally:
            # Whoever has put another one in its place keeps it.
            if warnings.showwarning is show:
                warnings.showwarning = shown

    def _hear(self, text: str, category: str, place: str) -> None:
        key = (text, category, place)
        if key not in self._counts and len(self._counts) >= _MOST:
            self.left_out += 1
            return
        self._counts[key] = self._counts.get(key, 0) + 1

    def told(self) -> List[Dict[str, Any]]:
        """As the report has them."""
        found: List[Dict[str, Any]] = [
            {
                "kind": "warning",
                "text": text,
                "cure": "",
                "category": category,
                "place": place,
                "count": count,
            }
            for (text, category, place), count in self._counts.items()
        ]
        if self.left_out:
            text = f"{self.left_out} more warnings, of other texts, are not kept."
            found.append(_plain(text))
        return found


def _plain(text: str) -> Dict[str, Any]:
    return {"kind": "warning", "text": text, "cure": "", "category": "", "place": "", "count": 1}
