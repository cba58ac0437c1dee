"""Chooses whether executions are captured, by what ``jit`` asks for and what is there."""

from __future__ import annotations

from typing import Callable, Optional

import torch
from torch import nn

from ipufit.core.compile_arguments import AUTO, CUDAGRAPH
from ipufit.core.train_config import TrainConfig
from ipufit.engines.embedded.cuda_graphs.capture import CudaGraphs, GraphMaker, why_no_graphs
from ipufit.errors import ConfigurationError

__all__ = ["check_cudagraph", "graph_maker"]


def check_cudagraph(module: nn.Module) -> None:
    """Make sure that CUDA graphs can be captured of this module's work.

    Raises:
        ConfigurationError: it is not on a GPU, or torch is too old.
    """
    for parameter in module.parameters():
        if parameter.device.type != "cuda":
            raise ConfigurationError(
                f"jit='cudagraph' needs a module on a CUDA device, but {type(module).__name__} is "
                f"on {parameter.device}. Move it with module.cuda(), or use jit='auto'."
            )
    why_not = why_no_graphs()
    if why_not is not None:
        raise ConfigurationError(
            f"jit='cudagraph' can't work here: {why_not}. Use jit='auto', or a newer torch."
        )


def graph_maker(
    config: TrainConfig, device: torch.device, tape: Optional[Callable[[torch.device], GraphMaker]]
) -> Optional[GraphMaker]:
    """Choose what captures the executions of a program; None where they run as recorded."""
    if config.jit not in (AUTO, CUDAGRAPH):
        return None
    if tape is not None:
        return tape(device)
    # No GPU has run them yet, so nobody gets them unasked.
    if config.jit == AUTO or device.type != "cuda" or why_no_graphs() is not None:
        return None
    return CudaGraphs(device)
