"""The configuration of a run: everything that determines its numbers, and what of it has changed.

A checkpoint holds it as JSON, under the names of the arguments of ``compile`` and ``fit``. A run
that goes on compares its own with it: a tree of plain values says more than a hash, because the
error can name each value as it was and as it is.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import math
import re
import sys
import types
from typing import (
    Callable,
    Collection,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch
from torch import Tensor, nn
from torch.nn.modules import activation, dropout
from torch.utils.data import DataLoader

from ipufit.callbacks.callback_list import Measurement, ObservedSession
from ipufit.checkpoint.training_state import RestoredState
from ipufit.data.batches import is_weighted
from ipufit.data.in_memory import ArrayLoader, ReadAhead, rows_in_memory
from ipufit.data.loaders import reads_as_torch
from ipufit.data.source import DataAdapter
from ipufit.errors import UnknownNameError
from ipufit.losses import Loss
from ipufit.optim.schedules import settings
from ipufit.optim.several import members_of
from ipufit.utils import tree
from ipufit.utils.console import warn_user
from ipufit.utils.state import value_at

# Place of a parameter that the module has not.
ELSEWHERE = -1
# What a run takes over as callbacks had left it, and compares with nothing.
_RESTORED = ("groups", "modes")
# Besides these, hyper-parameters of the optimizer by the names that torch has for them.
CHANGEABLE = frozenset(
    (
        *("accumulation_dtype", "activation", "callbacks", "class_weight", "clipnorm", "clipvalue"),
        *("data", "dropout", "ema_momentum", "ema_overwrite_frequency", "global_clipnorm"),
        *("gradient_reduction", "loss", "loss_scale", "loss_weights", "lr_scheduler", "metrics"),
        *("module", "normalize", "output_every", "output_mode", "precision", "requires_grad"),
        *("sample_weight", "sample_weight_reduction", "shuffle", "use_ema", "validation_data"),
    )
)
# They say how torch computes an update; or need state of the optimizer that nobody has.
_NO_NUMBERS = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))
_WITH_STATE = frozenset(("amsgrad", "centered"))
# Arguments of compile that change no number, or say so themselves.
_SAME_NUMBERS = frozenset(
    (
        *("recompute", "offload_optimizer_state", "shard_optimizer", "shard_weights"),
        *("detect_nan", "jit", "lr_scheduler", "max_recordings"),
    )
)
# PopTorch, and layers that are cut into parts, put classes of their own in place of the user's.
_IN_PLACE_OF_OTHERS = ("ipufit", "poptorch")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DIGEST = re.compile(r"3\.[0-9]+:[0-9a-f]{16}")
_DEPTH = 6
_BATCHES = 8  # of a list whose content is compared
_ROWS = 64  # of the data whose content is compared
_ELEMENTS = 1 << 16  # of a tensor whose content is compared
_LENGTH = 300  # characters of a text
_SHOWN = 80  # characters of a value
_OWNERS = 3  # modules with the same change that a line names
_MISSING = "nothing"
# What differs in one of these is another thing: the rest says nothing more.
_TITLES = ("class", "name", "function")
_OF_TORCH = ("modules", "hyperparameters")
_OWN = "ipufit"
_PYTHON = "{}.{}".format(*sys.version_info)
_KINDS = {
    **{getattr(dropout, name).__name__: "dropout" for name in dropout.__all__},
    **{getattr(activation, name).__name__: "activation" for name in activation.__all__},
}
del _KINDS["MultiheadAttention"]

Configuration = Dict[str, object]
Leaf = Tuple[Tuple[str, ...], object, object]


@dataclasses.dataclass(frozen=True)
class ConfigurationChange:
    """One value of a configuration that is not what it was.

    Attributes:
        name: under which ``resume_changes`` allows it.
        part: of what the name stands for; "" for all of it.
        of: the module or the parameter group that has it; "" where there is but one.
        was: in the checkpoint.
        now: in the run that goes on.
    """

    name: str
    part: str
    of: str
    was: object
    now: object

    @property
    def place(self) -> Tuple[str, str, str]:
        """Name of the value that changed, without what it was and is."""
        return self.name, self.part, self.of


def resolve_resume_changes(
    names: Union[str, Collection[str], None], groups: Sequence[Mapping[str, object]]
) -> FrozenSet[str]:
    """Bring the names of ``Checkpoint(resume_changes=)`` into one form.

    Args:
        names: as they came, checked by Checkpoint.
        groups: of the optimizer, whose hyper-parameters are names too.

    Raises:
        UnknownNameError: nothing with that name can change; with the nearest that can.
    """
    names = (names,) if isinstance(names, str) else names or ()
    changeable = changeable_names(groups)
    for name in sorted(names):
        if name not in changeable:
            raise UnknownNameError("name in resume_changes", name, changeable)
    return frozenset(names)


def changeable_names(groups: Sequence[Mapping[str, object]]) -> FrozenSet[str]:
    """Names that ``resume_changes`` may have, with an optimizer of these groups."""
    names = frozenset(name for group in groups for name in group)
    return CHANGEABLE | (names - _NO_NUMBERS - _WITH_STATE - {*settings.NOTES})


def configuration_name(name: str) -> str:
    """The part of a configuration that a name in ``resume_changes`` stands for."""
    if name in ("activation", "dropout", "module"):
        return "modules"
    return name if name in CHANGEABLE else "hyperparameters"


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        training: the training data.
        validation: the validation data, or None.
        updates: of every epoch, where ``steps_per_epoch`` fixes them; None if the data does.
    """

    training: DataAdapter
    validation: Optional[DataAdapter]
    updates: Optional[int]


