"""The processes of one run: which of them this is, and how they talk."""

from ipufit.processes.group import ALONE, Processes, common
from ipufit.processes.identity import current, distributed

__all__ = ["ALONE", "Processes", "common", "current", "distributed"]
