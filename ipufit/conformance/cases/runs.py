"""Runs of a small model: batches, modes, reductions, losses, optimizers, strategies."""

from __future__ import annotations

from ipufit.conformance.kit import scenario
from ipufit.conformance.scenario import LOSSES, OptimizerSpec

MOMENTUM = OptimizerSpec.of("torch", "SGD", lr=0.1, momentum=0.9)

ORDER = (
    "In which order do micro-batches stand in a batch, with several device iterations and several "
    "replicas at once? Read: iteration, accumulation step, replica."
)
RETURNED = "What is the loss that a replica returns where gradients are summed? Read: its own."
GROUPS = (
    "Which micro-batch does a group of replicas read, with several iterations or accumulation "
    "steps? Read: the group stands where the replica would."
)
EVERY_N = "Does EveryN count device iterations or micro-batches? Read: device iterations."


def _training() -> None:
    """Run every output mode with iterations, accumulation and replicas, alone and together."""
    for iterations, accumulation, replicas in [
        (1, 1, 1),
        (4, 1, 1),
        (1, 3, 1),
        (1, 1, 2),
        (4, 2, 1),
        (1, 2, 2),
        (4, 1, 2),
        (4, 2, 2),
    ]:
        counts = {"iterations": iterations, "accumulation": accumulation, "replicas": replicas}
        named = f"di={iterations} ga={accumulation} R={replicas}"
        question = ORDER if iterations > 1 and replicas > 1 else ""
        for mode in ("Default", "Final", "All", "Sum"):
            scenario(f"training/{named} {mode}", question, mode=mode, optimizer=MOMENTUM, **counts)
        if iterations > 1:
            for period in (2, 4):
                scenario(
                    f"training/{named} EveryN({period})",
                    question or (EVERY_N if accumulation > 1 else ""),
                    mode="EveryN",
                    period=period,
                    optimizer=MOMENTUM,
                    **counts,
                )
        if accumulation * replicas > 1:
            for loss in ("mse", "mse sum"):
                work = {"reduction": "Sum", "loss": loss, **counts}
                # What becomes of the weights is known, if not what is returned.
                compared = ("out",) if replicas > 1 else ("out", "loss", "losses")
                scenario(f"reduction/{named} Sum of {loss}", question, compared=compared, **work)
                if replicas > 1:
                    name = f"reduction/{named} Sum of {loss}, returned"
                    scenario(name, RETURNED, compared=("loss",), calls=1, **work)
            scenario(f"reduction/{named} Mean of mse sum", question, loss="mse sum", **counts)


def _other_training() -> None:
    for strategy in ("Running", "Post"):
        counts = {"accumulation": 3, "mean_strategy": strategy}
        scenario(f"reduction/Mean {strategy}", **counts)
        scenario(f"reduction/Mean {strategy} R=2", replicas=2, **counts)
    scenario(
        "reduction/Mean PostAndLoss",
        "Does the third strategy compile at all? Read: it does not; if it does, it is Mean.",
        accumulation=3,
        mean_strategy="PostAndLoss",
    )
    scenario("training/micro-batch of one", micro_batch=1, iterations=2, accumulation=2)
    scenario("training/BatchNorm sees the micro-batch", norm=True, accumulation=2, micro_batch=4)
    scenario(
        "training/BatchNorm's statistics move once per micro-batch",
        norm=True,
        iterations=2,
        accumulation=2,
        micro_batch=4,
    )
    scenario("training/BatchNorm of every replica", norm=True, replicas=2, micro_batch=4)
    for kind in ("Consecutive", "Orthogonal"):
        group = {"replicas": 4, "input_group": (kind, 2)}
        scenario(f"training/input groups {kind}", **group)
        scenario(f"training/input groups {kind} ga=2", GROUPS, accumulation=2, **group)
        scenario(f"training/input groups {kind} di=2", GROUPS, iterations=2, **group)


def _losses() -> None:
    for loss in LOSSES:
        scenario(f"loss/{loss}", loss=loss)
    for loss in ("cross entropy sum", "identity sum", "identity of two"):
        scenario(f"loss/{loss} ga=2 R=2", loss=loss, accumulation=2, replicas=2)


