"""fit_many: one net with many settings, trained at the same time as one program."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
import textwrap
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from torch.utils.data import Dataset, TensorDataset

from ipufit.callbacks import Callback, LambdaCallback
from ipufit.callbacks.history import History, best_place
from ipufit.core import Direction, Verbose
from ipufit.core.train_config import Outputs
from ipufit.data.adapters import DataArguments, comes_in_samples
from ipufit.data.settings import Loading
from ipufit.errors import NAN_ADVICE, ConfigurationError, DataError, NonFiniteLossError, brief_error
from ipufit.search.stacked import StackedModels, UnstackableError, kind_of, of_row
from ipufit.training import fit
from ipufit.training.arguments import checked_seed
from ipufit.training.fit_data import FitRequest
from ipufit.training.model import Model
from ipufit.utils import tree
from ipufit.utils.console import resolve_verbose, say, warn_user
from ipufit.utils.interrupts import is_of_handler, summarized_interrupt
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
    cells = {n: f"{v:.4g}" if isinstance(v, float) else str(v) for n, v in values.items()}
    # Of a large tensor, the first numbers in one line.
    return ", ".join(f"{name}={textwrap.shorten(cell, 60)}" for name, cell in cells.items())


def _short(value: object) -> str:
    """Show the beginning of settings, which may be large tensors, in one line."""
    return textwrap.shorten(repr(value), 120)


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
    train one after another, with a warning that says why. Ctrl-C, or an error during training,
    has the models that have finished an epoch in its attribute ``results``. See
    docs/finding-settings.md.

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
            "fit_many reads the samples in an order for each model, which can't be done with a "
            f"{type(x).__name__}: it comes in batches, or has no samples. Pass tensors, arrays or "
            "the dataset."
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
    with _keeping_results(results):
        for result, _ in fit_alike(results, options, bool(level), warns=len(results) > 1):
            try:
                each = _with_iterations([result], options)
                result.model.fit(verbose=0, seed=result.seed, **each)
            except NonFiniteLossError as error:
                result.error = error
            if level:
                say(str(result))
    return results


@contextlib.contextmanager
def _keeping_results(results: FitResults) -> Iterator[None]:
    """Give Ctrl-C or an error that leaves the block the models that have finished an epoch."""
    with summarized_interrupt(str):
        try:
            yield
        except BaseException as error:
            finished = FitResults(each for each in results if each.model.history.epoch)
            vars(error)["results"] = finished
            if isinstance(error, KeyboardInterrupt):
                # What fit says is about one model, or about all those of a program as one.
                count = f"{len(finished)} of {len(results)} models have finished an epoch"
                error.args = ("\n".join(map(str, [f"Ctrl-C ends fit_many; {count}", *finished])),)
            raise


def fit_alike(
    results: Sequence[FitResult], options: Setting, shows: bool, warns: bool = False
) -> List[Tuple[FitResult, str]]:
    """Train models, those of one structure as one; return those that can't, each with a reason.

    Args:
        results: with models that are not trained yet.
        options: of ``fit``.
        shows: whether a line is printed after each epoch.
        warns: whether to warn of those that can't, before any of the others trains.
    """
    x, weights = options["x"], ("sample_weight", "class_weight")
    kinds: List[Tuple[Mapping[str, object], List[FitResult]]] = []
    alone: List[Tuple[FitResult, str]] = []
    for result in results:
        try:
            if isinstance(x, Dataset) and type(x) is not TensorDataset:
                raise UnstackableError(f"a {type(x).__name__} makes its samples one by one")
            if any(options.get(name) is not None for name in weights):
                raise UnstackableError("samples have weights")
            kind: Mapping[str, object] = kind_of(result.model)
            alike = next((results for other, results in kinds if other == kind), [])
            if not alike:
                kinds.append((kind, alike))
            alike.append(result)
        except UnstackableError as error:
            alone.append((result, str(error)))
    groups: List[_Group] = []
    for kind, alike in kinds:
        others = [other for other, _ in kinds if other is not kind]
        differ = [[n for n in {**kind, **other} if kind.get(n) != other.get(n)] for other in others]
        names = min(differ, key=len, default=["structure"])
        reason = f"no other model has the same {', '.join(names[:3])}"
        try:
            if len(alike) > 1:
                groups.append(_Group(alike, options))
                continue
        except UnstackableError as error:
            reason = str(error)
        alone += [(result, reason) for result in alike]
    for reason in dict.fromkeys(reason for _, reason in alone) if warns else ():
        places = [str(results.index(result)) for result, why in alone if why == reason]
        warn_user(
            f"{len(places)} of {len(results)} models train one after another (number "
            f"{', '.join(places)}): {reason}."
        )
    for number, group in enumerate(groups, 1):
        group.title = f"group {number} of {len(groups)}, " if len(groups) > 1 else ""
        group.train(shows)
    return alone


def _results(build: Callable[..., Model], grid: object, seed: Optional[int]) -> List[FitResult]:
    """Make the models of a grid.

    Raises:
        ConfigurationError: it is no grid, or what is made is no compiled model.
    """
    settings: tree.Tree = grid
    if isinstance(grid, Mapping) and all(map(_are_several, grid.values())):
        settings = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    settings = list(settings) if isinstance(settings, Iterable) else []
    if not settings or not all(isinstance(setting, Mapping) for setting in settings):
        raise ConfigurationError(
            "grid must be a list of settings, such as [{'lr': 0.1}, {'lr': 0.01}], or a dict of "
            f"lists, such as {{'lr': [0.1, 0.01]}}, with at least one setting, got {_short(grid)}."
        )
    if not callable(build):
        raise ConfigurationError(
            f"build must be a function that makes a compiled ipufit.Model, got {build!r}. Pass the "
            "function itself, without calling it."
        )
    signature = inspect.signature(build)
    parameters = signature.parameters.values()
    takes_seed = any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)
    seeds = [setting.get("seed", seed) for setting in settings]
    by_name = [{n: v for n, v in s.items() if takes_seed or n != "seed"} for s in settings]
    for values in by_name:
        try:
            signature.bind(**values)
        except TypeError as error:
            raise ConfigurationError(
                "build must take the values of each setting by name, but "
                f"build({', '.join(signature.parameters)}) can't be called with "
                f"{', '.join(map(str, values)) or 'nothing'}: {error}. Rename values in grid, or "
                "parameters of build."
            ) from None
    # Before build, which may seed the generator that they come from.
    numbers = [draw_seed() if each is None else checked_seed(each) for each in seeds]
    results: List[FitResult] = []
    owners: Dict[int, FitResult] = {}
    for setting, values, of_setting, number in zip(settings, by_name, seeds, numbers):
        model = build(**values)
        if not isinstance(model, Model):
            raise ConfigurationError(
                f"build must return a compiled ipufit.Model, got {type(model).__name__} for "
                f"{_short(dict(setting))}. Make the model, call its compile, and return it."
            )
        session = model._compiled("fit_many")
        fixed = session.fixed.seed_or(of_setting)
        result = FitResult(dict(setting), model, number if fixed is None else fixed)
        results.append(result)
        for parameter in (p for group in session.groups for p in group["params"]):
            owner = owners.setdefault(id(parameter), result)
            if owner is not result:
                raise ConfigurationError(
                    "build must make a net of its own for each setting, but those of "
                    f"{_short(owner.setting)} and {_short(result.setting)} have parameters in "
                    "common. Make the net inside of build."
                )
    return results


def _are_several(values: object) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))


def _with_iterations(results: Sequence[FitResult], options: Setting) -> Setting:
    """Fill in how many updates an execution of these models has, where nothing depends on it."""
    sessions = [result.model._compiled("fit_many") for result in results]
    if (
        options.get("device_iterations") is not None
        or any("device_iterations" in session.fixed.names(True) for session in sessions)
        or any(session.config.outputs != Outputs() for session in sessions)
        or _loading(options).fast_dev_run
    ):
        return dict(options)
    elements = sum(
        math.prod(leaf.shape[1:]) if hasattr(leaf, "shape") else _ELEMENTS
        for leaf in tree.flatten((options["x"], options["y"]))[0]
    )
    size = options.get("batch_size")
    samples = size if isinstance(size, int) and size > 0 else 32
    updates = _ELEMENTS // (max(1, elements) * samples * len(results))
    return {**options, "device_iterations": max(1, min(_UPDATES, updates))}


def _loading(options: Setting) -> Loading:
    loading = options.get("loading")
    return loading if isinstance(loading, Loading) else Loading()


class _Group:
    """Models that train as one, whose program is recorded.

    Args:
        results: with models of one structure.
        options: of ``fit``.

    Attributes:
        title: says in lines of epochs which models they are; empty where there are no others.

    Raises:
        UnstackableError: they can't; none is trained.
    """

    title = ""

    def __init__(self, results: Sequence[FitResult], options: Setting) -> None:
        self._results = results
        of_one, options = dict(options), _with_iterations(results, options)
        names = ("x", "y", "sample_weight", "class_weight", "batch_size", "shuffle")
        data = DataArguments("training data", *(options.pop(name, None) for name in names))
        are_shuffled = data.shuffle is not False and _loading(options).overfit_batches is None
        self._stacked = StackedModels([result.model for result in results], are_shuffled)
        self._session = self._stacked.model._compiled("fit_many")
        options["seed"] = Seeds.of([result.seed for result in results])
        self._data, self._options = data, options
        try:
            _stop_before_training(self._fit)
        except Exception as error:
            if is_of_handler(error):
                raise
            cause: Optional[BaseException] = error
            while cause is not None:
                if isinstance(cause, UnstackableError):
                    raise cause from None
                cause = cause.__cause__ or cause.__context__
            # What is wrong with arguments or data is so for each model, which names it better.
            of_one.update(seed=results[0].seed, verbose=0)
            _stop_before_training(
                lambda callbacks: results[0].model.fit(**{**of_one, "callbacks": callbacks})
            )
            raise UnstackableError(f"as one, they fail with {brief_error(error)}") from error

    def _fit(self, callbacks: Sequence[Callback]) -> None:
        request = FitRequest(self._data, **{**self._options, "callbacks": callbacks})
        fit.fit(self._stacked.model, self._session, request)

    def _show(self, epoch: int, logs: Mapping[str, float]) -> None:
        name = "val_loss" if "val_loss" in logs else "loss"
        losses = [logs[f"{name}/{row}"] for row in range(len(self._results))]
        best = best_place(losses, "min") or 0
        say(
            f"{self.title}epoch {epoch + 1}: {len(losses)} models, {name} from {losses[best]:.4g} "
            f"({_text(self._results[best].setting)}) to {max(losses):.4g}"
        )

    def train(self, shows: bool) -> None:
        """Train them; whatever ends it, each has what it was trained so far.

        Args:
            shows: whether a line is printed after each epoch.
        """
        try:
            self._fit([LambdaCallback(on_epoch_end=self._show)] if shows else [])
        finally:
            for row, result in enumerate(self._results if self._session.updates else ()):
                self._stacked.publish(row)
                history = self._stacked.model.history
                result.model.history = _history_of(history, row, result.seed)
        for result in self._results:
            losses = result.model.history.history["loss"]
            lost = [epoch for epoch, loss in enumerate(losses) if not math.isfinite(loss)]
            if lost:
                text = f"the loss became {losses[lost[0]]} in epoch {lost[0] + 1}. {NAN_ADVICE}"
                result.error = NonFiniteLossError(text, None, losses[lost[0]])
                result.error.epoch = lost[0]


class _ReadyError(Exception):
    """Training could begin."""


def _stop_before_training(run: Callable[[Sequence[Callback]], object]) -> None:
    """Have a fit do all that it does before it trains.

    Args:
        run: calls it with callbacks.
    """

    def stop(logs: object) -> None:
        raise _ReadyError

    with contextlib.suppress(_ReadyError):
        run([LambdaCallback(on_train_begin=stop)])


def _history_of(stacked: History, row: int, seed: int) -> History:
    history = History({**stacked.params, "seed": seed})
    history.params["directions"] = of_row(stacked.params["directions"], row)
    history.params["metrics"] = [*of_row(dict.fromkeys(stacked.params["metrics"]), row)]
    history.history, history.epoch = of_row(stacked.history, row), [*stacked.epoch]
    return history
