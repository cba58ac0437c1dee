"""Parsers whose complaints are those of the command that was meant, with what to write instead."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, List, Optional, Tuple

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """Of one command: refuses what it does not know itself, under its own name and usage.

    Attributes:
        advice: what else to do about an option that is not known; empty for nothing.
    """

    advice = ""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> Tuple[argparse.Namespace, List[str]]:
        """As argparse does; left to it, the parser above would complain of what is left over."""
        found, strays = super().parse_known_args(args, namespace)
        if strays:
            self.error(f"unrecognized arguments: {' '.join(strays)}. {self._instead(strays)}")
        return found, []

    def _instead(self, strays: List[str]) -> str:
        near = [self._nearest(word) for word in strays]
        told = [f"Did you mean {name}?" for name in near if name is not None]
        if self.advice and any(word.startswith("-") for word in strays):
            told.append(self.advice)
        return " ".join([*told, f"{self.prog} --help lists all."])

    def _nearest(self, word: str) -> Optional[str]:
        options = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.8)
        return near[0] if near and word.startswith("--") else None
