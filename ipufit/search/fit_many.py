"""fit_many: one net with many settings, trained at the same time as one program."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from torch.utils.data import Dataset, TensorDataset

from ipufit.callbacks import LambdaCallback
from ipufit.callbacks.history import History, best_place
from ipufit.core import Direction, Verbose
from ipufit.data.adapters import DataArguments, comes_in_samples
from ipufit.errors import ConfigurationError, DataError, NonFiniteLossError, PlanError, brief_error
from ipufit.search.stacked import StackedModels, UnstackableError, kind_of, of_row
from ipufit.training import fit
from ipufit.training.fit_data import FitRequest
from ipufit.training.model import Model
from ipufit.utils import tree
from ipufit.utils.console import resolve_verbose, say, warn_user
from ipufit.utils.random_streams import Seeds, draw_seed

# Updates of an execution where nobody says, and elements of their samples: results are the same
# for any number.
_UPDATES, _ELEMENTS = 100, 2**22

Setting = Dict[str, tree.Tree]


@dataclasses.dataclass(eq=False)
class FitResult:
    """A setting of :func:`ipufit.fit_many`, and what came of it.

    Attributes:
        setting: by name.
        model: trained, with the state of its optimizer; ``fit`` goes on from there.
        seed: of all random numbers of its training.
        error: set where the model's loss became NaN or infinite, after which its weights are of no
            use; otherwise None.
    """

    setting: Setting
    model: Model
    seed: int
    error: Optional[NonFiniteLossError] = None

    @property
    def values(self) -> Dict[str, float]:
        """Values of the last epoch, by the names in the history; none after an error."""
        history = {} if self.error else self.model.history.history
        return {name: values[-1] for name, values in history.items()}

    def __str__(self) -> str:
        return f"{_text(self.setting)}: {self.error or _text(self.values)}"


class FitResults(List[FitResult]):
    """Results of :func:`ipufit.fit_many`, in the order of the settings."""

    def best(self, monitor: str = "val_loss", mode: Direction = "auto") -> FitResult:
        """Return the result with the best value after its last epoch; the first of several.

        Args:
            monitor: name of the value.
            mode: "min", "max", or "auto": as for :meth:`ipufit.History.best_epoch`.

        Raises:
            ConfigurationError: no model has such a value that is a number, or "auto" can't tell
                which direction is better.
        """
        history = History(self[0].model.history.params)
        history.epoch = [*range(len(self))]
        for name in sorted({name for result in self for name in result.values}):
            history.history[name] = [result.values.get(name, math.nan) for result in self]
        return self[history.best_epoch(monitor, mode)]

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def _text(values: Mapping[str, object]) -> str:
    cells = {n: f"{v:.4g}" if isinstance(v, float) else v for n, v in values.items()}
    return ", ".join(f"{name}={cell}" for name, cell in cells.items())


def fit_many(
    build: Callable[..., Model],
    grid: object,
    x: tree.Tree,
    y: tree.Tree = None,
    *,
    verbose: Verbose = "auto",
    device_iterations: Optional[int] = None,
    seed: Optional[int] = None,
    **options: tree.Tree,
) -> FitResults:
    """Train one net with several settings at the same time, where that is possible as one program.

    Each model ends as its own ``fit`` would leave it, up to the order of summation: its samples
    come in its own order, and its random numbers, optimizer and history are its own. Models of one
    structure train as one model, whose parameters have a row for each of them; seeds, numbers of
    the optimizer (rates, decays, momenta) and rates of ``torch.nn.Dropout`` may differ. Others
    train one after another, with a warning that says why. See docs/finding-settings.md.

    Args:
        build: makes a compiled model of a setting, whose values it gets by name.
        grid: a list of settings, each a dict; or a dict of lists, of which all combinations are
            tried. A value named "seed" is also the ``seed`` of that model's ``fit``; ``build`` gets
            it if it has a parameter for it.
        x: tensors, arrays, tables or a map-style dataset, as for :meth:`ipufit.Model.fit`.
        y: as for ``fit``.
        verbose: 0 is silent; otherwise a line is printed after each epoch.
        device_iterations: as for ``fit``; None is a number that suits the data: results don't
            depend on it.
        seed: of models whose setting has none; None draws one for each.
        options: other arguments of ``fit``, but for ``callbacks`` and ``checkpoint``, which are of
            one model.

    Returns:
        For each setting its model, its seed, and the error if its loss was not finite, which ends
        no other model.

    Raises:
        ConfigurationError: arguments that can't work; as for ``fit``.
        DataError: data that can't be read or fed, or that comes in batches.
    """
    batch_size = options.get("batch_size")
    if not comes_in_samples(DataArguments("training data", x, y, batch_size=batch_size)):
        raise DataError(
            "fit_many reads the samples in an order for each model, but the training data already "
            f"comes in batches, from a {type(x).__name__}. Pass tensors, arrays or the dataset."
        )
    of_one = [name for name in ("callbacks", "checkpoint") if options.get(name)]
    if of_one:
        raise ConfigurationError(
            f"fit_many trains several models, but {' and '.join(of_one)} would be those of one. "
            "Leave it out, or call fit for each model."
        )
    results = FitResults(_results(build, grid, seed))
    if set(options).difference(inspect.signature(Model.fit).parameters):
        results[0].model.fit(x, y, **options)  # says what was meant
    options.update(x=x, y=y, device_iterations=device_iterations)
    level = resolve_verbose(verbose)
    alone = fit_alike(results, options, bool(level))
    for reason in dict.fromkeys(reason for _, reason in alone):
        places = [str(results.index(result)) for result, why in alone if why == reason]
        warn_user(
            f"{len(places)} of {len(results)} models train one after another (number "
            f"{', '.join(places)}): {reason}."
        )
    options = _with_iterations(options, 1)
    for result, _ in alone:
        try:
            result.model.fit(verbose=0, seed=result.seed, **options)
        except NonFiniteLossError as error:
            result.error = error
        if level:
            say(str(result))
    return results


def fit_alike(
    results: Sequence[FitResult], options: Setting, shows: bool
) -> List[Tuple[FitResult, str]]:
    """Train models, those of one structure as one; return those that can't, each with a reason.

    Args:
        results: with models that are not trained yet.
        options: of ``fit``.
        shows: whether a line is printed after each epoch.
    """
    x, weights = options["x"], ("sample_weight", "class_weight")
    kinds: Dict[object, List[FitResult]] = {}
    alone: List[Tuple[FitResult, str]] = []
    for result in results:
        try:
            if isinstance(x, Dataset) and type(x) is not TensorDataset:
                raise UnstackableError(f"a {type(x).__name__} makes its samples one by one")
            if any(options.get(name) is not None for name in weights):
                raise UnstackableError("samples have weights")
            kinds.setdefault(kind_of(result.model), []).append(result)
        except UnstackableError as error:
            alone.append((result, str(error)))
    for alike in kinds.values():
        reason = "no other model has the same structure"
        try:
            if len(alike) > 1:
                _fit_as_one(alike, options, shows)
                continue
        except UnstackableError as error:
            reason = str(error)
        alone += [(result, reason) for result in alike]
    return alone


def _results(build: Callable[..., Model], grid: object, seed: Optional[int]) -> List[FitResult]:
    """Make the models of a grid.

    Raises:
        ConfigurationError: it is no grid, or what is made is no compiled model.
    """
    settings: tree.Tree = grid
    if isinstance(grid, Mapping) and all(isinstance(values, Iterable) for values in grid.values()):
        settings = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    settings = list(settings) if isinstance(settings, Iterable) else []
    if not settings or not all(isinstance(setting, Mapping) for setting in settings):
        raise ConfigurationError(
            "grid must be a list of settings, such as [{'lr': 0.1}, {'lr': 0.01}], or a dict of "
            f"lists, such as {{'lr': [0.1, 0.01]}}, with at least one setting, got {grid!r}."
        )
    parameters = inspect.signature(build).parameters.values()
    takes_seed = any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)
    results = []
    for setting in settings:
        model = build(**{n: v for n, v in setting.items() if takes_seed or n != "seed"})
        if not isinstance(model, Model):
            raise ConfigurationError(
                f"build must return a compiled ipufit.Model, got {model!r} for {dict(setting)}. "
                "Make the model, call its compile, and return it."
            )
        model._compiled("fit_many")
        number = setting.get("seed", seed)
        results.append(FitResult(dict(setting), model, draw_seed() if number is None else number))
    return results


def _with_iterations(options: Setting, models: int) -> Setting:
    """Fill in how many updates an execution of so many models has, where nobody says."""
    if options.get("device_iterations") is not None:
        return dict(options)
    elements = sum(
        math.prod(leaf.shape[1:]) if hasattr(leaf, "shape") else _ELEMENTS
        for leaf in tree.flatten((options["x"], options["y"]))[0]
    )
    updates = _ELEMENTS // (max(1, elements) * (options.get("batch_size") or 32) * models)
    return {**options, "device_iterations": max(1, min(_UPDATES, updates))}


def _fit_as_one(results: Sequence[FitResult], options: Setting, shows: bool) -> None:
    """Train models as one.

    Raises:
        UnstackableError: they can't; nothing has changed.
    """
    options = _with_iterations(options, len(results))
    names = ("x", "y", "sample_weight", "class_weight", "batch_size", "shuffle")
    data = DataArguments("training data", *(options.pop(name, None) for name in names))
    stacked = StackedModels([result.model for result in results], data.shuffle is not False)
    session = stacked.model._compiled("fit_many")

    def end_epoch(epoch: int, logs: Mapping[str, float]) -> None:
        name = "val_loss" if "val_loss" in logs else "loss"
        losses = [logs[f"{name}/{row}"] for row in range(len(results))]
        best = best_place(losses, "min") or 0
        say(
            f"epoch {epoch + 1}: {len(losses)} models, {name} from {losses[best]:.4g} "
            f"({_text(results[best].setting)}) to {max(losses):.4g}"
        )

    callbacks = [LambdaCallback(on_epoch_end=end_epoch)] if shows else []
    options.update(callbacks=callbacks, seed=Seeds.of([result.seed for result in results]))
    try:
        fit.fit(stacked.model, session, FitRequest(data, **options))
    except Exception as error:
        # What is wrong with arguments or data is so for each model.
        is_general = isinstance(error, (DataError, PlanError)) or type(error) is ConfigurationError
        if session.updates or is_general:
            raise
        raise UnstackableError(f"as one, they fail with {brief_error(error)}") from error
    finally:
        for row, result in enumerate(results if session.updates else ()):
            stacked.publish(row)
            result.model.history = _history_of(stacked.model.history, row, result.seed)
    for result in results:
        losses = result.model.history.history["loss"]
        lost = [epoch for epoch, loss in enumerate(losses) if not math.isfinite(loss)]
        if lost:
            result.error = NonFiniteLossError(
                f"the loss became {losses[lost[0]]} in epoch {lost[0] + 1}. Look for a learning "
                "rate that is too high, a log or division of zero, or non-finite data.",
                None,
                losses[lost[0]],
            )
            result.error.epoch = lost[0]


def _history_of(stacked: History, row: int, seed: int) -> History:
    history = History({**stacked.params, "seed": seed})
    history.params["directions"] = of_row(stacked.params["directions"], row)
    history.params["metrics"] = [*of_row(dict.fromkeys(stacked.params["metrics"]), row)]
    history.history, history.epoch = of_row(stacked.history, row), [*stacked.epoch]
    return history
