"""The words that every room uses: batch plans, micro-batches, configurations of an update, outputs.

Values and their checks, without data pipelines, programs or training. A new word here needs a row
in docs/glossary.md.

What arguments of several calls may be has a name here: editors complete these words, type checkers
refuse others, and the checks at run time take them from the same types.
"""

from typing import Literal, Tuple, Union, get_args

from ipufit.utils.console import VerboseLevel

ConfigOutputMode = Literal["all", "sum", "final", "default"]  # IPUConfig's
Direction = Literal["auto", "min", "max"]
DynamicScale = Literal["dynamic"]
EngineName = Literal["auto", "embedded", "ipu", "ipu-standin"]
GradientReduction = Literal["mean", "sum"]
Interval = Literal["update", "epoch"]
Jit = Literal["auto", "graph", "kernels", "inductor", "cudagraph"]
Mention = Literal[0, 1]  # whether a callback says what it did
Normalize = Literal["samples", "tokens", "micro_batches"]
OutputMode = Literal["all", "final", "sum", "every_n"]
PipelineSchedule = Literal["grouped", "interleaved", "sequential"]
PodType = Literal["pod4", "pod8", "pod16", "pod32", "pod64", "pod128", "pod256"]
PrecisionName = Literal[
    "mixed_float16",
    "mixed_bfloat16",
    "16-mixed",
    "bf16-mixed",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "16-true",
    "bf16-true",
    "32-true",
    "64-true",
]
Reference = Literal["eager", "float64"]
SampleWeightReduction = Literal["sum_over_batch_size", "mean_with_sample_weight"]
Shard = Literal["none", "optimizer", "weights"]
Verbose = Union[bool, VerboseLevel, Literal["auto"]]

CONFIG_OUTPUT_MODES: Tuple[ConfigOutputMode, ...] = get_args(ConfigOutputMode)
PODS: Tuple[PodType, ...] = get_args(PodType)
LOWERINGS: Tuple[str, ...] = get_args(Jit)
