"""What a page may do: run its own scripts, and ask nobody for anything."""

from __future__ import annotations

import base64
import hashlib
from typing import Sequence

__all__ = ["digest", "policy"]


def digest(script: bytes) -> str:
    """A script, as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode('ascii')}'"


def policy(scripts: Sequence[str], live: bool) -> str:
    """A Content-Security-Policy.

    Args:
        scripts: digests of those that may run; no other does, whatever gets into the page.
        live: whether the page may ask where it came from how the run goes on.
    """
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(scripts),
        # plotly.js sets the look of what it draws.
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
