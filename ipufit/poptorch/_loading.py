"""From a file back to a model."""

from __future__ import annotations

from typing import Callable, Optional

from ipufit.poptorch._executor import PoplarExecutor
from ipufit.poptorch._files import Path
from ipufit.poptorch._models import inferenceModel, trainingModel
from ipufit.poptorch._saving import read
from ipufit.poptorch._version import __version__
from ipufit.poptorch.options import Options

__all__ = ["load"]


def load(
    filename: Path, edit_opts_fn: Optional[Callable[[Options], None]] = None
) -> PoplarExecutor:
    """The model of a file that ``compileAndExport`` or ``save`` has written, compiled.

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
