"""From a module to a model that is compiled at its first call."""

from __future__ import annotations

import copy
from typing import Optional, Union

import torch
from torch import nn

from ipufit.poptorch._executor import PoplarExecutor
from ipufit.poptorch._version import __version__
from ipufit.poptorch._wrapping import check_not_wrapped
from ipufit.poptorch.options import Options

__all__ = ["inferenceModel", "trainingModel"]


def trainingModel(
    model: Union[nn.Module, PoplarExecutor],
    options: Optional[Options] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> PoplarExecutor:
    """Wrap a module whose forward returns a loss, to be trained.

    The module itself is wrapped too: its parameters come back from the device when they are looked
    at. ``destroy()`` undoes that.

    Args:
        model: with the loss inside; its mode (train or eval) is read when it is compiled.
        options: frozen from here on; the model goes by a copy.
        optimizer: SGD, Adam, AdamW, RMSprop of torch.optim or ``poptorch.optim``, or LAMB of the
            latter; without one, SGD with a learning rate of 0.01.

    Raises:
        AttributeError: not a module.
        RuntimeError: the module is wrapped already.
        AssertionError: another kind of optimizer.
    """
    own = model._user_model if isinstance(model, PoplarExecutor) else model
    check_not_wrapped(own)
    return PoplarExecutor(copy.copy(own), options, True, __version__, optimizer, own)


def inferenceModel(
    model: Union[nn.Module, PoplarExecutor], options: Optional[Options] = None
) -> PoplarExecutor:
    """Wrap a module to run its forward alone.

    Args:
        model: a module, or the training model whose weights are to be shared. A function is taken
            too, and refused when it is compiled.
        options: frozen from here on; the model goes by a copy.

    Raises:
        Error: gradients would be accumulated.
    """
    own = model._user_model if isinstance(model, PoplarExecutor) else model
    called = copy.copy(own) if isinstance(own, nn.Module) else own
    return PoplarExecutor(called, options, False, __version__)
