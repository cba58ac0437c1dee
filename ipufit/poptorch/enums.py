"""PopTorch's enums. Their names and values are part of its interface."""

from __future__ import annotations

import enum

__all__ = [
    "AutoStage",
    "CommGroupType",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "OutputMode",
    "OverlapMode",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
    "VariableRetrievalMode",
]


class MeanReductionStrategy(enum.IntEnum):
    """When a gradient that is a mean is divided: at every addition, or once at the end.

    ``PostAndLoss`` is refused by ``compile``, as on an IPU, whose compiler has no third strategy.
    """

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(enum.IntEnum):
    """Where the batches of a ``DataLoader`` are put together.

    ``Sync``: when they are asked for. ``Async``: ahead, in a process of their own.
    ``AsyncRebatched``: the workers load small batches, and the process makes combined batches of
    them, so that an iterable dataset loses fewer of its last elements.
    """

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """How the process of an ``AsynchronousDataAccessor`` is started and gets its dataset."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OutputMode(enum.IntEnum):
    """Which of a run's outputs come back to the host.

    ``All``: of every micro-batch. ``EveryN``: of every N-th device iteration. ``Final``: of the
    last micro-batch of each replica. ``Sum``: their sum, for each replica. ``Default``: ``All``
    for inference, ``Final`` for training.
    """

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ConnectionType(enum.IntEnum):
    """When a model takes its device: on compiling, on its first run, or never."""

    Always = 0
    OnDemand = 1
    Never = 2


class HalfFloatCastingBehavior(enum.IntEnum):
    """Values of an option that PopTorch has withdrawn: operators promote as in torch."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class ReductionType(enum.IntEnum):
    """How several values become one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class SyncPattern(enum.IntEnum):
    """Which IPUs wait for each other. Nothing waits on this engine."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class MatMulSerializationMode(enum.Enum):
    """The dimension along which ``serializedMatMul`` is cut; its value does not depend on it."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class Liveness(enum.IntEnum):
    """When tensors leave the chip in phased execution."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class OverlapMode(enum.Enum):
    """Loops with which the transfer of an input or output may overlap."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class AutoStage(enum.IntEnum):
    """The stage of a block that no strategy names: its IPU's number, or the next free number."""

    SameAsIpu = 0
    AutoIncrement = 1


class MultiConvPlanType(enum.IntEnum):
    """How the convolutions of a ``MultiConv`` run; their values do not depend on it."""

    Parallel = 0
    Serial = 1


class CommGroupType(enum.IntEnum):
    """Which replicas share a value.

    With R replicas in groups of size s: ``All``: one group. ``Consecutive``: replica r is of group
    r // s. ``Orthogonal``: of group r mod (R / s). ``NoGrouping``: each replica for itself.
    """

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.IntEnum):
    """Values that come back of a weight which replicas share in groups.

    ``OnePerGroup``: the value of each group's first replica. ``AllReplicas``: every replica's.
    """

    OnePerGroup = 0
    AllReplicas = 2
