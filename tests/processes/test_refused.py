"""What processes are told that want different things, or what several can't do."""

import json

import pytest

from ipufit.engines.embedded.inductor.requirements import missing
from tests.processes.launching import ROOT, run_copies

SCRIPT = (ROOT / "tests" / "processes" / "refused.py").read_text()

SAME = (
    " Start all of them with the same program, arguments and seed, and pass the whole data to "
    "each; each takes its own share."
)
DIFFERENT = {
    "module": (
        "parameter or buffer number 1, but process 0 has 'bias, (3,), torch.float32, trained' and "
        "process 1 has 'nothing'."
    ),
    "class": "class of the module, but process 0 has 'Linear' and process 1 has 'Sequential'.",
    "optimizer": "class of the optimizer, but process 0 has 'SGD' and process 1 has 'Adam'.",
    "clip": (
        'settings of compile, but process 0 has {"gradient_reduction": "mean", "clipnorm": "0.1"} '
        'and process 1 has {"gradient_reduction": "mean", "clipnorm": "1.1"}.'
    ),
    "length": "number of samples, but process 0 has 20 and process 1 has 19.",
    "batch_size": "batch size, but process 0 has 2 and process 1 has 3.",
    "replicas": "number of ipus in each, but process 0 has 1 and process 1 has 2.",
    "epochs": "epochs, but process 0 has [0, 1] and process 1 has [0, 2].",
    "seed": "seed, but process 0 has 1 and process 1 has 2.",
    "callbacks": 'callbacks, but process 0 has [] and process 1 has ["Callback"].',
    "version": "version of ipufit, but process 0 has '0.1.0' and process 1 has '0.0.9'.",
}
CUT = (
    "Let it yield only the samples of this process and wrap it in ipufit.Sharded(loader), or "
    "pass tensors, a map-style dataset, or a DataLoader over one."
)
IN_ONE = "works in one process, but this is process 0 of 2. "
SEARCH = f"{IN_ONE}Run it in one process, and pass the result to the others."
REFUSED = {
    "lazy": (
        "ConfigurationError",
        "every parameter must have a shape, but 'weight' of LazyLinear gets its shape in the first "
        "forward. Call the module once on an example before ipufit.Model(module).",
    ),
    "sampler": (
        "DataError",
        "training data: each process already reads its own part of the DataLoader, but its "
        "DistributedSampler divides the samples too, and repeats some to make the parts equal. "
        "Leave the sampler out: DataLoader(dataset, batch_size, shuffle=True).",
    ),
    "stream": (
        "DataError",
        "training data: each of 2 processes must read different samples, but Stream does not "
        "check which part to yield. Let its __iter__ call torch.utils.data.get_worker_info(), "
        f"which counts the workers of all processes. {CUT}",
    ),
    "iterable": (
        "DataError",
        "training data: each of 2 processes must read different samples, but a generator may "
        f"yield the same ones in all of them. {CUT}",
    ),
    "no batches": (
        "DataError",
        "training data: each of 2 processes must know how large the batches of the others are, "
        "but a DataLoader with batch_size=None makes them in the dataset. Use batch_size or "
        "batch_sampler, or divide it yourself and wrap it in ipufit.Sharded(loader).",
    ),
    "metric": (
        "MetricError",
        "each of 2 processes sees a part of the samples, but there is no way to combine the states "
        "of 'Unknown' (Unknown). Use a plain torchmetrics metric, or a callable metric(prediction, "
        "target).",
    ),
    "inductor": (
        "ConfigurationError",
        f"jit='inductor' {IN_ONE}It compiles a whole update into one piece, which can't "
        "communicate. Use jit='auto', 'kernels' or 'graph'.",
    ),
    "on_batch": (
        "ConfigurationError",
        f"A call with a single batch {IN_ONE}Call fit, evaluate or predict.",
    ),
    "find_lr": ("ConfigurationError", f"find_lr {SEARCH}"),
    "find_batch_size": ("ConfigurationError", f"find_batch_size {SEARCH}"),
    "compare": (
        "ConfigurationError",
        f"compare {IN_ONE}Compare in one process: all processes run the same program.",
    ),
    "invariance": (
        "ConfigurationError",
        (
            f"check_invariance {IN_ONE}Check in one process: its replicas behave like those of all "
            "processes."
        ),
    ),
    "detection": (
        "ConfigurationError",
        f"detect_nan=True {IN_ONE}Leave it out, or train in one process with the same ipus=.",
    ),
    "restarts": (
        "ConfigurationError",
        f"max_restarts=1 {IN_ONE}Leave it out, and let the launcher restart: torchrun "
        "--max-restarts.",
    ),
    "weights": (
        "DataError",
        "training data, batches 4 to 5: an update needs a sample_weight above zero, but all of its "
        "weights are zero, so nothing would be learned. Leave such samples out, or use larger or "
        "shuffled batches.",
    ),
    "sharded tensor": (
        "DataError",
        "Sharded takes an iterable of this process's batches, such as a DataLoader, got Tensor. "
        "Pass tensors, arrays and datasets directly: each process reads its part of them.",
    ),
}
LOST = (
    "DataError: training data, batch 6: sample 13 of Failing could not be read: KeyError: "
    "'thirteen'. Fix that sample, or leave it out; its traceback is above."
)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """By process, type and text of the errors, by name of what was tried."""
    folder = tmp_path_factory.mktemp("refused")
    for ended in run_copies(SCRIPT, 2, args=(str(folder),)):
        assert ended.code == 0, str(ended)
    return [json.loads((folder / f"{each}.json").read_text()) for each in (0, 1)]