@dataclasses.dataclass
class RunConfiguration:
    """The configuration that a run began with, as its checkpoints hold it.

    Attributes:
        begin: by the names of the arguments of ``compile`` and ``fit``.
        changes: what was changed on purpose where the run went on.
    """

    begin: Configuration = dataclasses.field(default_factory=dict)
    changes: List[Dict[str, object]] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(session: ObservedSession, data: RunData, job: Measurement) -> RunConfiguration:
        """Return the configuration of a run that begins.

        Args:
            session: what ``compile`` fixed.
            data: what ``fit`` reads.
            job: the training, with its first micro-batch, and its metrics: of those of a
                LightningModule the session would begin an epoch.
        """
        schedule, class_weights = session.config.schedule, data.training.class_weights
        arguments = session.config.describe().items()
        metrics = job.meter.metrics.fresh().by_name()
        # First the arguments of ``compile`` that were given, then those that are always there.
        begin = {
            **{name: value for name, value in arguments if name not in _SAME_NUMBERS},
            **_loss(session.loss),
            "metrics": {name: _described(each) for name, each in metrics.items()},
            "lr_scheduler": None if schedule is None else _described(schedule.configuration),
            "class_weight": None if class_weights is None else _described(class_weights.by_class),
            "sample_weight": class_weights is None and is_weighted(job.first),
            "shuffle": _order(data.training),
            "data": {**_data(data.training), "steps_per_epoch": data.updates},
            "validation_data": None if data.validation is None else _data(data.validation),
            **_mutable(session),
        }
        return RunConfiguration(begin)

    def document(self, session: ObservedSession) -> Configuration:
        """Return the part of a checkpoint that says how its run is configured, as plain JSON.

        It has the configuration at the beginning, and what callbacks have changed since then.
        """
        now = _mutable(session)
        last = {name: value for name, value in now.items() if value != self.begin.get(name)}
        return {"configuration": {"begin": self.begin, "last": last}, "changes": self.changes}

    def changes_since(self, checkpoint: RestoredState) -> List[ConfigurationChange]:
        """Return how this run's configuration differs from the one that wrote a checkpoint."""
        stored = checkpoint.document.get("configuration")
        if stored is None:
            warn_user(
                f"the checkpoint {checkpoint.name!r} comes from an older ipufit and does not say "
                "how its run was configured: ipufit can't check that loss, optimizer settings, "
                "data and module are the same, and takes the optimizer settings from the "
                "checkpoint.",
            )
            return []
        same_torch = checkpoint.document["torch"] == torch.__version__
        return _changes_between(stored["begin"], stored["last"], self.begin, same_torch)

    def adopt(self, checkpoint: RestoredState, changes: Sequence[ConfigurationChange]) -> None:
        """Go on with the configuration of a checkpoint, but for what has changed on purpose."""
        stored = checkpoint.document.get("configuration")
        names = {configuration_name(change.name) for change in changes}
        if stored is not None:
            carried = {n: value for n, value in stored["begin"].items() if n not in names}
            self.begin = {**self.begin, **carried}
        entries = [{"update": checkpoint.done, "change": line} for line in lines_of(changes)]
        self.changes = [*checkpoint.document.get("changes", []), *entries]


