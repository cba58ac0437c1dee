"""The IPU engine: programs through PopTorch, the SDK's or the stand-in."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

import torch
from torch import nn

from ipufit.core.batch import Mode
from ipufit.core.compile_arguments import role_of
from ipufit.core.train_config import TrainConfig
from ipufit.engines.ipu.context import IpuContext
from ipufit.engines.ipu.inference import PoptorchInferenceProgram
from ipufit.engines.ipu.ipu_config import IPUConfig
from ipufit.engines.ipu.ipu_config.settings import engine_options
from ipufit.engines.ipu.limits import check_autocast, check_ipus, check_request
from ipufit.engines.ipu.options import check_options
from ipufit.engines.ipu.sdk import ignored_options
from ipufit.engines.ipu.training import PoptorchTrainingProgram
from ipufit.engines.program import Engine, Program, ProgramSpec
from ipufit.losses import Loss
from ipufit.partition.partition import Partitions

__all__ = ["IpuEngine"]


class IpuEngine(IpuContext, Engine):
    """Builds programs for one compiled model.

    Attributes:
        takes_options: whether the options of ``poptorch=`` mean something.
    """

    takes_options = True

    def check(
        self,
        module: nn.Module,
        optimizer: Optional[torch.optim.Optimizer],
        loss: Loss,
        config: TrainConfig,
        options: Mapping[str, object],
        partitions: Partitions,
    ) -> None:
        """Refuse at ``compile`` what an IPU can't do.

        Args:
            module, optimizer, loss, config: as ``compile`` resolved them.
            options: by the argument's name.
            partitions: of the module over IPUs.

        Raises:
            ConfigurationError: naming it; several faults as one error.
        """
        for role, role_options in options.items():
            check_options(self.sdk, role_options, role)
        check_request(module, optimizer, loss, config, self.wide)

    def options_of(self, config: IPUConfig) -> Dict[str, Any]:
        """Options that a configuration asks for, by the argument of ``compile``."""
        return {
            "training_options": engine_options(self.sdk, config, False),
            "inference_options": engine_options(self.sdk, config, True),
        }

    def build(self, spec: ProgramSpec) -> Program:
        """A program for the spec; it is compiled when the first micro-batch of a shape comes."""
        check_options(self.sdk, spec.options, role_of(spec.mode))
        check_autocast()
        check_ipus(spec.plan)
        if spec.mode is Mode.TRAIN:
            return PoptorchTrainingProgram(self, spec)
        return PoptorchInferenceProgram(self, spec)

    def explain(self, config: TrainConfig, options: Mapping[str, object]) -> List[str]:
        """Describe what is particular about how training runs, in sentences.

        Args:
            config: how an update is made.
            options: as for :meth:`check`.
        """
        lines = []
        schedule = config.schedule
        if schedule is not None and schedule.per_update:
            lines.append(
                f"{schedule.name} changes settings with every update, and a device takes them "
                "between calls only: every update is a call of its own."
            )
        elif schedule is not None:
            lines.append(f"{schedule.name} changes settings between epochs: no call is split.")
        if config.outputs.mode != "all":
            lines.append(
                f"outputs={config.outputs.mode!r} chooses on the host: the device "
                "hands back all outputs, because losses come back from every micro-batch."
            )
        for role, role_options in options.items():
            names = ignored_options(self.sdk, role_options)
            if names:
                lines.append(f"Of {role}, these change nothing on {self.name}: {', '.join(names)}.")
        return lines
