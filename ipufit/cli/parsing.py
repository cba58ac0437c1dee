"""Parsers whose complaints are those of the command that was meant, with what to write instead."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, List, Optional, Tuple

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """Parser of one command, which refuses unknown options under its own name and usage.

    Attributes:
        advice: what else to do about an option that is not known; empty for nothing.
    """

    advice = ""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> Tuple[argparse.Namespace, List[str]]:
        """Parse as argparse does, and refuse what the parser above would complain of."""
        options, strays = super().parse_known_args(args, namespace)
        if strays:
            self.error(f"unrecognized arguments: {' '.join(strays)}. {self._instead(strays)}")
        return options, []

    def _instead(self, strays: List[str]) -> str:
        near = [self._nearest(word) for word in strays]
        hints = [f"Did you mean {name}?" for name in near if name is not None]
        if self.advice and any(word.startswith("-") for word in strays):
            hints.append(self.advice)
        return " ".join([*hints, f"{self.prog} --help lists all."])

    def _nearest(self, word: str) -> Optional[str]:
        options = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.8)
        return near[0] if near and word.startswith("--") else None
