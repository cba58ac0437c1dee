"""The state of a training run in a checkpoint, and how a new ``fit`` takes it over."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Dict, FrozenSet, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ipufit._version import __version__
from ipufit.callbacks import Callback
from ipufit.callbacks.running_fit import Measurement, ObservedSession, RunningFit
from ipufit.checkpoint import rng_state
from ipufit.checkpoint.configuration import (
    Configuration,
    ConfigurationChange,
    RunData,
    changes_between,
    compiled_configuration,
    configuration_name,
    data_configuration,
    is_changeable,
    lines_of,
    mutable_configuration,
)
from ipufit.checkpoint.export_weights import merge, split
from ipufit.checkpoint.optimizers import check_optimizer, optimizer_differences
from ipufit.checkpoint.reading import Contents
from ipufit.checkpoint.store import Store
from ipufit.core.batch import DataCursor
from ipufit.core.weights_file import differences
from ipufit.engines.program import TrainState
from ipufit.errors import CheckpointError, ConfigurationError
from ipufit.metrics import MetricSet
from ipufit.optim.schedules import settings
from ipufit.processes import Processes
from ipufit.utils.codec import decode, encode
from ipufit.utils.console import warn_user

__all__ = ["RestoredState", "RunConfiguration", "checkpoint_contents", "loop_state", "restore"]

_KIND = "training"
_PARTS = (
    *("meter", "history", "callbacks", "random", "optimizer", "averages", "others"),
    *("replicas", "loss_scale", "schedule", "place", "choices"),
)
_SHOWN = 40
# What belongs to a whole pass over the data, and can't change within one.
_BETWEEN_PASSES = frozenset(("data", "metrics", "shuffle"))

Groups = Dict[str, Dict[str, Tensor]]


def loop_state(fit: RunningFit, callbacks: Sequence[Callback]) -> Dict[str, Any]:
    """All that is not of the program: where meter, history and callbacks stand."""
    return {
        "meter": fit.job.meter.state_dict(),
        "history": fit.history.state_dict(),
        "callbacks": [[type(each).__name__, each.state_dict()] for each in callbacks],
        "random": rng_state.stored(),
    }


def checkpoint_contents(
    fit: RunningFit,
    session: ObservedSession,
    callbacks: Sequence[Callback],
    about: Mapping[str, Any],
) -> Tuple[Dict[str, Any], Groups]:
    """The document and the tensors of a checkpoint."""
    state = fit.job.program.read_state()
    weights, others = split(session.module, state)
    place = fit.place if about["in_epoch"] else fit.feed.after(about["epoch"], fit.place)
    tree = {
        **loop_state(fit, callbacks),
        "optimizer": state.optimizer,
        "averages": state.averages,
        "others": others,
        "replicas": state.buffers[1:],
        "loss_scale": state.loss_scale,
        "schedule": state.schedule,
        "place": None if place is None else dataclasses.asdict(place),
        "choices": session.engine.choices(),
    }
    tree["apart"] = _apart(session.processes, tree)
    content, tensors = encode(tree)
    plan = fit.job.plan
    document = {
        "kind": _KIND,
        "ipufit": __version__,
        "torch": torch.__version__,
        "engine": session.engine.name,
        "optimizer": type(session.optimizer).__name__,
        "module": type(session.module).__name__,
        "seed": state.seed,
        "updates": state.updates,
        "update_size": plan.update_size,
        "micro_batch_size": plan.micro_batch_size,
        "replicas": plan.all_replicas,
        "samples": plan.samples,
        "divides": fit.shards_data,
        "content": content,
        **about,
    }
    return document, {"weights": weights, "state": tensors}


def _apart(processes: Processes, tree: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """Return the state that each process after the first has for itself."""
    parts = {name: tree[name] for name in ("random", "place", "choices")}
    return processes.gather({**parts, "metrics": tree["meter"]["metrics"]}, "checkpoint")[1:]


@dataclasses.dataclass(frozen=True)
class RestoredState:
    """A checkpoint that was read and checked, for a fit that goes on from it.

    Attributes:
        name: of the checkpoint.
        document: what is JSON in it.
        weights: by the module's names.
        tree: all else.
    """

    name: str
    document: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    tree: Mapping[str, Any]

    @staticmethod
    def of(store: Store, name: str) -> RestoredState:
        """Read and check a checkpoint.

        Raises:
            CheckpointError: it can't be read, or is no checkpoint of a training run.
        """
        return RestoredState.from_contents(store, name, store.read(name))

    @staticmethod
    def from_contents(store: Store, name: str, contents: Contents) -> RestoredState:
        """Make one of contents that were read already.

        Raises:
            CheckpointError: it is no checkpoint of a training run.
        """
        document = contents.document
        try:
            if document["kind"] != _KIND:
                raise ValueError(f"its kind is {document['kind']!r}")
            # In memory of their own: what was read is mapped from files that will be removed.
            tensors = {name: each.clone() for name, each in contents.tensors["state"].items()}
            tree = decode(document["content"], tensors)
            return _checked(RestoredState(name, document, contents.tensors["weights"], tree))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{name!r} in {store.folder!r} must be a checkpoint of a training run, but it is "
                f"none ({type(error).__name__}: {error}). Pass a folder that fit(checkpoint=) has "
                "written."
            ) from error

    @property
    def epoch(self) -> int:
        """The epoch that the next update belongs to, or would."""
        epoch: int = self.document["epoch"]
        return epoch if self.in_epoch else epoch + 1

    @property
    def in_epoch(self) -> bool:
        """True if the epoch has begun."""
        return bool(self.document["in_epoch"])

    @property
    def is_within_data(self) -> bool:
        """Say whether a pass over the data has begun, and is not over."""
        place = self.tree["place"]
        return self.in_epoch or (place is not None and bool(place["batches"]))

    @property
    def is_over(self) -> bool:
        """True if a callback stopped the run, which so has nothing to go on with."""
        return bool(self.document["stopped"])

    @property
    def seed(self) -> int:
        """The seed with which the run began."""
        seed: int = self.document["seed"]
        return seed

    @property
    def run(self) -> Mapping[str, Any]:
        """Values that belong to the run as a whole."""
        run: Mapping[str, Any] = self.document["run"]
        return run

    @property
    def best(self) -> Mapping[str, Any]:
        """Name and value of the best checkpoint so far."""
        best: Mapping[str, Any] = self.document["best"]
        return best

    def apart(self, processes: Processes) -> Mapping[str, Any]:
        """Return this process' own state, or the first one's where their number has changed."""
        each: List[Mapping[str, Any]] = [self.tree, *self.tree.get("apart", [])]
        return each[processes.process_id if len(each) == processes.num_processes else 0]

    def check_divided(self, processes: Processes, divides: bool) -> None:
        """Make sure that it is known which process goes on with which data.

        Args:
            processes: those of now.
            divides: whether ipufit divides the data among them.

        Raises:
            CheckpointError: it is not.
        """
        before, now = 1 + len(self.tree.get("apart", [])), processes.num_processes
        both = self.document.get("divides", True) and divides
        place = self.tree["place"]
        if before == now or place is None or (both and place["own"] is None):
            return
        raise CheckpointError(
            f"the checkpoint {self.name!r} is of {before} processes, and the data that says itself "
            f"what each reads can't be divided anew among {now}. Start {before} of them, or pass "
            "data that ipufit divides."
        )

    def meter(self, metrics: MetricSet, processes: Processes) -> Dict[str, Any]:
        """Return the state in which the meter of this process goes on within the epoch.

        Args:
            metrics: know how to join what several have seen.
            processes: those of now.
        """
        meter = {**self.tree["meter"]}
        states = [meter["metrics"], *(each["metrics"] for each in self.tree.get("apart", []))]
        if len(states) == processes.num_processes:
            meter["metrics"] = states[processes.process_id]
        elif processes.is_rank_zero:
            meter["metrics"] = metrics.merge_states(states)
        else:
            meter["metrics"] = metrics.fresh().state_dict()
        return meter

    def choices(self, processes: Processes) -> Any:
        """Return the kernel choices that were measured to be the fastest."""
        return self.apart(processes)["choices"]

    @property
    def described(self) -> Dict[str, Any]:
        """The entry of History for a run that goes on from here."""
        place = self.tree["place"]
        data = "read again up to there" if self.in_epoch else "from the start of an epoch"
        if place is not None and place["own"] is not None:
            data = "by its own state"
        return {"checkpoint": self.name, "update": self.done, "epoch": self.epoch, "data": data}

    @property
    def done(self) -> int:
        """Updates that the run had made when the checkpoint was written."""
        done: int = self.document["updates"] - self.run["first_update"]
        return done


def _checked(checkpoint: RestoredState) -> RestoredState:
    """Return a checkpoint whose parts all have the right form.

    Raises:
        ValueError, TypeError, KeyError: something has not.
    """
    document, tree = checkpoint.document, checkpoint.tree
    whole = ("epoch", "seed", "updates", "update_size", "micro_batch_size", "replicas")
    for name in whole:
        # Before the first epoch there is none.
        least = -1 if name == "epoch" else 0
        if type(document[name]) is not int or document[name] < least:
            raise ValueError(f"{name} is {document[name]!r}")
    for name in ("in_epoch", "stopped"):
        if type(document[name]) is not bool:
            raise ValueError(f"{name} is {document[name]!r}")
    if (
        type(checkpoint.run["first_update"]) is not int
        or type(checkpoint.run["first_epoch"]) is not int
    ):
        raise ValueError("the run has no beginning")
    best = checkpoint.best
    if not isinstance(best["name"], (str, type(None))) or type(best["value"]) not in (
        float,
        type(None),
    ):
        raise ValueError(f"its best is {best!r}")
    for name in _PARTS:
        tree[name]
    for each in tree.get("apart", []):
        for name in ("random", "place", "choices", "metrics"):
            each[name]
    _check_configuration(document)
    choices = tree["choices"] or {}
    if not all(type(each) is str for pair in choices.items() for each in pair):
        raise ValueError("its choices are no names")
    check_optimizer(tree["optimizer"])
    return checkpoint


def _check_configuration(document: Mapping[str, Any]) -> None:
    """Make sure that it has the form in which a checkpoint holds it, if it holds any.

    Raises:
        ValueError, TypeError, KeyError: it has not.
    """
    configuration = document.get("configuration")
    if configuration is not None:
        for part in (configuration["begin"], configuration["last"]):
            if not isinstance(part, dict):
                raise ValueError("its configuration has no names")
    changes = document.get("changes", [])
    if not isinstance(changes, list) or not all(
        isinstance(each["change"], str) for each in changes
    ):
        raise ValueError("what was changed in its run is no list of texts")


@dataclasses.dataclass
class RunConfiguration:
    """The configuration that a run began with, as its checkpoints hold it.

    Attributes:
        begin: see :mod:`ipufit.checkpoint.configuration`.
        changes: what was changed on purpose where the run went on.
    """

    begin: Configuration = dataclasses.field(default_factory=dict)
    changes: List[Dict[str, Any]] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(session: ObservedSession, data: RunData, job: Measurement) -> RunConfiguration:
        """Return the configuration of a run that begins.

        Args:
            session: what ``compile`` fixed.
            data: what ``fit`` reads.
            job: the training, with its first micro-batch, and its metrics: of those of a
                LightningModule the session would begin an epoch.
        """
        begin = {
            **compiled_configuration(session.config, session.loss, job.meter.metrics),
            **data_configuration(data, job.first),
            **_mutable(session),
        }
        return RunConfiguration(begin)

    def document(self, session: ObservedSession) -> Dict[str, Any]:
        """Return the part of a checkpoint that says how its run is configured, as plain JSON.

        It has the configuration at the beginning, and what callbacks have changed since then.
        """
        now = _mutable(session)
        last = {name: value for name, value in now.items() if value != self.begin.get(name)}
        return {"configuration": {"begin": self.begin, "last": last}, "changes": self.changes}

    def changes_since(self, checkpoint: RestoredState) -> List[ConfigurationChange]:
        """Return how this run's configuration differs from the one that wrote a checkpoint."""
        stored = checkpoint.document.get("configuration")
        if stored is None:
            warn_user(
                f"the checkpoint {checkpoint.name!r} is of an older ipufit and does not say how "
                "its run was configured: that loss, optimizer settings, data and module are the "
                "same is not checked, and the optimizer settings are those of the checkpoint.",
            )
            return []
        same_torch = checkpoint.document["torch"] == torch.__version__
        return changes_between(stored["begin"], stored["last"], self.begin, same_torch)

    def adopt(self, checkpoint: RestoredState, changes: Sequence[ConfigurationChange]) -> None:
        """Go on with the configuration of a checkpoint, but for what has changed on purpose."""
        stored = checkpoint.document.get("configuration")
        names = {configuration_name(change.name) for change in changes}
        if stored is not None:
            carried = {n: value for n, value in stored["begin"].items() if n not in names}
            self.begin = {**self.begin, **carried}
        entries = [{"update": checkpoint.done, "change": line} for line in lines_of(changes)]
        self.changes = [*checkpoint.document.get("changes", []), *entries]


