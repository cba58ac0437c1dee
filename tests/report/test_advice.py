"""What a report says against a run, and what to do."""

import copy

import pytest
import torch
from torch import nn

import ipufit
from ipufit.report.advice import advised
from ipufit.report.run import Run
from ipufit.utils.phase_timer import PHASES

ROWS = {"executions": [50.0, 50.0], "updates": [50.0, 50.0], "skipped": [0.0, 0.0]}
STAGE = {"memory": 10}


def facts(**phases):
    """Of a run of ten seconds with nothing against it."""
    seconds = {**dict.fromkeys(PHASES, 0.0), **phases}
    seconds["compute"] += 10 - sum(seconds.values())
    return {
        "seconds": 10.0,
        "phases": seconds,
        "params": {"device_iterations": 1, "gradient_accumulation": 2, "engine": "embedded"},
        "history": {"epoch": list(range(9)), "history": {}},
        "plan": {
            "stages": [STAGE, STAGE],
            "fits": True,
            "memory": 20,
            "strategy": "pipelined",
            "unused": [],
            "timeline": {"utilisation": 0.95},
            "least_accumulation": {"0.8": 3, "0.9": 7},
        },
    }


def said(given, rows=ROWS):
    """Texts and cures."""
    found = advised(given, rows)
    assert all(each["kind"] == "advice" and each["count"] == 1 for each in found)
    return [(each["text"], each["cure"]) for each in found]


def changed(**options):
    """The facts with other parameters."""
    found = facts()
    found["params"].update(options)
    return found


def in_plan(**values):
    """The facts with another plan."""
    found = facts()
    found["plan"].update(copy.deepcopy(values))
    return found


def with_values(values, name="val_loss"):
    """The facts with these values of the epochs."""
    found = facts()
    found["history"]["history"][name] = [[place, value] for place, value in enumerate(values)]
    return found


def test_a_run_without_faults_has_no_advice():
    """Nor has one that has only begun."""
    assert said(facts()) == []
    assert said({"seconds": 0.0}) == []
    assert said({**facts(), "plan": {"missing": "why"}}) == []


CASES = {
    "data": (
        facts(data=2.0),
        "20.0 % of training is spent waiting for data.",
        "Prepare executions in advance with loading=Loading(prefetch=1), or let workers read: "
        "DataLoader(num_workers=2, persistent_workers=True).",
    ),
    "metrics": (
        facts(metrics=2.0),
        "20.0 % of training is spent on computing loss and metrics.",
        "Compute fewer metrics while training",
    ),
    "callbacks": (
        facts(callbacks=2.0),
        "20.0 % of training is spent on callbacks.",
        "Look for a callback that does much work after every execution",
    ),
    "checkpoint": (
        facts(checkpoint=2.0),
        "20.0 % of training is spent on writing checkpoints.",
        "Write fewer checkpoints",
    ),
    "capture": (
        facts(capture=3.0),
        "30.0 % of the run time was spent on recording and compiling the program.",
        "This happens once for each shape of micro-batch",
    ),
    "validation": (
        facts(validation=6.0),
        "60.0 % of the time is spent on validation.",
        "Validate less often (Validation(freq=2))",
    ),
    "around": (
        facts(other=4.0),
        "40.0 % of the time of an execution is spent around the program, because an execution is a "
        "single small update.",
        "Make several updates per execution: fit(device_iterations=16).",
    ),
    "dropped": (
        changed(dropped_samples=1234),
        "1,234 samples of every epoch are left out, because the loader has drop_last=True.",
        "Leave drop_last out",
    ),
    "unused": (
        in_plan(unused=["a", "b", "c", "d", "e"]),
        "The module does not use a, b, c and 2 more: such parameters get no gradient.",
        "Call the layer in forward, freeze it, or remove it.",
    ),
    "bubble": (
        in_plan(timeline={"utilisation": 0.5}),
        "The IPUs of the pipeline are busy 50.0 % of the time, by estimate.",
        "gradient_accumulation=7 would reach 90.0 %.",
    ),
    "uneven": (
        in_plan(timeline={"utilisation": 0.5}, least_accumulation={"0.9": None}),
        "The IPUs of the pipeline are busy 50.0 % of the time, by estimate.",
        "Stages of unequal time wait for the slowest one",
    ),
    "too large": (
        in_plan(stages=[STAGE, {"memory": 5 * 2**30}], memory=2**20, fits=False),
        "Stage 1 needs 5,120.0 MiB of 1.0 MiB on its IPU, by estimate.",
        "Divide the model into more stages",
    ),
    "past its best": (
        with_values([3, 2, 1, 1.5, 1.6, 1.7]),
        "val_loss was best in epoch 3, 1, and 1.7 at the end.",
        "Stop there, and keep the best weights: EarlyStopping(monitor='val_loss', "
        "restore_best_weights=True).",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_against_a_run_is_said_with_its_cure(case):
    """Each alone."""
    given, text, cure = CASES[case]
    ((found, instead),) = said(given)
    assert found == text
    assert instead.startswith(cure)


NOTHING = {
    "a short run": {**facts(data=0.5), "seconds": 0.9},
    "several updates per execution": {**facts(other=4.0), **{"params": {"device_iterations": 4}}},
    "an evenly filled pipeline": in_plan(timeline={"utilisation": 0.81}),
    "one stage after the other": in_plan(strategy="sharded", timeline={"utilisation": 0.5}),
    "too large for an IPU, but on none": in_plan(stages=[STAGE], fits=False),
    "a little worse": with_values([3, 2, 1, 1.01, 1.02, 1.03]),
    "the best is near": with_values([3, 2, 1, 5, 5]),
    "larger is better": with_values([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "val_accuracy"),
    "nobody knows which way": with_values([3, 2, 1, 5, 5, 5], "val_thing"),
    "not a validation": with_values([3, 2, 1, 5, 5, 5], "loss"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_is_said_of_what_is_no_fault(case):
    """A warning too many is read by nobody."""
    assert said(NOTHING[case]) == []


def test_data_that_is_prepared_ahead_wants_more_workers():
    """The cure depends on what is done already."""
    given = facts(data=2.0)
    given["params"]["prefetch"] = 1
    ((_, cure),) = said(given)
    assert cure == "Give the DataLoader more workers, or make reading a sample cheaper."


def test_skipped_updates_are_counted():
    """Over all executions."""
    ((text, cure),) = said(facts(), {**ROWS, "skipped": [2.0, 3.0]})
    assert text == (
        "5 of 100 updates were skipped, because their gradient was not finite at the loss scale."
    )
    assert "use a smaller loss_scale" in cure


def test_a_real_run_says_what_its_pipeline_lacks(tmp_path):
    """With the number that the plan has for it."""
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = ipufit.Model(nn.Sequential(*layers))
    model.compile("sgd", "mse", parallel=ipufit.Parallel(stages={str(i): i for i in range(4)}))
    model.fit(
        torch.ones(70, 8),
        torch.ones(70, 8),
        batch_size=2,
        ipus=4,
        gradient_accumulation=7,
        callbacks=[ipufit.Report(tmp_path)],
        verbose=0,
    )
    told = Run.read(str(tmp_path)).facts["warnings"]
    (advice,) = [each for each in told if "pipeline" in each["text"]]
    plan = model.plan(gradient_accumulation=7)
    assert advice["text"].startswith(
        f"The IPUs of the pipeline are busy {100 * plan.utilisation():.1f} % of the time"
    )
    assert f"gradient_accumulation={plan.least_accumulation(0.9)} " in advice["cure"]
