"""The metric objects of a LightningModule, and whose state they have."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from torch import Tensor, nn

from ipufit.errors import ConfigurationError, MetricError
from ipufit.lightning_module.detect import is_collection, metrics_in
from ipufit.lightning_module.metrics.calls import Calls
from ipufit.metrics.stored import is_plain, joined, restore, stored
from ipufit.metrics.values import shapes
from ipufit.processes import Processes

__all__ = ["ModuleMetrics", "Objects", "has_seen", "metric_at", "number", "quiet"]

Objects = Mapping[str, Any]


class ModuleMetrics:
    """The metric objects of a module, whose state is that of the step that was the last.

    A metric that several steps call, such as those of training and validation, counts apart in
    each.

    Args:
        module: the LightningModule.
        by_trainer: whether a Trainer computes and resets them, for which none counts apart.
    """

    def __init__(self, module: nn.Module, by_trainer: bool = False) -> None:
        self._module = module
        self._by_trainer = by_trainer
        self._objects: Dict[str, Any] = {}
        self._known: Dict[str, Dict[Calls, Calls]] = {}
        self._tried: Set[Tuple[str, Calls]] = set()
        self._held: Dict[str, str] = {}
        self._aside: Dict[Tuple[str, str], Any] = {}
        self._late: List[str] = []

    def find(self) -> Objects:
        """Metrics of the module by path, but for those inside of others, as it is now."""
        self._objects = dict(metrics_in(self._module, inside=False))
        return self._objects

    def begin(self, role: str) -> None:
        """A program of this step is made, which may do other things than the one before."""
        self.find()
        self._known[role] = {}

    def learn(self, role: str, key: Calls) -> None:
        """The step does this with a micro-batch of some size."""
        self._known.setdefault(role, {})[key] = key

    def is_new(self, role: str, key: Calls) -> bool:
        """Whether it is the first time that anybody asks about this."""
        there = (role, key) in self._tried
        self._tried.add((role, key))
        return not there

    def epochs(self, role: str) -> Dict[str, str]:
        """Paths of the metrics whose values over the epoch a step logs, by name."""
        return {n: path for key in self._known.get(role, ()) for n, path in key.epochs.items()}

    def called(self, role: str) -> Dict[str, Any]:
        """Those of :meth:`find` that a step calls."""
        calls = {call.path for key in self._known.get(role, ()) for call in key.calls}
        return {p: m for p, m in self._objects.items() if any(is_in(each, p) for each in calls)}

    def turn_to(self, role: str) -> Objects:
        """Give those that the step calls the state that is its own.

        Raises:
            ConfigurationError: another step calls it too, and nobody knows where it keeps its
                state.
        """
        objects = self.called(role)
        for path, metric in objects.items() if not self._by_trainer else ():
            before = self._held.setdefault(path, role)
            if before == role:
                continue
            if not is_plain(metric):
                raise ConfigurationError(
                    f"self.{path} ({type(metric).__name__}) is called in the {before} step and in "
                    f"the {role} step, and can't count apart in each. Make one for each."
                )
            self._aside[path, before] = stored(metric, path)
            metric.reset()
            if (path, role) in self._aside:
                restore(metric, self._aside.pop((path, role)))
            self._held[path] = role
        return objects

    def logged(self, role: str) -> Iterator[Tuple[str, Any]]:
        """The metrics that a step logs, by the names of their values, as a Trainer takes them."""
        objects = self.called(role)
        for collection in filter(is_collection, objects.values()):
            # Members that share one state get copies of it, as log_dict makes them.
            collection.values(copy_state=True)
        for name, path in self.epochs(role).items():
            yield name, _inside(objects, path)

    def reset(self, role: str) -> None:
        """What is logged forgets everything, as at the end of an epoch of Lightning's."""
        objects = self.turn_to(role)
        logged = {path for key in self._known.get(role, ()) for path in key.resets}
        for path in sorted({*logged, *self._late}):
            metric_at(objects if path in logged else self._objects, path).reset()
        self._late = []

    def finish(self) -> None:
        """Training or an evaluation is over."""
        for role in self._known:
            self.reset(role)

    def computed(self, name: str, metric: Any) -> float:
        """The value of one that is logged at the end of an epoch, after which it is reset.

        Raises:
            ConfigurationError: it is not the module's.
        """
        paths = {id(each): path for path, each in metrics_in(self._module)}
        if id(metric) not in paths or is_collection(metric):
            raise ConfigurationError(
                f"self.log({name!r}) must get a metric that is an attribute of the LightningModule,"
                f" got {type(metric).__name__}. Make it one in __init__; a collection is for "
                "self.log_dict."
            )
        self._late.append(paths[id(metric)])
        return number(metric.compute(), f"self.{paths[id(metric)]}")

    @contextlib.contextmanager
    def shown(self, role: str, processes: Optional[Processes] = None) -> Iterator[None]:
        """In the block the objects have the state of a step, for hooks of the module.

        Args:
            role: whose.
            processes: of several, which all come here, the state is that of all; None for the own.
        """
        objects = self.turn_to(role)
        own: Dict[str, Any] = {}
        if processes is not None and processes.is_distributed and objects:
            own = {path: stored(metric, path) for path, metric in objects.items()}
            told = processes.gather(own, "metrics")
            for path, metric in objects.items():
                restore(metric, joined(metric, [each[path] for each in told], path))
        with contextlib.ExitStack() as stack:
            for metric in self._objects.values():
                stack.enter_context(quiet(metric))
            yield
        for path, state in own.items():
            # A hook may have reset it; else it goes on from its own part.
            if has_seen(objects[path]):
                restore(objects[path], state)


def metric_at(objects: Objects, path: str) -> Any:
    """A metric by its path, in one of these or one of these itself."""
    for own, metric in objects.items():
        if own != path and is_in(path, own) and is_collection(metric):
            # Members that share one state are shown it.
            metric.values(copy_state=False)
    return _inside(objects, path)


def _inside(objects: Objects, path: str) -> Any:
    for own, metric in objects.items():
        if is_in(path, own):
            return metric if own == path else metric.get_submodule(path[len(own) + 1 :])
    raise AssertionError(path)


def is_in(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def number(value: Any, name: str) -> float:
    """One real number.

    Raises:
        MetricError: it is not.
    """
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    raise MetricError(
        f"metric {name!r} must give a scalar, got {shapes(value)}. Average it, for example with "
        "average='macro', or compute it in an on_..._epoch_end and log its parts."
    )


def _members(metric: Any) -> List[Any]:
    return [each for each in metric.modules() if hasattr(each, "_update_count")]


def has_seen(metric: Any) -> bool:
    """Whether it has been updated since it was reset."""
    return any(each._update_count for each in _members(metric))


@contextlib.contextmanager
def quiet(metric: Any) -> Iterator[None]:
    """In the block it does not ask other processes by itself, at a time of its own."""
    names = ("sync_on_compute", "_to_sync")
    kept = [(each, [getattr(each, name) for name in names]) for each in _members(metric)]
    for each, _ in kept:
        each.sync_on_compute = each._to_sync = False
    try:
        yield
    finally:
        for each, before in kept:
            each.sync_on_compute, each._to_sync = before
