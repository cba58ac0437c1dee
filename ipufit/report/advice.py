"""Advice from the numbers of a run: what slows it down or spoils it, and what to do."""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, Optional, Tuple

from ipufit.callbacks.history import best_place, direction_of
from ipufit.planner.costs import by_ipu
from ipufit.planner.rendering import share, size
from ipufit.report.run import Facts

Columns = Mapping[str, List[float]]
_Said = Tuple[str, str]

# Shares of the time of training from which a phase is worth a word, and seconds of a run below
# which no time is.
_WORTH = {"data": 0.1, "metrics": 0.15, "callbacks": 0.1, "checkpoint": 0.1}
_LEAST_SECONDS = 1.0
_CAPTURE = 0.25
_VALIDATION = 0.5
_BETWEEN = 0.3
_UTILISATION = 0.8
_WANTED = "0.9"
# A run has gone on too long if its best epoch lies so many epochs back and was so much better.
_PAST_BEST, _WORSE = 3, 0.05

_CURES = {
    "metrics": "Compute fewer metrics while training, return fewer outputs with outputs='final', "
    "or compute metrics only in validation.",
    "callbacks": "Look for a callback that does much work after every execution: give it "
    "every_updates, or put it into ipufit.callbacks.Asynchronous.",
    "checkpoint": "Write fewer checkpoints: use a larger every_updates of ipufit.Checkpoint, or "
    "write them only at the end of epochs.",
}
_NAMES = {
    "metrics": "computing loss and metrics",
    "callbacks": "callbacks",
    "checkpoint": "writing checkpoints",
}


def advised(facts: Facts, rows: Columns) -> List[Dict[str, object]]:
    """Derive advice, each with its cure, from the facts and executions of a run.

    Args:
        facts: of the run, as ``run.json`` has them; a run that has just begun lacks most of them.
        rows: of its executions, by column.
    """
    advice: List[_Said] = []
    if "params" in facts:
        advice += _of_time(facts)
        advice += _of_work(facts, rows)
        advice += _of_values(facts)
    if "missing" not in facts.get("plan", {"missing": ""}):
        advice += _of_stages(facts["plan"], facts.get("params", {}))
    return [
        {"kind": "advice", "text": text, "cure": cure, "category": "", "place": "", "count": 1}
        for text, cure in advice
    ]


def _of_time(facts: Facts) -> Iterator[_Said]:
    phases = facts["phases"]
    apart = phases["capture"] + phases["report"]
    training = facts["seconds"] - apart - phases["validation"]
    if facts["seconds"] < _LEAST_SECONDS or training <= 0:
        return
    part = phases["data"] / training
    if part >= _WORTH["data"]:
        yield f"{share(part)} of training is spent waiting for data.", _data_cure(facts["params"])
    for name, cure in _CURES.items():
        part = phases[name] / training
        if part >= _WORTH[name]:
            yield f"{share(part)} of training is spent on {_NAMES[name]}.", cure
    part = phases["capture"] / facts["seconds"]
    if part >= _CAPTURE:
        text = f"{share(part)} of the run time was spent on recording and compiling the program."
        cure = "This happens once for each shape of micro-batch: longer runs have a smaller share, "
        cure += "jit='graph' compiles nothing, and another fit of the model records nothing again."
        yield text, cure
    part = phases["validation"] / (training + phases["validation"])
    if part >= _VALIDATION:
        text = f"{share(part)} of the time is spent on validation."
        yield text, "Validate less often (Validation(freq=2)) or on less (Validation(steps=...))."


def _data_cure(params: Mapping[str, object]) -> str:
    if not params.get("prefetch") and not params.get("trainer"):
        return (
            "Prepare executions in advance with loading=Loading(prefetch=1), or let workers read: "
            "DataLoader(num_workers=2, persistent_workers=True)."
        )
    return "Give the DataLoader more workers, or make reading a sample cheaper."


