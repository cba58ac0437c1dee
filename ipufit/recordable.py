"""Modules that no program can be recorded of, told at once."""

from __future__ import annotations

import torch
from torch import nn

from ipufit.errors import ConfigurationError

__all__ = ["refuse_unrecordable"]


def refuse_unrecordable(module: nn.Module) -> None:
    """Look through the module and all its parts.

    Raises:
        ConfigurationError: a part is compiled already, or a parameter has no shape or no data yet.
    """
    for name, part in module.named_modules():
        where = f"its part {name!r}" if name else "it"
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"the module must be plain Python to be recorded, but {where} is a TorchScript "
                f"module ({type(part).__name__}). Pass the module that it was scripted from."
            )
        if type(part).__name__ == "OptimizedModule":
            raise ConfigurationError(
                f"the module must be plain Python to be recorded, but {where} went through "
                "torch.compile. Pass the module itself: ipufit records the whole training step."
            )
        for parameter_name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ConfigurationError(
                    f"every parameter must have a shape, but {parameter_name!r} of "
                    f"{type(part).__name__} gets its own at the first forward. Call the module "
                    "once on an example before ipufit.Model(module)."
                )
            if parameter.is_meta:
                raise ConfigurationError(
                    f"every parameter must have data, but {parameter_name!r} of "
                    f"{type(part).__name__} is on the device meta. Use "
                    "module.to_empty(device=...) and load weights first."
                )
