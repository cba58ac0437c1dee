"""Losses that a step of the user's own computes: which moves which parameters, when, how often."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from torch import Tensor, nn

from ipufit.core.batch import Mode
from ipufit.core.logged_values import LogRule, report
from ipufit.core.objective_arguments import describe
from ipufit.errors import ConfigurationError, LossError, unfit
from ipufit.losses.loss import Loss, OwnLoss, Turn
from ipufit.losses.named import check_loss_value
from ipufit.losses.rules import LossTerm
from ipufit.utils.error_collector import at_least, one_of
from ipufit.utils.names import check_log_name, matches_pattern

# Names of parameters, as one pattern or several; None for all that the optimizer has.
_Patterns = Union[str, Sequence[str], None]
# Under which a step hands out what metrics compare.
_OUTPUTS = "outputs"


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """Your own training step for ``compile(loss=...)``: losses, and the parameters of each.

    Several steps in a list run one after another in every update, each with the weights that the
    previous one has produced. Each processes all micro-batches of the update, on all replicas,
    before its parameters change. docs/own-steps.md has examples: GANs, actor and critic, SAM.

    Args:
        function: called with the module and a batch as the loader yields it. Returns the loss, a
            tensor of one element that is a mean over the batch, or a dict: losses by the names in
            ``moves``; other tensors of one element, which are logged; and "outputs", which metrics
            compare with the batch's second part, or with the field that ``targets`` of ``compile``
            names.
        moves: parameters that the loss trains: a name as in ``module.named_parameters()``, the name
            of a submodule, a pattern such as "encoder.*.weight", or a list of these. None trains
            all parameters of the optimizer. For several losses, a dict by their names; they take
            turns in its order, and the function runs again for each.
        every: run the step only in every so many updates, in the last of them.
        repeat: run the step so many times in an update, with different random numbers.
        at_once: compute several losses once, with the same weights, and update the parameters of
            each afterwards.

    Raises:
        ConfigurationError: an argument that can't work.
    """

    function: Callable[..., object]
    moves: Union[_Patterns, Mapping[str, _Patterns]] = None
    every: int = 1
    repeat: int = 1
    at_once: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, (type, nn.Module)):
            raise ConfigurationError(
                "TrainStep takes a function of (module, batch) that returns a loss or a dict of "
                f"losses, got {self.function!r}. Write for example TrainStep(lambda module, batch: "
                "module(batch[0]).mean())."
            )
        _check_signature(self.function)
        at_least("every", self.every, 1)
        at_least("repeat", self.repeat, 1)
        one_of("at_once", self.at_once, (True, False))
        names: List[str] = []
        if self.at_once and not isinstance(self.moves, Mapping):
            raise ConfigurationError(
                f"at_once=True is for several losses, named in moves, got moves={self.moves!r}. "
                "Write for example moves={'policy': 'actor', 'value': 'critic'}, or leave "
                "at_once out."
            )
        if isinstance(self.moves, Mapping):
            if not self.moves:
                raise ConfigurationError(
                    "moves must name at least one loss, got {}. Write for example "
                    "moves={'critic': 'critic', 'actor': 'actor'}."
                )
            for name in self.moves:
                names.append(name if name == "loss" else check_log_name(name, names))
            if _OUTPUTS in names:
                raise ConfigurationError(
                    "moves must name losses, got 'outputs', which is reserved for the outputs that "
                    "metrics compare. Rename the loss."
                )
        for patterns in self.by_loss.values():
            _check_patterns(patterns)

    @property
    def by_loss(self) -> Mapping[Optional[str], _Patterns]:
        """Patterns of the parameters of each loss, by its name; None names a single loss."""
        by_loss: Dict[Optional[str], _Patterns] = {}
        if isinstance(self.moves, Mapping):
            by_loss.update(self.moves.items())
        else:
            by_loss[None] = self.moves
        return by_loss


def _check_signature(function: Callable[..., object]) -> None:
    """Make sure that a function can be called with a module and a batch, where Python can tell.

    Raises:
        ConfigurationError: it can't.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"TrainStep takes a function of (module, batch), got {_name_of(function)}{signature}: "
            f"{error}. For a method of the module, pass the function, such as "
            "MyModule.training_step."
        ) from error