def _optimizers() -> None:
    """Run the optimizers of torch and of PopTorch for several updates, so that state matters."""
    work = {"iterations": 2, "accumulation": 2, "calls": 2}
    for home in ("torch", "poptorch"):
        for name, settings in [
            ("SGD", {"lr": 0.1}),
            ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
            ("SGD", {"lr": 0.1, "momentum": 0.9}),
            ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
            ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
            ("Adam", {"lr": 0.05}),
            ("Adam", {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
            ("AdamW", {"lr": 0.05}),
            ("AdamW", {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}),
            ("RMSprop", {"lr": 0.01}),
            ("RMSprop", {"lr": 0.01, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1}),
            ("RMSprop", {"lr": 0.01, "alpha": 0.9, "momentum": 0.8}),
            ("RMSprop", {"lr": 0.01, "alpha": 0.9, "momentum": 0.8, "centered": True}),
        ]:
            optimizer = OptimizerSpec.of(home, name, **settings)
            scenario(f"optimizer/{optimizer}", optimizer=optimizer, **work)
    for name, settings in [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "loss_scaling": 1024.0}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "loss_scaling": 4.0, "use_combined_accum": True}),
        ("SGD", {"lr": 0.1, "velocity_scaling": 8.0, "momentum": 0.9, "use_combined_accum": True}),
        ("SGD", {"lr": 0.1, "max_grad_norm": 0.05}),
        ("Adam", {"lr": 0.05, "loss_scaling": 1024.0}),
        ("Adam", {"lr": 0.05, "eps": 0.1, "max_grad_norm": 0.05}),
        ("AdamW", {"lr": 0.05, "loss_scaling": 1024.0}),
        ("RMSprop", {"lr": 0.01, "use_tf_variant": True}),
        ("RMSprop", {"lr": 0.01, "use_tf_variant": True, "alpha": 0.9, "momentum": 0.8}),
        ("LAMB", {"lr": 0.05}),
        ("LAMB", {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}),
        ("LAMB", {"lr": 0.05, "max_weight_norm": 0.5}),
    ]:
        optimizer = OptimizerSpec.of("poptorch", name, **settings)
        scenario(f"optimizer/{optimizer}", optimizer=optimizer, **work)
    clipped = OptimizerSpec.of("poptorch", "SGD", lr=0.1, loss_scaling=64.0, max_grad_norm=0.05)
    scenario("optimizer/clipping with loss scaling", optimizer=clipped, replicas=2, **work)
    scenario(
        "optimizer/AdamW without bias correction",
        "Does AdamW(bias_correction=False) do anything? Read: no.",
        optimizer=OptimizerSpec.of("poptorch", "AdamW", lr=0.05, bias_correction=False),
        **work,
    )


def _strategies() -> None:
    for name in ("pipelined", "sharded", "parallel phased", "serial phased"):
        work = {"strategy": name, "accumulation": 3, "optimizer": MOMENTUM}
        scenario(f"strategy/{name}", **work)
        scenario(f"strategy/{name} di=2", iterations=2, **work)
        scenario(f"strategy/{name} R=2", replicas=2, mode="Final", **work)
        scenario(f"strategy/{name} inference", strategy=name, training=False, iterations=4)


def _inference() -> None:
    for iterations, replicas in [(1, 1), (4, 1), (1, 2), (4, 2)]:
        question = ORDER if iterations > 1 and replicas > 1 else ""
        work = {"training": False, "iterations": iterations, "replicas": replicas}
        for mode in ("Default", "All", "Final", "Sum"):
            scenario(f"inference/di={iterations} R={replicas} {mode}", question, mode=mode, **work)
        if iterations > 1:
            named = f"inference/di={iterations} R={replicas} EveryN(2)"
            scenario(named, question, mode="EveryN", period=2, **work)
    for kind in ("Consecutive", "Orthogonal"):
        group = {"training": False, "replicas": 4, "input_group": (kind, 2)}
        scenario(f"inference/input groups {kind}", **group)


_training()
_other_training()
_losses()
_optimizers()
_strategies()
_inference()
