"""Let a run go on from a checkpoint: compare the two, then bring everything to where it stood."""

from __future__ import annotations

import copy
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.callbacks import Callback
from ipufit.callbacks.callback_list import ObservedSession, RunningFit
from ipufit.checkpoint.configuration import (
    ELSEWHERE,
    ConfigurationChange,
    changeable_names,
    configuration_name,
    lines_of,
)
from ipufit.checkpoint.files import Document
from ipufit.checkpoint.training_state import NUMBERS, RestoredState, load_generators, merge, split
from ipufit.core.batch import DataCursor
from ipufit.core.weights_file import differences
from ipufit.engines.program import TrainState
from ipufit.errors import CheckpointError, ConfigurationError
from ipufit.optim.rules import rules_for
from ipufit.optim.schedules import settings
from ipufit.optim.several import members_of, name_of_optimizer
from ipufit.utils.console import warn_user

_SHOWN = 40
# Attributes of modules that a checkpoint has as they are.
_PLAIN = ((bool,), (int, float), (str,))
# What belongs to a whole pass over the data, and can't change within one.
_BETWEEN_PASSES = frozenset(("data", "metrics", "shuffle"))


def restore(
    checkpoint: RestoredState,
    fit: RunningFit,
    session: ObservedSession,
    callbacks: Sequence[Callback],
    begun: Document,
    changes: Sequence[ConfigurationChange] = (),
    allowed: FrozenSet[str] = frozenset(),
) -> None:
    """Bring everything to where it stood, but for what has changed on purpose.

    Args:
        checkpoint: that the run goes on from.
        fit: that goes on.
        session: of the model.
        callbacks: the user's.
        begun: the configuration that this run has begun with.
        changes: how the configuration differs from that of the checkpoint.
        allowed: names of what may differ.

    Raises:
        CheckpointError: the checkpoint is of something else, and nothing has changed; or, made by
            somebody else than ipufit, it has parts that nobody can take over.
    """
    tree, job = checkpoint.tree, fit.job
    checkpoint.check_divided(session.processes, fit.shards_data)
    state = job.program.read_state()
    try:
        left = _left_by_callbacks(checkpoint, begun)
        _check_fits(checkpoint, state, fit, session, callbacks, left, changes, allowed)
        changed = frozenset(change.name for change in changes)
        _restore_module(session.module, begun, left)
        _regroup(session, _groups_of(session, left))
        _restore_program(checkpoint, state, fit, session, changed)
        fit.history.load_state_dict(tree["history"])
        _restore_callbacks(callbacks, tree["callbacks"])
        processes = session.processes
        process_state = checkpoint.apart(processes)
        meter = checkpoint.meter(job.meter.metrics, processes)
        if checkpoint.in_epoch:
            job.meter.load_state_dict(meter)
        elif "metrics" not in changed:
            job.meter.metrics.load_lasting(meter["metrics"])
        if process_state["place"] is not None:
            fit.place = _place(process_state["place"])
            fit.pipeline.seek(fit.place, job.meter.updates, checkpoint.done)
        load_generators(process_state["random"])
    except (CheckpointError, ConfigurationError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint.name!r} has parts that can't be restored "
            f"({type(error).__name__}: {error}). Continue from another one."
        ) from error


def _check_fits(
    checkpoint: RestoredState,
    state: TrainState,
    fit: RunningFit,
    session: ObservedSession,
    callbacks: Sequence[Callback],
    left: Document,
    changes: Sequence[ConfigurationChange],
    allowed: FrozenSet[str],
) -> None:
    """Refuse a checkpoint of something else than has this state now.

    Raises:
        CheckpointError: with all that differs.
    """
    job, document, where = fit.job, checkpoint.document, "the checkpoint"
    weights, others = split(session.module, state)
    faults = differences(weights, checkpoint.weights, where, widens=False)
    pairs: List[Tuple[str, object, object]] = [
        ("optimizer", document["optimizer"], name_of_optimizer(session.optimizer)),
        ("samples of an update", document["update_size"], job.plan.update_size),
        ("batch_size", document["micro_batch_size"], job.plan.micro_batch_size),
    ]
    is_other_run = bool(faults) or any(before != now for _, before, now in pairs)
    if "loss" not in allowed:
        faults += differences(others, checkpoint.tree["others"], where, widens=False)
    if "data" not in allowed:
        pairs.append(("samples of the training data", document["samples"], job.plan.samples))
    faults += [
        f"{what}: {before!r} in the checkpoint, {now!r} now"
        for what, before, now in pairs
        if before != now
    ]
    names = [name for name, _ in checkpoint.tree["callbacks"]]
    called = ConfigurationChange(
        "callbacks", "", "", names, [type(each).__name__ for each in callbacks]
    )
    changes = [*([called] if called.was != called.now else []), *changes]
    if document["optimizer"] != name_of_optimizer(session.optimizer):
        changes = [each for each in changes if configuration_name(each.name) != "hyperparameters"]
    refused = [change for change in changes if change.name not in allowed]
    faults += lines_of(refused)
    if checkpoint.is_within_data:
        early = sorted({change.name for change in changes} & _BETWEEN_PASSES & allowed)
        faults += [
            f"{name}: it can change at the end of an epoch, not within one" for name in early
        ]
    if not faults:
        notes = settings.NOTES if "lr_scheduler" in allowed else ()
        faults = _optimizer_differences(
            session.optimizer,
            [group for groups in _groups_of(session, left).values() for group in groups],
            checkpoint.tree["optimizer"],
            notes,
        )
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        lines = "\n".join(f"  {line}" for line in [*faults[:_SHOWN], *more])
        changed = {change.name for change in refused}
        meant = f"resume_changes={{{', '.join(map(repr, sorted(changed)))}}}"
        can_go_on = changed and changed <= changeable_names(session.groups) and not is_other_run
        advice = f" To continue with other settings from here, pass {meant}." if can_go_on else ""
        raise CheckpointError(
            f"the checkpoint {checkpoint.name!r} must match the run that continues, but they "
            f"differ:\n{lines}\nPass the same model, data and arguments, or another folder to "
            f"start a new run.{advice}"
        )


