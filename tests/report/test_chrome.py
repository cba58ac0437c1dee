"""The trace: events that viewers accept, whose times add up to those of the run."""

import json
from collections import defaultdict

import pytest
import torch
from torch import nn

import ipufit
from ipufit.report.chrome import MOST_COUNTS, MOST_TASKS, render_trace
from ipufit.report.page import write_page
from ipufit.report.run import TRACE, Run
from tests.report.runs_made import AFTER, EACH, busy_rows, made, written

SECOND = 1e6


def events_of(run):
    """What a viewer reads, and its own facts."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    trace = json.loads(render_trace(run), parse_constant=refuse)
    check(trace["traceEvents"])
    return trace["traceEvents"], trace["otherData"]


def check(events):
    """The rules of the Trace Event Format for the kinds of events that are used."""
    lanes, named = defaultdict(list), set()
    for event in events:
        assert event["ph"] in "XMC"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            lanes[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "M":
            named.add((event["pid"], event["tid"], event["name"]))
        else:
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
            assert len(event["args"]) == 1
    for (process, thread), own in lanes.items():
        assert (process, 0, "process_name") in named
        assert (process, thread, "thread_name") in named
        check_nesting(own)


def check_nesting(events):
    """Each event lies within another one or beside it; whole nanoseconds, so nothing is rounded."""
    stack = []
    for event in events:
        begin = round(event["ts"] * 1000)
        end = begin + round(event["dur"] * 1000)
        while stack and stack[-1][1] <= begin:
            stack.pop()
        if stack:
            assert stack[-1][0] <= begin
            assert end <= stack[-1][1], event
        stack.append((begin, end))


def lane(events, name, process="host"):
    """The events of a thread, by its name and its process's."""
    pid = next(e["pid"] for e in events if e.get("args", {}).get("name") == process)
    tid = next(
        e["tid"] for e in events if e["pid"] == pid and e.get("args", {}).get("name") == name
    )
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]


def seconds(events):
    """By name, how long they are together."""
    found = defaultdict(float)
    for event in events:
        found[event["name"]] += event["dur"] / SECOND
    return dict(found)


def test_times_are_those_of_the_run():
    events, about = events_of(made(epochs=2, executions=3))
    own = lane(events, "executions")
    whole = sum(EACH.values())
    assert seconds(own) == {
        "execution": 6 * whole,
        **{name: 6 * value for name, value in EACH.items()},
        **{name: 2 * value for name, value in AFTER.items()},
    }
    executions = [e for e in own if e["name"] == "execution"]
    length = 3 * whole + sum(AFTER.values())
    begins = [2.0 + epoch * length + i * whole for epoch in range(2) for i in range(3)]
    assert [e["ts"] / SECOND for e in executions] == begins
    assert executions[4]["args"] == {"update": 4, "updates": 1, "samples": 4}
    assert about["seconds by phase"]["validation"] == 2.0


def test_phases_stand_in_one_order_and_validation_behind_its_epoch():
    events, about = events_of(made(epochs=1, executions=1))
    names = [event["name"] for event in lane(events, "executions")]
    assert names == ["execution", "data", "compute", "metrics", "validation", "callbacks"]
    assert about["phases"].startswith("For each execution the time of each phase is measured")
    validation = lane(events, "executions")[-2]
    assert validation["args"] == {"after the executions of epoch": 1}
    assert validation["ts"] / SECOND == 2.0 + sum(EACH.values())


def test_epochs_have_a_line_of_their_own():
    events, _ = events_of(made(epochs=2, executions=3))
    first, second = lane(events, "epochs")
    assert first["name"] == "epoch 1"
    assert second["ts"] == first["ts"] + first["dur"]
    assert second["args"]["first_update"] == 3
    assert second["args"]["seconds"]["validation"] == 1.0


def test_the_epoch_in_which_a_run_was_killed_is_shown():
    run = made(epochs=2, executions=3, status="running")
    run.facts["epochs"].pop()
    events, _ = events_of(run)
    last = lane(events, "epochs")[-1]
    assert last["name"] == "epoch 2"
    assert last["args"] == {"first_update": 3, "finished": False}
    assert last["dur"] / SECOND == 3 * sum(EACH.values())


def test_counters_are_those_of_the_rows_and_leave_out_what_is_no_number():
    events, about = events_of(made(epochs=1, executions=3))
    counters = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"]["value"])
    assert counters == {
        "loss": [1.0, 0.5, pytest.approx(1 / 3, abs=1e-6)],
        "samples/s": [pytest.approx(4 / sum(EACH.values()), rel=1e-6)],
        "memory": [1000.0, 1001.0, 1002.0],
        "learning rate": [0.1],
    }
    assert "counters" not in about


def test_rows_that_seem_to_overlap_by_a_clock_tick_are_drawn_in_turn():
    run = made(epochs=1, executions=3)
    run.rows["begin"][1] -= 3e-7
    events, _ = events_of(run)
    executions = [e for e in lane(events, "executions") if e["name"] == "execution"]
    assert executions[1]["ts"] == executions[0]["ts"] + executions[0]["dur"]


def test_rows_of_two_epochs_say_nothing_of_what_lies_between():
    """A long run joins rows: which phases are whose is not known any more."""
    run = made(epochs=2, executions=3)
    run.rows["executions"][2] = 2
    run.rows["epoch"][3] = 0
    events, _ = events_of(run)
    names = [event["name"] for event in lane(events, "executions")]
    assert "validation" not in names
    assert "2 executions" in names


