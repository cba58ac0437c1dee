"""Prediction, target and weights as losses and metrics take them: order, shapes, descriptions.

torch calls with (input, target), Keras and scikit-learn with (y_true, y_pred). Called the wrong way
round, most functions return a number all the same. So the names of its parameters decide.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Literal,
    Mapping,
    Optional,
    Pattern,
    Sequence,
    Tuple,
    Type,
)

import torch
from torch import Tensor, nn

from ipufit.core.outputs import describe_value
from ipufit.errors import ConfigurationError

_Role = Literal["prediction", "target"]
_ROLES: Tuple[_Role, _Role] = ("prediction", "target")

# Words of parameter names. Those of the first row decide over those of the second: labels_pred and
# est_targets are predictions, true_labels a target.
_WORDS: Tuple[Dict[_Role, Pattern[str]], ...] = (
    {
        "prediction": re.compile(
            "preds?|predicted|predictions?|ypred|y?hat|est|estimates?|estimated"
            "|recon|reconstructed|reconstructions?|student"
        ),
        "target": re.compile("true|ytrue|truth|gt|original|teacher"),
    },
    {
        "prediction": re.compile("inp|inputs?|out|outputs?|logits?|scores?|probs?|proba"),
        "target": re.compile("tgt|targs?|targets?|labels?|expected"),
    },
)
# Usual abbreviations of (target, prediction), which may as well be something else.
_DOUBTFUL = frozenset({("t", "p"), ("t", "y"), ("y", "p")})
# Words that change nothing of what a parameter is.
_ADJECTIVES = frozenset({"log", "y"})
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


@dataclasses.dataclass(frozen=True)
class ArgumentOrder:
    """Order in which a loss or metric function takes prediction and target.

    Attributes:
        first: the role of the first of its two parameters.
        keywords: names of the two, where they can be passed by name alone; None by position.
    """

    first: _Role = "prediction"
    keywords: Tuple[Optional[str], Optional[str]] = (None, None)

    def call(
        self,
        function: Callable[..., object],
        prediction: object,
        target: object,
        /,
        **more: object,
    ) -> Any:
        """Call the function with prediction and target where it takes them.

        Args:
            function: with two parameters for them.
            prediction, target: of a micro-batch.
            more: further arguments by name, such as ``sample_weight``.
        """
        values = (prediction, target) if self.first == "prediction" else (target, prediction)
        pairs = list(zip(self.keywords, values))
        more.update((name, value) for name, value in pairs if name is not None)
        return function(*(value for name, value in pairs if name is None), **more)


PREDICTION_FIRST = ArgumentOrder()


def argument_order(
    function: Callable[..., object],
    subject: str,
    error: Type[ConfigurationError] = ConfigurationError,
) -> ArgumentOrder:
    """Find the order in which a callable takes prediction and target.

    Names such as ``y_true``, ``targets``, ``labels`` or ``y_pred``, ``input``, ``logits`` of its
    first two parameters say it; where one has such a name, the other parameter has the other role.
    Names that say nothing, and callables without a signature, are called as
    ``(prediction, target)``. A decorated function counts by the names of its wrapper, or by those
    of the function inside where the wrapper's say nothing.

    Args:
        function: a module, a function or an object with ``__call__``.
        subject: what it is, for messages, such as ``"loss 'distance'"``.
        error: raised where the order is ambiguous.

    Raises:
        ConfigurationError: both names say the same, or contradict what they usually abbreviate, or
            the parameters can be passed by name alone and their names say nothing.
    """
    call = function.forward if isinstance(function, nn.Module) else function
    by_name = ArgumentOrder()
    for parameters in _parameters(call):
        names = [parameter.name for parameter in parameters]
        roles = [_role(name) for name in names]
        keywords = [p.name if p.kind is _BY_NAME else None for p in parameters]
        shown = f"({', '.join(names)})"
        if tuple(names) in _DOUBTFUL:
            raise error(_text(subject, f"{shown}, which might be (target, prediction)"))
        if roles[0] is not None and roles[0] == roles[1]:
            raise error(_text(subject, f"{shown}, which both name a {roles[0]}"))
        by_name = dataclasses.replace(by_name, keywords=(keywords[0], keywords[1]))
        for role, other in (_ROLES, _ROLES[::-1]):
            if roles[0] == role or (roles[0] is None and roles[1] == other):
                return dataclasses.replace(by_name, first=role)
        if all(keywords):
            raise error(_text(subject, f"{shown} only by name, which do not tell them"))
    return by_name


def is_running_metric(value: object) -> bool:
    """Say whether a value is an object like ``keras.metrics.Metric``, which accumulates batches."""
    return all(callable(getattr(value, name, None)) for name in ("update_state", "result"))


def _parameters(call: Callable[..., object]) -> Iterator[List[inspect.Parameter]]:
    """Yield the two parameters for prediction and target, of a wrapper and of what it wraps.

    A callable without two of them, or whose signature can't be read, yields nothing.
    """
    for follow_wrapped in (False, True):
        every = _every_parameter(call, follow_wrapped)
        chosen = [p for p in every if p.kind in _POSITIONAL][:2]
        chosen += [p for p in every if p.kind is p.VAR_POSITIONAL and len(chosen) == 1]
        # A partial with keywords leaves what follows these to be passed by name.
        chosen += [p for p in every if p.kind is _BY_NAME and p.default is p.empty]
        if len(chosen) >= 2:
            yield chosen[:2]


def _every_parameter(
    call: Callable[..., object], follow_wrapped: bool = True
) -> List[inspect.Parameter]:
    """Parameters of a callable; none where Python does not tell them."""
    try:
        signature = inspect.signature(call, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return []
    return list(signature.parameters.values())


def keyword_names(call: Callable[..., object]) -> Tuple[str, ...]:
    """List the parameters that can be passed by name; () where the signature can't be read."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, _BY_NAME)
    return tuple(p.name for p in _every_parameter(call) if p.kind in by_name)