def _mutable(session: ObservedSession) -> Configuration:
    """Return the part of the configuration that callbacks may change while a run goes on.

    Settings of the optimizer that a schedule computes are left out.
    """
    module = session.module
    return {
        "hyperparameters": _hyperparameters(session),
        "modules": {name: _module(each) for name, each in module.named_modules()},
        "modes": {name: each.training for name, each in module.named_modules()},
        "groups": _places_in_groups(session),
        "requires_grad": {name: p.requires_grad for name, p in module.named_parameters()},
    }


def _places_in_groups(session: ObservedSession) -> Dict[str, List[List[int]]]:
    """Where the module has the parameters of each group of each optimizer."""
    places = {id(parameter): place for place, parameter in enumerate(session.module.parameters())}
    assert session.optimizer is not None
    result: Dict[str, List[List[int]]] = {}
    for name, each in members_of(session.optimizer).items():
        groups = [group["params"] for group in each.param_groups]
        result[name] = [[places.get(id(p), ELSEWHERE) for p in group] for group in groups]
    return result


def _hyperparameters(session: ObservedSession) -> List[Configuration]:
    """Return the settings of each parameter group, without those that a schedule computes."""
    optimizer, schedule = session.optimizer, session.config.schedule
    assert optimizer is not None
    result = []
    for group in settings.read(optimizer):
        if schedule is not None:
            # A scheduler of torch's keeps here what it computes the rate from.
            group["lr"] = group.get("initial_lr", group["lr"])
        left_out = {*_NO_NUMBERS, *settings.NOTES, *(() if schedule is None else schedule.names)}
        result.append({n: _described(v) for n, v in group.items() if n not in left_out})
    return result


def _loss(loss: Loss) -> Configuration:
    described = _instance(loss)
    stored = described.get("parts")
    parts = stored if isinstance(stored, list) else []
    names = ("normalize", "sample_weight_reduction", "inputs", "targets")
    settings = {name: value for name in names if (value := described.pop(name)) is not None}
    for part in parts:
        for name in names:
            part["loss"].pop(name, None)
    weights = [part.pop("weight") for part in parts]
    return {"loss": described, "loss_weights": weights or None, **settings}


def _module(module: nn.Module) -> Configuration:
    kinds = [k for k in type(module).__mro__ if not k.__module__.startswith(_IN_PLACE_OF_OTHERS)]
    attributes: Configuration = {}
    if kinds[0] is type(module):
        attributes = _attributes(module)
        if type(module).extra_repr is not nn.Module.extra_repr:
            attributes["extra_repr"] = _described(module.extra_repr())
    return {"class": kinds[0].__name__, **attributes}


def _attributes(value: object, depth: int = 0) -> Configuration:
    """Describe an object's public attributes that are plain; of one of ipufit's, all of them."""
    is_own = type(value).__module__.partition(".")[0] == _OWN
    result = {}
    for name, each in getattr(value, "__dict__", {}).items():
        if (name.startswith("_") and not is_own) or name == "training":
            continue
        if is_own or _is_plain(each):
            result[name.lstrip("_")] = _described(each, depth + 1)
    return result


def _is_plain(value: object) -> bool:
    """Say whether an attribute's value is a setting, and not a thing that the object works with."""
    if isinstance(value, (tuple, list)):
        return len(value) <= _ROWS and all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(value) <= _ROWS and all(map(_is_plain, value.values()))
    kinds = (type(None), bool, int, float, str, torch.dtype, enum.Enum)
    return isinstance(value, kinds) or (inspect.isroutine(value) and not inspect.ismethod(value))


