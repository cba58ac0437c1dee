"""Findings about a model, from a recording of it and the table of facts."""

from __future__ import annotations

from typing import Iterable, Iterator, Optional, Sequence, Tuple

import torch
from torch import nn

from ipufit.core.batch import MicroBatch
from ipufit.core.objective_arguments import dtype_name
from ipufit.core.train_config import TrainConfig
from ipufit.engines.ipu.preflight.facts import (
    CHANGED,
    CONSTANT,
    SETTINGS,
    SUPPORTED,
    DeviceTensor,
    DispatchedCall,
    Fact,
    ParameterGroup,
    Table,
    refused_arguments,
    refused_settings,
    unlisted,
)
from ipufit.engines.ipu.preflight.recording import Recording, record
from ipufit.engines.ipu.preflight.report import PreflightFinding, PreflightReport, merged
from ipufit.losses import Loss
from ipufit.tracing.source_map import Origin

_OPERATORS = "operators"


def preflight(
    module: nn.Module,
    loss: Loss,
    optimizer: Optional[torch.optim.Optimizer],
    config: TrainConfig,
    batch: MicroBatch,
    table: Optional[Table] = None,
) -> PreflightReport:
    """Look up a model in the table of facts.

    Args:
        module: the user's module.
        loss: its normal form.
        optimizer: None for a model that only evaluates and predicts.
        config: what else ``compile`` was told.
        batch: a micro-batch.
        table: the facts; None for all.
    """
    table = table or Table()
    trains = optimizer is not None
    recording = record(
        module,
        loss,
        batch,
        trains,
        config.precision,
        lambda name: table.knows(_OPERATORS, name),
    )
    findings = [
        *of_calls(table, recording.calls),
        *_of_modules(table, recording),
        *_of_failure(table, recording),
        *_of_changes(table, recording),
        *_of_tensors(table, module, loss, batch),
    ]
    if optimizer is not None:
        findings += [
            *_of_bodies(table, recording),
            *_of_optimizer(table, optimizer),
        ]
    findings += _of_config(config, optimizer)
    if recording.is_loss_left_out:
        findings.append(PreflightFinding(unlisted("losses"), "a loss without a target", "loss"))
    kinds = {call.name for call in recording.calls}
    failure = recording.failure
    stopped = failure.brief if failure is not None else None
    doubts = tuple(". ".join(doubt) for doubt in recording.doubts)
    return PreflightReport(type(module).__name__, merged(findings), len(kinds), stopped, doubts)


def _findings(
    facts: Iterable[Fact], origin: Origin, what: Optional[str] = None
) -> Iterator[PreflightFinding]:
    """Yield what facts say of something that ran, None for what they are about."""
    for fact in facts:
        if fact.verdict != SUPPORTED:
            yield PreflightFinding.at(fact, fact.key if what is None else what, origin)


def of_calls(table: Table, calls: Sequence[DispatchedCall]) -> Iterator[PreflightFinding]:
    """Yield findings about operators."""
    for call in calls:
        if call.is_constant_result and call.is_whole and table.knows(_OPERATORS, CONSTANT):
            continue
        facts = table.of(_OPERATORS, call.name, call)
        if call.is_whole and not facts:
            facts = [unlisted(_OPERATORS, call.name)]
        yield from _findings(facts, call.origin)


def _of_modules(table: Table, recording: Recording) -> Iterator[PreflightFinding]:
    for module, origin in recording.modules.items():
        for kind in type(module).__mro__:
            if kind.__module__.startswith("torch.nn"):
                yield from _findings(table.of("layers", kind.__name__, module), origin)
                break


def _of_failure(table: Table, recording: Recording) -> Iterator[PreflightFinding]:
    failure = recording.failure
    if failure is None:
        return
    origin = Origin(recording.failed_in, file=failure.file, line=failure.line)
    facts = table.of("control flow", str(failure.cause))
    yield from _findings(facts or [unlisted("control flow", cause=failure.brief)], origin)


def _of_bodies(table: Table, recording: Recording) -> Iterator[PreflightFinding]:
    for name, origin in recording.bodies.items():
        yield from _findings(table.of("control flow", name), origin)


def _of_changes(table: Table, recording: Recording) -> Iterator[PreflightFinding]:
    for name, (dtype, origin) in recording.changed.items():
        what = f"{name!r} of {dtype_name(dtype)}, which forward changes"
        yield from _findings(table.of("dtypes", CHANGED, dtype), origin, what)


def _of_tensors(
    table: Table, module: nn.Module, loss: Loss, batch: MicroBatch
) -> Iterator[PreflightFinding]:
    for what, owner, device_tensor in _device_tensors(module, loss, batch):
        dtype = dtype_name(device_tensor.tensor.dtype)
        facts = [*table.of("dtypes", dtype, device_tensor), *table.of("dtypes", "*", device_tensor)]
        if not table.knows("dtypes", dtype):
            facts.append(unlisted("dtypes", dtype))
        yield from _findings(facts, Origin(owner), f"{what} of {dtype}")


def _device_tensors(
    module: nn.Module, loss: Loss, batch: MicroBatch
) -> Iterator[Tuple[str, Optional[str], DeviceTensor]]:
    for prefix, part in (("", module), ("loss.", loss.module)):
        if part is not None:
            for name, tensor in (*part.named_parameters(), *part.named_buffers()):
                if name.rpartition(".")[2] == "num_batches_tracked":
                    # A counter of batches, which nothing reads.
                    continue
                owner = (prefix + name).rpartition(".")[0]
                yield repr(prefix + name), owner, DeviceTensor(tensor, in_module=True)
    for leaf in batch.leaves:
        yield f"an input of shape {tuple(leaf.shape)}", None, DeviceTensor(leaf, in_module=False)


def _of_optimizer(table: Table, optimizer: torch.optim.Optimizer) -> Iterator[PreflightFinding]:
    kind = type(optimizer)
    if not table.knows("optimizers", kind.__name__):
        yield PreflightFinding(unlisted("optimizers", kind.__name__), kind.__name__)
        return
    groups = optimizer.param_groups
    refused = set()
    for settings in groups:
        group = ParameterGroup(kind, settings, groups)
        for name, fact in refused_settings(group):
            refused.add(fact.key)
            yield PreflightFinding(fact, f"{kind.__name__} with {name}")
        for key in settings:
            for fact in table.of("optimizers", key, group):
                if fact.key not in refused and fact.verdict != SUPPORTED:
                    yield PreflightFinding(fact, f"{kind.__name__} with {key}={settings[key]}")


def _of_config(config: TrainConfig, optimizer: object) -> Iterator[PreflightFinding]:
    for name, fact in refused_arguments(config):
        yield PreflightFinding(fact, name)
    bound = SETTINGS["global_clipnorm"]
    has_bound = optimizer is not None and config.clip.global_norm is not None
    if has_bound and bound.applies(type(optimizer)):
        yield PreflightFinding(bound, f"Clip(global_norm=...) with {type(optimizer).__name__}")