def required_names(call: Callable[..., object]) -> Tuple[str, ...]:
    """List the parameters that have no default, in order; () where the signature can't be read."""
    required = (p for p in _every_parameter(call) if p.default is p.empty)
    return tuple(p.name for p in required if p.kind in (*_POSITIONAL, _BY_NAME))


def _role(name: str) -> Optional[_Role]:
    """Return the role that a parameter's name implies; None where it implies none, or both."""
    words = {word.lower() for word in _WORD.findall(name)}
    for row in _WORDS:
        roles = [role for role in _ROLES if any(map(row[role].fullmatch, words))]
        if len(roles) == 1:
            return roles[0]
        if roles:
            return None
    return None


def _text(subject: str, came: str) -> str:
    return (
        f"{subject} must have parameter names that tell the prediction from the target, got "
        f"{came}. Name them prediction and target, or pass a function (prediction, target) that "
        "calls it with its arguments in the right order."
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype without ``torch.`` before it."""
    return str(dtype).replace("torch.", "")


def describe_tensor(value: object) -> str:
    """Describe a tensor as ``shape (8, 10), dtype float32``, anything else by its type's name."""
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}, dtype {dtype_name(value.dtype)}"
    return type(value).__name__


def describe(value: object) -> str:
    """Describe a value in the words of a sentence."""
    if isinstance(value, Tensor):
        return f"a tensor of {describe_tensor(value)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {[str(key) for key in value]}"
    if isinstance(value, (tuple, list)) and value:
        return f"{type(value).__name__} of {len(value)}, the last {describe(value[-1])}"
    return type(value).__name__


def role_by_whole_name(name: str) -> Optional[_Role]:
    """Return the role that a parameter is called after; None of ``input_lengths`` and the like."""
    role = _role(name)
    if role is None:
        return None
    words = {word.lower() for word in _WORD.findall(name)} - _ADJECTIVES
    return role if all(any(row[role].fullmatch(w) for row in _WORDS) for w in words) else None


def shape_advice(prediction: Tensor, target: Tensor) -> str:
    """Advise, in a sentence, how to make two shapes equal."""
    dim = _extra_dim(prediction.shape, target.shape)
    if dim:
        return f"Pass target.unsqueeze({dim}), or return prediction.squeeze({dim})."
    dim = _extra_dim(target.shape, prediction.shape)
    if dim:
        return f"Pass target.squeeze({dim}), or return prediction.unsqueeze({dim})."
    return "Make both shapes equal."


