"""For tests and for engines to come: an engine that only remembers, one to copy, and faults."""

from ipufit.testing.eager_engine import EagerEngine
from ipufit.testing.recording_engine import RecordingEngine, RecordingProgram
from ipufit.utils.fault_injection import Fault, inject

__all__ = ["EagerEngine", "Fault", "RecordingEngine", "RecordingProgram", "inject"]