def _mutable(session: ObservedSession) -> Configuration:
    optimizer = session.optimizer
    assert optimizer is not None
    return mutable_configuration(session.module, optimizer, session.config.schedule)


def _check_fits(
    checkpoint: RestoredState,
    state: TrainState,
    fit: RunningFit,
    session: ObservedSession,
    callbacks: Sequence[Callback],
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
    if "loss" not in allowed:
        faults += differences(others, checkpoint.tree["others"], where, widens=False)
    pairs: List[Tuple[str, Any, Any]] = [
        ("optimizer", document["optimizer"], type(session.optimizer).__name__),
        ("samples of an update", document["update_size"], job.plan.update_size),
        ("batch_size", document["micro_batch_size"], job.plan.micro_batch_size),
    ]
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
    if document["optimizer"] != type(session.optimizer).__name__:
        changes = [each for each in changes if configuration_name(each.name) != "hyperparameters"]
    refused = [change for change in changes if change.name not in allowed]
    faults += lines_of(refused)
    if checkpoint.is_within_data:
        early = sorted({change.name for change in changes} & _BETWEEN_PASSES & allowed)
        faults += [
            f"{name}: it can change where an epoch has ended, not within one" for name in early
        ]
    if not faults:
        notes = settings.NOTES if "lr_scheduler" in allowed else ()
        faults = optimizer_differences(session.optimizer, checkpoint.tree["optimizer"], notes)
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        lines = "\n".join(f"  {line}" for line in [*faults[:_SHOWN], *more])
        changeable = {change.name for change in refused if is_changeable(change, session.groups)}
        meant = f"resume_changes={{{', '.join(map(repr, sorted(changeable)))}}}"
        advice = f" To go on with other settings from here, pass {meant}." if changeable else ""
        raise CheckpointError(
            f"the checkpoint {checkpoint.name!r} must be of the run that goes on, but they "
            f"differ:\n{lines}\nPass the same model, data and arguments, or another folder to "
            f"begin anew.{advice}"
        )


def restore(
    checkpoint: RestoredState,
    fit: RunningFit,
    session: ObservedSession,
    callbacks: Sequence[Callback],
    changes: Sequence[ConfigurationChange] = (),
    allowed: FrozenSet[str] = frozenset(),
) -> None:
    """Bring everything to where it stood, but for what has changed on purpose.

    Args:
        checkpoint: that the run goes on from.
        fit: that goes on.
        session: of the model.
        callbacks: the user's.
        changes: how the configuration differs from that of the checkpoint.
        allowed: names of what may differ.

    Raises:
        CheckpointError: the checkpoint is of something else, and nothing has changed; or, made by
            somebody else than ipufit, it has parts that nobody can take over.
    """
    tree, job = checkpoint.tree, fit.job
    checkpoint.check_divided(session.processes, fit.shards_data)
    state = job.program.read_state()
    _check_fits(checkpoint, state, fit, session, callbacks, changes, allowed)
    changed = frozenset(change.name for change in changes)
    try:
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
            fit.feed.seek(fit.place, job.meter.updates, checkpoint.done)
        rng_state.restore(process_state["random"])
    except (CheckpointError, ConfigurationError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint.name!r} has parts that can't be taken over "
            f"({type(error).__name__}: {error}). Go on from another one."
        ) from error


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


def _place(state: Mapping[str, Any]) -> DataCursor:
    number, batches = state["number"], state["batches"]
    if type(number) is not int or type(batches) is not int or min(number, batches) < 0:
        raise ValueError(f"its place in the data is {number!r}, {batches!r}")
    return DataCursor(number, batches, list(state["generators"]), state["own"])


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
) -> Tuple[Dict[str, Any], Any]:
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
        schedule.advance_to(before["updates"], before["epochs"])
        state = None
    groups = [
        {
            name: copy.deepcopy(value) if name in taken_over or name not in stored else stored[name]
            for name, value in group.items()
            if name != "params"
        }
        for stored, group in zip(optimizer["param_groups"], session.groups)
    ]
    for stored, group in zip(optimizer["param_groups"], groups):
        group["params"] = stored["params"]
    return {**optimizer, "param_groups": groups}, state