@pytest.mark.few
@pytest.mark.parametrize("name", DIFFERENT)
def test_all_learn_what_differs_before_anything_is_done(told, name):
    text = f"all processes of a run must have the same {DIFFERENT[name]}{SAME}"
    assert [each[name] for each in told] == [["ProcessError", text]] * 2


def test_another_order_is_found_before_the_first_update(told):
    text = (
        "all processes must use the same order of samples, of which each reads its part, but "
        "process 1 has another order than process 0. Use the same seed in all of them, for the "
        "generator of the DataLoader or for your own sampler."
    )
    assert [each["order"] for each in told] == [["ProcessError", text]] * 2
    assert [each["unchanged"] for each in told] == [True, True]


@pytest.mark.parametrize("name", REFUSED)
def test_what_several_processes_cannot_do_is_refused(told, name):
    if name == "inductor" and missing() is not None:
        pytest.skip(missing())
    assert tuple(told[0][name]) == REFUSED[name]
    assert told[1][name][0] == REFUSED[name][0]


def test_an_error_of_one_before_the_start_leaves_the_others_as_they_were(told):
    own = "epochs must be an integer of at least 1 or a range such as range(3, 10), got 0."
    assert told[1]["arguments of one"] == ["ConfigurationError", own]
    assert told[0]["arguments of one"] == [
        "ProcessError",
        "all processes must complete this step, but process 1 of 2 failed: ConfigurationError: "
        f"{own} Read the output of that process, and fix it there.",
    ]


def test_what_one_process_does_alone_is_an_error_in_all(told):
    text = (
        "all processes must do the same at the same time, but process 0 is at 'stop' and process 1 "
        "at 'check'. Call fit, evaluate and predict in all of them, also from callbacks, never in "
        "only one."
    )
    assert [each["alone"] for each in told] == [["ProcessError", text]] * 2


def test_an_error_of_one_in_the_middle_ends_all(told):
    assert told[0]["sample of one"] == ["DataError", LOST.partition(": ")[2]]
    kind, text = told[1]["sample of one"]
    assert kind == "ProcessError"
    assert text.startswith(
        f"all processes of a run must continue together, but process 0 of 2 ended with {LOST}"
    )
    for each in told:
        kind, text = each["afterwards"]
        assert kind == "ProcessError"
        assert text.startswith("a process that left the others can't reconnect")


def test_streams_that_are_cut_reach_all_with_every_sample_once(told):
    """Two processes with 13 and 7 samples, too, end every epoch together."""
    assert told[0]["works"] == told[1]["works"]
    assert [name for name, *_ in told[0]["works"]] == [
        "asking",
        "asking workers",
        "sharded list",
        "sharded stream",
    ]
    for _, rows, losses, _ in told[0]["works"]:
        assert rows == [20.0, 20.0]
        assert losses[1] < losses[0]


def test_explain_says_which_process_it_is(told):
    for number, each in enumerate(told):
        plan = [line for line in each["explained"] if "process" in line.lower()]
        assert plan == [
            "  replicas                2  copies of the model, each with its own micro-batches; 1 "
            "in each process",
            "IPUs of each process: 1 planned, 1 used (1 replica x 1 stage), none idle.",
            f"Processes: 2, with 2 IPUs and 2 replicas in all; this is {number}.",
            f"Process {number} of 2, started by a launcher that sets RANK, number {number} on this "
            "machine. In every update the gradients of all processes are added, 36 bytes each; the "
            "timeout is 600 s.",
        ]


LATE = """
import sys
import warnings
sys.path.insert(0, '.')
import torch
from torch import nn
import ipufit


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = nn.Linear(2, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        if x.dim() == 2:
            return self.net(x) * self.scale
        assert x.sum().item() < 1e9
        return self.net(x.sum(1)) * (self.scale if x.max().item() < KEEPS_BELOW else 1)


KEEPS_BELOW = int(sys.argv[1])
torch.manual_seed(0)
net = Late()
groups = [{"params": net.net.parameters()}, {"params": [net.scale]}]
model = ipufit.Model(net)
model.compile(torch.optim.SGD(groups, 0.1), "cross_entropy")
rows, labels = torch.ones(2, 2), torch.tensor([0, 1])
batches = [(rows, labels)] * 2 + [(rows[:, None] * size, labels) for size in (1, 1, 2, 2)]
warnings.simplefilter("ignore")
try:
    model.fit(batches, epochs=1, verbose=0)
    model._session.engine.carried.overlap = None
    model.fit(batches[2:], epochs=1, verbose=0)
except ipufit.errors.IpufitError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("keeps_below", "text"),
    [
        *(
            (
                below,
                "CaptureError over several processes, beside recorded batches or with "
                "Memory(shard=...), a batch that the module itself computes must give every "
                "parameter a gradient that the first ones do, but one in update "
                f"{update} gives 'scale' none. Multiply what is left out by zero, or use "
                "compile(..., run_eagerly=True) without shard=.",
            )
            for below, update in ((0, 1), (2, 2))
        ),
        (
            3,
            "CaptureError over several processes the first batch of a fit must be one that can be "
            "recorded, but that of this process can't be. Let the loader begin with another one, "
            "or use compile(..., run_eagerly=True).",
        ),
    ],
)
def test_a_late_shape_that_cannot_be_recorded_goes_along_with_the_others(keeps_below, text):
    """What all processes could not agree on is refused."""
    for ended in run_copies(LATE, 2, args=(str(keeps_below),)):
        assert ended.stdout.strip() == text, str(ended)
