"""Limits of an IPU: what is refused by name, before anything is compiled."""

from __future__ import annotations

from typing import Mapping, Optional, Sequence

import torch
from torch import Tensor, nn

from ipufit.core.plan import Plan
from ipufit.core.precision import autocast_state
from ipufit.core.train_config import TrainConfig
from ipufit.engines.embedded.flat_optimizer import refuse_step_hooks
from ipufit.engines.ipu.optimizers import check_optimizer
from ipufit.engines.ipu.preflight.facts import refused_arguments
from ipufit.errors import ConfigurationError, PlanError
from ipufit.losses import Loss
from ipufit.optim.rules import rule_for
from ipufit.tracing.validate import refuse_shared_memory
from ipufit.utils.error_collector import ErrorCollector

__all__ = ["check_autocast", "check_ipus", "check_request", "check_trained"]

# The most that PopTorch lets one process have: assertSingleInstanceMaxNumIPUs in
# popart_compiler/source/CompilerImpl.cpp of PopTorch 3.4.
_MOST_IPUS = 64


def check_request(
    module: nn.Module,
    optimizer: Optional[torch.optim.Optimizer],
    loss: Loss,
    config: TrainConfig,
    wide: bool,
) -> None:
    """Make sure that ``compile`` asks for nothing that an IPU can't do.

    Args:
        module, optimizer, loss, config: as ``compile`` resolved them.
        wide: whether float64 is kept.

    Raises:
        ConfigurationError: it does; several faults as one error.
    """
    faults = ErrorCollector()
    for name, fact in refused_arguments(config):
        with faults.collect():
            raise ConfigurationError(
                f"an IPU can't run {name}: {fact.says}. {fact.cure}, or use engine='embedded'."
            )
    with faults.collect():
        if optimizer is not None:
            check_optimizer(optimizer, config)
    with faults.collect():
        _check_tensors(module, loss, wide)
    faults.raise_all()


def check_ipus(plan: Plan) -> None:
    """Make sure that a process can have so many IPUs.

    Raises:
        PlanError: it can't.
    """
    if plan.reserved_ipus > _MOST_IPUS:
        processes = plan.processes * plan.reserved_ipus // _MOST_IPUS
        raise PlanError(
            [
                f"`ipus`, those of one process, must be at most {_MOST_IPUS}, as PopTorch gives a "
                f"process no more, got {plan.ipus}. Try ipus={_MOST_IPUS} in {processes} "
                "processes, which torchrun, mpirun or PopRun starts."
            ],
            {"ipus": _MOST_IPUS},
        )


def check_autocast() -> None:
    """Make sure that no autocast of the user's is on while something is compiled.

    Raises:
        ConfigurationError: one is.
    """
    if autocast_state(torch.device("cpu"))[0]:
        raise ConfigurationError(
            "an IPU can't run under torch.autocast: PopTorch has no autocast. Leave it out, "
            "convert the module with module.half(), or use engine='embedded'."
        )


def check_trained(
    optimizer: torch.optim.Optimizer,
    trained: Sequence[str],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> None:
    """Make sure that no program would lose what torch's own step does, here or on any engine.

    Raises:
        OptimizerError: hooks on ``step``, a graph through it, or complex parameters.
        ConfigurationError: parameters that share memory without being one.
    """
    refuse_step_hooks(optimizer)
    rule_for(optimizer)
    refuse_shared_memory(trained, parameters, buffers)


def _check_tensors(module: nn.Module, loss: Loss, wide: bool) -> None:
    modules = [module] if loss.module is None else [module, loss.module]
    for part in modules:
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            if tensor.device.type != "cpu":
                raise ConfigurationError(
                    f"a module for an IPU must be on the CPU, from where PopTorch takes it, but "
                    f"{name!r} is on {tensor.device}. Move it with module.cpu()."
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
