"""Derive the options of a model from those that the user passes."""

from __future__ import annotations

from typing import Optional

from ipufit.poptorch import enums
from ipufit.poptorch._errors import error
from ipufit.poptorch._options.options import Options
from ipufit.poptorch._options.strategies import PipelinedExecution, ShardedExecution

__all__ = ["model_options"]


def model_options(options: Optional[Options], training: bool) -> Options:
    """Return a model's own copy of options, and freeze the original.

    The output mode is picked where it is still the default, for anchored tensors too.

    Raises:
        Error: not ``Options``, or gradient accumulation for inference.
    """
    if options is None:
        copied = Options()
    elif isinstance(options, Options):
        options._freeze()
        copied = options.clone()
    else:
        raise error(
            f"options must be poptorch.Options, got {type(options).__name__}. Leave them out for "
            "the defaults."
        )
    if copied.defaultOutputMode():
        # Training is watched by its last loss; inference is after every result.
        copied.outputMode(enums.OutputMode.Final if training else enums.OutputMode.All)
    if not training and copied.Training.gradient_accumulation != 1:
        raise error(_accumulation_in_inference(copied))
    for anchor in copied.anchored_tensors.values():
        _, follows_outputs, _, _ = anchor
        if follows_outputs:
            anchor[2:] = [enums.OutputMode(copied.output_mode), copied.output_return_period]
    return copied


def _accumulation_in_inference(options: Options) -> str:
    text = (
        "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its "
        "default value (1) when running a poptorch.inferenceModel()."
    )
    strategy = options._execution_strategy
    if isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution):
        text += (
            " Use poptorch.Options().deviceIterations to process a sufficient number of batches "
            "each run for pipelined execution instead."
        )
    return f"{text} Got {options.Training.gradient_accumulation}."
