"""Parts of a batch: which go into forward, which to the loss, and which stay beside the program."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import numbers
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from torch import nn

from ipufit.core.batch import BatchParts, Mode, RawBatch
from ipufit.data.in_memory import as_tensor, is_array, is_table
from ipufit.errors import ConfigurationError, DataError, shown, unfit
from ipufit.losses.loss import InputNames, Loss, OwnLoss, TargetNames
from ipufit.utils import tree

# How alike a field that forward does not take and a parameter that gets nothing are by mistake.
_ALIKE = 0.8
_WEIGHT = "sample_weight"


class _Route(NamedTuple):
    """Where the fields of a batch with certain names go.

    Attributes:
        args: fields that forward is called with by position.
        kwargs: parameters of forward, with the field that each gets.
        target: the field that is the target, or fields that make a dict of targets.
        extras: fields that stay beside the program.
    """

    args: Sequence[str]
    kwargs: Mapping[str, str]
    target: TargetNames
    extras: Sequence[str]


@dataclasses.dataclass(frozen=True)
class BatchForm:
    """The form in which a module and a loss take the batches of a loader.

    Attributes:
        module: whose forward gets the inputs.
        own_loss: whether the module computes its own loss, so that a batch holds only its
            arguments; "whole" where it is one argument.
        inputs: which fields of a batch forward gets, as ``compile`` takes it; None for those whose
            names it takes.
        targets: which fields are the target, as ``compile`` takes it.
        loss_fields: names that fields may have which the loss takes; None of a loss of prediction
            and target.
        loss_target: name of the field that such a loss takes as target, if it says so.
        sums_weights: whether the loss is divided by the sum of the samples' weights.
        one_target: whether the loss takes one tensor, so that a list of one target means that one.
        runs_with: tries whether forward runs with a list of tensors as its only input; None where
            that can't be tried.
    """

    module: Optional[nn.Module] = None
    own_loss: OwnLoss = False
    inputs: InputNames = None
    targets: TargetNames = None
    loss_fields: Optional[Sequence[str]] = None
    loss_target: TargetNames = None
    sums_weights: bool = False
    one_target: bool = False
    runs_with: Optional[Callable[[List[tree.Leaf]], bool]] = None
    _routes: Dict[Tuple[object, ...], _Route] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # Whether a list of inputs is one of samples, as the last one was that showed it.
    _whole: Dict[str, bool] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def name(self) -> str:
        """The class of the module, for messages."""
        return type(self.module).__name__

    @property
    def parameters(self) -> Optional[List[str]]:
        """Names that forward takes; None where it takes any, or nobody knows."""
        if self.module is None:
            return None
        try:
            parameters = inspect.signature(self.module.forward).parameters.values()
        except (TypeError, ValueError):
            return None
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def split(
        self, raw: RawBatch, mode: Mode, where: str
    ) -> Tuple[BatchParts, Mapping[str, object]]:
        """Split a batch into what forward is called with, target and weights, and what is left.

        Args:
            raw: as a loader yields it.
            mode: what the batch is for; to predict, no target is needed.
            where: the batch, for messages.

        Returns:
            The parts, and the fields that neither forward nor the loss takes, by name.

        Raises:
            DataError: it can't be split, or names that are not there.
        """
        if self.own_loss == "whole":
            texts = {}
            if isinstance(raw, Mapping):
                texts = {str(name): value for name, value in raw.items() if _is_text(value)}
                raw = {name: value for name, value in raw.items() if str(name) not in texts}
            return ((raw,), {}, None, None), texts
        if self.own_loss:
            return self._inputs(raw, where)
        if isinstance(raw, Mapping) and mode is not Mode.PREDICT:
            return self._with_target(raw, where)
        is_sequence = tree.is_sequence(raw)
        if mode is Mode.PREDICT:
            if not is_sequence:
                return self._inputs(raw, where)
            if isinstance(raw, tuple) and len(raw) == 1 and isinstance(raw[0], list):
                # Lists that a loader makes of tuples are in a list: this one is meant as it is.
                self._whole["list"] = True
            if self._takes_only_all(raw):
                return self._inputs(raw, where)
            if len(raw) in (1, 2, 3):
                if not isinstance(raw, tuple) or len(raw) > 1:
                    reading = "inputs" if len(raw) == 1 else "inputs and target"
                    cure = "Yield (inputs,) without a target, or (samples,) with the list."
                    self.refuse_samples(raw, where, reading, cure)
                return self._inputs(raw[0], where, *raw[1:2])
        came = f"{type(raw).__name__} of {len(raw)}" if is_sequence else type(raw).__name__
        if mode is Mode.PREDICT:
            raise DataError(
                f"{where}: a batch must be inputs, (inputs, target) or (inputs, target, "
                f"sample_weight), got {came}. For several inputs yield ((first, second), target) "
                "or {'name': first, ...}; for a list of images yield (images,)."
            )
        if not is_sequence or len(raw) not in (2, 3):
            raise DataError(
                f"{where}: a batch must be (inputs, target) or (inputs, target, sample_weight), "
                f"got {came}. For several inputs yield ((first, second), target), ({{'name': "
                "first, ...}, target) or one dict of all; if the module computes its own loss, use "
                "compile(loss=None)."
            )
        if raw[1] is None:
            raise DataError(
                f"{where}: the target is missing (None), but the loss needs one. Yield (inputs, "
                "target), or use compile(loss=None) if the module computes its own loss."
            )
        target = raw[1]
        (args, kwargs, _, _), extras = self._inputs(raw[0], where, target)
        if self.one_target and tree.is_sequence(target) and len(target) == 1:
            target = target[0]
        return (args, kwargs, target, raw[2] if len(raw) == 3 else None), extras

    def are_inputs(self, x: tree.Tree) -> bool:
        """Say whether forward takes the parts of a bare tuple or list of arrays as its arguments.

        A list is one of batches wherever forward can take a single one of them.
        """
        if not _are_arrays(x) or len(x) < 2:
            return False
        return self._takes_only_all(x) or (isinstance(x, tuple) and can_bind(self.module, *x))

    def refuse_samples(self, parts: tree.Tree, where: str, reading: str, cure: str) -> None:
        """Refuse arrays without a list around them that forward takes as a list of samples too.

        Args:
            parts: of a batch, or of the data; only arrays of one dtype with the three dimensions of
                an image are taken for samples.
            where: what has them, for the message.
            reading: how they are read otherwise.
            cure: what to write for each of the two.

        Raises:
            DataError: they can be samples.
        """
        if self.own_loss or self.runs_with is None or not tree.is_sequence(parts):
            return
        images = [part for part in parts if is_array(part) and part.ndim == 3]
        if len(images) != len(parts) or len({part.dtype for part in images}) != 1:
            return
        if "list" not in self._whole:
            self._whole["list"] = self.runs_with([as_tensor(part, where) for part in parts[:2]])
        if self._whole["list"]:
            n = len(parts)
            raise DataError(
                f"{where}: a {type(parts).__name__} of {n} {'tensor' if n == 1 else 'tensors'} can "
                f"be {reading}, or samples such as images, because {self.name}.forward runs with a "
                f"list too. {cure}"
            )

    def _takes_only_all(self, parts: tree.Tree) -> bool:
        """Say whether forward can be called with all of these arrays, but not with one of them."""
        is_bare = _are_arrays(parts) and len(parts) > 1 and not can_bind(self.module, parts[0])
        return is_bare and can_bind(self.module, *parts)

    def for_loss(self, raw: RawBatch, parts: BatchParts) -> BatchParts:
        """Give a loss of arguments by name what it may take, in the place of the target.

        Args:
            raw: as a loader yields it.
            parts: what :meth:`split` made of it.

        Returns:
            The parts, with the pair of targets and all other fields in the place of the target,
            both by name. Fields that the loss has no name for are None.
        """
        args, kwargs, target, weight = parts
        named: Mapping[str, object] = {"target": target}
        fields: Mapping[str, object] = raw if isinstance(raw, Mapping) else kwargs
        if isinstance(raw, Mapping):
            name = self._route(raw, True, "").target
            named = {name: target} if isinstance(name, str) else (target or {})
        elif args:
            fields = dict(zip(self.parameters or (), args))
        wanted = self.loss_fields or ()
        rest = [name for name in fields if name not in (*named, _WEIGHT)]
        more = {str(name): fields[name] if name in wanted else None for name in rest}
        return args, kwargs, (named, more), weight

    def has_target(self, batch: Mapping[str, object]) -> bool:
        """Say whether one of the fields of a batch is the target."""
        try:
            return self._with_target(batch, "")[0][2] is not None
        except DataError:
            return False

    def _inputs(
        self, raw: RawBatch, where: str, target: RawBatch = None
    ) -> Tuple[BatchParts, Mapping[str, object]]:
        """Positional and keyword arguments of forward, and what it does not take."""
        if isinstance(raw, Mapping):
            return self._by_route(raw, self._route(raw, False, where))
        is_whole = isinstance(raw, list) and not self.own_loss and self._takes_whole(raw, target)
        spreads = tree.is_sequence(raw) and not is_whole
        return (tuple(raw) if spreads else (raw,), {}, None, None), {}

    def _takes_whole(self, inputs: List[object], target: RawBatch) -> bool:
        """Say whether forward gets a list itself, such as one of images, not each of its entries.

        Where it may take both, those are samples that are as many as the targets, unless all parts
        have a row for each sample.
        """
        if not can_bind(self.module, None):
            return False
        leaves, _ = tree.flatten((inputs, target))
        rows = {leaf.shape[0] if is_array(leaf) and leaf.ndim else None for leaf in leaves}
        has_rows = len(rows) == 1 and rows != {None}
        has_size = tree.is_sequence(target) or (is_array(target) and target.ndim > 0)
        has_entries = has_size and len(target) == len(inputs)
        if has_entries and tree.is_sequence(target) and isinstance(target[0], Mapping):
            has_rows = False
        if not can_bind(self.module, *inputs):
            self._whole["list"] = True
        elif target is not None and has_entries != has_rows:
            self._whole["list"] = has_entries
        return self._whole.get("list", False)

    def _with_target(
        self, raw: Mapping[str, object], where: str
    ) -> Tuple[BatchParts, Mapping[str, object]]:
        route = self._route(raw, True, where)
        (args, kwargs, _, _), extras = self._by_route(raw, route)
        target: object = None
        if isinstance(route.target, tuple):
            target = {name: raw[name] for name in route.target}
        elif route.target is not None:
            target = raw[route.target]
        return (args, kwargs, target, raw.get(_WEIGHT)), extras

    @staticmethod
    def _by_route(
        raw: Mapping[str, object], route: _Route
    ) -> Tuple[BatchParts, Mapping[str, object]]:
        kwargs = {parameter: raw[name] for parameter, name in route.kwargs.items()}
        extras = {str(name): raw[name] for name in route.extras}
        return (tuple(raw[name] for name in route.args), kwargs, None, None), extras

    def _route(self, raw: Mapping[str, object], with_target: bool, where: str) -> _Route:
        key = (with_target, *raw)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._find_route(list(raw), with_target, where)
        return route

    def _find_route(self, names: List[str], with_target: bool, where: str) -> _Route:
        """Find out where the fields of these names go."""
        targets = (self.targets,) if isinstance(self.targets, str) else self.targets or ()
        self._refuse_missing("targets", targets if with_target else (), names, where)
        aside = set() if self.own_loss else {_WEIGHT, *targets}
        args, kwargs = self._find_inputs(names, aside, with_target, where)
        rest = [name for name in names if name not in (*args, *kwargs.values())]
        if not with_target:
            return _Route(args, kwargs, None, rest)
        target = self.targets
        if target is None:
            target = self._find_target(names, [name for name in rest if name != _WEIGHT], where)
            targets = (target,) if isinstance(target, str) else target or ()
        return _Route(args, kwargs, target, [n for n in rest if n not in (*targets, _WEIGHT)])

    def _find_inputs(
        self, names: List[str], aside: Set[str], with_target: bool, where: str
    ) -> Tuple[Sequence[str], Mapping[str, str]]:
        """Fields that forward gets by position, and by which parameter others."""
        inputs, parameters = self.inputs, self.parameters
        if inputs is not None:
            if isinstance(inputs, str):
                inputs = (inputs,)
                self._refuse_missing("inputs", inputs, names, where)
                return inputs, {}
            by_name = inputs if isinstance(inputs, Mapping) else {name: name for name in inputs}
            self._refuse_missing("inputs", list(by_name.values()), names, where)
            return (), by_name
        if parameters is None and with_target:
            raise DataError(
                f"{where}: ipufit can't tell which fields of the batch {self.name}.forward gets, "
                f"because it takes any name, got {_listed(names)}. Write for example "
                f"compile(..., inputs=[{names[0]!r}], targets={names[-1]!r})."
            )
        chosen = [
            name
            for name in names
            if name not in aside and (parameters is None or name in parameters)
        ]
        for name in names:
            idle = [p for p in parameters or () if p not in chosen]
            alike = difflib.get_close_matches(str(name), idle, 1, _ALIKE)
            if alike and name not in chosen and name not in aside:
                raise DataError(
                    f"{where}: {self.name}.forward gets nothing for {alike[0]!r}, but the batch "
                    f"has {name!r}, which it does not take. Rename the field like the parameter, "
                    f"or say what forward gets: compile(..., inputs={{{alike[0]!r}: {name!r}, "
                    "...})."
                )
        if not chosen:
            raise DataError(
                f"{where}: {self.name}.forward takes {_listed(parameters or ())}, but the fields "
                f"of the batch are {_listed(names)}. Say which ones it gets: one by position, "
                f"compile(..., inputs={names[0]!r}), or by name, inputs={{'parameter': 'field'}}."
            )
        return (), {str(name): name for name in chosen}

    def _find_target(self, names: List[str], rest: List[str], where: str) -> TargetNames:
        """The one field that forward leaves, or that a loss of arguments by name has as target."""
        if self.loss_fields is not None:
            if isinstance(self.loss_target, tuple):
                self._refuse_missing("loss", self.loss_target, rest, where)
                return self.loss_target
            if self.loss_target in rest:
                return self.loss_target
            rest = [name for name in rest if name not in self.loss_fields]
            return rest[0] if len(rest) == 1 and "target" in self.loss_fields else None
        if len(rest) == 1:
            return rest[0]
        if not rest:
            raise DataError(
                f"{where}: the loss needs a target, but {self.name}.forward takes all fields of "
                f"the batch, {_listed(names)}. Add one, name the target with compile(..., "
                f"targets={names[-1]!r}), or use compile(loss=None) if the module computes its "
                "own loss."
            )
        raise DataError(
            f"{where}: ipufit can't tell which field of the batch is the target, because "
            f"{self.name}.forward does not take {_listed(rest)}. Write compile(..., "
            f"targets={rest[-1]!r}), or a list of names for several."
        )

    def _refuse_missing(
        self, argument: str, wanted: Sequence[str], names: List[str], where: str
    ) -> None:
        for name in wanted:
            if name not in names:
                raise DataError(
                    f"{where}: the batch must have the field {name!r}, which {argument} of "
                    f"compile names, got {_listed(names)}. Use one of these names, or add the "
                    "field in the dataset or collate_fn."
                )


def can_bind(module: Optional[nn.Module], *inputs: object) -> bool:
    """Say whether forward of a module can be called with these arguments."""
    try:
        inspect.signature(module.forward).bind(*inputs)  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _are_arrays(value: tree.Tree) -> bool:
    """Tell whether a value is a tuple or list of arrays or tables."""
    return tree.is_sequence(value) and all(is_array(part) or is_table(part) for part in value)


def _is_text(value: object) -> bool:
    """Tell whether a field holds texts alone, which no program takes."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_text, value))
    return isinstance(value, (str, bytes))


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(repr, names)) or "none"


