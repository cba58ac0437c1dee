"""A model from a file of weights."""

from __future__ import annotations

import os
from typing import Callable, Union

import torch
from torch import nn

from ipufit.engines.program import Engine
from ipufit.training.model import Model

__all__ = ["load"]


def load(
    path: Union[str, os.PathLike[str]],
    module: nn.Module,
    engine: Union[str, Callable[[], Engine]] = "auto",
    device: Union[str, torch.device, None] = None,
) -> Model:
    """A model of the module, with the weights of a file.

    A torch module is code, which no file should bring along; so it is made by whoever loads it.

    Args:
        path: of a file of :meth:`ipufit.Model.save` or ``save_weights``, of any safetensors file
            with these names, or of one that ``torch.save(module.state_dict(), path)`` wrote.
        module: like the one that was saved; its weights become those of the file.
        engine: as for :class:`ipufit.Model`.
        device: as for :class:`ipufit.Model`.

    Raises:
        ConfigurationError: the file can't be read, or does not fit the module, which is as before.
    """
    model = Model(module, engine, device)
    model.load_weights(path)
    return model
