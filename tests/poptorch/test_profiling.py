"""Profiling channels: spans that torch's profiler shows."""

import copy
import pickle

import pytest
import torch

import ipufit.poptorch as poptorch
from ipufit.poptorch._tracing import Trace, traced


class Worker:
    def __init__(self):
        self.done = []

    def work(self, amount, times=1):
        self.done.append(amount * times)
        return len(self.done)


def spans(act):
    """The names of the spans that the profiler sees, and how often each came."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        act()
    events = [event.name for event in profile.events()]
    return {name: events.count(name) for name in events if name.startswith("Mine.")}


def test_a_tracepoint_is_a_span():
    channel = poptorch.profiling.Channel("Mine")

    def act():
        with channel.tracepoint("outer"), channel.tracepoint("inner"):
            torch.ones(2).sum()

    assert spans(act) == {"Mine.outer": 1, "Mine.inner": 1}


def test_every_call_of_an_instrumented_method_is_a_span():
    worker = Worker()
    assert poptorch.profiling.Channel("Mine").instrument(worker, "work") is worker
    results = []
    assert spans(lambda: results.extend([worker.work(2), worker.work(2, times=3)])) == {
        "Mine.work": 2
    }
    assert (results, worker.done) == ([1, 2], [2, 6])
    assert "work" not in vars(Worker())
    # Data loaders copy and send what they instrument.
    assert copy.deepcopy(worker).work(1) == 3


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor([index * index])


def test_methods_that_python_calls_are_spans_too():
    """The class of the object is exchanged, that of others is not."""
    squares = poptorch.profiling.Channel("Mine").instrument(Squares(), "__getitem__", "__len__")
    found = []
    assert spans(lambda: found.extend([squares[3].item(), len(squares)])) == {
        "Mine.__getitem__": 1,
        "Mine.__len__": 1,
    }
    assert found == [9, 6]
    assert isinstance(squares, Squares)
    assert type(squares).__name__ == "Squares"
    assert spans(lambda: Squares()[3]) == {}


@pytest.mark.parametrize(
    "send", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_what_is_sent_elsewhere_is_of_the_class_itself(send):
    squares = poptorch.profiling.Channel("Mine").instrument(Squares(), "__getitem__", "__len__")
    squares.extra = [1]
    sent = send(squares)
    assert type(sent) is Squares
    assert sent.extra == [1]
    assert spans(lambda: squares[1]) == {"Mine.__getitem__": 1}


def test_a_dataset_and_a_loader_can_be_instrumented():
    channel = poptorch.profiling.Channel("Mine")
    squares = channel.instrument(Squares(), "__getitem__")
    options = poptorch.Options().deviceIterations(2)
    loader = poptorch.DataLoader(options, squares, batch_size=1)
    assert channel.instrument(loader, "__iter__", "terminate") is loader
    rows = []

    def act():
        rows.extend(batch.tolist() for batch in loader)
        loader.terminate()

    assert spans(act) == {"Mine.__iter__": 1, "Mine.__getitem__": 6, "Mine.terminate": 1}
    assert rows == [[[0], [1]], [[4], [9]], [[16], [25]]]


def test_an_instrumented_forward_keeps_its_signature():
    class Net(torch.nn.Module):
        def forward(self, x, times=2):
            return x * times

    net = poptorch.profiling.Channel("Mine").instrument(Net(), "forward")
    model = poptorch.inferenceModel(net)
    assert model(torch.ones(1), times=3).item() == 3.0


def test_an_object_that_takes_no_attributes_stays_as_it_is():
    channel, numbers = poptorch.profiling.Channel("Mine"), [1, 2]
    assert channel.instrument(numbers, "__getitem__", "append") is numbers
    assert spans(lambda: numbers.append(numbers[0])) == {}
    assert numbers == [1, 2, 1]


def test_a_method_that_is_not_there_is_refused():
    with pytest.raises(AttributeError, match="rest"):
        poptorch.profiling.Channel("Mine").instrument(Worker(), "rest")


def test_a_span_does_not_get_into_a_recording():
    channel = poptorch.profiling.Channel("Mine")

    def act():
        with traced(Trace(training=False)), channel.tracepoint("inside"):
            torch.ones(2).sum()

    assert spans(act) == {}
