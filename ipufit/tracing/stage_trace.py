"""One forward pass through the stages of a partition, and what is checked on the way."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn

from ipufit.errors import PartitionError
from ipufit.partition.cut_layers import ipus_of
from ipufit.partition.flops import is_view
from ipufit.partition.own_blocks import OwnBlocks, UncountedError
from ipufit.partition.partition import AFTER, Partition, begun_by
from ipufit.partition.serialization import Serialized
from ipufit.tracing.flat_storage import extent, storage_id
from ipufit.tracing.interpreter import Listener, OperatorCall, watch_operators
from ipufit.utils import tree
from ipufit.utils.poptorch_sdk import sdk_in_use
from ipufit.utils.state import watch_modules


class _ParameterReads(Listener):
    """Looks at every operator of a forward pass and of the loss after it.

    PopTorch's own tracing is left alone: nothing is seen there.

    Args:
        module: the user's module.
        place: asked, for every operator, for the number of the stage or IPU that it runs on.

    Attributes:
        by_forward, by_loss: the places that read a parameter, by its name and in the order of
            their first use.
        works: places at which forward computes something.
        is_seeing: whether operators are seen.
        in_loss: whether what comes is of the loss.
    """

    def __init__(self, module: nn.Module, place: Callable[[], int]) -> None:
        self.by_forward: Dict[str, List[int]] = {}
        self.by_loss: Dict[str, List[int]] = {}
        self.works: Set[int] = set()
        sdk = sdk_in_use()
        self.is_seeing = sdk is None or getattr(sdk, "__name__", "") == "ipufit.poptorch"
        self.in_loss = False
        self._module = module
        self._place = place
        # Names of the parameters in a storage, and which elements of it they take.
        self._lie: Optional[Dict[int, List[Tuple[int, int, str]]]] = None

    @property
    def is_begun(self) -> bool:
        """True if the module was called."""
        return self._lie is not None

    def seeing(self) -> ContextManager[object]:
        """See the operators of the block."""
        return watch_operators(self) if self.is_seeing else contextlib.nullcontext()

    def begin(self) -> None:
        """The module is called: its parameters are those of this pass from now on."""
        if self._lie is None:
            self._lie = {}
            for name, parameter in self._module.named_parameters():
                key = storage_id(parameter)
                if key:
                    first, end = extent(parameter)
                    self._lie.setdefault(key, []).append((first, end, name))

    def after(self, call: OperatorCall, result: object) -> None:
        """Note where the operator ran, and which parameters it has read there."""
        if self._lie is None:
            return
        place = self._place()
        if not self.in_loss and _computes(call.operator, result):
            self.works.add(place)
        readers = self.by_loss if self.in_loss else self.by_forward
        for tensor in call.inputs:
            for name in self._names(tensor):
                places = readers.setdefault(name, [])
                if place not in places:
                    places.append(place)

    def _names(self, tensor: Tensor) -> List[str]:
        there = (self._lie or {}).get(storage_id(tensor))
        if not there:
            return []
        first, end = extent(tensor)
        return [name for start, stop, name in there if start < end and first < stop]


def _computes(operator: torch._ops.OpOverload, result: object) -> bool:
    """True if the operator makes or changes a tensor; a view of one only names it anew."""
    if not tree.tensors(result):
        return False
    if operator.namespace != "aten":
        return True
    return operator.overloadpacket not in _NAMES_ANEW and not is_view(operator)


_NAMES_ANEW = {torch.ops.aten.lift_fresh, torch.ops.aten._unsafe_view}


@dataclasses.dataclass(eq=False)
class Walk:
    """Checks a forward pass call by call, for :func:`follow_stages`."""

    partition: Partition
    module: nn.Module
    blocks: OwnBlocks
    on_begin: Callable[[int], None]

    def __post_init__(self) -> None:
        self._begins = dict(self.partition.begins)
        self._names = {id(part): name for name, part in self.module.named_modules()}
        self._stage, self._last = 0, "the start"
        self._begun: List[str] = []
        self._called: Dict[str, Set[int]] = {}
        self._reads = _ParameterReads(self.module, self._place)
        self._outside: Optional[str] = None
        self._is_training = self.module.training

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow what happens in the block."""
        with watch_modules(self._on_call, self._on_return):
            if self._begins:
                self.on_begin(0)
            with self._reads.seeing():
                yield

    def _place(self) -> int:
        ipu_of_block = self.blocks.place()
        if ipu_of_block is not None and self.blocks.is_left and not self._reads.in_loss:
            self._outside = self._outside or self.blocks.entered()[-1][0]
        return self._stage if ipu_of_block is None else ipu_of_block

    def _on_call(self, part: nn.Module, args: object) -> None:
        name = self._names.get(id(part))
        if name is None:
            return
        self._reads.begin()
        stage = self._begins.get(name)
        if stage is not None:
            self._enter(name, stage)
        if isinstance(part, Serialized) and part.parts_in(part.training).ipus:
            self._spread(name, part.parts_in(part.training).ipus)
        self._called.setdefault(name, set()).add(self._stage)

    def _on_return(self, part: nn.Module, args: object, result: object) -> None:
        self._reads.in_loss = self._reads.in_loss or part is self.module
        name = AFTER + self._names.get(id(part), "")
        if name in self._begins:
            self._enter(name, self._begins[name])

    def _enter(self, name: str, stage: int) -> None:
        again = " again" if name in self._begun else ""
        self._begun.append(name)
        if stage < self._stage:
            raise PartitionError(
                f"stages must run in the order of their numbers, but {name!r} of stage {stage} "
                f"runs{again} after {self._last!r} of stage {self._stage}. Give it stage "
                f"{self._stage} or later, or let forward call it earlier."
            )
        if stage > self._stage:
            self.on_begin(stage)
        self._stage, self._last = stage, name

    def _spread(self, name: str, ipus: Sequence[int]) -> None:
        """Enter a layer whose parts begin blocks on several IPUs by themselves."""
        if ipus[0] < self._stage:
            raise PartitionError(
                f"stages must run in the order of their numbers, but {name!r} has parts on IPU "
                f"{ipus[0]} and runs after {self._last!r} of stage {self._stage}. Split it over "
                f"IPU {self._stage} and later ones."
            )
        self._stage, self._last = ipus[-1], name
        self._reads.works.update(ipus)

    def check_end(self) -> None:
        """Look back at the whole pass."""
        left_out = self._left_out()
        if self._outside is not None:
            raise PartitionError(
                "every operator must be in a block, but forward continues after the end of block "
                f"{self._outside!r}. Put the rest into a poptorch.Block, or begin blocks with "
                "poptorch.Block.start or poptorch.BeginBlock, which don't end."
            )
        self._check_divided()
        if self._reads.is_seeing and self._reads.is_begun:
            self._check_work(left_out)
            self._check_reads()
        else:
            self._check_calls()

    def _left_out(self) -> Set[int]:
        """Stages that torch's fused layers leave out in inference, which an IPU has not."""
        missing = [name for name in self._begins if name not in self._begun]
        faulty = [
            begun_by(name, self._names.values())
            for name in missing
            if self._is_training or not self._is_in_fused(name)
        ]
        if faulty and self._is_training:
            raise PartitionError(
                f"every module that begins a stage must be called by forward, but {faulty[0]!r} "
                "was not. Name a module that is called as module(...), not one whose parameters "
                "are used from outside."
            )
        if faulty:
            raise PartitionError(
                f"every module that begins a stage must be called by forward, but {faulty[0]!r} "
                "was not called in inference, which has the same stages as training. Use "
                "Parallel.inference to divide it differently."
            )
        return {self._begins[name] for name in missing}

    def _is_in_fused(self, name: str) -> bool:
        """True if a layer around it was called that torch may compute in one piece in inference."""
        parts = begun_by(name, self._names.values()).split(".")
        around = (".".join(parts[:end]) for end in range(len(parts)))
        return any(
            isinstance(self.module.get_submodule(outer), _FUSED)
            for outer in around
            if outer in self._called
        )

    def _check_divided(self) -> None:
        """Several IPUs need something that divides the module."""
        partition = self.partition
        divided = (
            partition.begins or self.blocks.entered() or ipus_of(self.module, self._is_training)
        )
        if partition.ipus > 1 and self.blocks.can_hear_all and not divided:
            raise UncountedError(
                f"ipus_per_replica={partition.ipus} needs a divided module, but nothing divides "
                "this one, which has no own blocks. Pass stages or layers_per_ipu to compile, "
                "begin blocks with poptorch.BeginBlock, or leave ipus_per_replica out.",
                ipus=1,
                stages=1,
            )

    def _check_work(self, left_out: Set[int]) -> None:
        has_blocks = bool(self.blocks.entered())
        count = self.partition.ipus if has_blocks or not self._begins else self.partition.stages
        idle = sorted(set(range(count)) - self._reads.works - left_out)
        if not idle:
            return
        if has_blocks or not self._begins:
            raise PartitionError(
                f"every IPU of a replica must compute something, but IPU {idle[0]} of {count} has "
                "nothing to do. Number the IPUs of the blocks from 0 without gaps."
            )
        if not self._is_training:
            # What holds parts of a layer in training alone may be idle in inference.
            idle = [stage for stage in idle if not stage or stage in self._begins.values()]
        if not idle:
            return
        names = [name for name, stage in self._begins.items() if stage == idle[0]]
        where = f"which begins with {names[0]!r}" if names else "before the first name"
        when = "" if self._is_training else " in inference"
        cure = "Begin it with a module that has operators, or remove it and renumber the others."
        if not self._is_training:
            cure += " Use Parallel.inference to divide inference differently."
        raise PartitionError(
            f"every stage must compute something, but stage {idle[0]}, {where}, computes "
            f"nothing{when}. {cure}"
        )

    def _check_reads(self) -> None:
        """Each parameter is read in one stage, or on one IPU."""
        unit = "IPUs" if self.blocks.entered() else "stages"
        twins = self._twins()
        for name, places in self._reads.by_forward.items():
            read_in = self._places_of(name) or places
            apart = [place for place in read_in if self._ipu(place) != self._ipu(read_in[0])]
            if apart:
                names = twins.get(name, [name])
                owner = self._read_in(read_in[0], names, names[0])
                other = self._read_in(apart[0], names, names[-1])
                cure = self._way_back(other, read_in[0], apart[0]) if owner != other else ""
                raise _tied(owner, read_in[0], other, apart[0], unit, cure)
        for name, places in self._reads.by_loss.items():
            first = self._places_of(name) or self._reads.by_forward.get(name, places)
            if self._ipu(first[0]) != self._ipu(places[0]):
                raise PartitionError(
                    f"a parameter must be on one IPU, but {name!r} is used in {unit[:-1]} "
                    f"{first[0]} and by the loss, which is in {unit[:-1]} {places[0]}. For a "
                    "weight penalty, use weight_decay of the optimizer; otherwise move its user "
                    "into the last stage."
                )

    def _ipu(self, place: int) -> int:
        """Find the IPU of a stage; without a partition's places, its number."""
        return self.partition.places[place] if self.partition.places else place

    def _read_in(self, stage: int, names: List[str], default: str) -> str:
        """The name of a parameter by which a module has it that was called in a stage."""
        readers = (n for n in names if stage in self._called.get(n.rpartition(".")[0], ()))
        return next(readers, default)

    def _way_back(self, name: str, home: int, stage: int) -> str:
        """Say how ``stages`` lets a module go back to the IPU of a weight, if it can."""
        partition, module = self.partition, name.rpartition(".")[0]
        if not self._begins or "phased" in partition.strategy or module not in self._called:
            return ""
        begins = [other for other, number in self._begins.items() if number == stage]
        number = stage if begins == [module] else stage + 1
        if number and self._ipu(number - 1) == self._ipu(home):
            return ""
        cure = f"let {module!r} go back to IPU {self._ipu(home)} as stage {number}, with "
        cure += f"{module!r}: ({number}, {self._ipu(home)}) in stages"
        if any(later > stage for later in self._begins.values()):
            cure += " and pairs with higher numbers after it"
        return f"{cure}, "

    def _twins(self) -> Dict[str, List[str]]:
        """All names of each parameter that has several, in the order of their calls."""
        names: Dict[int, List[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return {aliases[0]: aliases for aliases in names.values() if len(aliases) > 1}

    def _places_of(self, name: str) -> Optional[List[int]]:
        """The IPUs of a parameter whose layer is cut over several, whoever reads it."""
        path, _, key = name.rpartition(".")
        owner = self.module.get_submodule(path)
        if not isinstance(owner, Serialized):
            return None
        places = owner.places(owner.training)
        return list(places[key]) if key in places else None

    def _check_calls(self) -> None:
        """Check reads of parameters by the calls of modules, where operators are not seen."""
        used: Dict[int, Tuple[int, str]] = {}
        for name, part in self.module.named_modules(remove_duplicate=False):
            for key, parameter in part._parameters.items():
                for stage in self._stages_of(name, key) if parameter is not None else ():
                    full = f"{name}.{key}" if name else key
                    before, owner = used.setdefault(id(parameter), (stage, full))
                    if self._ipu(before) != self._ipu(stage):
                        cure = self._way_back(full, before, stage)
                        raise _tied(owner, before, full, stage, cure=cure)

    def _stages_of(self, name: str, key: str) -> List[int]:
        """The stages in which a module ran, or else the nearest one around it that did."""
        places = self._places_of(f"{name}.{key}" if name else key)
        if places is not None:
            return places
        part: Optional[str] = self._names.get(id(self.module.get_submodule(name)), name)
        while part:
            if part in self._called:
                return sorted(self._called[part])
            part = part.rpartition(".")[0]
        return []


# Layers that torch computes in one piece where nothing is trained.
_FUSED = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)


def _tied(
    owner: str, before: int, other: str, stage: int, unit: str = "stages", cure: str = ""
) -> PartitionError:
    who = f"{owner!r} is used" if owner == other else f"{owner!r} and {other!r} are one parameter,"
    places = "stage" if unit == "stages" else "IPU's blocks"
    return PartitionError(
        f"a parameter must be on one IPU, but {who} {'in' if unit == 'stages' else 'on'} {unit} "
        f"{before} and {stage}. Put all its uses into one {places}, {cure}or give each its own "
        "copy: module.weight = torch.nn.Parameter(module.weight.detach().clone())."
    )