def _check_patterns(patterns: object) -> None:
    listed = [patterns] if isinstance(patterns, str) else patterns
    if listed is None:
        return
    if not isinstance(listed, (list, tuple)) or not listed:
        needed = "a name or a list of names of parameters, or a dict of these by loss"
        advice = "Write for example moves='critic', or moves={'critic': 'critic'}."
        raise unfit("moves", needed, patterns, advice)
    for pattern in listed:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigurationError(
                f"moves must name parameters with strings, got {pattern!r}. Write for example "
                "'critic', or 'critic.*.weight'."
            )


class _OfSteps(Loss):
    """Base of what calls steps of the user's own, which take the module and a whole batch."""

    differentiates = True

    def own_loss(self, mode: Mode) -> OwnLoss:
        """Tell that a batch goes to the steps as it is, but for predictions of the module."""
        return False if mode is Mode.PREDICT else "whole"


@dataclasses.dataclass(frozen=True, eq=False)
class TurnLoss(_OfSteps):
    """The losses that a step computes with the same weights, before it moves what they move.

    Attributes:
        moves: for each loss its name, None for the only one, and the patterns of what it moves.
        others: names of losses that have turns of their own.
        is_first: whether the step has its first turn, in which it logs values and hands out
            outputs.
    """

    moves: Tuple[Tuple[Optional[str], Optional[Tuple[str, ...]]], ...] = ()
    others: Tuple[str, ...] = ()
    is_first: bool = True

    @property
    def part_names(self) -> Tuple[str, ...]:
        """Names under which losses are logged beside their sum."""
        return tuple(name for name, _ in self.moves if name not in (None, "loss"))

    def call(
        self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call the step with the module and the batch, which is the only argument."""
        assert self.function is not None
        flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        try:
            return self.function(module, *args)
        finally:
            # Steps may freeze a part for their own time, as loops do.
            for parameter, flag in flags:
                if parameter.requires_grad != flag:
                    parameter.requires_grad_(flag)

    @property
    def description(self) -> str:
        """The step, its losses, and what they move."""
        losses = [
            f"{name!r} moves {'everything' if patterns is None else ', '.join(patterns)}"
            for name, patterns in ((name or "loss", patterns) for name, patterns in self.moves)
        ]
        return f"{self.name}, of which {' and '.join(losses)}"

    def moved(self, names: Sequence[str], index: Optional[int] = None) -> List[str]:
        """Choose, of these names of parameters, those that the loss, or one of several, moves."""
        chosen = self.moves if index is None else self.moves[index : index + 1]
        listed = [patterns for _, patterns in chosen]
        if None in listed:
            return list(names)
        patterns = [pattern for several in listed for pattern in several or ()]
        return [name for name in names if any(matches_pattern(name, each) for each in patterns)]

    def split(self, result: object) -> Tuple[object, LossTerm]:
        """Take apart what the step has returned, and log what is neither loss nor output.

        Raises:
            LossError: a loss is missing or no number, or there is something else.
        """
        where = f"what the step {self.name!r} returns"
        if not isinstance(result, Mapping):
            if len(self.moves) == 1 and self.moves[0][0] in (None, "loss") and not self.others:
                return None, LossTerm(check_loss_value(result, where))
            raise LossError(
                f"the step {self.name!r} must return a dict with {_listed(self._names)}, which "
                f"moves names, got {describe(result)}. Return each loss under its name."
            )
        values = dict(result)
        outputs = values.pop(_OUTPUTS, None)
        missing = [name for name in self._names if name not in values]
        if missing:
            raise LossError(
                f"the step {self.name!r} must return {_listed(self._names)}, got a dict of "
                f"{_listed(list(result))}. Return each loss under its name, or correct moves."
            )
        names = [name or "loss" for name, _ in self.moves]
        losses = [check_loss_value(values.pop(name), f"{name!r}, {where[5:]},") for name in names]
        for name, value in values.items():
            if name not in self.others:
                self._report(name, value)
        parts = {n: loss for n, loss in zip(names, losses) if n != "loss"}
        separate = tuple(losses) if len(losses) > 1 else ()
        return outputs, LossTerm(sum(losses[1:], losses[0]), None, parts, separate)

    @property
    def _names(self) -> List[str]:
        return [*(name or "loss" for name, _ in self.moves), *self.others]

    def _report(self, name: object, value: object) -> None:
        is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not is_number:
            raise LossError(
                f"the step {self.name!r} may return losses, tensors of one element, which are "
                f"logged, and 'outputs', got {describe(value)} for {name!r}. Reduce it, or put it "
                "into 'outputs'."
            )
        assert isinstance(value, Tensor)
        if self.is_first:
            report(check_log_name(name), value, LogRule())


@dataclasses.dataclass(frozen=True, eq=False)
class StepLosses(_OfSteps):
    """All turns of an update; called itself, for an evaluation, it computes each step once.

    Attributes:
        turns: of an update, in the order in which they are made.
    """

    turns: Tuple[Turn, ...] = ()

    @property
    def functions(self) -> Tuple[Callable[..., object], ...]:
        """Functions of the user's that the turns call."""
        return tuple(dict.fromkeys(f for turn in self.turns for f in turn.loss.functions))

    @property
    def part_names(self) -> Tuple[str, ...]:
        """Names under which losses are logged beside their sum."""
        return tuple(name for turn in self.turns for name in turn.loss.part_names)

    def call(
        self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call each step with the module and the batch: what each has returned."""
        firsts = {turn.step: turn.loss for turn in reversed(self.turns)}
        return [firsts[step].call(module, args, kwargs) for step in range(len(firsts))]

    def split(self, result: object) -> Tuple[object, LossTerm]:
        """Take apart what the steps have returned: outputs of the first that has any, their sum."""
        assert isinstance(result, list)
        outputs: object = None
        terms: List[LossTerm] = []
        for turn in self.turns:
            one, term = turn.loss.split(result[turn.step])
            outputs = one if outputs is None else outputs
            terms.append(term)
        parts = {name: part for term in terms for name, part in term.parts.items()}
        values = [term.value for term in terms]
        return outputs, LossTerm(sum(values[1:], values[0]), None, parts)


def resolve_steps(steps: Sequence[TrainStep], options: Mapping[str, Any]) -> Loss:
    """Bring steps of the user's own into normal form.

    Args:
        steps: in the order in which they are made.
        options: what else :class:`Loss` takes.

    Raises:
        ConfigurationError: losses of one name, or options that don't go with steps.
    """
    if options["normalize"] == "tokens":
        raise ConfigurationError(
            "normalize='tokens' needs a loss that returns its number of tokens, but a TrainStep "
            "returns means over samples. Leave it out."
        )
    turns: List[Turn] = []
    names: List[str] = []
    for index, step in enumerate(steps):
        listed = {name: _as_tuple(patterns) for name, patterns in step.by_loss.items()}
        for name in listed:
            if name is not None and name in names:
                raise ConfigurationError(
                    f"losses of several steps must have different names, got {name!r} twice. "
                    "Rename one, in moves and in what the step returns."
                )
            names += [name] if name is not None else []
        groups = [listed] if step.at_once else [{name: moved} for name, moved in listed.items()]
        for place, group in enumerate(groups):
            loss = TurnLoss(
                _name_of(step.function),
                function=step.function,
                in_module="whole",
                moves=tuple(group.items()),
                others=tuple(name for name in listed if name is not None and name not in group),
                is_first=place == 0,
                **options,
            )
            turns.append(Turn(loss, step.every, step.repeat, index))
    unnamed = any(name in (None, "loss") for step in steps for name in step.by_loss)
    if unnamed and sum(len(step.by_loss) for step in steps) > 1:
        raise ConfigurationError(
            "each of several losses must have its own name; History logs it under this name, and "
            "their sum as 'loss'. Write for example TrainStep(function, "
            "moves={'critic': 'critic'}), and return {'critic': loss}."
        )
    if all(step.every > 1 for step in steps):
        raise ConfigurationError(
            "at least one step must run in every update, got "
            f"every={', '.join(str(step.every) for step in steps)}. Give the most frequent one "
            "every=1, or gradient_accumulation= of fit for updates of more batches."
        )
    if len(turns) == 1 and steps[0].every == 1 and steps[0].repeat == 1:
        return turns[0].loss
    return StepLosses("the steps' losses", in_module="whole", turns=tuple(turns), **options)


def include_shared(loss: Loss, names: Mapping[str, Sequence[str]]) -> Loss:
    """Let patterns name a parameter that several parts of a module have by any of its names.

    Args:
        loss: of steps, in normal form.
        names: by the first name of each parameter all of them.
    """
    if loss.turns:
        assert isinstance(loss, StepLosses)
        turns = [dataclasses.replace(t, loss=include_shared(t.loss, names)) for t in loss.turns]
        return dataclasses.replace(loss, turns=tuple(turns))
    assert isinstance(loss, TurnLoss)
    moves = []
    for name, patterns in loss.moves:
        chosen: Dict[str, None] = {}
        for pattern in patterns or ():
            shared = [
                first
                for first, others in names.items()
                if not matches_pattern(first, pattern)
                and any(matches_pattern(each, pattern) for each in others)
            ]
            if not shared or any(matches_pattern(first, pattern) for first in names):
                chosen[pattern] = None
            chosen.update(dict.fromkeys(shared))
        moves.append((name, patterns and tuple(chosen)))
    return dataclasses.replace(loss, moves=tuple(moves))


def check_moves(loss: Loss, names: Sequence[str]) -> None:
    """Make sure that the losses of steps move all parameters of the optimizer, and nothing else.

    Args:
        loss: of steps, in normal form.
        names: of these parameters.

    Raises:
        ConfigurationError: a parameter is not moved, or what is to be moved is none of them.
    """
    left = set(names)
    for each in [turn.loss for turn in loss.turns] or [loss]:
        assert isinstance(each, TurnLoss)
        left.difference_update(_check_turn(each, names))
    if left:
        raise ConfigurationError(
            "each parameter of the optimizer must belong to some loss, but moves assigns none to "
            f"{_shortened([name for name in names if name in left])}. Name them in moves, or call "
            "requires_grad_(False) on them before compile."
        )


def _check_turn(loss: TurnLoss, names: Sequence[str]) -> Dict[str, Optional[str]]:
    """Return, by the names of the parameters that a turn moves, the loss that does so."""
    moved: Dict[str, Optional[str]] = {}
    for index, (name, patterns) in enumerate(loss.moves):
        where = f"of {name!r}" if name else f"of the step {loss.name!r}"
        for pattern in patterns or ():
            if not any(matches_pattern(each, pattern) for each in names):
                parts = list(dict.fromkeys(each.partition(".")[0] for each in names))
                raise ConfigurationError(
                    f"moves {where} must name trainable parameters of the optimizer, got "
                    f"{pattern!r}, which matches none. Name one of the parts {_listed(parts)}, or "
                    "parameters in them."
                )
        for parameter in loss.moved(names, index):
            if parameter in moved:
                raise ConfigurationError(
                    "losses that are computed at once must move different parameters, but "
                    f"{moved[parameter]!r} and {name!r} both move {parameter!r}. Add them up into "
                    "one loss, or let them take turns (at_once=False)."
                )
            moved[parameter] = name
    return moved


def _as_tuple(patterns: _Patterns) -> Optional[Tuple[str, ...]]:
    if patterns is None:
        return None
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _name_of(function: Callable[..., object]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))


def _shortened(names: Sequence[str]) -> str:
    return _listed(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
