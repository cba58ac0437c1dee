"""Of several processes the first one writes the report, and says what it stands for."""

import json

import pytest

from ipufit.report.run import Run
from tests.processes.launching import run_processes

SCRIPT = """
    import sys
    import torch, ipufit
    torch.manual_seed(0)
    model = ipufit.Model(torch.nn.Linear(3, 2))
    model.compile("sgd", "mse")
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    report = ipufit.Report(sys.argv[1], profiler=profiler)
    x, y = torch.randn(22, 3), torch.randn(22, 2)
    history = model.fit(x, y, batch_size=2, epochs=2, ipus=2, callbacks=report, verbose=0)
    print(history.history["loss"][-1])
"""


@pytest.mark.long
def test_one_report_has_the_samples_and_losses_of_all_processes(tmp_path):
    ends = run_processes(SCRIPT, 2, args=(str(tmp_path / "run"),))
    assert [end.code for end in ends] == [0, 0], list(map(str, ends))
    run = Run.read(str(tmp_path / "run"))
    assert sum(run.rows["samples"]) == 44
    losses = {float(end.stdout) for end in ends}
    assert {run.facts["history"]["history"]["loss"][-1][1]} == losses
    environment = run.facts["environment"]
    assert environment["processes"].startswith("Process 0 of 2")
    assert environment["report"] == (
        "seconds, memory and warnings are of process 0; losses and samples of all"
    )
    # The profiler of the first one alone was started.
    events = json.loads((tmp_path / "run" / "torch_trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "ipufit compute" for event in events) == len(run.rows["begin"])
