"""How the processes of a run begin together: the same work, the same weights, parts of the data."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import socket
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional

import torch
from torch import Tensor

from ipufit._version import __version__
from ipufit.core.compile_arguments import CUDAGRAPH, INDUCTOR
from ipufit.core.plan import Plan
from ipufit.errors import ProcessError
from ipufit.optim.several import name_of_optimizer
from ipufit.processes import Processes, common
from ipufit.tracing.validate import refuse_unready
from ipufit.training.arguments import FitConfig, InferenceConfig
from ipufit.training.session import Session
from ipufit.utils.random_streams import draw_seed
from ipufit.utils.state import device_of

if TYPE_CHECKING:
    from ipufit.checkpoint.training_state import RestoredState


def sync_run_config(session: Session, given: FitConfig) -> FitConfig:
    """Agree on what is trained, and begin with what process 0 has: checkpoint, seed and weights.

    Raises:
        CheckpointError, ConfigurationError, DataError: the run can't go on from its checkpoint.
        ProcessError: the processes want different things; nothing has been changed.
    """
    processes = session.processes
    if processes.is_distributed:
        processes.assert_equal_across_ranks(
            **_facts(session, given.plan, given.source.is_portioned), **_of_fit(given)
        )
        _agree_on_tensors(session)
        jit = session.config.jit
        if jit in (INDUCTOR, CUDAGRAPH):
            processes.run_on_all_ranks(
                lambda: session.processes.require_single(f"jit={jit!r}", _OTHER_JIT)
            )
        _check_device(session)
    restored = _restore_on_all_ranks(processes, given)
    given = processes.run_on_all_ranks(functools.partial(given.going_on_from, restored))
    seed = processes.run_on_rank_zero(
        lambda: draw_seed() if given.asked_seed is None else given.asked_seed
    )
    if processes.is_distributed:
        _spread(session, with_optimizer=True)
    return dataclasses.replace(given, seed=seed)


def sync_inference_config(session: Session, given: InferenceConfig) -> None:
    """Agree on what is evaluated or predicted, with the weights of process 0.

    Raises:
        ProcessError: the processes want different things.
    """
    processes = session.processes
    if processes.is_distributed:
        facts = _facts(session, given.plan, given.source.is_portioned)
        processes.assert_equal_across_ranks(call=given.mode.value, seed=given.seed, **facts)
        _agree_on_tensors(session)
        _check_device(session)
        if not session.is_training:
            _spread(session, with_optimizer=False)


def _restore_on_all_ranks(processes: Processes, given: FitConfig) -> Optional[RestoredState]:
    """The checkpoint to go on from, which process 0 alone reads."""
    restored: List[RestoredState] = []

    def read() -> Any:
        if given.checkpoint is None:
            return []
        # Imported here, as below: many runs keep no checkpoints.
        from ipufit.checkpoint.manager import find

        restored.extend(each for each in [find(given.checkpoint)] if each is not None)
        return [dict(vars(each)) for each in restored]

    told = processes.run_on_rank_zero(read)
    if told and not restored:
        from ipufit.checkpoint.training_state import RestoredState

        restored.extend(RestoredState(**each) for each in told)
    return next(iter(restored), None)


def _facts(session: Session, plan: Plan, is_portioned: bool) -> Dict[str, object]:
    """Return the settings that all processes must share, by names that a user understands."""
    module, loss = session.module, session.loss
    facts = {
        "version_of_ipufit": __version__,
        "version_of_torch": torch.__version__.partition("+")[0],
        "engine": session.engine.name,
        "class_of_the_module": type(module).__name__,
        "loss": [loss.reduction, loss.normalize, loss.in_module, loss.inputs, loss.targets],
        "metrics": list(session.metrics.names),
        "settings_of_compile": {
            name: str(value) for name, value in session.config.describe().items()
        },
        "batch_size": plan.micro_batch_size,
        "number_of_ipus_in_each": plan.ipus,
        "device_iterations": plan.device_iterations,
        "gradient_accumulation": plan.gradient_accumulation,
        "way_to_divide_the_data": is_portioned,
    }
    if is_portioned:
        facts["number_of_samples"] = plan.samples
    return facts


def _agree_on_tensors(session: Session) -> None:
    """Make sure that all have a module of the same form.

    Raises:
        ConfigurationError: a parameter has no shape yet, so that it can't be compared.
        ProcessError: naming the first parameter or buffer that differs.
    """
    module, processes = session.module, session.processes
    processes.run_on_all_ranks(lambda: refuse_unready(module))
    named: List[Any] = [*module.named_parameters(), *module.named_buffers()]
    trained = {id(p) for p in module.parameters() if p.requires_grad}
    parameters = [
        f"{name}, {tuple(t.shape)}, {t.dtype}{', trained' * (id(t) in trained)}"
        for name, t in named
    ]
    if len(set(processes.gather(_digest(parameters)))) == 1:
        return
    told = processes.gather(parameters)
    for number, every in enumerate(itertools.zip_longest(*told, fillvalue="nothing")):
        if len(set(every)) > 1:
            mine = parameters[number] if number < len(parameters) else "nothing"
            processes.assert_equal_across_ranks(**{f"parameter_or_buffer_number_{number}": mine})


_OTHER_JIT = (
    "It compiles a whole update into one piece, which can't communicate. Use jit='auto', 'kernels' "
    "or 'graph'."
)


def _check_device(session: Session) -> None:
    """Each process needs a GPU for itself, if it has any, and tensors that can be exchanged.

    Raises:
        ProcessError: in all processes, if two of them are on one GPU, or on another device.
    """
    device = device_of(session.module)
    if device.type not in ("cpu", "cuda"):
        raise common(
            ProcessError(
                "several processes exchange tensors on CPUs and CUDA devices, but "
                f"{type(session.module).__name__} is on {device}. Train in one process, or move "
                "the module to such a device."
            )
        )
    told = session.processes.gather([socket.gethostname(), str(device)])
    for process, place in enumerate(told):
        if device.type == "cuda" and place in told[:process]:
            text = (
                f"each process needs its own GPU, but processes {told.index(place)} and {process} "
                f"are both on {place[1]} of {place[0]}. Move the module to cuda:N, where N is the "
                "number of the process on its machine: LOCAL_RANK of torchrun."
            )
            raise common(ProcessError(text))


def _of_fit(given: FitConfig) -> Dict[str, object]:
    held_out = given.held_out
    return {
        "epochs": [given.epochs.start, given.epochs.stop],
        "steps_per_epoch": given.plan.fixed_updates,
        "seed": given.asked_seed,
        "callbacks": [type(each).__name__ for each in given.callbacks],
        "every_updates": [each.every_updates for each in given.callbacks],
        "number_of_validation_samples": None if held_out is None else held_out.plan.samples,
        "validation_epochs": _digest(given.validation_epochs),
        "checkpoint": None if given.checkpoint is None else given.checkpoint.every_updates,
    }


def _digest(values: Iterable[object]) -> str:
    text = json.dumps(list(values)).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _spread(session: Session, with_optimizer: bool) -> None:
    """Weights, buffers and the optimizer's state become those of process 0."""
    modules = [session.module, *([session.loss.module] if session.loss.module is not None else [])]
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    if with_optimizer and session.optimizer is not None:
        tensors += _state_of(session, session.optimizer)
    with torch.no_grad():
        session.processes.broadcast(tensors)


def _state_of(session: Session, optimizer: torch.optim.Optimizer) -> List[Tensor]:
    """The tensors in an optimizer's state, which must be of one form in all processes."""
    groups = optimizer.param_groups
    found: List[Tensor] = []
    form: List[object] = []
    for group in groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        form.append({name: str(value) for name, value in sorted(settings.items())})
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in sorted(state.items()):
                is_tensor = isinstance(value, Tensor)
                form.append([name, [*value.shape] if is_tensor else str(value)])
                found += [value] if is_tensor else []
    session.processes.assert_equal_across_ranks(
        class_of_the_optimizer=name_of_optimizer(optimizer),
        settings_and_state_of_the_optimizer=_digest(form),
    )
    return found