def _left_by_callbacks(checkpoint: RestoredState, begun: Document) -> Document:
    """Return what callbacks had changed in a checkpoint's run, where this one has begun alike."""
    stored = checkpoint.document.get("configuration") or {"begin": {}, "last": {}}
    begin, last = stored["begin"], stored["last"]
    return {
        name: {
            key: value
            for key, value in last.get(name, {}).items()
            if begun[name].get(key) == begin.get(name, {}).get(key) != value
        }
        for name in ("groups", "modes", "modules", "requires_grad")
    }


def _restore_module(module: nn.Module, begun: Document, left: Document) -> None:
    """Bring modes, frozen parameters and plain attributes to where callbacks had brought them."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(left["requires_grad"].get(name, parameter.requires_grad))
    lost = []
    for name, each in module.named_modules():
        each.training = bool(left["modes"].get(name, each.training))
        for attribute, value in left["modules"].get(name, {}).items():
            if value == begun["modules"][name].get(attribute) or attribute not in vars(each):
                continue
            present = vars(each)[attribute]
            if any(type(present) in kinds and type(value) in kinds for kinds in _PLAIN):
                setattr(each, attribute, value)
            else:
                lost.append(f"{attribute!r} of {type(each).__name__}")
    if lost:
        warn_user(
            f"the run had changed {', '.join(lost)}, which a checkpoint does not restore: it has "
            "numbers and texts only. Let a callback's load_state_dict set it again."
        )


def _groups_of(session: ObservedSession, left: Document) -> Dict[str, List[Document]]:
    """The groups of each optimizer, with the parameters that callbacks had put into them."""
    parameters = list(session.module.parameters())
    assert session.optimizer is not None
    groups = {}
    for name, each in members_of(session.optimizer).items():
        places = left["groups"].get(name, [])
        if any(ELSEWHERE in inside for inside in places):
            places = []  # said of the sizes of the groups
        new = [dict(each.defaults) for _ in places[len(each.param_groups) :]]
        groups[name] = [*map(dict, each.param_groups), *new]
        for group, inside in zip(groups[name], places):
            group["params"] = [parameters[place] for place in inside]
    return groups


def _regroup(session: ObservedSession, groups: Mapping[str, List[Document]]) -> None:
    assert session.optimizer is not None
    for name, each in members_of(session.optimizer).items():
        for present, group in zip(each.param_groups, groups[name]):
            present["params"] = group["params"]
        for group in groups[name][len(each.param_groups) :]:
            each.add_param_group(group)


def _optimizer_differences(
    optimizer: Optional[torch.optim.Optimizer],
    groups: Sequence[Document],
    state: Document,
    left_out: Sequence[str],
) -> List[str]:
    """Return how the optimizer differs from a checkpoint's, a line for each difference.

    Args:
        optimizer: of now.
        groups: of its parameters, once callbacks' changes are made again.
        state: in the checkpoint.
        left_out: names of settings that come anew.
    """
    assert optimizer is not None
    stored = state["param_groups"]
    sizes, own_sizes = ([len(group["params"]) for group in each] for each in (stored, groups))
    if sizes != own_sizes:
        return [f"parameters of the optimizer's groups: {sizes} in the checkpoint, {own_sizes} now"]
    faults = []
    for number, (group, other) in enumerate(zip(groups, stored)):
        wrong = sorted(
            name
            for name in {*group, *other} - {"params", *left_out}
            if name not in group or name not in other or not _alike(group[name], other[name])
        )
        faults += [f"setting {name!r} of the optimizer's group {number}" for name in wrong]
    shapes = [parameter.shape for group in groups for parameter in group["params"]]
    places = [key for group in stored for key in group["params"]]
    by_place = dict(zip(places, shapes))
    # Others may have anything for each parameter: factors of a matrix, say.
    has_rule = all(rules_for(optimizer))
    for key, values in state["state"].items():
        for name, value in values.items():
            is_number = value is None or isinstance(value, NUMBERS)
            is_tensor = isinstance(value, Tensor) and value.shape in (by_place.get(key), ())
            if key not in by_place or (has_rule and not (is_number or is_tensor)):
                faults.append(f"{name!r} of the optimizer's parameter {key}")
    return faults


def _alike(one: object, other: object) -> bool:
    """Return True if two settings are of one kind; a rate may have become a tensor."""
    numbers = (*NUMBERS, Tensor)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return True
    return one is None or other is None or isinstance(other, type(one))


def _restore_program(
    checkpoint: RestoredState,
    state: TrainState,
    fit: RunningFit,
    session: ObservedSession,
    changed: FrozenSet[str],
) -> None:
    tree = checkpoint.tree
    tensors = merge(session.module, checkpoint.weights, tree["others"])
    replicas = tree["replicas"]
    if "loss" in changed:
        # A loss that is a module keeps its settings, such as weights of classes, in buffers.
        fresh = split(session.module, state)[1]
        tensors.update(fresh)
        replicas = [{**each, **fresh} for each in replicas]
    optimizer, schedule = _settings_after(checkpoint, session, changed)
    scale = None if "loss_scale" in changed else tree["loss_scale"]
    extra = {name: value for name, value in checkpoint.weights.items() if "_extra_state" in name}
    if extra:
        session.module.load_state_dict(extra, strict=False)
    first = {name: tensors[name] for name in state.buffers[0]}
    fit.job.program.write_state(
        TrainState(
            {name: tensors[name] for name in state.weights},
            [first, *replicas],
            optimizer,
            checkpoint.seed,
            checkpoint.document["updates"],
            {} if "use_ema" in changed else tree["averages"],
            None if scale is None else (scale[0], scale[1]),
            schedule,
        )
    )


def _settings_after(
    checkpoint: RestoredState, session: ObservedSession, changed: FrozenSet[str]
) -> Tuple[Document, Optional[Document]]:
    """The optimizer's state and that of the schedule, with the settings that are others now."""
    optimizer, state = checkpoint.tree["optimizer"], checkpoint.tree["schedule"]
    schedule, live = session.config.schedule, session.groups
    names = {name for group in live for name in group} - {"params"}
    hyperparameters = names & changed
    is_scheduled_anew = "lr_scheduler" in changed
    if not hyperparameters and not is_scheduled_anew:
        return optimizer, state
    if schedule is None:
        taken_over = names if is_scheduled_anew else hyperparameters
    elif schedule.follows_values:
        # What it has seen of the run is in the checkpoint, and only there.
        taken_over = hyperparameters
        if is_scheduled_anew:
            state = None
        else:
            new = [{n: group[n] for n in taken_over if n in group} for group in live]
            pairs = zip(state["settings"], map(settings.numbers_of, new))
            state = {**state, "settings": [{**stored, **current} for stored, current in pairs]}
    else:
        taken_over = names
        ended = checkpoint.epoch - checkpoint.run["first_epoch"]
        before = state or {"updates": checkpoint.document["updates"], "epochs": ended}
        schedule.advance_to(before["updates"], before["epochs"], (checkpoint.done, ended))
        state = None
    groups = [
        {
            name: copy.deepcopy(value) if name in taken_over or name not in stored else stored[name]
            for name, value in group.items()
        }
        for stored, group in zip(optimizer["param_groups"], live)
    ]
    return {**optimizer, "param_groups": groups}, state


def _restore_callbacks(callbacks: Sequence[Callback], states: Sequence[Tuple[str, object]]) -> None:
    """Let each callback go on from the state of the next one of its class, if there is one."""
    left = list(states)
    for callback in callbacks:
        names = [name for name, _ in left]
        if type(callback).__name__ not in names:
            continue
        _, state = left.pop(names.index(type(callback).__name__))
        if state is not None:
            callback.load_state_dict(state)


def _place(state: Document) -> DataCursor:
    number, batches = state["number"], state["batches"]
    if type(number) is not int or type(batches) is not int or min(number, batches) < 0:
        raise ValueError(f"its place in the data is {number!r}, {batches!r}")
    return DataCursor(number, batches, list(state["generators"]), state["own"])
