"""Base of classifiers and regressors: parameters, the module and optimizer of a fit, copies."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from contextvars import ContextVar
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np
import torch
from sklearn import model_selection
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted
from torch import Tensor, nn

from ipufit.callbacks import Callback
from ipufit.callbacks.history import History
from ipufit.core import EngineName, Verbose
from ipufit.core.train_config import Precision, Reduction
from ipufit.data.settings import Validation
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError, OptimizerError, UnknownNameError, unfit
from ipufit.losses.resolve import resolve_loss
from ipufit.optim.resolve import class_by_name, settings_by_name
from ipufit.training.model import Model
from ipufit.utils.error_collector import ErrorCollector
from ipufit.utils.random_streams import isolated, seed_generators

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # before 1.6; 1.3 is the oldest that ipufit works with

    def validate_data(estimator: BaseEstimator, *args: object, **options: object) -> Any:
        """Check data, and what it has in common with that of ``fit``; a method before 1.6."""
        return estimator._validate_data(*args, **options)


# Samples, targets, weights or outputs of any dtype.
if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:  # of which NumPy before 1.21 has no form with a dtype
    Array = np.ndarray

# What the names after each prefix are arguments of.
_GROUPS = ("module", "optimizer", "compile", "fit")

# Arguments that have parameters without a prefix, or that the estimator gives itself.
_TAKEN: Dict[str, Iterable[str]] = {
    "compile": ("optimizer", "loss", "metrics"),
    "fit": (
        *("x", "y", "sample_weight", "class_weight", "batch_size", "epochs"),
        *("ipus", "device_iterations", "gradient_accumulation", "callbacks", "seed", "verbose"),
        *("validation_data", "validation_split"),
    ),
}


def _is_setting(name: str) -> bool:
    """Say whether a name is that of a parameter with a prefix."""
    prefix, delimiter, rest = name.partition("__")
    return bool(delimiter and rest) and prefix in _GROUPS


def _check_names(owner: str, names: Iterable[str], parameters: Sequence[str]) -> None:
    """Refuse what is no parameter, as Python does with an unknown keyword.

    Args:
        owner: name of the estimator's class.
        names: of the arguments.
        parameters: of the estimator.

    Raises:
        TypeError: one of the names has none of the prefixes.
    """
    for name in names:
        if not _is_setting(name):
            near = UnknownNameError("argument", name, parameters).nearest
            meant = f"Did you mean {near!r}? " if near else ""
            raise TypeError(
                f"{owner} got an unexpected keyword argument {name!r}. {meant}Arguments of the "
                "module, the optimizer, Model.compile and Model.fit have a prefix: module__, "
                "optimizer__, compile__, fit__."
            )


def _settings_of(estimator: object) -> Dict[str, Any]:
    """Return all parameters with a prefix, by full name."""
    return {name: value for name, value in vars(estimator).items() if _is_setting(name)}


def _group_of(estimator: object, group: str) -> Dict[str, Any]:
    """The parameters with one prefix, which is left away.

    Raises:
        ConfigurationError: names that ``Model.compile`` or ``Model.fit`` don't have, or that go
            without a prefix here; all of them.
    """
    start = f"{group}__"
    options = {
        name[len(start) :]: value
        for name, value in _settings_of(estimator).items()
        if name.startswith(start)
    }
    if group in _TAKEN:
        _check_options(group, options, Model.compile if group == "compile" else Model.fit)
    return options


def _check_options(group: str, options: Mapping[str, object], call: Callable[..., object]) -> None:
    names: List[str] = [name for name in inspect.signature(call).parameters if name != "self"]
    free = [name for name in names if name not in _TAKEN[group]]
    faults = ErrorCollector()
    for name, value in options.items():
        # How the estimator's own part is evaluated, without data of its own.
        if name in free or (isinstance(value, Validation) and value.data is None):
            continue
        with faults.collect():
            if name not in names:
                raise UnknownNameError(f"option of Model.{group}", name, free)
            raise ConfigurationError(
                f"{group}__{name} must not be set: the estimator sets {name} itself. Use its own "
                "parameters, or the arguments of its fit."
            )
    faults.raise_all()


_DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Options of compile whose state is not in a copy: what they count is part of training alone.
_COUNTING = ("lr_scheduler", "ema")


# How an estimator takes its model from the search in which it is fitted, given the arguments of
# Model.fit; None where the estimator must train.
Take = Callable[["Estimator", Dict[str, Any]], Optional[Model]]
TAKE: ContextVar[Optional[Take]] = ContextVar("take", default=None)


class Estimator(BaseEstimator):  # type: ignore[misc]
    """A module and how to train it, as an estimator. Use one of its two subclasses.

    Parameters are looked at by ``fit`` alone, which makes a new module each time and changes no
    parameter; what it has learned is in attributes whose names end with an underscore. Defaults
    are those of a regressor.
    """

    module_: nn.Module
    history_: History
    callbacks_: Union[Callback, Sequence[Callback], None]
    n_features_in_: int
    feature_names_in_: Array
    n_iter_: int
    _model: Model
    _optimizer_state: Dict[str, Any]
    _updates: int

    def __init__(
        self,
        module: object = None,
        *,
        loss: object = "mse",
        optimizer: object = "adam",
        metrics: object = None,
        batch_size: int = 32,
        epochs: int = 10,
        ipus: Optional[int] = None,
        device_iterations: Optional[int] = None,
        gradient_accumulation: Optional[int] = None,
        callbacks: Union[Callback, Sequence[Callback], None] = None,
        validation_fraction: float = 0.0,
        dtype: Optional[Literal["float32", "float64"]] = "float32",
        engine: Union[EngineName, Callable[[], Engine]] = "auto",
        device: Union[str, torch.device, None] = None,
        random_state: Union[int, np.random.RandomState, None] = None,
        verbose: Verbose = 0,
        **settings: object,
    ) -> None:
        _check_names(type(self).__name__, settings, self._get_param_names())
        self.module = module
        self.loss = loss
        self.optimizer = optimizer
        self.metrics = metrics
        self.batch_size = batch_size
        self.epochs = epochs
        self.ipus = ipus
        self.device_iterations = device_iterations
        self.gradient_accumulation = gradient_accumulation
        self.callbacks = callbacks
        self.validation_fraction = validation_fraction
        self.dtype = dtype
        self.engine = engine
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.__dict__.update(settings)

    # ---- parameters ------------------------------------------------------------------------------

    def get_params(self, deep: bool = True) -> Dict[str, Any]:
        """Return all parameters by name, including those with a prefix.

        Args:
            deep: as in scikit-learn.
        """
        return {**super().get_params(deep=deep), **_settings_of(self)}

    def set_params(self, **params: object) -> Estimator:
        """Change parameters, for the next ``fit``.

        Args:
            params: new values by name, settings with their prefix.

        Raises:
            ValueError: an unknown parameter.
        """
        prefixed = {name: value for name, value in params.items() if _is_setting(name)}
        super().set_params(**{name: params[name] for name in params if name not in prefixed})
        self.__dict__.update(prefixed)
        return self

    # ---- training --------------------------------------------------------------------------------

    @property
    def model_(self) -> Model:
        """The compiled :class:`ipufit.Model` around ``module_``.

        Raises:
            NotFittedError: before ``fit``.
        """
        model: Optional[Model] = vars(self).get("_model")
        if model is None:
            if "module_" not in vars(self):
                raise NotFittedError(
                    f"this {type(self).__name__} has no model_ yet. Call fit first."
                )
            model = self._model = self._compiled(self.module_)
            assert model.optimizer is not None
            model.optimizer.load_state_dict(self._optimizer_state)
            # By which random numbers are drawn.
            model._compiled("model_").updates = self._updates
        return model

    def _check(self, x: object, y: object, reset: bool, **options: object) -> Tuple[Array, Array]:
        """Return samples and targets as arrays, in the dtype of the computation.

        Args:
            reset: whether what is known of the data begins with these.
            options: of scikit-learn's ``check_array`` and ``check_X_y``.

        Raises:
            ValueError: as scikit-learn's own estimators.
        """
        how = self._dtype or "numeric"
        arrays: Tuple[Array, Array] = validate_data(
            self, x, y, reset=reset, dtype=how, allow_nd=True, **options
        )
        return arrays

    @property
    def _dtype(self) -> Optional[np.dtype[Any]]:
        """NumPy's dtype of the computation, or None where data stays as it is."""
        if self.dtype is None:
            return None
        if not isinstance(self.dtype, str) or self.dtype not in _DTYPES:
            needed = "'float32', 'float64' or None"
            raise unfit("dtype", needed, self.dtype, "None converts neither data nor module.")
        return np.dtype(self.dtype)

    def _weights(self, sample_weight: object, x: Array) -> Optional[Array]:
        """Return the checked weights of samples, shape (samples,), or None."""
        if sample_weight is None:
            return None
        weights: Array = _check_sample_weight(sample_weight, x, dtype=self._dtype or np.float32)
        return weights

    def _start(self, x: Array, n_outputs: int) -> None:
        """Make the module and the model, with weights that ``random_state`` decides."""
        self._n_outputs = n_outputs
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        sizes = {"n_features": int(x.shape[1]), "n_outputs": n_outputs}
        module = _build_module(self.module, _group_of(self, "module"), self._seed, sizes)
        if self._dtype is not None:
            module.to(_DTYPES[str(self._dtype)])
        self._model = self._compiled(module)
        self.module_ = self._model.module
        self.n_iter_ = 0

    def _compiled(self, module: nn.Module) -> Model:
        options = _group_of(self, "compile")
        if resolve_loss(self.loss).reduction == "mean":
            # A weight of two is a sample that is there twice, as everywhere in scikit-learn.
            options.setdefault("reduction", Reduction(sample_weights="mean_with_sample_weight"))
        optimizer = _build_optimizer(self.optimizer, _group_of(self, "optimizer"))
        model = Model(module, engine=self.engine, device=self.device)
        loss, metrics = copy.deepcopy(self.loss), copy.deepcopy(self.metrics)
        model.compile(optimizer, loss, metrics=metrics, **options)
        return model

    def _train(
        self,
        x: Array,
        y: Array,
        weight: Optional[Array],
        epochs: int,
        classes: Optional[Array] = None,
    ) -> None:
        """Train for so many epochs more.

        Args:
            classes: index of each sample's class, for a validation part that has all of them.
        """
        options = _group_of(self, "fit")
        how = options.pop("validation_data", Validation())
        validation = None
        if self.validation_fraction:
            parts = [x, y] if weight is None else [x, y, weight]
            cut: List[Array] = model_selection.train_test_split(
                *parts,
                test_size=self.validation_fraction,
                random_state=self._seed,
                stratify=classes,
            )
            x, y = cut[0], cut[2]
            weight = None if weight is None else cut[4]
            validation = tuple(cut[1::2])
        self.callbacks_ = copy.deepcopy(self.callbacks)
        model = self.model_
        before = model.history
        try:
            options.update(
                x=x,
                y=y,
                sample_weight=weight,
                batch_size=self.batch_size,
                epochs=range(self.n_iter_, self.n_iter_ + epochs),
                ipus=self.ipus,
                device_iterations=self.device_iterations,
                gradient_accumulation=self.gradient_accumulation,
                callbacks=() if self.callbacks_ is None else self.callbacks_,
                validation_data=dataclasses.replace(how, data=validation),
            )
            take = TAKE.get()
            trained = None if take is None else take(self, options)
            if trained is None:
                model.fit(seed=self._seed, verbose=self.verbose, **options)
            else:
                model = self._model = trained
                self.module_ = model.module
        finally:
            if model.history is not before:
                self.history_ = model.history
                self.n_iter_ += len(self.history_.epoch)

    def _refuse_going_on(self) -> None:
        """A copy has the optimizer's state, but not what counts beside it.

        Raises:
            ConfigurationError: this is a copy that such options were set for.
        """
        options = _group_of(self, "compile")
        counting = [name for name in _COUNTING if options.get(name)]
        precision = options.get("precision")
        if not isinstance(precision, (Precision, type(None))):
            precision = Precision(precision)
        if precision is not None and precision.scale is not None:
            counting.append("precision")
        if counting and vars(self).get("_model") is None:
            raise ConfigurationError(
                "partial_fit must continue with the estimator that was trained with "
                f"compile__{counting[0]}, got a copy, which lacks its counters. Train the "
                "original, or call fit."
            )

    # ---- prediction ------------------------------------------------------------------------------

    def _outputs(self, x: object) -> Array:
        """Return the module's outputs, shape (samples, n_outputs)."""
        check_is_fitted(self, "module_")
        how = self._dtype or "numeric"
        samples: Array = validate_data(self, x, reset=False, dtype=how, allow_nd=True)
        outputs = self.model_.predict(samples, batch_size=self.batch_size, verbose=0)
        shape = (len(samples), self._n_outputs)
        if not isinstance(outputs, Tensor) or tuple(outputs.shape) != shape:
            came = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ConfigurationError(
                f"the module must return one tensor of shape (samples, n_outputs), here {shape}, "
                f"got {came}. Give it that many outputs: a parameter called n_outputs says how "
                "many."
            )
        array: Array = outputs.cpu().numpy()
        return array

    # ---- copies ----------------------------------------------------------------------------------

    def __getstate__(self) -> Dict[str, Any]:
        """Return everything but recorded programs and the callbacks of the last fit."""
        state = dict(super().__getstate__())
        model: Optional[Model] = state.pop("_model", None)
        state.pop("callbacks_", None)
        if model is not None and model.optimizer is not None:
            state["_optimizer_state"] = model.optimizer.state_dict()
            state["_updates"] = model._compiled("model_").updates
        return state