def _extra_dim(wide: Sequence[int], narrow: Sequence[int]) -> int:
    """Find the dimension of size one that ``wide`` has more than ``narrow``; 0 when there is none.

    Dimension 0 is the batch and never too many: of (1, 1) and (1,) it is the last one.
    """
    for dim in range(len(wide) - 1, 0, -1):
        if wide[dim] == 1 and [*wide[:dim], *wide[dim + 1 :]] == list(narrow):
            return dim
    return 0


def fit_values(prediction: Tensor, target: Tensor) -> Tensor:
    """Give the target the prediction's shape, if a last dimension of size one is all that differs.

    torch would broadcast (batch, 1) against (batch,) to (batch, batch). Nothing is copied.
    """
    return _fit(target, prediction.shape)


def fit_indices(prediction: Tensor, target: Tensor) -> Tensor:
    """Drop a last dimension of size one from class indices where the prediction has none.

    Args:
        prediction: shape (batch, classes, ...).
        target: integers of shape (batch, ..., 1); others are returned as they are.
    """
    is_integer = not (target.is_floating_point() or target.is_complex())
    if not is_integer or prediction.dim() < 2 or target.shape == prediction.shape:
        return target
    return _fit(target, prediction.shape[:1] + prediction.shape[2:])


def _fit(target: Tensor, shape: Sequence[int]) -> Tensor:
    """Add or drop a last dimension of size one, if that gives the target a shape.

    Keras looks at the last dimension alone, too.
    """
    shape = list(shape)
    if shape and list(target.shape) == [*shape, 1]:
        return target.squeeze(-1)
    if target.dim() and [*target.shape, 1] == shape:
        return target.unsqueeze(-1)
    return target


def as_weights(weight: object, kind: Type[ConfigurationError]) -> Tensor:
    """Make sure that weights are one real tensor.

    Args:
        weight: what came as sample_weight.
        kind: of the error.

    Returns:
        The weights without gradient, with (batch, 1) made (batch,), as Keras does.

    Raises:
        ConfigurationError: of that kind; anything else.
    """
    if not isinstance(weight, Tensor):
        raise kind(
            f"sample_weight must be one tensor of shape (batch,), got {describe_value(weight)}. "
            "A dict or list of weights is for losses or metrics by output."
        )
    if weight.is_complex() or not weight.dim():
        raise kind(
            "sample_weight must hold one real number for each sample, got shape "
            f"{tuple(weight.shape)}, dtype {dtype_name(weight.dtype)}. Pass a tensor of shape "
            "(batch,)."
        )
    flat = weight.dim() == 2 and weight.shape[1] == 1
    return weight.detach().reshape(-1) if flat else weight.detach()


def spread_shape(weight: Tensor, shape: Sequence[int]) -> bool:
    """True if the weights have the leading dimensions of ``shape``."""
    return tuple(weight.shape) == tuple(shape[: weight.dim()])


def broadcast_weights(
    weight: Tensor, shape: Sequence[int], where: str, kind: Type[ConfigurationError]
) -> Tensor:
    """View weights so that they multiply values of some shape.

    Args:
        weight: shape (batch,), or more leading dimensions of ``shape``.
        shape: of the values.
        where: whose values, for the message: ``"loss 'mse'"``.
        kind: of the error.

    Returns:
        A view of shape (*weight.shape, 1, ..., 1), with as many dimensions as ``shape``.

    Raises:
        ConfigurationError: of that kind; other dimensions.
    """
    if not spread_shape(weight, shape):
        more = f", or leading dimensions of its values' shape {tuple(shape)}"
        raise kind(
            f"sample_weight must have shape ({shape[0]},) for "
            f"{where}{more if len(shape) > 1 else ''}, got {tuple(weight.shape)}. Pass one "
            "weight for each sample."
        )
    return weight.reshape(tuple(weight.shape) + (1,) * (len(shape) - weight.dim()))


def total(weight: Tensor) -> Tensor:
    """The sum of all weights, shape (), float64."""
    return weight.sum(dtype=torch.float64)
