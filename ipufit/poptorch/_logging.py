"""The logger of the front end."""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("poptorch::python")