def refuse_listed(inputs: tree.Tree, target: tree.Tree, role: str, form: str) -> None:
    """Refuse a list of samples, which would be read as batches: the target of one is a number.

    Args:
        inputs, target: of the first entry of the list.
        role: what the data is for.
        form: of the entries, for the message.

    Raises:
        DataError: it is one.
    """
    is_number = isinstance(target, numbers.Number) or (is_array(target) and not target.ndim)
    if is_number and any(is_array(leaf) and leaf.ndim for leaf in tree.flatten(inputs)[0]):
        raise DataError(
            f"{role}: a list of {form} is read as batches, but the target of the first "
            f"is one number, {target}, so they look like samples. Pass DataLoader(x, "
            "batch_size=32, shuffle=True), which makes batches of them."
        )


def name_fields(loss: Loss, inputs: object, targets: object) -> Loss:
    """Let a loss know which fields of a batch go into forward, and which are the target.

    Args:
        loss: normal form.
        inputs, targets: as ``compile`` takes them.

    Raises:
        ConfigurationError: something else than names, or names that nobody would look at.
    """
    if inputs is not None and loss.in_module == "whole":
        raise ConfigurationError(
            "inputs= names the fields for forward, but steps get the whole batch except its "
            f"strings, got {shown(inputs)}. Leave it out."
        )
    if targets is not None and loss.in_module and not loss.differentiates:
        raise ConfigurationError(
            "targets= names the targets of a loss, but with loss=None the module computes its "
            f"own, got {shown(targets)}. Leave it out, or pass loss= to compile."
        )
    input_names: InputNames = _names(inputs)
    if isinstance(inputs, Mapping) and _names([*inputs, *inputs.values()]):
        input_names = dict(inputs)
    if inputs is not None and not input_names:
        needed = (
            "the name of a field of a batch, a list of names, or a dict from parameters of forward "
            "to names"
        )
        raise unfit("inputs", needed, inputs, "Write for example inputs=['image', 'mask'].")
    target_names = _names(targets)
    if targets is not None and not target_names:
        needed = "the name of a field of a batch, or a list of names for a dict of targets"
        raise unfit("targets", needed, targets, "Write for example targets='label'.")
    return dataclasses.replace(loss, inputs=input_names, targets=target_names)


def _names(value: object) -> TargetNames:
    """One name, or several; None of anything else."""
    if isinstance(value, str):
        return value or None
    if not isinstance(value, (list, tuple)):
        return None
    names = tuple(name for name in value if isinstance(name, str) and name)
    return names if len(names) == len(value) and names else None
