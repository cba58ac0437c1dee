"""Functions that wrap a module, or load one from a file, as a model of the device."""

from __future__ import annotations

import copy
from typing import Callable, Optional, Union

import torch
from torch import nn

from ipufit.poptorch._executor import PoplarExecutor
from ipufit.poptorch._files import Path
from ipufit.poptorch._saving import read
from ipufit.poptorch._version import __version__
from ipufit.poptorch._wrapping import check_not_wrapped
from ipufit.poptorch.options import Options

__all__ = ["inferenceModel", "load", "trainingModel"]


def trainingModel(
    model: Union[nn.Module, PoplarExecutor],
    options: Optional[Options] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> PoplarExecutor:
    """Wrap a module whose forward returns a loss, for training.

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
    module = model._user_model if isinstance(model, PoplarExecutor) else model
    check_not_wrapped(module)
    return PoplarExecutor(copy.copy(module), options, True, __version__, optimizer, module)


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
    module = model._user_model if isinstance(model, PoplarExecutor) else model
    called = copy.copy(module) if isinstance(module, nn.Module) else module
    return PoplarExecutor(called, options, False, __version__)


def load(
    filename: Path, edit_opts_fn: Optional[Callable[[Options], None]] = None
) -> PoplarExecutor:
    """Load the compiled model of a file that ``compileAndExport`` or ``save`` has written.

    It goes on as the saved one would have: with its weights, and, if they were saved, the state of
    its optimizer and of its random numbers. The class of the module must be imported, or the
    module can't be called outside of the program. Nothing in the file is run.

    Args:
        filename: the file.
        edit_opts_fn: changes the options, which are those that were saved: the environment does
            not count. What a program is compiled for must stay.

    Raises:
        AssertionError: the file was saved with ``export_model=False``.
        Error: it is no such file, of another version, or damaged; or the options were changed in
            what the program is compiled for.
    """
    saved = read(filename, __version__)
    if saved.model is None:
        name = "trainingModel" if saved.recorded.trace.training else "inferenceModel"
        raise AssertionError(
            f"{filename} is a valid PopTorch file but was created with 'export_model=False'. Wrap "
            f"the module with poptorch.{name}, then call loadExecutable({str(filename)!r}) on that."
        )
    options = saved.options.clone()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    if saved.recorded.trace.training:
        executor = trainingModel(saved.model, options, saved.optimizer)
    else:
        executor = inferenceModel(saved.model, options)
    executor._groupings.update(saved.groupings)
    executor._install(saved, filename)
    return executor
