"""The state of a training run in a checkpoint."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit._version import __version__
from ipufit.callbacks import Callback
from ipufit.callbacks.callback_list import ObservedSession, RunningFit
from ipufit.checkpoint.files import Contents, Document
from ipufit.checkpoint.store import Store
from ipufit.engines.program import TrainState
from ipufit.errors import CheckpointError
from ipufit.metrics.metric_set import MetricSet
from ipufit.optim.several import name_of_optimizer
from ipufit.processes import Processes
from ipufit.utils.codec import decode, encode
from ipufit.utils.state import generator_states, set_generators
from ipufit.utils.tree import flatten

_KIND = "training"
_PARTS = (
    *("meter", "history", "callbacks", "random", "optimizer", "averages", "others"),
    *("replicas", "loss_scale", "schedule", "place", "choices"),
)
NUMBERS = (bool, int, float)  # kinds of hyper-parameters

Named = Dict[str, Tensor]
Groups = Dict[str, Named]


def loop_state(fit: RunningFit, callbacks: Sequence[Callback]) -> Document:
    """All that is not of the program: where meter, history and callbacks stand."""
    return {
        "meter": fit.job.meter.state_dict(),
        "history": fit.history.state_dict(),
        "callbacks": [[type(each).__name__, each.state_dict()] for each in callbacks],
        "random": _stored_generators(),
    }


def checkpoint_contents(
    fit: RunningFit,
    session: ObservedSession,
    callbacks: Sequence[Callback],
    epoch: int,
    in_epoch: bool,
    about: Mapping[str, object],
) -> Tuple[Document, Groups]:
    """Collect the document and the tensors of a checkpoint.

    Args:
        fit: that is running.
        session: of the model.
        callbacks: whose state is stored.
        epoch: the present one.
        in_epoch: whether it is still going on.
        about: further entries of the document.
    """
    state = fit.job.program.read_state()
    weights, others = split(session.module, state)
    place = fit.place if in_epoch else fit.pipeline.after(epoch, fit.place)
    tree = {
        **loop_state(fit, callbacks),
        "optimizer": state.optimizer,
        "averages": state.averages,
        "others": others,
        "replicas": state.buffers[1:],
        "loss_scale": state.loss_scale,
        "schedule": state.schedule,
        "place": None if place is None else dataclasses.asdict(place),
        "choices": session.choices(),
    }
    tree["apart"] = _apart(session.processes, tree)
    content, tensors = encode(tree)
    plan = fit.job.plan
    document = {
        "kind": _KIND,
        "ipufit": __version__,
        "torch": torch.__version__,
        "engine": session.engine.name,
        "optimizer": name_of_optimizer(session.optimizer),
        "module": type(session.module).__name__,
        "seed": state.seed,
        "updates": state.updates,
        "update_size": plan.update_size,
        "micro_batch_size": plan.micro_batch_size,
        "replicas": plan.all_replicas,
        "samples": plan.samples,
        "divides": fit.shards_data,
        "content": content,
        "epoch": epoch,
        "in_epoch": in_epoch,
        **about,
    }
    return document, {"weights": weights, "state": tensors}


def _apart(processes: Processes, tree: Document) -> List[Document]:
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
    document: Document
    weights: Mapping[str, Tensor]
    tree: Document

    @staticmethod
    def of(store: Store, name: str, contents: Optional[Contents] = None) -> RestoredState:
        """Read and check a checkpoint.

        Args:
            store: has it.
            name: of it.
            contents: where they were read already.

        Raises:
            CheckpointError: it can't be read, or is no checkpoint of a training run.
        """
        contents = store.read(name) if contents is None else contents
        document = contents.document
        try:
            if document["kind"] != _KIND:
                raise ValueError(f"its kind is {document['kind']!r}")
            # In memory of their own: what was read is mapped from files that will be removed.
            tensors = {name: each.clone() for name, each in contents.tensors["state"].items()}
            tree = decode(document["content"], tensors)
            return _check_form(RestoredState(name, document, contents.tensors["weights"], tree))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{name!r} in {store.folder!r} must be a checkpoint of a training run, but it is "
                f"not ({type(error).__name__}: {error}). Pass a folder that fit(checkpoint=) has "
                "written."
            ) from error

    @property
    def epoch(self) -> int:
        """The epoch that the next update belongs to, or would."""
        return int(self.document["epoch"]) + (0 if self.in_epoch else 1)

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
        return int(self.document["seed"])

    @property
    def run(self) -> Document:
        """Values that belong to the run as a whole."""
        return dict(self.document["run"])

    @property
    def best(self) -> Document:
        """Name and value of the best checkpoint so far."""
        return dict(self.document["best"])

    def apart(self, processes: Processes) -> Document:
        """Return this process' own state, or the first one's where their number has changed."""
        states: List[Document] = [self.tree, *self.tree.get("apart", [])]
        return states[processes.process_id if len(states) == processes.num_processes else 0]

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
            f"the checkpoint {self.name!r} comes from {before} processes, and data that each "
            f"process divides itself can't be divided again among {now}. Start {before} "
            "processes, or pass data that ipufit divides."
        )

    def meter(self, metrics: MetricSet, processes: Processes) -> Document:
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

    def choices(self, processes: Processes) -> Optional[Dict[str, str]]:
        """Return the kernel choices that were measured to be the fastest."""
        choices: Optional[Dict[str, str]] = self.apart(processes)["choices"]
        return choices

    @property
    def described(self) -> Dict[str, object]:
        """The entry of History for a run that goes on from here."""
        place = self.tree["place"]
        data = "read again up to there" if self.in_epoch else "from the start of an epoch"
        if place is not None and place["own"] is not None:
            data = "by its own state"
        return {"checkpoint": self.name, "update": self.done, "epoch": self.epoch, "data": data}

    @property
    def done(self) -> int:
        """Updates that the run had made when the checkpoint was written."""
        return int(self.document["updates"] - self.run["first_update"])


def _check_form(checkpoint: RestoredState) -> RestoredState:
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
    if not all(type(checkpoint.run[name]) is int for name in ("first_update", "first_epoch")):
        raise ValueError("the run has no beginning")
    best = checkpoint.best
    is_named = isinstance(best["name"], (str, type(None)))
    if not is_named or type(best["value"]) not in (float, type(None)):
        raise ValueError(f"its best is {best!r}")
    for name in _PARTS:
        tree[name]
    for each in tree.get("apart", []):
        for name in ("random", "place", "choices", "metrics"):
            each[name]
    _check_configuration(document)
    choices = tree["choices"] or {}
    if not all(type(each) is str for pair in choices.items() for each in pair):
        raise ValueError("its choices are not names")
    _check_optimizer(tree["optimizer"])
    return checkpoint


def _check_configuration(document: Document) -> None:
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
        raise ValueError("its list of changes is not a list of strings")


def _check_optimizer(state: Document) -> None:
    """Make sure that it has the form of ``torch.optim.Optimizer.state_dict()``.

    torch itself takes over what it does not understand, and fails in a later update.

    Raises:
        ValueError, TypeError, KeyError: it has not.
    """
    for key, values in state["state"].items():
        if type(key) is not int:
            raise ValueError(f"it has optimizer state of {key!r}")
        for name, value in values.items():
            _check_value(name, value)
    for group in state["param_groups"]:
        if not all(type(each) is int for each in group["params"]):
            raise ValueError("a group of parameters holds no indices")
        for name, value in group.items():
            if name != "params":
                _check_value(name, value)


def _check_value(name: object, value: object) -> None:
    if type(name) is not str:
        raise ValueError(f"the optimizer has a value without a name, {name!r}")
    leaves, _ = flatten(value)
    if not all(leaf is None or isinstance(leaf, (Tensor, str, *NUMBERS)) for leaf in leaves):
        raise ValueError(f"{name} of the optimizer is a {type(value).__name__}")


def _stored_generators() -> Dict[str, object]:
    """Read the states of Python's, NumPy's and torch's generators, as a checkpoint holds them."""
    states = generator_states()
    if "numpy" in states:
        kind, keys, position, has_gauss, cached = states["numpy"]
        states["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return states


def load_generators(states: Document) -> None:
    """Let those generators that are here go on from the states in a checkpoint."""
    usable = {name: state for name, state in states.items() if name != "numpy"}
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        kind, keys, *rest = states["numpy"]
        usable["numpy"] = (kind, numpy.array(keys, dtype="uint32"), *rest)
    set_generators(usable)


def split(module: nn.Module, state: TrainState) -> Tuple[Named, Named]:
    """Parameters and buffers of replica 0: those of the module's ``state_dict``, and all others.

    A tensor with several names is under each of them in the first.
    """
    tensors = {**state.weights, **state.buffers[0]}
    first = _first_names(module)
    named: Named = {}
    for name, value in module.state_dict().items():
        tensor = tensors.get(first.get(name, name))
        if tensor is None and isinstance(value, Tensor):
            tensor = value.detach()  # extra state
        if tensor is not None:
            named[name] = tensor
    exported = {first.get(name, name) for name in named}
    return named, {name: value for name, value in tensors.items() if name not in exported}


def merge(module: nn.Module, named: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Named:
    """Parameters and buffers by the names that programs know them by."""
    first = _first_names(module)
    return {**{first.get(name, name): value for name, value in named.items()}, **others}


def _first_names(module: nn.Module) -> Dict[str, str]:
    """For every name of a tensor, the first one."""
    name_by_id: Dict[int, str] = {}
    first_names: Dict[str, str] = {}
    named: List[Tuple[str, Tensor]] = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        first_names[name] = name_by_id.setdefault(id(tensor), name)
    return first_names