def _described(value: object, depth: int = 0) -> object:
    """A value as plain JSON, the same in every process that makes it in the same way."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and not isinstance(value, enum.Enum):
        return int(value) if value.bit_length() <= 64 else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, str):
        return _ADDRESS.sub("", value)[:_LENGTH]
    if depth > _DEPTH or isinstance(value, (torch.dtype, torch.device, enum.Enum)):
        return str(value) if depth <= _DEPTH else type(value).__name__
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not value.is_complex()
        return _described(value.item()) if is_number else _tensor_digest([value])
    if isinstance(value, (list, tuple)):
        return [_described(each, depth + 1) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _described(each, depth + 1) for key, each in value.items()}
    return _object(value, depth)


def _object(value: object, depth: int) -> object:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, functools.partial):
        parts = {"args": value.args, "keywords": value.keywords}
        described = {name: _described(part, depth + 2) for name, part in parts.items()}
        return {"partial": _described(value.func, depth + 1), **described}
    if inspect.isroutine(value):
        return _function(value, depth)
    if isinstance(value, nn.Module):
        modules = {name: _module(each) for name, each in value.named_modules()}
        return {"modules": modules, "buffers": _described(dict(value.named_buffers()), depth + 1)}
    return _instance(value, depth)


def _instance(value: object, depth: int = 0) -> Configuration:
    """Describe an object by its class and attributes."""
    return {"class": type(value).__name__, **_attributes(value, depth)}


def _function(value: Callable[..., object], depth: int) -> object:
    """Its name, code and the plain values that the code sees; of one without code, its name."""
    function = inspect.unwrap(getattr(value, "__func__", value))
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    is_torchs = str(getattr(function, "__module__", "")).partition(".")[0] in ("torch", _OWN)
    if code is None or is_torchs or "site-packages" in code.co_filename:
        return name
    cells = [value_at(cell, "cell_contents") for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    globals_of = function.__globals__
    names = [name for name in code.co_names if _is_plain(globals_of.get(name))]
    values = {
        **{n: each for n, each in zip(code.co_freevars, cells) if _is_plain(each)},
        **{name: globals_of[name] for name in names if name in globals_of},
        "defaults": [each for each in defaults if _is_plain(each)],
    }
    return {
        "function": name,
        "code": f"{_PYTHON}:{_code(code)}",
        "values": _described(values, depth + 1),
    }


def _code(code: types.CodeType) -> str:
    """A digest of what it does; where it was written does not matter."""
    digest = hashlib.sha256(code.co_code)
    for each in (*code.co_consts, *code.co_names):
        # A set of constants has no order.
        text = _code(each) if isinstance(each, types.CodeType) else repr(each)
        digest.update((repr(sorted(text)) if isinstance(each, frozenset) else text).encode())
    return digest.hexdigest()[:16]


def _order(source: DataAdapter) -> object:
    """Who says in what order the samples come."""
    loader = source.loader
    if not (isinstance(loader, DataLoader) and reads_as_torch(loader)):
        return source.is_shuffled
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return True if source.is_shuffled else type(sampler).__name__


def _data(source: DataAdapter) -> Configuration:
    """Describe the data, as far as that needs no code of the user's."""
    loader = source.loader
    rows = rows_in_memory(loader)
    # Tensors and arrays are rows alike.
    description: Configuration = {"class": type(loader).__name__}
    if isinstance(loader, DataLoader) and reads_as_torch(loader):
        description["dataset"] = type(loader.dataset).__name__
    if rows is not None:
        description.update(_rows(rows))
    elif isinstance(loader, (list, tuple)):
        step = max(1, len(loader) // _BATCHES)
        description["content"] = _tensor_digest(tree.flatten(list(loader[::step]))[0])
    if isinstance(loader, DataLoader):
        description["collate_fn"] = _described(loader.collate_fn)
    return description


def _rows(rows: ArrayLoader) -> Configuration:
    """Form and content of some of the rows, from the first to the last."""
    count = int(rows.leaves()[0].shape[0])
    chosen = torch.linspace(0, count - 1, min(count, _ROWS), dtype=torch.float64).long()
    count = len(chosen)
    some = dataclasses.replace(rows, order=lambda: chosen, samples=count, batch_size=count)
    leaves = [leaf[0] for picked in some.picked(ReadAhead()) for leaf in picked.leaves]
    forms = [f"{str(leaf.dtype)[6:]} {[*leaf.shape[1:]]}" for leaf in leaves]
    return {"columns": forms, "content": _tensor_digest(leaves)}


def _tensor_digest(leaves: Iterable[object]) -> str:
    """A digest of tensors and arrays, of long ones their beginnings; of other things nothing."""
    digest = hashlib.sha256()
    for leaf in leaves:
        if type(leaf).__module__ == "numpy":
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, Tensor):
            flat = leaf.detach().reshape(-1)[:_ELEMENTS].cpu().contiguous()
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _changes_between(
    begin: Mapping[str, object],
    last: Mapping[str, object],
    now: Mapping[str, object],
    same_torch: bool,
) -> List[ConfigurationChange]:
    """Return how a run's configuration differs from the one in a checkpoint.

    Args:
        begin: as the run began.
        last: what was another when the checkpoint was written, since callbacks change settings; a
            second ``fit`` of the same model finds them so.
        now: of the run that goes on.
        same_torch: whether the torch is that of the checkpoint; another one may have other
            settings.
    """
    changes: List[ConfigurationChange] = []
    for name in dict.fromkeys((*now, *begin)):
        if name in _RESTORED:
            continue
        differing = [*_changes_of(name, begin.get(name), now.get(name))]
        if name in last:
            still = {c.place for c in _changes_of(name, last[name], now.get(name))}
            differing = [change for change in differing if change.place in still]
        if name in ("data", "requires_grad") or (name in _OF_TORCH and not same_torch):
            differing = [c for c in differing if _MISSING not in (c.was, c.now)]
        changes += differing
    return changes


