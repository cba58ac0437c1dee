"""Recording of calls of metric objects in a step, which stand-ins take instead of the metrics."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Callable, Dict, Iterator, List, Mapping, NoReturn, Optional, Tuple, Union

from torch import Tensor, nn

from ipufit.core.logged_values import LogRule
from ipufit.errors import ConfigurationError
from ipufit.lightning_module.inspection import MetricObject, is_collection, is_metric, metrics_in
from ipufit.lightning_module.trainer_proxy import refuse_here, refuse_operators, replace_attributes
from ipufit.utils import tree


@dataclasses.dataclass(frozen=True)
class _TensorIndex:
    """Index of a tensor among the tensors of all calls.

    Attributes:
        index: there.
    """

    index: int


@dataclasses.dataclass(frozen=True)
class _MetricCall:
    """One call of a metric.

    Attributes:
        path: the metric's, from the LightningModule.
        structure: of positional and named arguments.
        leaves: of them, a place instead of each tensor.
    """

    path: str
    structure: tree.Structure
    leaves: Tuple[object, ...]

    def arguments(
        self, tensors: Tuple[Tensor, ...]
    ) -> Tuple[Tuple[object, ...], Dict[str, object]]:
        """Return positional and named arguments around these tensors."""
        leaves = [
            tensors[each.index] if isinstance(each, _TensorIndex) else each for each in self.leaves
        ]
        args, kwargs = tree.unflatten(leaves, self.structure)
        return args, kwargs


@dataclasses.dataclass(frozen=True)
class _BatchValue:
    """A value that a call returns, logged like any number of a step.

    Attributes:
        name: under which.
        rule: how the values of micro-batches become one.
        call: index of the call.
        key: of a collection's result; None of a metric's.
    """

    name: str
    rule: LogRule
    call: int
    key: Optional[str]


class MetricKey(str):
    """Key, among the outputs, of the tensors with which a step calls metrics.

    As a text it says all that it knows, so that two are equal where they mean the same.

    Attributes:
        calls: in order.
        values: of micro-batches, to be logged.
        epochs: metrics whose value over the epoch is logged, by name.
        resets: metrics that are logged, and forget everything at the end of an epoch.
    """

    calls: Tuple[_MetricCall, ...]
    values: Tuple[_BatchValue, ...]
    epochs: Mapping[str, str]
    resets: Tuple[str, ...]

    @staticmethod
    def of(
        calls: List[_MetricCall],
        values: List[_BatchValue],
        epochs: Dict[str, str],
        resets: List[str],
    ) -> MetricKey:
        """Make the key of these calls and values."""
        key = MetricKey(f"metrics: {calls}, {values}, {epochs}, {resets}")
        key.calls, key.values = tuple(calls), tuple(values)
        key.epochs, key.resets = dict(epochs), tuple(resets)
        return key


def find_calls(outputs: object) -> Optional[MetricKey]:
    """Return the key among the outputs of a program; None if there is none."""
    if not isinstance(outputs, Mapping):
        return None
    return next((key for key in outputs if isinstance(key, MetricKey)), None)


class MetricValue:
    """Stand-in for the result of a call of a metric: it may be logged, and nothing else.

    The host computes it after the execution, so that a step that is being recorded has none.

    Args:
        shown: the call, in messages.
        call: its index.
        key: of a collection's result; None of a metric's.
    """

    __slots__ = ("call", "key", "shown")

    def __init__(self, shown: str, call: int, key: Optional[str]) -> None:
        self.shown = shown
        self.call = call
        self.key = key

    def __repr__(self) -> str:
        return f"<the value of {self.shown}, which the host computes after the execution>"

    def _itself(self) -> MetricValue:
        return self

    detach = clone = cpu = item = _itself

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_use(self)

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: object = (), kwargs: object = None
    ) -> NoReturn:
        leaves = tree.flatten([args, kwargs])[0]
        _refuse_use(next(leaf for leaf in leaves if isinstance(leaf, MetricValue)))


def _refuse_use(self: MetricValue, *_: object) -> NoReturn:
    refuse_here(
        f"the value of {self.shown} was used, but the host updates metric objects after the "
        "execution, so they have no value in a recorded step",
        "Pass it directly to self.log. To compute with the value in the step, use tensors, such as "
        "(prediction.argmax(1) == target).float().mean().",
    )


refuse_operators(MetricValue, _refuse_use, "getitem", "iter", "len")

_CONSTANTS = (bool, int, float, str, bytes)


class MetricCalls:
    """Stands in for the metric objects of a module while one of its steps is recorded.

    Args:
        module: the LightningModule.
        step: the method's name, in messages.
        refused: why metrics can't be called in it, and what to do; None where they can.
    """

    def __init__(self, module: nn.Module, step: str, refused: Optional[str] = None) -> None:
        self._step = step
        self._refused = refused
        self._objects = dict(metrics_in(module))
        self._paths = {id(metric): path for path, metric in self._objects.items()}
        self._hidden = {p: m for p, m in _hidden(module) if id(m) not in self._paths}
        self._calls: List[_MetricCall] = []
        self._tensors: List[Tensor] = []
        # By identity and version, with the tensor itself, so that no other one gets its id.
        self._places: Dict[Tuple[int, int], Tuple[_TensorIndex, Tensor]] = {}
        self._latest: Dict[str, MetricValue] = {}
        self._values: List[_BatchValue] = []
        self._epochs: Dict[str, str] = {}
        self._resets: List[str] = []

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Record calls of metrics in the block, without changing the metrics."""
        stand_ins = [(m, self._stand_ins(path, m)) for path, m in self._objects.items()]
        stand_ins += [(m, _refusals(path)) for path, m in self._hidden.items()]
        with replace_attributes(stand_ins):
            yield

    def _stand_ins(self, path: str, metric: MetricObject) -> Dict[str, Callable[..., object]]:
        def forward(*args: object, **kwargs: object) -> Union[MetricValue, Dict[str, MetricValue]]:
            return self._called(path, metric, args, kwargs)

        def update(*args: object, **kwargs: object) -> None:
            self._add(path, args, kwargs)

        def compute() -> NoReturn:
            refuse_here(
                f"self.{path}.compute() was called inside a step, but the host updates metric "
                "objects after the execution",
                f"Write self.log(name, self.{path}) in the step, or compute it in an "
                "on_..._epoch_end.",
            )

        def reset() -> NoReturn:
            refuse_here(
                f"self.{path}.reset() was called inside a step, but the step is recorded once",
                "Logged metrics are reset at the end of the epoch. Reset others in an "
                "on_..._epoch_start or on_..._epoch_end.",
            )

        return {"forward": forward, "update": update, "compute": compute, "reset": reset}

    def _called(
        self, path: str, metric: MetricObject, args: object, kwargs: object
    ) -> Union[MetricValue, Dict[str, MetricValue]]:
        call = self._add(path, args, kwargs)
        shown = f"self.{path}(...)"
        if not is_collection(metric):
            value = self._latest[path] = MetricValue(shown, call, None)
            return value
        keys = map(str, metric.keys())
        values = {key: MetricValue(shown, call, key) for key in keys}
        for value, member in zip(values.values(), metric.values(copy_state=False)):
            self._latest[self._paths[id(member)]] = value
        return values

    def _add(self, path: str, args: object, kwargs: object) -> int:
        if self._refused is not None:
            refuse_here(f"self.{path} was called in {self._step}", self._refused)
        leaves, structure = tree.flatten((args, kwargs))
        constants = tuple(self._record_leaf(path, leaf) for leaf in leaves)
        self._calls.append(_MetricCall(path, structure, constants))
        return len(self._calls) - 1

    def _record_leaf(self, path: str, leaf: object) -> object:
        if isinstance(leaf, Tensor):
            # A copy: what the step does to it in place later on is not what the metric got.
            key = id(leaf), 0 if leaf.is_inference() else leaf._version
            if key not in self._places:
                self._places[key] = _TensorIndex(len(self._tensors)), leaf
                self._tensors.append(leaf.detach().clone())
            return self._places[key][0]
        if isinstance(leaf, _CONSTANTS):
            return leaf
        raise ConfigurationError(
            f"self.{path} must get tensors and numbers in {self._step}, got {type(leaf).__name__}. "
            "Convert it to tensors in the dataset or in collate_fn."
        )

    def log_value(self, name: str, value: MetricValue, rule: LogRule) -> None:
        """Log a value that a call returned, as a number."""
        self._values.append(_BatchValue(name, rule, value.call, value.key))

    def log_metric(
        self,
        name: str,
        metric: object,
        each: bool,
        whole: bool,
        attribute: object,
        by_trainer: bool = False,
    ) -> None:
        """Log a metric itself under the names that Lightning gives it.

        Args:
            name: as it was given.
            metric: of the module.
            each: whether the values of micro-batches are wanted.
            whole: whether that of the epoch is.
            attribute: ``metric_attribute`` of ``self.log``.
            by_trainer: whether a Trainer logs the metric itself, after every execution.

        Raises:
            ConfigurationError: it is not the module's, or there is no value to log.
        """
        path = self._paths.get(id(metric))
        if path is None or is_collection(metric):
            came = type(metric).__name__
            raise ConfigurationError(
                f"self.log({name!r}) must get a metric that is an attribute of the "
                "LightningModule, or in one of its ModuleList, ModuleDict or MetricCollection "
                f"attributes, got {came}. "
                + ("Use self.log_dict." if path is not None else "Make it one in __init__.")
            )
        if attribute is not None and attribute != path:
            raise ConfigurationError(
                f"self.log({name!r}) got the metric self.{path}, but metric_attribute is "
                f"{attribute!r}. Leave it out."
            )
        latest = self._latest.get(path)
        if each and not whole and latest is None:
            raise ConfigurationError(
                f"self.log({name!r}) would log nothing: with on_step, the default in "
                f"training_step, it logs the value of the batch, but self.{path}.update computes "
                f"none. Log it with on_step=False, on_epoch=True, or call self.{path}(...)."
            )
        if each and latest is not None:
            rule = LogRule("last", on_update=True, exact=True)
            self.log_value(f"{name}_step" if whole or by_trainer else name, latest, rule)
        if whole or by_trainer:
            for key in [name, f"{name}_epoch"] if each and not by_trainer else [name]:
                if self._epochs.setdefault(key, path) != path:
                    raise ConfigurationError(
                        f"self.log({key!r}) was called with self.{self._epochs[key]} and "
                        f"self.{path}. Choose another name for one."
                    )
        if path not in self._resets:
            self._resets.append(path)

    def result(self, result: Mapping[str, object]) -> Mapping[str, object]:
        """Return the result of the step, with the tensors of all calls.

        Raises:
            ConfigurationError: a metric is logged that nobody has called.
        """
        called = {call.path for call in self._calls}
        for path in self._resets:
            if not any(path == each or path.startswith(f"{each}.") for each in called):
                raise ConfigurationError(
                    f"{self._step} logs self.{path}, but does not call it. Write "
                    f"self.{path}.update(...) before."
                )
        if not self._calls:
            return result
        key = MetricKey.of(self._calls, self._values, self._epochs, self._resets)
        # Values of metrics, besides the loss, become texts.
        plain = tree.map_leaves(
            lambda leaf: repr(leaf) if type(leaf) is MetricValue else leaf, result
        )
        return {**plain, key: tuple(self._tensors)}


def _hidden(module: nn.Module) -> Iterator[Tuple[str, MetricObject]]:
    """Yield metrics in plain containers, where torch does not see them."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if type(value) not in (list, tuple, dict) or name.startswith("_") or is_metric(part):
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in items:
                if is_metric(each):
                    yield f"{path}.{name}[{key!r}]".lstrip("."), each


def _refusals(path: str) -> Dict[str, Callable[..., object]]:
    def refuse(*_: object, **__: object) -> NoReturn:
        refuse_here(
            f"self.{path} was called inside a step, but a metric in a list or dict is not part of "
            "the module, so it would never be updated",
            "Put it into a ModuleList, ModuleDict or MetricCollection.",
        )

    return dict.fromkeys(("forward", "update"), refuse)
