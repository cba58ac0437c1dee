"""The IPU engine: programs through PopTorch, the SDK's or the stand-in, and what it refuses."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

import torch
from torch import nn

from ipufit.core.batch import Mode
from ipufit.core.compile_arguments import role_of
from ipufit.core.plan import Plan
from ipufit.core.precision import autocast_state
from ipufit.core.train_config import TrainConfig
from ipufit.engines.ipu.inference import IpuContext, PoptorchInferenceProgram
from ipufit.engines.ipu.ipu_config import IPUConfig
from ipufit.engines.ipu.ipu_config.settings import engine_options
from ipufit.engines.ipu.optimizers import check_optimizer
from ipufit.engines.ipu.options import check_options
from ipufit.engines.ipu.preflight.facts import refused_arguments
from ipufit.engines.ipu.sdk import ignored_options
from ipufit.engines.ipu.training import PoptorchTrainingProgram
from ipufit.engines.program import Program, ProgramSpec
from ipufit.errors import ConfigurationError, PlanError
from ipufit.losses import Loss, TurnLoss
from ipufit.planner.divided_module import DividedModule
from ipufit.utils.error_collector import ErrorCollector

# The most that PopTorch lets one process have: assertSingleInstanceMaxNumIPUs in
# popart_compiler/source/CompilerImpl.cpp of PopTorch 3.4.
_MOST_IPUS = 64


class IpuEngine(IpuContext):
    """Builds programs for one compiled model.

    Attributes:
        takes_options: whether the options of ``poptorch=`` mean something.
    """

    takes_options = True

    def check(self, divided: DividedModule, options: Mapping[str, object]) -> None:
        """Refuse at ``compile`` what an IPU can't do.

        Args:
            divided: module, optimizer, loss and config as ``compile`` resolved them.
            options: by the argument's name.

        Raises:
            ConfigurationError: names the argument; several faults are one error.
        """
        for role, role_options in options.items():
            check_options(self.sdk, role_options, role)
        loss, config = divided.loss, divided.config
        faults = ErrorCollector()
        for name, fact in refused_arguments(config):
            with faults.collect():
                raise ConfigurationError(
                    f"an IPU can't run {name}: {fact.says}. {fact.cure}, or use engine='embedded'."
                )
        with faults.collect():
            if loss.turns or (isinstance(loss, TurnLoss) and len(loss.moves) > 1):
                raise ConfigurationError(
                    "an IPU makes each update from one loss that trains all parameters, but "
                    "TrainStep has several losses, each with its own parameters. Use "
                    "engine='embedded', or add them up into one loss."
                )
        with faults.collect():
            if divided.optimizer is not None:
                check_optimizer(divided.optimizer, config)
        with faults.collect():
            _check_tensors(divided.module, loss, self.wide)
        faults.raise_all()

    def options_of(self, config: IPUConfig) -> Dict[str, Any]:
        """Options that a configuration asks for, by the argument of ``compile``."""
        return {
            "training_options": engine_options(self.sdk, config, False),
            "inference_options": engine_options(self.sdk, config, True),
        }

    def build(self, spec: ProgramSpec) -> Program:
        """A program for the spec; it is compiled when the first micro-batch of a shape comes."""
        check_options(self.sdk, spec.options, role_of(spec.mode))
        _check_autocast()
        _check_ipus(spec.plan)
        if spec.mode is Mode.TRAIN:
            # Again, since the module may have changed after compile.
            _check_tensors(spec.module, spec.loss, self.wide)
            return PoptorchTrainingProgram(self, spec)
        return PoptorchInferenceProgram(self, spec)

    def explain(self, config: TrainConfig, options: Mapping[str, object]) -> List[str]:
        """Describe in sentences how training runs on this engine.

        Args:
            config: how an update is made.
            options: as for :meth:`check`.
        """
        lines = []
        schedule = config.schedule
        if schedule is not None and schedule.per_update:
            lines.append(
                f"{schedule.name} changes settings with every update, but a device takes them only "
                "between calls: each call makes one update."
            )
        elif schedule is not None:
            lines.append(f"{schedule.name} changes settings between epochs: no call is split.")
        shapes = [] if self.recordings is None else self.recordings.explain("compiled")
        lines += [f"{each} {_ONE_SHAPE}" for each in shapes]
        if config.outputs.mode != "all":
            lines.append(
                f"outputs={config.outputs.mode!r} takes effect on the host: the device returns all "
                "outputs, because it returns the loss of every micro-batch."
            )
        for role, role_options in options.items():
            names = ignored_options(self.sdk, role_options)
            if names:
                lines.append(f"Of {role}, these have no effect on {self.name}: {', '.join(names)}.")
        return lines


_ONE_SHAPE = (
    "If an update has several micro-batches, they wait for others of their shape, and an epoch "
    "ends with a smaller update for each shape that is left: samples come in another order than in "
    "the loader, but the same for any device_iterations."
)


def _check_ipus(plan: Plan) -> None:
    """Make sure that a process can have so many IPUs.

    Raises:
        PlanError: it can't.
    """
    if plan.reserved_ipus > _MOST_IPUS:
        processes = plan.processes * plan.reserved_ipus // _MOST_IPUS
        raise PlanError(
            [
                f"`ipus` of one process must be at most {_MOST_IPUS}, the limit of PopTorch, got "
                f"{plan.ipus}. Try ipus={_MOST_IPUS} in {processes} processes, which torchrun, "
                "mpirun or PopRun starts."
            ],
            {"ipus": _MOST_IPUS},
        )


def _check_autocast() -> None:
    """Make sure that no autocast of the user's is on while something is compiled.

    Raises:
        ConfigurationError: one is.
    """
    if autocast_state(torch.device("cpu"))[0]:
        raise ConfigurationError(
            "an IPU can't run under torch.autocast: PopTorch has no autocast. Leave it out, "
            "convert the module with module.half(), or use engine='embedded'."
        )


def _check_tensors(module: nn.Module, loss: Optional[Loss], wide: bool) -> None:
    modules = [module] if loss is None or loss.module is None else [module, loss.module]
    for part in modules:
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            if tensor.device.type != "cpu":
                raise ConfigurationError(
                    "a module for an IPU must be on the CPU, because PopTorch copies it from "
                    f"there, but {name!r} is on {tensor.device}. Move it with module.cpu()."
                )
            if tensor.dtype in (torch.float64, torch.bfloat16) and not wide:
                raise ConfigurationError(
                    "an IPU computes in float16 and float32, but "
                    f"{name!r} is {str(tensor.dtype).replace('torch.', '')}. Convert the module "
                    "with module.float(), or use engine='embedded'."
                )
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigurationError(
                f"an IPU runs no hooks on gradients, but {name!r} has one. Remove it, or use "
                "engine='embedded'."
            )
