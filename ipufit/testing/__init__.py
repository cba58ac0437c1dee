"""For tests and for engines to come: an engine that only remembers, one to copy, and faults.

>>> import torch
>>> import ipufit
>>> engine = RecordingEngine()
>>> model = ipufit.Model(torch.nn.Linear(1, 1), engine=lambda: engine)
>>> model.compile("sgd", "mse")
>>> x = torch.arange(10.0).unsqueeze(1)
>>> batches = [(part, part) for part in x.split(2)]
>>> history = model.fit(batches, device_iterations=2, verbose=0)
>>> program = engine.programs[0]
>>> [execution.samples for execution in program.executions], program.updates
([4, 4, 2], 5)
"""

from ipufit.testing.eager_engine import EagerEngine
from ipufit.testing.recording_engine import RecordingEngine, RecordingProgram
from ipufit.utils.fault_injection import Fault, inject

__all__ = ["EagerEngine", "Fault", "RecordingEngine", "RecordingProgram", "inject"]
