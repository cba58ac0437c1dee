"""Operators of PopTorch for models, computed in plain torch.

Those that act at run time are operators of the recorded graph. Called outside of a model
that is being compiled, each takes effect at once.
"""

from __future__ import annotations

from ipufit.poptorch import enums, poptorch_core
from ipufit.poptorch._operators.control import cond, for_loop
from ipufit.poptorch._operators.custom import CPU, attributes_lists, custom_op
from ipufit.poptorch._operators.identities import (
    identity_loss,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from ipufit.poptorch._operators.printing import ipu_print_tensor
from ipufit.poptorch._operators.scopes import (
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    MultiConv,
    NameScope,
    removeBlocks,
)
from ipufit.poptorch._operators.search import ctc_beam_search_decoder, fps, nearest
from ipufit.poptorch._operators.slices import dynamic_slice, dynamic_update
from ipufit.poptorch._parsers import ATTR_PREFIX, flattenTensorStructure, reconstructTensorStructure

__all__ = [
    "ATTR_PREFIX",
    "CPU",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "LegacyBeginBlockFn",
    "MultiConv",
    "NameScope",
    "attributes_lists",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "flattenTensorStructure",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "poptorch_core",
    "recomputationCheckpoint",
    "reconstructTensorStructure",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