def _build_module(
    module: object, settings: Mapping[str, object], seed: int, sizes: Mapping[str, int]
) -> nn.Module:
    """Make a module of its own for one fit.

    Args:
        module: a module, of which a copy is made; a class or another callable that makes one.
        settings: arguments of the class or callable.
        seed: of the initial weights; the user's generator is left alone.
        sizes: what the data says, passed to a callable that has parameters of these names.

    Raises:
        ConfigurationError: it is none of these, or makes no module.
    """
    if isinstance(module, nn.Module):
        if settings:
            raise ConfigurationError(
                f"module__{next(iter(settings))} needs a class or a function that makes the "
                f"module, got an object of {type(module).__name__}."
            )
        return copy.deepcopy(module)
    if not callable(module):
        needed = "a torch.nn.Module, a class of them or a function that makes one"
        raise unfit("module", needed, module, "Pass for example module=MyNet.")
    name = getattr(module, "__name__", type(module).__name__)
    try:
        signature = inspect.signature(module)
    except (TypeError, ValueError):
        signature = inspect.Signature()
    sizes_by_name = {size: count for size, count in sizes.items() if size in signature.parameters}
    arguments: Dict[str, object] = {**sizes_by_name, **settings}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{name}{signature} makes the module, but does not take its arguments: {error}. Set "
            "its arguments with module__ parameters; n_features and n_outputs come from the data."
        ) from error
    with isolated():
        seed_generators(seed)
        built = module(**arguments)
    if not isinstance(built, nn.Module):
        raise ConfigurationError(
            f"module must make a torch.nn.Module, but {name} returned {type(built).__name__}. "
            "Return the module from it."
        )
    return built