def lines_of(changes: Iterable[ConfigurationChange]) -> List[str]:
    """A line for each change; one for all modules that have changed in the same way."""
    alike: Dict[Tuple[str, ...], List[str]] = {}
    for change in changes:
        title = f"{change.name} {change.part}".rstrip()
        alike.setdefault((title, _text(change.was), _text(change.now)), []).append(change.of)
    lines = []
    for (title, was, now), owners in alike.items():
        more = f" and {len(owners) - _OWNERS} more" if len(owners) > _OWNERS else ""
        place = f" of {', '.join(owners[:_OWNERS])}{more}" if owners[0] else ""
        lines.append(f"{title}{place}: {was} in the checkpoint, {now} now")
    return lines


def _changes_of(name: str, was: object, now: object) -> Iterator[ConfigurationChange]:
    if name == "hyperparameters":
        yield from _changed_hyperparameters(was, now)
    elif name == "modules":
        yield from _changed_modules(was, now)
    elif name == "requires_grad":
        for path, before, after in _leaves(was, now):
            yield ConfigurationChange(name, "", repr(".".join(path)), before, after)
    elif (
        name == "metrics"
        and isinstance(was, Mapping)
        and isinstance(now, Mapping)
        and [*was] != [*now]
    ):
        yield ConfigurationChange(name, "", "", [*was], [*now])
    else:
        for path, before, after in _leaves(was, now):
            yield ConfigurationChange(name, ".".join(path), "", before, after)


def _changed_hyperparameters(was: object, now: object) -> Iterator[ConfigurationChange]:
    if not (isinstance(was, list) and isinstance(now, list)) or len(was) != len(now):
        return  # said of the parameters in the groups
    for number, (before, after) in enumerate(zip(was, now)):
        for path, old, new in _leaves(before, after):
            group = f"parameter group {number}" if len(now) > 1 else ""
            name, *part = path or ("optimizer",)
            yield ConfigurationChange(name, ".".join(part), group, old, new)


def _changed_modules(was: object, now: object) -> Iterator[ConfigurationChange]:
    was, now = (modules if isinstance(modules, Mapping) else {} for modules in (was, now))
    for place in dict.fromkeys((*now, *was)):
        before, after = was.get(place, _MISSING), now.get(place, _MISSING)
        leaves = [*_leaves(before, after)]
        # It repeats the attributes.
        leaves = [leaf for leaf in leaves if leaf[0][:1] != ("extra_repr",)] or leaves
        for path, old, new in leaves:
            part = ".".join(path)
            classes = [each.get("class") for each in (before, after) if isinstance(each, Mapping)]
            values = [each["class"] if isinstance(each, Mapping) else each for each in (old, new)]
            yield ConfigurationChange(_module_change(part, classes), part, repr(place), *values)


def _module_change(part: str, classes: Iterable[object]) -> str:
    """The name under which a change of a submodule is allowed."""
    kinds = {_KINDS.get(each, "module") for each in classes if each != "Identity"}
    if "drop" in part or kinds == {"dropout"}:
        return "dropout"
    return "activation" if "activation" in part or kinds == {"activation"} else "module"


def _leaves(was: object, now: object, path: Tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Yield where two trees of JSON differ, as deep as both have the same form."""
    if was == now or _is_of_another_python(was, now):
        return
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in _TITLES:
            if was.get(key) != now.get(key):
                yield path, was.get(key, _MISSING), now.get(key, _MISSING)
                return
        for key in dict.fromkeys((*now, *was)):
            yield from _leaves(was.get(key, _MISSING), now.get(key, _MISSING), (*path, str(key)))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for place, pair in enumerate(zip(was, now)):
            yield from _leaves(*pair, (*path, str(place)))
    else:
        yield path, was, now


def _is_of_another_python(was: object, now: object) -> bool:
    """Say whether two values are digests of code by different Pythons, which can't be compared."""
    digests = [text for text in (was, now) if isinstance(text, str) and _DIGEST.fullmatch(text)]
    return len(digests) == 2 and len({digest.partition(":")[0] for digest in digests}) == 2


def _text(value: object) -> str:
    text = _MISSING if value == _MISSING else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