def _of_work(facts: Facts, rows: Columns) -> Iterator[_Said]:
    params, phases = facts["params"], facts["phases"]
    executions = sum(rows["executions"])
    working = phases["compute"] + phases["to_device"] + phases["anchors"]
    between = phases["other"] + phases["metrics"] + phases["callbacks"]
    if (
        executions
        and params.get("device_iterations") == 1
        and facts["seconds"] >= _LEAST_SECONDS
        and between / (between + working) >= _BETWEEN
    ):
        # What takes the arguments of an execution.
        caller = "IPUStrategy" if params.get("trainer") else "fit"
        yield (
            f"{share(between / (between + working))} of the time of an execution is spent around "
            "the program, because an execution is a single small update.",
            f"Make several updates per execution: {caller}(device_iterations=16). The "
            "numbers stay the same.",
        )
    if params.get("dropped_samples"):
        yield (
            f"{params['dropped_samples']:,} samples of every epoch are left out, because the "
            "loader has drop_last=True.",
            "Leave drop_last out: a smaller last batch is trained on exactly.",
        )
    skipped, updates = sum(rows["skipped"]), sum(rows["updates"])
    if skipped:
        yield (
            f"{skipped:,.0f} of {updates:,.0f} updates were skipped, because their gradient was "
            "not finite at the loss scale.",
            "A few are normal: a dynamic scale finds its value this way. If there are many, use a "
            "smaller loss_scale, or precision='mixed_bfloat16', which needs none.",
        )


def _of_values(facts: Facts) -> Iterator[_Said]:
    history, directions = facts["history"], facts["params"].get("directions")
    for name, pairs in history["history"].items():
        direction = direction_of(name, directions) if name.startswith("val_") else None
        values = [float(value) for _, value in pairs]
        best = best_place(values, direction) if direction else None
        if best is None or len(values) - 1 - best < _PAST_BEST:
            continue
        change = abs(values[-1] - values[best])
        if change < _WORSE * abs(values[best]):
            continue
        epoch = history["epoch"][pairs[best][0]] + 1  # as pages and progress bars count
        yield (
            f"{name} was best in epoch {epoch}, {values[best]:.4g}, and {values[-1]:.4g} at the "
            "end.",
            f"Stop there, and keep the best weights: EarlyStopping(monitor={name!r}, "
            "restore_best_weights=True).",
        )
        return


def _of_stages(plan: Facts, params: Facts) -> Iterator[_Said]:
    unused = plan.get("unused", ())
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        yield (
            f"The module does not use {', '.join(unused[:3])}{more}: such parameters get no "
            "gradient.",
            "Call the layer in forward, freeze it, or remove it.",
        )
    stages = plan["stages"]
    if len(stages) > 1:
        yield from _of_pipeline(plan, params)
    if not plan["fits"] and (len(stages) > 1 or params.get("engine") == "ipu"):
        places = plan.get("places", ())
        memory = by_ipu([stage["memory"] for stage in stages], places)
        need, room = max(memory), plan["memory"]
        largest = memory.index(need)
        of = f"{size(need)} of {size(room)}"
        yield (
            f"The stages on IPU {largest} need {of}, by estimate."
            if places
            else f"Stage {largest} needs {of} on its IPU, by estimate.",
            "Divide the model into more stages (Parallel(stages='auto', ipus_per_replica=...)), "
            "recompute (Memory(recompute=True)), serialise large layers, or use smaller "
            "micro-batches.",
        )


def _of_pipeline(plan: Facts, params: Facts) -> Iterator[_Said]:
    used = plan["timeline"]["utilisation"]
    if plan["strategy"] != "pipelined" or used >= _UTILISATION:
        return
    count: Optional[int] = plan.get("least_accumulation", {}).get(_WANTED)
    text = f"The IPUs of the pipeline are busy {share(used)} of the time, by estimate."
    if count is not None and count > params.get("gradient_accumulation", 0):
        yield text, f"gradient_accumulation={count} would reach {share(float(_WANTED))}."
    else:
        cure = "Stages of unequal time wait for the slowest one with any accumulation: divide "
        cure += "the work more evenly, as with Parallel(stages='auto', ipus_per_replica=...)."
        yield text, cure