def _build_optimizer(optimizer: object, settings: Mapping[str, object]) -> object:
    """Build the argument of ``Model.compile``: the optimizer, or a factory that adds the settings.

    Args:
        optimizer: a name, a class, or a callable of parameters.
        settings: keyword arguments besides the parameters.

    Raises:
        UnknownNameError: no optimizer has that name.
        OptimizerError: an optimizer over another module's parameters, or settings it does not take.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            "optimizer must be a name, a class or a factory, because every fit makes a new module, "
            f"got an object of {type(optimizer).__name__}. Pass its name or class, and its "
            "settings as optimizer__lr=0.01."
        )
    if not settings:
        return optimizer
    arguments: Dict[str, Any] = dict(settings)
    make = optimizer
    if isinstance(optimizer, str):
        make = class_by_name(optimizer)
        for name, value in settings_by_name(make).items():
            arguments.setdefault(name, value)
    if not callable(make):
        raise OptimizerError(
            f"optimizer must be a name, a class or a callable of parameters, got {optimizer!r}. "
            "Pass for example optimizer='adam'."
        )
    try:
        inspect.signature(make).bind([], **arguments)
    except TypeError as error:
        raise OptimizerError(
            f"optimizer__ parameters must be arguments of {getattr(make, '__name__', make)}, got "
            f"{', '.join(arguments)} ({error}). Use names from its signature."
        ) from error
    return lambda params: make(params, **arguments)
