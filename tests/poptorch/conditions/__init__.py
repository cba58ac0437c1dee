"""Everything that PopTorch refuses, in the order of what a script meets."""

from tests.poptorch.conditions import models, operating, setting, training

ROWS = [*models.ROWS, *training.ROWS, *setting.ROWS, *operating.ROWS]
