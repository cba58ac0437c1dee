"""Face of a LightningModule for programs: a module whose forward is one of its steps."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, ContextManager, Dict, Iterator, List, Mapping, Optional, Set, Sized, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.logged_values import LogRule, report
from ipufit.errors import CaptureError, ConfigurationError, LossError
from ipufit.lightning_module.inspection import overrides, parameters_of, parts_without_metrics
from ipufit.lightning_module.logging import Notes, attached, no_log, step_log
from ipufit.lightning_module.manual import ManualRun
from ipufit.lightning_module.metric_calls import MetricCalls
from ipufit.lightning_module.trainer_proxy import BatchIndex, StepTrainerProxy
from ipufit.partition.own_blocks import blocks_without_end
from ipufit.utils import tree
from ipufit.utils.state import replaced

_ROLE = "_ipufit_role"
# Why metric objects can't be called, and what to do.
_IN_PREDICT = "Call it on what predict returns."


class Steps(nn.Module):
    """Module that shares attributes, parameters and parts with the user's LightningModule.

    Metric objects are no parts of it: the host updates them, and no program holds their state.

    Called with a batch it runs ``training_step`` in train mode, and in eval mode the step of its
    role. What the user's module has besides is found here too.

    Attributes:
        lightning: the user's module.
        manual: run of ``training_step`` whose optimizer steps are watched; else None.
        notes: where a Trainer keeps logged values, how each was logged, by step and name; else
            None.
    """

    __slots__ = ("lightning", "manual", "notes")

    lightning: nn.Module
    manual: Optional[ManualRun]
    notes: Optional[Dict[str, Notes]]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.lightning, name)

    # The hooks of the user's module are for its own forward, which the step calls.
    def __call__(self, batch: object) -> object:
        """Call :meth:`forward`."""
        return self.forward(batch)

    def forward(self, batch: object) -> object:
        """Run the step of the present role.

        Args:
            batch: as the loader gives it.

        Returns:
            A dict with "loss", or in ``predict`` what ``predict_step`` returns.
        """
        role = self.role
        name = "training_step" if role == "train" else f"{role}_step"
        size = _size(batch)
        module: Any = self.lightning
        refused = _IN_PREDICT if role == "predict" else None
        metrics = MetricCalls(module, name, refused)
        notes = None if self.notes is None else self.notes.setdefault(role, {})
        log = no_log(name) if role == "predict" else step_log(role, size, metrics, notes)
        growth = _refusing_growth(module, name)
        manual = self.manual if role == "train" else None
        watched: ContextManager[None] = contextlib.nullcontext()
        more: Mapping[str, object] = {}
        if manual is not None:
            watched, more, log = manual.watching(), manual.attributes, manual.in_turn(log)
        facts = attached(module, StepTrainerProxy(role), log, more)
        with metrics.in_place(), facts, growth, blocks_without_end(), watched:
            if overrides(module, "on_after_batch_transfer"):
                batch = module.on_after_batch_transfer(batch, 0)
            result = getattr(module, name)(batch, *self._more(name))
        if role == "predict" or manual is not None:
            return result
        return metrics.result(_trained(result) if role == "train" else _evaluated(result))

    def named_modules(
        self,
        memo: Optional[Set[nn.Module]] = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[Tuple[str, nn.Module]]:
        """Yield all parts but metric objects."""
        visited = {id(part) for part in memo or ()}
        for name, part in parts_without_metrics(self, visited, prefix, remove_duplicate):
            if memo is not None and remove_duplicate:
                memo.add(part)
            yield name, part

    def keep_notes(self) -> None:
        """Record from now on how values are logged."""
        object.__setattr__(self, "notes", {})

    @property
    def role(self) -> str:
        """The present step: "train", "validation", "test" or "predict"."""
        return "train" if self.training else str(vars(self)[_ROLE])

    def _more(self, name: str) -> Tuple[object, ...]:
        """Return the arguments of a step besides the batch."""
        signature = parameters_of(getattr(self.lightning, name))
        if signature is None:
            return (BatchIndex(),)
        parameters = signature.parameters
        dataloader_idx = parameters.get("dataloader_idx")
        if dataloader_idx is not None and dataloader_idx.default is dataloader_idx.empty:
            raise ConfigurationError(
                f"{type(self).__name__}.{name} must have a default for dataloader_idx, because "
                "there is only one loader. Write dataloader_idx=0."
            )
        places = [
            p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        takes_index = takes_any or "batch_idx" in parameters or len(places) > 1
        return (BatchIndex(),) if takes_index else ()

    def __deepcopy__(self, memo: Dict[int, object]) -> Steps:
        copied = steps_of(copy.deepcopy(self.lightning, memo))
        # Who records it writes into the same notes.
        object.__setattr__(copied, "notes", self.notes)
        return copied


def steps_of(module: nn.Module) -> Steps:
    """Make the face of a LightningModule, named like its class."""
    module_class = type(module)
    names = {
        "__slots__": (),
        "__module__": module_class.__module__,
        "__qualname__": module_class.__qualname__,
    }
    kind = type(module_class.__name__, (Steps,), names)
    steps: Steps = object.__new__(kind)
    vars(module).setdefault(_ROLE, "validation")
    object.__setattr__(steps, "__dict__", vars(module))
    object.__setattr__(steps, "lightning", module)
    object.__setattr__(steps, "manual", None)
    object.__setattr__(steps, "notes", None)
    return steps


def acting_as(steps: Steps, role: str) -> ContextManager[None]:
    """Run this step in eval mode, in the block."""
    return replaced((steps, _ROLE, role))


def _size(batch: object) -> int:
    leaves = tree.flatten(batch)[0]
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _trained(result: object) -> Mapping[str, object]:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise LossError(
            "training_step must return a loss of one number, got one of shape "
            f"{tuple(loss.shape)}. Return for example loss.mean()."
        )
    if isinstance(result, Tensor):
        return {"loss": result}
    if result is None:
        raise LossError(
            "training_step must return a loss, got None: a recorded program can't skip a batch. "
            "Return the loss times zero instead."
        )
    if isinstance(result, Mapping) and "loss" in result:
        return dict(result)
    raise LossError(
        "training_step must return a loss, or a dict with 'loss', got "
        f"{_described(result)}. Return for example {{'loss': loss}}."
    )


def _evaluated(result: object) -> Mapping[str, object]:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return dict(result) if isinstance(result, Mapping) else {"loss": loss}
    # There is none; a program has a place for it all the same.
    report("loss", 0.0, LogRule("last", exact=True, is_none=True))
    return {"loss": torch.zeros(())}


def _described(result: object) -> str:
    if isinstance(result, Mapping):
        return f"a dict of {', '.join(map(repr, result)) or 'nothing'}"
    return type(result).__name__


@contextlib.contextmanager
def _refusing_growth(module: nn.Module, name: str) -> Iterator[None]:
    """A list that a step adds to would hold what was recorded, once."""
    kinds = (list, dict, set)
    before: List[Tuple[str, Sized, int]] = [
        (key, value, len(value))
        for key, value in vars(module).items()
        if type(value) in kinds and not key.startswith("_")
    ]
    yield
    for key, value, length in before:
        if len(value) != length:
            raise CaptureError(
                f"{name} adds to self.{key}, but it is recorded once, so self.{key} would hold one "
                "batch's tensors without values. Log what you need with self.log, or keep it in a "
                "buffer."
            )