TIMELINE = {
    "tasks": [[0, 0, False, 0.0, 0.25], [1, 0, False, 0.25, 0.5], [1, 0, True, 0.5, 1.0]],
    "total": 2.0,
    "utilisation": 0.5,
    "schedule": "grouped",
}


def test_the_pipeline_is_scaled_to_the_measured_update():
    events, about = events_of(made(plan={"timeline": TIMELINE}))
    process = "pipeline (estimated)"
    (first,) = lane(events, "stage 0", process)
    second, back = lane(events, "stage 1", process)
    scale = EACH["compute"] / 2.0
    assert (first["name"], first["ts"], first["dur"]) == ("forward 0", 0, 0.25 * scale * SECOND)
    assert (back["name"], back["ts"], back["dur"]) == (
        "backward 0",
        0.5 * scale * SECOND,
        0.5 * scale * SECOND,
    )
    assert second["ts"] == first["dur"]
    assert about["pipeline"] == {
        "what": "one update, as the plan estimates it",
        "schedule": "grouped",
        "utilisation": 0.5,
        "one second is": "one second: the estimate is scaled to the measured mean of an update",
        "tasks left out": 0,
    }


def test_without_a_measured_update_the_pipeline_has_its_own_unit():
    run = made(epochs=0, plan={"timeline": TIMELINE})
    events, about = events_of(run)
    assert lane(events, "stage 1", "pipeline (estimated)")[1]["dur"] == 0.5 * SECOND
    assert about["pipeline"]["one second is"].startswith("the estimated time of one micro-batch")


def test_operators_are_drawn_by_direction():
    rows = [
        {
            "operator": "aten.addmm",
            "direction": direction,
            "module": "</script>",
            "kind": "Linear",
            "file": None,
            "line": None,
            "source": "",
            "calls": 2,
            "seconds": 0.5,
            "flops": 8,
            "bytes": 16,
        }
        for direction in ("forward", "forward", "backward")
    ]
    events, about = events_of(made(operators={"rows": rows}))
    process = "operators (one micro-batch)"
    first, second = lane(events, "forward", process)
    assert (second["ts"], second["dur"]) == (0.5 * SECOND, 0.5 * SECOND)
    assert first["args"] == {
        **{"module": "</script>", "kind": "Linear", "calls": 2, "flops": 8, "bytes": 16}
    }
    assert len(lane(events, "backward", process)) == 1
    assert about["operators"].startswith(
        "Each event stands for all calls of one operator on one source line"
    )


@pytest.mark.long
@pytest.mark.parametrize("zero", [("capture", "validation", "report", "checkpoint"), ()])
def test_the_longest_table_stays_below_its_size(zero):
    """20,000 rows; where every phase takes time in each of them, two rows are drawn as one."""
    rows = busy_rows(20_000)
    for name in zero:
        rows[name] = [0.0] * 20_000
    line = {**TIMELINE, "tasks": [[i % 4, i, False, i / 7, (i + 1) / 7] for i in range(30_000)]}
    run = Run("runs/1", made(plan={"timeline": line}).facts, rows)
    text = render_trace(run)
    assert len(text) < 20e6
    trace = json.loads(text)
    about = trace["otherData"]
    drawn = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]
    if zero:
        assert drawn.count("execution") == 20_000
        assert about["counters"] == "Counters show the first of 2 consecutive executions."
    else:
        assert drawn.count("2 executions") == 10_000
        assert about["executions"] == "Two in a row are drawn as one."
    counts = [e["name"] for e in trace["traceEvents"] if e["ph"] == "C"]
    assert counts.count("loss") == MOST_COUNTS
    assert about["pipeline"]["tasks left out"] == 30_000 - MOST_TASKS


def test_a_fit_leaves_its_trace_beside_the_facts(tmp_path):
    """Of a real run everything nests, and adds up to what run.json says."""
    torch.manual_seed(0)
    model = ipufit.Model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    model.compile("sgd", "mse", metrics=["mean_squared_error"])
    x, y = torch.randn(20, 3), torch.randn(20, 2)
    model.fit(
        *(x, y),
        batch_size=4,
        epochs=3,
        validation_split=0.2,
        gradient_accumulation=2,
        callbacks=[ipufit.Report(tmp_path)],
        verbose=0,
    )
    trace = json.loads((tmp_path / TRACE).read_text())
    events, run = trace["traceEvents"], Run.read(str(tmp_path))
    check(events)
    own = seconds(lane(events, "executions"))
    for phase in ("data", "compute", "metrics", "validation"):
        of_epochs = sum(epoch["phases"][phase] for epoch in run.facts["epochs"])
        # A microsecond of an epoch may be left out.
        assert own[phase] == pytest.approx(of_epochs, abs=4e-6)
    assert own["execution"] == pytest.approx(
        sum(sum(run.rows[phase]) for phase in run.facts["phases"]), abs=1e-6
    )
    assert len(lane(events, "stage 0", "pipeline (estimated)")) == 4


def test_making_it_again_gives_the_same_trace(tmp_path):
    folder = written(tmp_path / "run")
    write_page(str(folder))
    first = (folder / TRACE).read_text()
    write_page(str(folder))
    assert (folder / TRACE).read_text() == first
    assert first == render_trace(Run.read(str(folder)))
