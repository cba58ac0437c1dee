"""Stands in for metric objects while a step is recorded, and writes down what it does with them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Tuple, Union

from torch import Tensor, nn

from ipufit.core.logged_values import LogRule
from ipufit.errors import ConfigurationError
from ipufit.lightning_module.detect import is_collection, is_metric, metrics_in
from ipufit.lightning_module.metrics.calls import Call, Calls, OfBatch, Place
from ipufit.lightning_module.metrics.values import MetricValue
from ipufit.lightning_module.patch import replaced
from ipufit.lightning_module.trainer_proxy import refuse_here
from ipufit.utils import tree

__all__ = ["MetricCalls"]

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
        self._calls: List[Call] = []
        self._tensors: List[Tensor] = []
        self._held: List[Tensor] = []
        self._places: Dict[Tuple[int, int], Place] = {}
        self._latest: Dict[str, MetricValue] = {}
        self._values: List[OfBatch] = []
        self._epochs: Dict[str, str] = {}
        self._resets: List[str] = []

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """In the block a call of a metric is written down, and the metric does not change."""
        stand_ins = [(m, self._stand_ins(path, m)) for path, m in self._objects.items()]
        stand_ins += [(m, _refusals(path)) for path, m in self._hidden.items()]
        with replaced(stand_ins):
            yield

    def _stand_ins(self, path: str, metric: Any) -> Dict[str, Callable[..., Any]]:
        def forward(*args: Any, **kwargs: Any) -> Union[MetricValue, Dict[str, MetricValue]]:
            return self._called(path, metric, args, kwargs)

        def update(*args: Any, **kwargs: Any) -> None:
            self._add(path, args, kwargs)

        def compute() -> NoReturn:
            refuse_here(
                f"self.{path}.compute() was called inside a step, but metric objects are updated "
                "by the host when the execution is over",
                f"Write self.log(name, self.{path}) in the step, or compute it in an "
                "on_..._epoch_end.",
            )

        def reset() -> NoReturn:
            refuse_here(
                f"self.{path}.reset() was called inside a step, but the step is recorded once",
                "What is logged is reset at the end of the epoch. Reset others in an "
                "on_..._epoch_start or on_..._epoch_end.",
            )

        return {"forward": forward, "update": update, "compute": compute, "reset": reset}

    def _called(
        self, path: str, metric: Any, args: Any, kwargs: Any
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

    def _add(self, path: str, args: Any, kwargs: Any) -> int:
        if self._refused is not None:
            refuse_here(f"self.{path} was called in {self._step}", self._refused)
        leaves, structure = tree.flatten((args, kwargs))
        kept = tuple(self._kept(path, leaf) for leaf in leaves)
        self._calls.append(Call(path, structure, kept))
        return len(self._calls) - 1

    def _kept(self, path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            # A copy: what the step does to it in place later on is not what the metric got.
            key = id(leaf), 0 if leaf.is_inference() else leaf._version
            if key not in self._places:
                self._places[key] = Place(len(self._tensors))
                self._tensors.append(leaf.detach().clone())
                # So that no other tensor gets its id.
                self._held.append(leaf)
            return self._places[key]
        if isinstance(leaf, _CONSTANTS):
            return leaf
        raise ConfigurationError(
            f"self.{path} must get tensors and numbers in {self._step}, got "
            f"{type(leaf).__name__}. Bring it into tensors in the dataset or in collate_fn."
        )

    def log_value(self, name: str, value: MetricValue, rule: LogRule) -> None:
        """A value that a call returned, logged as a number."""
        self._values.append(OfBatch(name, rule, value.call, value.key))

    def log_metric(
        self,
        name: str,
        metric: Any,
        each: bool,
        whole: bool,
        attribute: Any,
        by_trainer: bool = False,
    ) -> None:
        """A metric itself, logged under the names that Lightning gives it.

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
                f"self.log({name!r}) must get a metric that is an attribute of the LightningModule,"
                f" or in a ModuleList, ModuleDict or MetricCollection of it, got {came}. "
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
                f"self.log({name!r}) would log nothing: with on_step, which is the default in "
                f"training_step, it takes the value of the batch, and self.{path}.update computes "
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

    def result(self, result: Any) -> Any:
        """What the step returns, with the tensors of all calls.

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
        key = Calls.of(self._calls, self._values, self._epochs, self._resets)
        return {**_without_values(result), key: tuple(self._tensors)}


def _hidden(module: nn.Module) -> Iterator[Tuple[str, Any]]:
    """Metrics in plain containers, where nobody finds them."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if type(value) not in (list, tuple, dict) or name.startswith("_") or is_metric(part):
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in items:
                if is_metric(each):
                    yield f"{path}.{name}[{key!r}]".lstrip("."), each


def _refusals(path: str) -> Dict[str, Callable[..., Any]]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        refuse_here(
            f"self.{path} was called inside a step, but a metric in a list or dict is no part of "
            "the module, and nobody would update it",
            "Put it into a ModuleList, ModuleDict or MetricCollection.",
        )

    return dict.fromkeys(("forward", "update"), refuse)


def _without_values(result: Any) -> Any:
    """What a step returns besides the loss: a text where a metric's value is."""
    return tree.map_leaves(lambda leaf: repr(leaf) if type(leaf) is MetricValue else leaf, result)
