"""A stand-in for ``popart`` where there is no Poplar SDK: its enums, with their numbers.

PopTorch's options take these numbers. They are those of ``willow/include/popart`` of PopART 3.4.
"""

import enum

from ipufit.utils.poptorch_sdk import refuse, stands_in

stands_in(__name__, "with its enums alone")

# Each counts from 0.
_ENUMS = {
    "AccumulateOuterFragmentSchedule": "Scheduler Serial OverlapCycleOptimized "
    "OverlapMemoryOptimized",
    "BatchSerializationBatchSchedule": "Scheduler Isomorphic OverlapOnIo OverlapOnCompute",
    "BatchSerializationMethod": "UnrollDynamic UnrollStatic Loop",
    "BatchSerializationTransformContext": "Fwd Bwd",
    "ExecutionPhaseIOSchedule": "Preload OnDemand",
    "ExecutionPhaseSchedule": "Interleaving Batch BatchClusteredIO",
    "GradientTensorTrackingMethod": "AllNonViewChangingGradientTensors ConvAndMatmulGradients "
    "GradientsOfUserSpecifiedTensors",
    "Instrumentation": "Outer Inner",
    "MeanReductionStrategy": "Running Post",
    "MergeVarUpdateType": "None All AutoLoose AutoTight",
    "RecomputationType": "None Standard NormOnly Pipeline RecomputeAll",
    "ReductionType": "Sum Mean NoReduction",
    "ReplicatedTensorSharding": "Off On",
    "SubgraphCopyingStrategy": "OnEnterAndExit JustInTime",
    "SyntheticDataMode": "Off Zeros RandomNormal RandomUniform",
    "TensorStorage": "OnChip OffChip",
    "TileSet": "Compute IO Undefined",
    "VirtualGraphMode": "Off Manual Auto ExecutionPhases",
}
for _name, _members in _ENUMS.items():
    globals()[_name] = enum.IntEnum(_name, _members.split(), start=0, module=__name__)


def __getattr__(name: str) -> object:
    """Say where everything else is: PopART's compiler and its sessions.

    Raises:
        AttributeError: always.
    """
    refuse("popart", name, [*_ENUMS], " with enums alone")
